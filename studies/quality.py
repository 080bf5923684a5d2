#!/usr/bin/env python3
"""Does sparse training end where dense training does? Runs studies/quality_run.py many times.

  studies/quality.py TASK FILE [--ranks 2] [--steps N] [--device cpu] [--rates X,X,X] [--seeds 0,1,2] [--methods METHOD METHOD ...]

TASK: gpt, gpt10m, lstm, fashion, resnet8 or resnet20. All methods take the same steps on the same examples, and are tuned by
the same rule. Seed 0 runs at every rate. While the lowest or highest rate is the best, half or twice that rate runs
too. The other seeds run at the rate that is best on the validation data. Tables show the test data. FILE keeps a line
of JSON for each run, and these runs are not repeated, so an interrupted study goes on. Needs SKIM_DATA, and Skim
installed in the Python that runs this. Without --methods, all run that the task and the number of ranks allow.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parent / "quality_run.py"
#        steps, batch, rates
TASKS = {
    "gpt": (1000, 8, (0.005, 0.01, 0.02)),
    "gpt10m": (1000, 8, (0.001, 0.002, 0.004)),
    "lstm": (1000, 8, (0.005, 0.01, 0.02)),
    "fashion": (3000, 32, (0.02, 0.05, 0.1)),
    "resnet8": (1000, 32, (0.05, 0.1, 0.2)),
    "resnet20": (1000, 32, (0.05, 0.1, 0.2)),
}
# The density at which an exchange of 4-bit values sends about that share of dense's bytes, by the number of ranks.
# A rank of the all-gather sends its frame to every other rank.
RANKS = (2, 4, 8, 16)
DENSITY = {"1 %": dict(zip(RANKS, (0.028, 0.0133, 0.0064, 0.003))),
           "0.1 %": dict(zip(RANKS, (0.0023, 0.00105, 0.00048, 0.00023)))}
DENSITY_15 = {"1 %": dict(zip(RANKS, (0.6, 0.32, 0.16, 0.08))),  # an exchange every 15 steps
              "0.1 %": dict(zip(RANKS, (0.045, 0.022, 0.01, 0.0045)))}
# The same with the exchange shared-indices, whose bytes hardly depend on the number of ranks.
DENSITY_SHARED = {"1 %": dict(zip(RANKS, (0.05, 0.048, 0.046, 0.044))),
                  "0.1 %": dict(zip(RANKS, (0.0036, 0.003, 0.0023, 0.0014)))}
DENSITY_15_SHARED = dict(zip(RANKS, (0.067, 0.064, 0.058, 0.053)))  # both: 0.1 %
METHODS = {
    "dense": ["dense"],
    "dense, 16 bit": ["fp16"],
    "PowerSGD, rank 1": ["powersgd"],
    "one rank alone": ["alone"],
    "DiLoCo, 50 steps": ["local", dict.fromkeys(RANKS, 1.0), "--every", "50", "--ahead", "0", "--outer-lr", "0.7",
                         "--outer-momentum", "0.9", "--exchange", "dense"],
}
LOCAL = {
    "step ahead": [],
    "step ahead, a step late": ["--delay", "1"],
    "15 local steps": ["--every", "15", "--ahead", "0"],
    "15 local steps, ahead": ["--every", "15"],
}
for _share in DENSITY:
    METHODS |= {
        f"momentum left in the optimizer, {_share}": ["after-sum", DENSITY[_share]],
        f"momentum correction, {_share}": ["correction", DENSITY[_share]],
        f"DeMo, {_share}": ["demo", DENSITY[_share]],
    }
    for _name, _options in LOCAL.items():
        _density = (DENSITY_15 if "15" in _name else DENSITY)[_share]
        METHODS |= {f"{_name}, {_share}": ["local", _density, *_options],
                    f"{_name}, outer rate 1, {_share}": ["local", _density, *_options, "--outer-lr", "1"]}
    _shared = [DENSITY_SHARED[_share], "--exchange", "shared-indices"]
    METHODS |= {f"momentum correction, shared indices, {_share}": ["correction", *_shared],
                f"step ahead, shared indices, {_share}": ["local", *_shared]}
    for _code in ("bf16", "q8"):
        METHODS |= {
            f"momentum correction, {_share}, {_code} residuals": ["correction", DENSITY[_share], "--residual-code", _code],
            f"step ahead, {_share}, {_code} residuals": ["local", DENSITY[_share], "--residual-code", _code],
        }
METHODS["step ahead, shared indices, decay 0.995, 0.1 %"] = [*METHODS["step ahead, shared indices, 0.1 %"],
                                                             "--residual-decay", "0.995"]
METHODS["momentum correction, shared indices of 3.9 %, 1 %"] = ["correction", {4: 0.039}, "--exchange", "shared-indices"]
METHODS["step ahead, per parameter, 0.1 %"] = [*METHODS["step ahead, 0.1 %"], "--per-parameter"]
METHODS["15 local steps, ahead, outer rate 1.94, 0.1 %"] = ["local", {4: DENSITY_15["0.1 %"][4]}, "--every", "15",
                                                            "--outer-lr", "1.94"]
METHODS["step ahead, shared indices, outer rate 1, 0.1 %"] = [*METHODS["step ahead, shared indices, 0.1 %"], "--outer-lr", "1"]
METHODS["15 local steps, ahead, shared indices, 0.1 %"] = [
    "local", DENSITY_15_SHARED, "--every", "15", "--exchange", "shared-indices"]
METHODS["15 local steps, ahead, shared indices, outer rate 1, 0.1 %"] = [
    *METHODS["15 local steps, ahead, shared indices, 0.1 %"], "--outer-lr", "1"]
# Variants of one list of indices on 4 ranks at 0.1 %, for docs/results/quality.md: an option in place of another. Runs of
# neighbours have 2-bit values, and their indices take fewer bits. Those of entries in turn take almost none.
_runs = {of: ["--value-code", "q2", "--runs-of", of] for of in ("4", "9")}
VARIANTS = {
    "runs of 4": (0.0063, _runs["4"]),
    "runs of 9": (0.0078, _runs["9"]),
    "spent by the rate": (0.003, ["--spend", "by-rate"]),
    "spent in the first half": (0.003, ["--spend", "first-half"]),
    "flushed": (0.003, ["--spend", "flush"]),
    "half ahead": (0.003, ["--ahead", "0.5"]),
    "in turn": (0.0053, ["--in-turn", "--outer-lr", "1"]),
    "ten times the density": (0.03, []),
}
for _variant, (_density, _options) in VARIANTS.items():
    METHODS[f"step ahead, shared indices, {_variant}, 0.1 %"] = [
        "local", {4: _density}, "--exchange", "shared-indices", *_options]
METHODS["momentum correction, shared indices, runs of 4, 0.1 %"] = [
    "correction", {4: 0.0063}, "--exchange", "shared-indices", *_runs["4"]]
METHODS["15 local steps, ahead, shared indices, runs of 4, 0.1 %"] = [
    "local", {4: 0.14}, "--every", "15", "--exchange", "shared-indices", *_runs["4"]]
# On twice as many ranks: two islands that shard the model inside. DENSITY is that of two ranks.
METHODS["momentum correction, 1 %, a bucket per block"] = ["correction", {2: DENSITY["1 %"][2]}, "--bucket-mb", "0.75"]
METHODS["momentum correction, 1 %, sharded"] = ["correction", {4: DENSITY["1 %"][2]}, "--islands", "2"]
METHODS["momentum correction, 1 %, sharded, one group"] = [*METHODS["momentum correction, 1 %, sharded"], "--one-group"]
# A sweep of the density, for docs/results/quality.md: S against the distance to dense.
SWEEP = (0.001, 0.003, 0.01, 0.028, 0.05, 0.1)
SWEPT = {"momentum correction": "correction", "step ahead": "local", "momentum left in the optimizer": "after-sum"}
for _density in SWEEP:
    for _name, _kind in SWEPT.items():
        METHODS[f"{_name}, density {_density:g}"] = [_kind, dict.fromkeys(RANKS, _density)]


def methods_for(task, ranks):
    """The methods that have a density for so many ranks, and shard only the GPT."""
    return [method for method, (_, *more) in METHODS.items()
            if (not more or ranks in more[0]) and ("--islands" not in more or task in ("gpt", "gpt10m"))]


def expect_possible(parser, options):
    """Refuses --methods that the task or the number of ranks does not allow."""
    for method in options.methods:
        if method not in methods_for(options.task, options.ranks):
            parser.error(f"--methods: '{method}' is not for {options.task} on {options.ranks} ranks")


def arguments_of(task, method, rate, seed, options):
    steps, batch, _ = TASKS[task]
    kind, *more = METHODS[method]
    if more:
        by_ranks, *others = more
        more = ["--density", by_ranks[options.ranks], "--value-code", "q4", *others]
    return [str(a) for a in (task, kind, "--lr", f"{rate:g}", "--steps", options.steps or steps, "--batch", batch,
                             "--seed", seed, *more)]


def run(task, method, rate, seed, options):
    """The row of one run."""
    arguments = arguments_of(task, method, rate, seed, options)
    if options.device != "cpu":
        arguments += ["--device", options.device]
    if options.float32:
        arguments += ["--float32"]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(options.ranks), str(options.script), *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"quality: {task}, {method}, rate {rate:g}, seed {seed}: ended with {done.returncode}")
    command = f"torchrun --nproc-per-node {options.ranks} studies/quality_run.py {' '.join(arguments)}"
    return {"command": command, "label": method} | json.loads(done.stdout.strip().splitlines()[-1])


def best_rate(rows):
    """The rate of the best run on the validation data. A run that diverged is never the best."""
    if "validation_accuracy" in rows[0]:
        return max(rows, key=lambda row: row["validation_accuracy"])["lr"]
    return min(rows, key=lambda row: math.inf if math.isnan(row["validation_loss"]) else row["validation_loss"])["lr"]


def main():
    def numbers(kind):
        return lambda text: [kind(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, choices=RANKS, default=2)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the ranks share one GPU")
    parser.add_argument("--float32", action="store_true", help="resnet20: compute in float32, not in bfloat16")
    parser.add_argument("--rates", type=numbers(float), default=None)
    parser.add_argument("--one-rate", action="store_true", help="do not look for a better rate than the best of --rates")
    parser.add_argument("--seeds", type=numbers(int), default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=None, metavar="METHOD")
    parser.add_argument("--script", type=pathlib.Path, default=SCRIPT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = options.methods or methods_for(options.task, options.ranks)
    expect_possible(parser, options)
    task, steps = options.task, options.steps or TASKS[options.task][0]
    rows = [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []

    def row_of(method, rate, seed):
        wanted = {"task": task, "label": method, "lr": rate, "seed": seed, "ranks": options.ranks, "steps": steps,
                  "device": options.device, "float32": options.float32}
        for row in rows:
            if wanted.items() <= ({"device": "cpu", "float32": False} | row).items():
                return row
        rows.append(run(task, method, rate, seed, options))
        with options.file.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        told = {name: value for name, value in rows[-1].items() if name.startswith("validation") or name == "share"}
        print(f"{task}: {method}, rate {rate:g}, seed {seed}: {told}", file=sys.stderr, flush=True)
        return rows[-1]

    first, *others = options.seeds
    rates = options.rates or TASKS[task][2]

    def tuned(method):
        tried = {rate: row_of(method, rate, first) for rate in rates}
        while (best := best_rate(list(tried.values()))) in (min(tried), max(tried)) and not options.one_rate:
            rate = best / 2 if best == min(tried) else best * 2
            tried[rate] = row_of(method, rate, first)
        return best

    best = {method: tuned(method) for method in options.methods}
    for seed in others:
        for method in options.methods:
            row_of(method, best[method], seed)


if __name__ == "__main__":
    main()
