#!/usr/bin/env python3
"""Draws the pictures of docs/concepts.md from a training run of a few seconds, and prints its numbers.

Four ranks fit 2000 parameters to examples that the same hidden parameters have labelled. Each rank sends 1 % of its
gradient. One run keeps the rest in residuals, another one loses it. The third picture shows rows of studies/rows.

  concepts.py               prints the numbers
  concepts.py --out FOLDER  also draws the pictures, as concepts-*.svg

Needs the Python package in .venv, and matplotlib (scripts/setup).
"""

import argparse
import pathlib
import sys
import threading

import numpy as np
import skim

HERE = pathlib.Path(__file__).resolve().parent
RANKS, ENTRIES, STEPS, DENSITY, BATCH, RATE = 4, 2000, 1000, 0.01, 16, 0.01
SHOWN_STEPS = 300  # of one entry
SCALES = np.geomspace(1, 0.4, ENTRIES, dtype=np.float32)  # of the inputs: late entries have small gradients
HIDDEN = np.random.default_rng(0).standard_normal(ENTRIES).astype(np.float32)


def gradient(parameters, rank, step):
    """Of a rank's own examples."""
    inputs = SCALES * np.random.default_rng([rank, step]).standard_normal((BATCH, ENTRIES)).astype(np.float32)
    return inputs.T @ (inputs @ (parameters - HIDDEN)) / BATCH


class Run:
    """What a run has done. Arrays [step, entry] are of rank 0, sums of all ranks, or what all ranks have alike."""

    def __init__(self, density=DENSITY, feedback=True):
        self.errors = []  # of the parameters, relative, after each step
        self.residuals = np.zeros((STEPS, ENTRIES), np.float32)
        self.gradients, self.delivered = np.zeros((2, STEPS, ENTRIES))
        self.kept = np.zeros((RANKS, ENTRIES))  # the residuals of all ranks at the end
        self.density, self.feedback, self.lock = density, feedback, threading.Lock()
        group = skim.in_process_group(RANKS)
        threads = [threading.Thread(target=self.train, args=(rank, group[rank])) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def train(self, rank, comm):
        reducer = skim.Reducer(comm, density=self.density, exchange="allgather", feedback=self.feedback, dense_below=0)
        reducer.set_layout([(0, [("parameters", ENTRIES)])])
        parameters = np.zeros(ENTRIES, np.float32)
        for step in range(STEPS):
            mine = gradient(parameters, rank, step)
            mean = mine.copy()
            reducer.reduce(0, mean)
            reducer.end_step()
            parameters -= RATE * mean
            with self.lock:
                self.gradients[step] += mine
            if rank == 0:
                self.errors.append(np.linalg.norm(parameters - HIDDEN) / np.linalg.norm(HIDDEN))
                self.delivered[step] = RANKS * mean.astype(np.float64)
                if self.feedback:
                    self.residuals[step] = reducer.residual(0)
        if self.feedback:
            self.kept[rank] = reducer.residual(0)

    def never_delivered(self):
        """The fraction of such entries."""
        return np.mean(~self.delivered.any(0))

    def lost(self):
        """What neither was delivered nor waits in a residual, relative to what the ranks computed."""
        given = self.gradients.sum(0)
        return np.linalg.norm(given - self.delivered.sum(0) - self.kept.sum(0)) / np.linalg.norm(given)


def waits(run):
    """An entry that rank 0 sends several times: in about one of forty steps."""
    sent = np.count_nonzero(np.diff(np.sign(np.abs(run.residuals[:SHOWN_STEPS])), axis=0) < 0, axis=0)
    return int(np.argmin(np.abs(sent - SHOWN_STEPS / 40)))


def draw(runs, folder):
    sys.path[:0] = [str(HERE), str(HERE.parent / "tools/plots")]
    import tables
    from plots import COLUMN, PAGE, plt, save

    plt.rcParams["svg.hashsalt"] = "skim"  # the same run draws the same file
    dense, sparse, lossy = runs
    entry, steps = waits(sparse), np.arange(1, SHOWN_STEPS + 1)

    figure, axis = plt.subplots(figsize=(PAGE, 2.2))
    axis.plot(steps, sparse.residuals[:SHOWN_STEPS, entry])
    axis.set(xlabel="step", ylabel="residual of the entry", title=f"entry {entry} on rank 0")
    save(figure, folder / "concepts-residual.svg")

    figure, (one, all_entries) = plt.subplots(1, 2, figsize=(PAGE, 2.4))
    one.plot(steps, sparse.gradients[:SHOWN_STEPS, entry].cumsum(), label="computed")
    one.plot(steps, sparse.delivered[:SHOWN_STEPS, entry].cumsum(), drawstyle="steps-post", label="delivered")
    one.set(xlabel="step", ylabel="sum over steps and ranks", title=f"entry {entry}")
    one.legend()
    for run, label in ((dense, "dense"), (sparse, "1 %, rest in the residual"), (lossy, "1 %, rest lost")):
        all_entries.plot(np.arange(1, STEPS + 1), run.errors, label=label)
    all_entries.set(xlabel="step", ylabel="error of the parameters", yscale="log", title="all entries")
    all_entries.legend()
    save(figure, folder / "concepts-conservation.svg")

    figure, axis = plt.subplots(figsize=(COLUMN, 2.2))
    rows = tables.entry_sends("gpt", 2)(HERE / "rows")
    for marker, (name, label) in zip("os^", (("momentum left in the optimizer", "momentum in the optimizer"),
                                             ("momentum correction", "momentum correction"),
                                             ("step ahead", "LocalSteps(every=1)"))):
        axis.plot([row["sends"] for row in rows], [row[name] for row in rows], marker=marker, label=label)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set(xlabel="S = density × steps", ylabel="loss above dense (nats)", xscale="log")
    axis.legend()
    save(figure, folder / "concepts-entry-sends.svg")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    out = parser.parse_args().out
    runs = dense, sparse, lossy = Run(density=1.0), Run(), Run(feedback=False)
    print(f"error of the parameters after {STEPS} steps, relative: dense {dense.errors[-1]:.3f}, "
          f"1 % with residuals {sparse.errors[-1]:.3f}, 1 % without {lossy.errors[-1]:.3f}")
    print(f"gradient mass that was lost: with residuals {sparse.lost():.4f}, without {lossy.lost():.4f}")
    print(f"entries that were never delivered: with residuals {sparse.never_delivered():.0%}, "
          f"without {lossy.never_delivered():.0%}")
    if out:
        draw(runs, out)


if __name__ == "__main__":
    main()
