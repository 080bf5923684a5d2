"""The command line of python -m skim.bench."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from typing import Any

from skim import _core

HOOKS = ("none", "barrier", "allreduce", "fp16", "bf16", "powersgd", "skim", "localsteps")
EXCHANGES = ("auto", *_core.exchanges)
DEFAULT = [*(hook for hook in HOOKS if hook not in ("barrier", "localsteps")), "skim-auto"]

DDP = """\
Measures the time of a training step under PyTorch's DistributedDataParallel for several communication hooks.

The model is an MLP with six layers of N x N and one of N x 10. N is --width: 1024 makes 6.3 million parameters. A step
is forward, backward, exchange and SGD on --batch examples per rank. Each rank is a process with one thread.

Every hook has its own processes and its own model, with the same seed. In each round the hooks take turns, while the
processes of the other hooks wait. So other load on the machine affects all hooks alike. Each round gives the ratio of
a hook's step time to that of the hook none; the table shows the median of these ratios. If a process of a hook crashes
or does not answer, the hook is left out of the rest of that run. Each process takes about 0.4 GB of memory.
"""

LOCAL_HALF = """\
Measures skim.TensorLocalHalf on one rank and one device: the gradient is added to the residual, the k largest entries
go to the host, the mean comes back.

Rows: pass is residual.add_(gradient), which reads two entries and writes one; topk is torch.topk of the magnitudes;
pytorch and triton are whole steps, with the residual code behind, if it is not f32. ms is the median of the rounds
until the device has finished, "select ms" that of the part until a bucket's entries are on the host, and "of the pass"
the ratio of ms to that of the row pass.
"""

RATE = """\
With --rate each rank, or each island, is a host in a network namespace, with a shaped link to one switch. This needs
root, Linux and iproute2, and with --latency also a C++ compiler. It makes the namespaces skimddp0, skimddp1, .. and
skimddp-switch, with addresses 10.77.9.x inside them, and the folder /run/skim-cluster-skimddp. It removes them at the
end, also after Ctrl-C or SIGTERM. It changes nothing else in the machine's network.

JSON: an array with one object per hook.
  hook, link, ranks, buckets
  exchange, density   of skim; null for other hooks
  step_ms, min_ms     median and minimum over all timed steps; the slowest rank counts in each step
  ratio_to_none       the hook's median step time / that of none, in each round; the median over rounds
  runs, failures      number of runs, and of runs in which the hook crashed, hung or refused
  failure             reason of the first failure, or null
  weights_equal       whether the parameters of all ranks were equal bit by bit at the end of every run; null for the
                      hooks none and barrier, and if no run ended
  sent_bytes          bytes per step over TCP, without headers, of the rank that sent most, with --rate and --islands
                      only to other hosts; null if the system does not count them
  parts_ms            skim's own times per step
  decisions           skim's last decision for each bucket
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m skim.bench", description=__doc__)
    parser.error = _refuse  # type: ignore[assignment, method-assign]
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _declare_ddp(commands)
    _declare_local_half(commands)
    arguments = parser.parse_args()
    if arguments.command == "ddp":
        _check_ddp(arguments)
    file = arguments.json
    written = file if file and os.path.exists(file) else os.path.dirname(file or "") or "."
    if file and (os.path.isdir(file) or not os.access(written, os.W_OK)):
        _refuse(f"--json {arguments.json}: cannot write there")
    try:
        import torch.distributed
    except ImportError:
        print("skim.bench: needs PyTorch: pip install torch", file=sys.stderr)
        return 1
    if not torch.distributed.is_gloo_available():
        print("skim.bench: needs a PyTorch with gloo", file=sys.stderr)
        return 1
    from skim.bench import _ddp, _local_half

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        rows = _ddp.measure(arguments) if arguments.command == "ddp" else _local_half.measure(arguments)
    except (_ddp.NoLink, _local_half.NoDevice, _core.InvalidArgument) as e:
        print("skim.bench: " + str(e).removeprefix("skim: "), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1)
            f.write("\n")
    print(_table(rows) if arguments.command == "ddp" else _local_half.table(rows))
    return 0


