#!/usr/bin/env python3
"""Draws what `skim inspect`, `skim train`, `skim bench select`, `skim bench scaling` and bench/paper4.py wrote. Needs
matplotlib (scripts/setup).

  plots.py inspect        inspect.json              histograms, distributions, loss of top-k, counts of selectors
  plots.py curves         metrics.jsonl...          accuracy or loss against epochs
  plots.py entries        metrics.jsonl...          accuracy against entries communicated, during runs
  plots.py sensitivity    summary.json...           accuracy against bytes communicated, at the end of runs
  plots.py budgets        paper3.json...            loss and accuracy against the bytes of runs, by rule
  plots.py select-time    bench.json...             selection time against the number of entries
  plots.py iteration-time bench.json                modelled time of an iteration of known models
  plots.py scaling        scaling.json...           scaling efficiency against ranks, beside the published one
  plots.py scaling-parts  scaling.json...           computing, selection and exchange of a step
  plots.py scaling-time   scaling.json...           time of exchanges against ranks and parameters, and the model's
  plots.py scaling-table  scaling.json...           the same in numbers: a table in Markdown
  plots.py downlink       paper4.jsonl...           accuracy and downlink saving of a parameter server, beside the published
  plots.py downlink-table paper4.jsonl...           the same in numbers: a table in Markdown

A file may be followed by =LABEL. PNG, SVG or PDF by the name of --out (or --format).
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
    sys.exit(f"plots.py: {why}")


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
    if data["source"] == "npy":
        return f"saved gradients, k/d = {data['density']:g}"
    return f"{data['model']}, {data['data']}, {data['ranks']} ranks, {data['select']}, k/d = {data['density']:g}"


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
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
            except ValueError as e:
                fail(f"'{argument}' line {number}: no JSON: {e}")
            lines.setdefault(entry["run"], []).append(entry)
        for run, entries in lines.items():
            name = run if given is None else given if len(lines) == 1 else f"{given} {run}"
            found.append((name, [e for e in entries if "evaluation" not in e],
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
        # A --keep file of bench/rules.py has the runs by their command lines.
        for run in data.values() if isinstance(data, dict) else data:
            if run.get(key) is None:
                fail(f"'{argument}': run '{run['run']}' has no {key}")
            name = "dense" if run["density"] == 1 else run["select"]
            name += ", no feedback" if run["feedback"] == "none" and name != "dense" else ""
            name = f"{given} {name}" if given else name
            lines.setdefault(name, {}).setdefault(run["density"], []).append(run)
    figure, axis = plt.subplots(figsize=(COLUMN + 1.2, 2.6))
    for i, (name, points) in enumerate(lines.items()):
        x, y, error = [], [], []
        for _, same in sorted(points.items()):
            values = [factor * r[key] for r in same]
            x.append(statistics.mean(r["sent_bytes_per_step"] for r in same) / 1e3)
            y.append(statistics.mean(values))
            error.append(statistics.stdev(values) if len(values) > 1 else 0.0)
        axis.errorbar(x, y, error, label=name, marker=MARKERS[i % len(MARKERS)], capsize=2, elinewidth=0.6,
                      color=COLOURS[i % len(COLOURS)])
    axis.set(xscale="log", xlabel="sent by a rank in a step (kB)", ylabel=y_label, title=arguments.title)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, arguments.out)


# ---- bench/paper3.py --out -------------------------------------------------------------------------------


def budgets(arguments):
    """A row of pictures for each kind of feedback: what runs end with against the bytes they sent, one line a rule,
    means over seeds with standard deviations; and the densities over the run of the first seed, at one budget."""
    found = [record for argument in arguments.files for record in read_json(argument)[0]]
    kinds = list(dict.fromkeys(r["feedback"] for r in found))
    rules = list(dict.fromkeys(r["rule"] for r in found))
    shown = ["test-loss", "accuracy"]
    figure, axes = plt.subplots(len(kinds), 3, figsize=(PAGE, 2.3 * len(kinds)), squeeze=False)
    for row, kind in zip(axes, kinds):
        names = list(dict.fromkeys(r["at"] for r in found if r["feedback"] == kind))
        middle = names[len(names) // 2]
        for i, rule in enumerate(rules):
            style = {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else "--", "label": rule}
            mine = [r for r in found if (r["feedback"], r["rule"]) == (kind, rule)]
            for axis, quality in zip(row, shown):
                key, y_label, factor = QUALITIES[quality]
                points = {}
                for r in mine:
                    if r[key] is not None:
                        points.setdefault(r["budget"], []).append(r)
                x = [statistics.mean(r["sent"] for r in same) / 1e6 for _, same in sorted(points.items())]
                values = [[factor * r[key] for r in same] for _, same in sorted(points.items())]
                axis.errorbar(x, [statistics.mean(v) for v in values],
                              [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values], capsize=2,
                              elinewidth=0.6, marker=MARKERS[i % len(MARKERS)], **style)
                axis.set(xscale="log", xlabel="sent by the busiest rank (MB)", ylabel=y_label)
            for r in [r for r in mine if r["at"] == middle][:1]:
                share = [j / len(r["densities"]) for j in range(len(r["densities"]))]
                row[2].plot(share, r["densities"], **style)
        # One tick a budget: those of several files may differ by little.
        in_mb = sorted({r["at"]: r["budget"] / 1e6 for r in found if r["feedback"] == kind}.values())
        for axis in row[:2]:
            axis.set_xticks(in_mb, labels=[f"{x:.3g}" for x in in_mb])
            axis.minorticks_off()
        row[0].set_title("error feedback" if kind == "residual" else "no error feedback")
        row[2].set(yscale="log", xlabel="part of the run", ylabel="density", title=f"budget of {middle}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=5)
    save(figure, arguments.out)


# ---- skim bench select --json --------------------------------------------------------------------------


def cases(arguments):
    """{algo: [(n, case)] in the order of n} of the shape, the density and the --where asked for."""
    found = {}
    for argument in arguments.files:
        for case in read_json(argument)[0]:
            same_density = case.get("k") and abs(math.log(case["k"] / case["n"] / arguments.density)) < 0.05
            chosen = all(str(case.get(key)) == value for key, _, value in
                         (text.partition("=") for text in arguments.where))
            if case["shape"] == arguments.shape and same_density and chosen:
                points = found.setdefault(case["algo"], {})
                if case["n"] in points:
                    differ = [key for key in case if case[key] != points[case["n"]].get(key) and
                              not isinstance(case[key], float)]
                    fail(f"two cases of {case['algo']} at n = {case['n']}: choose one with --where KEY=VALUE "
                         f"(they differ in {', '.join(differ) or 'nothing'})")
                points[case["n"]] = case
    if not found:
        fail(f"no case with shape {arguments.shape} and density {arguments.density:g}")
    return {algo: sorted(points.items()) for algo, points in found.items()}


def select_time(arguments):
    figure, axis = plt.subplots(figsize=(COLUMN + 1.2, 2.8))
    found = cases(arguments)
    wanted = arguments.algos.split(",") if arguments.algos else list(found)
    for i, algo in enumerate(wanted):
        if algo not in found:
            fail(f"no case of '{algo}'; there are {', '.join(found)}")
        axis.plot([n for n, _ in found[algo]], [c["ns"] * 1e-6 for _, c in found[algo]], label=algo,
                  marker=MARKERS[i % len(MARKERS)], linestyle="-" if i < len(COLOURS) else "--")
    passes = {n: c["add_pass_ns"] for points in found.values() for n, c in points if c.get("add_pass_ns")}
    axis.plot(sorted(passes), [passes[n] * 1e-6 for n in sorted(passes)], color="black", linestyle=":",
              label="bare pass r += g")
    axis.set(xscale="log", yscale="log", xlabel="entries d", ylabel="time (ms)",
             title=arguments.title or f"{arguments.shape}, k/d = {arguments.density:g}")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, arguments.out)


# Parameters, and seconds of forward + backward of a batch on one NVIDIA P102-100, as S. Shi et al.
# publish them with the code of "Communication-Efficient Distributed Deep Learning with Merged Gradient
# Sparsification on GPUs", INFOCOM 2020. VGG-16 is that for CIFAR-10, the LSTM that for PTB.
MODELS = {"VGG-16": (14.7e6, 0.0523), "ResNet-50": (25.6e6, 0.21), "Inception-v4": (42.7e6, 0.829),
          "LSTM-PTB": (66.0e6, 0.2069)}


def at_size(points, n):
    """Seconds at n: linear between the logarithms; in proportion to n beyond the ends."""
    sizes = [(m, c["ns"] * 1e-9) for m, c in points]
    for (a, ta), (b, tb) in zip(sizes, sizes[1:]):
        if a <= n <= b:
            return ta * (tb / ta) ** (math.log(n / a) / math.log(b / a))
    nearest, seconds = sizes[0] if n < sizes[0][0] else sizes[-1]
    return seconds * n / nearest


def stack(axis, title, rows):
    """A bar for each row of (label, seconds computing, selecting, communicating)."""
    for at, (_, *parts) in enumerate(rows):
        bottom = 0.0
        for part, colour, seconds in zip(["compute", "selection", "communication"],
                                         [COLOURS[7], COLOURS[1], COLOURS[0]], parts):
            axis.bar(at, seconds * 1e3, bottom=bottom * 1e3, color=colour, width=0.7,
                     label=part if at == 0 else None)
            bottom += seconds
    axis.set_xticks(range(len(rows)), [r[0] for r in rows], rotation=45, ha="right", rotation_mode="anchor")
    axis.set_title(title)
    axis.grid(axis="x", visible=False)


def legend_below(figure, axis):
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))


def iteration_time(arguments):
    """Stacked bars: compute as published, selection as measured, communication as modelled.

    Communication of P ranks with latency a (s) and transfer time b (s per byte): a dense ring sum takes
    2 (P - 1) a + 2 (P - 1) / P * 4 d b, an all-gather of 8 k bytes from each rank
    log2(P) a + (P - 1) * 8 k b. Nothing overlaps."""
    found = cases(arguments)
    algos = arguments.algos.split(",")
    models = dict(MODELS)
    for text in arguments.model:
        try:
            name, parameters, compute = text.rsplit(":", 2)
            models[name] = (float(parameters), float(compute))
        except ValueError:
            fail(f"--model '{text}': expected NAME:PARAMETERS:SECONDS")
    ranks, a, b = arguments.ranks, arguments.latency, arguments.seconds_per_byte
    figure, axes = plt.subplots(1, len(models), figsize=(PAGE, 2.6))
    for axis, (name, (n, compute)) in zip(axes, models.items()):
        rows = [("dense", 0.0, 2 * (ranks - 1) * a + 2 * (ranks - 1) / ranks * 4 * n * b)]
        for algo in algos:
            if algo not in found:
                fail(f"no case of '{algo}'; there are {', '.join(found)}")
            k = arguments.density * n
            rows.append((algo, at_size(found[algo], n), math.log2(ranks) * a + (ranks - 1) * 8 * k * b))
        stack(axis, name, [(label, compute, select, communicate) for label, select, communicate in rows])
    axes[0].set_ylabel("time of an iteration (ms)")
    legend_below(figure, axes[0])
    figure.suptitle(arguments.title or f"{ranks} ranks, k/d = {arguments.density:g}: modelled", fontsize=8)
    save(figure, arguments.out)


# ---- skim bench scaling --json -------------------------------------------------------------------------

# Scaling efficiency in per cent at PUBLISHED_RANKS, for dense, topk (all-gather) and gtopk: throughput of a worker
# over that of one alone, as published with the code of S. Shi et al., "A Distributed Synchronous SGD Algorithm with
# Global Top-k Sparsification for Low Bandwidth Networks", arXiv 1901.04359.
PUBLISHED_RANKS = [4, 8, 16, 32]
PUBLISHED = {
    "vgg16": {"dense": [7.9, 7.0, 3.0, 1.0], "allgather": [8.4, 8.3, 7.4, 4.8], "gtopk": [9.9, 9.9, 9.6, 9.4]},
    "resnet20": {"dense": [89.3, 76.6, 56.5, 31.3], "allgather": [98.7, 81.8, 80.1, 75.6],
                 "gtopk": [99.5, 94.4, 87.8, 85.7]},
    "alexnet": {"dense": [8.1, 7.0, 2.8, 0.7], "allgather": [8.2, 8.0, 7.7, 5.3], "gtopk": [9.5, 9.5, 9.4, 9.1]},
    "resnet50": {"dense": [73.8, 70.0, 43.8, 20.3], "allgather": [71.4, 67.5, 65.2, 57.8],
                 "gtopk": [75.3, 75.1, 73.9, 74.0]},
    "lstm-ptb": {"dense": [3.2, 2.2, 1.0, 0.5], "allgather": [5.1, 4.7, 3.8, 1.4], "gtopk": [4.5, 4.5, 3.9, 2.8]},
}


def published(model, exchange, ranks):
    """Per cent, or None."""
    of = PUBLISHED.get(model, {}).get(exchange)
    return of[PUBLISHED_RANKS.index(ranks)] if of and ranks in PUBLISHED_RANKS else None


def scaled(arguments):
    """{(model, exchange): {(ranks, time_scale): row}} in the order of the files: of two dense sums the faster."""
    found = {}
    for argument in arguments.files:
        for row in read_json(argument)[0]:
            if row.get("counts_as") and row["index_code"] == arguments.index_code:
                points = found.setdefault((row["model"], row["counts_as"]), {})
                if points.setdefault((row["ranks"], row["time_scale"]), row) is not row:
                    fail(f"two cases of {row['model']}, {row['counts_as']}, {row['ranks']} ranks")
    if not found:
        fail(f"no case with {arguments.index_code} frames")
    return found


def models_and_exchanges(found):
    return list(dict.fromkeys(m for m, _ in found)), list(dict.fromkeys(e for _, e in found))


def by_ranks(points):
    """[(ranks, row)]; where ranks were measured on two links, on the faster."""
    best = {}
    for (ranks, _), row in sorted(points.items(), reverse=True):
        best[ranks] = row
    return sorted(best.items())


def ranks_axis(axis, ranks):
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, ranks)
    axis.minorticks_off()


def scaling(arguments):
    """Measured: full lines; published: dashed, in the same colours (allgather is there called topk)."""
    found = scaled(arguments)
    models, exchanges = models_and_exchanges(found)
    figure, axes = plt.subplots(1, len(models), figsize=(PAGE, 2.4), sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models):
        for i, exchange in enumerate(exchanges):
            points = by_ranks(found.get((model, exchange), {}))
            style = {"color": COLOURS[i], "marker": MARKERS[i]}
            axis.plot([p for p, _ in points], [100 * r["efficiency"] for _, r in points], label=exchange, **style)
            if known := PUBLISHED.get(model, {}).get(exchange):
                axis.plot(PUBLISHED_RANKS, known, linestyle="--", fillstyle="none", **style)
        axis.set(yscale="log", title=model, xlabel="ranks")
        ranks_axis(axis, sorted({p for (m, _), points in found.items() if m == model for p, _ in points}))
    axes[0][0].set_ylabel("scaling efficiency (%)")
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100]
    axes[0][0].set_yticks(ticks, ticks)
    axes[0][0].plot([], [], color="black", linestyle="--", label="published")
    legend_below(figure, axes[0][0])
    save(figure, arguments.out)


def scaling_parts(arguments):
    """Stacked bars for each exchange: computing as published, selection and exchange as measured."""
    found = scaled(arguments)
    models, exchanges = models_and_exchanges(found)
    ranks = arguments.ranks or max(p for points in found.values() for p, _ in points)
    figure, axes = plt.subplots(1, len(models), figsize=(PAGE, 2.6), squeeze=False)
    for axis, model in zip(axes[0], models):
        rows = [(e, dict(by_ranks(found.get((model, e), {}))).get(ranks)) for e in exchanges]
        if not any(r for _, r in rows):
            fail(f"no case of {model} on {ranks} ranks")
        stack(axis, model, [(e, r["compute_s"], r["select_s"], r["exchange_s"]) for e, r in rows if r])
    axes[0][0].set_ylabel("time of a step (ms)")
    legend_below(figure, axes[0][0])
    figure.suptitle(arguments.title or f"{ranks} ranks", fontsize=8)
    save(figure, arguments.out)


def scaling_time(arguments):
    """All-gather and gTop-k against ranks, a panel for each model: measured as points, modelled as lines."""
    found = scaled(arguments)
    models, exchanges = models_and_exchanges(found)
    exchanges = [e for e in ("allgather", "gtopk-tree", "gtopk") if e in exchanges]
    figure, axes = plt.subplots(1, len(models), figsize=(PAGE, 2.4), squeeze=False)
    for axis, model in zip(axes[0], models):
        for i, exchange in enumerate(exchanges):
            points = by_ranks(found.get((model, exchange), {}))
            axis.plot([p for p, _ in points], [1e3 * r["exchange_s"] for _, r in points], linestyle="none",
                      marker=MARKERS[i], color=COLOURS[i], label=f"{exchange}, measured")
            modelled = [(p, r) for p, r in points if r["predicted_s"] is not None]
            axis.plot([p for p, _ in modelled], [1e3 * r["predicted_s"] for _, r in modelled], color=COLOURS[i],
                      label=f"{exchange}, modelled")
        axis.set(yscale="log", xlabel="ranks", title=model)
        ranks_axis(axis, sorted({p for e in exchanges for p, _ in by_ranks(found.get((model, e), {}))}))
    axes[0][0].set_ylabel("time of an exchange (ms)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(exchanges))
    save(figure, arguments.out)


def milliseconds(seconds):
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def efficiency_cell(r):
    known = published(r["model"], r["counts_as"], r["ranks"])
    return f"{100 * r['efficiency']:.1f}" + (f" ({known:g})" if known is not None else "")


def auto_cell(r):
    if "over_best" not in r:
        return "-"
    over = r["over_best"]
    return f"{r['scheme'] or '?'}: {over['median']:.3f} [{over['low']:.3f}, {over['high']:.3f}]"


# What --cell says: a row of skim bench scaling in few characters.
CELLS = {
    "efficiency": ("scaling efficiency in %, in brackets as published", efficiency_cell),
    "time": ("exchange in ms, median [least, most]",
             lambda r: f"{milliseconds(r['exchange_s'])} [{milliseconds(r['exchange_least_s'])}, "
                       f"{milliseconds(r['exchange_most_s'])}]"),
    "ratio": ("measured over predicted time of the exchange",
              lambda r: "-" if r["predicted_s"] is None else f"{r['measured_over_predicted']:.2f}"),
    "speed-up": ("speed-up of a step over dense; over allgather",
                 lambda r: "; ".join("-" if r[key] is None else f"{r[key]:.2f}" for key in
                                     ("speed_up_over_dense", "speed_up_over_allgather"))),
    "parts": ("% of a step computing; selecting; exchanging",
              lambda r: "; ".join(f"{100 * r[part] * r['efficiency'] / r['compute_s']:.1f}" for part in
                                  ("compute_s", "select_s", "exchange_s"))),
    "bytes": ("bytes sent by the busiest rank", lambda r: f"{r['bytes']:,.0f}"),
    "busy": ("% of the machine's processors busy",
             lambda r: "-" if r["busy"] is None else f"{100 * r['busy']:.0f}"),
    "auto": ("auto: what it chose: its step less computing over that of the best single exchange, median of rounds "
             "[interval]", auto_cell),
}


def scaling_table(arguments):
    """Models and exchanges down, ranks across. A star: the machine was over 90 % busy, so that the figure says
    nothing about the network."""
    found = scaled(arguments)
    what, cell = CELLS[arguments.cell]
    models, exchanges = models_and_exchanges(found)
    if arguments.cell == "auto":
        exchanges = [e for e in exchanges if e == "auto"]
    settings = sorted({s for points in found.values() for s in points}, key=lambda s: (s[0], s[1]))
    head = [f"P = {p}" + (f", {scale:g} x slower" if scale != 1 else "") for p, scale in settings]
    print(f"{what[0].upper()}{what[1:]}.\n")
    print("| model | exchange | " + " | ".join(head) + " |")
    print("|---" * (2 + len(head)) + "|")
    for model in models:
        for exchange in exchanges:
            points = found.get((model, exchange), {})
            cells = [cell(points[s]) + ("*" if (points[s]["busy"] or 0) > 0.9 else "") if s in points else "-"
                     for s in settings]
            print(f"| {model} | {exchange} | " + " | ".join(cells) + " |")


# ---- bench/paper4.py -------------------------------------------------------------------------------------

# Final test accuracy in per cent, and how many times fewer entries the server sends than the union of what it got, as
# published with the code of W. Zou, H. De Sterck and J. Liu, "Downlink Compression Improves TopK Sparsification",
# arXiv 2209.15203. Repeated runs where there are some, without the one that the rate was chosen by; of shards the
# least and the most.
ZOU_RUNS = {  # (task, split, ranks): sgd, uni, bi
    ("mnist-mlp", "partition", 10): ([97.75, 97.72, 97.71], [97.68, 97.51, 97.72], [97.52, 97.68, 97.51]),
    ("mnist-mlp", "partition", 20): ([97.68, 97.73, 97.70], [97.33, 97.58, 97.57], [97.71, 97.48, 97.71]),
    ("mnist-mlp", "partition", 50): ([97.73, 97.77, 97.47], [97.68, 97.68, 97.77], [97.41, 97.46, 97.58]),
    ("mnist-mlp", "partition", 100): ([97.61, 97.72, 97.66], [97.49, 97.47, 97.53], [97.47, 97.31, 97.36]),
    ("mnist-mlp", "shards", 100): ([97.53], [97.38, 97.63], [97.22, 97.58]),
    ("fashion-mlp", "partition", 20): ([88.13], [89.20, 88.86, 88.63, 89.23], [88.93, 89.03, 88.80, 88.60]),
    ("fashion-mlp", "partition", 50): ([89.64], [88.47, 88.67, 89.06, 88.84], [88.21, 88.91, 88.53, 88.91]),
    ("fashion-mlp", "partition", 100): ([87.96], [88.59, 88.67, 88.76, 88.19], [88.21, 88.66, 88.65, 88.72]),
    ("fashion-mlp", "shards", 100): ([88.97], [87.50, 88.85], [87.66, 88.40]),
    ("mnist-cnn", "partition", 20): ([99.21], [99.24, 99.19, 99.24], [99.28, 99.31, 99.25]),
    ("mnist-cnn", "partition", 100): ([99.10], [99.05, 99.02, 99.12], [99.12, 99.15, 99.14]),
    ("fashion-cnn", "partition", 20): ([90.48], [90.13], [90.35]),
    ("fashion-cnn", "partition", 100): ([90.08], [90.51], [90.77]),
}
ZOU_SWEEP = {  # k_d/n of bi on 100 ranks
    "mnist-mlp": {1e-4: 96.61, 5e-4: 97.21, 2e-3: 97.35, 5e-3: 97.56, 1e-2: 97.52},
    "fashion-mlp": {1e-4: 88.38, 5e-4: 88.77, 5e-3: 89.01, 1e-2: 88.35},
}
ZOU_SAVING = {  # of bi by ranks
    "mnist-mlp": {10: 10.3, 20: 20.2, 50: 48.6, 100: 90.7},
    "fashion-mlp": {20: 19.5, 50: 45.2, 100: 80.5},
    "mnist-cnn": {20: 19.3, 100: 77.2},
    "fashion-cnn": {100: 97.4},
}
ZOU_METHODS = ["sgd", "uni", "bi"]


def zou_accuracy(task, split, ranks, method, down):
    """The published ones; none: []."""
    if method == "bi" and down != 0.001:
        known = ZOU_SWEEP.get(task, {}).get(down) if (split, ranks) == ("partition", 100) else None
        return [known] if known else []
    return ZOU_RUNS.get((task, split, ranks), ([], [], []))[ZOU_METHODS.index(method)]


def downlink_runs(arguments):
    """{(task, split, ranks, method, k_d/n): rows of the seeds}, sorted."""
    found = {}
    for argument in arguments.files:
        text, _ = read(argument)
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
                key = (row["task"], row["split"], row["ranks"], row["method"], row["down"])
            except (ValueError, KeyError) as e:
                fail(f"'{argument}' line {number}: no run of bench/paper4.py: {e}")
            found.setdefault(key, []).append(row)
    if not found:
        fail("no runs in " + ", ".join(arguments.files))
    tasks = list(dict.fromkeys(task for task, *_ in found))
    order = {key: (tasks.index(key[0]), key[1], key[2], ZOU_METHODS.index(key[3]), key[4]) for key in found}
    return {key: found[key] for key in sorted(found, key=order.get)}


def mean_spread(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def accuracy_of(rows):
    """Per cent: mean and standard deviation over seeds."""
    return mean_spread([100 * r["test_accuracy"] for r in rows])


def saving_of(rows):
    """Entries of the union of what the ranks sent, over k_d."""
    return statistics.mean(r["union_entries_per_step"] / (r["down"] * r["parameters"]) for r in rows)


def downlink_table(arguments):
    """A row for every group of runs that differ in the seed alone."""
    print("| task | examples | ranks | method | k_d/n | rate | accuracy % (seeds) | published | difference | saving "
          "| published |")
    print("|---" * 11 + "|")
    for (task, split, ranks, method, down), rows in downlink_runs(arguments).items():
        mean, spread = accuracy_of(rows)
        known = zou_accuracy(task, split, ranks, method, down)
        bi = method == "bi"
        saving = ZOU_SAVING.get(task, {}).get(ranks) if (split, down) == ("partition", 0.001) else None
        cells = [task, split, str(ranks), method, f"{down:g}" if bi else "-", f"{rows[0]['lr']:g}",
                 f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "") + f" ({len(rows)})",
                 "-" if not known else f"{statistics.mean(known):.2f}" + (
                     f" [{min(known):.2f}, {max(known):.2f}]" if len(known) > 1 else ""),
                 f"{mean - statistics.mean(known):+.2f}" if known else "-",
                 f"{saving_of(rows):.1f}" if bi else "-", f"{saving:g}" if bi and saving else "-"]
        print("| " + " | ".join(cells) + " |")


def downlink(arguments):
    """For each task: accuracy against ranks; of bi, accuracy against k_d/n and the saving against ranks. Full: here,
    with standard deviations over seeds; hollow: published."""
    found = downlink_runs(arguments)
    tasks = list(dict.fromkeys(task for task, *_ in found))
    figure, axes = plt.subplots(len(tasks), 3, figsize=(PAGE, 0.4 + 2.0 * len(tasks)), squeeze=False)
    for (by_ranks_axis, by_down, by_saving), task in zip(axes, tasks):
        parted = {key[2:]: rows for key, rows in found.items() if key[:2] == (task, "partition")}
        most = max(ranks for ranks, *_ in parted) if parted else 0

        def draw(axis, points, method, value, published):
            """points: [(x, rows)]; published: of an x, or None."""
            style = {"color": COLOURS[ZOU_METHODS.index(method)], "marker": MARKERS[ZOU_METHODS.index(method)]}
            if not points:
                return
            both = [(x, *value(rows)) for x, rows in points]
            axis.errorbar([x for x, *_ in both], [y for _, y, _ in both], [e for *_, e in both], capsize=2,
                          elinewidth=0.6, label=method, **style)
            known = [(x, published(x)) for x, _ in points if published(x)]
            axis.plot([x for x, _ in known], [y for _, y in known], linestyle="--", fillstyle="none", **style)

        for method in ZOU_METHODS:
            same = {"sgd": 1.0, "uni": 1.0, "bi": 0.001}[method]
            draw(by_ranks_axis, [(p, rows) for (p, m, d), rows in parted.items() if (m, d) == (method, same)], method,
                 accuracy_of, lambda p, m=method, d=same: mean_or_none(zou_accuracy(task, "partition", p, m, d)))
        draw(by_down, [(d, rows) for (p, m, d), rows in parted.items() if (p, m) == (most, "bi")], "bi", accuracy_of,
             lambda d: mean_or_none(zou_accuracy(task, "partition", most, "bi", d)))
        draw(by_saving, [(p, rows) for (p, m, d), rows in parted.items() if (m, d) == ("bi", 0.001)], "bi",
             lambda rows: (saving_of(rows), 0.0), lambda p: ZOU_SAVING.get(task, {}).get(p))
        ranks = sorted({p for p, *_ in parted})
        for axis in (by_ranks_axis, by_saving):
            ranks_axis(axis, ranks)
            axis.set_xlabel("ranks")
        by_ranks_axis.set(title=task, ylabel="test accuracy (%)")
        by_down.set(xscale="log", xlabel=r"$k_d/n$", title=f"{most} ranks")
        by_saving.set(ylabel="union / $k_d$")
    axes[0][0].plot([], [], color="black", linestyle="--", marker="o", fillstyle="none", label="published")
    legend_below(figure, axes[0][0])
    save(figure, arguments.out)


def mean_or_none(values):
    return statistics.mean(values) if values else None


# ---- command line ----------------------------------------------------------------------------------------


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

    one = commands.add_parser("budgets", help="quality against bytes, by rule", description=budgets.__doc__)
    one.add_argument("files", nargs="+", metavar="FILE")
    one.add_argument("--out", required=True)
    one.set_defaults(run=budgets)

    for name, run, words in [("select-time", select_time, "time against entries"),
                             ("iteration-time", iteration_time, "modelled time of iterations")]:
        one = commands.add_parser(name, help=words, description=run.__doc__)
        one.add_argument("files", nargs="+", metavar="FILE")
        one.add_argument("--shape", default="normal")
        one.add_argument("--density", type=float, default=0.001)
        one.add_argument("--where", action="append", default=[], metavar="KEY=VALUE",
                         help="only cases with this field, such as threads=1")
        one.add_argument("--algos", help="comma-separated [all; iteration-time: exact,gaussian,dgc]")
        one.add_argument("--title")
        one.add_argument("--out", required=True)
        one.set_defaults(run=run)
    one.set_defaults(algos="exact,gaussian,dgc")
    one.add_argument("--model", action="append", default=[], metavar="NAME:PARAMETERS:SECONDS",
                     help="one more; SECONDS of forward and backward")
    # 16 machines with 10 Gbit/s Ethernet, from the same published code.
    one.add_argument("--ranks", type=int, default=16)
    one.add_argument("--latency", type=float, default=1.4e-4, help="s [1.4e-4]")
    one.add_argument("--seconds-per-byte", type=float, default=2e-10, help="[2e-10]")

    for name, run, words in [("scaling", scaling, "scaling efficiency against ranks"),
                             ("scaling-parts", scaling_parts, "computing, selection and exchange of a step"),
                             ("scaling-time", scaling_time, "time of an exchange, measured and modelled"),
                             ("scaling-table", scaling_table, "a table in Markdown, on standard output")]:
        one = commands.add_parser(name, help=words, description=run.__doc__)
        one.add_argument("files", nargs="+", metavar="FILE")
        one.add_argument("--index-code", default="coded", choices=["coded", "raw32"], help="of the frames [coded]")
        one.set_defaults(run=run)
        if run is scaling_table:
            one.add_argument("--cell", default="efficiency", choices=list(CELLS))
        else:
            one.add_argument("--out", required=True)
        if run is scaling_parts:
            one.add_argument("--ranks", type=int, help="[the most that were measured]")
            one.add_argument("--title")

    for name, run, words in [("downlink", downlink, "accuracy and saving of a parameter server"),
                             ("downlink-table", downlink_table, "a table in Markdown, on standard output")]:
        one = commands.add_parser(name, help=words, description=run.__doc__)
        one.add_argument("files", nargs="+", metavar="FILE")
        if run is downlink:
            one.add_argument("--out", required=True)
        one.set_defaults(run=run)

    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
