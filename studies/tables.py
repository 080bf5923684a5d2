#!/usr/bin/env python3
"""Writes the tables of docs/results/ from the rows in studies/rows/.

  studies/tables.py          rewrites every table
  studies/tables.py --check  changes nothing; names each table that differs from its rows, and fails if one does

A table stands between <!-- table: NAME --> and <!-- end -->. TABLES below says for each NAME: its page, its rows, and
its columns. A column is a heading and a template over the fields of a row. If a column has several templates,
the first one whose fields the row has is used. If there is none, the cell is "-". Headings are templates over
the first row. --root FOLDER works on another copy of the project. Needs nothing but Python.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
import statistics
import sys

import adaptive_k
import quality
import slow_link
from accuracy import mean_and_deviation, result
from published import PUBLISHED, PUBLISHED_RANKS, ZOU_METHODS, ZOU_SAVING, ZOU_UNION, zou_accuracy

SEEDS = ("1", "2", "3")
DENSITIES = (0.0005, 0.002, 0.01)


@dataclasses.dataclass(frozen=True)
class Table:
    page: str
    name: str
    rows: callable  # of the folder with the rows: a list of dicts
    columns: dict  # {heading: template, or templates}


# ---- rows ------------------------------------------------------------------------------------------------


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def variant_of(label):
    return next((v for v in quality.VARIANTS if f", shared indices, {v}, 0.1 %" in label), None)


def quality_rows(folder):
    """Those of quality.py, but for variants. Of runs that differ only in how they compute: that on the CPU, in bfloat16."""
    found = {}
    for row in sorted(lines(folder, "quality.jsonl"), key=lambda row: (row.get("float32", False), row.get("device", "cpu"))):
        run = tuple(row[key] for key in ("task", "label", "ranks", "steps", "lr", "seed"))
        if variant_of(row["label"]) is None:
            found.setdefault(run, row)
    return list(found.values())


def kept(name, table, **where):
    """The rows of one table in a file, in its order."""
    def load(folder):
        return [row for row in lines(folder, name) if row["table"] == table and where.items() <= row.items()]
    return load


def wide(load, by, key):
    """One row for all that agree in `by`; of a row with key K the other fields are named FIELD_K."""
    def joined(folder):
        found = {}
        for row in load(folder):
            one = found.setdefault(tuple(row[name] for name in by), {name: row[name] for name in by})
            one |= {f"{field}_{row[key]}": value for field, value in row.items() if field not in by}
        return list(found.values())
    return joined


def adding(load, **more):
    """Fields that are computed from a row."""
    def added(folder):
        return [row | {name: value(row) for name, value in more.items()} for row in load(folder)]
    return added


def over(values, name):
    """The mean and, of several, the standard deviation."""
    mean, deviation = mean_and_deviation(values)
    return {name: mean} | ({f"{name}_deviation": deviation} if len(values) > 1 else {})


def links(files, tasks, splits=("partition", "shards")):
    """A row for each task, split and number of ranks of both_links.py: per cent and savings over the seeds, at
    k_down/n = 0.001, beside what was published."""
    def load(folder):
        groups = {}
        for row in (row for name in files for row in lines(folder, name) if row.get("task") in tasks):
            if row.get("split") in splits and row["down"] in (0.001, 1.0):
                groups.setdefault((row["task"], row["split"], row["ranks"]), {}).setdefault(
                    row["method"], []).append(row)
        order = sorted(groups, key=lambda g: (tasks.index(g[0]), splits.index(g[1]), g[2]))
        return [group_of_links(*group, groups[group]) for group in order]
    return load


def group_of_links(task, split, ranks, methods):
    one = {"task": task, "split": split, "ranks": ranks, "seeds": len(methods["bi"]),
           "examples": {"partition": "own", "shards": "two shards a rank", "iid": "all"}[split]}
    for method in ZOU_METHODS:
        one |= over([100 * result(row, "test_accuracy") for row in methods[method]], method)
        known = zou_accuracy(task, "partition" if split == "iid" and task == "fashion-cnn" else split, ranks, method,
                             0.001)
        if split == "shards" and len(known) > 1:  # the least and the most
            one |= {f"{method}_least": min(known), f"{method}_most": max(known)}
        elif known:
            one[f"{method}_published"] = statistics.mean(known)
    one |= over([saved(row) for row in methods["bi"]], "saved")
    one["union"] = statistics.mean(
        row["union_percent"] if "union_percent" in row else
        100 * row["union_entries_per_step"] / (ranks * int(row["density"] * row["parameters"]))
        for row in methods["bi"])
    if split != "shards" and ranks in ZOU_SAVING.get(task, {}):
        one["saved_published"] = ZOU_SAVING[task][ranks]
    if split == "partition" and ranks in ZOU_UNION.get(task, {}):
        one["union_published"] = ZOU_UNION[task][ranks]
    return one


def saved(row):
    """The union of what the ranks sent, over what the server sends in its place."""
    return row["saved"] if "saved" in row else row["union_entries_per_step"] / (row["down"] * row["parameters"])


def sweep(folder):
    """A row for each k_down/n of bi, on 100 ranks, seed 1."""
    found = {}
    for row in lines(folder, "both-links.jsonl"):
        if (row["method"], row["ranks"], row["split"], row["seed"]) == ("bi", 100, "partition", 1) and \
                row["task"] in ("mnist-mlp", "fashion-mlp"):
            one = found.setdefault(row["down"], {"down": row["down"]})
            one |= {f"accuracy_{row['task']}": 100 * result(row, "test_accuracy"), f"saved_{row['task']}": saved(row)}
            known = zou_accuracy(row["task"], "partition", 100, "bi", row["down"])
            if known:
                one[f"published_{row['task']}"] = statistics.mean(known)
    return [found[down] for down in sorted(found)]


def quality_of(task, ranks, steps=None):
    """A row for each method of quality.py, dense first: the metric at its best rate, over the seeds. steps: of all runs;
    None: as many as quality.py takes by itself."""
    def load(folder):
        by_method = {}
        for row in quality_rows(folder):
            if (row["task"], row["ranks"], row["steps"]) == (task, ranks, steps or quality.TASKS[task][0]) and \
                    ", density" not in row["label"] and not row.get("islands"):
                by_method.setdefault(row["label"], []).append(row)
        metric = slow_link.metric_of(next(iter(by_method.values())))
        found = []
        for method in (m for m in quality.METHODS if m in by_method):
            rows = by_method[method]
            first = [row for row in rows if row["seed"] == 0]
            best = quality.best_rate(first)
            at_best = [row for row in rows if row["lr"] == best]
            one = {"method": method, "rate": best, "rates": len(first), "seeds": len(at_best)}
            one["percent"] = 100 * statistics.mean(row["share"] for row in at_best)
            one["sent"] = at_best[0]["steps"] / at_best[0]["every"]
            if at_best[0]["method"] in ("after-sum", "correction", "local", "demo"):
                one["sent"] *= at_best[0]["density"]
            elif at_best[0]["method"] == "alone":
                one["sent"] = 0
            one["sent"] = round(one["sent"], 3)
            for part in ("test", "validation"):
                one |= over([row[f"{part}_{metric}"] for row in at_best], part)
            found.append(one)
        return [row | {f"{part}_behind": row[part] - found[0][part] for part in ("test", "validation")} for row in found]
    return load


def in_short(folder):
    """A row for each task: dense, a rank alone, and the best method with several seeds at each share of the bytes. The
    validation data choose it, among those that send less than 1.1 %. The fields NAME_behind are texts: how far it is
    behind dense on the test data, and for text also on the validation data.
    """
    def behind(row, is_text):
        if not is_text:
            return f"{row['test_behind']:+.2f} points"
        return f"{row['validation_behind']:+.3f}; test {row['test_behind']:+.3f}"

    found = []
    for name, task, ranks in (("GPT, AdamW", "gpt", 2), ("GPT, AdamW", "gpt", 4), ("LSTM, Adam", "lstm", 4),
                              ("LeNet-5, SGD", "fashion", 4), ("ResNet-8, SGD", "resnet8", 2),
                              ("ResNet-20, SGD", "resnet20", 4)):
        rows = quality_of(task, ranks)(folder)
        is_text = task in ("gpt", "lstm")
        one = {"task": name, "ranks": ranks}
        for share, short in (("one rank alone", "alone"), ("1 %", "one"), ("0.1 %", "tenth")):
            among = [row for row in rows
                     if row["method"].split(", ")[-1] == share and row["seeds"] > 1 and row["percent"] < 1.1]
            best = min(among, key=lambda row: row["validation"] if is_text else -row["validation"])
            one |= {short: best["method"].removesuffix(f", {share}"), f"{short}_behind": behind(best, is_text)}
        found.append(one)
    return found


def entry_sends(task, *groups, rate=None):
    """A row for each density of a sweep: how far each method is from dense of the same seeds in validation loss, or in
    accuracy on the test data, on each number of ranks.

    A key is the method's name, followed by the number of ranks if there are several. rate: of all runs; None: the best.
    """
    def load(folder):
        rows = [row for row in quality_rows(folder)
                if (row["task"], row["steps"]) == (task, 1000) and row["lr"] == (rate or row["lr"])]
        metric = "validation_loss" if slow_link.metric_of(rows) == "loss" else "test_accuracy"

        def best(label, ranks):
            mine = [row for row in rows if (row["label"], row["ranks"]) == (label, ranks)]
            of_best = quality.best_rate([row for row in mine if row["seed"] == 0]) if mine else None
            return {row["seed"]: row[metric] for row in mine if row["lr"] == of_best}

        found = []
        for density in quality.SWEEP:
            one = {"density": density, "sends": 1000 * density}
            for ranks in groups:
                for name in quality.SWEPT:
                    values = best(f"{name}, density {density:g}", ranks)
                    if not values and density == quality.DENSITY["1 %"][ranks]:
                        values = best(f"{name}, 1 %", ranks)
                    if values:
                        key = f"{name} {ranks}" if len(groups) > 1 else name
                        dense = best("dense", ranks)
                        one[key] = statistics.mean(value - dense[seed] for seed, value in values.items())
            if len(one) > 2:
                found.append(one)
        return found
    return load


def by_steps(task, ranks):
    """A row for each number of steps of runs with seed 0: the metric, and how far each method is behind dense.

    Each method is at the best of the rates that it ran at.
    """
    def load(folder):
        rows = [row for row in quality_rows(folder) if (row["task"], row["ranks"], row["seed"]) == (task, ranks, 0)]
        metric = slow_link.metric_of(rows)
        metric = "validation_loss" if metric == "loss" else "test_accuracy"
        found = []
        for steps in sorted({row["steps"] for row in rows if row["label"] == "dense"}):
            at = {}
            for label in {row["label"] for row in rows if row["steps"] == steps}:
                mine = [row for row in rows if (row["label"], row["steps"]) == (label, steps)]
                [at[label]] = (row[metric] for row in mine if row["lr"] == quality.best_rate(mine))
            found.append({"steps": steps, "dense": at["dense"], "sends": steps * quality.DENSITY["0.1 %"][ranks],
                          **{name: value - at["dense"] for name, value in at.items() if name != "dense"}})
        return found
    return load


def steps_to_dense(*methods):
    """A row for each task, method and rate, on 4 ranks with seed 0: the metric of dense at its best rate, after as many
    steps as quality.py takes by itself, and that of the method after so many and more."""
    def load(folder):
        found = []
        for task, label, rate in methods:
            rows = [row for row in quality_rows(folder) if (row["task"], row["ranks"], row["seed"]) == (task, 4, 0)]
            is_text = slow_link.metric_of(rows) == "loss"
            metric, digits = ("validation_loss", 3) if is_text else ("test_accuracy", 2)
            dense = [row for row in rows if (row["label"], row["steps"]) == ("dense", quality.TASKS[task][0])]
            [goal] = (row[metric] for row in dense if row["lr"] == quality.best_rate(dense))
            at = {row["steps"]: row[metric] for row in rows if (row["label"], row["lr"]) == (label, rate)}
            reached = [steps for steps, value in at.items() if (value <= goal if is_text else value >= goal)]
            found.append({"task": task, "method": label, "dense": f"{goal:.{digits}f}", "needs": min(reached, default=None),
                          **{f"after {steps}": f"{value:.{digits}f}" for steps, value in at.items()}})
        return found
    return load


def outer_rates(folder):
    """A row for each number of ranks and method of LocalSteps: the LSTM with outer_lr by the density, and with 1.

    All at rate 0.01 with seed 0; how far the validation loss is behind dense.
    """
    loss = {(row["ranks"], row["label"]): row["validation_loss"] for row in quality_rows(folder)
            if (row["task"], row["steps"], row["lr"], row["seed"]) == ("lstm", 1000, 0.01, 0)}
    found = []
    for ranks in quality.RANKS:
        for name, density in (("step ahead", quality.DENSITY), ("15 local steps, ahead", quality.DENSITY_15)):
            for share in density:
                behind = {label: loss[ranks, label] - loss[ranks, "dense"]
                          for label in (f"{name}, {share}", f"{name}, outer rate 1, {share}", "one rank alone")
                          if (ranks, label) in loss}
                if len(behind) < 3:
                    continue
                of_density, of_one, alone = behind.values()
                d = density[share][ranks]
                # factor: skim.outer_lr_for. Tables are made without Skim installed.
                found.append({"ranks": ranks, "method": f"{name}, {share}", "density": d, "alone": alone,
                              "factor": math.sqrt(ranks / (1 + (ranks - 1) * d)), "one": of_one, "by_density": of_density})
                correction = loss.get((ranks, f"momentum correction, {share}"))
                if correction is not None:
                    found[-1]["correction"] = correction - loss[ranks, "dense"]
    return found


def outer_rates_of_sgd(folder):
    """A row for each network and method of LocalSteps: on 4 ranks, 1000 steps at rate 0.1 with seed 0."""
    rows = [{"task": row["task"], "method": row["label"], "bytes": 100 * row["share"], "accuracy": row["test_accuracy"],
             "sends": row["density"] * row["steps"] / row["every"],
             # as skim.outer_lr_for, if it follows the density
             "factor": row["outer_lr"] or math.sqrt(row["ranks"] / (1 + (row["ranks"] - 1) * row["density"]))}
            for row in quality_rows(folder)
            if (row["method"], row["ranks"], row["steps"], row["lr"], row["seed"]) == ("local", 4, 1000, 0.1, 0)
            and row["task"].startswith("resnet") and not re.search("per parameter|, density ", row["label"])]
    return sorted(rows, key=lambda row: (row["task"], row["method"]))


def shared_indices(folder):
    """A row for each task, number of ranks, method and length that ran with seed 0 with both exchanges, at about equal
    bytes: the metric of both, and of dense and one rank alone, at the rate that is best for shared-indices."""
    rows = [row for row in quality_rows(folder) if row["seed"] == 0]
    found = []
    for row in rows:
        rates = [r for r in rows if all(r[key] == row[key] for key in ("task", "label", "ranks", "steps"))]
        if ", shared indices, " not in row["label"] or row["lr"] != quality.best_rate(rates):
            continue
        at = {r["label"]: r for r in rows if all(r[key] == row[key] for key in ("task", "ranks", "steps", "lr"))}
        other, metric, digits = at.get(row["label"].replace(", shared indices", "")), "validation_loss", 3
        if other is None or not {"dense", "one rank alone"} <= at.keys():
            continue
        if "test_accuracy" in row:
            metric, digits = "test_accuracy", 2
        one = {"task": row["task"], "ranks": row["ranks"], "steps": row["steps"], "method": other["label"]}
        for name, of in (("dense", at["dense"]), ("alone", at["one rank alone"]), ("allgather", other), ("shared", row)):
            one |= {name: f"{of[metric]:.{digits}f}", f"{name}_bytes": 100 * of["share"],
                    f"{name}_sends": of["density"] * of["steps"] / of["every"]}
        found.append(one)
    return sorted(found, key=lambda one: (one["task"], one["ranks"], one["method"], one["steps"]))


def variants(folder):
    """The runs of seed 0 on 4 ranks with one list of indices and a variant of quality.VARIANTS, each after the run
    without it that is equal otherwise: the metric of both."""
    rows = {(row["task"], row["lr"], row.get("float32", False), row["label"]): row
            for row in lines(folder, "quality.jsonl") if (row["ranks"], row["steps"], row["seed"]) == (4, 1000, 0)}
    found = {}
    for (*at, label), row in rows.items():
        variant = variant_of(label)
        base = rows.get((*at, label.replace(f", {variant}", "")))
        if variant is None or base is None:
            continue
        metric, digits = ("test_accuracy", 2) if "test_accuracy" in row else ("validation_loss", 3)
        for name, one in (("none", base), (variant, row)):
            found[(row["task"], base["label"], list(quality.VARIANTS).index(variant) if one is row else -1)] = {
                "task": row["task"], "method": base["label"].removesuffix(", shared indices, 0.1 %"), "variant": name,
                "value": f"{one[metric]:.{digits}f}", "bytes": 100 * one["share"],
                "sends": one["density"] * one["steps"] / one["every"]}
    return [found[key] for key in sorted(found)]


def groups(folder):
    """The GPT under momentum correction at equal density, by the groups of parameters in which Skim selects: on two ranks
    under DDP, and on two islands of two ranks that share the parameters by fully_shard."""
    kinds = {"": ("DDP", "one"), ", a bucket per block": ("DDP", "one for each block"),
             ", sharded, one group": ("fully_shard", "one"), ", sharded": ("fully_shard", "one for each block")}
    found = []
    for ending, (how, count) in kinds.items():
        at = {"task": "gpt", "steps": 1000, "lr": 0.01, "ranks": 2 if how == "DDP" else 4,
              "label": "momentum correction, 1 %" + ending}
        losses = [row["validation_loss"] for row in quality_rows(folder) if at.items() <= row.items()]
        found.append({"how": how, "groups": count, "seeds": len(losses)} | over(losses, "loss"))
    return found


def screens(task):
    """A row for each variant of screen.py, and how far it is from the base under the same schedule of the rate."""
    def load(folder):
        rows = [row for row in lines(folder, "screen.jsonl") if row["task"] == task]
        metric = "test_accuracy" if "test_accuracy" in rows[0] else "test_loss"
        base = {row["drops"]: row[metric] for row in rows if row["variant"] == "base"}
        return [row | {"value": row[metric], "percent": 100 * row["entries"], "gain": row[metric] - base[row["drops"]],
                       "rate_falls": "in drops" if row["drops"] else "cosine"} for row in rows]
    return load


def slow_links(task, machine, file="slow-link.jsonl"):
    """A row for each method of slow_link.py: seconds until the target, and the value at the end, on each link."""
    def load(folder):
        rows = [row for row in lines(folder, file) if row["task"] == task]
        target, found = slow_link.target_of(rows), {}
        for row in rows:
            if not row["machine"].startswith(machine):
                continue
            one, link = found.setdefault(row["label"], {"method": row["label"]}), row["link"]
            if f"end_{link}" in one:
                raise ValueError(f"{file}: two rows of '{row['label']}' at {link}; this table has no means over seeds")
            reached = slow_link.seconds_to(row, target)
            one |= {f"seconds_{link}": "never" if reached is None else f"{reached:.0f} s",
                    f"whole_{link}": row["seconds"], f"end_{link}": row["curve"][-1][2]}
        return list(found.values())
    return load


@functools.cache
def study_of(task, memory, keep):
    return adaptive_k.Study(task, memory, keep, only_kept=True)


def adaptive(task, rules, feedback="residual", file=None, printed=None, seeds=SEEDS, own=False):
    """A row for each (label, rule, memory) of adaptive_k.py, with fields for each budget; `own`: at that of
    descent-per-bit. Runs that were not kept have no fields; of another program's rows, `printed` has the table."""
    def load(folder):
        found = []
        for label, rule, memory in rules:
            row = {"rule": label, "memory": memory}
            for density in ("own",) if own else DENSITIES:
                row |= {f"{name}_{density}": value for name, value in
                        at_density(folder, task, rule, memory, feedback, density, file, printed, seeds).items()}
            found.append(row)
        return found
    return load


