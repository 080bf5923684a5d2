#!/usr/bin/env python3
"""How long does training to a given quality take on a slow link? Runs of quality_run.py on hosts of scripts/cluster.

  studies/slow_link.py TASK FILE [--links 100mbit,1gbit] [--ranks 4] [--seeds 0] [--methods METHOD METHOD ...]

Every host is a rank. The methods are those of quality.py, at the learning rates that were best in its rows
(--tuned FILE --tuned-ranks P). All methods of Skim except DiLoCo use --exchange. FILE keeps a line of JSON
for each run, with the metric on the validation data over the seconds of training. The same machine does not repeat
these runs. Needs SKIM_DATA, Skim installed in the Python that runs this, and what scripts/cluster/cluster needs. Run
nothing else on the machine meanwhile.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys

import quality

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTER = str(ROOT / "scripts/cluster/cluster")
NET = "10.77.7"
PORT = "29517"
HOSTS = {"SKIM_CLUSTER": os.environ.get("SKIM_CLUSTER", "skimslow"), "SKIM_CLUSTER_NET": NET}
METHODS = ["dense", "dense, 16 bit", "momentum correction, 1 %"]  # of which gpt and resnet20 have rows


def cluster(*words, **options):
    return subprocess.run(["bash", CLUSTER, *words], env=os.environ | HOSTS, **options)


@contextlib.contextmanager
def hosts(ranks, link):
    """Hosts with such links while the block runs."""
    if cluster("up", str(ranks), link).returncode:
        sys.exit(1)  # it has said why
    try:
        yield
    finally:
        cluster("down", start_new_session=True)  # out of reach of a second Ctrl-C


@contextlib.contextmanager
def signals_later():
    """SIGINT and SIGTERM raise KeyboardInterrupt behind the block, not inside it."""
    came = []
    before = {number: signal.signal(number, lambda *_: came.append(True)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def run(arguments, ranks):
    """The row of one run."""
    environment = os.environ | HOSTS | {
        "MASTER_ADDR": f"{NET}.1", "MASTER_PORT": PORT,
        "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "e0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = [sys.executable, str(quality.SCRIPT), *arguments]
    started = []
    try:
        with signals_later():  # so that every process that has started is known
            for rank in range(ranks):
                started.append(subprocess.Popen(["bash", CLUSTER, "enter", str(rank), *script], stdout=subprocess.PIPE,
                                                text=True, env=environment | {"RANK": str(rank), "LOCAL_RANK": "0"}))
        out = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.terminate()
    failed = [rank for rank, process in enumerate(started) if process.returncode]
    if failed:
        sys.exit(f"slow_link: {' '.join(arguments)}: rank {failed[0]} ended with {started[failed[0]].returncode}")
    return json.loads(out[0].strip().splitlines()[-1])


def machine():
    """The model of this machine's processor. Seconds of different machines are not comparable."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def command_of(options, link, seed, method):
    exchange = f" --exchange {options.exchange}" if options.exchange != "auto" else ""
    return (f"studies/slow_link.py {options.task} FILE --tuned-ranks {options.tuned_ranks} --links {link}{exchange} "
            f"--seeds {seed} --methods '{method}'")


def tuned_rate(rows, task, method, ranks):
    found = [r for r in rows if (r["task"], r["label"], r["ranks"], r["seed"]) == (task, method, ranks, 0)]
    if not found and method == "dense, 16 bit":
        return tuned_rate(rows, task, "dense", ranks)
    if not found:
        sys.exit(f"slow_link: {task}: no rows of '{method}' on {ranks} ranks; studies/quality.py makes them")
    return quality.best_rate(found)


# What counts as reached: dense's last value on the validation data, and this much worse.
WORSE = {"accuracy": -1.0, "loss": 0.05}


def target_of(rows):
    """The value to reach, of rows of one task. Dense must be among them."""
    metric = metric_of(rows)
    return statistics.mean(row["curve"][-1][2] for row in rows if row["label"] == "dense") + WORSE[metric]


def metric_of(rows):
    return "accuracy" if "test_accuracy" in rows[0] else "loss"


def seconds_to(row, target):
    """Seconds of training until the row's curve reaches the target; None: it never does."""
    is_reached = target.__le__ if metric_of([row]) == "accuracy" else target.__ge__
    return next((seconds for _, seconds, value in row["curve"] if is_reached(value)), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=quality.TASKS)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--links", type=lambda text: text.split(","), default=["100mbit", "1gbit"])
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=4)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0])
    parser.add_argument("--methods", nargs="+", choices=quality.METHODS, default=METHODS, metavar="METHOD",
                        help=f"[{' '.join(map(repr, METHODS))}]")
    parser.add_argument("--exchange", default="auto", help="of all methods of Skim except DiLoCo")
    parser.add_argument("--tuned", type=pathlib.Path, default=ROOT / "studies/rows/quality.jsonl")
    parser.add_argument("--tuned-ranks", type=int, choices=[2, 4], default=4)
    options = parser.parse_args()
    quality.expect_possible(parser, options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the hosts are taken down
    tuned = [json.loads(line) for line in options.tuned.read_text().splitlines()]
    rows = [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    steps = options.steps or quality.TASKS[options.task][0]
    rates = {method: tuned_rate(tuned, options.task, method, options.tuned_ranks) for method in options.methods}
    for link in options.links:
        for seed in options.seeds:
            for method in options.methods:
                label = method
                is_skim = len(quality.METHODS[method]) > 1 and "--exchange" not in quality.METHODS[method]
                if is_skim and options.exchange != "auto":
                    label += f", {options.exchange}"
                wanted = {"task": options.task, "label": label, "link": link, "seed": seed, "ranks": options.ranks,
                          "steps": steps, "machine": machine()}
                if any(wanted.items() <= row.items() for row in rows):
                    continue
                arguments = quality.arguments_of(options.task, method, rates[method], seed, options)
                if is_skim:
                    arguments += ["--exchange", options.exchange]
                arguments += ["--curve", str(max(1, steps // 20))]
                with hosts(options.ranks, link):
                    row = run(arguments, options.ranks)
                row = {"command": command_of(options, link, seed, method), "link": link, "label": label,
                       "machine": machine()} | row
                with options.file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(f"{link}: {label}, seed {seed}: {row['seconds']} s, {row['curve'][-1]}", file=sys.stderr,
                      flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
