#!/usr/bin/env python3
"""Does a small GPT under AdamW reach dense loss? examples/gpt_text.py, run after run.

  studies/gpt.py FILE [--steps 1000] [--batch 8] [--ranks 2] [--rates 0.005,0.01,0.02] [--seeds 0,1,2]
                 [--methods METHOD METHOD ...]

Every method gets the same steps and the same examples, and is tuned by equally many trials: seed 0 runs at every
rate, and the rate with the least validation loss runs with the other seeds, too. (Tiny Shakespeare has no third
part: the loss that chooses the rate is the loss that is told. All methods have the same advantage.) FILE keeps a
line of JSON a run; runs that it has are not made again, so an interrupted study goes on. Needs SKIM_DATA, and Skim
installed in the Python that runs this.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "examples/gpt_text.py"
METHODS = {
    "dense": ["--gradients", "dense"],
    "dense, 16 bit": ["--gradients", "fp16"],
    "one rank alone": ["--gradients", "alone"],
    "momentum after the sum, k = 1 %": ["--keep-momentum", "--density", "0.01"],
    "momentum correction, k = 1 %": ["--density", "0.01"],
    "momentum correction, k = 2.8 %, 4 bit": ["--density", "0.028", "--value-code", "q4"],
    "momentum after the sum, k = 2.8 %, 4 bit": ["--keep-momentum", "--density", "0.028", "--value-code", "q4"],
    "momentum correction, k = 0.23 %, 4 bit": ["--density", "0.0023", "--value-code", "q4"],
    "updates, ahead, k = 2.8 %, 4 bit": ["--local-steps", "1", "--density", "0.028", "--value-code", "q4"],
    "updates, ahead, k = 0.23 %, 4 bit": ["--local-steps", "1", "--density", "0.0023", "--value-code", "q4"],
    "15 local steps, ahead, k = 42 %, 4 bit": ["--local-steps", "15", "--density", "0.42", "--value-code", "q4"],
}
SHARE = {"dense": 1.0, "dense, 16 bit": 0.5, "one rank alone": 0.0}


def run(method, rate, seed, options):
    """The row of one run."""
    arguments = ["--steps", options.steps, "--batch", options.batch, "--lr", f"{rate:g}", "--seed", seed,
                 *METHODS[method]]
    if method not in SHARE:
        arguments += ["--exchange", "allgather"]
    arguments = list(map(str, arguments))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(options.ranks), str(options.script), *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"gpt: {method}, rate {rate:g}, seed {seed}: ended with {done.returncode}")
    loss = float(re.search(r"validation loss ([\d.]+)", done.stdout)[1])
    less = re.search(r"([\d.]+) times less than dense", done.stdout)
    local = re.search(r"--local-steps (\d+)", " ".join(arguments))
    return {"table": "gpt", "command": f"torchrun --nproc-per-node {options.ranks} examples/gpt_text.py "
            + " ".join(arguments), "method": method, "ranks": options.ranks, "steps": options.steps, "lr": rate,
            "seed": seed, "validation_loss": loss, "share": 1 / (float(less[1]) * (int(local[1]) if local else 1)) if less else SHARE[method]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", type=lambda text: [float(x) for x in text.split(",")], default=[0.005, 0.01, 0.02])
    parser.add_argument("--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--script", type=pathlib.Path, default=SCRIPT, help=argparse.SUPPRESS)
    options = parser.parse_args()

    def rows():
        return [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []

    def loss_of(method, rate, seed):
        wanted = {"method": method, "lr": rate, "seed": seed, "ranks": options.ranks, "steps": options.steps}
        for row in rows():
            if wanted.items() <= row.items():
                return row["validation_loss"]
        row = run(method, rate, seed, options)
        with options.file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"gpt: {method}, rate {rate:g}, seed {seed}: {row['validation_loss']:.4f}", file=sys.stderr, flush=True)
        return row["validation_loss"]

    first, *others = options.seeds
    best = {m: min(options.rates, key=lambda rate, m=m: loss_of(m, rate, first)) for m in options.methods}
    for seed in others:
        for method in options.methods:
            loss_of(method, best[method], seed)


if __name__ == "__main__":
    main()
