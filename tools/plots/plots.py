#!/usr/bin/env python3
"""Plots what the tool wrote. Needs matplotlib (scripts/setup).

  plots.py inspect      inspect.json       histograms, distributions, loss of top-k, counts of selectors
  plots.py curves       metrics.jsonl...   accuracy or loss against epochs
  plots.py entries      metrics.jsonl...   accuracy against entries communicated, during runs
  plots.py sensitivity  summary.json...    accuracy against bytes communicated, at the end of runs
  plots.py select-time  bench.json...      selection time against the number of entries

The files are those of `skim inspect`, `skim train --metrics`, `skim train --summary` and `skim bench select --json`.
A file may be followed by =LABEL. PNG, SVG or PDF by the name of --out (or --format). The figures of the studies, beside
what papers published, are made by studies/figures.py.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMN, PAGE = 3.5, 7.0  # widths in inches: of a column of a paper, of its text
# Colours that people with colour-blindness tell apart (M. Okabe, K. Ito, 2008), then markers.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*"]

plt.rcParams.update({
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "lines.linewidth": 1.2, "lines.markersize": 3.5, "axes.linewidth": 0.6,
    "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.4, "grid.color": "#dddddd", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 300, "figure.constrained_layout.use": True,
    "axes.prop_cycle": plt.cycler(color=COLOURS), "svg.fonttype": "none",
})


def fail(why):
    sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {why}")


def read(argument):
    """'FILE' or 'FILE=LABEL' -> (text, label or None)."""
    name, _, label = argument.partition("=")
    try:
        return pathlib.Path(name).read_text(), label or None
    except OSError as e:
        fail(f"'{name}': {e.strerror}")


def read_json(argument):
    text, label = read(argument)
    try:
        return json.loads(text), label
    except ValueError as e:
        fail(f"'{argument}': no JSON: {e}")


def save(figure, path):
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        fail(f"cannot write '{path}': {e}")
    plt.close(figure)
    print(path)


# ---- skim inspect ------------------------------------------------------------------------------------


def spread(items, most):
    """At most `most` of them, evenly, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def by_step(records):
    """A colour for each record: from early to late."""
    colours = plt.cm.viridis([0.9 * i / max(1, len(records) - 1) for i in range(len(records))])
    return list(zip(records, colours))


def bins(part):
    """Edges of the histogram in standard deviations, and the density in each bin."""
    h, std = part["histogram"], part["std"] or 1.0
    width = (h["high"] - h["low"]) / len(h["count"]) / std
    edges = [h["low"] / std + i * width for i in range(len(h["count"]) + 1)]
    return edges, [c / (part["n"] * width) for c in h["count"]]


def reference(axis, cumulative=False):
    """Normal and Laplace distribution with standard deviation 1."""
    x = [i / 50 for i in range(-250, 251)]
    if cumulative:
        normal = [0.5 * math.erfc(-v / math.sqrt(2)) for v in x]
        laplace = [0.5 * math.exp(math.sqrt(2) * v) if v < 0 else 1 - 0.5 * math.exp(-math.sqrt(2) * v) for v in x]
    else:
        normal = [math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in x]
        laplace = [math.exp(-math.sqrt(2) * abs(v)) / math.sqrt(2) for v in x]
    axis.plot(x, normal, color="black", linestyle="--", linewidth=0.9, label="normal", zorder=3)
    axis.plot(x, laplace, color="black", linestyle=":", linewidth=0.9, label="Laplace", zorder=3)


def draw_histogram(axis, parts):
    least = 1.0
    for (label, part), colour in by_step(parts):
        edges, density = bins(part)
        axis.stairs(density, edges, baseline=None, color=colour, label=label)
        least = min([least] + [d for d in density if d > 0])
    reference(axis)
    axis.set_yscale("log")
    axis.set_ylim(bottom=max(1e-5, least / 2))
    axis.set_xlim(-5, 5)


def title_of(data):
    density = data["density"]  # a number, or a rule such as "capture=0.9"
    density = f"k/d = {density:g}" if isinstance(density, (int, float)) else f"density {density}"
    if data["source"] == "npy":
        return f"saved gradients, {density}"
    return f"{data['model']}, {data['data']}, {data['ranks']} ranks, {data['select']}, {density}"


