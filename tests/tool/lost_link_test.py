"""A run whose link between hosts is lost ends, and says which rank it lost.

Needs SKIM_TOOL, and root and iproute2 for scripts/cluster.
"""

import json
import os
import pathlib
import random
import shutil
import string
import subprocess
import tempfile
import time
import unittest

CLUSTER = str(pathlib.Path(__file__).resolve().parents[2] / "scripts/cluster/cluster")
# A name of its own, so that what a killed run of this test left behind is not in the way.
NAME = "lost" + "".join(random.choices(string.ascii_lowercase, k=4))
ENVIRONMENT = dict(os.environ, SKIM_CLUSTER=NAME, SKIM_CLUSTER_NET="10.77.9")
LIMIT = 120  # seconds: no run here may take longer, whatever goes wrong


def cluster(*words):
    return subprocess.run(["bash", CLUSTER, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)


def why_not():
    """Why there can be no hosts here; None: there can."""
    if os.environ.get("SKIM_HAS_MPI") != "1":
        return "this build has no MPI"
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "mpirun", "cc"))):
        return "scripts/cluster needs root, iproute2, mpirun and cc"
    probe = f"{NAME}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    used = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"network namespaces cannot be used here: {used.stderr.strip()}" if used.returncode != 0 else None


WHY_NOT = why_not()


@unittest.skipIf(WHY_NOT, WHY_NOT)
class LostLink(unittest.TestCase):
    def test_the_run_ends_and_names_the_rank(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        self.addCleanup(cluster, "down")
        up = cluster("up", "3", "1gbit")
        self.assertEqual(up.returncode, 0, up.stderr)
        metrics = folder / "m.jsonl"
        run = subprocess.Popen(
            ["bash", CLUSTER, "run", os.environ["SKIM_TOOL"], "train", "--model", "mlp-64", "--batch", "8",
             "--generated-train", "512", "--generated-test", "100", "--exchange", "allgather", "--steps", "1000000",
             "--eval-epochs", "0", "--timeout", "4", "--metrics", str(metrics)],
            env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(run.kill)
        end = time.monotonic() + LIMIT
        while not metrics.exists() or metrics.read_text().count("sent_bytes") < 5:
            self.assertIsNone(run.poll(), "the run has ended")
            self.assertLess(time.monotonic(), end, "no step was reached")
        subprocess.run(["ip", "-n", f"{NAME}2", "link", "set", "e0", "down"], check=True)
        _, err = run.communicate(timeout=60)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("rank 2", err)
        steps = [json.loads(line) for line in metrics.read_text().splitlines() if "sent_bytes" in line]
        self.assertEqual([s["step"] for s in steps], list(range(1, len(steps) + 1)))


if __name__ == "__main__":
    unittest.main()
