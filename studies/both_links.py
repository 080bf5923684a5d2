#!/usr/bin/env python3
"""The experiments of arXiv 2209.15203 (top-k on both links of a parameter server), on simulated ranks.

  studies/both_links.py OUT [--only TEXT,TEXT,...] [--seeds 1,2,3] [--jobs N] [--tool FILE] [--list] [-- ARGUMENT...]

Trains the paper's models at its learning rates, each rank on examples of its own (--split partition: its unions
agree with the published ones), in batches of 10, without momentum; the CNNs for 20 epochs (published: 100):
  sgd  dense
  uni  top-k of what the ranks send, k/n = 0.001, error feedback of updates (the rate is inside the residuals)
  bi   the same, and top-k of what the server sends, k_down/n = 0.001
OUT gets a line of JSON for each run: the object of skim simulate --json, with `task`, `method`, `lr` and
`command` (the run's arguments) added. If OUT already has a command, it is not run again, so an interrupted
study goes on. All runs with one seed come before those with the next seed, the most telling ones first. Each
simulation has one core of its own, because there the threads of its ranks wake one another soonest. --jobs is
the number of simulations side by side. --only takes runs with one of these texts in their names. --list prints
the names and the hours that they may take. More ARGUMENTs go to skim simulate. Needs SKIM_DATA. Tables and
figures: studies/figures.py downlink --help.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMON = ["--batch", "10", "--bucket-mb", "0", "--threads", "1", "--eval-epochs", "0", "--link", "1gbit", "--latency",
          "0.4ms", "--link-only", "--compute", "0s"]
METHODS = ["sgd", "uni", "bi"]


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    model: str
    data: str
    epochs: int
    rates: dict  # {ranks: of METHODS}, as published
    shards: bool  # also on examples sorted by label, on most ranks
    sweep: list  # more k_down/n of bi, on most ranks, one seed
    seeds: int  # at most
    seconds: float  # that an epoch takes, about: until a run has told


SWEEP = [1e-4, 5e-4, 2e-3, 5e-3, 1e-2]
TASKS = [
    Task("mnist-mlp", "mlp-64", "mnist", 100,
         {10: (0.03, 0.04, 0.10), 20: (0.03, 0.06, 0.09), 50: (0.10, 0.17, 0.18), 100: (0.10, 0.17, 0.24)},
         True, SWEEP, 3, 2.0),
    Task("fashion-mlp", "mlp-256", "fashion-mnist", 100,
         {20: (0.06, 0.08, 0.08), 50: (0.07, 0.13, 0.12), 100: (0.08, 0.22, 0.22)}, True, SWEEP, 3, 6.0),
    Task("fashion-cnn", "cnn-bn", "fashion-mnist", 20, {20: (0.06, 0.09, 0.08), 100: (0.08, 0.14, 0.20)},
         False, [], 1, 30.0),
    Task("mnist-cnn", "cnn", "mnist", 20, {20: (0.05, 0.08, 0.09), 100: (0.07, 0.09, 0.16)}, False, [], 1, 100.0),
]


@dataclasses.dataclass(frozen=True)
class Run:
    task: Task
    method: str
    ranks: int
    seed: int
    split: str = "partition"
    down: float = 0.001  # k_down/n of bi

    @property
    def name(self):
        down = f" k_down {self.down:g}" if self.method == "bi" else ""
        return f"{self.task.name} {self.method}{down} P {self.ranks} {self.split} seed {self.seed}"

    @property
    def rate(self):
        return self.task.rates[self.ranks][METHODS.index(self.method)]

    @property
    def turn(self):
        """Among the runs of a seed: the most telling first, those that take longest last."""
        if self.task.seeds == 1:
            return 4
        if self.down != 0.001:
            return 3
        return 1 if self.split == "shards" else 0 if self.ranks in (20, 100) else 2

    def arguments(self, more):
        t = self.task
        exchange = ["--exchange", "dense"] if self.method == "sgd" else [
            "--exchange", "param-server", "--density", "0.001", "--memory", "updates", "--down-density",
            f"{self.down if self.method == 'bi' else 1.0:g}"]
        length = [] if "--steps" in more else ["--epochs", str(t.epochs)]
        return ["--model", t.model, "--data", t.data, "--ranks", str(self.ranks), *length, "--lr", f"{self.rate:g}",
                "--seed", str(self.seed), "--split", self.split, *exchange, *COMMON, *more]


def plan(seeds):
    runs = []
    for number, seed in enumerate(seeds):
        for task in (t for t in TASKS if number < t.seeds):
            most = max(task.rates)
            runs += [Run(task, m, ranks, seed) for ranks in sorted(task.rates, reverse=True) for m in METHODS]
            if task.shards:
                runs += [Run(task, m, most, seed, "shards") for m in METHODS]
            if number == 0:
                runs += [Run(task, "bi", most, seed, down=d) for d in task.sweep]
    return sorted(runs, key=lambda run: (seeds.index(run.seed), run.turn))


class Study:
    """Runs, and the file that they are written to."""

    def __init__(self, options):
        self.options = options
        self.done = {}  # {command: row}
        if options.out.exists():
            for line in options.out.read_text().splitlines():
                row = json.loads(line)
                self.done[row["command"]] = row
        self.cores = queue.Queue()
        for core in sorted(os.sched_getaffinity(0), reverse=True)[:options.jobs]:
            self.cores.put(core)
        self.running = set()  # processes
        self.failed = 0

    def command(self, run):
        return " ".join(run.arguments(self.options.arguments))

    def is_done(self, run):
        return self.command(run) in self.done

    def seconds(self, run):
        """An estimate of the run's time, from the most similar runs that are done."""
        for same in (lambda r: (r["task"], r["method"], r["ranks"]) == (run.task.name, run.method, run.ranks),
                     lambda r: (r["task"], r["method"]) == (run.task.name, run.method),
                     lambda r: r["task"] == run.task.name):
            if like := [row["wall_s"] for row in self.done.values() if same(row)]:
                return statistics.mean(like)
        return run.task.seconds * run.task.epochs

    def left(self, runs):
        runs = [run for run in runs if not self.is_done(run)]
        hours = sum(map(self.seconds, runs)) / 3600 / self.options.jobs
        return f"{len(runs)} runs left, about {hours:.1f} h with {self.options.jobs} side by side"

    def start(self, run):
        """In a thread of its own. Returns the row, or throws."""
        core = self.cores.get()
        try:
            say(f"on core {core}: {run.name}")
            words = ["taskset", "-c", str(core), str(self.options.tool), "simulate", "--train",
                     *run.arguments(self.options.arguments), "--json", "-"]
            simulation = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.running.add(simulation)
            out, err = simulation.communicate()
            self.running.remove(simulation)
        finally:
            self.cores.put(core)
        if simulation.returncode != 0:
            raise RuntimeError(f"{run.name}: status {simulation.returncode}: {(err.strip().splitlines() or ['?'])[-1]}")
        [row] = json.loads(out)
        return {"task": run.task.name, "method": run.method, "lr": run.rate, "down": run.down if run.method == "bi" else 1.0,
                **row, "command": self.command(run)}

    def all(self, runs):
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool, self.options.out.open("a") as out:
            waiting = [pool.submit(self.start, run) for run in runs if not self.is_done(run)]
            try:
                for future in concurrent.futures.as_completed(waiting):
                    try:
                        row = future.result()
                    except RuntimeError as e:
                        self.failed += 1
                        say(str(e))
                        continue
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    self.done[row["command"]] = row
                    accuracy = row["test_accuracy"]  # None: it diverged
                    result = "diverged" if accuracy is None else f"{100 * accuracy:.2f} %"
                    say(f"{result} in {row['wall_s']:.0f} s; {self.left(runs)}")
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for simulation in set(self.running):
                    simulation.terminate()
                raise


def say(text):
    print(f"both_links: {text}", file=sys.stderr, flush=True)


def main():
    words, more = sys.argv[1:], []
    if "--" in words:
        at = words.index("--")
        words, more = words[:at], words[at + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tool", type=pathlib.Path, default=ROOT / "build/release/skim")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(words)
    options.arguments = more
    if not 1 <= options.jobs <= len(os.sched_getaffinity(0)):
        parser.error(f"--jobs must be from 1 to the cores of this machine, {len(os.sched_getaffinity(0))}")
    runs = [run for run in plan([int(seed) for seed in options.seeds.split(",")])
            if any(text in run.name for text in options.only.split(","))]
    if not runs:
        parser.error(f"no run has '{options.only}' in its name")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    study = Study(options)
    if options.list:
        for run in runs:
            print(f"{'done' if study.is_done(run) else f'{study.seconds(run):.0f} s':>8}  {run.name}")
    say(study.left(runs))
    if options.list:
        return
    try:
        study.all(runs)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(1 if study.failed else 0)


if __name__ == "__main__":
    main()