def _declare_ddp(commands: Any) -> None:
    ddp = commands.add_parser(
        "ddp",
        help="time of a step under DistributedDataParallel",
        description=DDP,
        epilog=RATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ddp.error = _refuse
    add = ddp.add_argument
    add("--json", metavar="FILE", help="write the results to this file")
    add("--hooks", type=_hooks, default=DEFAULT, metavar="LIST",
        help="comma-separated: none (no communication), barrier (ranks wait for one another but exchange nothing), "
        "allreduce, fp16, bf16, powersgd, skim (with --exchange), skim-EXCHANGE; "
        "skim@device: with local='device', as if the tensors of this CPU were on a device; "
        "localsteps: skim.LocalSteps(every=1), with --exchange, in place of DDP; "
        f"default: {','.join(DEFAULT)}")  # fmt: skip
    add("--ranks", type=_whole(1, 250), default=2, metavar="P", help="number of ranks (2)")
    add("--islands", type=_whole(2, 250), default=0, metavar="I",
        help="shard the model by fully_shard inside I islands of P/I ranks each, with the hook between them: none, "
        "allreduce (fully_shard's own), or skim (DDP, without islands)")  # fmt: skip
    add("--rate", type=_rate, metavar="RATE",
        help="rate of each rank's link, in each direction: 1gbit, 100mbit, .. (loopback)")  # fmt: skip
    add("--latency", type=_latency, metavar="TIME", help="one-way latency, with --rate: 0.2ms, 50us, .. (none)")
    add("--density", type=_density, default=0.001, metavar="D", help="fraction of entries that skim sends (0.001)")
    add("--exchange", choices=EXCHANGES, default="allgather", metavar="NAME",
        help="exchange of the hook skim: one of " + ", ".join(EXCHANGES) + " (allgather)")  # fmt: skip
    add("--value-code", choices=_core.value_codes, metavar="CODE",
        help="value code of skim's hooks: one of " + ", ".join(_core.value_codes) + " (as skim.attach)")  # fmt: skip
    add("--bucket-mb", type=_size, default=25.0, metavar="MB", help="bucket_cap_mb of DDP, bucket_mb of LocalSteps (25, as both)")
    add("--width", type=_whole(1, 10**5), default=1024, metavar="N",
        help="width of the 6 layers of the model, which has about 6 N^2 parameters (1024)")  # fmt: skip
    add("--batch", type=_whole(1, 10**6), default=32, metavar="N", help="examples per rank and step (32)")
    add("--steps", type=_whole(1, 10**6), default=20, metavar="N", help="timed steps per hook and round (20)")
    add("--rounds", type=_whole(1, 10**6), default=5, metavar="N", help="rounds per run (5)")
    add("--warm-up", type=_whole(0, 10**6), default=40, metavar="N", help="steps before the first round (40)")
    add("--runs", type=_whole(1, 10**6), default=1, metavar="N", help="runs; each starts all processes anew (1)")
    add("--timeout", type=_whole(1, 10**6), default=120, metavar="S",
        help="seconds that a hook may take for one round; after that it has failed (120)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="where the model is. cuda: the ranks share the machine's GPUs, and gloo copies between them (cpu)")  # fmt: skip


def _check_ddp(arguments: argparse.Namespace) -> None:
    if arguments.latency and not arguments.rate:
        _refuse("--latency needs --rate")
    if arguments.rate and arguments.ranks < 2:
        _refuse("--rate needs --ranks 2 or more")
    if not arguments.islands:
        return
    if arguments.ranks % arguments.islands:
        _refuse(f"--islands {arguments.islands} must divide --ranks {arguments.ranks}")
    if arguments.hooks == DEFAULT:
        arguments.hooks = ["none", "allreduce", "skim", "skim-auto"]
    wrong = [h for h in arguments.hooks if h not in ("none", "allreduce") and not h.startswith("skim")]
    if wrong:
        _refuse(f"--islands has no hook '{wrong[0]}'; there are: none, allreduce, and those of skim")


def _declare_local_half(commands: Any) -> None:
    parser = commands.add_parser(
        "local-half",
        help="time of what a step does on one device",
        description=LOCAL_HALF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = _refuse
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the results to this file")
    add("--device", default="cpu", metavar="NAME", help="device of PyTorch: cpu, cuda, cuda:1, .. (cpu)")
    add("--kernels", type=_kernels, default=["pytorch"], metavar="LIST",
        help="comma-separated: pytorch, triton (pytorch)")  # fmt: skip
    add("--codes", type=_codes, default=["f32"], metavar="LIST",
        help="comma-separated: the residual codes f32, bf16, q8, or offload (f32)")  # fmt: skip
    add("--n", type=_lengths, default=[25_000_000], metavar="LIST",
        help="comma-separated numbers of entries of a bucket (25000000)")  # fmt: skip
    add("--buckets", type=_whole(1, 1000), default=1, metavar="N", help="buckets of a step (1)")
    add("--matmuls", type=_whole(0, 1000), default=0, metavar="N",
        help="products of two bfloat16 matrices of 8192 x 8192 before each bucket, in every row (0)")  # fmt: skip
    add("--density", type=_densities, default=[0.001], metavar="LIST", help="comma-separated densities (0.001)")
    add("--rounds", type=_whole(1, 10**6), default=20, metavar="N", help="timed rounds (20)")
    add("--warm-up", type=_whole(0, 10**6), default=5, metavar="N", help="rounds before them (5)")


def _refuse(text: str) -> Any:
    print(f"skim.bench: {text} (--help)", file=sys.stderr)
    raise SystemExit(2)


def _hooks(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        base = name.removesuffix("@device")
        if name not in HOOKS and base != "skim" and base not in [f"skim-{kind}" for kind in EXCHANGES]:
            raise argparse.ArgumentTypeError(
                f"no hook '{name}'; there are: {', '.join(HOOKS)}, "
                + ", ".join(f"skim-{kind}" for kind in EXCHANGES)
                + ", and those of skim with @device"
            )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"'{text}' names a hook twice")
    return names


def _whole(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got '{text}'")
        return int(text)

    return parse


def _kernels(text: str) -> list[str]:
    for name in text.split(","):
        if name not in ("pytorch", "triton"):
            raise argparse.ArgumentTypeError(f"no kernels '{name}'; there are: pytorch, triton")
    return text.split(",")


def _codes(text: str) -> list[str]:
    for name in text.split(","):
        if name not in ("f32", "bf16", "q8", "offload"):
            raise argparse.ArgumentTypeError(f"no residual code '{name}'; there are: f32, bf16, q8, offload")
    return text.split(",")


def _lengths(text: str) -> list[int]:
    return [_whole(1, 10**9)(part) for part in text.split(",")]


def _densities(text: str) -> list[float]:
    return [_density(part) for part in text.split(",")]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _density(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got '{text}'")
    return value


def _size(text: str) -> float:
    if not 0 < (value := _number(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and below 1e6, got '{text}'")
    return value


def _rate(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", text) or _number(text[:-4]) == 0:
        raise argparse.ArgumentTypeError(f"expected a rate such as 1gbit or 100mbit, got '{text}'")
    return text


def _latency(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[um]s", text):
        raise argparse.ArgumentTypeError(f"expected a time such as 0.2ms or 50us, got '{text}'")
    return text


def _table(rows: list[dict[str, Any]]) -> str:
    def cell(value: Any, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    cells = [("hook", "link", "ranks", "density", "step ms", "min ms", "of none", "kB sent", "equal", "failures")]
    for r in rows:
        sent = None if r["sent_bytes"] is None else r["sent_bytes"] / 1e3
        equal = None if r["weights_equal"] is None else "yes" if r["weights_equal"] else "NO"
        failed = f"{r['failures']} of {r['runs']}"
        cells.append((
            r["hook"], r["link"], str(r["ranks"]), cell(r["density"], "g"), cell(r["step_ms"], ".2f"),
            cell(r["min_ms"], ".2f"), cell(r["ratio_to_none"], ".3f"), cell(sent, ".1f"), cell(equal), failed,
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
