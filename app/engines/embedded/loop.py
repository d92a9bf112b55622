"""Engine thread: takes requests from the inbox, runs steps while there is work, and sends tokens to clients.

The order within a step, which every engine attached to kvferry has to follow:

    ended transfers -> match, commit -> plan -> stores ahead -> start loads -> compute -> start stores -> outputs
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvferry.app.api.errors import Problem
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, Request
from kvferry.app.engines.embedded.runner import ModelRunner
from kvferry.app.engines.embedded.scheduler import Chunk, Scheduler
from kvferry.app.guard import ErrorLog, GuardedCopies
from kvferry.core.transfers import TransferResult
from kvferry.cuda_ops.copy.engine import CopyEngine

log = logging.getLogger(__name__)

MAX_MESSAGES = 64
"""New requests, and canceled ones, that a step takes, so that a call of thousands of prompts does not hold it up."""
RECHECK_S = 0.01
"""Poll interval without compute, while transfers are open or requests wait."""
ERROR_BACKOFF_S = 1.0
HUNG_STEP_S = 10.0
"""A longer step makes the engine not ready."""
FAILED_STEPS = 3
FAILED_STEPS_S = 600.0
"""So many failed steps in a row make the engine not ready, for so long after the last: a router that sends no requests
to it would never see one succeed."""


class Inbox:
    """Messages of other threads to the engine thread: new requests, canceled ones, and that there is work.

    Thread: any; `wait`, `take` and `remove`: engine. It is closed until the engine starts, and once the engine stops.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._canceled: list[Request] = []
        self._live: dict[str, Request] = {}
        """Requests that have not ended, by id."""
        self._is_woken = False

    def open(self) -> None:
        """Accept requests from now on."""
        self.is_open = True

    def close(self) -> None:
        """Refuse requests from now on, and have `wait` return."""
        with self._changed:
            self.is_open = False
            self._changed.notify()

    def post(self, requests: Sequence[Request]) -> None:
        """Send new requests, all or none. Those whose id is in use get another. Raises the 503 of a stopped engine."""
        with self._changed:
            if not self.is_open:
                raise Problem(503, "the engine is not running")
            for request in requests:
                unique_id = request.request_id
                while unique_id in self._live:
                    unique_id = f"{request.request_id}-{secrets.token_hex(4)}"
                if unique_id != request.request_id:
                    request.rename(unique_id)
                self._live[unique_id] = request
            self._new.extend(requests)
            self._changed.notify()

    def cancel(self, requests: Iterable[Request]) -> None:
        """Have requests end early, because their client is gone; those that have ended are ignored."""
        with self._changed:
            for request in requests:
                if not request.is_canceled:
                    request.is_canceled = True
                    self._canceled.append(request)
            self._changed.notify()

    def wake(self) -> None:
        """Have an idle engine take a step."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def live(self) -> list[Request]:
        """Return all requests that have not ended."""
        with self._changed:
            return list(self._live.values())

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until there is a message, at most `timeout_s` (None: no limit). Return whether it is still open."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._canceled or self._is_woken or not self.is_open, timeout_s)
            self._is_woken = False
            return self.is_open

    def take(self) -> tuple[list[Request], list[Request]]:
        """Return new requests and canceled ones, as many as one step takes."""
        with self._changed:
            new, self._new = self._new[:MAX_MESSAGES], self._new[MAX_MESSAGES:]
            canceled, self._canceled = self._canceled[:MAX_MESSAGES], self._canceled[MAX_MESSAGES:]
        return new, canceled

    def remove(self, request: Request) -> None:
        """Release the id of a request that ends."""
        with self._changed:
            self._live.pop(request.request_id, None)


class EngineLoop:
    """The engine's step loop. Thread: engine, except for `reasons`, `errors` and `drain_until_s`."""

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Scheduler,
        runner: ModelRunner,
        copies: CopyEngine | GuardedCopies,
        clock: Callable[[], float],
        timer: Callable[[], float],
    ) -> None:
        self.errors = ErrorLog()
        self.drain_until_s = 0.0
        """When to stop waiting for transfers, by `time.monotonic`, once the inbox is closed."""
        self._inbox = inbox
        self._scheduler = scheduler
        self._runner = runner
        self._copies = copies
        self._clock = clock
        self._timer = timer
        self._step_began_s: float | None = None
        """When the running step began, by the timer; None between steps."""
        self._num_failed_steps = 0
        """Steps that failed since the last forward pass that did not."""
        self._failed_s = 0.0
        """When the last step failed, by the timer."""

    def run(self) -> None:
        """Run steps until the inbox is closed, then end all requests."""
        idle_s: float | None = None
        try:
            while self._inbox.wait(idle_s):
                self._step_began_s = self._timer()
                try:
                    idle_s = self._step()
                except Exception as error:  # noqa: BLE001 - the engine must continue to serve, whatever failed
                    self._fail_step("the engine step", self._scheduler.requests(), error)
                    idle_s = ERROR_BACKOFF_S
                self._step_began_s = None
        finally:
            self._inbox.close()
            self._drain()

    def reasons(self) -> list[str]:
        """Return why this engine should get no traffic: a step that hangs, failing steps. Any thread."""
        reasons, now_s, began_s = [], self._timer(), self._step_began_s
        step_s = 0.0 if began_s is None else now_s - began_s
        if step_s > HUNG_STEP_S:
            reasons.append(f"engine step has been running for {step_s:.0f} s")
        if self._num_failed_steps >= FAILED_STEPS and now_s - self._failed_s < FAILED_STEPS_S:
            reasons.append(f"the last {self._num_failed_steps} engine steps failed; last error: {self.errors.last}")
        return reasons

    # ---- the step ----------------------------------------------------------------------------------------------------

    def _step(self) -> float | None:
        """Run one step. Return how long the engine may sleep before the next; None: until a message arrives."""
        now_s = self._clock()
        self._read_inbox(now_s)
        self._scheduler.end_transfers(self._copies.poll(), now_s)
        step = self._scheduler.schedule(now_s)
        chunks, plan = list(step.chunks.values()), step.plan
        # offload: stores ahead first, because they read blocks that the rest of the step writes to.
        for job in plan.stores_ahead:
            self._copies.submit_ahead(job)
        # offload: loads before the compute, which hides them: it uses none of their blocks.
        for job in plan.loads:
            self._copies.submit(job)
        try:
            tokens = self._runner.run(chunks)
        except Exception as error:  # noqa: BLE001 - a failed forward pass ends its requests, not the engine
            # offload: every planned job ends once, also one that is not submitted.
            results = [TransferResult(job.job_id, error="not submitted: no forward pass") for job in plan.stores]
            try:
                self._fail_step("the forward pass", [chunk.request for chunk in chunks], error)
            finally:
                self._scheduler.end_transfers(results, now_s)
            return 0.0
        # offload: the other stores after the compute, which fills their blocks.
        for job in plan.stores:
            self._copies.submit(job)
        self._send_tokens(chunks, tokens)
        if chunks:
            self._num_failed_steps = 0
            return 0.0
        return RECHECK_S if self._scheduler.has_work() else None

    def _read_inbox(self, now_s: float) -> None:
        """Add new requests, and end canceled ones, some of which may not have been added yet."""
        new, canceled = self._inbox.take()
        for request in new:
            if not request.is_canceled:
                self._scheduler.add(request, now_s)
        for request in canceled:
            if request.finish_reason is None:
                self._end(request, FinishReason.ABORT)

    def _send_tokens(self, chunks: Sequence[Chunk], tokens: Sequence[int | None]) -> None:
        """Record what was computed, and send the sampled tokens to the clients."""
        now_s = self._clock()
        for chunk, token in zip(chunks, tokens, strict=True):
            request = chunk.request
            try:
                self._scheduler.advance(chunk)
                if token is not None:
                    self._send(request, request.append(token, token in self._runner.eos_token_ids), now_s)
            except Exception as error:  # noqa: BLE001 - this request alone ends with an error
                self.errors.record("a request, which ends with an error", error)
                self._fail([request], error)

    def _send(self, request: Request, delta: OutputDelta, now_s: float) -> None:
        """Send output to the client of a request, which is removed first if this is its last."""
        if delta.finish_reason is not None:
            is_aborted = delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            self._scheduler.finish(request, now_s, is_aborted=is_aborted)
            self._inbox.remove(request)
        request.send(delta)

    # ---- early ends --------------------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request early, in any state."""
        self._send(request, request.end(reason, error), self._clock())

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End requests with an error, and have no more of their blocks stored."""
        self._scheduler.report_failed(requests, self._clock())
        for request in requests:
            message = f"engine error while processing this request ({type(error).__name__}); see the engine's log"
            self._end(request, FinishReason.ERROR, message)

    def _fail_step(self, where: str, requests: Sequence[Request], error: Exception) -> None:
        """End the requests of a failed step."""
        self.errors.record(f"{where}, whose requests end with an error", error)
        self._num_failed_steps += 1
        self._failed_s = self._timer()
        self._fail(requests, error)

    def _drain(self) -> None:
        """Abort all requests, and wait until no transfer accesses a device block, for a bounded time."""
        for request in self._inbox.live():
            self._end(request, FinishReason.ABORT)
        while True:
            now_s = self._clock()
            self._scheduler.end_transfers(self._copies.poll(), now_s)
            for job in self._scheduler.schedule(now_s).plan.jobs:
                self._copies.submit(job)
            num_held = self._scheduler.block_pool.num_held
            if not num_held:
                return
            if time.monotonic() >= self.drain_until_s:
                log.warning("closed with device blocks still under transfer: %d", num_held)
                return
            time.sleep(RECHECK_S)
