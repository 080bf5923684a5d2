#!/usr/bin/env python3
"""Tries variants of sparse training before anyone builds them, and prints a line of JSON.

  screen.py gpt --lr 0.01 --density 0.0135 --over-senders

One process trains for all ranks, one after another, on equal parameters, in plain torch and float32. The base is
momentum correction with masking, which is skim.attach(optimizer=...); options change one thing. Tasks, data and
rates are those of quality_run.py. Needs SKIM_DATA. docs/results/quality.md has the verdicts.
"""

import argparse
import json
import math
import time

import torch
import torch.distributed as dist

import quality_run
from dct import Blocks


class Sender:
    """One rank's compression."""

    def __init__(self, n, options):
        self.residual, self.velocity, self.options = torch.zeros(n), torch.zeros(n), options

    def accumulate(self, grad, lr):
        o = self.options
        if o.momentum_residual:  # the residual is the momentum (DeMo, Dion2)
            self.residual.mul_(o.momentum_residual).add_(grad)
            return
        self.velocity.mul_(0.9).add_(grad, alpha=0.1 if o.task in ADAM else 1.0)
        self.residual.add_(self.velocity, alpha=1.0 if o.task in ADAM else lr)

    def send(self, everything, always):
        """Indices and values. What is sent leaves the residual, except for the part --stays."""
        o = self.options
        if everything:
            indices = torch.arange(len(self.residual))
        else:
            key = self.residual.abs()
            if always is not None:
                key[always] = math.inf
            indices = key.topk(max(1, int(o.density * len(key))), sorted=False).indices
        values = self.residual[indices]
        self.residual[indices] *= o.stays
        if not everything:
            self.velocity[indices] = 0
        return indices, values


ADAM = ("gpt", "lstm")
VARIANTS = {
    "over_senders": "mean over the senders",
    "dense_1d": "one-dimensional parameters whole",
    "flush_every": "flush every {} steps",
    "flush_last": "flush at the end",
    "flush_drops": "flush before drops",
    "momentum_residual": "momentum {:g} as the residual",
    "stays": "{:g} of what was sent stays",
    "dct": "DCT in blocks",
    "sign": "sign of the mean",
}


def variant_of(options):
    """What differs from the base, in words."""
    chosen = [(text, getattr(options, name)) for name, text in VARIANTS.items()]
    return ", ".join(text.format(value) for text, value in chosen if value) or "base"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=quality_run.TASKS)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--density", type=float, default=0.0135)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drops", action="store_true", help="the rate falls tenfold at 50 and 75 %% of the steps, not along a cosine")
    parser.add_argument("--over-senders", action="store_true", help="an entry's mean is over the ranks that sent it")
    parser.add_argument("--dense-1d", action="store_true", help="parameters of one dimension are sent whole")
    parser.add_argument("--flush-every", type=int, default=0, help="every so many steps each rank sends everything")
    parser.add_argument("--flush-last", action="store_true", help="so does the last step")
    parser.add_argument("--flush-drops", action="store_true", help="so does the step before each drop of the rate")
    parser.add_argument("--momentum-residual", type=float, default=0.0, metavar="B", help="momentum B is the residual: no velocity")
    parser.add_argument("--stays", type=float, default=0.0, help="the part of a sent entry that stays in the residual")
    parser.add_argument("--dct", action="store_true", help="select from a DCT in blocks, as DeMo does")
    parser.add_argument("--sign", action="store_true", help="apply the sign of the mean, as DeMo does")
    o = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    task = quality_run.TASKS[o.task]()
    torch.manual_seed(o.seed)
    model = task.model()
    parameters = list(model.parameters())
    lengths = [p.numel() for p in parameters]
    n = sum(lengths)
    x, grad = torch.cat([p.detach().flatten() for p in parameters]), torch.zeros(n)
    for p, value, g in zip(parameters, x.split(lengths), grad.split(lengths)):
        p.data, p.grad = value.view_as(p), g.view_as(p)
    always = torch.cat([torch.full((c,), p.dim() == 1) for p, c in zip(parameters, lengths)]) if o.dense_1d else None
    blocks = [Blocks(p.shape) for p in parameters] if o.dct else None

    def transformed(flat, direction):
        if blocks is None:
            return flat
        return torch.cat([getattr(b, direction)(part) for b, part in zip(blocks, flat.split(lengths))])

    randomness = []
    for rank in range(o.ranks):  # the examples of quality_run.py
        torch.manual_seed(1000 * o.seed + 1 + rank)
        randomness.append(torch.get_rng_state())
    drops = (o.steps // 2, 3 * o.steps // 4)

    def rate(step):
        if o.drops:
            return o.lr * min(1.0, (step + 1) / (o.steps // 10)) * 0.1 ** sum(step >= d for d in drops)
        return o.lr * quality_run.rate_at(step, o.steps)

    senders = [Sender(n, o) for _ in range(o.ranks)]
    second = torch.zeros(n)
    sent = 0
    began = time.perf_counter()
    for step in range(o.steps):
        lr = rate(step)
        everything = (
            (o.flush_every and (step + 1) % o.flush_every == 0)
            or (o.flush_last and step == o.steps - 1)
            or (o.flush_drops and step + 1 in drops)
        )
        mean, senders_of = torch.zeros(n), torch.zeros(n)
        for rank, sender in enumerate(senders):
            torch.set_rng_state(randomness[rank])
            grad.zero_()
            model(*task.batch(o.batch)).backward()
            randomness[rank] = torch.get_rng_state()
            sender.accumulate(transformed(grad, "forward"), lr)
            indices, values = sender.send(everything, always)
            mean.index_add_(0, indices, values)
            senders_of.index_add_(0, indices, torch.ones(len(indices)))
            sent += len(indices)
        mean /= senders_of.clamp_min(1) if o.over_senders else o.ranks
        mean = transformed(mean, "back")
        if o.sign:
            x.sub_(mean.sign(), alpha=lr)
        elif o.task in ADAM:
            second.mul_(0.999).addcmul_(mean, mean, value=0.001)
            if o.task == "gpt":
                x.mul_(1 - lr * 0.1)
            x.addcdiv_(mean, (second / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8), value=-lr)
        else:
            x.mul_(1 - lr * 5e-4 * 10).sub_(mean, alpha=lr if o.momentum_residual else 1.0)
    row = {"variant": variant_of(o), **vars(o), "n": n, "seconds": round(time.perf_counter() - began, 1), "entries": round(sent / (o.ranks * o.steps * n), 6)}
    for part in ("validation", "test"):
        for metric, value in task.evaluate(model, part).items():
            row[f"{part}_{metric}"] = round(value, 4)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
