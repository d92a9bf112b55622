"""Facade of the embedded engine: the model with its KV cache, request submission, and attachment of offloading.

To attach offloading, create a copy engine and an `OffloadScheduler` over `engine.cache.block_bytes` and `engine.pool`
(the `DeviceView`), make the copy engine call `engine.wake` when a job has ended, and `attach` both before `start`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.app.api.errors import Problem, bad_request, too_long
from kvferry.app.engines.embedded.attention import PagedKVCache, check_fits
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.loop import EngineLoop
from kvferry.app.engines.embedded.model import TINY, inspect_model, load_model
from kvferry.app.engines.embedded.offload import Offload
from kvferry.app.engines.embedded.request import ClientOptions, Request, RequestStream, Sampling
from kvferry.app.engines.embedded.runner import ModelRunner
from kvferry.app.engines.embedded.scheduler import StepScheduler
from kvferry.app.settings import Settings
from kvferry.core.policy import bounded_repr
from kvferry.cuda_ops.copy.engine import CopyEngine

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import TracedCall

log = logging.getLogger(__name__)


HUNG_STEP_S = 10.0
"""A longer step makes the engine not ready."""
FAILED_STEPS = 3
FAILED_STEPS_S = 600.0
"""So many failed steps in a row make the engine not ready, for so long after the last: a router that sends no requests
to it would never see one succeed."""


class EmbeddedEngine:
    """Loads the model and allocates its KV when created; serves from `start` to `close`."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model. Raises `StartError` if it cannot be served.

        `clock` returns Unix time in seconds, and `timer` seconds that never jump.
        """
        self.settings = settings
        # If nothing outlives the process, the files of a local model need not be read.
        state_dir = settings.state_dir if settings.has_lasting_blocks else None
        self.model = load_model(settings.model, settings.device, settings.dtype, state_dir)
        shape = inspect_model(self.model)
        check_fits(shape, settings.device_blocks, settings.block_size, self.model.device)
        self.block_bytes = shape.block_bytes(settings.block_size)
        self._log_start()
        self.cache = PagedKVCache(shape, settings.device_blocks, settings.block_size, self.model.device)
        self.pool = BlockPool(settings.device_blocks)
        self._clock = clock
        self._timer = timer
        self._live_lock = threading.Lock()
        self._live: dict[str, Request] = {}
        self._loop: EngineLoop | None = None

    # ---- wiring and supervision --------------------------------------------------------------------------------------

    def attach(self, offload: Offload, copies: CopyEngine) -> None:
        """Attach an offload scheduler and its copy engine, before `start`."""
        if self._loop is not None and self._loop.is_started():
            raise RuntimeError("offload must be attached before the engine starts")
        settings = self.settings
        max_tokens, max_running = settings.max_batched_tokens, settings.max_running
        scheduler = StepScheduler(self.pool, offload, settings.block_size, max_tokens, max_running)
        runner = ModelRunner(self.model, self.cache)
        eos_token_ids = self.model.eos_token_ids
        self._loop = EngineLoop(scheduler, runner, copies, eos_token_ids, self._release_id, self._clock, self._timer)

    def start(self) -> None:
        """Start the engine thread."""
        if self._attached.is_started():
            raise RuntimeError("engine was started already")
        self._attached.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new requests, abort running ones, wait a bounded time for their transfers, and stop."""
        self._attached.close(timeout_s)

    def wake(self) -> None:
        """Make an idle engine take a step, because a job has ended or admin work is pending. Any thread."""
        if self._loop is not None:
            self._loop.wake()

    def is_alive(self) -> bool:
        """Return whether the engine thread runs."""
        return self._loop is not None and self._loop.is_alive()

    def reasons(self) -> list[str]:
        """Return why this engine should get no traffic: a dead thread, a step that hangs, failing steps. Any thread."""
        if not self.is_alive():
            return [f"engine thread not running; last error: {self.last_error}"]
        loop, now_s, found = self._attached, self._timer(), []
        started_s = loop.step_started_s
        step_s = 0.0 if started_s is None else now_s - started_s
        if step_s > HUNG_STEP_S:
            found.append(f"engine step has been running for {step_s:.0f} s")
        if loop.num_failed_steps >= FAILED_STEPS and now_s - loop.failed_s < FAILED_STEPS_S:
            found.append(f"the last {loop.num_failed_steps} engine steps failed; last error: {self.last_error}")
        return found

    @property
    def last_error(self) -> str | None:
        """Return the latest error that the engine survived."""
        return self._attached.errors.last

    @property
    def thread_cpu_s(self) -> float:
        """Return the CPU time of the engine thread, up to its last step."""
        return self._attached.thread_cpu_s

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt_token_ids: Sequence[int], sampling: Sampling, **more: Any) -> RequestStream:
        """Queue a request, with more arguments of `prepare`, and return the stream of its answer."""
        return self.submit_all([self.prepare(prompt_token_ids, sampling, **more)])[0]

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        aliases: Sequence[str] = (),
        options: ClientOptions | None = None,
    ) -> Request:
        """Create a request for `submit_all`, in time proportional to the prompt. Any thread.

        An id that is in use when the request is submitted gets a suffix and stays an alias.

        Raises:
            Problem: a 400, because the request can never be served.
        """
        limit_tokens = self.check(prompt_token_ids, sampling)
        return Request(
            request_id or secrets.token_hex(16),
            prompt_token_ids,
            replace(sampling, max_tokens=min(sampling.max_tokens, limit_tokens - len(prompt_token_ids))),
            self.model.tokenizer.stream(),
            self.settings.block_size,
            aliases,
            options,
        )

    def submit_all(self, requests: Sequence[Request], trace: TracedCall | None = None) -> list[RequestStream]:
        """Queue prepared requests, all or none. Must be called in the event loop that reads their streams.

        Args:
            requests: the requests.
            trace: of their call, if it is sampled.

        Raises:
            Problem: a 503 if the engine does not run.
        """
        self._reserve_ids(requests)
        streams = []
        for request in requests:
            request.trace = None if trace is None else trace.request()
            stream = RequestStream(request.request_id, partial(self._cancel, request))
            request.sink = stream.push
            streams.append(stream)
        try:
            self._attached.post(*requests)
        except BaseException:
            for request in requests:
                self._release_id(request.request_id)
            raise
        return streams

    @property
    def served_tokens(self) -> int:
        """Return the most tokens of a prompt with its answer: the model's context, limited by the device's blocks."""
        return min(self.model.context_tokens, self.settings.device_blocks * self.settings.block_size)

    @property
    def answer_tokens(self) -> int:
        """Return the most tokens of a chat's answer when the call sets no limit."""
        return min(self.model.answer_tokens or self.served_tokens, self.served_tokens)

    @property
    def num_live(self) -> int:
        """Return the number of accepted requests that have not ended. Any thread."""
        return len(self._live)

    def abort_all(self) -> None:
        """Stop all requests. Any thread."""
        with self._live_lock:
            requests = list(self._live.values())
        for request in requests:
            self._cancel(request)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Return how many tokens prompt and answer may have together.

        Raises:
            Problem: a 400, because not even one token of an answer fits, or an argument is invalid.
        """
        if not prompt:
            raise bad_request("prompt is empty: send at least one token", "prompt")
        pool_tokens = self.settings.device_blocks * self.settings.block_size
        for limit_tokens, what in (
            (self.model.context_tokens, "the model's context"),
            (pool_tokens, f"the device's KV cache (KVFERRY_DEVICE_BLOCKS={self.settings.device_blocks})"),
        ):
            if len(prompt) >= limit_tokens:
                raise too_long(
                    f"prompt has {len(prompt)} tokens, and {what} holds {limit_tokens}, one of them for the answer",
                    "prompt",
                )
        if not 0 <= min(prompt) <= max(prompt) < self.model.vocab_size:
            outside = next(token for token in prompt if not 0 <= token < self.model.vocab_size)
            raise bad_request(
                f"prompt has token id {bounded_repr(outside)}, and the vocabulary is 0 to {self.model.vocab_size - 1}",
                "prompt",
            )
        if sampling.max_tokens < 1:
            raise bad_request(f"max_tokens={bounded_repr(sampling.max_tokens)}: must be at least 1", "max_tokens")
        return self.served_tokens

    @property
    def _attached(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError("no offload scheduler is attached")
        return self._loop

    def _cancel(self, request: Request) -> None:
        try:
            self._attached.post(request, is_new=False)
        except Problem:
            log.debug("request ends with the engine: %s", request.request_id)

    def _reserve_ids(self, requests: Sequence[Request]) -> None:
        """Give each of these requests a unique id. Live ones are in the inbox, waiting, loading and running."""
        with self._live_lock:
            for request in requests:
                unique_id = request.request_id
                while unique_id in self._live:
                    unique_id = f"{request.request_id}-{secrets.token_hex(4)}"
                if unique_id != request.request_id:
                    request.rename(unique_id)
                self._live[unique_id] = request

    def _release_id(self, request_id: str) -> None:
        with self._live_lock:
            self._live.pop(request_id, None)

    def _log_start(self) -> None:
        log.info(
            "model %s%s on %s in %s: %d device blocks of %d tokens, %s bytes each, %s bytes in all",
            self.settings.model,
            ", which is UNTRAINED and answers noise," if self.settings.model == TINY else "",
            self.model.device,
            str(self.model.dtype).removeprefix("torch."),
            self.settings.device_blocks,
            self.settings.block_size,
            f"{self.block_bytes:,}",
            f"{self.settings.device_blocks * self.block_bytes:,}",
        )