def histograms(data, records):
    figure, axis = plt.subplots(figsize=(COLUMN + 1.0, 2.6))
    draw_histogram(axis, [(label(data, r), r["model"]) for r in spread(records, 7)])
    axis.set(title=title_of(data), xlabel="u / standard deviation", ylabel="density")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def histograms_of_parameters(data, records):
    # Histograms of fewer entries show noise.
    largest = sorted((p for p in records[0]["parameters"] if p["n"] >= 1000), key=lambda p: -p["n"])[:9]
    if not largest:
        return None
    columns = min(3, len(largest))
    rows = math.ceil(len(largest) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(PAGE, 0.5 + 1.7 * rows), squeeze=False, sharex=True)
    for axis in axes.flat[len(largest):]:
        axis.set_visible(False)
    for axis, parameter in zip(axes.flat, largest):
        found = [(label(data, r), p) for r in spread(records, 5) for p in r["parameters"]
                 if p["name"] == parameter["name"]]
        draw_histogram(axis, found)
        axis.set_title(f"{parameter['name']} ({parameter['n']})")
    figure.supxlabel("u / standard deviation", fontsize=8)
    figure.supylabel("density", fontsize=8)
    figure.suptitle(title_of(data), fontsize=8)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    return figure


def cumulative(data, records):
    figure, axis = plt.subplots(figsize=(COLUMN + 1.0, 2.6))
    for record, colour in by_step(spread(records, 7)):
        part = record["model"]
        edges, _ = bins(part)
        axis.plot(edges, part["cumulative"], color=colour, label=label(data, record))
    reference(axis, cumulative=True)
    axis.set(title=title_of(data), xlabel="u / standard deviation", ylabel="fraction of entries below", xlim=(-5, 5),
             ylim=(0, 1))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def label(data, record):
    return pathlib.Path(record["file"]).name if data["source"] == "npy" else f"step {record['step']}"


CURVES = [  # key, name, colour, line
    ("general_bound", "$1-k/d$", "#999999", "-"),
    ("bell_bound", "$(1-k/d)^2$", "#D55E00", "-"),
    ("unimodal_bound", "$(1-k/d)^3$", "#E69F00", "-"),
    ("normal_ratio", "normal", "black", "--"),
    ("laplace_ratio", "Laplace", "black", ":"),
]


def over_records(data, records, axis):
    """The horizontal axis of one point a record; returns the points and the line between them."""
    if data["source"] == "training":
        axis.set_xlabel("step")
        return [r["step"] for r in records], "-"
    axis.set_xticks(range(len(records)), [label(data, r) for r in records])
    axis.set_xlim(-0.5, len(records) - 0.5)
    return list(range(len(records))), ""


def ratio(data, records):
    figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.5))
    for axis, show in zip(axes, [lambda x: x, lambda x: 1.0 - x]):
        steps, line = over_records(data, records, axis)
        axis.plot(steps, [show(r["model"]["ratio"]) for r in records], marker="o", linestyle=line, color=COLOURS[0],
                  label="measured")
        bare = {"marker": "_", "markersize": 14} if len(steps) == 1 else {}  # a line needs two points
        for key, name, colour, style in CURVES:
            axis.plot(steps, [show(r["model"][key]) for r in records], color=colour, linestyle=style, label=name,
                      **bare)
    axes[0].set(ylabel=r"$\|u-\mathrm{Top}_k(u)\|^2\,/\,\|u\|^2$", ylim=(0, 1.05))
    axes[1].set(ylabel=r"$1-\|u-\mathrm{Top}_k(u)\|^2\,/\,\|u\|^2$", yscale="log")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title_of(data), fontsize=8)
    return figure


