"""The one hook that Skim registers with a DistributedDataParallel. What it does can change; DDP takes no second hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from skim import _core

# What a hook does with a bucket. Returns the future of the bucket's mean.
Call = Callable[[Any], "torch.futures.Future[torch.Tensor]"]


class State:
    """The state that DDP keeps for the hook. DDP gives a copy of the model no hook, so a copy has no call.

    It does not keep alive the object that the call is a method of. Python's garbage collector does not see what DDP keeps,
    and the object may refer to the model.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._call: weakref.WeakMethod[Call] | None = None

    @property
    def call(self) -> Call | None:
        return None if self._call is None else self._call()

    def set_call(self, call: Call | None) -> None:
        self._call = None if call is None else weakref.WeakMethod(call)

    def __reduce__(self) -> Any:
        return State, ()


_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()


def set_hook(ddp: DistributedDataParallel, call: Call | None) -> None:
    """From now on `call`, a method, gets every bucket, as long as its object lives. None: buckets are averaged whole, as DDP
    does without a hook.

    Raises InvalidArgument if DDP refuses the hook, because it has another one.
    """
    if ddp in _states:
        _states[ddp].set_call(call)
        return
    state = State(ddp.process_group)
    state.set_call(call)
    try:
        ddp.register_comm_hook(state, _hook)
    except RuntimeError as e:
        raise _core.InvalidArgument(f"skim.attach: DDP refused the hook: {e}") from None
    _states[ddp] = state


# No annotations: DDP compares them with types, but here they would be strings (see the __future__ import).
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    if (call := state.call) is not None:
        return call(bucket)
    flat = bucket.buffer().div_(dist.get_world_size(state.group))
    return dist.all_reduce(flat, group=state.group, async_op=True).get_future().then(lambda future: future.value()[0])


def raising_at_the_end(
    done: torch.futures.Future[torch.Tensor], raise_if_failed: Callable[[], None]
) -> torch.futures.Future[torch.Tensor]:
    """What the hook of the last bucket returns: a future like `done`. If `raise_if_failed` then raises, so does
    backward."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        # DDP queues its own end after this hook. A callback that is queued by a callback comes after both.
        queue(lambda: queue(raise_if_failed))
    except RuntimeError:  # not in backward: DDP's join stands in for a rank that has no more inputs
        def finish(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            raise_if_failed()  # reaches the caller as a RuntimeError with the failure's text
            return future.value()

        return done.then(finish)
    return done
