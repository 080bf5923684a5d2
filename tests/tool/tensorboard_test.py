"""skim train --tensorboard: event files have the numbers of --metrics. This file has a reader of its own.

Needs SKIM_TOOL; SKIM_HAS_MPI=1 where the build has MPI.
"""

import os
import pathlib
import re
import resource
import shutil
import signal
import struct
import time
import unittest

from tool_test import HAS_MPI, LIMIT, Case, lines, pids_of, train

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 2 if HAS_MPI else 1
CASE = ["--model", "mlp-64", "--density", 0.05, "--eval-epochs", 0.1]
TAGS = {"loss": "train/loss", "lr": "train/lr", "epoch": "train/epoch", "train_loss": "train/mean_loss",
        "test_loss": "test/loss", "test_accuracy": "test/accuracy", "capture": "skim/captured"}
TAGS |= {key: f"skim/{key}" for key in (
    "density", "budget_spent", "threshold", "residual_norm", "step_ms", "compute_ms", "exposed_ms", "optimizer_ms",
    "select_ms", "exchange_ms", "apply_ms")}


def crc32c(data):
    """Bit by bit: the remainder by the polynomial of Castagnoli, lowest bit first."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    """The data of each record. Fails if a CRC is wrong or the last record is not whole."""
    raw, found = path.read_bytes(), []
    while raw:
        length, of_length = struct.unpack("<QI", raw[:12])
        data, of_data = raw[12:12 + length], raw[12 + length:16 + length]
        if of_length != masked(raw[:8]) or of_data != struct.pack("<I", masked(data)):
            raise ValueError(f"{path}: a wrong CRC")
        found.append(data)
        raw = raw[16 + length:]
    return found


def fields(message):
    """(number, value) of each field of a message of protocol buffers."""
    def varint():
        nonlocal message
        x = shift = 0
        while True:
            byte, message = message[0], message[1:]
            x |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return x

    found = []
    while message:
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = {1: 8, 5: 4}[key & 7] if key & 7 != 2 else varint()
        value, message = message[:size], message[size:]
        if len(value) != size:
            raise ValueError("a field is not whole")
        if key & 7 != 2:
            (value,) = struct.unpack("<d" if size == 8 else "<f", value)
        found.append((key >> 3, value))
    return found


def events(path):
    """(wall time, step, version, {tag: value}, status of the session) of each event."""
    found = []
    for data in records(path):
        event = dict(fields(data))
        scalars = {}
        for number, value in fields(event.get(5, b"")):
            assert number == 1
            value = dict(fields(value))
            scalars[value[1].decode()] = value[2]
        session = dict(fields(event.get(7, b"")))
        found.append((event[1], event.get(2, 0), event.get(3, b"").decode(), scalars, session.get(1)))
    return found


def files_of(folder):
    return sorted(folder.glob("*tfevents*"))


def shown(folder):
    """(step, {tag: value}) as TensorBoard shows them: a session that starts at a step voids that and later ones."""
    found = []
    for file in files_of(folder):
        for _, step, _, scalars, session in events(file):
            if session == 1:
                found = [one for one in found if one[0] < step]
            if scalars:
                found.append((step, scalars))
    return found


def as_float(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def expected(metrics, run):
    """The same from the file of --metrics."""
    found, sent, dense, skipped = [], 0, 0, 0
    for line in lines(metrics):
        if line["run"] != run:
            continue
        scalars = {tag: line[key] for key, tag in TAGS.items() if line.get(key) is not None}
        if "sent_bytes" in line:
            sent, dense, skipped = sent + line["sent_bytes"], dense + line["dense_bytes"], skipped + line["skipped"]
            scalars |= {"skim/sent_bytes": sent, "skim/compression": dense / sent if sent else 1,
                        "skim/steps_taken_back": skipped}
        if scalars:
            found.append((line["step"], {tag: as_float(x) for tag, x in scalars.items()}))
    return found


class Records(Case):
    def setUp(self):
        super().setUp()
        self.metrics, self.runs = self.dir / "m.jsonl", self.dir / "runs"
        self.files = ["--metrics", self.metrics, "--tensorboard", self.runs]

    def assert_as_recorded(self, run):
        self.assertEqual(shown(self.runs / run), expected(self.metrics, run))

    def assert_nearly_as_recorded(self, run):
        """Totals of a run that has gone back were read from a file with floats."""
        for found, recorded in zip(shown(self.runs / run), expected(self.metrics, run), strict=True):
            self.assertEqual((found[0], found[1].keys()), (recorded[0], recorded[1].keys()))
            for tag, value in recorded[1].items():
                self.assertAlmostEqual(found[1][tag], value, delta=1e-6 * abs(value), msg=tag)

    def test_the_reader_knows_the_crc(self):
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)
        self.assertEqual(crc32c(bytes(32)), 0x8A9136AA)  # RFC 3720, B.4

    def test_every_number_of_metrics_is_there(self):
        begin = time.time()
        self.assert_ok(train(*CASE, "--steps", 20, "--ranks", RANKS, "--compare", "dense,gtopk:0.01", *self.files))
        self.assertEqual({path.name for path in self.runs.iterdir()}, {"dense", "gtopk:0.01"})
        for run in ("dense", "gtopk:0.01"):
            self.assert_as_recorded(run)
            found = shown(self.runs / run)
            self.assertEqual([step for step, scalars in found if "train/loss" in scalars], list(range(1, 21)))
            self.assertGreater(sum("test/accuracy" in scalars for _, scalars in found), 2)
            self.assertEqual(found[-1][1].keys() | found[-2][1].keys(),
                             {*TAGS.values(), "skim/sent_bytes", "skim/compression", "skim/steps_taken_back"}
                             - {"skim/budget_spent"})
            (file,) = files_of(self.runs / run)
            first, *others = events(file)
            self.assertEqual(first[1:], (0, "brain.Event:2", {}, None))
            times = [begin, first[0], *(event[0] for event in others), time.time()]
            self.assertEqual(times, sorted(times))

    def test_what_is_not_finite_is_left_out(self):
        self.assert_ok(train("--model", "mlp-64", "--steps", 30, "--lr", "1e20", "--skip-limit", 0, *self.files))
        self.assert_as_recorded("gtopk")
        last = max(shown(self.runs / "gtopk"), key=lambda one: one[0])[1]
        self.assertNotIn("train/loss", last)
        (skipped,) = {scalars["skim/steps_taken_back"] for step, scalars in shown(self.runs / "gtopk")
                      if step == 30 and "skim/steps_taken_back" in scalars}
        self.assertGreater(skipped, 20)

    def test_tags_are_those_of_the_python_package(self):
        report = (ROOT / "python/skim/_report.py").read_text()
        (body,) = re.findall(r"def scalars\(self\).*?return \{(.*?)\n        \}", report, re.DOTALL)
        of_python = {f"skim/{tag}" for tag in re.findall(r'^ +"(\w+)":', body, re.MULTILINE)}
        self.assertGreater(len(of_python), 5)
        self.assert_ok(train(*CASE, "--steps", 1, *self.files))
        # The trainer has no device, so nothing moves between it and the host.
        self.assertEqual(of_python - shown(self.runs / "gtopk")[0][1].keys(), {"skim/moved_bytes"})

    def test_it_grows_during_the_run_and_is_whole_after_ctrl_c(self):
        run = self.start("--ranks", RANKS, *CASE[:2], "--steps", 1000000, "--eval-epochs", 1, *self.files)
        self.wait_for_step(run, self.metrics, 9)
        (file,) = files_of(self.runs / "gtopk")
        live = file.read_bytes().count(b"train/loss")
        self.assertGreaterEqual(live, 9)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGINT, out + err)
        self.assert_as_recorded("gtopk")
        self.assertGreaterEqual(len(shown(self.runs / "gtopk")), live)

    def test_a_resumed_run_goes_on(self):
        case = ["--ranks", RANKS, *CASE, "--checkpoint", self.dir / "c", "--checkpoint-steps", 7, *self.files]
        run = self.start(*case, "--steps", 1000000)
        self.wait_for_step(run, self.metrics, 12)
        self.wait_for_checkpoint(run, self.dir / "c")
        for pid in [run.pid, *pids_of(self.dir).values()]:
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=LIMIT)
        folder = self.runs / "gtopk"
        before = max(step for step, _ in shown(folder))
        done = train(*case, "--steps", before + 10, "--resume")
        self.assert_ok(done)
        self.assertNotIn("--tensorboard", done.stderr)
        old, new = files_of(folder)
        (start,) = [step for _, step, _, _, session in events(new) if session == 1]
        self.assertEqual(start % 7, 1)
        self.assertGreaterEqual(before + 1, start)
        steps = [step for step, scalars in shown(folder) if "train/loss" in scalars]
        self.assertEqual(steps, list(range(1, before + 11)))
        self.assert_nearly_as_recorded("gtopk")

    def test_an_evaluation_that_comes_again_is_shown_once(self):
        case = ["--model", "linear", "--steps", 10, "--checkpoint", self.dir / "c", "--checkpoint-steps", 7, *self.files]
        self.assert_ok(train(*case, "--eval-epochs", 0))
        for _ in range(2):  # The checkpoint of step 7 is older than the evaluation of step 7.
            shutil.rmtree(self.dir / "c/step-00000010")
            self.assert_ok(train(*case, "--eval-epochs", 7 / 64, "--resume"))
        self.assertEqual([step for step, scalars in shown(self.runs / "gtopk") if "test/loss" in scalars], [7, 10])
        self.assert_nearly_as_recorded("gtopk")

    def test_a_run_that_rolls_back_voids_its_steps(self):
        # From step 96 on, the learning rate is 300 times as large, so it diverges again and again.
        done = train("--model", "mlp-64", "--steps", 300, "--eval-epochs", 0, "--lr-schedule", "steps",
                     "--lr-gamma", 300, "--lr-drops", 1.5, "--clip-norm", 1, "--checkpoint", self.dir / "c",
                     "--checkpoint-steps", 10, "--keep", 4, "--on-divergence", "rollback", *self.files)
        self.assertIn("after 3 rollbacks", done.stderr)
        (file,) = files_of(self.runs / "gtopk")
        self.assertEqual(sum(session == 1 for *_, session in events(file)), 3)
        self.assert_nearly_as_recorded("gtopk")

    def test_an_old_run_is_kept_beside(self):
        self.assert_ok(train(*CASE, "--steps", 3, *self.files))
        first = shown(self.runs / "gtopk")
        (self.runs / "dense").mkdir()
        (self.runs / "dense/notes").write_text("mine")
        done = train(*CASE, "--steps", 4, "--compare", "gtopk,dense", *self.files)
        self.assert_ok(done)
        self.assertIn(f"--tensorboard: kept the old '{self.runs}/gtopk' as 'gtopk.~1~'", done.stderr)
        self.assertEqual(shown(self.runs / "gtopk.~1~"), first)
        self.assert_as_recorded("gtopk")
        self.assertEqual((self.runs / "dense/notes").read_text(), "mine")  # it has no event file, so it stays
        self.assert_as_recorded("dense")

    def test_folders_that_cannot_be_written(self):
        (self.dir / "file").write_text("")
        for ranks in {1, RANKS}:
            for folder, word in ("file", "Not a directory"), ("file/deeper", "Not a directory"):
                done = train("--ranks", ranks, "--model", "linear", "--steps", 3, "--tensorboard", self.dir / folder)
                self.assert_refused(done, f"--tensorboard: cannot open '{self.dir / folder}'", word)
                self.assertEqual(done.stdout, "")
        self.assert_refused(train("--steps", 3, "--tensorboard", "-"), "--tensorboard", "folder, got '-'")

    def test_a_full_disk(self):
        def small_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

        done = train("--model", "linear", "--steps", 30, "--tensorboard", self.runs, preexec_fn=small_disk,
                     restore_signals=False)
        self.assert_refused(done, "--tensorboard: cannot write", "tfevents", "File too large", status=1)


if __name__ == "__main__":
    unittest.main()
