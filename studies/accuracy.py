#!/usr/bin/env python3
"""Does top-k training reach the accuracy of dense training? One table per task, for docs/results/accuracy.md.

  studies/accuracy.py TASK [--seeds 1,2,3] [--tune 0.02,0.05,0.1] [--tune-epochs E] [--epochs E] [--ranks P]
                    [--runs RUN,RUN,...] [--keep FILE]

Trains dense, allgather and gtopk at 1 % and 0.1 % (density warm-up of deep gradient compression) from
the same seeds, and prints the mean and the standard deviation over seeds. --tune first trains dense at
each of these learning rates with seed 100. All runs then use the best rate. --tune-epochs shortens the
tuning runs and their learning-rate schedule. --keep writes every result to FILE at once and does not
repeat runs that FILE has, so an interrupted study goes on. Needs SKIM_DATA and build/release/skim.
Lines on standard error name the current run.
"""

import argparse
import fcntl
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMON = ["--batch", "32", "--momentum", "0.9", "--lr-schedule", "cosine", "--eval-epochs", "0"]
TASKS = {
    "mnist-mlp": (10, 0.05, ["--model", "mlp", "--data", "mnist", *COMMON]),
    "mnist-lenet5": (10, 0.05, ["--model", "lenet5", "--data", "mnist", *COMMON]),
    "fashion-mlp": (10, 0.05, ["--model", "mlp", "--data", "fashion-mnist", *COMMON]),
    "cifar-resnet20": (20, 0.1, [
        "--model", "resnet20", "--data", "cifar10", "--augment", "--batch", "32", "--momentum", "0.9",
        "--weight-decay", "1e-4", "--no-bias-decay", "--lr-warmup", "1", "--lr-schedule", "steps",
        "--eval-epochs", "0"]),
    "text-lstm": (8, 0.003, [
        "--model", "lstm", "--data", "text", "--optimizer", "adam", "--batch", "16", "--clip-norm", "1",
        "--lr-schedule", "cosine", "--eval-epochs", "0"]),
}
DROPS = {"cifar-resnet20": (0.58, 0.87)}  # of the epochs: 81 and 122 of paper 2's 140
RUNS = "dense,allgather:0.01,allgather:0.001,gtopk:0.01,gtopk:0.001"


def spelled(words):
    """A command line as a list. Files of kept runs name error feedback as `--feedback residual` or `none`."""
    return words.replace("--feedback residual", "").replace("--feedback none", "--no-feedback").split()


def kept_runs(file):
    return json.loads(file.read_text()) if file and file.exists() else {}


def keep_run(file, words, run, indent=None):
    """Adds a run to the file. Other studies may add theirs, and an interruption leaves the file as it was."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        beside = file.with_name(f".{file.name}.new")
        beside.write_text(json.dumps(kept_runs(file) | {words: run}, indent=indent))
        beside.replace(file)
    finally:
        os.close(folder)


def skim(arguments, keep=None):
    """The summary of one run; kept in the file `keep`, by its command line."""
    words = " ".join(["train", *arguments])
    kept = kept_runs(keep)
    if words not in kept:
        print("+", words, file=sys.stderr, flush=True)
        done = subprocess.run([str(ROOT / "build/release/skim"), *spelled(words), "--summary", "-"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr.strip().splitlines()[-1])
        [kept[words]] = json.loads(done.stdout)
        if keep:
            keep_run(keep, words, kept[words], indent=1)
    return kept[words]


def result(run, figure):
    """nan for a run that diverged, where it is null."""
    return math.nan if run[figure] is None else run[figure]


def mean_and_deviation(values):
    """Over runs: nan if one diverged. The deviation of a single run is 0."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def train_loss(runs):
    """The mean over runs."""
    losses = [run["train_loss"] for run in runs]
    return "diverged" if None in losses else f"{statistics.mean(losses):.4f}"


def length(task, epochs):
    """Options for so many epochs, the learning-rate schedule scaled with them."""
    drops = ",".join(f"{part * epochs:g}" for part in DROPS.get(task, ()))
    return ["--epochs", f"{epochs:g}", *(["--lr-drops", drops] if drops else [])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tune", default="")
    parser.add_argument("--tune-epochs", type=float)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", default=RUNS)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    if "dense" not in options.runs.split(","):
        parser.error("--runs: needs dense, with which the others are compared")
    if not os.environ.get("SKIM_DATA"):
        sys.exit("SKIM_DATA must name the folder with the data sets")
    epochs, rate, arguments = TASKS[options.task]
    epochs = options.epochs or epochs
    arguments = [*arguments, "--ranks", str(options.ranks), "--density-warmup", "dgc"]
    text = options.task.startswith("text")
    figure = "test_loss" if text else "test_accuracy"

    def good(run):
        value = result(run, figure)
        return -math.inf if math.isnan(value) else (-value if text else value)

    if options.tune:
        tried = {}
        for candidate in options.tune.split(","):
            run = skim([*arguments, *length(options.task, options.tune_epochs or epochs),
                        "--lr", candidate, "--exchange", "dense", "--seed", "100"], options.keep)
            tried[float(candidate)] = good(run)
        rate = max(tried, key=tried.get)
        print(f"learning rate, dense, seed 100: {tried}; taken: {rate}", file=sys.stderr)

    runs = {}
    for seed in options.seeds.split(","):
        for name in options.runs.split(","):
            exchange, _, density = name.partition(":")
            runs.setdefault(name, []).append(
                skim([*arguments, *length(options.task, epochs), "--lr", str(rate), "--seed", seed,
                      "--exchange", exchange, *(["--density", density] if density else [])],
                     options.keep))

    unit, digits = (1, 3) if text else (100, 2)
    dense, spread = mean_and_deviation([unit * result(r, figure) for r in runs["dense"]])
    print(f"{options.task}: {runs['dense'][0]['parameters']} parameters, {options.ranks} ranks, "
          f"{epochs:g} epochs, lr {rate}, seeds {options.seeds}\n")
    print(f"| run | train loss | {'test loss' if text else 'accuracy %'} | difference to dense | allowed "
          "| within | bytes sent per step and rank | of dense |")
    print("|---|---|---|---|---|---|---|---|")
    for name, of_seed in runs.items():
        mean, deviation = mean_and_deviation([unit * result(r, figure) for r in of_seed])
        pooled = math.sqrt((deviation**2 + spread**2) / 2)
        difference = mean - dense
        allowed = max(0.03 if text else 0.3, 2 * pooled)
        worse = difference if text else -difference
        value = "diverged" if math.isnan(mean) else f"{mean:.{digits}f} ± {deviation:.{digits}f}"
        gap = "- | -" if math.isnan(difference) else f"{difference:+.{digits}f} | {allowed:.{digits}f}"
        sent = statistics.mean(r["sent_bytes_per_step"] for r in of_seed)
        print(f"| {name} | {train_loss(of_seed)} | {value} | {gap} "
              f"| {'-' if name == 'dense' else 'yes' if worse <= allowed else 'no'} "
              f"| {sent:,.0f} | {100 * sent / of_seed[0]['dense_bytes_per_step']:.2f} % |")


if __name__ == "__main__":
    main()