def at_density(folder, task, rule, memory, feedback, density, file, printed, seeds):
    for row in kept("adaptive-k-printed.jsonl", printed)(folder) if printed else []:
        if (row["rule"], row["density"]) == (rule, density):
            return {"accuracy": row["accuracy"], "accuracy_deviation": row["deviation"],
                    "train_loss": row["train_loss"], "test_loss": row["test_loss"], "off": ""}
    study = study_of(task, memory, folder / (file or f"adaptive-k-{task}.json"))
    try:
        budget, words = adaptive_k.at_its_own(study, rule, feedback, seeds[0]) if density == "own" else \
            adaptive_k.at_budget(study, rule, density, feedback, seeds[0])
        runs = [study.run(*words, "--feedback", feedback, "--seed", seed) for seed in seeds]
    except adaptive_k.NotKept:
        return {}
    sent = statistics.mean(100 * run["sent"] / budget for run in runs)
    return {"budget": budget / 1e6, "off": f" (sent {sent:.0f} %)" if abs(sent - 100) > 4 else "",
            "train_loss": statistics.mean(result(run, "train_loss") for run in runs),
            "test_loss": statistics.mean(result(run, "test_loss") for run in runs),
            **over([100 * result(run, "test_accuracy") for run in runs], "accuracy")}