def selectors(data, records):
    figure, axis = plt.subplots(figsize=(PAGE, 2.8))
    steps, line = over_records(data, records, axis)
    achieved = {s["name"]: [] for s in records[0]["model"]["selectors"]}
    for r in records:
        for s in r["model"]["selectors"]:
            achieved[s["name"]].append(s["selected"] / r["model"]["k"])
    together = {}  # rules that always selected alike share a line
    for name, values in achieved.items():
        together.setdefault(tuple(values), []).append(name)
    # Nothing selected has no place on a logarithmic axis: it stands on the lower edge.
    floor = min([v for values in together for v in values if v > 0] + [1.0]) / 2
    for i, (values, names) in enumerate(together.items()):
        axis.plot(steps, [max(v, floor) for v in values], marker=MARKERS[i % len(MARKERS)], clip_on=False,
                  linestyle=line and ("-" if i < len(COLOURS) else "--"), label=",\n".join(names))
    empty = any(v == 0 for values in together for v in values)
    axis.set(title=title_of(data), yscale="log", ylabel="selected / k" + (" (lower edge: 0)" if empty else ""))
    axis.set_ylim(bottom=floor if empty else None)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def inspect(arguments):
    data, _ = read_json(arguments.file)
    if not data["records"]:
        fail(f"'{arguments.file}' has no records")
    out = pathlib.Path(arguments.out or pathlib.Path(arguments.file).parent)
    for name, draw in [("histograms", histograms), ("histograms-parameters", histograms_of_parameters),
                       ("cumulative", cumulative), ("ratio", ratio), ("selectors", selectors)]:
        figure = draw(data, data["records"])
        if figure is not None:
            save(figure, out / f"{name}.{arguments.format}")


# ---- skim train --metrics ------------------------------------------------------------------------------


def runs(arguments):
    """[(label, steps, evaluations)] of all runs in all files."""
    found = []
    for argument in arguments.files:
        text, given = read(argument)
        lines = {}
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            try:
                entry = json.loads(line)
            except ValueError as e:
                if number > 1 and not line.endswith("\n"):
                    break  # incomplete: the run writes it, or was killed
                fail(f"'{argument}' line {number}: no JSON: {e}")
            if not isinstance(entry, dict) or "run" not in entry:
                fail(f"'{argument}' line {number}: not an object with the key 'run'")
            lines.setdefault(entry["run"], []).append(entry)
        for run, entries in lines.items():
            name = run if given is None else given if len(lines) == 1 else f"{given} {run}"
            found.append((name, [e for e in entries if "sent_bytes" in e],
                          [e for e in entries if "evaluation" in e]))
    if not any(evaluations for _, _, evaluations in found):
        fail("no evaluations in " + ", ".join(arguments.files))
    return found


QUALITIES = {"accuracy": ("test_accuracy", "top-1 test accuracy (%)", 100.0),
             "test-loss": ("test_loss", "test loss", 1.0),
             "train-loss": ("train_loss", "training loss", 1.0)}


def plot_runs(arguments, x_of, x_label, **axis_options):
    key, y_label, factor = QUALITIES[arguments.y]
    figure, axis = plt.subplots(figsize=(COLUMN, 2.5))
    for i, (name, steps, evaluations) in enumerate(runs(arguments)):
        shown = [e for e in evaluations if e.get(key) is not None]
        if not shown:
            fail(f"run '{name}' has no {key}")
        axis.plot([x_of(steps, e) for e in shown], [factor * e[key] for e in shown], label=name,
                  marker=MARKERS[i % len(MARKERS)] if len(shown) <= 40 else None)
    axis.set(xlabel=x_label, ylabel=y_label, title=arguments.title, **axis_options)
    axis.legend()
    save(figure, arguments.out)


def curves(arguments):
    plot_runs(arguments, lambda _, e: e["epoch"], "epoch")


def entries(arguments):
    def sent(steps, evaluation):
        return sum(s["sent_entries"] for s in steps if s["step"] <= evaluation["step"])
    plot_runs(arguments, sent, "entries sent by a rank", xscale="log")


# ---- skim train --summary ------------------------------------------------------------------------------


