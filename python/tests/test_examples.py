"""The Python examples, as users start them: ranks end equal, losses fall, wrong input gets one line."""

import gzip
import importlib.util
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None

# Runs an example, and prints of each rank a hash of the parameters that Skim was given.
HASHING = """
import hashlib, os, runpy, sys
import skim
given = []
def seen(make, tensors_of):
    def made(x, *arguments, **options):
        x = x if hasattr(x, "parameters") else list(x)
        given.extend(tensors_of(x))
        return make(x, *arguments, **options)
    return made
skim.attach = seen(skim.attach, lambda model: model.parameters())
skim.Aggregator = seen(skim.Aggregator, list)
skim.LocalSteps = seen(skim.LocalSteps, lambda model: model.parameters())
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in given)).hexdigest()
sys.stdout.write(f"rank {os.environ['RANK']} has {len(given)} tensors {digest}\\n")
sys.stdout.flush()
# Not through Python's end: a thread of gloo may free the last sum's tensor only then, and that aborts
# the process, with Skim or without (PyTorch 2.13 under load).
os._exit(0)
"""


def environment(**more):
    without = {k: v for k, v in os.environ.items() if k != "SKIM_DATA"}  # data are made up
    return {**without, "OMP_NUM_THREADS": "1", **more}


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Examples(unittest.TestCase):
    def run_example(self, name, *arguments):
        """Its output without the hashes, which are checked."""
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "hashing.py")
            script.write_text(HASHING)
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
                 str(EXAMPLES / name), *arguments],
                capture_output=True, text=True, timeout=300, env=environment(),
            )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        hashes = re.findall(r"rank ([01]) has (\d+) tensors (\w+)\n", done.stdout)
        self.assertEqual({h[0] for h in hashes}, {"0", "1"}, done.stdout)
        self.assertEqual(len({h[1:] for h in hashes}), 1, done.stdout)
        self.tensors = int(hashes[0][1])
        return done.stdout

    def assert_falls(self, output, to):
        """The last loss is below the share `to` of the first."""
        losses = [float(x) for x in re.findall(r"(?<!validation )loss (\S+?),?\s", output)]
        self.assertGreater(len(losses), 1, output)
        self.assertLess(losses[-1], to * losses[0], output)

    def accuracy(self, output):
        return float(re.search(r"test accuracy (\S+) %", output)[1])

    def test_ddp_mnist(self):
        output = self.run_example("ddp_mnist.py", "--steps", "60")
        self.assertEqual(self.tensors, 4)
        self.assert_falls(output, 0.5)
        self.assertGreater(self.accuracy(output), 90)
        self.assertRegex(output, "skim: rank 0 of 2, .* times less than dense")

    def test_gpt_text(self):
        output = self.run_example("gpt_text.py", "--steps", "30", "--exchange", "allgather", "--batch", "4")
        self.assertGreater(self.tensors, 20)
        self.assert_falls(output, 0.9)
        self.assertRegex(output, r"validation loss \d\.\d+\n")

    def test_gpt_text_with_local_steps(self):
        output = self.run_example(
            "gpt_text.py", "--steps", "30", "--local-steps", "4", "--exchange", "allgather", "--batch", "4"
        )
        self.assertGreater(self.tensors, 20)
        self.assert_falls(output, 0.9)
        self.assertIn("8 steps", output)  # rounds; the last one is of two local steps

    def test_gpt_text_of_a_few_steps(self):
        for steps in ("1", "10"):
            output = self.run_example("gpt_text.py", "--steps", steps, "--gradients", "dense", "--batch", "2")
            self.assertIn(f"\nstep {steps}: loss ", "\n" + output)

    def test_gpt_text_dense(self):
        output = self.run_example("gpt_text.py", "--steps", "30", "--gradients", "dense", "--batch", "4")
        self.assertEqual(self.tensors, 0)
        self.assert_falls(output, 0.9)
        self.assertNotIn("skim:", output)

    @unittest.skipUnless(HAS_ACCELERATE, "accelerate is not installed")
    def test_accelerate_loop(self):
        output = self.run_example("accelerate_loop.py", "--steps", "60")
        self.assertEqual(self.tensors, 4)
        self.assert_falls(output, 0.5)

    def test_local_steps(self):
        output = self.run_example("local_steps.py", "--rounds", "6", "--local-steps", "10", "--density", "0.05")
        self.assertEqual(self.tensors, 4)
        self.assert_falls(output, 0.8)
        self.assertGreater(self.accuracy(output), 50)


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Input(unittest.TestCase):
    def refused(self, status, word, command, **more):
        done = subprocess.run(
            [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, env=environment(**more)
        )
        self.assertEqual((done.returncode, done.stdout), (status, ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn(word, done.stderr)

    def test_wrong_arguments_get_one_line(self):
        self.refused(2, "--steps", [EXAMPLES / "ddp_mnist.py", "--steps", "x"])
        self.refused(2, "--steps must be at least 1", [EXAMPLES / "ddp_mnist.py", "--steps", "0"])
        self.refused(2, "'telepathy'", [EXAMPLES / "gpt_text.py", "--exchange", "telepathy"])
        self.refused(2, "--local-steps", [EXAMPLES / "local_steps.py", "--local-steps", "0"])

    def test_what_skim_refuses_is_one_line(self):
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        self.refused(1, "density", [EXAMPLES / "gpt_text.py", "--density", "2"], **alone)

    def test_data_that_are_not_there_get_one_line(self):
        self.refused(1, "/nowhere", [EXAMPLES / "ddp_mnist.py"], SKIM_DATA="/nowhere")
        self.refused(1, "/nowhere", [EXAMPLES / "gpt_text.py"], SKIM_DATA="/nowhere")

    def test_without_accelerate_it_says_how_to_get_it(self):
        hidden = "import runpy, sys; sys.modules['accelerate'] = None; runpy.run_path(sys.argv[1])"
        self.refused(
            1, "pip install accelerate", ["-c", hidden, EXAMPLES / "accelerate_loop.py"], PYTHONPATH=str(EXAMPLES)
        )

    def test_published_digits_are_read(self):
        with tempfile.TemporaryDirectory() as folder:
            mnist = pathlib.Path(folder, "mnist")
            mnist.mkdir()
            pixels = bytes(i % 256 for i in range(3 * 784))
            images = struct.pack(">4i", 2051, 3, 28, 28) + pixels
            (mnist / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
            (mnist / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">2i", 2049, 3) + b"\5\0\7"))
            code = (
                "from ddp_mnist import digits; x, y = digits('t10k');"
                "print((255 * x).round().int().flatten().tolist(), y.tolist())"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
                env=environment(PYTHONPATH=str(EXAMPLES), SKIM_DATA=folder),
            )  # fmt: skip
        self.assertEqual(done.stdout, f"{list(pixels)} [5, 0, 7]\n")


if __name__ == "__main__":
    unittest.main()