def claims(folder):
    """The claims of the first page, negative results first. Their numbers are looked up in the tables."""
    def number(table, where, field):
        [row] = [row for row in TABLE_OF[table].rows(folder) if where.items() <= row.items()]
        return row[field]

    def order(row):
        """0: the claim does not hold; 1: it nearly holds, or was not measured; 2: it holds."""
        verdict = row["verdict"]
        return 0 if re.match(r"\*\*(no|not)\b", verdict) else 2 if re.match(r"(\*\*)?yes\b", verdict) else 1

    return [row | {"number": row["number"].format(*(number(*of) for of in row["of"]))}
            for row in sorted(lines(folder, "claims.jsonl"), key=order)]


# ---- the tables ------------------------------------------------------------------------------------------


def accuracy(name, figure="accuracy %", template="{accuracy:.2f}", digits=2):
    spread = "{deviation:.%df}" % digits
    return Table("accuracy.md", name, kept("accuracy.jsonl", name), {
        "run": "{run}", "train loss": "{train_loss:.4f}", figure: (f"{template} ± {spread}", template),
        "difference to dense": "{difference:+.%df}" % digits, "allowed": "{allowed:.2f}", "within": "{within}",
        "bytes sent per step and rank": "{sent_bytes_per_step:,}", "of dense": "{percent_of_dense:.2f} %"})


