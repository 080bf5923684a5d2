"""What objects of one's own need to be a Reducer's selector, schedule or local half.

What they raise leaves Reducer.reduce() or end_step() as it is, and ends the group: the other ranks get a
CommError. Ranks must decide alike about densities; selections may differ. A selector or schedule that also
has save() -> bytes and load(bytes) is saved and loaded with the reducer.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Union

from numpy import float32, uint32
from numpy.typing import NDArray

from skim._core import Density, LocalTask, Progress, SelectReport

# Indices, ascending, and values of a sparse gradient. Read-only, and only valid until the method returns.
Entries = tuple[NDArray[uint32], NDArray[float32]]


class OwnSelector(Protocol):
    """Chooses which entries to send. The library adds the gradient to the residual before, gathers the
    values after, and leaves out zeros."""

    def select(self, accumulated: NDArray[float32], k: int, step: int, slot: int, /) -> NDArray[Any]:
        """Indices of about k entries of `accumulated`, in any order, each in [0, n) and once; otherwise
        InvalidArgument.

        accumulated: residual plus gradient [n]. Read-only, and only valid until this returns: copy what
        is to be kept.
        """
        ...


class OwnSchedule(Protocol):
    """Says how many entries to keep."""

    def density(self, progress: Progress, /) -> Union[float, Density]:
        """k/n of the step that begins, in (0, 1]. Called once or more for every step, in their order, and
        must give the same answer for the same progress."""
        ...


class OwnLocalHalf(Protocol):
    """The local half of a step: what happens to this rank's gradient and residual, wherever their memory is.

    The gradient is whatever Reducer.reduce() was called with: a tensor on a GPU, say. The reducer does
    not look at it. Only entries and dense sums cross over, as NumPy arrays in host memory. For each
    bucket the reducer calls

        select, commit, apply                          or, for a dense sum,
        accumulate, whole, commit_all, apply_dense

    and end_step or rollback_step once all buckets of the step are done.
    """

    def set_layout(self, layout: list[tuple[int, list[tuple[str, int]]]], /) -> None:
        """Declares all slots with their parameters and lengths: [(slot, [(parameter, entries), ...]), ...].
        When it is called again, residuals move with the names of their parameters. The layout has been
        checked: no name stands twice, and none has changed its length."""
        ...

    # Optional: check(self, grad: Any, n: int, /) -> None. It raises if select, accumulate and apply cannot take
    # `grad` as n entries. Then nothing has changed, and the group goes on.

    def select(self, task: LocalTask, grad: Any, /) -> tuple[NDArray[Any], NDArray[Any], SelectReport]:
        """residual += grad / task.scale. Returns the entries to send: indices, ascending and each once,
        values, and a report. What is sent stays in the residual until commit. A NaN or an infinity in
        `grad` adds 0 and is counted. grad may be overwritten."""
        ...

    def accumulate(self, task: LocalTask, grad: Any, /) -> SelectReport:
        """For a dense sum, instead of select: residual += grad / task.scale."""
        ...

    def whole(self, slot: int, grad: Any, /) -> NDArray[float32]:
        """After accumulate: a copy of the residual [n], which the reducer overwrites with the sum over the
        ranks. Without residuals: grad / scale."""
        ...

    def commit(self, slot: int, sent: Entries, returned: Entries, /) -> float:
        """residual -= sent, then residual += returned. Returns the change of |residual|^2.

        sent: what select returned, rounded to what the wire keeps. returned: mass that comes back to
        this rank. Also called with nothing sent, for mass from elsewhere: before whole, and between
        steps.
        """
        ...

    def commit_all(self, slot: int, /) -> None:
        """The whole residual was delivered: it becomes 0 in end_step."""
        ...

    def apply(self, slot: int, sum: Entries, factor: float, grad: Any, /) -> bool:
        """grad = factor * sum at the indices of the sum, 0 elsewhere. Returns whether the sum is finite."""
        ...

    def apply_dense(self, slot: int, sum: NDArray[float32], factor: float, grad: Any, /) -> bool:
        """grad = factor * sum. Returns whether the sum is finite. `sum` is read-only, and only valid until
        this returns."""
        ...

    def apply_nan(self, grad: Any, /) -> None:
        """Puts a NaN into grad, for a loss scaler to see (Reducer(non_finite='pass-on'))."""
        ...

    def end_step(self) -> None:
        """What was committed since the last step is final."""
        ...

    def rollback_step(self) -> None:
        """Takes back what was committed since the last step. The gradients of this step stay in the
        residual."""
        ...

    def save(self) -> bytes:
        """All that carries over between steps."""
        ...

    def load(self, of_old_ranks: Sequence[bytes], rank: int, size: int, /) -> None:
        """What save() returned on every rank of the saved run, in rank order. With the same number of
        ranks this rank takes its own. Otherwise each residual becomes (1/P) times the sum over the P old
        ranks: that is what the model still has to receive."""
        ...

    def residual(self, slot: int, /) -> NDArray[float32]:
        """A copy of the slot's residual [n] in host memory; [0] if none is kept. For Reducer.residual()."""
        ...
