"""skim.Aggregator and skim.LocalSteps under torchrun: the cases of without_ddp_cases.py on 1 to 4 ranks."""

import importlib.util
import unittest

from under_torchrun import AS_ON_A_DEVICE, OnRanks

HAS_TORCH = importlib.util.find_spec("torch") is not None


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Cases(OnRanks, unittest.TestCase):
    file = "without_ddp_cases.py"


class CasesOnADevice(Cases):
    environment = AS_ON_A_DEVICE


if __name__ == "__main__":
    unittest.main()
