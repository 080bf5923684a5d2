#!/usr/bin/env python3
"""Compares how soon runs reach a test accuracy: a table, a verdict for each link, a picture.

  time_to_accuracy.py --target 85 --out demo.svg demo/1gbit="1 Gbit/s" demo/100mbit="100 Mbit/s"

BASE=LINK names two files of the same runs: BASE.json from `skim train --summary` or `skim simulate
--train --json`, and BASE.jsonl from --metrics. Bases with the same LINK belong together. A run's
time is the sum of rank 0's training steps; evaluations do not count. Only the picture needs
matplotlib (scripts/setup installs it).
"""

import argparse
import dataclasses
import json
import pathlib
import sys


def fail(why):
    sys.exit(f"time_to_accuracy.py: {why}")


@dataclasses.dataclass
class Run:
    link: str
    name: str  # "gtopk at 1 %"
    simulated: bool
    seconds: float  # of all steps
    sent_bytes: float  # by the busiest rank, in all steps
    points: list  # [(seconds, test accuracy)], one an evaluation
    summary: dict  # as skim wrote it

    @property
    def final(self):
        return self.points[-1][1]

    @property
    def best(self):
        return max(accuracy for _, accuracy in self.points)

    def seconds_to(self, target):
        """At the first evaluation with at least this accuracy; None where there is none."""
        return next((seconds for seconds, accuracy in self.points if accuracy >= target), None)


# ---- reading -------------------------------------------------------------------------------------


def read_lines(path):
    try:
        return path.read_text().splitlines()
    except OSError as e:
        fail(f"'{path}': {e.strerror}")


def parse(path, text):
    try:
        return json.loads(text)
    except ValueError as e:
        fail(f"'{path}': no JSON: {e}")


def name_of(summary):
    exchange, density = summary["exchange"], summary["density"]
    if exchange == "dense":
        return exchange
    return f"{exchange} at {100 * density:g} %" if isinstance(density, float) else summary["run"]


def read_runs(argument):
    """The runs of one BASE=LINK."""
    base, _, link = argument.partition("=")
    if not link:
        fail(f"'{argument}': expected BASE=LINK")
    metrics = pathlib.Path(base + ".jsonl")
    seconds, points = {}, {}
    for line in read_lines(metrics):
        entry = parse(metrics, line)
        run = entry["run"]
        if "step_ms" in entry:
            seconds[run] = seconds.get(run, 0.0) + 1e-3 * entry["step_ms"]
        elif entry.get("test_accuracy") is not None:
            points.setdefault(run, []).append((seconds.get(run, 0.0), entry["test_accuracy"]))
    path = pathlib.Path(base + ".json")
    found = []
    for summary in parse(path, "\n".join(read_lines(path))):
        run = summary["run"]
        if run not in points:
            fail(f"'{metrics}' has no test accuracy of run '{run}'")
        found.append(Run(link=link, name=name_of(summary), simulated="beta_s_per_byte" in summary,
                         seconds=seconds[run], points=points[run], summary=summary,
                         sent_bytes=summary["max_sent_bytes_per_step"] * summary["steps_done"]))
    return found


def tell_apart(runs):
    """Runs of one exchange and density, such as those of several selectors, take skim's names."""
    for together in by_link(runs).values():
        names = [run.name for run in together]
        for run, name in zip(together, names):
            if names.count(name) > 1:
                run.name = run.summary["run"]


def by_link(runs):
    found = {}
    for run in runs:
        found.setdefault(run.link, []).append(run)
    return found


# ---- words ---------------------------------------------------------------------------------------


def percent(fraction):
    return f"{100 * fraction:.1f} %"


def in_seconds(seconds):
    seconds = round(seconds, 6)  # 0.1 s as a sum of steps may be a little less
    digits = 0 if seconds >= 100 else 1 if seconds >= 1 else 2 if seconds >= 0.1 else 3
    return f"{seconds:.{digits}f} s"


def in_bytes(size):
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.3g} {units[0]}"


def heading(runs):
    s = runs[0].summary
    return (f"{s['model']} on {s['data']}: {s['parameters']:,} parameters, {s['ranks']} ranks, "
            f"batch {s['batch']} a rank, {s['steps']} steps")


def table(runs, target):
    """Lines of text."""
    rows = [("link", "exchange", f"time to {target:.3g} %", "whole run", "accuracy", "sent")]
    for link, together in by_link(runs).items():
        for i, run in enumerate(together):
            reached = run.seconds_to(target / 100)
            rows.append((link if i == 0 else "", run.name,
                         "not reached" if reached is None else in_seconds(reached),
                         in_seconds(run.seconds), percent(run.final), in_bytes(run.sent_bytes)))
    width = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if c < 2 else cell.rjust(w)
                 for c, (cell, w) in enumerate(zip(row, width))]
        lines.append("  ".join(cells).rstrip())
    return lines


