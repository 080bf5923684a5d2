#!/usr/bin/env python3
"""Adaptive density against other densities at equal bytes: loss and accuracy against what a run sends.

  studies/adaptive_k.py TASK [--densities 0.0005,0.002,0.01] [--seeds 1,2,3] [--feedback residual,none]
                  [--rules RULE,RULE,...] [--exchange gtopk] [--ranks 4] [--epochs E] [--lr X]
                  [--generated N] [--memory gradients|updates] [--keep FILE] [--out FILE]

TASK: mnist-mlp, mnist-lenet5, cifar-lenet5, cifar-resnet20. Everything runs in `skim simulate --train`. A budget is
the bytes that the busiest rank sends in a run of constant density (--densities; the first seed), and all rules are
brought to it:
  even, water-filling, laplace, measured,
  feedback                                 are told it (--budget)
  constant                                 the density that it comes from
  warm-up, capture, accordion              have one number that scales what they send (all densities of the
                                           warm-up of deep gradient compression; the share; both levels, 10 : 1):
                                           found by up to 6 runs with seed 100, to within 2 %
  descent-per-bit                          has no such number: it sets a budget of its own, and the others are not
                                           brought to that, but laplace and even are
The table has the bytes that each rule sent, in per cent of the budget. --out writes a JSON array, one object a run,
with its curve (bytes, epoch, test loss, accuracy) and densities. studies/figures.py budgets draws it. --keep keeps
every run in FILE, so an interrupted study goes on. --generated N trains on N images that Skim makes itself instead of
the data set, to try this out. With --memory updates, residuals hold gradients times the learning rate. Needs
build/release/skim, and SKIM_DATA except with --generated. Lines on standard error name the current run.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from accuracy import keep_run, kept_runs, spelled

ROOT = pathlib.Path(__file__).resolve().parent.parent
SGD = ["--momentum", "0.9", "--lr-schedule", "cosine", "--batch", "32"]
TASKS = {  # epochs, learning rate, arguments
    "mnist-mlp": (5, 0.05, ["--model", "mlp", "--data", "mnist", *SGD]),
    "mnist-lenet5": (5, 0.05, ["--model", "lenet5", "--data", "mnist", *SGD]),
    "cifar-lenet5": (10, 0.02, ["--model", "lenet5", "--data", "cifar10", *SGD]),
    "cifar-resnet20": (20, 0.1, ["--model", "resnet20", "--data", "cifar10", "--augment", "--weight-decay", "1e-4",
                                 "--no-bias-decay", "--lr-warmup", "1", *SGD]),
}
FORMS = ["even", "water-filling", "laplace", "measured", "feedback"]
RULES = [*FORMS, "constant", "warm-up", "capture", "accordion", "descent-per-bit"]
DGC = [0.25, 0.0625, 0.015625, 0.004]
PILOT = 100  # the seed
KEPT = ["sent", "train_loss", "test_loss", "test_accuracy", "curve", "densities"]


class NotKept(Exception):
    """A run that the --keep file lacks, of a study that only reads."""


class Study:
    def __init__(self, task, memory="gradients", keep=None, exchange="gtopk", ranks=4, epochs=None, rate=None,
                 generated=None, only_kept=False):
        usual_epochs, usual_rate, arguments = TASKS[task]
        self.epochs = epochs or usual_epochs
        self.rate = rate or usual_rate
        arguments = [*arguments, "--epochs", f"{self.epochs:g}"]
        if generated:
            arguments = [a for a in arguments if a != "--augment"]
            arguments[arguments.index("--data") + 1] = "generated"
            arguments += ["--generated-train", str(generated), "--generated-test", "200"]
        self.keep, self.only_kept = keep, only_kept
        self.kept = kept_runs(keep)
        self.common = ["--ranks", str(ranks), "--link", "1gbit", "--link-only", "--compute", "10ms", "--exchange",
                       exchange, "--lr", f"{self.rate:g}", *arguments, "--memory", memory]

    def run(self, *words):
        """The result of one run (KEPT)."""
        line = " ".join([*self.common, *map(str, words)])
        if line not in self.kept:
            if self.only_kept:
                raise NotKept(line)
            print("+ simulate --train", line, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                metrics = pathlib.Path(folder) / "metrics.jsonl"
                done = subprocess.run(
                    [str(ROOT / "build/release/skim"), "simulate", "--train", *spelled(line),
                     "--metrics", str(metrics), "--json", "-"], capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(done.stderr.strip().splitlines()[-1])
                [row] = json.loads(done.stdout)
                lines = [json.loads(entry) for entry in metrics.read_text().splitlines()]
            self.kept[line] = outcome(row, lines)
            if self.keep:
                keep_run(self.keep, line, self.kept[line])
        return self.kept[line]


def outcome(row, lines):
    """Bytes along the curve are those of the busiest rank of each step, scaled to the bytes of the run's busiest rank."""
    sent = row["max_sent_bytes_per_step"] * row["steps_done"]
    steps, curve, so_far = [], [], 0
    for entry in lines:
        if "evaluation" in entry:
            curve.append([so_far, entry["epoch"], entry["test_loss"], entry["test_accuracy"]])
        else:
            so_far += entry["max_sent_bytes"]
            steps.append(entry["sent_entries"] / entry["n"])
    scale = sent / so_far if so_far else 0.0
    found = {"sent": sent, "train_loss": row["train_loss"], "test_loss": row["test_loss"],
             "test_accuracy": row["test_accuracy"],
             "curve": [[scale * x, *rest] for x, *rest in curve],
             "densities": steps[::max(1, len(steps) // 100)]}
    assert list(found) == KEPT
    return found


def words_of(rule, number, epochs):
    """The arguments of a rule at its number."""
    if rule == "constant":
        return ["--density", f"{number:.6g}"]
    if rule == "capture":
        return ["--density", f"capture={number:.6g}"]
    if rule == "accordion":
        return ["--density", f"accordion={number / 10:.6g}/{number:.6g}"]
    if rule == "descent-per-bit":
        return ["--density", rule]
    if rule == "warm-up":  # the paper's four epochs, a part of a short run as of a long one
        listed = [min(1.0, number * d / DGC[-1]) for d in DGC]
        count = max(1, min(len(DGC), int(epochs) - 1))
        return ["--density", f"{min(1.0, number / 4):.6g}", "--density-warmup",
                ",".join(f"{d:.6g}" for d in listed[-count:])]
    raise ValueError(rule)


def tuned(study, rule, budget, start, feedback):
    """The number at which the rule sends the budget, with the pilot's seed: secants in logarithms."""
    def transform(number):  # of a share in (0, 1): onto all numbers
        return math.log(number / (1 - number)) if rule == "capture" else math.log(number)

    def back(x):
        return 1 / (1 + math.exp(-x)) if rule == "capture" else min(1.0, math.exp(x))

    tried = []
    x = transform({"capture": 0.5}.get(rule, start))
    for _ in range(6):
        sent = study.run(*words_of(rule, back(x), study.epochs), "--feedback", feedback, "--seed", PILOT)["sent"]
        tried.append((abs(math.log(sent / budget)), x, math.log(sent / budget)))
        if tried[-1][0] < 0.02:
            break
        if len(tried) == 1:
            x -= max(-2.0, min(2.0, tried[-1][2]))
        else:
            (_, x0, y0), (_, x1, y1) = tried[-2:]
            slope = (y1 - y0) / (x1 - x0) if x1 != x0 else 1.0
            x = x1 - max(-2.0, min(2.0, y1 / (slope if slope > 0.1 else 1.0)))
    return back(min(tried)[1])


def at_budget(study, rule, density, feedback, seed):
    """(bytes, the arguments of a rule), at the budget of a constant density."""
    constant = words_of("constant", density, study.epochs)
    budget = math.ceil(study.run(*constant, "--feedback", feedback, "--seed", seed)["sent"])
    if rule in FORMS:
        return budget, with_budget(rule, budget)
    if rule == "constant":
        return budget, constant
    return budget, words_of(rule, tuned(study, rule, budget, density, feedback), study.epochs)


def at_its_own(study, rule, feedback, seed):
    """The same, at the budget of descent-per-bit."""
    words = words_of("descent-per-bit", None, study.epochs)
    budget = math.ceil(study.run(*words, "--feedback", feedback, "--seed", seed)["sent"])
    if rule == "descent-per-bit":
        return budget, words
    # It may go by the least density, which the others need room below.
    return budget, with_budget(rule, budget, "--density-min", "1e-5")


def with_budget(form, budget, *more):
    return ["--density", "adaptive", "--adaptive-form", form, "--budget", f"{budget:.0f}B", *more]


def cell(values, digits):
    if any(v is None for v in values):
        return "diverged"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--densities", default="0.0005,0.002,0.01")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--feedback", default="residual,none")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--exchange", default="gtopk")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--generated", type=int)
    parser.add_argument("--memory", choices=["gradients", "updates"], default="gradients")
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rules = options.rules.split(",")
    if unknown := set(rules) - set(RULES):
        parser.error(f"unknown rules: {', '.join(sorted(unknown))}; expected some of {', '.join(RULES)}")
    if not options.generated and not os.environ.get("SKIM_DATA"):
        sys.exit("SKIM_DATA must name the folder with the data sets")
    study = Study(options.task, options.memory, options.keep, options.exchange, options.ranks, options.epochs,
                  options.lr, options.generated)
    seeds = options.seeds.split(",")

    records = []
    print(f"{options.task}: {options.exchange}, {options.ranks} ranks, {study.epochs:g} epochs, "
          f"lr {study.rate:g}, seeds {options.seeds}\n")
    print("| feedback | budget | rule | sent, % of budget | train loss | test loss | accuracy % |")
    print("|---|---|---|---|---|---|---|", flush=True)

    def compare(feedback, budget, rule, words, name):
        found = [study.run(*words, "--feedback", feedback, "--seed", seed) for seed in seeds]
        for seed, one in zip(seeds, found):
            records.append({"task": options.task, "feedback": feedback, "budget": budget, "at": name, "rule": rule,
                            "words": " ".join(map(str, words)), "seed": int(seed), **one})
        accuracy = [r["test_accuracy"] and 100 * r["test_accuracy"] for r in found]
        print(f"| {feedback} | {budget / 1e6:.4g} MB ({name}) | {rule} "
              f"| {cell([100 * r['sent'] / budget for r in found], 1)} | {cell([r['train_loss'] for r in found], 4)} "
              f"| {cell([r['test_loss'] for r in found], 4)} | {cell(accuracy, 2)} |", flush=True)

    for feedback in options.feedback.split(","):
        for density in map(float, options.densities.split(",")):
            for rule in rules:
                if rule != "descent-per-bit":
                    budget, words = at_budget(study, rule, density, feedback, seeds[0])
                    compare(feedback, budget, rule, words, f"{density:g}")
        if "descent-per-bit" in rules:
            for rule in ("descent-per-bit", "even", "laplace"):
                budget, words = at_its_own(study, rule, feedback, seeds[0])
                compare(feedback, budget, rule, words, "its own")
    if options.out:
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
