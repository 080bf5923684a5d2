"""Checks of arguments. They raise InvalidArgument, which says what is wrong and what is allowed."""

from __future__ import annotations

import math
import numbers
from typing import Any

from skim import _core

MOST_STEPS = 2**53  # of a run: a float has all whole numbers up to it
MOST_TIMEOUT_S = 1e6  # PyTorch counts milliseconds in an int
LEAST_FLOAT, MOST_FLOAT = 1e-45, 3.4e38  # what a float32 can hold beside 0


def expect_whole(name: str, value: Any, least: int, most: int | None = None, words: str = "") -> None:
    """words: for `most` in the message, if it is another argument."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"in [{least}, {words or most}]"
        raise _core.InvalidArgument(f"{name}: must be a whole number {allowed}, not {value!r}")


def expect_positive(name: str, value: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0.0 < value < math.inf:
        raise _core.InvalidArgument(f"{name}: must be a number above 0, not {value!r}")


def expect_timeout(name: str, value: Any) -> None:
    expect_positive(name, value)
    if value > MOST_TIMEOUT_S:
        raise _core.InvalidArgument(f"{name}: must be at most {MOST_TIMEOUT_S:g} s, not {value!r}")


def expect_float32(name: str, value: float) -> None:
    """The library would take smaller numbers for 0, and larger ones for infinity."""
    if value != 0.0 and not LEAST_FLOAT <= abs(value) <= MOST_FLOAT:
        raise _core.InvalidArgument(f"{name}: must be 0 or from {LEAST_FLOAT:g} to {MOST_FLOAT:g} in size, not {value!r}")


def has_method(value: Any, name: str) -> bool:
    """Whether the value is an object with this method. A class is not, though its objects may be."""
    return not isinstance(value, type) and callable(getattr(value, name, None))


def expect_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _core.InvalidArgument(f"{name}: must be True or False, not {value!r}")


def expect_steps_of_run(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise _core.InvalidArgument(f"{name}: must be a whole number, not {value!r}")
    if value < 0:
        raise _core.InvalidArgument(f"{name}: must be 0 (not known) or more, not {value}")
    if value > MOST_STEPS:
        raise _core.InvalidArgument(f"{name}: must be at most {MOST_STEPS}, not {value}")