def judged(table):
    """With a verdict: is the run as good as dense, within what is allowed?"""
    def within(row):
        worse = row["difference"] if "test_loss" in row else -row["difference"]
        return "-" if row["run"] == "dense" else "yes" if worse <= row["allowed"] else "no"
    return dataclasses.replace(table, rows=adding(table.rows, within=within))


def star(row):
    return "*" if row.get("over_90_busy") else ""


def published(row):
    known = PUBLISHED[row["model"]].get(row["exchange"])
    return known[PUBLISHED_RANKS.index(row["ranks"])] if known else None


PAIR = "{%s:.2f} ± {%s_deviation:.2f}"


def measured_and_published(method):
    mean, spread = "{%s:.2f}" % method, " ± {%s_deviation:.2f}" % method
    known, range_ = " ({%s_published:.2f})" % method, " ({%s_least:.2f} to {%s_most:.2f})" % (method, method)
    return (mean + spread + known, mean + spread + range_, mean + spread, mean + known, mean)


LINKS = {"dense": measured_and_published("sgd"), "uni": measured_and_published("uni"),
         "bi": measured_and_published("bi"),
         "union of bi": ("{union:.1f} % ({union_published:.1f})", "{union:.1f} %"),
         "saved": ("{saved:.1f} × ({saved_published:.1f})", "{saved:.1f} ×")}


def budgets():
    def cell(d):
        rest = "; {train_loss_%s:.4f}, {test_loss_%s:.4f}{off_%s}" % (d, d, d)
        mean, spread = "{accuracy_%s:.2f}" % d, " ± {accuracy_deviation_%s:.2f}" % d
        return (mean + spread + rest, mean + rest)
    return {"rule": "{rule}", "residuals of": "{memory}"} | {
        "{budget_%s:.3g} MB (%s)" % (d, d): cell(d) for d in DENSITIES}


UPDATES, GRADIENTS = "updates", "gradients"


def span(row):
    return f"{row['low']:.2f}" + (f" to {row['high']:.2f}" if row["high"] > row["low"] else "")


def at_ranks(cell, ranks, extra=""):
    return {f"P = {p}{extra}": tuple(c.replace("@", str(p)) for c in cell) for p in ranks}


def selection_rule(shape, percent):
    at = f"{shape} {percent:g}"
    return ("{ratio_%s:.2f} ({count_over_k_%s:g})" % (at, at), "{ratio_%s:.2f}" % at)


RULES = {"rule": "{rule}", "error feedback": ("{feedback}", " "), "density": ("{density_percent:g} %", " "),
         "train loss": ("{train_loss:.4f}", "diverged"), "accuracy %": "{accuracy:.2f}",
         "bytes sent per step and rank": "{sent_bytes_per_step:,}"}

# Task, ranks, metric, digits.
QUALITY_TABLES = (("gpt", 2, "loss", ".3f"), ("gpt", 4, "loss", ".3f"), ("gpt10m", 4, "loss", ".3f"), ("resnet8", 2, "accuracy", ".2f"),
                  ("resnet20", 4, "accuracy", ".2f"), ("lstm", 4, "loss", ".3f"), ("fashion", 4, "accuracy", ".2f"))


def quality_columns(metric, form):
    # The test part of the text differs more from its training part than the validation part does: both are shown.
    parts = {"validation": "validation loss", "test": "test loss"} if metric == "loss" else {"test": metric}
    columns = {"method": "{method}", "bytes": "{percent:.3g} %", "S": "{sent:g}", "rate": "{rate:g}",
               "rates tried": "{rates}", "seeds": "{seeds}"}
    for part, heading in parts.items():
        spread = "{%s:%s} ± {%s_deviation:%s}" % (part, form, part, form)
        columns |= {heading: (spread, "{%s:%s}" % (part, form)),
                    "minus dense" + " " * (part == "test" and len(parts) > 1): "{%s_behind:+%s}" % (part, form)}
    return columns


