#!/usr/bin/env python3
"""How does training scale on a slow network? Runs `skim bench scaling` on hosts of scripts/cluster.

  studies/scaling.py [SETTING...] [--models NAME,...] [--out FOLDER] [--tool FILE] [-- ARGUMENT...]

A SETTING is HOSTS@RATE: by default 4@1gbit 8@1gbit 16@1gbit 16@100mbit 32@100mbit. On each the link is fitted
(skim bench network), then the exchanges are measured for each model of arXiv 1901.04359, with its published time of
computing; FOLDER/scaling-HOSTS-RATE.json has the objects that skim bench scaling wrote, each with `model`, `rate`
and `drops` (must be 0) added. A model that is measured again replaces its objects there, and those of other models
stay. Links of other rates than 1 Gbit/s stand for 1 Gbit/s with everything slower by one factor (--time-scale): a
machine cannot drive 32 hosts at that rate. More ARGUMENTs go to skim bench scaling. Has the requirements of
scripts/cluster/cluster. Takes the hosts down at the end, also when interrupted. Tables and figures:
studies/figures.py scaling --help.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

from published import SCALED_MODELS

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTER = str(ROOT / "scripts/cluster/cluster")
SETTINGS = ["4@1gbit", "8@1gbit", "16@1gbit", "16@100mbit", "32@100mbit"]
GBITS = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}


def say(text):
    print(f"scaling: {text}", file=sys.stderr, flush=True)


def cluster(*words, **options):
    return subprocess.run([CLUSTER, *words], check=True, **options)


def drops():
    """The number of packets that a link has dropped. If it is not 0, TCP was measured, not the link."""
    table = cluster("stats", stdout=subprocess.PIPE, text=True).stdout.splitlines()[1:]
    return sum(int(up) + int(down) for *_, up, down in map(str.split, table))


def measure(setting, options):
    """Measures one setting. Returns whether its figures are valid."""
    hosts, rate = re.fullmatch(r"(\d+)@(.+)", setting).groups()
    number, unit = re.fullmatch(r"([\d.]+)([kmg]bit)(?:\+.*)?", rate).groups()
    name = re.sub(r"[^\w.-]", "-", f"{hosts}-{rate}")
    fit, result = (options.out / f"{kind}-{name}.json" for kind in ("fit", "scaling"))
    before = json.loads(result.read_text()) if result.exists() else []
    say(f"{hosts} hosts, {rate}")
    ours = True  # hosts that are up already are somebody else's
    try:
        ours = subprocess.run([CLUSTER, "up", hosts, rate]).returncode == 0
        if not ours:
            sys.exit(1)  # it has said why
        cluster("run", options.tool, "bench", "network", "--json", str(fit))
        rows = []
        for model in options.models:
            params, compute_s = SCALED_MODELS[model]
            say(model)
            done = cluster(
                "run", options.tool, "bench", "scaling", "--parameters", str(params), "--compute", f"{compute_s:.9f}s",
                "--fit", str(fit), "--json", "-", "--shared-cores", str(os.cpu_count()), "--time-scale",
                f"{1 / (float(number) * GBITS[unit]):g}", *options.arguments, stdout=subprocess.PIPE, text=True)
            rows += [{"model": model} | row for row in json.loads(done.stdout)]
        lost = drops()
    finally:
        if ours:
            cluster("down", start_new_session=True)  # out of reach of a second Ctrl-C
    rows = [row for row in before if row["model"] not in options.models] + [
        row | {"rate": rate, "drops": lost} for row in rows]
    result.write_text(json.dumps(rows, indent=1) + "\n")
    if lost:
        say(f"{setting}: {lost} packets were dropped: these figures are not the link's")
    return not lost


def main():
    words, more = sys.argv[1:], []
    if "--" in words:
        at = words.index("--")
        words, more = words[:at], words[at + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="HOSTS@RATE", default=SETTINGS)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SCALED_MODELS), metavar="NAME,...")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("scaling"))
    parser.add_argument("--tool", default=str(ROOT / "build/release/skim"))
    options = parser.parse_args(words)
    options.arguments = more
    for setting in options.settings:
        if not re.fullmatch(r"\d+@[\d.]+[kmg]bit(\+[\d.]+[um]s)?", setting):
            parser.error(f"expected HOSTS@RATE such as 4@1gbit, got '{setting}'")
    for model in options.models:
        if model not in SCALED_MODELS:
            parser.error(f"--models: expected some of {', '.join(SCALED_MODELS)}, got '{model}'")
    options.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # the hosts are taken down
    try:
        good = [measure(setting, options) for setting in options.settings]
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as e:
        sys.exit(f"scaling: {' '.join(e.cmd[:4])} .. failed with status {e.returncode}")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
