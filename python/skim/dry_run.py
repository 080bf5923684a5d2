"""The dry run of skim.attach: predicts whether compression would pay while the script trains as before."""

from __future__ import annotations

import dataclasses
import json
import numbers
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from skim import _core
from skim._checks import expect_steps_of_run
from skim._hook import set_hook
from skim._options import DEFAULTS, Options
from skim._parameters import array
from skim._transport import connect
from skim.tensor_half import wait_for

DENSITIES = (0.001, 0.01, 0.1)
DEFAULT_STEPS = 20
WARM_UP = 5  # steps that are not measured, because DDP still forms its buckets and memory is touched first
WORTH = 1.1  # least speed-up that counts as worth it


@dataclasses.dataclass(frozen=True)
class Prediction:
    density: float  # 1: dense
    exchange: str
    step_s: float
    captured: float  # fraction of |g|^2 in the k largest entries of the gradient


class DryRun:
    """A dry run. skim.attach(..., dry_run=True) makes it. `verdict` is empty until all steps are measured."""

    def __init__(self, ddp: DistributedDataParallel, steps: int, timeout: float, total_steps: int = 0) -> None:
        expect_steps_of_run("skim.attach: total_steps", total_steps)
        self.comm = connect(ddp.process_group, timeout=timeout)
        self.steps, self.total_steps = steps, total_steps
        # Medians over the steps, in seconds: of the slowest rank, and exposed_s of the quickest one.
        self.step_s = self.compute_s = self.exposed_s = 0.0
        self.link: _core.Link | None = None
        self.predictions: list[Prediction] = []  # the dense one first
        self.verdict = ""
        self._group = ddp.process_group
        self._seen = 0
        self._backward_ended = 0.0
        self._pending: list[Any] = []
        self._times: list[tuple[float, float]] = []  # (step, exposed) of each step measured
        self._entries = 0  # of all buckets, once they are measured
        set_hook(ddp, self._on_bucket)

    def __str__(self) -> str:
        if not self.verdict:
            return f"skim dry run: {self._seen} of {WARM_UP + self.steps + 1} steps"
        assert self.link is not None
        rate = f", {8e-6 / self.link.beta_s_per_byte:.0f} Mbit/s" if self.link.beta_s_per_byte > 0 else ""
        lines = [
            f"skim dry run: {self.comm.size} ranks, {self._entries} gradient entries, median of {len(self._times)} "
            f"steps: {_ms(self.step_s)} a step, of which {_ms(self.exposed_s)} waiting for the sum of gradients",
            f"link: {_ms(self.link.alpha_s)} a message{rate}",
            f"{'density':>8}  {'exchange':<20}  {'step':>10}  {'speed-up':>8}  {'captured':>8}",
        ]
        for p in self.predictions:
            density = "dense" if p.density == 1.0 else f"{p.density:g}"
            lines.append(
                f"{density:>8}  {p.exchange:<20}  {_ms(p.step_s):>10}  {self.step_s / p.step_s:8.2f}  {p.captured:8.3f}"
            )
        lines.append(
            "dense: measured. Other rows: computing as measured, selection timed on this gradient, the exchange by "
            "the cost model, no overlap with backward. captured: fraction of |g|^2 that is sent at once."
        )
        return "\n".join([*lines, self.verdict])

    # ---- measuring ------------------------------------------------------------------------------

    def _on_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Averages the bucket as DDP does without a hook, and takes the times."""
        flat = bucket.buffer()
        if bucket.index() == 0:
            self._seen += 1
            self._pending = []
        flat.div_(dist.get_world_size(self._group))
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._pending.append((work, flat))
        if bucket.is_last():
            self._backward_ends([w for w, _ in self._pending], [f for _, f in self._pending])
        mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return mean

    def _backward_ends(self, works: list[Any], flats: list[torch.Tensor]) -> None:
        if self._seen <= WARM_UP or self.verdict:
            return
        device = flats[0].device
        wait_for(device)  # only now has backward ended on a GPU, too
        now = time.perf_counter()
        last, self._backward_ended = self._backward_ended, now
        for w in works:
            w.wait()
        wait_for(device)  # NCCL's wait() makes the device wait, not this thread
        exposed = time.perf_counter() - now
        if self._seen > WARM_UP + 1:
            self._times.append((now - last, exposed))
        if len(self._times) >= self.steps:
            self._conclude([f.detach() for f in flats])

    def _conclude(self, gradients: list[torch.Tensor]) -> None:
        """gradients: by bucket, of the last step."""
        step = statistics.median(t[0] for t in self._times)
        exposed = statistics.median(t[1] for t in self._times)
        self._entries = sum(g.numel() for g in gradients)
        mine = {"step": step, "exposed": exposed}
        of_all = [json.loads(m) for m in self.comm.allgather(json.dumps(mine).encode())]
        self.step_s = max(m["step"] for m in of_all)
        # Ranks that are early also wait for the others, and no exchange changes that. So take the least wait.
        self.exposed_s = min(m["exposed"] for m in of_all)
        self.compute_s = max(0.0, self.step_s - self.exposed_s)
        self.link = self.comm.measure_link() if self.comm.size > 1 else _core.Link(0.0, 0.0)
        predictions = [Prediction(1.0, "dense", self.step_s, 1.0)]
        for density in DENSITIES:
            predictions.append(self._predict(density, gradients))
        # All ranks take rank 0's predictions.
        told = self.comm.broadcast(json.dumps([dataclasses.astuple(p) for p in predictions]).encode(), 0)
        self.predictions = [Prediction(*p) for p in json.loads(told)]
        self.verdict = self._judge()
        if self.comm.rank == 0:
            print(self, flush=True)

    def _predict(self, density: float, gradients: list[torch.Tensor]) -> Prediction:
        assert self.link is not None
        select_s, kept, total = 0.0, 0.0, 0.0
        # The chooser's candidates.
        rows = [r for r in _core.exchanges.values() if r.delivers_all and r.selects]
        totals = dict.fromkeys([r.name for r in rows], 0.0)
        for g in gradients:
            reports = _reduced_alone(g, density)
            select_s += statistics.median(r.select_ns for r in reports[1:]) * 1e-9  # the first finds the threshold
            kept += reports[0].capture * reports[0].group_gradient_norm2
            total += reports[0].group_gradient_norm2
            for name in totals:
                cost = _core.predict(
                    name, ranks=self.comm.size, n=g.numel(), k=reports[0].k, link=self.link,
                    local_speeds=_core.typical_local_speeds, **DEFAULTS,
                )  # fmt: skip
                totals[name] += cost.exchange_s
        best = min(totals, key=totals.__getitem__)
        return Prediction(density, best, self.compute_s + select_s + totals[best], kept / total if total > 0 else 1.0)

    def _judge(self) -> str:
        best = min(self.predictions[1:], key=lambda p: p.step_s)
        pays = self.step_s / best.step_s
        if pays < WORTH:
            return (
                f"verdict: it would not pay: at best {pays:.2f} times as fast (density {best.density:g}, {best.exchange}); "
                f"of {_ms(self.step_s)} a step only {_ms(self.exposed_s)} are left to gain"
            )
        # Among densities that are about as fast, take the largest, because it leaves out least.
        density, chosen = max((p.density, p) for p in self.predictions[1:] if p.step_s <= 1.05 * best.step_s)
        return (
            f'verdict: it would pay: skim.attach(model, density={density:g}, exchange="auto") ({chosen.exchange}), predicted '
            f"{_ms(chosen.step_s)} a step, {self.step_s / chosen.step_s:.2f} times as fast; residuals take "
            f"{4e-6 * self._entries:.1f} MB a rank. "
        ) + self._quality(density)

    def _quality(self, density: float) -> str:
        if self.total_steps == 0:
            return "What it does to accuracy only training tells."
        return "\n" + _core.quality_note(density, self.total_steps)


def steps_of(dry_run: Any) -> int:
    """The number of steps that skim.attach(dry_run=...) asks for; 0: no dry run."""
    if not isinstance(dry_run, numbers.Integral) or dry_run < 0:
        raise _core.InvalidArgument(f"skim.attach: dry_run must be True or a number of steps >= 1, not {dry_run!r}")
    return DEFAULT_STEPS if dry_run is True else int(dry_run)


def _reduced_alone(gradient: torch.Tensor, density: float) -> list[_core.StepReport]:
    """The reports of a few steps with this gradient, on a group of this rank alone, by the local half that skim.attach
    takes for its device."""
    options = Options(density, others={"exchange": "allgather", "dense_below": 0})
    [alone] = _core.in_process_group(1)
    reducer = options.reducer(alone, options.local_half(gradient.device))
    reducer.set_layout([(0, [("gradient", gradient.numel())])])
    reports = []
    for _ in range(4):
        reports.append(reducer.reduce(0, array(gradient.clone())))
        reducer.end_step()
    return reports


def _ms(seconds: float) -> str:
    return _core.duration_text(seconds)
