"""skim.Aggregator and skim.LocalSteps under torchrun: the cases of without_ddp_cases.py on 1 to 4 ranks."""

import importlib.util
import unittest

from under_torchrun import run_cases

HAS_TORCH = importlib.util.find_spec("torch") is not None


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Cases(unittest.TestCase):
    environment: dict[str, str] = {}

    def run_on(self, ranks):
        run_cases(self, "without_ddp_cases.py", ranks, **self.environment)

    def test_1_rank(self):
        self.run_on(1)

    def test_2_ranks(self):
        self.run_on(2)

    def test_3_ranks(self):
        self.run_on(3)

    def test_4_ranks(self):
        self.run_on(4)


class CasesOnADevice(Cases):
    """The same, as if the tensors were not in host memory: skim.TensorLocalHalf keeps the residuals."""

    environment = {"AS_ON_A_DEVICE": "1"}


if __name__ == "__main__":
    unittest.main()
