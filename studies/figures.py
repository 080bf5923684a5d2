#!/usr/bin/env python3
"""Draws the results of the studies, beside the papers' published numbers. Needs matplotlib (scripts/setup).

  figures.py budgets        adaptive-k.json...   loss and accuracy against the bytes of runs, by rule
  figures.py iteration-time bench.json           modelled time of an iteration of known models
  figures.py scaling        scaling.json...      scaling efficiency against ranks, beside the published one
  figures.py scaling-parts  scaling.json...      computing, selection and exchange of a step
  figures.py scaling-time   scaling.json...      time of exchanges against ranks and parameters, and the model's
  figures.py scaling-table  scaling.json...      the same in numbers: a table in Markdown
  figures.py slow-link      slow-link.jsonl...   quality against seconds of training, on slow links
  figures.py downlink       both-links.jsonl...  accuracy and downlink saving of a parameter server
  figures.py downlink-table both-links.jsonl...  the same in numbers: a table in Markdown

The files are those of adaptive_k.py --out, slow_link.py, `skim bench select --json`, `skim bench scaling --json` (scaling.py) and
both_links.py. A file may be followed by =LABEL. PNG, SVG or PDF by the name of --out.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools/plots"))

import slow_link  # noqa: E402
from accuracy import mean_and_deviation, result  # noqa: E402
from plots import (COLOURS, MARKERS, PAGE, QUALITIES, add_case_options, cases, fail, legend_below, plt, read,  # noqa: E402
                   read_json, save)
from published import MODELS, PUBLISHED, PUBLISHED_RANKS, ZOU_METHODS, ZOU_SAVING, published, zou_accuracy  # noqa: E402


# ---- adaptive_k.py --out ----------------------------------------------------------------------------------


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


def iteration_time(arguments):
    """Stacked bars: compute as published, selection as measured, communication as modelled.

    Communication of P ranks with latency a (s) and transfer time b (s per byte): a dense ring sum takes
    2 (P - 1) a + 2 (P - 1) / P * 4 d b, an all-gather of 8 k bytes from each rank
    log2(P) a + (P - 1) * 8 k b. Nothing overlaps."""
    found = cases(arguments)
    rules = arguments.select.split(",")
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
        for rule in rules:
            if rule not in found:
                fail(f"no case of '{rule}'; there are {', '.join(found)}")
            k = arguments.density * n
            rows.append((rule, at_size(found[rule], n), math.log2(ranks) * a + (ranks - 1) * 8 * k * b))
        stack(axis, name, [(label, compute, select, communicate) for label, select, communicate in rows])
    axes[0].set_ylabel("time of an iteration (ms)")
    legend_below(figure, axes[0])
    figure.suptitle(arguments.title or f"{ranks} ranks, k/d = {arguments.density:g}: modelled", fontsize=8)
    save(figure, arguments.out)


# ---- skim bench scaling --json -------------------------------------------------------------------------

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
        fail(f"no case with --index-code {arguments.index_code}")
    for (model, _), points in found.items():
        for setting, row in points.items():
            allgather = found.get((model, "allgather"), {}).get(setting)
            row["speed_up_over_allgather"] = allgather and row["efficiency"] / allgather["efficiency"]
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
    return f"{r.get('chosen') or '?'}: {over['median']:.3f} [{over['low']:.3f}, {over['high']:.3f}]"


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


# ---- both_links.py ---------------------------------------------------------------------------------------

def downlink_runs(arguments):
    """{(task, split, ranks, method, k_down/n): rows of the seeds}, sorted."""
    found = {}
    for argument in arguments.files:
        text, _ = read(argument)
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
                key = (row["task"], row["split"], row["ranks"], row["method"], row["down"])
            except (ValueError, KeyError) as e:
                fail(f"'{argument}' line {number}: no run of studies/both_links.py: {e}")
            found.setdefault(key, []).append(row)
    if not found:
        fail("no runs in " + ", ".join(arguments.files))
    tasks = list(dict.fromkeys(task for task, *_ in found))
    order = {key: (tasks.index(key[0]), key[1], key[2], ZOU_METHODS.index(key[3]), key[4]) for key in found}
    return {key: found[key] for key in sorted(found, key=order.get)}


def accuracy_of(rows):
    """Per cent: mean and standard deviation over seeds; nan if a run diverged."""
    return mean_and_deviation([100 * result(r, "test_accuracy") for r in rows])


def saving_of(rows):
    """Entries of the union of what the ranks sent, over k_down."""
    return statistics.mean(r["union_entries_per_step"] / (r["down"] * r["parameters"]) for r in rows)


def downlink_table(arguments):
    """A row for every group of runs that differ in the seed alone."""
    print("| task | examples | ranks | method | k_down/n | rate | accuracy % (seeds) | published | difference | saving "
          "| published |")
    print("|---" * 11 + "|")
    for (task, split, ranks, method, down), rows in downlink_runs(arguments).items():
        mean, spread = accuracy_of(rows)
        known = zou_accuracy(task, split, ranks, method, down)
        bi = method == "bi"
        saving = ZOU_SAVING.get(task, {}).get(ranks) if (split, down) == ("partition", 0.001) else None
        cells = [task, split, str(ranks), method, f"{down:g}" if bi else "-", f"{rows[0]['lr']:g}",
                 ("diverged" if math.isnan(mean) else f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "")) +
                 f" ({len(rows)})",
                 "-" if not known else f"{statistics.mean(known):.2f}" + (
                     f" [{min(known):.2f}, {max(known):.2f}]" if len(known) > 1 else ""),
                 f"{mean - statistics.mean(known):+.2f}" if known and not math.isnan(mean) else "-",
                 f"{saving_of(rows):.1f}" if bi else "-", f"{saving:g}" if bi and saving else "-"]
        print("| " + " | ".join(cells) + " |")


def downlink(arguments):
    """For each task: accuracy against ranks; of bi, accuracy against k_down/n and the saving against ranks. Full: here,
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
        by_down.set(xscale="log", xlabel=r"$k_\mathrm{down}/n$", title=f"{most} ranks")
        by_saving.set(ylabel=r"union / $k_\mathrm{down}$")
    axes[0][0].plot([], [], color="black", linestyle="--", marker="o", fillstyle="none", label="published")
    legend_below(figure, axes[0][0])
    save(figure, arguments.out)


