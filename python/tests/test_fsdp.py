"""skim.attach and skim.LocalSteps on models with fully_shard, under torchrun: the cases of fsdp_cases.py."""

import importlib.util
import unittest

from under_torchrun import run_cases


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
        run_cases(self, "fsdp_cases.py", islands * ranks_of_each, islands)

    def test_2_islands_of_2(self):
        self.run_on(2, 2)

    def test_2_islands_of_3(self):
        self.run_on(2, 3)

    def test_3_islands_of_1(self):
        self.run_on(3, 1)


if __name__ == "__main__":
    unittest.main()