def explanation(runs):
    """What the columns are, and where the times come from."""
    clocks = {}
    for run in runs:
        clock = "Simulated, on a virtual clock" if run.simulated else "Measured"
        clocks.setdefault(clock, {})[run.link] = True
    return ["accuracy: on the test data, at the end. sent: by the busiest rank, in the whole run.",
            "Times are of training steps, without evaluations.",
            *(f"{clock}: {', '.join(links)}." for clock, links in clocks.items())]


# Times of single runs on a busy machine can differ by this factor for no other reason.
NOISE = 1.3


def times_as(ratio):
    return f"{ratio:.1f} x" if ratio < 9.95 else f"{ratio:.0f} x"


def verdict(link, dense, sparse, target):
    """One line about one link."""
    goal = f"{target:.3g} % accuracy"
    start = f"At {link} {sparse.name} reached {goal}"
    a, b = dense.seconds_to(target / 100), sparse.seconds_to(target / 100)
    if a is None and b is None:
        return (f"At {link} neither {sparse.name} nor dense reached {goal} "
                f"(best: {percent(sparse.best)} and {percent(dense.best)}).")
    if b is None:
        return (f"At {link} {sparse.name} did not reach {goal} (best: {percent(sparse.best)}); "
                f"dense took {in_seconds(a)}.")
    if a is None:
        return f"{start} in {in_seconds(b)}; dense did not (best: {percent(dense.best)})."
    times = f"{in_seconds(b)} instead of {in_seconds(a)}"
    if max(a, b) <= NOISE * min(a, b):
        return f"{start} about as soon as dense: {times}."
    if b > a:
        return f"{start} {times_as(b / a)} later than dense: {times}."
    return f"{start} {times_as(a / b)} sooner than dense: {times}."


def difference(name, runs):
    """One line: what a sparse run's accuracy ends with, against dense on the same link."""
    points = []
    for together in by_link(runs).values():
        dense = next((r for r in together if r.name == "dense"), None)
        points += [round(100 * (r.final - dense.final), 1) for r in together
                   if dense is not None and r.name == name]
    low, high = min(points), max(points)
    if low != high:
        return f"{name} ended between {low:+.1f} and {high:+.1f} points of accuracy from dense."
    if low == 0:
        return f"{name} ended with the accuracy of dense."
    where = "below" if low < 0 else "above"
    return f"{name} ended {abs(low):.1f} points of accuracy {where} dense."


def verdicts(runs, target):
    lines, compared = [], {}
    for link, together in by_link(runs).items():
        dense = next((r for r in together if r.name == "dense"), None)
        for run in together:
            if dense is not None and run is not dense:
                lines.append(verdict(link, dense, run, target))
                compared[run.name] = True
    return lines + [difference(name, runs) for name in compared]


# ---- picture -------------------------------------------------------------------------------------


def draw(runs, target, paths):
    """A panel for each link. Returns why there is none, or None."""
    try:
        import plots
    except ImportError:
        return "No picture: this Python has no matplotlib (scripts/setup installs it into .venv)."
    links = by_link(runs)
    names = list(dict.fromkeys(run.name for run in runs))
    figure, axes = plots.plt.subplots(1, len(links), figsize=(plots.PAGE, 2.5), sharey=True,
                                      squeeze=False)
    for axis, (link, together) in zip(axes[0], links.items()):
        axis.axhline(target, color="black", linestyle=":", linewidth=0.8)
        for run in together:
            i = names.index(run.name)
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            axis.plot([s for s, _ in run.points], [100 * a for _, a in run.points], color=colour,
                      label=run.name)
            reached = run.seconds_to(target / 100)
            if reached is None:
                continue
            axis.plot([reached], [100 * dict(run.points)[reached]], color=colour, linestyle="none",
                      marker=plots.MARKERS[i % len(plots.MARKERS)])
            axis.axvline(reached, color=colour, linestyle=":", linewidth=0.8)
            # One run's text above the other's, for times that are close.
            axis.annotate(in_seconds(reached), (reached, 0), xycoords=("data", "axes fraction"),
                          xytext=(2, 3 + 8 * i), textcoords="offset points", fontsize=7,
                          color=colour)
        axis.set(title=link + (", simulated" if together[0].simulated else ""), xlabel="time (s)")
        axis.set_xlim(left=0)
    axes[0][0].set_ylabel("test accuracy (%)")
    plots.legend_below(figure, axes[0][0])
    for path in paths:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as e:
            fail(f"cannot write '{path}': {e}")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="+", metavar="BASE=LINK")
    parser.add_argument("--target", type=float, required=True, metavar="PERCENT",
                        help="test accuracy")
    parser.add_argument("--out", action="append", default=[], metavar="FILE",
                        help="picture, PNG, SVG or PDF by its name; may stand several times")
    arguments = parser.parse_args()
    runs = [run for base in arguments.bases for run in read_runs(base)]
    tell_apart(runs)
    print(heading(runs), "", *table(runs, arguments.target), *explanation(runs), "",
          *verdicts(runs, arguments.target), sep="\n")
    if arguments.out:
        why = draw(runs, arguments.target, arguments.out)
        print(why or "Picture: " + ", ".join(arguments.out))


if __name__ == "__main__":
    main()
