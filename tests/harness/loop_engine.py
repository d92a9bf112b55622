"""A toy engine that a thread of its own drives, for tests of services: requests run as they are submitted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvferry.core.groups import GroupSpec
from kvferry.core.pool.records import HeaderQueue
from kvferry.core.transfers import Direction
from tests.harness.toy_compute import Chunk
from tests.harness.toy_engine import Habits, ToyEngine
from tests.harness.toy_ledger import NoLedger
from tests.harness.toy_tokens import ToyRequest
from tests.harness.waiting import DEADLINE_S

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
DEVICE_BLOCKS = 4096
STEP_TOKENS = 1 << 16
IDLE_POLL_S = 0.05


class LoopRequest(ToyRequest):
    """A request whose tokens follow from a seed, or from a `head`: equal ones share a prefix, whatever the lengths.

    With `hold`, it is admitted and not computed until that is set.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        seed: int = 0,
        num_output_tokens: int = 0,
        priority: int | None = None,
        hold: threading.Event | None = None,
        head: Sequence[int] = (),
        **fields: Any,
    ) -> None:
        super().__init__(
            request_id,
            [*head] or [seed + 1],
            num_prompt_tokens,
            num_output_tokens,
            hash_block_size=BLOCK_TOKENS,
            **fields,
        )
        while self.num_tokens < num_prompt_tokens:
            self.append_token()
        self.priority = priority
        self.hold = hold
        self.done = threading.Event()

    @property
    def token_ids(self) -> Sequence[int]:
        return self.tokens

    def may_run(self) -> bool:
        return self.hold is None or self.hold.is_set()


class LoopEngine(ToyEngine):
    """Takes a step whenever there is something to do, or after `wake`. Its device caches nothing."""

    def __init__(
        self,
        num_slots: int,
        sink: Any = None,
        max_pinned_fraction: float = 0.25,
        header_queue: HeaderQueue | None = None,
    ) -> None:
        super().__init__(
            num_slots,
            DEVICE_BLOCKS,
            sink=sink,
            header_queue=header_queue,
            policy_sources={"offload_prompt_only": "env"},
            specs=[GroupSpec(BLOCK_TOKENS, BLOCK_BYTES)],
            habits=Habits(keeps_failed=True),
        )
        self.ledger = NoLedger(self)
        self.step_s = 0.0
        self.manager.operator_pins.max_fraction = max_pinned_fraction
        self.failing: Direction | None = None
        """Transfers in this direction fail."""
        self.failure: BaseException | None = None
        self._are_copies_held = False
        self._wake = threading.Event()
        self._arriving: list[LoopRequest] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="loop-engine", daemon=True)
        self._thread.start()

    # --- calls of tests: any thread

    def wake(self) -> None:
        self._wake.set()

    def enqueue(self, request: LoopRequest) -> LoopRequest:
        with self._lock:
            self._arriving.append(request)
        self.wake()
        return request

    def answer(self, request: LoopRequest, timeout_s: float = DEADLINE_S) -> LoopRequest:
        """Submit a request and wait until it has finished."""
        self.enqueue(request)
        if not request.done.wait(timeout_s):
            raise TimeoutError(f"{request.request_id} did not finish: {self.failure!r}")
        return request

    def hold_copies(self) -> None:
        """Keep transfers in flight until `release_copies`."""
        self._are_copies_held = True

    def release_copies(self) -> None:
        self._are_copies_held = False
        self.wake()

    @property
    def num_held_copies(self) -> int:
        return len(self.copies.open) if self._are_copies_held else 0

    def close(self) -> None:
        self._stop.set()
        self.wake()
        self._thread.join(DEADLINE_S)
        if self.failure is not None:
            raise self.failure

    # --- the loop

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.clear()
                self._take_step()
                if not any(one.state == "running" and one.may_run() for one in self.requests.values()):
                    self._wake.wait(IDLE_POLL_S if self.offload.has_open_work() else None)
        except BaseException as exc:
            self.failure = exc

    def _take_step(self) -> None:
        self.now_s = time.time()
        with self._lock:
            arriving, self._arriving = self._arriving, []
        for request in arriving:
            self.add(request)
        self.step(STEP_TOKENS)
        for job_id in [] if self._are_copies_held else list(self.copies.open):
            fails = self.copies.open[job_id].job.direction is self.failing
            self.end_job(job_id, error="the test's" if fails else None)
        # Like an engine, every step: the outcome of a load that could not start, as a reset came first, has no copy.
        self.deliver([])

    def find_prefix(self, request: ToyRequest) -> int:
        return 0

    def finish(self, request: ToyRequest, *, is_aborted: bool = False) -> None:
        super().finish(request, is_aborted=is_aborted)
        request.done.set()

    def _next_chunk(self, request: ToyRequest, budget: int) -> Chunk | None:
        return super()._next_chunk(request, budget) if request.may_run() else None
