"""The tool `skim`, run as a person or a script runs it: usage, results, checkpoints, failures.

Needs SKIM_TOOL (the binary) and SKIM_VERSION; SKIM_HAS_MPI=1 where the build has MPI.
"""

import array
import fcntl
import gzip
import json
import os
import pathlib
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from launched import is_running, listening, pids_of  # noqa: E402

TOOL = os.environ["SKIM_TOOL"]
HAS_MPI = os.environ.get("SKIM_HAS_MPI") == "1"
LIMIT = 120  # seconds: no run here may take longer, whatever goes wrong
# With these, mpirun of Open MPI 4 and 5 starts ranks as root, and more than there are cores.
FOR_MPIRUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
              "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
SMALL = ["--generated-train", "512", "--generated-test", "100", "--batch", "8", "--lr", "0.05"]


def skim(*arguments, **options):
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True,
                          timeout=LIMIT, **options)


def train(*arguments, **options):
    return skim("train", *SMALL, *arguments, **options)


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def training_lines(path):
    """Without those about the process that trained."""
    return [line for line in lines(path) if not {"command", "compared_ms"} & line.keys()]


def newest_in(folder):
    """The newest checkpoint."""
    return max(folder.glob("step-*"))


def flip_a_bit(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


def reseal(path):
    """Makes the manifest of a checkpoint agree with a file that has been changed."""
    def crc32(data):
        return f"{zlib.crc32(data):08x}"

    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "crc32": crc32(path.read_bytes())}
    del manifest["crc32"]
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (path.parent / "manifest.json").write_text(json.dumps(manifest | {"crc32": crc32(compact.encode())}))


