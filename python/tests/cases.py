"""What all files of cases share. Under torchrun, they run every function case_* on all ranks, in order."""

import contextlib
import datetime
import faulthandler
import os
import sys
import traceback

import skim
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def gathered(value):
    """Those of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def expect_equal_everywhere(tensor, what, group=None):
    """what: the noun of the message."""
    everywhere = [torch.zeros_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, tensor, group=group)
    assert all(torch.equal(t, everywhere[0]) for t in everywhere), f"ranks have different {what}"


def expect(error, text, f, *args, **keywords):
    """f raises the error, with the text in its one line."""
    try:
        f(*args, **keywords)
    except error as e:
        assert text in str(e) and "\n" not in str(e), e
        return
    raise AssertionError(f"no {error.__name__}")


def expect_that_a_failed_wait_ends_backward(model, place, backward):
    """On the last rank of the exchange, the wait for a gradient raises when it comes for the place-th time, from 1 on."""
    compression, waits = skim.compression_of(model), []
    wait, last = compression.after, compression.comm.size - 1

    @contextlib.contextmanager
    def after(ready, device):
        waits.append(device)
        if compression.comm.rank == last and len(waits) == place:
            raise ZeroDivisionError("mine")
        with wait(ready, device):
            yield

    compression.after = after
    try:
        backward()
        raise AssertionError("backward did not raise")
    except ZeroDivisionError as e:
        assert compression.comm.rank == last and str(e) == "mine", e
    except skim.CommError as e:
        assert compression.comm.rank < last and e.peer == last, e


def left_out(what, before=(2, 4)):
    """Says what this PyTorch cannot do, and so is not tested. before: the oldest version that is known to do it."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) < before, what
    if dist.get_rank() == 0:
        print(f"left out, with PyTorch {torch.__version__}: {what}", flush=True)


def verdicts_of(name, verdict):
    """Those of all ranks, through the store: after a failure, the others may be in any collective. They have 60 s to come."""
    store, keys = distributed_c10d._get_default_store(), [f"verdicts/{name}/{r}" for r in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], verdict)
    try:
        store.wait(keys, datetime.timedelta(seconds=500 if verdict == "ok" else 60))
    except RuntimeError:
        return ["not all ranks came"]
    return [store.get(key).decode() for key in keys]


def run(functions, wanted):
    """Runs the cases, or those whose names are wanted, and ends the process. Rank 0 prints a verdict for each."""
    faulthandler.dump_traceback_later(570, exit=True)  # before the test that waits for this process gives up
    for name, case in list(functions.items()):
        if not name.startswith("case_") or (wanted and name.removeprefix("case_") not in wanted):
            continue
        torch.manual_seed(0)
        try:
            case()
            verdict = "ok"
        except Exception:
            verdict = "failed"
            print(f"rank {dist.get_rank()}: {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        verdicts = verdicts_of(name, verdict)
        if dist.get_rank() == 0:
            print(f"{name.removeprefix('case_')}: {'ok' if set(verdicts) == {'ok'} else 'failed'}", flush=True)
        if set(verdicts) != {"ok"}:
            os._exit(1)  # ranks may not agree any more on what comes next
    dist.destroy_process_group()
    sys.stdout.flush()
    # Not through Python's end: a thread of gloo may free the last all-gather's tensors only then, and
    # that aborts the process (PyTorch 2.13 under load).
    os._exit(0)
