"""A user's file, for type checkers: test_types.py."""

from collections.abc import Callable
from typing import Optional

import numpy as np
import skim
from numpy.typing import NDArray


class Mine:
    def select(self, accumulated: NDArray[np.float32], k: int, step: int, slot: int) -> NDArray[np.int64]:
        return np.argsort(-np.abs(accumulated))[:k]

    def density(self, progress: skim.Progress) -> float:
        return 0.1 if progress.step < 10 else 0.01


def train(comm: skim.Communicator, grad: NDArray[np.float32]) -> int:
    reducer = skim.Reducer(comm, selector=Mine(), density=Mine(), exchange="gtopk")
    reducer.set_layout([(0, [("w", grad.size)])])
    report: skim.StepReport = reducer.reduce(0, grad)
    state: bytes = reducer.save()
    reducer.load([state])
    return report.sent_bytes if reducer.end_step() else 0


def with_parts(comm: skim.Communicator, half: skim.protocols.OwnLocalHalf, grad: object) -> bool:
    reducer = skim.Reducer(comm, local=half, exchange="auto", among=["gtopk"])
    return reducer.reduce(0, grad).finite


def by_hand(comm: skim.Communicator, grad: NDArray[np.float32]) -> Optional[NDArray[np.float32]]:
    selection = skim.Selector("dgc", select_seed=1).select(grad, 10)
    codec = skim.Codec()
    indices, values = codec.decode(codec.encode(selection.indices, selection.values, grad.size), grad.size)
    result = skim.Exchange(comm, "allgather").run(indices, values, grad.size, k=10)
    return result.values


def budget(lengths: list[int]) -> skim.DensitySchedule:
    cost: Callable[[float], float] = skim.max_step_bytes(lengths, ranks=2)
    return skim.adaptive_density(cost=cost, budget=100 * cost(0.01))


def name(error: skim.CommError) -> str:
    return f"{error.peer + 1} {error.phase.upper()} {skim.exchanges['gtopk'].name.upper()} {skim.__version__}"


ratio: float = skim.analysis.top_k_ratio(np.zeros(3, np.float32), 1)
