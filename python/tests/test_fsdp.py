"""skim.attach and skim.LocalSteps on models with fully_shard, under torchrun: the cases of fsdp_cases.py."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
CASES = re.findall(r"^def case_(\w+)", (HERE / "fsdp_cases.py").read_text(), re.MULTILINE)


def why_not():
    """Why the cases cannot run here; "": they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        FSDPModule = None
    return "" if hasattr(FSDPModule, "set_all_reduce_hook") else "fully_shard of this PyTorch has no all-reduce hook"


@unittest.skipIf(why_not(), why_not())
class Cases(unittest.TestCase):
    def run_on(self, islands, ranks_of_each):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, "--nproc-per-node", str(islands * ranks_of_each), str(HERE / "fsdp_cases.py"), str(islands)],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        verdicts = dict(re.findall(r"^(\w+): (\w+)$", done.stdout, re.MULTILINE))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        if not verdicts and (left_out := re.search("^left out, .*", done.stdout, re.MULTILINE)):
            self.skipTest(left_out[0])
        self.assertEqual(verdicts, dict.fromkeys(CASES, "ok"))

    def test_2_islands_of_2(self):
        self.run_on(2, 2)

    def test_2_islands_of_3(self):
        self.run_on(2, 3)

    def test_3_islands_of_1(self):
        self.run_on(3, 1)


if __name__ == "__main__":
    unittest.main()
