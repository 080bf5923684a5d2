"""Runs the cases of a file on all ranks, under torchrun."""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def run_cases(test, file, ranks, *arguments, **environment):
    """All functions case_* of the file must succeed. Skips the test if the file says that they cannot run here."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(HERE / file), *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    verdicts = dict(re.findall(r"^(\w+): (\w+)$", done.stdout, re.MULTILINE))
    test.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    if not verdicts and (left_out := re.search("^left out, .*", done.stdout, re.MULTILINE)):
        test.skipTest(left_out[0])
    cases = re.findall(r"^def case_(\w+)", (HERE / file).read_text(), re.MULTILINE)
    test.assertEqual(verdicts, dict.fromkeys(cases, "ok"))


class OnRanks:
    """The cases of a file on 1 to 4 ranks."""

    file: str
    environment: dict[str, str] = {}

    def run_on(self, ranks):
        run_cases(self, self.file, ranks, **self.environment)

    def test_1_rank(self):
        self.run_on(1)

    def test_2_ranks(self):
        self.run_on(2)

    def test_3_ranks(self):
        self.run_on(3)

    def test_4_ranks(self):
        self.run_on(4)


# As if the tensors were not in host memory: skim.TensorLocalHalf keeps the residuals.
AS_ON_A_DEVICE = {"AS_ON_A_DEVICE": "1"}
