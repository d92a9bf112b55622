"""Engine thread: runs steps while there is work.

The order within a step, which every engine attached to kvferry has to follow (calls are marked `offload:` below):

    finished transfers -> schedule (match, commit) -> plan -> submit loads -> compute -> submit stores -> answers
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from kvferry.app.api.errors import Problem
from kvferry.app.engines.embedded.offload import Offload
from kvferry.app.engines.embedded.request import FinishReason, Request
from kvferry.app.engines.embedded.runner import ModelRunner
from kvferry.app.engines.embedded.scheduler import Chunk, StepScheduler
from kvferry.app.guard import ErrorLog
from kvferry.core.transfers import StepPlan, TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import CopyEngine

log = logging.getLogger(__name__)

RECHECK_S = 0.01
"""Poll interval without compute, while transfers are open or requests wait."""
ERROR_BACKOFF_S = 1.0
MAX_MESSAGES = 64
"""New requests, and canceled ones, that a step takes, so that a call of thousands of prompts does not hold it up."""
MAX_NEW_TOKENS = 1 << 15
"""A step takes no more new requests once their prompts have this many tokens."""


class EngineLoop:
    """The engine's step loop. Thread: engine, except for `post`, `wake`, `start` and `close`.

    `on_ended` is called with the id of each ended request, before its client receives the end.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        runner: ModelRunner,
        copies: CopyEngine,
        eos_token_ids: frozenset[int],
        on_ended: Callable[[str], None],
        clock: Callable[[], float],
        timer: Callable[[], float],
    ) -> None:
        self.errors = ErrorLog()
        self.thread_cpu_s = 0.0
        self.step_started_s: float | None = None
        """When the running step began, by the timer; None between steps. Any thread may read it."""
        self.num_failed_steps = 0
        """Steps that failed since the last forward pass that did not. Any thread may read it."""
        self.failed_s = 0.0
        """When the last step failed, by the timer."""
        self._scheduler = scheduler
        self._offload: Offload = scheduler.offload
        self._runner = runner
        self._copies = copies
        self._eos_token_ids = eos_token_ids
        self._on_ended = on_ended
        self._clock = clock
        self._timer = timer
        self._condition = threading.Condition()
        self._arriving: OrderedDict[str, Request] = OrderedDict()
        self._canceled: deque[Request] = deque()
        self._woken = False
        self._closing = False
        self._close_deadline_s = 0.0
        self._thread: threading.Thread | None = None
        self._planned: dict[int, TransferJob] = {}

    # ---- from other threads -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, once."""
        self._thread = threading.Thread(target=self._serve, name="kvferry-engine", daemon=True)
        self._thread.start()

    def is_started(self) -> bool:
        """Return whether `start` was called."""
        return self._thread is not None

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def post(self, *requests: Request, is_new: bool = True) -> None:
        """Send new requests, or those whose clients are gone, all or none. Raises the 503 of a stopped engine."""
        with self._condition:
            if self._closing or not self.is_alive():
                raise Problem(503, "the engine is not running")
            if is_new:
                self._arriving.update((request.request_id, request) for request in requests)
            else:
                self._canceled.extend(requests)
            self._condition.notify_all()

    def wake(self) -> None:
        """Make an idle engine take a step."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def close(self, timeout_s: float) -> None:
        """Abort all requests, wait at most this long for their transfers, and stop."""
        with self._condition:
            self._closing = True
            self._close_deadline_s = time.monotonic() + timeout_s
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s + 5.0)
            if self._thread.is_alive():
                log.error("engine thread did not stop within %.0f s", timeout_s + 5.0)

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        idle_s: float | None = None
        try:
            while self._wait(idle_s):
                self.step_started_s = self._timer()
                try:
                    idle_s = self._step()
                except Exception as error:  # noqa: BLE001 - the engine must continue to serve, whatever failed
                    self._record_failed_step("the engine step, whose requests end with an error", error)
                    self._fail(self._scheduler.requests(), error)
                    self._fail_planned(error)
                    idle_s = ERROR_BACKOFF_S
                self.step_started_s = None
                self.thread_cpu_s = time.thread_time()
        finally:
            with self._condition:
                self._closing = True
            self._drain()

    def _wait(self, idle_s: float | None) -> bool:
        """Sleep until there is work, at most `idle_s` (None: no limit). Return False once the engine closes."""
        with self._condition:
            self._condition.wait_for(lambda: self._arriving or self._canceled or self._woken or self._closing, idle_s)
            self._woken = False
            return not self._closing

    def _step(self) -> float | None:
        """Run one step. Return how long the engine may sleep before the next."""
        now_s = self._clock()
        self._read_inbox(now_s)
        self._end_transfers(self._copies.poll(), now_s)
        step = self._scheduler.schedule(now_s)  # offload: match and commit are in here
        plan = self._offload.plan_step(step.progress(), now_s)  # offload: every step, also an empty one
        self._planned = {job.job_id: job for job in plan.jobs}
        for job in plan.stores_ahead:  # offload: stores that read what this step overwrites
            self._copies.submit_ahead(job)
            self._planned.pop(job.job_id, None)
        self._submit(plan.loads)  # offload: loads go before the compute that hides them
        if step.chunks:
            self._compute(list(step.chunks.values()), plan)
            return 0.0
        self._submit(plan.stores)
        return RECHECK_S if self._scheduler.requests() or self._offload.has_open_work() else None

    def _compute(self, chunks: Sequence[Chunk], plan: StepPlan) -> None:
        try:
            tokens = self._runner.run(chunks)
        except Exception as error:  # noqa: BLE001 - a failed forward pass ends its requests, not the engine
            self._record_failed_step("the forward pass, whose requests end with an error", error)
            self._fail([chunk.request for chunk in chunks], error)
            self._fail_planned(error)
            return
        self.num_failed_steps = 0
        self._submit(plan.stores)  # offload: stores go after the compute that fills their blocks
        ended_s = self._clock()
        for chunk, token in zip(chunks, tokens, strict=True):
            try:
                self._advance(chunk, token, ended_s)
            except Exception as error:  # noqa: BLE001 - this request alone ends with an error
                self.errors.record("a request, which ends with an error", error)
                self._fail([chunk.request], error)

    def _advance(self, chunk: Chunk, token: int | None, now_s: float) -> None:
        """Record the computed tokens of one request, and send its next token to the client."""
        self._scheduler.advance(chunk)
        if token is None:
            return
        delta = chunk.request.append(token, token in self._eos_token_ids)
        if delta.finish_reason is not None:
            self._finish(chunk.request, now_s)
        chunk.request.send(delta)

    def _submit(self, jobs: Iterable[TransferJob]) -> None:
        """Submit jobs to the copy engine, which reports refused ones as failed."""
        for job in jobs:
            self._copies.submit(job)
            self._planned.pop(job.job_id, None)

    def _end_transfers(self, results: Sequence[TransferResult], now_s: float) -> None:
        """offload: report results every step, and resume the requests whose loads have ended."""
        for outcome in self._offload.on_transfers_finished(results, now_s):
            self._scheduler.end_load(outcome)

    # ---- new and ended requests --------------------------------------------------------------------------------------

    def _read_inbox(self, now_s: float) -> None:
        """End canceled requests and announce new ones, in turns, up to the limits of a step."""
        with self._condition:
            canceled: dict[Request, None] = {}
            while self._canceled and len(canceled) < MAX_MESSAGES:
                # A request whose client is gone is canceled more than once, perhaps after its end.
                request = self._canceled.popleft()
                if self._arriving.get(request.request_id) is request or self._scheduler.is_live(request):
                    canceled[request] = None
            unknown = [request for request in canceled if self._arriving.get(request.request_id) is request]
            for request in unknown:
                del self._arriving[request.request_id]
            new = self._take_arriving()
        for request in unknown:
            self._end_unknown(request, FinishReason.ABORT)
        for request in canceled:
            if self._scheduler.is_live(request):
                self._end(request, FinishReason.ABORT)
        for request in new:
            self._announce(request, now_s)

    def _take_arriving(self) -> list[Request]:
        taken: list[Request] = []
        num_tokens = 0
        while self._arriving and len(taken) < MAX_MESSAGES and num_tokens < MAX_NEW_TOKENS:
            _, request = self._arriving.popitem(last=False)
            num_tokens += request.num_prompt_tokens
            taken.append(request)
        return taken

    def _announce(self, request: Request, now_s: float) -> None:
        try:
            self._offload.on_new_request(request, now_s)  # offload: before anything else about this request
        except Exception as error:  # noqa: BLE001 - only this request is affected
            self.errors.record("announcing a request", error)
            self._end_unknown(request, FinishReason.ERROR, _public(error))
            return
        self._scheduler.add(request)

    def _end_unknown(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request that offload does not know."""
        self._on_ended(request.request_id)
        request.send(request.end(reason, error))

    def _finish(self, request: Request, now_s: float) -> None:
        """offload: call on_request_finished once, before the blocks are freed (in `StepScheduler.finish`)."""
        try:
            self._scheduler.finish(request, now_s)
        finally:
            self._on_ended(request.request_id)

    def _record_failed_step(self, where: str, error: Exception) -> None:
        self.errors.record(where, error)
        self.failed_s = self._timer()
        self.num_failed_steps += 1

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End requests with an error. offload: on_step_failed first, because their blocks were not computed."""
        try:
            self._offload.on_step_failed([request.request_id for request in requests], self._clock())
        except Exception as another:  # noqa: BLE001 - the requests must end
            self.errors.record("reporting a failed step", another)
        for request in requests:
            self._end(request, FinishReason.ERROR, _public(error))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request early: its client receives the end, whatever fails."""
        try:
            self._finish(request, self._clock())
        except Exception as another:  # noqa: BLE001 - the other requests must end, and go on
            self.errors.record("finishing a request that ends early", another)
        request.send(request.end(reason, error))

    def _fail_planned(self, error: Exception) -> None:
        """offload: end every planned job, also those that the failed step did not submit."""
        planned, self._planned = self._planned, {}
        failed = [TransferResult(job_id, error=f"never submitted: {error}") for job_id in planned]
        try:
            self._end_transfers(failed, self._clock())
        except Exception as another:  # noqa: BLE001 - the engine must continue to serve
            self.errors.record("ending planned jobs", another)

    def _drain(self) -> None:
        """Abort all requests and wait, within `close`'s time, until no transfer accesses a block."""
        pool = self._scheduler.pool
        try:
            with self._condition:
                unknown = list(self._arriving.values())
            for request in unknown:
                self._end_unknown(request, FinishReason.ABORT)
            for request in self._scheduler.requests():
                self._end(request, FinishReason.ABORT)
            while True:
                now_s = self._clock()
                self._end_transfers(self._copies.poll(), now_s)
                plan = self._offload.plan_step([], now_s)
                self._submit(plan.jobs)
                if not pool.num_held:
                    return
                if time.monotonic() >= self._close_deadline_s:
                    log.warning("closed with device blocks still under transfer: %d", pool.num_held)
                    return
                with self._condition:
                    self._condition.wait_for(lambda: self._woken, RECHECK_S)
                    self._woken = False
        except Exception as error:  # noqa: BLE001 - closing must complete
            self.errors.record("closing the engine", error)


def _public(error: Exception) -> str:
    """Return the part of an internal error that a client may see."""
    return f"engine error while processing this request ({type(error).__name__}); see the engine's log"