TABLES = [
    Table("README.md", "claims", claims, {
        "claim": "{claim}", "verdict": "{verdict}", "number": "{number}", "page": "[{page}]({page}#{anchor})"}),

    judged(accuracy("mnist-lenet5")),
    judged(accuracy("mnist-mlp")),
    judged(accuracy("fashion-mlp")),
    Table("accuracy.md", "fashion-mlp-30", kept("accuracy.jsonl", "fashion-mlp-30"), {
        "run": "{run}", "train loss": "{train_loss:.4f}", "accuracy %": "{accuracy:.2f}",
        "difference to dense": "{difference:+.2f}"}),
    judged(accuracy("text-lstm", "test loss", "{test_loss:.3f}", 3)),
    judged(accuracy("cifar-resnet20")),
    Table("accuracy.md", "small-densities", adding(
        kept("accuracy.jsonl", "small-densities"), behind=lambda row: -row["difference"]), {
        "batch a rank": "{batch}", "steps": "{steps}", "exchange": "{run}", "density": "{density_percent:g} %",
        "bytes sent per step and rank": "{sent_bytes_per_step:,}", "train loss": "{train_loss:.3f}",
        "accuracy %": "{accuracy:.2f}", "difference to dense": "{difference:+.2f}"}),
    Table("accuracy.md", "gtopk-assumption", kept("accuracy.jsonl", "gtopk-assumption"), {
        "model": "{model}", "P": "{ranks}", "steps checked": "{steps}", "least": "{least:.3f}",
        "median": "{median:.3f}", "largest": "{largest:.4f}"}),
    Table("accuracy.md", "conservation",
          wide(kept("drop-rules.jsonl", "conservation"), ("ranks", "exchange"), "rule"), {
              "P": "{ranks}", "exchange": "{exchange}", "lost by sender-keeps": "{lost_percent_sender-keeps:.2f} %",
              **{f"{what}: {rule}": "{%s_%s:%s}" % (what, rule, digits)
                 for what, digits in (("behind", ".3f"), ("spread", ".2f"))
                 for rule in ("survivors", "merger-keeps", "sender-keeps")}}),
    Table("accuracy.md", "drop-rules", kept("drop-rules.jsonl", "training"), {
        "P": "{ranks}", "rule": "{rule}", "train loss": "{train_loss:.4f} ± {train_loss_deviation:.4f}",
        "test loss": "{test_loss:.4f} ± {test_loss_deviation:.4f}",
        "accuracy %": "{accuracy:.2f} ± {accuracy_deviation:.2f}"}),
    Table("accuracy.md", "drop-rules-long", kept("drop-rules.jsonl", "training-long"), {
        "exchange": "{exchange}", "rule": "{rule}", "seeds": "{seeds}",
        "train loss": "{train_loss:.4f} ± {train_loss_deviation:.4f}",
        "test loss": "{test_loss:.4f} ± {test_loss_deviation:.4f}",
        "accuracy %": "{accuracy:.2f} ± {accuracy_deviation:.2f}"}),

    Table("selection.md", "selection-cost",
          wide(adding(kept("selection.jsonl", "cost"), span=span), ("what", "on"), "density"), {
              "timed": "{what}", "on": "{on}", "0.1 % (goal: {goal_0.001:g})": "{span_0.001}",
              "1 % (goal: {goal_0.01:g})": "{span_0.01}", "10 % (goal: {goal_0.1:g})": "{span_0.1}"}),
    Table("selection.md", "selection-shapes", kept("selection.jsonl", "shapes"), {
        "shape": "{shape}", "median": "{median:.2f}", "slowest of the 4 gradients": "{slowest:.2f}"}),
    Table("selection.md", "selection-sizes",
          wide(kept("selection.jsonl", "sizes"), ("n",), "density_percent"), {"n": "{n}"} | {
              f"{d} %": "{low_%s:.2f} to {high_%s:.2f}; {whole_%s:.2f}" % (d, d, d) for d in (10, 1, 0.1, 0.01)}),
    Table("selection.md", "selection-rules", wide(
        adding(kept("selection.jsonl", "rules"), at=lambda row: f"{row['shape']} {row['density_percent']:g}"),
        ("rule",), "at"), {"rule": "`{rule}`"} | {
            f"{s} {d:g} %": selection_rule(s, d) for s in ("normal", "recorded") for d in (0.1, 1)}),
    Table("selection.md", "bell-bound", kept("selection.jsonl", "bell-bound"), {
        "run": "{run}", "bound held, whole model": "{steps_held} of {steps} steps",
        "bound held, single parameters": "{parameters_held} of {parameters}",
        "ratio, first to last step": "{ratio_first:.3f} to {ratio_last:.3f}",
        "excess kurtosis, first to last step": "{kurtosis_first:g} to {kurtosis_last:.1f}"}),
    Table("selection.md", "rules-4", kept("rules.jsonl", "4-ranks"), RULES),
    Table("selection.md", "rules-16", kept("rules.jsonl", "16-ranks"), RULES),

    Table("scaling.md", "scaling-efficiency", wide(adding(
        kept("scaling.jsonl", "efficiency"), star=star, published=published), ("model", "exchange"), "ranks"),
        {"model": "{model}", "exchange": "{exchange}"} | at_ranks(
            ("{efficiency_@:.1f} ({published_@:g}){star_@}", "{efficiency_@:.1f}{star_@}"), (4, 8, 16, 32))),
    Table("scaling.md", "scaling-speed-up", wide(kept("scaling.jsonl", "speed-up"), ("model",), "ranks"),
          {"model": "{model}"} | at_ranks(
              ("{gtopk_over_dense_@:.1f}; {auto_over_dense_@:.1f}; {auto_over_allgather_@:.2f}",), (4, 8, 16, 32)) | {
                  "published, P = 32": "{published_over_dense_32:.1f}; {published_over_allgather_32:.2f}"}),
    Table("scaling.md", "scaling-model", wide(adding(
        kept("scaling.jsonl", "model"), star=star), ("model", "exchange"), "ranks"),
        {"model": "{model}", "exchange": "{exchange}"} | at_ranks(
            ("{measured_over_modelled_@:.2f}{star_@}",), (4, 8, 16))),
    Table("scaling.md", "scaling-auto", wide(
        adding(kept("scaling.jsonl", "auto"), star=star, behind=lambda row: 100 * (row["over_best"] - 1)),
        ("model",), "ranks"),
          {"model": "{model}", "auto chose": "{chose_4}"} | at_ranks(
              ("{over_best_@:.3f} [{low_@:.3f}, {high_@:.3f}]{star_@}",), (4, 8, 16))),
    Table("scaling.md", "scaling-auto-trials",
          adding(kept("scaling.jsonl", "auto-trials"), behind=lambda row: 100 * (row["over_best"] - 1)), {
        "link": "{link}", "P": "{ranks}", "rounds": "{rounds}", "best single exchange": "{best}",
        "`auto` at the end": "{at_the_end}", "`auto` over the best": "{over_best:.3f} [{low:.3f}, {high:.3f}]"}),
    Table("scaling.md", "step-time", kept("scaling.jsonl", "step-time"), {
        "run": "{run}", "sent per step and rank": "{sent_kb:,} kB", "of dense": "{percent_of_dense:g} %"} | {
            f"{part}, ms": "{%s_ms:.1f}" % part
            for part in ("step", "compute", "select", "exchange", "apply", "exposed")}),

    Table("both-links.md", "toy", kept("both-links-printed.jsonl", "toy"), {
        "links": "{links}", "F - F*": ("{gap:.2f} ± {gap_deviation:.2f}", "{gap:.3f}"),
        "the authors' program": ("{known:.2f} ± {known_deviation:.2f}", "{known:.3f}")}),
    Table("both-links.md", "constants", kept("both-links-printed.jsonl", "constants"), {
        "model": "{task}", "P": "{ranks}", "one way, of uni": "{one_way:.2f} ({one_way_published:.2f})",
        "both ways, of bi": "{both_ways:.2f} ({both_ways_published:.2f})",
        "quotient": "{quotient:.2f} ({quotient_published:.2f})"}),
    Table("both-links.md", "links-mnist-mlp", links(["both-links.jsonl"], ["mnist-mlp"]),
          {"ranks": "{ranks}", "examples": "{examples}"} | LINKS),
    Table("both-links.md", "links-fashion-mlp", links(["both-links.jsonl"], ["fashion-mlp"]),
          {"ranks": "{ranks}", "examples": "{examples}"} | LINKS),
    Table("both-links.md", "links-mnist-cnn", links(["both-links.jsonl"], ["mnist-cnn"]), {"ranks": "{ranks}"} | LINKS),
    Table("both-links.md", "links-sweep", sweep, {"k_down / n": "{down:g}"} | {
        heading: tuple(t.replace("@", task) for t in templates) for title, task in
        (("MNIST", "mnist-mlp"), ("Fashion-MNIST", "fashion-mlp")) for heading, templates in
        ((f"{title}, accuracy %", ("{accuracy_@:.2f} ({published_@:.2f})", "{accuracy_@:.2f}")),
         (f"{title}, saved", ("{saved_@:.3g} ×",)))}),
    Table("both-links.md", "links-iid", links(
        ["both-links-iid.jsonl", "both-links-printed.jsonl"], ["mnist-mlp", "fashion-mlp", "fashion-cnn"], ("iid",)),
        {"task": "{task}", "ranks": "{ranks}"} | LINKS),
    Table("both-links.md", "cnn-100-epochs", kept("both-links-printed.jsonl", "cnn-100-epochs"), {
        "epoch": "{epoch}", "accuracy %": "{accuracy:.2f}"}),

    Table("adaptive-k.md", "adaptive-mnist-mlp", adaptive("mnist-mlp", [
        ("adaptive, **`feedback`**", "feedback", UPDATES), ("warm-up of DGC", "warm-up", UPDATES),
        ("accordion, 1 : 10", "accordion", UPDATES), ("constant", "constant", UPDATES),
        ("adaptive, `feedback`", "feedback", GRADIENTS), ("warm-up of DGC", "warm-up", GRADIENTS),
        ("accordion, 1 : 10", "accordion", GRADIENTS), ("constant", "constant", GRADIENTS),
        ("adaptive, `even`", "even", GRADIENTS), ("adaptive, `measured`", "measured", GRADIENTS),
        ("adaptive, `laplace`", "laplace", GRADIENTS), ("adaptive, `water-filling`", "water-filling", GRADIENTS),
        ("capture", "capture", GRADIENTS)]), budgets()),
    Table("adaptive-k.md", "adaptive-own-budget", adaptive("mnist-mlp", [
        ("descent-per-bit", "descent-per-bit", GRADIENTS), ("adaptive, `even`", "even", GRADIENTS),
        ("adaptive, `laplace`", "laplace", GRADIENTS)], own=True), {
            "rule": "{rule}", "{budget_own:.3g} MB": "{accuracy_own:.2f} ± {accuracy_deviation_own:.2f}; "
            "{train_loss_own:.4f}, {test_loss_own:.4f}{off_own}"}),
    Table("adaptive-k.md", "adaptive-mnist-mlp-none", adaptive("mnist-mlp", [
        ("adaptive, **`measured`**", "measured", GRADIENTS), ("adaptive, `water-filling`", "water-filling", GRADIENTS),
        ("adaptive, `laplace`", "laplace", GRADIENTS), ("accordion, 1 : 10", "accordion", GRADIENTS),
        ("warm-up of DGC", "warm-up", GRADIENTS), ("constant", "constant", GRADIENTS),
        ("adaptive, `even`", "even", GRADIENTS)], "none", printed="mnist-mlp-none"), budgets()),
    Table("adaptive-k.md", "adaptive-mnist-lenet5", adaptive("mnist-lenet5", [
        ("adaptive, **`feedback`**", "feedback", UPDATES), ("warm-up of DGC", "warm-up", UPDATES),
        ("accordion, 1 : 10", "accordion", UPDATES), ("capture", "capture", UPDATES),
        ("constant", "constant", UPDATES), ("constant", "constant", GRADIENTS)]), budgets()),
    Table("adaptive-k.md", "adaptive-mnist-lenet5-none", adaptive("mnist-lenet5", [
        ("adaptive, **`measured`**", "measured", GRADIENTS), ("adaptive, `water-filling`", "water-filling", GRADIENTS),
        ("constant", "constant", GRADIENTS)], "none", "adaptive-k-mnist-lenet5-none.json"), budgets()),
    Table("adaptive-k.md", "adaptive-cifar-lenet5", adaptive("cifar-lenet5", [
        ("adaptive, **`feedback`**", "feedback", UPDATES), ("constant", "constant", UPDATES),
        ("accordion, 1 : 10", "accordion", UPDATES), ("capture", "capture", UPDATES),
        ("warm-up of DGC", "warm-up", UPDATES), ("constant", "constant", GRADIENTS),
        ("adaptive, `feedback`", "feedback", GRADIENTS)]), budgets()),
    Table("adaptive-k.md", "adaptive-cifar-lenet5-none", adaptive("cifar-lenet5", [
        ("adaptive, **`measured`**", "measured", GRADIENTS), ("warm-up of DGC", "warm-up", GRADIENTS),
        ("accordion, 1 : 10", "accordion", GRADIENTS), ("adaptive, `water-filling`", "water-filling", GRADIENTS),
        ("constant", "constant", GRADIENTS)], "none", "adaptive-k-cifar-lenet5-none.json"), budgets()),
    Table("adaptive-k.md", "adaptive-cifar-resnet20", adaptive("cifar-resnet20", [
        ("adaptive, **`feedback`**", "feedback", UPDATES), ("constant", "constant", UPDATES),
        ("adaptive, `feedback`", "feedback", GRADIENTS), ("constant", "constant", GRADIENTS)], seeds=("1",)), {
            "rule": "{rule}", "residuals of": "{memory}", "accuracy %": "{accuracy_0.002:.2f}",
            "train loss": "{train_loss_0.002:.4f}", "test loss": "{test_loss_0.002:.4f}"}),

    *(Table("pytorch.md", name, wide(adding(
        kept("pytorch.jsonl", name), at=lambda row: f"{row['link']} {row['ranks']}"), ("hook",), "at"), {
            "hook": "{hook}"} | {f"{link}, P = {p}": "{step_over_none_%s %s:.2f}" % (link, p)
                                 for p in (2, 4) for link in ("loopback", "1 Gbit/s")})
      for name in ("ddp-0.001", "ddp-0.01")),
    *(Table("pytorch.md", name, wide(adding(
        kept("pytorch.jsonl", name), at=lambda row: f"{100 * row['density']:g} %, {row['link']}"), by, "at"), {
            field: "{%s}" % field for field in by} | {
                at: "{step_over_none_%s:.2f}" % at
                for at in (f"{d} %, {link}" for d in ("0.1", "1") for link in ("loopback", "1 Gbit/s"))})
      for name, by in (("ddp-default", ("hook",)), ("ddp-local-steps", ("machine", "hook")))),
    Table("pytorch.md", "ddp-4-bit", wide(kept("pytorch.jsonl", "ddp-4-bit"), ("hook",), "link"), {
        "hook": "{hook}"} | {link: "{step_over_none_%s:.2f}" % link for link in ("loopback", "1 Gbit/s")}),
    Table("pytorch.md", "islands", wide(kept("pytorch.jsonl", "islands"), ("hook",), "link"), {
        "hook": "{hook}"} | {f"{link}{what}": "{%s_%s:%s}" % (field, link, form)
                             for link in ("1 Gbit/s", "100 Mbit/s")
                             for what, field, form in ((": of none", "step_over_none", ".2f"), (", kB sent", "sent_kb", ".0f"))}),
    Table("pytorch.md", "islands-overlap", wide(adding(
        kept("pytorch.jsonl", "islands-overlap"), at=lambda row: f"{row['exchange']}, run {row['run']}"), ("link",), "at"), {
            "link": "{link}"} | {at: "{step_over_none_%s:.2f}" % at
                                 for at in (f"{where}, run {run}" for where in ("backward waits", "backward goes on") for run in (1, 2))}),
    Table("quality.md", "quality-in-short", in_short, {
        "task": "{task}", "P": "{ranks}", "1 % of the bytes: method": "{one}", "minus dense": "{one_behind}",
        "0.1 %: method": "{tenth}", "minus dense ": "{tenth_behind}", "one rank alone": "{alone_behind}"}),
    *(Table("quality.md", f"quality-{task}-{ranks}", quality_of(task, ranks), quality_columns(metric, form))
      for task, ranks, metric, form in QUALITY_TABLES),
    Table("quality.md", "entry-sends", entry_sends("gpt", 2), {
        "density": "{density:g}", "S": "{sends:g}", **{name: "{%s:+.3f}" % name for name in quality.SWEPT}}),
    Table("quality.md", "entry-sends-lstm", entry_sends("lstm", 2, 4, 8, rate=0.01), {
        "density": "{density:g}", "S": "{sends:g}",
        **{f"{name}, P = {ranks}": "{%s %d:+.3f}" % (name, ranks)
           for name, groups in (("momentum correction", (2, 4, 8)), ("step ahead", (2, 4, 8)), ("momentum left in the optimizer", (4,)))
           for ranks in groups}}),
    Table("quality.md", "entry-sends-resnet8", entry_sends("resnet8", 2, rate=0.1), {
        "density": "{density:g}", "S": "{sends:g}",
        **{name: "{%s:+.2f}" % name for name in ("momentum correction", "step ahead")}}),
    Table("quality.md", "entry-sends-resnet20", entry_sends("resnet20", 4), {
        "density": "{density:g}", "S": "{sends:g}", **{name: "{%s:+.2f}" % name for name in quality.SWEPT}}),
    Table("quality.md", "steps-gpt", by_steps("gpt", 4), {
        "steps": "{steps}", "dense": "{dense:.3f}", "S of step ahead": "{sends:.2g}",
        **{name: "{%s:+.3f}" % name for name in ("momentum correction, 1 %", "step ahead, 0.1 %",
                                                 "15 local steps, ahead, 0.1 %", "step ahead, shared indices, 0.1 %",
                                                 "one rank alone")}}),
    Table("quality.md", "quality-gpt-4-5000", quality_of("gpt", 4, 5000), quality_columns("loss", ".3f")),
    Table("quality.md", "steps-lstm", by_steps("lstm", 4), {
        "steps": "{steps}", "dense": "{dense:.3f}",
        **{name: "{%s:+.3f}" % name for name in ("momentum correction, 1 %", "step ahead, 0.1 %",
                                                 "15 local steps, ahead, shared indices, 0.1 %", "one rank alone")}}),
    Table("quality.md", "steps-resnet20", by_steps("resnet20", 4), {
        "steps": "{steps}", "dense": "{dense:.2f}",
        **{name: "{%s:+.2f}" % name for name in ("momentum correction, 1 %", "step ahead, shared indices, 0.1 %")}}),
    Table("quality.md", "steps-to-dense", steps_to_dense(
        ("gpt", "step ahead, shared indices, 0.1 %", 0.01),
        ("lstm", "15 local steps, ahead, shared indices, 0.1 %", 0.01),
        ("resnet20", "step ahead, shared indices, 0.1 %", 0.1)), {
        "task": "{task}", "method": "{method}", "dense, 1000 steps": "{dense}",
        **{f"{steps} steps": "{after %d}" % steps for steps in (1000, 1500, 2000, 3000)}, "reached": "{needs} steps"}),
    Table("quality.md", "quality-resnet20-4-10000", quality_of("resnet20", 4, 10000), quality_columns("accuracy", ".2f")),
    Table("quality.md", "outer-rates", outer_rates, {
        "P": "{ranks}", "method": "{method}", "density": "{density:g}", "outer rate": "{factor:.2f}",
        "minus dense": "{by_density:+.3f}", "with outer rate 1": "{one:+.3f}",
        "momentum correction": "{correction:+.3f}", "one rank alone": "{alone:+.3f}"}),
    Table("quality.md", "outer-rates-sgd", outer_rates_of_sgd, {
        "task": "{task}", "method": "{method}", "bytes": "{bytes:.3g} %", "S": "{sends:.3g}", "outer rate": "{factor:.2f}",
        "accuracy": "{accuracy:.2f}"}),
    Table("quality.md", "shared-indices", shared_indices, {
        "task": "{task}", "P": "{ranks}", "steps": "{steps}", "method": "{method}", "dense": "{dense}", "alone": "{alone}",
        "allgather: bytes": "{allgather_bytes:.3g} %", "S": "{allgather_sends:.3g}", "value": "{allgather}",
        "shared-indices: bytes": "{shared_bytes:.3g} %", "S ": "{shared_sends:.3g}", "value ": "{shared}"}),
    Table("quality.md", "variants", variants, {
        "task": "{task}", "method": "{method}", "variant": "{variant}", "bytes": "{bytes:.3g} %", "S": "{sends:.3g}",
        "value": "{value}"}),
    Table("quality.md", "groups", groups, {
        "ranks": "{how}", "groups": "{groups}", "seeds": "{seeds}", "validation loss": ("{loss:.3f} ± {loss_deviation:.3f}", "{loss:.3f}")}),
    *(Table("quality.md", f"screen-{task}", screens(task), {
        "variant": "{variant}", "rate": "{lr:g}", "rate falls": "{rate_falls}", "entries sent": "{percent:.2f} %",
        metric: "{value:%s}" % form, "minus base": "{gain:+%s}" % form})
      for task, metric, form in (("resnet8", "accuracy", ".2f"),)),
    *(Table("quality.md", name, slow_links("gpt", machine, file), {
        "method": "{method}", "100 Mbit/s: to the target": "{seconds_100mbit}", "whole run": "{whole_100mbit:.0f} s",
        "loss at the end": "{end_100mbit:.3f}",
        "1 Gbit/s: to the target": "{seconds_1gbit}", "whole run ": "{whole_1gbit:.0f} s",
        "loss at the end ": "{end_1gbit:.3f}"})
      for name, machine, file in (
          ("slow-link-gpt", "AMD EPYC", "slow-link.jsonl"),
          ("slow-link-gpt-earlier", "AMD EPYC", "slow-link-earlier.jsonl"),
          ("slow-link-gpt-xeon", "Intel(R) Xeon(R)", "slow-link-earlier.jsonl"))),

    Table("quality.md", "slow-link-resnet20", slow_links("resnet20", "AMD EPYC"), {
        "method": "{method}", "100 Mbit/s: to the target": "{seconds_100mbit}", "whole run": "{whole_100mbit:.0f} s",
        "accuracy at the end": "{end_100mbit:.2f} %",
        "1 Gbit/s: to the target": "{seconds_1gbit}", "whole run ": "{whole_1gbit:.0f} s",
        "accuracy at the end ": "{end_1gbit:.2f} %"}),

    Table("frames.md", "index-sizes", kept("frames.jsonl", "index-sizes"), {
        "index set": "{index_set}", "n": "{n:,}", "k": "{k:,}", "code taken": "{code}",
        "index, bytes": "{index_bytes:,}",
        "entropy, bytes": "{entropy_bytes:,.1f}", "ratio": "{ratio:.3f}"}),
    Table("frames.md", "fuzz", kept("frames.jsonl", "fuzz"), {
        "target": "{target}", "executions": "{executions:,}", "findings": "{findings}"}),
]
TABLE_OF = {table.name: table for table in TABLES}