def open_to_strangers(pid):
    """Those of them that listen beyond this machine."""
    return [address for address in listening(pid) if not address.startswith("0100007F")]


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def assert_ok(self, done):
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def assert_refused(self, done, *words, status=2):
        """One clear line on standard error, and the status."""
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def start(self, *arguments, **options):
        """A training run in the background, with a folder for temporary files of its own."""
        return self.start_skim("train", *SMALL, *arguments, **options)

    def start_skim(self, *arguments, **options):
        environment = dict(os.environ, TMPDIR=str(self.dir))
        run = subprocess.Popen([TOOL, *map(str, arguments)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)
        self.addCleanup(run.kill)
        return run

    def wait_for_step(self, run, metrics, step):
        """Until the run has recorded this step."""
        self.wait_until(run, lambda: metrics.exists() and metrics.read_text().count('"sent_bytes"') >= step,
                        f"step {step} was not reached")

    def wait_for_checkpoint(self, run, folder):
        """Until one has appeared. It is written beside training, so later steps may be recorded before."""
        self.wait_until(run, lambda: list(folder.glob("step-*")), "no checkpoint appeared")

    def wait_until(self, run, is_so, else_what):
        """Until the state that a test needs is there, not an amount of time."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            if is_so():
                return
            try:
                run.wait(timeout=0.02)
            except subprocess.TimeoutExpired:
                continue
            self.fail("the run ended early: " + "".join(run.communicate()))
        self.fail(f"{else_what} in {LIMIT} s")


class Usage(Case):
    def test_help_names_every_option_the_readme_uses(self):
        done = skim("train", "--help")
        self.assert_ok(done)
        for option in ["--ranks", "--model", "--data", "--data-dir", "--exchange", "--select",
                       "--density", "--epochs", "--steps", "--batch", "--lr", "--momentum",
                       "--weight-decay", "--seed", "--threads", "--metrics", "--summary",
                       "--config", "--compare", "--checkpoint", "--resume"]:
            self.assertRegex(done.stdout, rf"{option}\b")
        self.assert_ok(skim("--help"))

    def test_a_default_is_in_one_pair_of_brackets(self):
        for command in (["simulate"], ["bench", "select"], ["bench", "scaling"], ["plan"]):
            text = skim(*command, "--help").stdout
            self.assertNotIn("[[", text)
        self.assertRegex(skim("simulate", "--help").stdout, r"ranks, each a thread \[8\]")

    def test_help_of_a_command(self):
        for command in (["train"], ["bench"], ["bench", "wire"]):
            done = skim("help", *command)
            self.assert_ok(done)
            self.assertEqual(done.stdout, skim(*command, "--help").stdout)
        for benchmark in ("select", "wire", "network", "scaling"):
            self.assertRegex(skim("bench", "--help").stdout, rf"(?m)^  {benchmark} ")
            self.assertIn("--json", skim("bench", benchmark, "--help").stdout)
        self.assert_refused(skim("help", "trian"), "trian", "train")

    def test_version(self):
        done = skim("--version")
        self.assert_ok(done)
        self.assertEqual(done.stdout, f"skim {os.environ['SKIM_VERSION']}\n")
        for words in (["version", "x"], ["--version", "--bogus"]):
            self.assert_refused(skim(*words), words[0], f"got '{words[1]}'")

    def test_standard_output_that_is_lost_is_no_success(self):
        metrics, summary = self.dir / "m.jsonl", self.dir / "s.json"
        run = ["--model", "linear", "--steps", 3]
        self.assert_ok(train(*run, "--metrics", metrics))
        commands = [["--help"], ["version"], ["train", "--help"], ["report", metrics, "--out", "-"],
                    ["plan", "--link", "1gbit", "--compute", "0.2s"],
                    ["train", *SMALL, *run, "--summary", summary]]
        if HAS_MPI:
            commands += [["train", *SMALL, *run, "--ranks", 2],
                         ["train", *SMALL, *run, "--ranks", 2, "--metrics", "-"]]
        for command in commands:
            with self.subTest(command=command), open("/dev/full", "w") as full:
                done = subprocess.run([TOOL, *map(str, command)], stdout=full, stderr=subprocess.PIPE, text=True,
                                      timeout=LIMIT)
                self.assertEqual(done.returncode, 1, done.stderr)
                said = "cannot write to standard output|--metrics: cannot write '-'"
                self.assertRegex(done.stderr.splitlines()[-1], f"^skim: ({said})(: No space left on device)?$")
                if "-" not in command:
                    self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertTrue(json.loads(summary.read_text()))

    def test_a_closed_standard_output_is_no_place_for_another_file(self):
        for ranks in (1, 2) if HAS_MPI else (1,):
            metrics = self.dir / f"{ranks}.jsonl"
            with self.subTest(ranks=ranks):
                run = ["train", *SMALL, *map(str, ["--model", "linear", "--steps", 3, "--ranks", ranks, "--metrics", metrics])]
                done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", TOOL, *run], stderr=subprocess.PIPE, text=True,
                                      timeout=LIMIT)
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, "^skim: cannot write to standard output(: Bad file descriptor)?\n$")
                self.assertEqual([line["step"] for line in lines(metrics) if "k" in line], [1, 2, 3])

    def test_a_reader_that_goes_away_stops_the_ranks_in_order(self):
        """As head does. Nothing is left of the run, and it goes on from its checkpoint."""
        for ranks in (1, 2) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                folder = self.dir / f"c{ranks}"
                environment = os.environ | {"TMPDIR": str(self.dir)}
                arguments = ["--model", "linear", "--ranks", ranks, "--metrics", "-", "--checkpoint", folder]
                run = subprocess.Popen([TOOL, "train", *SMALL, *map(str, [*arguments, "--steps", 1000000])], text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
                self.addCleanup(run.kill)
                self.addCleanup(run.stderr.close)
                run.stdout.readline()
                run.stdout.close()
                self.assertEqual(run.wait(timeout=LIMIT), 128 + signal.SIGPIPE if ranks > 1 else 1)
                self.assertIn("--resume continues", run.stderr.read())
                self.assertEqual(list(self.dir.glob("skim-*")), [])
                steps = int(newest_in(folder).name.removeprefix("step-")) + 1
                self.assert_ok(train(*arguments, "--steps", steps, "--resume"))

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_metrics_that_standard_output_does_not_take_stop_the_ranks_in_order(self):
        folder = self.dir / "c"
        arguments = ["--model", "linear", "--ranks", 2, "--metrics", "-", "--checkpoint", folder]
        with open("/dev/full", "w") as full:
            done = subprocess.run([TOOL, "train", *SMALL, *map(str, [*arguments, "--steps", 1000000])], stdout=full,
                                  stderr=subprocess.PIPE, text=True, timeout=LIMIT)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.splitlines()[-1], "skim: --metrics: cannot write '-': No space left on device")
        self.assertIn("--resume continues", done.stderr)
        steps = int(newest_in(folder).name.removeprefix("step-")) + 1
        self.assert_ok(train(*arguments, "--steps", steps, "--resume"))

    def test_a_run_goes_on_without_standard_output(self):
        folder = self.dir / "c"
        with open("/dev/full", "w") as full:
            done = subprocess.run([TOOL, "train", *SMALL, *map(str, ["--model", "linear", "--steps", 300,
                                   "--eval-epochs", 1 / 64, "--checkpoint", folder])],
                                  stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot write to standard output", done.stderr)
        self.assertEqual(newest_in(folder).name, "step-00000300")

    def test_tasks_of_srun_without_mpi_are_refused(self):
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
        done = train("--steps", "1", env={**alone, "SLURM_STEP_NUM_TASKS": "2"})
        self.assert_refused(done, "srun started 2 tasks", "--mpi=pmix")
        self.assert_ok(train("--steps", "1", env={**alone, "SLURM_STEP_NUM_TASKS": "1"}))

    def test_unknown_things_are_named_and_the_valid_ones_listed(self):
        self.assert_refused(skim("trian"), "trian", "train")
        self.assert_refused(train("--bogus"), "--bogus")
        self.assert_refused(train("--model", "alexnet"), "alexnet", "lenet5")
        self.assert_refused(train("--data", "imagenet"), "imagenet", "mnist")
        self.assert_refused(train("--exchange", "psync"), "psync", "gtopk")
        self.assert_refused(train("--compare", "dense,psync"), "psync", "gtopk")
        self.assert_refused(train("--compare", "gtopk:much"), "much")
        self.assert_refused(train("--select", "best"), "best", "exact", "blocktopk")
        self.assert_refused(train("--compare", "gtopk:0.01:best"), "best", "exact", "blocktopk")
        self.assert_refused(train("--compare", "gtopk::exact"), "''", "no density")
        self.assert_refused(train("--select-seeds", "other"), "other", "same", "own")
        self.assert_refused(train("--among", "dense,auto"), "auto", "oktopk")
        self.assert_refused(train("--inside", "dense"), "dense", "allgather")
        self.assert_refused(train("--cut-every", "0"), "--cut-every", "> 0")
        self.assert_refused(train("--fit", self.dir / "none"), "--fit", "cannot open", "none")
        self.assert_refused(train("--fit", self.dir), "--fit", "it is not JSON")
        self.assert_refused(train("--config", self.dir), f"{self.dir} was not readable")
        fit = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-9, "select_s": 1e-9, "merge_s": 0, "add_s": 0}
        for key, value, got in (("select_s", -1, "-1"), ("alpha_s", -0.5, "-0.5"), ("merge_s", "x", '"x"'),
                                ("add_s", None, "null")):
            (self.dir / "fit").write_text(json.dumps(fit | {key: value}))
            self.assert_refused(train("--exchange", "auto", "--fit", self.dir / "fit"), "--fit", "bench network",
                                f"expected a number >= 0 as '{key}', got {got}")

    def test_values_out_of_range(self):
        for density in ["0", "-0.1", "1.5", "nan"]:
            self.assert_refused(train("--density", density), "--density", "(0, 1]")
        self.assert_refused(train("--batch", "0"), "--batch", "> 0")
        self.assert_refused(train("--steps", "0"), "--steps", "> 0")
        for threads in (0, 1025, 100000):
            self.assert_refused(train("--threads", threads), "--threads", "[1, 1024]", str(threads))
        self.assert_refused(train("--lr", "fast"), "--lr", "fast")
        self.assert_refused(train("--lr", "1e30", "--lr-schedule", "steps", "--lr-gamma", "1e5", "--lr-drops", "1,2"),
                            "--lr-gamma", "at most 3.4e38", "got 1e+40")
        self.assert_refused(train("--density-warmup", "0.5,x"), "--density-warmup", "'x'")
        for density in ("2", "0", "nan"):
            self.assert_refused(train("--density-warmup", f"0.5,{density}"), f"--density-warmup: '{density}' in",
                                "(0, 1]")
        for epochs in ("-1", "nan", "inf"):
            self.assert_refused(train("--density-warmup", f"geometric:{epochs}"),
                                f"--density-warmup: 'geometric:{epochs}'", ">= 0")
        self.assert_refused(train("--resume"), "--checkpoint")
        self.assert_refused(train("--select", "threshold"), "--select-threshold > 0")
        self.assert_refused(train("--compare", "gtopk:0.01:threshold"), "--select-threshold > 0")
        self.assert_refused(train("--select-threshold", "-1"), "--select-threshold", "> 0")
        self.assert_refused(train("--select-block", "0"), "--select-block", "> 0")
        self.assert_refused(train("--select-stages", "none"), "--select-stages", "none")
        self.assert_refused(train("--momentum-correction", "1"), "--momentum-correction", "[0, 1)")
        self.assert_refused(train("--nesterov-correction"), "--momentum-correction > 0")
        self.assert_refused(train("--momentum-dampening", "0.5"), "--momentum-correction > 0")
        self.assert_refused(train("--lr-drops", "1,2"), "--lr-drops needs --lr-schedule steps")
        for epoch in ("nan", "inf", "-1"):
            self.assert_refused(train("--lr-schedule", "steps", f"--lr-drops=1,{epoch}"), "--lr-drops", ">= 0", epoch)
        self.assert_refused(train("--lr-schedule", "steps"), "--lr-schedule steps needs --lr-drops")
        self.assert_refused(train("--optimizer", "adamw", "--momentum", "0.9"), "--momentum is for")
        self.assert_refused(train("--ahead", "0.5"), "--local-steps H")
        self.assert_refused(train("--local-steps", "0"), "--local-steps", "> 0")
        self.assert_refused(train("--local-steps", "2", "--ahead", "2"), "--ahead", "[0, 1]")
        for option in ("--local-clip=1", "--non-finite=pass-on", "--memory=gradients"):
            self.assert_refused(train("--local-steps", "2", option), option.split("=")[0],
                                "and --local-steps exclude each other")
        self.assert_refused(train("--local-steps", "2", "--momentum-correction", "0.9"),
                            "needs --local-steps 1")
        self.assert_refused(train("--momentum", "0.9", "--momentum-correction", "0.9"),
                            "--momentum and --momentum-correction exclude each other")
        self.assert_refused(train("--no-factor-masking"), "--momentum-correction > 0")
        self.assert_refused(train("--local-clip", "-2"), "--local-clip", ">= 0")
        self.assert_refused(train("--local-clip", "1e39"), "--local-clip", "at most 3.4e38", "1e39")
        self.assert_refused(train("--residual-decay", "1.5"), "--residual-decay", "[0, 1]")
        self.assert_refused(train("--value-code", "q3"), "--value-code", "q3", "f32,f16,bf16,q8")
        self.assert_refused(train("--index-code", "elias"), "--index-code", "elias",
                            "auto,raw32,packed,rice,bitmap,huffman")
        self.assert_refused(train("--rounding", "up"), "--rounding", "nearest,stochastic")
        for option in ["--momentum-correction", "--residual-decay"]:
            self.assert_refused(train(option, "0.5", "--no-feedback"), option, "--no-feedback")
        self.assert_refused(train("--residual-code", "q8", "--no-feedback"), "--residual-code", "--no-feedback")
        self.assert_refused(train("--residual-code", "q4"), "--residual-code", "q4", "f32,bf16,q8")
        self.assert_refused(train("--server", "star"), "--server", "star", "rank0", "sharded")
        self.assert_refused(train("--exchange", "allgather", "--down-density", "0.1"),
                            "--down-density", "allgather", "param-server")
        self.assert_refused(train("--exchange", "hierarchical", "--down-density", "0.1"),
                            "--down-density", "hierarchical with these options", "oktopk")
        self.assert_refused(train("--exchange", "auto", "--among", "dense,gtopk", "--down-density", "0.1"),
                            "--down-density", "--among", "add global-topk, oktopk")
        self.assert_refused(train("--exchange", "param-server", "--down-density", "2"),
                            "--down-density", "(0, 1]")
        self.assert_refused(train("--memory", "updates", "--optimizer", "adam"), "--memory", "sgd")
        self.assert_refused(train("--memory", "updates", "--local-clip", "1"), "--local-clip")
        self.assert_refused(train("--batch", "1000"), "512")
        self.assert_refused(train("--model", "lstm"), "lstm")

    def test_a_message_is_one_line(self):
        self.assert_refused(train("--lr", "fa\nst\x07"), r"fa\nst\x07")
        self.assert_refused(skim("tra\nin"), r"tra\nin")
        self.assert_refused(train("--fit", self.dir / "a\nb"), r"a\nb")
        (self.dir / "run.toml").write_bytes(b"lr = 0.1\nmo\0del = 'mlp'\n")
        self.assert_refused(train("--config", self.dir / "run.toml"), "run.toml, line 2", "NUL byte")
        (self.dir / "s.json").write_text(json.dumps([{"run": "gtopk", "exchange": "gtopk", "value_code": "q4\0"}]))
        self.assert_refused(train("--config", self.dir / "s.json"), "value_code", r'"q4\u0000"')

    def test_an_empty_list_takes_no_words_behind_it(self):
        for given in (["--ranks", ","], ["--ranks=,"]):
            self.assert_refused(skim("simulate", *given, "--link", "1gbit"), "--ranks: expected a value, got ','")
        self.assert_refused(train("--among", ",", "--exchange", "auto"), "--among: expected a value, got ','")

    def test_a_list_with_a_missing_value_is_refused(self):
        for given in ("1,,2", ",1", "1,"):
            for words in (["--ranks", given], [f"--ranks={given}"]):
                self.assert_refused(skim("simulate", *words, "--link", "1gbit"),
                                    f"--ranks: expected a value before and after each comma, got '{given}'")

    def test_sizes_that_fit_no_memory_are_refused_at_once(self):
        text = self.dir / "text"
        text.write_text("many words. " * 1000)
        for model, option, size in (("gpt", "--layers", 2**53), ("gpt", "--embedding", 2**53), ("lstm", "--hidden", 2**53),
                                    ("lstm", "--layers", 10**9)):
            self.assert_refused(train("--model", model, "--data", "text", "--data-dir", text, option, size),
                                f"model {model} needs about", "GB, and this machine has")
        self.assert_refused(train("--generated-train", 2**53), "data: generated needs about", "take fewer images")

    def test_an_option_without_effect_is_refused(self):
        needs = {
            "--shards-per-rank 3": "--split shards", "--augment": "--data cifar10",
            "--sequence-length 9": "--data text", "--layers 2": "--model lstm or gpt", "--hidden 9": "--model lstm",
            "--embedding 9": "--model lstm or gpt", "--heads 2": "--model gpt", "--lr-drops 1": "--lr-schedule steps",
            "--lr-gamma 0.5": "--lr-schedule steps",
            "--ahead 0.5": "--local-steps H", "--outer-lr 1": "--local-steps H",
            "--outer-momentum 0.5": "--local-steps H", "--among gtopk": "--exchange auto",
            "--trial-share 0.1": "--exchange auto", f"--fit {self.dir}/fit": "--exchange auto or --target-time",
            "--drop sender-keeps --exchange allgather": "--exchange gtopk or gtopk-tree",
            "--inside allgather": "--exchange hierarchical", "--between gtopk": "--exchange hierarchical",
            "--server sharded": "--exchange param-server", "--oktopk-exact": "--exchange oktopk",
            "--cut-every 9": "--exchange oktopk", "--regions-every 9": "--exchange oktopk",
            "--rounding stochastic": "a --value-code other than f32", "--select-threshold 1": "--select threshold",
            "--select-block 9": "--select blocktopk", "--select-stages 2": "--select sidco",
            "--select-seeds own": "--select dgc, mstopk or randomk",
            "--density-min 0.1": "--density adaptive, capture=SHARE or descent-per-bit",
            "--density-max 0.1 --density accordion=0.1/0.2": "--density adaptive, capture=SHARE or descent-per-bit",
            "--adaptive-form even": "--density adaptive", "--contraction 0.9": "--density adaptive",
            "--compute 1ms": "--target-time", "--checkpoint-steps 9": "--checkpoint DIR",
            "--checkpoint-time 1s": "--checkpoint DIR", "--keep 9": "--checkpoint DIR",
            "--divergence-factor 9": "--on-divergence stop or rollback",
            "--skip-limit 3 --non-finite raise": "--non-finite skip",
        }
        (self.dir / "fit").write_text(json.dumps(
            {"alpha_s": 1e-3, "beta_s_per_byte": 1e-9, "select_s": 1e-9, "merge_s": 0, "add_s": 0}))
        for given, what in needs.items():
            option = given.split()[0]
            self.assert_refused(train(*given.split()), f"{option} needs {what}; it has no effect here, so leave it out")
        self.assert_refused(train("--compare", "dense,gtopk:0.1:randomk", "--select-block", 9),
                            "--select-block needs --select blocktopk")
        self.assert_refused(skim("simulate", "--train", "--link", "1gbit", "--among", "gtopk"), "--among needs")
        config = self.dir / "run.toml"
        config.write_text("keep = 9\n")
        self.assert_refused(train("--config", config), "--keep needs --checkpoint DIR")

    def test_an_option_is_accepted_if_one_of_the_runs_uses_it(self):
        case = ["--model", "linear", "--steps", 2, "--dense-below", 0]
        self.assert_ok(train(*case, "--compare", "dense,gtopk:0.1:blocktopk", "--select-block", 9))
        self.assert_ok(train(*case, "--exchange", "hierarchical", "--between", "gtopk", "--drop", "sender-keeps"))
        # A summary has all options, also those that its run does not use.
        summary = self.dir / "s.json"
        self.assert_ok(train(*case, "--select", "blocktopk", "--select-block", 9, "--summary", summary))
        self.assert_ok(skim("train", "--config", summary, "--select", "exact"))

    def test_config_file(self):
        config = self.dir / "run.toml"
        config.write_text('model = "linear"\nsteps = 2\nexchange = "allgather"\n')
        summary = self.dir / "s.json"
        self.assert_ok(train("--config", config, "--summary", summary))
        run = json.loads(summary.read_text())[0]
        self.assertEqual((run["model"], run["steps"], run["exchange"]), ("linear", 2, "allgather"))
        # The command line goes before the file.
        self.assert_ok(train("--config", config, "--steps", 3, "--summary", summary))
        self.assertEqual(json.loads(summary.read_text())[0]["steps"], 3)
        config.write_text('select = "randomk"\nselect-seeds = "own"\nper-parameter = true\n'
                          'momentum-correction = 0.5\nno-factor-masking = true\nlocal-clip = 2.0\n'
                          'residual-decay = 0.75\nmodel = "linear"\nsteps = 2\n')
        self.assert_ok(train("--config", config, "--summary", summary))
        run = json.loads(summary.read_text())[0]
        self.assertEqual([run[key] for key in ["select", "per_parameter", "momentum_correction",
                                               "local_clip", "residual_decay"]],
                         ["randomk", True, 0.5, 2.0, 0.75])
        config.write_text("modle = 'linear'\n")
        self.assert_refused(train("--config", config), "modle")

    def test_a_config_file_has_comments_and_may_have_a_byte_order_mark(self):
        config = self.dir / "run.toml"
        for quoted, name in (('"s#1.json"', "s#1.json"), ("'s#2.json'", "s#2.json")):
            config.write_text(f"\ufeff# 'a run\nmodel = 'linear' # \"small\nsteps = 2#, one more\nsummary = {quoted} # ' here\n")
            with self.subTest(quoted=quoted):
                self.assert_ok(train("--config", config, cwd=self.dir))
                self.assertEqual(json.loads((self.dir / name).read_text())[0]["steps"], 2)

    def test_a_summary_is_a_config_file(self):
        summary = self.dir / "s.json"
        for text in ["[]", "{}", "[1]", '[{"model": "mlp"}]', '[{"exchange": "gtopk", "run": 5}]']:
            summary.write_text(text)
            self.assert_refused(train("--config", summary), "--config", "no summary", "TOML")
        for key, value, words in [("select", "best", ["select", "best", "exact"]),
                                  ("batch", 0.5, ["batch", "whole number", "0.5"]),
                                  ("batch", 0, ["batch", "> 0", "got 0"]),
                                  ("cut_every", 0, ["cut_every", "> 0", "got 0"]),
                                  ("lr", 0, ["lr", "> 0", "got 0"]),
                                  ("momentum", 1, ["momentum", "[0, 1)", "1"]),
                                  ("density", "much", ["density", "much", "adaptive"]),
                                  ("lr", "fast", ["lr", "fast"]),
                                  ("local_clip", 1e39, ["local_clip", "at most 3.4e38", "1e+39"]),
                                  ("weight_decay", 1e308, ["weight_decay", "at most 3.4e38", "1e+308"]),
                                  ("local_speeds", {"select_s": -1}, ["local_speeds", "'select_s'", "-1"]),
                                  ("density_warmup", "0.5,2", ["density_warmup", "'2'", "(0, 1]"])]:
            summary.write_text(json.dumps([{"exchange": "gtopk", key: value}]))
            self.assert_refused(train("--config", summary), "--config", *words)
        # The command line goes before the file, and files of the first run are not written again.
        self.assert_ok(train("--model", "linear", "--steps", 2, "--metrics", self.dir / "m", "--lr", 0.3,
                             "--summary", summary))
        (self.dir / "m").unlink()
        again = self.dir / "again.json"
        self.assert_ok(skim("train", "--config", summary, "--lr", 0.2, "--summary", again))
        first, second = (json.loads(path.read_text())[0] for path in [summary, again])
        results = {"train_loss", "test_loss", "test_accuracy"}
        self.assertEqual({key for key in OPTIONS(first) - results if first[key] != second[key]}, {"lr", "metrics"})
        self.assertFalse((self.dir / "m").exists())

    def test_the_runs_of_a_summary_have_different_names(self):
        """As those of two summaries that were joined, which would share a folder of checkpoints."""
        both, folder = self.dir / "both.json", self.dir / "c"
        runs = [{"exchange": "gtopk", "run": "gtopk", "model": "linear", "steps": 2, "seed": seed} for seed in (1, 2)]
        both.write_text(json.dumps(runs))
        self.assert_refused(train("--config", both, "--checkpoint", folder), "--config", "two runs", "'gtopk'")
        both.write_text(json.dumps([runs[0], runs[1] | {"run": "again"}]))
        self.assert_ok(train("--config", both, "--checkpoint", folder))
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["again", "gtopk"])

    def test_every_run_of_a_summary_has_the_data_of_its_own(self):
        both, again = self.dir / "both.json", self.dir / "again.json"
        runs = []
        for name, changes in (("first", []), ("order", ["--seed", 2]), ("fewer", ["--generated-train", 64]),
                              ("threads", ["--threads", 1])):
            summary = self.dir / f"{name}.json"
            self.assert_ok(skim("train", *SMALL, "--model", "linear", "--steps", 12, *changes, "--summary", summary))
            runs.append(json.loads(summary.read_text())[0] | {"run": name})
        both.write_text(json.dumps(runs))
        self.assert_ok(skim("train", "--config", both, "--summary", again))
        for ours, theirs in zip(runs, json.loads(again.read_text()), strict=True):
            for key in ("run", "seed", "epochs", "threads", "train_loss", "test_loss"):
                self.assertEqual(theirs[key], ours[key], (ours["run"], key))

    def test_runs_that_cannot_be_repeated_together_are_refused(self):
        (self.dir / "text").write_text("To be, or not to be. " * 100)
        one = {"run": "one", "exchange": "gtopk", "model": "linear", "steps": 2}
        for other, words in (
            ({"ranks": 2}, ["ranks", "1 and 2", "--ranks"]),
            ({"model": "gpt", "data": "text", "data_dir": str(self.dir / "text")}, ["text", "images", "own file"]),
            ({"data": "mnist", "data_dir": str(self.dir)}, ["mnist"]),
        ):
            both = self.dir / "both.json"
            both.write_text(json.dumps([one, one | other | {"run": "two"}]))
            self.assert_refused(skim("train", "--config", both), *words)

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_a_run_with_auto_is_repeated_with_its_choices(self):
        summary, again = self.dir / "s.json", self.dir / "again.json"

        def repeated(*changes):
            done = skim("train", "--config", summary, *changes, "--summary", again)
            self.assert_ok(done)
            return json.loads(again.read_text())[0], done.stdout

        self.assert_ok(train("--model", "linear", "--ranks", 2, "--steps", 12, "--exchange", "auto",
                             "--density", 0.05, "--summary", summary))
        [first] = json.loads(summary.read_text())
        self.assertEqual(first["choices"]["ranks"], 2)
        step, bucket, entries, _ = first["choices"]["changes"][0]
        # Choices that no chooser would make.
        given = {"ranks": 2, "changes": [[step, bucket, entries, "gtopk"], [step + 3, bucket, entries, "dense"],
                                         [step + 7, bucket, entries, "oktopk"]]}
        summary.write_text(json.dumps([first | {"choices": given}]))
        second, out = repeated()
        self.assertEqual(second["choices"], given)
        self.assertNotIn("entries):", out)  # the reason of a choice
        third, _ = repeated()
        for result in ("train_loss", "test_loss", "sent_bytes_per_step"):
            self.assertEqual(third[result], second[result], result)
        self.assertNotEqual(second["test_loss"], first["test_loss"])

        for changes in (["--exchange", "auto"], ["--ranks", 1]):
            other, _ = repeated(*changes)
            self.assertNotEqual(other["choices"], given, changes)
        self.assertNotIn("choices", repeated("--exchange", "gtopk")[0])
        self.assert_refused(skim("train", "--config", summary, "--model", "mlp"), "replay", "same model and buckets")
        summary.write_text(json.dumps([first | {"choices": {"ranks": 2, "changes": [[1, 2]]}}]))
        self.assert_refused(skim("train", "--config", summary), "--config", "choices", "--summary writes")

    def test_a_run_with_auto_whose_buckets_are_all_dense_is_repeated(self):
        summary = self.dir / "s.json"
        self.assert_ok(train("--model", "linear", "--steps", 2, "--exchange", "auto", "--dense-below", 100000,
                             "--summary", summary))
        self.assertNotIn("choices", json.loads(summary.read_text())[0])
        self.assert_ok(skim("train", "--config", summary))

    def test_a_resumed_run_has_no_choices_to_repeat(self):
        arguments = ["--model", "linear", "--exchange", "auto", "--checkpoint", self.dir / "c",
                     "--summary", self.dir / "s.json"]
        self.assert_ok(train(*arguments, "--steps", 4))
        self.assertIn("choices", json.loads((self.dir / "s.json").read_text())[0])
        self.assert_ok(train(*arguments, "--steps", 8, "--resume"))
        self.assertNotIn("choices", json.loads((self.dir / "s.json").read_text())[0])

    def test_a_repetition_derives_anew_what_its_run_derived(self):
        summary, again = self.dir / "s.json", self.dir / "again.json"

        def repeated(arguments, changes):
            self.assert_ok(train("--model", "linear", *arguments, "--summary", summary))
            self.assert_ok(skim("train", "--config", summary, *changes, "--summary", again))
            return [json.loads(path.read_text())[0] for path in (summary, again)]

        first, second = repeated(["--steps", 2, "--exchange", "dense"], ["--exchange", "gtopk"])
        self.assertEqual((first["density"], second["density"]), (1, 0.001))
        self.assertIn("density", first["derived"])
        first, second = repeated(["--steps", 2, "--density", "adaptive", "--budget", "1MB"], ["--optimizer", "adam"])
        self.assertEqual((first["memory"], second["memory"]), ("updates", "gradients"))
        self.assertEqual(first["derived"], ["memory", "adaptive_form", "epochs"])
        first, second = repeated(["--epochs", 0.125], ["--epochs", 0.25])
        self.assertEqual(second["steps"], 2 * first["steps"])
        first, second = repeated(["--steps", 2, "--memory", "gradients"], ["--density", 0.5])
        self.assertEqual((second["memory"], second["derived"]), ("gradients", ["epochs"]))
        first, second = repeated(["--steps", 2], ["--epochs", 0.25])
        self.assertEqual((second["epochs"], second["derived"]), (0.25, ["memory", "steps"]))

    def test_epochs_and_steps_exclude_each_other(self):
        config = self.dir / "run.toml"
        config.write_text("steps = 3\n")
        for command in (["train"], ["simulate", "--train", "--link", "1gbit"]):
            for given in (["--steps", 3], ["--config", config]):
                self.assert_refused(skim(*command, "--epochs", 2, *given),
                                    "--epochs and --steps exclude each other")

    def test_bad_data_files(self):
        def mnist(images, labels):
            folder = pathlib.Path(tempfile.mkdtemp(dir=self.dir)) / "mnist"
            folder.mkdir()
            for part in ["train", "t10k"]:
                (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
                (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
            return ["--model", "linear", "--data", "mnist", "--data-dir", folder.parent,
                    "--steps", 1]

        images = struct.pack(">IIII", 0x803, 16, 28, 28) + bytes(range(256)) * 49
        labels = struct.pack(">II", 0x801, 16) + bytes(i % 10 for i in range(16))
        self.assert_ok(train(*mnist(images, labels)))
        self.assert_ok(train(*mnist(gzip.compress(images), gzip.compress(labels))))
        self.assert_refused(train(*mnist(images[:-1], labels)), "train-images-idx3-ubyte")
        self.assert_refused(train(*mnist(b"PK\3\4" + images[4:], labels)), "train-images-idx3-ubyte")
        self.assert_refused(train(*mnist(images, labels[:-1] + b"\x0b")), "11")
        self.assert_refused(train("--data", "mnist", "--data-dir", self.dir / "none"), "none")

    def test_numbers_as_people_write_them(self):
        def plan(*more):
            done = skim("plan", "--compute", "0.2s", *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        self.assertEqual(plan("--link", "1gbit", "--parameters", "25000000", "--density", "0.01"),
                         plan("--link", "1Gbps", "--parameters", "25M", "--density", "1%"))
        self.assertEqual(plan("--link", "1gbit"), plan("--link", "1000Mbit/s"))
        for rate in ("1GBps", "1GBPS", "1gBps", "1GB/s"):
            self.assert_refused(skim("plan", "--compute", "0.2s", "--link", rate), "--link", "rate in bits", rate)
        summary = self.dir / "s.json"
        runs = []
        for more in (["--steps", "20", "--density", "0.01", "--timeout", "60"],
                     ["--steps", "2e1", "--density", "1%", "--timeout", "1min"]):
            self.assert_ok(train("--model", "linear", "--exchange", "gtopk", "--summary", summary, *more))
            [run] = json.loads(summary.read_text())
            runs.append([run[key] for key in ("steps", "density", "train_loss")])
            summary.unlink()
        self.assertEqual(runs[0], runs[1])
        self.assert_refused(train("--steps", "1.5"), "--steps", "whole number", "1.5")
        self.assert_refused(train("--steps", "many"), "--steps", "many")
        self.assert_refused(train("--density", "101%"), "--density", "101%")
        self.assert_refused(train("--timeout", "10q"), "--timeout", "10q")
        self.assert_refused(train("--checkpoint", self.dir / "c", "--checkpoint-time", "10"),
                            "--checkpoint-time: expected a number >= 0 with a unit of time", "10min", "got '10'")

    def test_missing_batches_of_cifar10_are_named(self):
        for name in ("data_batch_2.bin", "data_batch_4.bin", "test_batch.bin"):
            (self.dir / name).write_bytes(bytes(3073) * 16)
        case = ["--model", "linear", "--data", "cifar10", "--data-dir", self.dir, "--steps", 1, "--batch", 8]
        said = ("gtopk: cifar10 has no data_batch_1.bin, data_batch_3.bin, data_batch_5.bin: "
                "training on the 32 images of the other files\n")
        for command in (["train"], ["simulate", "--train", "--link", "1gbit"]):
            done = skim(*command, *case, "--lr", 0.05)
            self.assert_ok(done)
            self.assertEqual(done.stderr, f"skim: {said}")
        for missing in (1, 3, 5):
            (self.dir / f"data_batch_{missing}.bin").write_bytes(bytes(3073) * 16)
        done = train(*case)
        self.assert_ok(done)
        self.assertEqual(done.stderr, "")

    def test_whole_numbers_are_the_ones_that_were_written(self):
        for option in ("--seed", "--dense-below"):
            self.assert_refused(train(option, "-1"), option, "whole number in [0, 18446744073709551615]", "'-1'")
            self.assert_refused(train(option, 1 << 64), option, str(1 << 64))
        for option in ("--steps", "--hidden", "--keep", "--batch"):
            for text in ("99999999999999999999", str((1 << 53) + 1), "1e30", "10000000G"):
                self.assert_refused(train(option, text), option, str(1 << 53), f"'{text}'")
        self.assert_refused(train("--ranks", "2147483648"), "--ranks", "2147483647")
        self.assert_refused(skim("simulate", "--ranks", 2, "--steps", 10**20), "--steps", f"'{10**20}'")
        summary = self.dir / "s.json"
        for option, text, number in (("--seed", str((1 << 64) - 1), (1 << 64) - 1), ("--steps", "010", 10),
                                     ("--steps", "+3", 3)):
            self.assert_ok(train("--model", "linear", "--steps", 2, option, text, "--summary", summary))
            self.assertEqual(json.loads(summary.read_text())[0][option[2:]], number)
        for option in ("--timeout", "--grace", "--checkpoint-time"):
            self.assert_refused(train(option, "1e30h"), option, "at most 1e9 s", "'1e30h'")

    def test_an_empty_path_is_refused(self):
        for option in ("--metrics", "--checkpoint", "--summary", "--report", "--trace", "--tensorboard"):
            for given in ([option, ""], [f"{option}="]):
                done = train("--model", "linear", "--steps", 2, *given)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(option, done.stderr)
        self.assert_refused(skim("plan", "--link", "1gbit", "--compute", "0.2s", "--json", ""), "--json", "''")

    def test_a_folder_for_temporary_files_that_is_none_is_refused(self):
        (self.dir / "file").write_text("")
        for folder in (self.dir / "none", self.dir / "file"):
            environment = dict(os.environ, TMPDIR=str(folder))
            if HAS_MPI:
                done = train("--ranks", 2, "--model", "linear", "--steps", 1, env=environment)
                self.assert_refused(done, f"TMPDIR: '{folder}' is no folder")
            done = skim("bench", "scaling", "--parameters", 1000, "--compute", "1ms", env=environment)
            self.assert_refused(done, f"TMPDIR: '{folder}' is no folder")

    def test_the_file_of_standard_output_is_no_file_for_results(self):
        plan = ["plan", "--link", "1gbit", "--compute", "1ms", "--json"]
        simulate = ["simulate", "--train", "--link", "1gbit", *SMALL, "--model", "linear", "--steps", "1", "--metrics"]
        run = ["train", *SMALL, "--model", "linear", "--steps", "1"]
        out = self.dir / "out"
        commands = [[*plan, out], [*plan, "/dev/stdout"], [*simulate, "/dev/stdout"]]
        commands += [[*run, option, "/dev/stdout"] for option in ("--metrics", "--summary", "--report", "--trace")]
        for command in commands:
            with self.subTest(command=command), open(out, "w+") as file:
                file.write("before\n")
                file.flush()
                done = subprocess.run([TOOL, *map(str, command)], stdout=file, stderr=subprocess.PIPE, text=True,
                                      timeout=LIMIT)
                self.assert_refused(subprocess.CompletedProcess([], done.returncode, "", done.stderr), command[-2],
                                    "is the file of standard output")
                self.assertEqual(out.read_text(), "before\n")
        self.assertEqual([path.name for path in self.dir.iterdir()], ["out"])
        self.assert_ok(skim(*plan, "/dev/stdout"))  # into a pipe

    def test_numbers_that_fit_nothing_are_refused(self):
        for option in ("--lr", "--weight-decay", "--clip-norm"):
            self.assert_refused(train(option, "1e39"), option, "at most 3.4e38", "1e39")
        self.assert_refused(train("--timeout", "1e-9"), "--timeout", "at least 1ms", "'1e-9'")
        self.assert_refused(train("--density", "adaptive", "--budget", "1e308TB"), "--budget", "amount of data",
                            "1e308TB")
        for command in ("select", "wire"):
            self.assert_refused(skim("bench", command, "--n", 1000, "--density", "nan"), "--density", "got nan")
        simulate = ["simulate", "--parameters", 100, "--ranks", 2, "--link", "1gbit", "--exchange", "gtopk"]
        self.assert_refused(skim(*simulate, "--steps", 2**64 - 1), "--steps", "whole number in", str(2**64 - 1))

    def test_a_model_that_does_not_fit_the_memory_is_one_line(self):
        (self.dir / "text").write_text("abcdefgh" * 1000)
        # The machine has room for a matrix of 2^30 bytes, but the process may not take it.
        done = train("--model", "lstm", "--data", "text", "--data-dir", self.dir / "text", "--hidden", 2**13,
                     "--steps", 1, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)))
        self.assert_refused(done, "skim: out of memory: no room for", "bytes", status=1)
        self.assertNotIn("alloc_cpu", done.stderr)

    def test_verify_is_named_where_it_is_missing(self):
        for words in ([], ["foo"], ["foo", self.dir]):
            self.assert_refused(skim("checkpoint", *words), "expected verify")
        self.assertIn("got foo", skim("checkpoint", "foo").stderr)
        self.assert_refused(skim("checkpoint", "verify", self.dir, "--config", self.dir / "none"), "not readable")

    def test_misspelt_options_get_a_suggestion(self):
        self.assert_refused(train("--modle", "mlp-64"), "no option '--modle'; did you mean '--model'?")
        self.assert_refused(train("--xyzzy"), "no option '--xyzzy' (")
        self.assert_refused(train("mlp-64"), "'mlp-64' is no option")
        config = self.dir / "run.toml"
        for text, words in (
            ("steps = 3\nmodle = 'mlp'\n", ["run.toml", "line 2", "no option 'modle'; did you mean 'model'?"]),
            ("[train]\nsteps = 3\n", ["run.toml", "line 1", "[train]", "without sections"]),
            ("steps = 3\nlr =\n", ["run.toml", "line 2", "TOML", "lr ="]),
        ):
            config.write_text(text)
            self.assert_refused(train("--config", config), "--config", *words)


# Of a summary: the keys that are options.
def OPTIONS(run):
    return {key for key in run if not key.endswith(("_ms", "_bytes", "_per_step"))}


@unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
class Runs(Case):
    def repeat(self, *arguments):
        """The run, and the one that its summary describes."""
        found = []
        for number, words in enumerate([arguments, ["--config", self.dir / "0.json"]]):
            folder = self.dir / f"checkpoint-{number}"
            done = skim("train", *words, "--summary", self.dir / f"{number}.json", "--metrics",
                        self.dir / f"{number}.jsonl", "--checkpoint", folder)
            self.assert_ok(done)
            summary = json.loads((self.dir / f"{number}.json").read_text())
            timeless = [{k: v for k, v in run.items() if k in OPTIONS(run) - {"metrics", "checkpoint"}}
                        for run in summary]
            steps = [{k: v for k, v in line.items() if not k.endswith("_ms")}
                     for line in training_lines(self.dir / f"{number}.jsonl")]
            models = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
                      if path.suffix in (".residual", ".pt") and path.name != "optimizer.pt"}
            found.append((timeless, steps, models))
        self.assertEqual(found[0][0], found[1][0])
        self.assertEqual(found[0][1], found[1][1])
        self.assertTrue(found[0][2] and found[0][2] == found[1][2], "the models differ")
        return found[0][0]

    def test_a_summary_repeats_its_run(self):
        (run,) = self.repeat(
            *SMALL, "--ranks", 3, "--model", "mlp-64", "--steps", 7, "--exchange", "param-server",
            "--server", "sharded", "--down-density", 0.3, "--density", "capture=0.4", "--density-max", 0.6,
            "--select", "randomk", "--select-seeds", "own", "--per-parameter", "--value-code", "q4",
            "--rounding", "stochastic", "--index-code", "rice", "--momentum-correction", 0.7,
            "--nesterov-correction", "--no-factor-masking", "--local-clip", 0.9, "--residual-decay", 0.9,
            "--lr", 0.07, "--lr-schedule", "cosine", "--lr-warmup", 0.05, "--split", "shards",
            "--shards-per-rank", 3, "--bucket-mb", 0.05, "--dense-below", 100, "--seed", 9, "--clip-norm", 0.8,
            "--weight-decay", 0.001, "--no-bias-decay", "--threads", 1)
        self.assertEqual([run[key] for key in ["density", "factor_masking", "bias_decay", "local_clip", "index_code",
                                               "server", "per_parameter", "lr_warmup"]],
                         ["capture=0.4", False, False, 0.9, "rice", "sharded", True, 0.05])

    def test_a_summary_repeats_a_comparison(self):
        runs = self.repeat(*SMALL, "--ranks", 2, "--model", "mlp-64", "--steps", 5, "--compare",
                           "dense,gtopk-tree:adaptive,oktopk:0.01:mstopk", "--budget", "100kB", "--threads", 1)
        self.assertEqual([(r["run"], r["density"], r["select"], r["memory"]) for r in runs],
                         [("dense", 1, "exact", "gradients"), ("gtopk-tree:adaptive", "adaptive", "exact", "updates"),
                          ("oktopk:0.01:mstopk", 0.01, "mstopk", "gradients")])

    def test_a_name_in_a_summary_leads_to_no_folder_outside(self):
        case = [*SMALL, "--model", "linear", "--steps", 2]
        summary, inside = self.dir / "s.json", self.dir / "inside"
        self.assert_ok(skim("train", *case, "--compare", "dense,gtopk:accordion=0.1/0.2", "--summary", summary))
        runs = json.loads(summary.read_text())
        outputs = ["--checkpoint", inside / "c", "--tensorboard", inside / "t"]
        for name in (f"{self.dir}/x", "../x", "..", "a/../../x", "", ".", "a/", "a//b", "./a", "/", "a\nb", "a\0b",
                     "\33[2J"):
            with self.subTest(name=name):
                summary.write_text(json.dumps([runs[0], runs[1] | {"run": name}]))
                done = skim("train", "--config", summary, *outputs)
                self.assert_refused(done, "--config: a run cannot be named", json.dumps(name), "change the 'run'")
                self.assertEqual(set(self.dir.iterdir()), {summary})
        summary.write_text(json.dumps(runs))
        self.assert_ok(skim("train", "--config", summary, *outputs))
        self.assertTrue(newest_in(inside / "c" / "gtopk:accordion=0.1" / "0.2").exists())

    def test_compare_counts_bytes_and_learns(self):
        summary, metrics = self.dir / "s.json", self.dir / "m.jsonl"
        done = train("--ranks", 4, "--model", "mlp-64", "--steps", 30, "--dense-below", 0,
                     "--bucket-mb", 0, "--compare", "dense,allgather:0.01,gtopk:0.01",
                     "--index-code", "raw32", "--summary", summary, "--metrics", metrics)
        self.assert_ok(done)
        runs = {r["run"]: r for r in json.loads(summary.read_text())}
        self.assertEqual(list(runs), ["dense", "allgather:0.01", "gtopk:0.01"])
        n, k = 50890, 508
        for run in runs.values():
            self.assertEqual((run["ranks"], run["steps"], run["parameters"]), (4, 30, n))
            self.assertEqual(run["dense_bytes_per_step"], round(2 * 3 / 4 * 4 * n))
            self.assertGreater(run["test_accuracy"], 0.2)
            self.assertLess(run["train_loss"], 2.4)
        # Exactly the formulas of docs/algorithms.md.
        self.assertEqual(runs["dense"]["sent_bytes_per_step"], 2 * 3 / 4 * 4 * n + 3 * 48)
        frame = 24 + 48 + 8 * k
        # In two rounds: a frame, then two in one message, in front of each but the last its length.
        self.assertEqual(runs["allgather:0.01"]["sent_bytes_per_step"], 3 * frame + 8)
        # Two swaps of every rank; k entries in each frame.
        self.assertEqual(runs["gtopk:0.01"]["sent_bytes_per_step"], 2 * frame)
        self.assertEqual(runs["gtopk:0.01"]["max_sent_bytes_per_step"], 2 * frame)
        steps = [line for line in lines(metrics) if "sent_bytes" in line]
        self.assertEqual(len(steps), 90)
        self.assertEqual([s["step"] for s in steps[:30]], list(range(1, 31)))
        # The sentences at the end: times against dense's, here and on slower links.
        def least_ms(run, rate):
            return run["compute_ms"] + run["select_ms"] + run["apply_ms"] + 8e3 * run["sent_bytes_per_step"] / rate

        dense = runs.pop("dense")
        for name, run in runs.items():
            said = re.search(rf"^{name}: (\S+) here, (\S+) at 1 Gbit/s, (\S+) at 100 Mbit/s$", done.stdout, re.M)
            ratios = [run["step_ms"] / dense["step_ms"], *(least_ms(run, r) / least_ms(dense, r) for r in (1e9, 1e8))]
            for text, ratio in zip(said.groups(), ratios):
                self.assertAlmostEqual(float(text), ratio, delta=0.00501)
        fastest = min([dense, *runs.values()], key=lambda run: run["step_ms"])["run"]
        self.assertIn(f"\n{fastest} was the fastest here. Each accuracy is of one seed", done.stdout)

    def test_every_selector(self):
        help_text = " ".join(skim("train", "--help").stdout.split())
        names = re.search(r"how entries are chosen: ([a-z0-9, -]+) \[exact\]", help_text).group(1)
        names = names.split(", ")
        self.assertGreaterEqual(len(names), 12)
        summary = self.dir / "s.json"
        runs = ["dense", *(f"allgather:0.05:{name}" for name in names), "allgather:0.05"]
        done = train("--ranks", 2, "--model", "mlp-64", "--steps", 12, "--bucket-mb", 0,
                     "--select-threshold", 0.01, "--select-block", 500, "--select-stages", 2,
                     "--compare", ",".join(runs), "--summary", summary)
        self.assert_ok(done)
        results = json.loads(summary.read_text())
        self.assertEqual([r["run"] for r in results], runs)
        self.assertEqual([r["select"] for r in results], ["exact", *names, "exact"])
        for run in results[1:]:
            self.assertIn(run["run"], done.stdout)
            self.assertLess(run["train_loss"], 2.4, run["run"])
            self.assertGreater(run["sent_bytes_per_step"], 8 * 64)
            self.assertLess(run["sent_bytes_per_step"], results[0]["sent_bytes_per_step"])
        by_name = dict(zip(names, results[1:]))
        self.assertEqual(by_name["exact"]["train_loss"], results[-1]["train_loss"])
        self.assertNotEqual(by_name["randomk"]["train_loss"], results[-1]["train_loss"])

    def test_seeds_of_random_selection(self):
        n, k = 50890, 508
        received = {}
        for seeds in ["same", "own"]:
            metrics = self.dir / seeds
            self.assert_ok(train("--ranks", 3, "--model", "mlp-64", "--steps", 3, "--bucket-mb", 0,
                                 "--exchange", "allgather", "--density", 0.01, "--select",
                                 "randomk", "--select-seeds", seeds, "--metrics", metrics))
            steps = [line for line in lines(metrics) if "k" in line]
            self.assertEqual([s["k"] for s in steps], [k] * 3)
            received[seeds] = [s["sum_entries"] for s in steps]
        for same, own in zip(received["same"], received["own"]):
            self.assertLessEqual(same, k)
            self.assertGreater(own, 1.5 * same)

    def test_local_options_change_the_run_as_they_should(self):
        def losses(*arguments):
            metrics = self.dir / "m.jsonl"
            self.assert_ok(train("--ranks", 2, "--model", "mlp-64", "--steps", 6, "--bucket-mb", 0,
                                 "--metrics", metrics, *arguments))
            return [line["loss"] for line in lines(metrics) if "k" in line]

        sparse = ["--exchange", "allgather", "--density", 0.05]
        plain = losses(*sparse)
        dense = losses("--exchange", "dense")
        momentum = ["--momentum-correction", 0.9]
        runs = [plain, dense]
        for arguments in [momentum, [*momentum, "--nesterov-correction"],
                          [*momentum, "--no-factor-masking"], ["--local-clip", 0.5],
                          ["--residual-decay", 0.5], ["--residual-code", "bf16"],
                          ["--residual-code", "q8"], ["--per-parameter"], ["--value-code", "q4"],
                          ["--value-code", "q4", "--rounding", "stochastic"]]:
            changed = losses(*sparse, *arguments)
            self.assertEqual(changed[0], plain[0])
            self.assertNotIn(changed, runs)
            runs.append(changed)
        self.assertEqual(losses(*sparse, "--local-clip", 1e6, "--residual-decay", 1), plain)
        # Where everything is delivered it is the optimizer's momentum, but for rounding.
        ours = losses("--exchange", "dense", *momentum)
        theirs = losses("--exchange", "dense", "--momentum", 0.9)
        self.assertNotEqual(ours, dense)
        for a, b in zip(ours, theirs):
            self.assertAlmostEqual(a, b, places=4)
        # Weight decay is part of the momentum, too. Here it takes all but e^-3 of the weights.
        decay = ["--exchange", "dense", "--steps", 300, "--lr", 0.01, "--weight-decay", 0.1]
        ours, theirs = losses(*decay, *momentum), losses(*decay, "--momentum", 0.9)
        self.assertAlmostEqual(sum(ours[-20:]), sum(theirs[-20:]), delta=0.02 * sum(theirs[-20:]))

    def test_servers(self):
        def losses(ranks, *arguments):
            metrics = self.dir / "m.jsonl"
            self.assert_ok(train("--ranks", ranks, "--model", "mlp-64", "--steps", 6, "--bucket-mb", 0,
                                 "--exchange", "param-server", "--density", 0.05, "--lr", 0.125,
                                 "--metrics", metrics, *arguments))
            # Rank 0 reports; a dedicated server looks at the batch of the first other rank.
            return [line["loss"] for line in lines(metrics) if "k" in line]

        plain = losses(3)
        self.assertEqual(losses(3, "--server", "sharded"), plain)
        self.assertEqual(losses(4, "--server", "dedicated"), plain)
        self.assertEqual(losses(3, "--down-density", 0.05), plain)
        # A rate that is a power of two and stays is nothing but a scale.
        self.assertEqual(losses(3, "--memory", "updates"), plain)
        others = [plain]
        for arguments in [["--down-density", 0.01], ["--down-density", 1],
                          ["--density", 1, "--down-density", 0.05]]:
            others.append(losses(3, *arguments))
            self.assertEqual(others[-1][0], plain[0])
            self.assertNotIn(others[-1], others[:-1])
        # One way, what comes back is the union of what was sent.
        self.assert_ok(train("--ranks", 3, "--model", "mlp-64", "--steps", 6, "--bucket-mb", 0,
                             "--exchange", "param-server", "--density", 0.05, "--down-density", 1,
                             "--metrics", self.dir / "m.jsonl", "--summary", self.dir / "s.json"))
        run = json.loads((self.dir / "s.json").read_text())[0]
        received = [line["sum_entries"] for line in lines(self.dir / "m.jsonl") if "k" in line]
        self.assertAlmostEqual(run["union_entries_per_step"], sum(received) / 6, places=6)
        self.assertEqual((run["server"], run["down_density"]), ("rank0", 1))
        falling = ["--lr-schedule", "steps", "--lr-drops", 0.1, "--lr-gamma", 0.1]
        self.assertNotEqual(losses(3, *falling), losses(3, *falling, "--memory", "updates"))

    def test_auto_says_what_it_takes_and_why(self):
        fit = self.dir / "fit.json"
        metrics = self.dir / "m.jsonl"

        def decisions(beta, *arguments):
            fit.write_text(json.dumps({"alpha_s": 1e-6, "beta_s_per_byte": beta, "select_s": 1e-9,
                                       "merge_s": 1e-9, "add_s": 1e-12}))
            done = train("--ranks", 3, "--exchange", "auto", "--fit", fit, "--steps", 5, "--bucket-mb", 0.1,
                         "--metrics", metrics, *arguments)
            self.assert_ok(done)
            found = [line for line in lines(metrics) if "decision" in line]
            self.assertEqual({d["step"] for d in found}, {1})
            self.assertGreater(len(found), 0)
            for d in found:
                self.assertIn(d["decision"], done.stdout)
                self.assertIn(f"bucket {d['bucket']} ({d['n']} entries)", done.stdout)
            return {d["decision"].split()[0] for d in found}

        self.assertEqual(decisions(1e-15), {"dense"})
        self.assertNotIn("dense", decisions(1e-6))
        self.assertEqual(decisions(1e-15, "--among", "gtopk,oktopk"), {"gtopk"})
        # Without a fit it measures; on this machine anything may be best, but all ranks agree.
        self.assert_ok(train("--ranks", 3, "--exchange", "auto", "--steps", 40))

    def test_dash_is_standard_output_and_people_read_standard_error(self):
        done = train("--ranks", 2, "--model", "linear", "--steps", 3, "--summary", "-")
        self.assert_ok(done)
        self.assertEqual(json.loads(done.stdout)[0]["steps"], 3)
        self.assertIn("gtopk", done.stderr)
        done = train("--ranks", 2, "--model", "linear", "--steps", 3, "--metrics", "-")
        self.assert_ok(done)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([r["step"] for r in records if "k" in r], [1, 2, 3])

    def test_same_seed_same_run_and_density_1_is_dense(self):
        def losses(*arguments):
            metrics = self.dir / "m.jsonl"
            self.assert_ok(train("--ranks", 2, "--model", "lenet5", "--steps", 5,
                                 "--metrics", metrics, *arguments))
            return [line["loss"] for line in lines(metrics) if "loss" in line]

        dense = losses("--exchange", "dense")
        self.assertEqual(dense, losses("--exchange", "dense"))
        self.assertEqual(dense, losses("--exchange", "gtopk", "--density", 1))
        self.assertEqual(dense, losses("--exchange", "dense", "--bucket-mb", 0.01))
        self.assertNotEqual(dense, losses("--exchange", "dense", "--seed", 2))
        self.assertNotEqual(dense, losses("--exchange", "gtopk", "--density", 0.001))

    def test_the_vendors_sum_agrees_with_the_ring(self):
        for how in ["ring", "vendor"]:
            self.assert_ok(train("--ranks", 3, "--model", "linear", "--steps", 4, "--exchange",
                                 "dense", "--dense-sum", how, "--summary", self.dir / how))
        ring, mpi = (json.loads((self.dir / how).read_text())[0] for how in ["ring", "vendor"])
        self.assertAlmostEqual(ring["train_loss"], mpi["train_loss"], places=5)

    def test_under_mpirun(self):
        def run(command):
            return subprocess.run([os.environ["SKIM_MPIRUN"], "-n", "2", *command], capture_output=True, text=True,
                                  timeout=LIMIT, env=dict(os.environ, **FOR_MPIRUN))

        def run_both(first, second):
            """Two commands. Not as mpirun's own `FIRST : SECOND`, which crashes mpirun 5.0.7."""
            words = [shlex.join(map(str, command)) for command in (first, second)]
            which = 'if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 0 ]'
            return run(["sh", "-c", f"{which}; then exec {words[0]}; else exec {words[1]}; fi"])

        rank = [TOOL, "train", *SMALL, "--model", "linear", "--steps", "2"]
        done = run([*rank, "--summary", str(self.dir / "s")])
        self.assert_ok(done)
        self.assertEqual(json.loads((self.dir / "s").read_text())[0]["ranks"], 2)
        # Ranks that were told different things say so.
        done = run_both([*rank, "--momentum", "0.5"], rank)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("momentum is 0.0 there and 0.5 on rank 0", done.stderr)
        for letters, word in [("ab" * 500, "hash is"), ("ab" * 600, "examples is")]:
            for name, content in [("one", "ba" * 500), ("two", letters)]:
                (self.dir / name).write_text(content)
            text = [*rank, "--model", "lstm", "--data", "text", "--sequence-length", 8, "--data-dir"]
            done = run_both([*text, self.dir / "one"], [*text, self.dir / "two"])
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"rank 1 runs with another data set: {word}", done.stderr)
        other = self.dir / "skim"  # the same program, but for its version
        program = pathlib.Path(TOOL).read_bytes()
        version = os.environ["SKIM_VERSION"].encode()
        changed = program.replace(version, version[:-1] + b"9")
        self.assertNotEqual(changed, program)
        other.write_bytes(changed)
        other.chmod(0o755)
        (self.dir / "libskim_torch.so").symlink_to(pathlib.Path(TOOL).parent / "libskim_torch.so")
        done = run_both(rank, [other, *rank[1:]])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank 1 runs with another version or command line: version is", done.stderr)
        done = run([*rank, "--ranks", "3"])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--ranks 3", done.stderr)


@unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
class Checkpoints(Case):
    # Momentum, dropout, batch norm, warm-up, several buckets: all state that a run can have.
    RUN = ["--ranks", 2, "--model", "cnn-bn", "--steps", 24, "--momentum", 0.9, "--density", 0.01,
           "--density-warmup", "0.25", "--bucket-mb", 0.05, "--eval-epochs", 0.25]

    def checkpoint_of(self, folder):
        return {f.name: f.read_bytes() for f in newest_in(folder).iterdir()}

    def state_and_model(self, folder):
        return {name: content for name, content in self.checkpoint_of(folder).items()
                if name not in ("optimizer.pt", "manifest.json")}  # torch writes it in the order of addresses

    def state(self, folder):
        files = {k: v for k, v in self.checkpoint_of(folder).items() if k.endswith(".residual")}
        self.assertEqual(len(files), 2)
        return files

    def straight(self, *arguments):
        metrics = self.dir / "straight.jsonl"
        self.assert_ok(train(*self.RUN, "--metrics", metrics, "--checkpoint", self.dir / "straight",
                             *arguments))
        return self.timeless(metrics), self.state(self.dir / "straight")

    def timeless(self, metrics):
        return [{k: v for k, v in line.items() if not k.endswith("_ms")} for line in training_lines(metrics)]

    # The checkpoint after step 7 is in the middle of a round.
    LOCAL = ["--optimizer", "adamw", "--lr", 0.001, "--momentum", 0, "--local-steps", 4, "--outer-momentum", 0.5]

    def test_killed_and_resumed_is_bit_identical(self):
        self.kill_and_resume()

    def test_killed_in_a_round_of_local_steps_and_resumed_is_bit_identical(self):
        self.kill_and_resume(*self.LOCAL)

    def kill_and_resume(self, *options):
        expected, residuals = self.straight(*options)
        metrics, folder = self.dir / "m.jsonl", self.dir / "killed"
        arguments = [*self.RUN, *options, "--metrics", metrics, "--checkpoint", folder,
                     "--checkpoint-steps", 7]
        run = self.start(*arguments)
        self.wait_for_step(run, metrics, 9)
        self.wait_for_checkpoint(run, folder)
        for pid in [run.pid, *pids_of(self.dir).values()]:
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=LIMIT)
        self.assert_ok(train(*arguments, "--resume"))
        self.assertEqual(self.timeless(metrics), expected)
        self.assertTrue(self.state(folder) == residuals, "the residuals differ")

    def test_terminated_writes_a_checkpoint_and_resumes_bit_identically(self):
        # Evaluation after every step too: the run then stops where one is due.
        for evaluate in [0.25, 1 / 32]:
            with self.subTest(evaluate=evaluate):
                expected, residuals = self.straight("--eval-epochs", evaluate)
                metrics, folder = self.dir / f"m{evaluate}.jsonl", self.dir / f"stopped{evaluate}"
                arguments = [*self.RUN, "--metrics", metrics, "--checkpoint", folder,
                             "--eval-epochs", evaluate]
                run = self.start(*arguments)
                self.wait_for_step(run, metrics, 3)
                run.send_signal(signal.SIGTERM)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)
                self.assertIn("--resume continues", err)
                self.assert_ok(train(*arguments, "--resume"))
                self.assertEqual(self.timeless(metrics), expected)
                self.assertTrue(self.state(folder) == residuals, "the residuals differ")

    def test_all_state_resumes_bit_identically(self):
        local = ["--momentum", 0, "--momentum-correction", 0.8, "--nesterov-correction", "--local-clip", 1,
                 "--residual-decay", 0.9, "--per-parameter", "--select", "gaussian",
                 "--value-code", "q2", "--rounding", "stochastic"]
        server = ["--exchange", "param-server", "--server", "sharded", "--memory", "updates",
                  "--down-density", 0.004]
        for name, arguments in {"local": local, "server": server}.items():
            with self.subTest(name):
                expected, residuals = self.straight(*arguments)
                metrics, folder = self.dir / f"{name}.jsonl", self.dir / name
                arguments += ["--metrics", metrics, "--checkpoint", folder]
                self.assert_ok(train(*self.RUN, *arguments, "--steps", 11))
                self.assert_ok(train(*self.RUN, *arguments, "--resume"))

                def steps(all_lines):
                    return [line for line in all_lines if "k" in line]

                self.assertEqual(len(steps(expected)), 24)
                self.assertEqual(steps(self.timeless(metrics)), steps(expected))
                self.assertTrue(self.state(folder) == residuals, "the residuals differ")

    def test_a_damaged_checkpoint_is_not_believed(self):
        expected, residuals = self.straight()
        metrics, folder = self.dir / "m.jsonl", self.dir / "damaged"
        arguments = [*self.RUN, "--metrics", metrics, "--checkpoint", folder, "--checkpoint-steps", 7]
        self.assert_ok(train(*arguments, "--steps", 16))
        done = skim("checkpoint", "verify", folder)
        self.assert_ok(done)
        self.assertEqual(done.stdout, "step-00000016  good\nstep-00000014  good\n")
        flip_a_bit(folder / "step-00000016/model.pt")
        done = skim("checkpoint", "verify", folder)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"^step-00000016  model.pt is damaged.*\nstep-00000014  good\n$")
        done = train(*arguments, "--resume")
        self.assert_ok(done)
        self.assertRegex(done.stderr, "step-00000016: model.pt is damaged.*; taking step-00000014\n$")
        self.assertIn("resumed after step 14", done.stdout)
        self.assertEqual(self.timeless(metrics), expected)
        self.assertTrue(self.state(folder) == residuals, "the residuals differ")
        self.assert_refused(skim("checkpoint", "verify", self.dir / "none"), "no folder", "none")
        self.assert_refused(skim("checkpoint", "verify", self.dir), "no checkpoint in")
        self.assert_refused(skim("checkpoint", "verify", "c" * 300), "no folder", "ccc")
        self.assert_refused(skim("checkpoint"), "expected verify")

    def test_a_kill_leaves_only_whole_checkpoints(self):
        """Whenever it comes: while one is written, or an older one is removed."""
        for kill in range(8):
            folder, metrics = self.dir / f"c{kill}", self.dir / f"m{kill}"
            run = self.start("--model", "mlp-64", "--steps", 1000000, "--eval-epochs", 0, "--metrics", metrics,
                             "--checkpoint", folder, "--checkpoint-steps", 1)
            self.wait_for_step(run, metrics, 5 + kill)
            run.kill()
            run.communicate()
            self.assert_ok(skim("checkpoint", "verify", folder))

    def test_another_number_of_ranks_goes_on(self):
        for options in ([], self.LOCAL):
            with self.subTest(options=options):
                self.straight(*options)
                done = train(*self.RUN, *options, "--ranks", 3, "--steps", 30, "--checkpoint",
                             self.dir / "straight", "--resume", "--summary", self.dir / "s")
                self.assert_ok(done)
                run = json.loads((self.dir / "s").read_text())[0]
                # 24 steps of 2 x 8 examples are 16 of 3 x 8.
                self.assertIn("resumed after step 16", done.stdout)
                self.assertEqual((run["ranks"], run["steps"]), (3, 30))

    def test_a_run_with_nothing_left_to_train_says_so(self):
        case = ["--model", "linear", "--checkpoint", self.dir / "c"]
        self.assert_ok(train(*case, "--ranks", 3, "--steps", 30))
        done = train(*case, "--ranks", 2, "--steps", 40, "--resume")
        self.assert_ok(done)
        self.assertIn("step 30 of 3 ranks is step 45 of 2 ranks; the run has 40 steps: nothing to train; give more "
                      "--steps or --epochs", done.stderr)
        done = train(*case, "--ranks", 3, "--steps", 20, "--resume")
        self.assertIn("step 30 of 3 ranks; the run has 20 steps: nothing to train", done.stderr)
        self.assertNotIn("nothing to train", train(*case, "--ranks", 2, "--steps", 50, "--resume").stderr)

    def test_losses_of_another_number_of_ranks_count(self):
        # For one rank, 12 steps of two ranks are 24 steps, and they were evaluated.
        folder, summary = self.dir / "half", self.dir / "s"
        run = [*self.RUN, "--eval-epochs", 0, "--checkpoint", folder, "--summary", summary]
        self.assert_ok(train(*run, "--steps", 12))
        meta = newest_in(folder) / "meta.json"
        losses = json.loads(summary.read_text())[0]
        self.assert_ok(train(*run, "--ranks", 1, "--steps", 24, "--resume"))
        again = json.loads(summary.read_text())[0]
        self.assertEqual([again[key] for key in ("steps", "train_loss", "test_loss")],
                         [24, losses["train_loss"], losses["test_loss"]], "it is evaluated already")

        changed = json.loads(meta.read_text())
        changed.pop("skipped")
        meta.write_text(json.dumps(changed))
        self.assert_refused(train(*run, "--ranks", 1, "--resume"), "meta.json is damaged", status=1)
        reseal(meta)
        self.assert_refused(train(*run, "--ranks", 1, "--resume"), "meta.json", "skipped", status=1)

    def test_losses_before_an_evaluation_on_another_number_of_ranks_count(self):
        folder, metrics, summary = self.dir / "half", self.dir / "m", self.dir / "s"
        arguments = [*self.RUN, "--eval-epochs", 0, "--checkpoint", folder, "--summary", summary]
        run = self.start(*arguments, "--metrics", metrics)
        self.wait_for_step(run, metrics, 3)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=LIMIT)
        steps = len(training_lines(metrics))
        self.assert_ok(train(*arguments, "--ranks", 1, "--steps", 2 * steps, "--resume"))
        resumed = json.loads(summary.read_text())[0]
        self.assert_ok(train(*self.RUN, "--eval-epochs", 0, "--steps", steps, "--summary", summary))
        straight = json.loads(summary.read_text())[0]
        self.assertEqual(resumed["steps"], 2 * steps, "nothing was left to train")
        self.assertAlmostEqual(resumed["train_loss"], straight["train_loss"], places=9)

    def test_what_does_not_fit_is_refused(self):
        self.straight()
        folder = self.dir / "straight"
        again = [*self.RUN, "--checkpoint", folder, "--resume"]
        # On one rank: mpirun takes seconds to end after a failure.
        one = [*again, "--ranks", 1]
        self.assert_refused(train(*one, "--momentum", 0.5), "momentum", "0.9", "0.5", "or another --checkpoint")
        self.assert_refused(train(*one, "--local-clip", 3), "local_clip", "0.0", "3.0")
        self.assert_refused(train(*one, "--select", "randomk"), "exact", "randomk")
        self.assert_refused(train(*one, "--checkpoint", self.dir / "none"), "--resume: no checkpoint in",
                            "leave out --resume")
        flip_a_bit(newest_in(folder) / "rank-1.residual")
        self.assert_refused(train(*again), "no good checkpoint", "rank-1.residual is damaged", status=1)

    def test_a_full_disk_keeps_the_checkpoint_before(self):
        folder = self.dir / "small"
        arguments = ["--model", "mlp", "--checkpoint", folder]  # a checkpoint of 1.6 MB

        def small_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))

        self.assert_ok(train(*arguments, "--steps", 2))
        before = self.checkpoint_of(folder)
        done = train(*arguments, "--steps", 4, "--resume", preexec_fn=small_disk,
                     restore_signals=False)
        self.assert_refused(done, "checkpoint", "model.pt", "File too large", status=1)
        self.assertIn("train loss", done.stdout, "the table is lost")
        self.assertTrue(self.checkpoint_of(folder) == before, "the checkpoint before has changed")
        self.assertEqual(sorted(f.name for f in folder.iterdir()), ["step-00000002"])
        self.assert_ok(train(*arguments, "--steps", 4, "--resume"))

    def test_a_resume_that_cannot_rewrite_the_metrics_loses_none(self):
        def small_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        metrics = self.dir / "m.jsonl"
        arguments = ["--model", "linear", "--metrics", metrics, "--checkpoint", self.dir / "c"]
        self.assert_ok(train(*arguments, "--steps", 8))
        before = metrics.read_text()
        done = train(*arguments, "--steps", 9, "--resume", preexec_fn=small_disk, restore_signals=False)
        self.assert_refused(done, "--metrics: cannot write", "m.jsonl", "File too large", status=1)
        self.assertEqual(metrics.read_text(), before)
        self.assertEqual(sorted(path.name for path in self.dir.iterdir()), ["c", "m.jsonl"])
        self.assert_ok(train(*arguments, "--steps", 9, "--resume"))
        self.assertTrue(metrics.read_text().startswith(before))

    def test_a_resume_keeps_lines_of_the_metrics_that_are_not_its_own(self):
        metrics = self.dir / "m.jsonl"
        arguments = ["--model", "linear", "--metrics", metrics, "--checkpoint", self.dir / "c"]
        self.assert_ok(train(*arguments, "--steps", 3))
        others = '3\n"step"\n[1]\nno JSON\n\n{"run": 3, "step": 9}\n{"run": "gtopk", "step": "many"}\n'
        before = others + metrics.read_text()
        metrics.write_text(before + '{"run": "gtopk", "st')  # a line that was being written
        self.assert_ok(train(*arguments, "--steps", 4, "--resume"))
        self.assertTrue(metrics.read_text().startswith(before))

    def test_an_evaluation_that_comes_again_is_recorded_once(self):
        """The run was stopped before it, continued, and was killed before the next checkpoint."""
        metrics, folder = self.dir / "m.jsonl", self.dir / "c"
        arguments = ["--model", "linear", "--eval-epochs", 1 / 16, "--metrics", metrics, "--checkpoint", folder]
        self.assert_ok(train(*arguments, "--steps", 8))
        path = newest_in(folder) / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluated_step": 4}))
        reseal(path)
        self.assert_ok(train(*arguments, "--steps", 12, "--resume"))
        self.assertEqual([line["step"] for line in lines(metrics) if "evaluation" in line], [4, 8, 12])
        self.assertEqual([line["step"] for line in lines(metrics) if "k" in line], list(range(1, 13)))

    def test_a_resume_on_another_number_of_ranks_leaves_no_line_of_a_lost_step(self):
        """Step 4 of 3 ranks is step 6 of 2 ranks. What comes after the checkpoint goes, however it is counted."""
        metrics, folder = self.dir / "m.jsonl", self.dir / "c"
        arguments = ["--model", "linear", "--metrics", metrics, "--checkpoint", folder, "--checkpoint-steps", 4, "--keep", 3]

        def lose_checkpoints_after(step):
            for path in folder.glob("step-*"):
                if int(path.name[-8:]) > step:
                    shutil.rmtree(path)

        def recorded():
            kinds = {"command": "begins after", "evaluation": "evaluates"}
            return [(next((kinds[key] for key in kinds if key in line), "trains"), line["step"])
                    for line in lines(metrics) if "compared_ms" not in line]

        first = [("begins after", 0), *(("trains", step) for step in range(1, 5))]
        self.assert_ok(train(*arguments, "--ranks", 3, "--steps", 10))
        lose_checkpoints_after(4)
        self.assert_ok(train(*arguments, "--ranks", 2, "--steps", 9, "--resume"))
        again = [("begins after", 6), ("trains", 7), ("trains", 8), ("trains", 9), ("evaluates", 9)]
        self.assertEqual(recorded(), first + again)
        lose_checkpoints_after(4)
        self.assert_ok(train(*arguments, "--ranks", 3, "--steps", 5, "--resume"))
        self.assertEqual(recorded(), first + [("begins after", 4), ("trains", 5), ("evaluates", 5)])

    def test_a_resumed_run_writes_its_metrics_into_a_pipe(self):
        pipe = self.dir / "pipe"
        arguments = ["--model", "linear", "--checkpoint", self.dir / "c"]
        self.assert_ok(train(*arguments, "--steps", 3))
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.assert_ok(train(*arguments, "--steps", 5, "--resume", "--metrics", pipe))
        recorded = map(json.loads, os.read(reader, 1 << 16).decode().splitlines())
        self.assertEqual([line["step"] for line in recorded if "loss" in line], [4, 5])

    def test_a_checkpoint_with_a_loss_that_is_not_finite_is_continued(self):
        arguments = ["--model", "mlp-64", "--lr", "1e20", "--skip-limit", 0, "--checkpoint", self.dir / "c"]
        self.assert_ok(train(*arguments, "--steps", 10))
        meta = json.loads((newest_in(self.dir / "c") / "meta.json").read_text())
        self.assertIsNone(meta["train_loss"])
        done = train(*arguments, "--steps", 12, "--resume")
        self.assert_ok(done)
        self.assertIn("resumed after step 10", done.stdout)

    def test_a_disk_that_is_too_small_is_found_before_the_first_step(self):
        small = self.dir / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            self.skipTest("needs root, to mount a small disk")
        self.addCleanup(subprocess.run, ["umount", small], check=True)
        for ranks in (1, 2) if HAS_MPI else (1,):
            done = train("--ranks", ranks, "--model", "mlp", "--steps", 3, "--checkpoint", small / "run")
            self.assert_refused(done, "checkpoint", "has room for 1.0 MB", "takes at least", status=1)
            self.assertNotIn("train loss", done.stdout)
        # A dense exchange has no residuals, so nothing is kept for each rank.
        ranks = 5 if HAS_MPI else 1
        self.assert_ok(train("--ranks", ranks, "--model", "mlp-64", "--exchange", "dense", "--steps", 3,
                             "--checkpoint", small / "run"))

    def test_a_signal_between_two_runs_stops_all_ranks(self):
        """One rank gets it, while the first run writes its checkpoint: it has no step left to stop after."""
        for ranks in (1, 2) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                metrics, summary = self.dir / f"m{ranks}", self.dir / f"s{ranks}"
                run = self.start("--ranks", ranks, "--model", "vgg16", "--steps", 1, "--batch", 1, "--timeout", 60,
                                 "--compare", "dense,gtopk:0.01", "--checkpoint", self.dir / f"c{ranks}",
                                 "--metrics", metrics, "--summary", summary)
                self.wait_until(run, lambda: metrics.exists() and '"evaluation"' in metrics.read_text(), "no evaluation")
                os.kill(pids_of(self.dir)[0] if ranks > 1 else run.pid, signal.SIGUSR1)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 75, out + err)
                self.assertIn("skim: stopped after", err)
                self.assertEqual(len(json.loads(summary.read_text())), 1)

    def test_a_stopped_comparison_continues(self):
        case = ["--ranks", 2, "--model", "mlp-64", "--eval-epochs", 0.25, "--momentum", 0.9, "--steps", 160]
        runs = ["dense", "allgather:0.05:blocktopk", "gtopk:0.1"]
        compare = [*case, "--compare", ",".join(runs)]
        summary, straight = self.dir / "s.json", self.dir / "straight.jsonl"
        self.assert_ok(train(*compare, "--metrics", straight, "--summary", summary))
        of_run = {run["run"]: run for run in json.loads(summary.read_text())}
        for form, again in (("compare", compare), ("config", ["--config", summary])):
            for signal_, run_to_stop in ((signal.SIGTERM, runs[0]), (signal.SIGKILL, runs[1])):
                name = f"{form}-{run_to_stop}"
                metrics, folder, after = self.dir / f"{name}.jsonl", self.dir / name, self.dir / "after.json"
                arguments = [*again, "--metrics", metrics, "--checkpoint", folder, "--checkpoint-steps", 3]
                run = self.start(*arguments)
                self.wait_for_checkpoint(run, folder / run_to_stop)
                if signal_ == signal.SIGTERM:
                    run.send_signal(signal_)
                    _, err = run.communicate(timeout=LIMIT)
                    self.assertEqual(run.returncode, 128 + signal_, err)
                    self.assertIn("--resume continues", err)
                else:
                    for pid in [run.pid, *pids_of(self.dir).values()]:
                        os.kill(pid, signal_)
                    run.communicate(timeout=LIMIT)
                ended = [r for r in runs if (folder / r / "step-00000160").exists()]
                self.assertLess(len(ended), len(runs))
                done = train(*arguments, "--resume", "--summary", after)
                self.assert_ok(done)
                for found in json.loads(after.read_text()):
                    for key in ("steps", "train_loss", "test_loss", "test_accuracy"):
                        self.assertEqual(found[key], of_run[found["run"]][key], (name, found["run"], key))
                for key in runs:
                    self.assertEqual([line for line in self.timeless(metrics) if line["run"] == key],
                                     [line for line in self.timeless(straight) if line["run"] == key], (name, key))
                # A run that was done before has no bytes and times, and is compared with no other.
                for key in runs:
                    [row] = [line.split() for line in done.stdout.splitlines() if re.match(key + " +[0-9]", line)]
                    self.assertEqual(row.count("-"), 8 if key in ended else 0, row)
                if len(ended) < 2:
                    self.assertIn(f"relative to {runs[len(ended)]}:", done.stdout)

        self.assert_refused(train(*compare, "--checkpoint", self.dir / "none", "--resume"), "no checkpoint", "none/dense")

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_what_cannot_work_is_found_before_any_rank_starts(self):
        nowhere = dict(os.environ, SKIM_MPIRUN="/nowhere/mpirun")  # it would be missed if ranks were started
        for arguments, word in (
            (["--data", "mnist", "--data-dir", "/nowhere"], "no file train-images-idx3-ubyte"),
            (["--metrics", "/nowhere/m.jsonl"], "--metrics: cannot open '/nowhere/m.jsonl'"),
            (["--summary", self.dir], "--summary: cannot open"),
        ):
            done = train("--ranks", 2, "--model", "linear", "--steps", 3, *arguments, env=nowhere)
            self.assert_refused(done, word)
        done = train("--ranks", 2, "--model", "linear", "--steps", 3, env=nowhere)
        self.assertIn("/nowhere/mpirun", done.stderr)

    def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(self):
        blocked = self.dir / "file"
        blocked.write_text("")
        for ranks in 1, 2:
            for folder, word in ((blocked, "Not a directory"), (blocked / "deeper", "Not a directory"),
                                 ("/proc/c", "No such file")):
                done = train("--ranks", ranks, "--model", "linear", "--steps", 2, "--checkpoint", folder)
                self.assert_refused(done, f"--checkpoint: cannot open '{folder}'", word)
                self.assertEqual(done.stdout, "")
        done = train("--model", "linear", "--compare", "dense,gtopk", "--steps", 2, "--checkpoint", blocked)
        self.assert_refused(done, f"--checkpoint: cannot open '{blocked}/dense'")

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_ranks_start_without_a_remote_shell(self):
        done = train("--ranks", 2, "--model", "linear", "--steps", 2, env=dict(os.environ, PATH=str(self.dir)))
        self.assert_ok(done)
        self.assertEqual(done.stderr, "")

    def test_a_folder_to_resume_from_is_not_made(self):
        done = train("--model", "linear", "--steps", 2, "--checkpoint", self.dir / "none", "--resume")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no checkpoint", done.stderr)
        self.assertFalse((self.dir / "none").exists())

    def test_a_reader_that_waits_gets_every_line_of_a_run_that_is_stopped(self):
        for ranks in (1, 2):
            run = self.start("--ranks", ranks, "--model", "linear", "--steps", 1000000, "--metrics", "-",
                             "--checkpoint", self.dir / f"c{ranks}")
            seen = [0] * 10  # bytes in the pipe; when they stay the same, it is full

            def is_full():
                waiting = array.array("i", [0])
                fcntl.ioctl(run.stdout, termios.FIONREAD, waiting)
                seen.append(waiting[0])
                return seen[-1] > 1 << 15 and len(set(seen[-10:])) == 1

            self.wait_until(run, is_full, "the pipe was not filled")
            run.send_signal(signal.SIGINT)
            if ranks > 1:  # the ranks are told before anybody reads
                self.assertEqual(select.select([run.stderr], [], [], LIMIT)[0], [run.stderr], "the signal was not heard")
            out, err = run.communicate(timeout=LIMIT)
            self.assertEqual(run.returncode, 130, err)
            steps = [line["step"] for line in map(json.loads, out.splitlines()) if "sent_bytes" in line]
            self.assertEqual(steps, list(range(1, len(steps) + 1)))
            self.assertEqual(newest_in(self.dir / f"c{ranks}").name, f"step-{len(steps):08}")

    def test_two_runs_do_not_write_into_one_folder(self):
        """The one would remove checkpoints of the other, or rename its folder."""
        folder, metrics = self.dir / "c", self.dir / "m"
        base = ["--model", "linear", "--checkpoint", folder, "--checkpoint-steps", 1]
        for ranks in (1, 2) if HAS_MPI else (1,):
            run = self.start(*base, "--ranks", ranks, "--steps", 1000000, "--metrics", metrics)
            self.wait_for_checkpoint(run, folder)
            refused = train(*base, "--ranks", ranks, "--steps", 2, *(["--resume"] if ranks == 1 else []))
            self.assert_refused(refused, "--checkpoint", str(folder), "another run")
            self.assertEqual([path.name for path in self.dir.iterdir() if path.name.startswith("c.")], [])
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=LIMIT)
            self.assertEqual(run.returncode, 130)
            self.assert_ok(train(*base, "--ranks", ranks, "--resume", "--steps", len(lines(metrics)) + 2))
            shutil.rmtree(folder)
            metrics.unlink()

    def test_a_run_waits_for_one_that_is_ending(self):
        """A killed process keeps its locks until the system has taken back its memory."""
        folder = self.dir / "c"
        folder.mkdir()
        locked = os.open(folder, os.O_RDONLY)
        self.addCleanup(os.close, locked)
        fcntl.flock(locked, fcntl.LOCK_EX)
        run = self.start("--model", "linear", "--steps", 2, "--checkpoint", folder)
        descriptors = pathlib.Path("/proc", str(run.pid), "fd")
        self.wait_until(run, lambda: any(os.path.realpath(fd) == str(folder) for fd in descriptors.iterdir()),
                        "the folder was not opened")
        fcntl.flock(locked, fcntl.LOCK_UN)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 0, out + err)


@unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
class Failures(Case):
    LONG = ["--ranks", 3, "--model", "mlp", "--steps", 100000, "--eval-epochs", 0]

    def test_a_rank_that_is_killed_ends_all_and_is_named(self):
        metrics = self.dir / "m.jsonl"
        run = self.start(*self.LONG, "--metrics", metrics)
        self.wait_for_step(run, metrics, 5)
        ranks = pids_of(self.dir)
        self.assertEqual(sorted(ranks), [0, 1, 2])
        os.kill(ranks[1], signal.SIGKILL)
        out, err = run.communicate(timeout=LIMIT)
        self.assertNotEqual(run.returncode, 0)
        self.assertEqual(len(err.strip().splitlines()), 1, err)
        self.assertIn("rank 1", err)
        self.assertRegex(err, r"died")
        version = subprocess.run([os.environ["SKIM_MPIRUN"], "--version"], capture_output=True, text=True)
        if "(Open MPI) 4." in version.stdout:  # version 5 kills the others before they can say what they were doing
            self.assertRegex(err, r"died.*'[a-z: 0-9]+'")
        self.assertGreaterEqual(len([m for m in lines(metrics) if "k" in m]), 5)
        for pid in ranks.values():
            self.assertFalse(is_running(pid), f"pid {pid} is still there")

    def test_a_rank_that_hangs_is_named(self):
        for exchange, hangs in ("allgather", 0), ("gtopk", 1), ("sparcml", 2), ("dense", 2):
            with self.subTest(exchange=exchange, hangs=hangs):
                metrics = self.dir / f"{exchange}.jsonl"
                run = self.start(*self.LONG, "--exchange", exchange, "--timeout", 10, "--metrics", metrics)
                self.wait_for_step(run, metrics, 3)
                os.kill(pids_of(self.dir)[hangs], signal.SIGSTOP)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 1, out + err)
                self.assertEqual(len(err.strip().splitlines()), 1, err)
                named = f"(no message from|for) rank {hangs}( within| in|\n)|rank {hangs} took no message"
                self.assertRegex(err, named)

    def test_ranks_of_one_machine_listen_to_no_other(self):
        metrics = self.dir / "m.jsonl"
        run = self.start(*self.LONG, "--metrics", metrics)
        self.wait_for_step(run, metrics, 3)
        ranks = pids_of(self.dir)
        self.assertEqual(len(ranks), 3)
        for pid in ranks.values():
            self.assertEqual(open_to_strangers(pid), [])
        listening = socket.create_server(("0.0.0.0", 0))
        self.addCleanup(listening.close)
        self.assertEqual(len(open_to_strangers(os.getpid())), 1, "it cannot see a socket that listens")

    def test_ctrl_c_ends_all_ranks(self):
        metrics = self.dir / "m.jsonl"
        run = self.start(*self.LONG, "--metrics", metrics, "--summary", self.dir / "s.json")
        self.wait_for_step(run, metrics, 5)
        ranks = pids_of(self.dir)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGINT, out + err)
        self.assertIn("stopped after step", err)
        self.assertTrue(lines(metrics))
        (row,) = json.loads((self.dir / "s.json").read_text())  # it was never evaluated
        self.assertEqual([row[x] for x in ("train_loss", "test_loss", "test_accuracy")], [None] * 3)
        self.assertRegex(out, r"(?m)^\S+ +- +- ")
        for pid in ranks.values():
            self.assertFalse(is_running(pid), f"pid {pid} is still there")

    def test_a_full_disk(self):
        for ranks, option in [(2, "--metrics"), (1, "--summary")]:
            done = train("--ranks", ranks, "--model", "linear", "--steps", 3, option, "/dev/full")
            self.assert_refused(done, option, "/dev/full", "No space left", status=1)

    def test_a_disk_that_fills_up_stops_the_run_with_its_state(self):
        def small_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))

        limited = {"preexec_fn": small_disk, "restore_signals": False}
        for ranks, option, path, disk, why in ((1, "--metrics", "m.jsonl", limited, "File too large"),
                                               (1, "--tensorboard", "events", limited, "File too large"),
                                               (2, "--metrics", "/dev/full", {}, "No space left on device")):
            with self.subTest(option=option, path=path):
                folder, summary = self.dir / f"c{ranks}{option}", self.dir / f"s{ranks}{option}"
                case = ["--ranks", ranks, "--model", "linear", "--eval-epochs", 0, "--checkpoint", folder,
                        "--summary", summary]
                done = train(*case, "--steps", 5000, option, self.dir / path, **disk)
                self.assert_refused(done, f"{option}: cannot write", status=1)
                found = re.search(rf": {why}; stopped after step (\d+); checkpoint (\S+); --resume continues$",
                                  done.stderr.strip())
                self.assertTrue(found, done.stderr)
                step = int(found[1])
                self.assertEqual(found[2], f"{folder}/step-{step:08}")
                self.assertEqual(str(newest_in(folder)), found[2])
                [run] = json.loads(summary.read_text())
                self.assertEqual((run["steps_done"], run["stopped"]), (step, True))
                self.assert_ok(train(*case, "--steps", step + 2, option, self.dir / pathlib.Path(path).name, "--resume"))

    def test_a_gradient_that_is_not_finite_does_not_stay_in_the_optimizer(self):
        """With local steps each rank moves by its own gradients, before the group has seen them."""
        for optimizer in (["--momentum", 0.9], ["--optimizer", "adam"]):
            for ranks in (1, 2) if HAS_MPI else (1,):
                # A round of four steps at a rate that overflows, then others. Without a residual, the round is forgotten.
                rate = ["--lr", 1e37, "--lr-schedule", "steps", "--lr-drops", 4 * 8 * ranks / 512, "--lr-gamma", 1e-39]
                done = train("--ranks", ranks, "--model", "mlp-64", "--local-steps", 4, "--steps", 100, "--no-feedback",
                             "--density", 0.5, *rate, *optimizer, "--summary", self.dir / "s.json")
                self.assert_ok(done)
                [run] = json.loads((self.dir / "s.json").read_text())
                (self.dir / "s.json").unlink()
                self.assertEqual(run["skipped_steps"], 1, optimizer)
                self.assertGreater(run["test_accuracy"], 0.3, optimizer)

    def test_a_dead_run_is_no_success(self):
        for ranks in (1, 2) if HAS_MPI else (1,):
            dead = ["--ranks", ranks, "--model", "mlp-64", "--steps", 60, "--lr", "1e20"]
            done = train(*dead, "--metrics", self.dir / f"{ranks}.jsonl")
            self.assert_refused(done, "the last 20 steps were skipped", "NaN", "--lr", "--skip-limit", status=1)
            steps = [line for line in lines(self.dir / f"{ranks}.jsonl") if "skipped" in line]
            self.assertEqual([line["skipped"] for line in steps[-20:]], [True] * 20)
            self.assertLess(len(steps), 60)
            done = train(*dead, "--skip-limit", 0, "--summary", self.dir / f"{ranks}.json")
            self.assert_ok(done)
            [run] = json.loads((self.dir / f"{ranks}.json").read_text())
            self.assertGreater(run["skipped_steps"], 50)
            self.assertIn(f"{run['skipped_steps']} of 60 steps were skipped", done.stdout)

    def test_a_run_that_ends_without_a_finite_loss_is_no_success(self):
        for ranks in (1, 2):
            dead = ["--ranks", ranks, "--model", "mlp-64", "--steps", 10, "--lr", "1e20"]
            done = train(*dead)
            self.assert_refused(done, "the test loss is nan after step 10", "--lr", status=1)
            self.assertIn("loss nan", done.stdout)
            self.assertNotIn("-nan", done.stdout)
            self.assert_ok(train(*dead, "--non-finite", "pass-on"))
        done = train("--model", "mlp-64", "--steps", 10, "--compare", "dense,gtopk", "--lr", "1e20")
        self.assert_refused(done, "dense: the test loss is nan", status=1)
        done = skim("simulate", "--train", "--link", "1gbit", *SMALL, *dead)
        self.assert_refused(done, "the test loss is nan after step 10", status=1)
        for rate in ("inf", "1e400", "nan"):
            self.assert_refused(train("--lr", rate), "--lr", "> 0", rate)

    def test_outputs_are_opened_before_the_first_step(self):
        for option in ("--summary", "--metrics"):
            done = train("--model", "linear", "--steps", 3, option, self.dir / "none/x.json")
            self.assert_refused(done, option, "none/x.json", "No such file")
            self.assertNotIn("step", done.stdout)
        for option in ("--trace", "--report"):
            done = train("--model", "linear", "--steps", 3, option, "x" * 300)
            self.assert_refused(done, f"{option}: cannot open", "File name too long")
        done = train("--model", "linear", "--steps", 3, "--summary", "/dev/full")
        self.assertIn("train loss", done.stdout, "the table comes before the summary")

    def test_what_a_run_would_replace_is_kept_beside_it(self):
        case = ["--model", "linear", "--steps", 3, "--summary", self.dir / "s.json", "--metrics", self.dir / "m.jsonl",
                "--checkpoint", self.dir / "c"]
        kept = {"s.json": lambda path: path.read_text(), "m.jsonl": lambda path: path.read_text(),
                "c": lambda path: (newest_in(path) / "meta.json").read_text()}
        self.assert_ok(train(*case))
        first = {name: read(self.dir / name) for name, read in kept.items()}
        done = train(*case, "--seed", 2, "--steps", 4)
        self.assert_ok(done)
        second = {name: read(self.dir / name) for name, read in kept.items()}
        for name, read in kept.items():
            self.assertEqual(read(self.dir / f"{name}.~1~"), first[name])
            self.assertIn(f"as '{name}.~1~'", done.stderr)
            self.assertNotEqual(second[name], first[name])
        self.assert_ok(train(*case))
        for name, read in kept.items():
            self.assertEqual(read(self.dir / f"{name}.~1~"), first[name])
            self.assertEqual(read(self.dir / f"{name}.~2~"), second[name])
        done = train(*case, "--resume", "--steps", 3)  # goes on in the same files
        self.assert_ok(done)
        self.assertNotIn("--metrics", done.stderr)
        self.assertNotIn("--checkpoint", done.stderr)

    def test_files_of_a_run_may_be_in_its_folder_of_checkpoints(self):
        for ranks in (1, 2) if HAS_MPI else (1,):
            folder = self.dir / f"c{ranks}"
            case = ["--ranks", ranks, "--model", "linear", "--checkpoint", folder, "--metrics", folder / "m.jsonl",
                    "--summary", folder / "s.json", "--report", folder / "r.html", "--trace", folder / "t.json"]
            self.assert_ok(train(*case, "--steps", 3))
            files = sorted(path.name for path in folder.iterdir())
            self.assertEqual(files, ["m.jsonl", "r.html", "s.json", "step-00000003", "t.json"])
            first = (folder / "m.jsonl").read_text()
            self.assert_refused(train(*case[:-1], self.dir / "none/t.json", "--steps", 4), "--trace", "No such file")
            self.assertTrue((folder / "step-00000003").is_dir(), "a run that is refused renames nothing")
            done = train(*case, "--steps", 4)
            self.assert_ok(done)
            self.assertEqual(done.stderr, f"skim: --checkpoint: kept the old '{folder}' as '{folder.name}.~1~'\n")
            self.assertEqual((self.dir / f"{folder.name}.~1~/m.jsonl").read_text(), first)
            self.assertEqual(len([line for line in lines(folder / "m.jsonl") if "sent_bytes" in line]), 4)
            self.assertEqual(len(list(folder.iterdir())), len(files))

    def test_a_folder_may_be_a_link(self):
        (self.dir / "real").mkdir()
        (self.dir / "link").symlink_to(self.dir / "real")
        for _ in range(3):
            self.assert_ok(train("--model", "linear", "--steps", 3, "--checkpoint", self.dir / "link"))
        self.assertTrue((self.dir / "link").is_symlink())
        for name in ("real", "real.~1~", "real.~2~"):
            self.assertEqual(newest_in(self.dir / name).name, "step-00000003")

    def test_a_folder_is_not_renamed_for_a_file(self):
        metrics, folder = self.dir / "m.jsonl", self.dir / "folder"
        self.assert_ok(train("--model", "linear", "--steps", 3, "--metrics", metrics))
        (folder / "below").mkdir(parents=True)
        self.assert_refused(skim("report", metrics, "--out", folder), f"--out: cannot write '{folder}': Is a directory",
                            status=1)
        done = skim("simulate", "--train", "--link", "1gbit", *SMALL, "--model", "linear", "--steps", 3,
                    "--metrics", folder)
        self.assert_refused(done, f"--metrics: cannot open '{folder}': Is a directory")
        self.assertTrue((folder / "below").is_dir())

    def test_one_file_by_two_names(self):
        done = train("--model", "linear", "--steps", 3, "--metrics", self.dir / "x", "--summary", f"{self.dir}/./x")
        self.assert_refused(done, "--summary and --metrics are one file")
        # Neither file exists.
        for one, other in ("y", "./y"), ("./y", self.dir / "y"), ("none/y", "./none/../none/y"):
            done = train("--model", "linear", "--steps", 3, "--metrics", one, "--report", other, cwd=self.dir)
            self.assert_refused(done, "--report and --metrics are one file")
        done = skim("simulate", "--train", "--link", "1gbit", "--metrics", "y", "--json", "./y", cwd=self.dir)
        self.assert_refused(done, "--json and --metrics are one file")

    def test_a_path_may_have_any_bytes(self):
        def at(name):
            return os.fsencode(self.dir) + b"/" + name + b"\xff\xfe"

        for ranks in (1, 2) if HAS_MPI else (1,):
            command = [TOOL, "train", *SMALL, "--model", "linear", "--steps", "3", "--ranks", str(ranks), "--metrics",
                       at(b"m"), "--summary", at(b"s"), "--checkpoint", at(b"c"), "--report", at(b"r"),
                       "--tensorboard", at(b"t"), "--trace", at(b"x")]
            done = subprocess.run(command, capture_output=True, timeout=LIMIT)
            self.assertEqual(done.returncode, 0, done.stderr)
            beginning, *steps = lines(pathlib.Path(os.fsdecode(at(b"m"))))
            self.assertIn("m\ufffd\ufffd", beginning["command"])
            self.assertEqual(len([line for line in steps if "step_ms" in line]), 3)
            [run] = json.loads(pathlib.Path(os.fsdecode(at(b"s"))).read_text())
            self.assertIn("m\ufffd\ufffd", run["metrics"])

    def test_too_few_descriptors(self):
        def limit(hard):
            return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))

        case = ["--ranks", 3, "--model", "linear", "--steps", 3]
        done = train(*case, preexec_fn=limit(32))
        self.assert_refused(done, "--ranks 3", "open files", "allows 32", "ulimit -n")
        self.assert_ok(train(*case, preexec_fn=limit(4096)))  # it raises its own limit

    def test_too_little_memory(self):
        """Whatever the limit, there is one line and no abort."""
        def limit(mb):
            return lambda: resource.setrlimit(resource.RLIMIT_AS, (mb << 20, mb << 20))

        statuses = []
        for mb in range(200, 1300, 100):
            done = train("--model", "linear", "--steps", 3, preexec_fn=limit(mb))
            with self.subTest(mb=mb):
                if done.returncode != 0:
                    self.assert_refused(done, "limit on memory is too low for libtorch", "ulimit -v")
                self.assertEqual(skim("version", preexec_fn=limit(mb)).returncode, 0)
            statuses.append(done.returncode)
        self.assertEqual(statuses, sorted(statuses, reverse=True), "the more memory, the better")
        self.assertEqual((statuses[0], statuses[-1]), (2, 0))
        done = train("--ranks", 2, "--model", "linear", "--steps", 3, preexec_fn=limit(500))
        self.assert_refused(done, "a rank needs at least", "512000", "ulimit -v")

    def test_without_the_library_that_trains(self):
        alone = shutil.copy(TOOL, self.dir)

        def run(*words):
            return subprocess.run([alone, *words], capture_output=True, text=True, timeout=LIMIT)

        self.assert_refused(run("train", "--model", "linear", "--steps", "3"), "cannot load", "libskim_torch.so",
                            "No such file", status=1)
        self.assert_ok(run("plan", "--parameters", "25e6", "--ranks", "32", "--link", "1gbit",
                           "--compute", "0.2s"))

    def test_ranks_that_do_not_start(self):
        idle = self.dir / "mpirun"
        idle.write_text("#!/bin/sh\nexec sleep 1000\n")
        idle.chmod(0o755)
        done = train("--ranks", 2, "--timeout", 0.5, env=dict(os.environ, SKIM_MPIRUN=str(idle)))
        self.assert_refused(done, "only 0 of 2 ranks started within 0.5 s", status=1)

    def test_ranks_that_start_too_late_were_not_stopped_by_a_signal(self):
        """Although it is a signal that the launcher ends them with."""
        late = self.dir / "mpirun"
        late.write_text("""#!/bin/sh
            trap 'for r in 0 1; do echo 143 > "$SKIM_RUN_DIR/rank-$r.stopped"; done; kill $!; exit 0' TERM
            sleep 1000 &
            wait
        """)
        late.chmod(0o755)
        done = train("--ranks", 2, "--timeout", 0.5, env=dict(os.environ, SKIM_MPIRUN=str(late)))
        self.assert_refused(done, "only 0 of 2 ranks started within 0.5 s", status=1)

    def test_a_rank_that_dies_is_named_though_a_signal_came(self):
        metrics, folder = self.dir / "m.jsonl", self.dir / "c"
        run = self.start(*self.LONG, "--metrics", metrics, "--checkpoint", folder, "--checkpoint-steps", 3)
        self.wait_for_checkpoint(run, folder)
        hangs = pids_of(self.dir)[1]
        os.kill(hangs, signal.SIGSTOP)  # so the others cannot end their step
        run.send_signal(signal.SIGTERM)
        self.wait_until(run, lambda: next(self.dir.glob("skim-*/stopping"), None), "the launcher did not stop the run")
        os.kill(hangs, signal.SIGKILL)
        out, err = run.communicate(timeout=LIMIT)
        self.assertNotIn(run.returncode, (0, 128 + signal.SIGTERM), out + err)
        self.assertRegex(err.splitlines()[-1], r"^skim: rank 1 \(pid \d+\) died")

    def test_a_status_of_mpirun_is_not_taken_for_one_of_skim(self):
        mpirun = self.dir / "mpirun"
        for status in (2, 75, 213):
            mpirun.write_text(f"#!/bin/sh\nexit {status}\n")
            mpirun.chmod(0o755)
            done = train("--ranks", 2, env=dict(os.environ, SKIM_MPIRUN=str(mpirun)))
            self.assert_refused(done, "mpirun' ended without an error message", status=1)

    def test_an_explanation_of_mpirun_has_what_it_announces(self):
        mpirun = self.dir / "mpirun"
        dashes = 40 * "-"
        of_pmix = "[here:7] PMIX ERROR: UNREACH in file a.c at line 3"
        for text, said in ((f"{dashes}\nmpirun cannot start this:\n\n  a program\n\nAsk somebody.\n{dashes}",
                            "mpirun cannot start this: a program"),
                           (f"{of_pmix}\n{dashes}\nmpirun cannot start.\n\n  a program\n{dashes}", "mpirun cannot start."),
                           (f"{of_pmix}\n{of_pmix}", of_pmix)):
            mpirun.write_text(f"#!/bin/sh\ncat >&2 <<END\n{text}\nEND\nexit 1\n")
            mpirun.chmod(0o755)
            done = train("--ranks", 2, env=dict(os.environ, SKIM_MPIRUN=str(mpirun)))
            self.assert_refused(done, f"{said}\n", status=1)

    def test_mpirun_that_fails_after_all_ranks_ended_well(self):
        # Open MPI 4 does so at times: open-mpi/ompi#7833, #9389.
        def under(script):
            wrapper = self.dir / "mpirun"
            wrapper.write_text("#!/bin/sh\n" + script)
            wrapper.chmod(0o755)
            return train("--ranks", 2, "--model", "linear", "--steps", 2, "--summary", self.dir / "s.json",
                         env=dict(os.environ, SKIM_MPIRUN=str(wrapper)))

        complaint = f"""cat >&2 <<END
{"-" * 74}
mpirun has exited due to process rank 0 with PID 0 on
node here exiting improperly.
{"-" * 74}
END
exit 1
"""
        done = under(f'"{os.environ["SKIM_MPIRUN"]}" "$@" || exit\n{complaint}')
        self.assert_ok(done)
        self.assertNotIn("mpirun", done.stderr)
        self.assertEqual(json.loads((self.dir / "s.json").read_text())[0]["steps_done"], 2)
        # But where no rank came to its end, that is what there is to say.
        self.assert_refused(under(complaint), "mpirun has exited due to process rank 0", status=1)
        (self.dir / "mpirun").unlink()
        gone = self.dir / "mpirun"
        done = train("--ranks", 2, "--model", "linear", env=dict(os.environ, SKIM_MPIRUN=str(gone)))
        self.assert_refused(done, str(gone), "No such file", status=1)
        self.assert_refused(under("exit 0"), str(gone), "not all ranks have run", status=1)

    def test_bad_data_on_all_ranks_is_one_line(self):
        done = train("--ranks", 3, "--data", "mnist", "--data-dir", self.dir)
        self.assert_refused(done, "mnist", str(self.dir))


if __name__ == "__main__":
    unittest.main()