def sensitivity(arguments):
    """One line a selector, one point a density: means over runs that differ in the seed alone, with
    standard deviations."""
    key, y_label, factor = QUALITIES[arguments.y]
    lines = {}
    for argument in arguments.files:
        data, given = read_json(argument)
        # A --keep file of studies/rules.py has the runs by their command lines.
        for run in data.values() if isinstance(data, dict) else data:
            if run.get(key) is None:
                fail(f"'{argument}': run '{run['run']}' has no {key}")
            name = "dense" if run["density"] == 1 else run["select"]
            name += ", no feedback" if run["feedback"] in (False, "none") and name != "dense" else ""
            name = f"{given} {name}" if given else name
            lines.setdefault(name, {}).setdefault(run["density"], []).append(run)
    figure, axis = plt.subplots(figsize=(COLUMN + 1.2, 2.6))
    for i, (name, points) in enumerate(lines.items()):
        x, y, error = [], [], []
        for _, same in sorted(points.items(), key=lambda point: (isinstance(point[0], str), point[0])):
            values = [factor * r[key] for r in same]
            x.append(statistics.mean(r["sent_bytes_per_step"] for r in same) / 1e3)
            y.append(statistics.mean(values))
            error.append(statistics.stdev(values) if len(values) > 1 else 0.0)
        axis.errorbar(x, y, error, label=name, marker=MARKERS[i % len(MARKERS)], capsize=2, elinewidth=0.6,
                      color=COLOURS[i % len(COLOURS)])
    axis.set(xscale="log", xlabel="sent by a rank in a step (kB)", ylabel=y_label, title=arguments.title)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, arguments.out)


# ---- skim bench select --json --------------------------------------------------------------------------


def cases(arguments):
    """{rule: [(n, case)] in the order of n} of the shape, the density and the --where asked for."""
    found = {}
    for argument in arguments.files:
        for case in read_json(argument)[0]:
            same_density = case.get("k") and abs(math.log(case["k"] / case["n"] / arguments.density)) < 0.05
            chosen = all(str(case.get(key)) == value for key, _, value in
                         (text.partition("=") for text in arguments.where))
            if case["shape"] == arguments.shape and same_density and chosen:
                points = found.setdefault(case["select"], {})
                if case["n"] in points:
                    differ = [key for key in case if case[key] != points[case["n"]].get(key) and
                              not isinstance(case[key], float)]
                    fail(f"two cases of {case['select']} at n = {case['n']}: choose one with --where KEY=VALUE "
                         f"(they differ in {', '.join(differ) or 'nothing'})")
                points[case["n"]] = case
    if not found:
        fail(f"no case with shape {arguments.shape} and density {arguments.density:g}")
    return {rule: sorted(points.items()) for rule, points in found.items()}


def add_case_options(parser):
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--shape", default="normal")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE",
                        help="only cases with this field, such as threads=1")
    parser.add_argument("--select", help="comma-separated [all of them]")
    parser.add_argument("--title")
    parser.add_argument("--out", required=True)


def select_time(arguments):
    figure, axis = plt.subplots(figsize=(COLUMN + 1.2, 2.8))
    found = cases(arguments)
    wanted = arguments.select.split(",") if arguments.select else list(found)
    for i, rule in enumerate(wanted):
        if rule not in found:
            fail(f"no case of '{rule}'; there are {', '.join(found)}")
        axis.plot([n for n, _ in found[rule]], [c["ns"] * 1e-6 for _, c in found[rule]], label=rule,
                  marker=MARKERS[i % len(MARKERS)], linestyle="-" if i < len(COLOURS) else "--")
    passes = {n: c["add_pass_ns"] for points in found.values() for n, c in points if c.get("add_pass_ns")}
    axis.plot(sorted(passes), [passes[n] * 1e-6 for n in sorted(passes)], color="black", linestyle=":",
              label="bare pass r += g")
    axis.set(xscale="log", yscale="log", xlabel="entries d", ylabel="time (ms)",
             title=arguments.title or f"{arguments.shape}, k/d = {arguments.density:g}")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, arguments.out)


# ---- command line ----------------------------------------------------------------------------------------


def legend_below(figure, axis):
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("inspect", help="pictures of an inspect.json")
    one.add_argument("file")
    one.add_argument("--out", help="folder [that of the file]")
    one.add_argument("--format", default="png", choices=["png", "svg", "pdf"])
    one.set_defaults(run=inspect)

    for name, run, words in [("curves", curves, "quality against epochs"),
                             ("entries", entries, "quality against entries communicated"),
                             ("sensitivity", sensitivity, "quality against bytes communicated")]:
        one = commands.add_parser(name, help=words)
        one.add_argument("files", nargs="+", metavar="FILE[=LABEL]")
        one.add_argument("--y", default="accuracy", choices=list(QUALITIES))
        one.add_argument("--title")
        one.add_argument("--out", required=True)
        one.set_defaults(run=run)

    one = commands.add_parser("select-time", help="time against entries")
    add_case_options(one)
    one.set_defaults(run=select_time)

    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