# ---- Markdown --------------------------------------------------------------------------------------------


def filled(template, row):
    """The template with the fields of the row, or None where it lacks one. nan is the field of runs that diverged."""
    fields = [row.get(name) for name in re.findall(r"\{([^}:]+)", template)]
    if None in fields:
        return None
    if any(field != field for field in fields):
        return "diverged"
    return re.sub(r"\{([^}:]+)(?::([^}]*))?\}", lambda found: format(row[found[1]], found[2] or ""), template)


def cell(templates, row):
    of = [templates] if isinstance(templates, str) else templates
    return next((text for text in (filled(one, row) for one in of) if text is not None), "-").strip()


def markdown(table, folder):
    rows = table.rows(folder)
    if not rows:
        raise ValueError("no rows")
    head = [cell(heading, rows[0]) for heading in table.columns]
    body = [[cell(templates, row) for templates in table.columns.values()] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *body])


MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def pages(root):
    """What is wrong with the markers, and {page: (its text, {table: its text, its text by the rows})}."""
    wrong, found = [], {}
    folder = root / "studies/rows"
    for page in sorted((root / "docs/results").glob("*.md")):
        text = page.read_text()
        marked = {name: body for _, name, body, _ in MARKED.findall(text)}
        if text.count("<!-- table:") != len(marked) or text.count("<!-- end -->") != len(marked):
            wrong.append(f"{page.name}: a table's marker is not closed, or stands twice")
        expected = {table.name for table in TABLES if table.page == page.name}
        wrong += [f"{page.name}: {name}: studies/tables.py has no such table"
                  for name in sorted(marked.keys() - expected)]
        wrong += [f"{page.name}: {name}: the page has no such table" for name in sorted(expected - marked.keys())]
        found[page] = text, {name: (marked[name], markdown(TABLE_OF[name], folder))
                             for name in marked if name in expected}
    wrong += [f"{name}: no such page" for name in sorted({t.page for t in TABLES} - {page.name for page in found})]
    return wrong, found


def first_difference(have, want):
    have, want = have.splitlines(), want.splitlines()
    for a, b in zip(have, want):
        if a != b:
            return f"has  {a}\n    rows {b}"
    return f"has {len(have)} lines, the rows give {len(want)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    options = parser.parse_args()
    wrong, found = pages(options.root)
    for page, (text, tables) in found.items():
        if options.check:
            wrong += [f"{page.name}: {name}: differs from its rows\n    {first_difference(*both)}"
                      for name, both in tables.items() if both[0] != both[1]]
            continue
        page.write_text(MARKED.sub(lambda m: m[1] + (tables[m[2]][1] if m[2] in tables else m[3]) + m[4], text))
    if wrong:
        sys.exit("tables.py: " + "\n".join(wrong))
    print(f"{sum(len(tables) for _, tables in found.values())} tables on {len(found)} pages"
          + (": all as their rows say" if options.check else " written"))


if __name__ == "__main__":
    main()
