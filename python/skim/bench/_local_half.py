"""The measurement of python -m skim.bench local-half: the local half of a step, on one rank and one device."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import skim


SIDE = 8192  # of the matrices of --matmuls


class NoDevice(Exception):
    """The device is not there. The message says which one is asked for."""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the JSON file. Raises NoDevice."""
    try:
        device = torch.device(arguments.device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise NoDevice(f"no device '{arguments.device}': {str(e).splitlines()[0]}") from None
    return [row for n in arguments.n for density in arguments.density for row in _rows(device, n, density, arguments)]


def _rows(device: torch.device, n: int, density: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    k = skim.entries(density, n)
    slots = range(arguments.buckets)
    residual, means = torch.zeros(n, device=device), [torch.empty(n, device=device) for _ in slots]
    factor = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) if arguments.matmuls else None

    def work() -> None:
        for _ in range(arguments.matmuls):
            torch.matmul(factor, factor)

    # What is timed for each bucket, given its mean's tensor with a new gradient in it. A step also tells its time until
    # it has selected.
    whats: dict[str, Callable[[int], float | None]] = {
        "pass": lambda slot: _nothing(residual.add_(means[slot])),
        "topk": lambda slot: _nothing(residual.abs().topk(k, sorted=False)),
    }
    ends: dict[str, Callable[[], Any]] = {}
    for kernels, code in itertools.product(arguments.kernels, arguments.codes):
        reducer = skim.Reducer(
            skim.in_process_group(1)[0], density=density, exchange="allgather", dense_below=0, value_code="f32",
            local=skim.TensorLocalHalf(kernels=kernels, **({"offload": True} if code == "offload" else {"residual_code": code})),
        )  # fmt: skip
        reducer.set_layout([(slot, [(f"x{slot}", n)]) for slot in slots])

        def bucket(slot: int, reducer: skim.Reducer = reducer) -> float:
            return reducer.reduce(slot, means[slot]).select_ns * 1e-9  # type: ignore[arg-type]

        what = kernels if code == "f32" else f"{kernels} {code}"
        whats[what], ends[what] = bucket, reducer.end_step
    seconds: dict[str, list[float]] = {what: [] for what in whats}
    selecting: dict[str, list[float]] = {what: [] for what in whats}
    for i in range(arguments.rounds + arguments.warm_up):
        for what, run in whats.items():
            for mean in means:
                mean.normal_()  # equal gradients would make the residual grow as none of a training does
            _wait(device)
            begin, of_select = time.perf_counter(), []
            for slot in slots:
                work()
                of_select.append(run(slot))
            ends.get(what, lambda: None)()
            _wait(device)
            if i >= arguments.warm_up:
                seconds[what].append(time.perf_counter() - begin)
                selecting[what] += [s for s in of_select if s is not None]
    medians = {what: statistics.median(s) for what, s in seconds.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rows = []
    for what, median in medians.items():
        rows.append({
            "what": what,
            "device": name,
            "n": n,
            "density": density,
            "ms": 1e3 * median,
            "select_ms": 1e3 * statistics.median(selecting[what]) if selecting[what] else None,
            "ratio_to_pass": median / medians["pass"],
        })  # fmt: skip
    return rows


def _nothing(_result: Any) -> None:
    """A time that is not known."""


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(*([device] if device.index is not None else []))


def table(rows: list[dict[str, Any]]) -> str:
    cells = [("what", "device", "n", "density", "ms", "select ms", "of the pass")]
    for r in rows:
        select = "-" if r["select_ms"] is None else f"{r['select_ms']:.3f}"
        cells.append((
            r["what"], r["device"], str(r["n"]), f"{r['density']:g}", f"{r['ms']:.3f}", select, f"{r['ratio_to_pass']:.2f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)
