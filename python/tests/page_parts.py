"""Runs the parts of programs that pages show, on the ranks of torchrun (page elastic: of plain processes).

Usage: page_parts.py PAGE [STORE]. PAGE: a key of PARTS. STORE: where python -m skim.store listens.

A set-up yields the names that its part takes for granted. The part runs, and then the rest of the set-up, which gets
the part's names and checks what the part did.
"""

import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn import Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel

import skim

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from blocks import block  # noqa: E402

PARTS = {}  # [page][name of the part]: its set-up
STORE = sys.argv[2] if len(sys.argv) > 2 else None


def part(page, name):
    def keep(set_up):
        PARTS.setdefault(page, {})[name] = set_up
        return set_up

    return keep


def network():
    torch.manual_seed(0)
    return Sequential(Linear(64, 128), ReLU(), Linear(128, 10))


def loss_of(model, step=0):
    """The rank's loss in a step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + rank))
    return torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))


def train(model, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def ddp(**options):
    """A DDP model and its optimizer; with options attached and trained."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options:
        skim.attach(model, optimizer=optimizer, **options)
        train(model, optimizer)
    return {"ddp_model": model, "optimizer": optimizer}


def assert_equal_on_ranks(model):
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    rank_0 = mine.clone()
    dist.broadcast(rank_0, 0)
    assert torch.equal(mine, rank_0)


def compresses(ddp_model, optimizer):
    train(ddp_model, optimizer)
    report = skim.report(ddp_model)
    # On this link dense may take less time, and then "auto" takes it.
    takes_dense = any(bucket.decision.startswith("dense") for bucket in report.buckets.values())
    assert report.compression > 1 or takes_dense, report
    assert_equal_on_ranks(ddp_model)


@part("README.md", "attach")
@part("docs/pytorch.md", "attach")
def two_lines():
    names = yield ddp()
    compresses(names["ddp_model"], names["optimizer"])


@part("docs/pytorch.md", "dry-run")
def dry_run():
    names = yield ddp()
    train(names["ddp_model"], names["optimizer"], 40)
    # It has printed its prediction and is over: the same process may now compress.
    skim.attach(names["ddp_model"], density=0.01, exchange="allgather")
    compresses(names["ddp_model"], names["optimizer"])


@part("docs/pytorch.md", "report")
def report():
    yield ddp(density=0.05)


@part("docs/pytorch.md", "replay")
def replay():
    first = ddp(density=0.05)
    other = ddp()
    yield first | {"other_model": other["ddp_model"]}
    train(other["ddp_model"], other["optimizer"])
    assert skim.report(other["ddp_model"]).choices == skim.report(first["ddp_model"]).choices


@part("docs/pytorch.md", "schedule")
def schedule():
    names = yield ddp() | {"epoch": 0}
    compresses(names["ddp_model"], names["optimizer"])


@part("docs/pytorch.md", "momentum")
def momentum():
    names = yield ddp()
    assert names["optimizer"].param_groups[0]["betas"] == (0, 0.999)
    compresses(names["ddp_model"], names["optimizer"])


@part("docs/pytorch.md", "updates-of")
def updates_of():
    names = ddp()
    names["optimizer"] = torch.optim.SGD(names["ddp_model"].parameters(), lr=0.05)
    names = yield names
    compresses(names["ddp_model"], names["optimizer"])


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x)


@part("docs/pytorch.md", "sharded")
def sharded():
    from torch.distributed.device_mesh import init_device_mesh  # these two are not in every PyTorch
    from torch.distributed.fsdp import fully_shard

    names = yield {"model": Layers(), "islands": dist.get_world_size(), "gpus": 1, "fully_shard": fully_shard,
                   "init_device_mesh": lambda _, shape, **options: init_device_mesh("cpu", shape, **options)}
    train(names["model"], names["optimizer"])
    assert skim.report(names["model"]).compression > 1


@part("docs/pytorch.md", "checkpoint")
def checkpoint():
    names = yield ddp(density=0.05) | {"rank": dist.get_rank()}
    saved = torch.load(f"checkpoint-{dist.get_rank()}.pt")
    names["ddp_model"].module.load_state_dict(saved["model"])


@part("docs/pytorch.md", "distributed-checkpoint")
def distributed_checkpoint():
    names = ddp(density=0.05) | {"dcp": dcp, "folder": "checkpoint"}
    kept = skim.compression_of(names["ddp_model"]).residuals()
    names = yield names
    for name, residual in skim.compression_of(names["ddp_model"]).residuals().items():
        assert torch.equal(residual, kept[name]), name  # a state of as many ranks


@part("docs/pytorch.md", "not-strict")
def not_strict():
    names = ddp(density=0.05)
    names = yield names | {"state": skim.state_dict(names["ddp_model"])}
    assert not names["missing"] and not names["unexpected"]


@part("docs/pytorch.md", "aggregator")
def aggregator():
    model = network()
    names = yield {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "loss": loss_of(model)}
    assert_equal_on_ranks(names["model"])


@part("docs/pytorch.md", "local-steps")
def local_steps():
    model = network()
    seen = []
    yield {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "data": range(30), "loss": loss_of,
           "evaluate": lambda model: seen.append(assert_equal_on_ranks(model))}
    assert len(seen) == 1
    assert_equal_on_ranks(model)


@part("docs/pytorch.md", "profiler")
def profiler():
    names = yield {}
    assert names["profile"].events() is not None


@part("docs/elastic.md", "group")
def group():
    model = network()
    names = yield {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    assert names["progress"]["step"] == 30


@part("docs/elastic.md", "with-ddp")
def with_ddp():
    model, progress = network(), {"step": 0}
    optimizer = torch.optim.AdamW(model.parameters())
    group = skim.ElasticGroup(STORE, state={"model": model, "optimizer": optimizer, "progress": progress}, min_ranks=2)
    names = yield {"model": model, "optimizer": optimizer, "group": group, "dist": dist,
                   "DistributedDataParallel": DistributedDataParallel}
    while progress["step"] < 10:
        train(names["model"], optimizer, 1)
        progress["step"] += 1
    assert skim.report(names["model"]).compression > 1
    group.leave()


def text_of(page, name):
    """The part, with this run's store and not too many steps."""
    return block(page, "part", name).replace('"10.0.0.1:29400"', "STORE").replace("10_000", "30")


def main():
    page = sys.argv[1]
    if STORE is None:
        dist.init_process_group("gloo")
    for name, set_up in PARTS[page].items():
        running = set_up()
        names = {"torch": torch, "skim": skim, "STORE": STORE, **next(running)}
        exec(compile(text_of(page, name), f"{page}, {name}", "exec"), names)
        with contextlib.suppress(StopIteration):
            running.send(names)
        sys.stdout.write(f"ran {name}\n")  # in one piece, which no other rank's line is in
        sys.stdout.flush()


if __name__ == "__main__":
    main()
    if STORE is None:
        dist.destroy_process_group()  # when the models are gone (docs/pytorch.md)
