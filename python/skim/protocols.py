"""What objects of one's own need to be a Reducer's selector or schedule.

What they raise leaves Reducer.reduce() or end_step() as it is, and ends the group: the other ranks get a
CommError. Ranks must decide alike about densities; selections may differ. An object that also has
save() -> bytes and load(bytes) is saved and loaded with the reducer.
"""

from typing import Any, Protocol, Union

from numpy import float32
from numpy.typing import NDArray

from skim._core import Density, Progress


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