# ---- slow_link.py ----------------------------------------------------------------------------------------


def on_slow_links(arguments):
    """A picture for each link: the metric on the validation data against seconds of training, a line a method, of the
    first seed, on the machine on which dense ran. Dashed: what counts as reached."""
    rows = [json.loads(line) for argument in arguments.files for line in read(argument)[0].splitlines()]
    rows = [row for row in rows if row["task"] == arguments.task]
    machines = {row["machine"] for row in rows if row["label"] == "dense"}
    rows = [row for row in rows if row["machine"] in machines]
    if not rows:
        fail(f"there are no rows of the task '{arguments.task}'")
    links, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("link", "label"))
    target = slow_link.target_of(rows)
    figure, axes = plt.subplots(1, len(links), figsize=(PAGE, 3.0), squeeze=False, sharey=True)
    for axis, link in zip(axes[0], links):
        for i, method in enumerate(methods):
            mine = [row for row in rows if (row["link"], row["label"]) == (link, method)]
            if mine:
                _, seconds, values = zip(*min(mine, key=lambda row: row["seed"])["curve"])
                axis.plot(seconds, values, color=COLOURS[i % len(COLOURS)], label=method,
                          linestyle="-" if i < len(COLOURS) else ":")
        axis.axhline(target, color="black", linewidth=0.6, linestyle="--")
        axis.set(title=re.sub(r"([mg])bit$", lambda unit: f" {unit[1].upper()}bit/s", link),
                 xlabel="seconds of training", xscale="log")
    if slow_link.metric_of(rows) == "loss":
        axes[0][0].set(ylabel="validation loss", ylim=(target - 0.2, target + 1.0))
    else:
        axes[0][0].set_ylabel("validation accuracy (%)")
    legend_below(figure, axes[0][0])
    save(figure, arguments.out)


def mean_or_none(values):
    return statistics.mean(values) if values else None


# ---- command line ----------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("budgets", help="quality against bytes, by rule", description=budgets.__doc__)
    one.add_argument("files", nargs="+", metavar="FILE")
    one.add_argument("--out", required=True)
    one.set_defaults(run=budgets)

    one = commands.add_parser("iteration-time", help="modelled time of iterations", description=iteration_time.__doc__)
    add_case_options(one)
    one.set_defaults(run=iteration_time, select="exact,gaussian,dgc")
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
        one.add_argument("--index-code", default="auto", metavar="NAME", help="of the frames [auto]")
        one.set_defaults(run=run)
        if run is scaling_table:
            one.add_argument("--cell", default="efficiency", choices=list(CELLS))
        else:
            one.add_argument("--out", required=True)
        if run is scaling_parts:
            one.add_argument("--ranks", type=int, help="[the most that were measured]")
            one.add_argument("--title")

    one = commands.add_parser("slow-link", help="quality against seconds of training", description=on_slow_links.__doc__)
    one.add_argument("files", nargs="+", metavar="FILE")
    one.add_argument("--task", required=True)
    one.add_argument("--out", required=True)
    one.set_defaults(run=on_slow_links)

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
