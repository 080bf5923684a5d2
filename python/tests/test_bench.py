"""python -m skim.bench: what it measures, refuses and survives. Links between namespaces need root: not tried."""

import contextlib
import importlib.util
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("torch is not installed")

import torch
from skim.bench import _ddp, _rank

# PyTorch's hook with 16 bits runs in builds for CUDA and ROCm only, there on a CPU, too.
HAS_BF16_HOOK = torch.version.cuda is not None or torch.version.hip is not None
PARAMETERS = 6 * (1024 * 1024 + 1024) + 1024 * 10 + 10


def bench(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "skim.bench", *arguments], capture_output=True, text=True, timeout=300, **options
    )


class Measured(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out.json"
            cls.done = bench(
                "ddp", "--json", str(out), "--hooks", "none,barrier,allreduce,bf16,skim,localsteps", "--bucket-mb", "8",
                "--density", "0.01", "--steps", "3", "--rounds", "2", "--warm-up", "4",
            )  # fmt: skip
            if cls.done.returncode:
                raise AssertionError(cls.done.stderr)
            cls.rows = {row["hook"]: row for row in json.loads(out.read_text())}

    def test_every_hook_has_its_row(self):
        self.assertEqual(list(self.rows), ["none", "barrier", "allreduce", "bf16", "skim", "localsteps"])
        table = self.done.stdout.splitlines()
        self.assertEqual([line.split()[0] for line in table], ["hook", *self.rows])

    def test_times_are_of_the_same_rounds(self):
        self.assertEqual(self.rows["none"]["ratio_to_none"], 1)
        for hook in ("none", "barrier", "allreduce", "skim"):
            row = self.rows[hook]
            self.assertLessEqual(row["min_ms"], row["step_ms"])
            self.assertGreater(row["ratio_to_none"], 0)
            self.assertEqual((row["failures"], row["failure"], row["buckets"]), (0, None, 3))

    def test_ranks_end_with_equal_weights_if_gradients_were_exchanged(self):
        equal = {hook: row["weights_equal"] for hook, row in self.rows.items()}
        exchanged = {"allreduce": True, "skim": True, "localsteps": True, "bf16": True if HAS_BF16_HOOK else None}
        self.assertEqual(equal, {"none": None, "barrier": None} | exchanged)

    @unittest.skipUnless(sys.platform == "linux", "only Linux tells what a socket has sent")
    def test_bytes_are_those_that_the_sockets_sent(self):
        self.assertLess(self.rows["none"]["sent_bytes"], 1000)
        self.assertLess(0, self.rows["barrier"]["sent_bytes"])
        self.assertLess(self.rows["barrier"]["sent_bytes"], 2000)
        # A ring of two: every rank sends each gradient once.
        dense = 4 * PARAMETERS
        self.assertAlmostEqual(self.rows["allreduce"]["sent_bytes"] / dense, 1, delta=0.001)
        # Of an entry its 4-bit value, with its part of a scale, and an index. Uniform indices have an entropy of 8.08
        # bits, those of training less.
        kept = 0.01 * PARAMETERS
        for hook in ("skim", "localsteps"):
            self.assertGreater(self.rows[hook]["sent_bytes"], 0.5 * kept)
            self.assertLess(self.rows[hook]["sent_bytes"], 1.8 * kept)

    @unittest.skipUnless(sys.platform == "linux", "only Linux tells what a socket has sent")
    def test_sent_bytes_count_what_the_peer_has_not_taken_yet(self):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
            there, _ = server.accept()
            with there:
                here.setblocking(False)
                before, sent = _rank._sent_bytes(), 0
                with contextlib.suppress(BlockingIOError):
                    while True:
                        sent += here.send(bytes(1 << 20))
                self.assertGreater(sent, 0)
                self.assertEqual(_rank._sent_bytes() - before, sent)

    @unittest.skipUnless(sys.platform == "linux", "only Linux tells what a socket has sent")
    def test_looking_at_sockets_leaves_nothing_open(self):
        here, there = socket.socketpair()
        with here, there, tempfile.TemporaryFile():
            before = os.listdir("/proc/self/fd")
            _rank._sent_bytes()
            self.assertEqual(os.listdir("/proc/self/fd"), before)

    def test_skim_says_where_its_time_goes(self):
        for hook in ("skim", "localsteps"):
            self.assertEqual(set(self.rows[hook]["parts_ms"]), {"select", "exchange", "apply", "exposed"})
        self.assertIsNone(self.rows["allreduce"]["parts_ms"])

    @unittest.skipIf(HAS_BF16_HOOK, "no hook refuses to run in this build of PyTorch")
    def test_a_hook_that_refuses_is_one_failure_and_the_others_go_on(self):
        row = self.rows["bf16"]
        self.assertEqual((row["failures"], row["step_ms"]), (1, None))
        self.assertIn("BF16", row["failure"])
        self.assertIn("bf16 failed", self.done.stderr)


class Islands(unittest.TestCase):
    def test_hooks_between_islands(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out.json"
            done = bench(
                "ddp", "--islands", "2", "--ranks", "4", "--hooks", "none,allreduce,skim,skim@device", "--json", str(out),
                "--density", "0.01", "--steps", "2", "--rounds", "1", "--warm-up", "1", "--value-code", "f32",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = {row["hook"]: row for row in json.loads(out.read_text())}
        self.assertEqual({hook: row["weights_equal"] for hook, row in rows.items()},
                         {"none": None, "allreduce": True, "skim": True, "skim@device": True})  # fmt: skip
        self.assertEqual({row["failures"] for row in rows.values()}, {0})
        if sys.platform == "linux":
            between = {hook: row["sent_bytes"] - rows["none"]["sent_bytes"] for hook, row in rows.items()}
            # Two islands send each entry of a shard once; Skim 1 % of them, of 4 bytes (--value-code) and an index.
            self.assertAlmostEqual(between["allreduce"] / (2 * PARAMETERS), 1, delta=0.001)
            self.assertGreater(between["skim"], 0.012 * between["allreduce"])
            self.assertLess(between["skim"], 0.015 * between["allreduce"])
            self.assertEqual(between["skim@device"], between["skim"])


class Failing(unittest.TestCase):
    def group(self, timeout):
        task = _ddp.Task("none", "allgather", 0.001, 0, 2, 25.0, 0, "", timeout)
        group = _ddp.Group(task, _ddp.Loopback(), timeout)
        self.addCleanup(group.end)
        return group

    def test_a_rank_that_crashes_is_named(self):
        group = self.group(300)
        group.processes[1].send_signal(signal.SIGSEGV)
        with self.assertRaisesRegex(_ddp.Failed, "rank 1 ended by SIGSEGV"):
            group.train(10)

    def test_a_rank_that_hangs_is_named_after_the_timeout(self):
        group = self.group(300)
        group._timeout = 1
        group.processes[1].send_signal(signal.SIGSTOP)
        with self.assertRaisesRegex(_ddp.Failed, "no answer from rank 0 and 1 within 1 s"):
            group.train(10)

    def test_a_rank_that_is_silent_and_does_not_end_is_not_waited_for_forever(self):
        group = self.group(300)
        group._timeout = 1
        group.processes[1].send_signal(signal.SIGSTOP)
        self.assertIn("rank 1 closed its connection, but did not end within 1 s", group._epitaph(1))

    @unittest.skipUnless(sys.platform == "linux", "finds the ranks in Linux's /proc")
    def test_nothing_runs_on_when_it_is_ended(self):
        started = subprocess.Popen(
            [sys.executable, "-m", "skim.bench", "ddp", "--hooks", "none", "--steps", "1000000"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.addCleanup(started.communicate)
        children = pathlib.Path(f"/proc/{started.pid}/task/{started.pid}/children")
        while len(ranks := children.read_text().split()) < 2:
            self.assertIsNone(started.poll())
        handles = [os.pidfd_open(int(rank)) for rank in ranks]
        for handle in handles:
            self.addCleanup(os.close, handle)
        started.send_signal(signal.SIGTERM)
        self.assertEqual(started.wait(60), 143)
        for rank, handle in zip(ranks, handles):
            ended, _, _ = select.select([handle], [], [], 60)
            self.assertTrue(ended, f"process {rank} runs on")


class LocalHalf(unittest.TestCase):
    def test_rows(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out.json"
            done = bench("local-half", "--n", "20000,30000", "--density", "0.01", "--rounds", "3", "--json", str(out))
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = json.loads(out.read_text())
        self.assertEqual([(r["what"], r["n"]) for r in rows],
                         [(what, n) for n in (20000, 30000) for what in ("pass", "topk", "pytorch")])  # fmt: skip
        self.assertEqual(len(done.stdout.splitlines()), 7)
        for row in rows:
            self.assertGreater(row["ms"], 0)
            self.assertEqual(row["select_ms"] is not None, row["what"] == "pytorch")
            self.assertEqual(row["ratio_to_pass"] == 1, row["what"] == "pass")

    def test_buckets_and_codes(self):
        done = bench("local-half", "--n", "5000", "--codes", "f32,q8,offload", "--buckets", "3", "--rounds", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line.split("cpu")[0].strip() for line in done.stdout.splitlines()[1:]],
                         ["pass", "topk", "pytorch", "pytorch q8", "pytorch offload"])  # fmt: skip

    def test_a_device_that_is_not_there(self):
        for device in ("nothing", "meta"):
            done = bench("local-half", "--n", "1000", "--device", device)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, rf"^skim\.bench: no device '{device}': [^\n]*\n$")

    def test_kernels_that_cannot_run_there(self):
        done = bench("local-half", "--n", "1000", "--kernels", "triton")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"^skim\.bench: kernels: no triton here: [^\n]*; use pytorch\n$")


class Refusals(unittest.TestCase):
    def test_wrong_arguments_get_one_line(self):
        for arguments, word in (
            ([], "COMMAND"),
            (["ddp", "--hooks", "none,nothing"], "'nothing'"),
            (["ddp", "--hooks", "none,none"], "twice"),
            (["ddp", "--rate", "fast"], "'fast'"),
            (["ddp", "--latency", "1ms"], "--rate"),
            (["ddp", "--rate", "1gbit", "--ranks", "1"], "--ranks 2"),
            (["ddp", "--ranks", "0"], "'0'"),
            (["local-half", "--kernels", "cuda"], "'cuda'"),
            (["local-half", "--n", "0"], "'0'"),
            (["local-half", "--codes", "q7"], "'q7'"),
            (["ddp", "--ranks", "4", "--islands", "3"], "--islands 3 must divide --ranks 4"),
            (["ddp", "--ranks", "4", "--islands", "2", "--hooks", "none,bf16"], "'bf16'"),
            (["ddp", "--density", "nan"], "'nan'"),
            (["ddp", "--bucket-mb", "1e6"], "above 0 and below 1e6, got '1e6'"),
            (["ddp", "--exchange", "telepathy"], "'telepathy'"),
            (["ddp", "--hooks", "none,gtopk"], "no hook 'gtopk'; there are: "),
            (["ddp", "--hooks", "none,auto@device"], "no hook 'auto@device'"),
            (["ddp", "--value-code", "q3"], "'q3'"),
            (["ddp", "--json", "/nowhere/x.json"], "/nowhere/x.json"),
        ):
            with self.subTest(arguments=arguments):
                done = bench(*arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertRegex(done.stderr, r"^skim\.bench: [^\n]*\n$")
                self.assertIn(word, done.stderr)

    def test_a_link_that_cannot_be_made_gets_one_line(self):
        # iproute2 is not on this path.
        with tempfile.TemporaryDirectory() as folder:
            os.symlink("/bin/bash", f"{folder}/bash")
            os.symlink("/bin/uname", f"{folder}/uname")
            os.symlink("/usr/bin/dirname", f"{folder}/dirname")
            done = bench("ddp", "--rate", "1gbit", env={**os.environ, "PATH": folder})
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"^skim\.bench: cluster: needs (root|ip)[^\n]*\n$")


if __name__ == "__main__":
    unittest.main()
