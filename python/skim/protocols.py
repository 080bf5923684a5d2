"""The methods that a selector, a schedule or a local half of your own must have.

Give such an object to Reducer(selector=, density=, local=). If one of its methods raises, Reducer.reduce() or
end_step() raises the same exception, and the group ends: the other ranks get a CommError. All ranks must give
equal densities; their selections may differ. If a selector or schedule also has save() -> bytes and load(bytes),
its state is saved and loaded with the reducer's.
"""

from typing import Any, Protocol, Union

from numpy import float32, uint32
from numpy.typing import NDArray

from skim._core import Density, LocalTask, Progress, SelectReport

# A sparse gradient: indices, ascending, and values. Both are read-only and only valid until the method returns.
Entries = tuple[NDArray[uint32], NDArray[float32]]


class OwnSelector(Protocol):
    """Selects the entries to send.

    The library first adds the gradient to the residual. Afterwards it gathers the values at the selected
    indices and leaves out zeros.
    """

    def select(self, accumulated: NDArray[float32], k: int, step: int, slot: int, /) -> NDArray[Any]:
        """Returns the indices of about k entries of `accumulated`, in any order.

        Each index must be in [0, n) and appear once; otherwise Reducer.reduce() raises InvalidArgument.

        accumulated: residual plus gradient [n]. Read-only, and only valid until this returns. Copy what
            you want to keep.
        step, slot: the number of the step and the bucket's slot.
        """
        ...


class OwnSchedule(Protocol):
    """Chooses the density of each step."""

    def density(self, progress: Progress, /) -> Union[float, Density]:
        """Returns the density k/n of the step that begins, in (0, 1].

        Called at least once for every step, in the order of steps. It must return the same answer for the
        same progress.
        """
        ...

    # Optional, for a schedule with a budget: max_bytes(self, density: Density) -> float. The most bytes that the
    # busiest rank can send in a step of this density, which density() has answered. Progress.unknown_bytes adds
    # them up over the steps whose bytes are not known yet.


class OwnLocalHalf(Protocol):
    """The local half of a step: all work on this rank's gradient and residual, wherever their memory is.

    The gradient `grad` is the object that Reducer.reduce() was called with, for example a tensor on a GPU.
    The reducer does not look at it. It exchanges only entries and dense sums with the local half, as NumPy
    arrays in host memory. For each bucket the reducer calls

        select, [gather,] commit, apply                or, for a dense sum,
        accumulate, whole, commit_all, apply_dense

    After all buckets of the step it calls end_step or rollback_step.
    """

    def set_layout(self, layout: list[tuple[int, list[tuple[str, int]]]], /) -> None:
        """Declares all slots with their parameters and lengths: [(slot, [(parameter, entries), ...]), ...].

        If it is called again, residuals move with the names of their parameters. The reducer has checked
        the layout: names are unique, and a known name keeps its length.
        """
        ...

    # Optional: check(self, grad: Any, n: int, /) -> None. Raise here if select, accumulate and apply cannot take
    # `grad` as n entries. Nothing has changed yet at this point, and the group stays usable.

    def select(self, task: LocalTask, grad: Any, /) -> tuple[NDArray[Any], NDArray[Any], SelectReport]:
        """Does residual += grad / task.scale, then selects the entries to send.

        Returns indices (strictly ascending), values and a report. The selected entries stay in the residual
        until commit. A non-finite entry of grad adds 0 and counts in SelectReport.non_finite. You may
        overwrite grad.
        """
        ...

    # Optional: gather(self, slot: int, indices: NDArray[uint32], /) -> NDArray[float32]. Called after select if
    # the exchange is "shared-indices". Returns the residual's values at these indices (ascending), zeros too. They
    # take the place of the selection: commit gets them. Without it, residual() is called. A residual must be kept.

    def accumulate(self, task: LocalTask, grad: Any, /) -> SelectReport:
        """Does residual += grad / task.scale and returns a report. Called instead of select, for a dense sum."""
        ...

    def whole(self, slot: int, grad: Any, /) -> NDArray[float32]:
        """Returns a copy of the residual [n], or grad / scale if no residuals are kept. Called after accumulate.

        The reducer overwrites the copy with the sum over the ranks.
        """
        ...

    def commit(self, slot: int, sent: Entries, returned: Entries, /) -> float:
        """Does residual -= sent, then residual += returned. Returns the change of |residual|^2.

        sent: the entries from select, rounded to wire precision.
        returned: entries that the exchange gives back to this rank.

        Also called with nothing in `sent`, before whole and between steps, to add entries to the residual.
        """
        ...

    def commit_all(self, slot: int, /) -> None:
        """Notes that the whole residual was delivered. end_step sets it to 0."""
        ...

    def apply(self, slot: int, sum: Entries, factor: float, grad: Any, /) -> bool:
        """Sets grad to factor * sum at the sum's indices, and to 0 elsewhere. Returns whether the sum is finite."""
        ...

    def apply_dense(self, slot: int, sum: NDArray[float32], factor: float, grad: Any, /) -> bool:
        """Sets grad to factor * sum. Returns whether the sum is finite.

        sum: [n], read-only, and only valid until this returns.
        """
        ...

    def apply_nan(self, grad: Any, /) -> None:
        """Puts a NaN into grad, for a loss scaler to see. Used with Reducer(non_finite='pass-on')."""
        ...

    def end_step(self) -> None:
        """Makes the commits of this step permanent."""
        ...

    def rollback_step(self) -> None:
        """Undoes the commits of this step. The residual keeps this step's gradients."""
        ...

    # Optional: keeps_residuals: bool. Without it, residual() is called to find out.
    #
    # The state that carries over between steps is saved and loaded by one of two pairs of methods. Of a state in a
    # format of your own:
    #
    #   save(self) -> bytes                 Returns the state.
    #   load(self, of_old_ranks: Sequence[bytes], rank: int, size: int, share: float, /) -> None
    #       of_old_ranks: what save() returned on every rank of the saved run, in rank order. If their number is
    #           `size`, take back this rank's own state. Otherwise set each residual to `share` times the sum over
    #           the old ranks.
    #       rank, size: this rank and the number of ranks now. size 0: the states are of single ranks.
    #       share: usually 1/P of the P old ranks that had gradients, so that the model receives what they still
    #           owed it.
    #
    # Of a state in the library's format, which the built-in local half can load, too:
    #
    #   as_feedback(self) -> skim.ErrorFeedback           Returns a copy of all residuals and velocities.
    #   take_feedback(self, feedback: skim.ErrorFeedback, /)  Replaces all residuals and velocities by copies of those.

    def residual(self, slot: int, /) -> NDArray[float32]:
        """Returns a copy of the slot's residual [n] in host memory, for Reducer.residual(); [0] if none is kept."""
        ...
