#!/usr/bin/env python3
"""How do approximate selectors train, against exact top-k, random-k and dense? For docs/results/selection.md.

  studies/rules.py TASK [--densities 0.001,0.005,0.01] [--seeds 1,2,3] [--lr X] [--ranks P]
                     [--epochs E] [--batch B] [--keep FILE]

Repeats the study of arXiv 1911.08772: exact top-k, Gaussian_k (robust, and as published), random-k with
and without error feedback. All-gather sums, with the density warm-up of that paper. TASK and --keep are
as in accuracy.py. FILE has the summaries that the plots read. Needs SKIM_DATA and build/release/skim.
"""

import argparse
import math
import os
import pathlib
import statistics
import sys

from accuracy import TASKS, length, mean_and_deviation, result, skim, train_loss

SELECTORS = [("exact", "residual"), ("gaussian", "residual"), ("gaussian-two-sided", "residual"),
             ("randomk", "residual"), ("randomk", "none")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--densities", default="0.001,0.005,0.01")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    if not os.environ.get("SKIM_DATA"):
        sys.exit("SKIM_DATA must name the folder with the data sets")
    epochs, rate, arguments = TASKS[options.task]
    epochs = options.epochs or epochs
    rate = options.lr or rate
    arguments = [*arguments, "--ranks", str(options.ranks), *length(options.task, epochs),
                 "--lr", str(rate), "--density-warmup", "gaussiank"]
    if options.batch:
        arguments[arguments.index("--batch") + 1] = str(options.batch)
    text = options.task.startswith("text")
    figure = "test_loss" if text else "test_accuracy"
    unit = 1 if text else 100

    rows = [("dense", "", "", ["--exchange", "dense"])]
    for density in options.densities.split(","):
        for select, feedback in SELECTORS:
            rows.append((select, feedback, density,
                         ["--exchange", "allgather", "--select", select, "--feedback", feedback,
                          "--density", density]))
    print(f"{options.task}: {options.ranks} ranks, {epochs:g} epochs, lr {rate}, "
          f"seeds {options.seeds}\n")
    print(f"| selector | error feedback | density | train loss | "
          f"{'test loss' if text else 'accuracy %'} | bytes sent per step and rank |")
    print("|---|---|---|---|---|---|", flush=True)
    for select, feedback, density, more in rows:
        runs = [skim([*arguments, *more, "--seed", seed], options.keep)
                for seed in options.seeds.split(",")]
        mean, deviation = mean_and_deviation([unit * result(run, figure) for run in runs])
        spread = f" ± {deviation:.2f}" if len(runs) > 1 else ""
        print(f"| {select} | {feedback} | {density} "
              f"| {train_loss(runs)} "
              f"| {'diverged' if math.isnan(mean) else f'{mean:.2f}{spread}'} "
              f"| {statistics.mean(run['sent_bytes_per_step'] for run in runs):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
