"""How an idle engine is had to take a step: vLLM's loop sleeps on a queue of its clients' messages, which connectors
are not given. One kind of message only wakes it; vLLM sends it to itself when it is to stop."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from queue import Queue
from typing import Any

_log = logging.getLogger(__name__)


class IdleSteps:
    """Steps that an engine is to take although it has nothing to compute. Any thread may want one.

    vLLM hears in a step only what has become of the pool: its metrics, and its events for routers.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_wanted = False

    @property
    def is_wanted(self) -> bool:
        """Whether the engine is to take one."""
        return self._is_wanted

    def want(self) -> None:
        """Have the engine take one."""
        self._is_wanted = True
        self._wake()

    def take(self) -> bool:
        """A step is being taken; whether somebody wanted it."""
        wanted, self._is_wanted = self._is_wanted, False
        return wanted


def _nothing() -> None:
    """An engine in its user's process takes steps when the user says so."""


def find_waker() -> Callable[[], None]:
    """What wakes the engine that is being made further up the stack; any thread may call it.

    Where no loop of vLLM's is found, what waits for a step waits for the next request.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCoreProc):
            messages: Queue[Any] = owner.input_queue
            return lambda: messages.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back
    _log.debug("no loop of vLLM's was found: the engine is woken by requests only")
    return _nothing
