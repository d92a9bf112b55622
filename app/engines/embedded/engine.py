"""Facade of the embedded engine: the model with its KV cache, request submission, and attachment of offloading.

To attach offloading, create a copy engine over `engine.cache.blocks` and an `OffloadScheduler` over
`engine.block_pool` (the `DeviceView`), make the copy engine call `engine.wake` when a job has ended, and `attach` both
before `start`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.app.api.errors import bad_request, too_long
from kvferry.app.engines.embedded.attention import PagedKVCache, check_memory
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.loop import EngineLoop, Inbox
from kvferry.app.engines.embedded.model import TINY, inspect_model, load_model
from kvferry.app.engines.embedded.request import ClientOptions, OutputDelta, Request, SamplingParams
from kvferry.app.engines.embedded.runner import ModelRunner
from kvferry.app.engines.embedded.scheduler import Offload, Scheduler
from kvferry.app.engines.embedded.tokenizer import Detokenizer
from kvferry.app.guard import GuardedCopies
from kvferry.app.settings import Settings
from kvferry.core.policy import bounded_repr
from kvferry.cuda_ops.copy.engine import CopyEngine

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import TracedCall

log = logging.getLogger(__name__)


class OutputStream:
    """Outputs of a call's requests, each with the number of its request in the call, until all requests have ended."""

    def __init__(self, num_requests: int, cancel: Callable[[], None]) -> None:
        """Bind to the running event loop. `cancel` ends the requests early."""
        self.num_requests = num_requests
        self._cancel = cancel
        self._event_loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, OutputDelta]] = asyncio.Queue()
        self._num_running = num_requests

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        while self._num_running:
            index, delta = await self._outputs.get()
            self._num_running -= delta.finish_reason is not None
            yield index, delta

    def cancel(self) -> None:
        """End the requests that still run, because their client is gone."""
        if self._num_running:
            self._cancel()

    def push(self, index: int, delta: OutputDelta) -> None:
        """Add output. Thread: engine."""
        try:
            self._event_loop.call_soon_threadsafe(self._outputs.put_nowait, (index, delta))
        except RuntimeError:  # the event loop is closed
            self._cancel()


class EmbeddedEngine:
    """Loads the model and allocates its KV when created; serves from `start` to `close`.

    Thread: any, except `submit` and `submit_all`: the event loop on which their outputs are read.
    """

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
        check_memory(shape, settings.device_blocks, settings.block_size, self.model.device)
        self.block_bytes = shape.block_bytes(settings.block_size)
        log.info(
            "model %s%s on %s in %s: %d device blocks of %d tokens, %s bytes each, %s bytes in all",
            settings.model,
            ", which is UNTRAINED and answers noise," if settings.model == TINY else "",
            self.model.device,
            str(self.model.dtype).removeprefix("torch."),
            settings.device_blocks,
            settings.block_size,
            f"{self.block_bytes:,}",
            f"{settings.device_blocks * self.block_bytes:,}",
        )
        self.max_model_len = min(self.model.context_tokens, settings.device_blocks * settings.block_size)
        """Most tokens of a prompt with its answer: the model's context, limited by the device's blocks."""
        self.chat_tokens = min(self.model.chat_tokens or self.max_model_len, self.max_model_len)
        """Most tokens of a chat's answer when the call sets no limit."""
        self.cache = PagedKVCache(shape, settings.device_blocks, settings.block_size, self.model.device)
        self.block_pool = BlockPool(settings.device_blocks)
        self.inbox = Inbox()
        self._clock = clock
        self._timer = timer
        # Set by `attach`.
        self._loop: EngineLoop
        self._thread: threading.Thread

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def attach(self, offload: Offload, copies: CopyEngine | GuardedCopies) -> None:
        """Attach an offload scheduler and its copy engine, before `start`."""
        settings = self.settings
        scheduler = Scheduler(
            self.block_pool, offload, settings.block_size, settings.max_batched_tokens, settings.max_running
        )
        runner = ModelRunner(self.model, self.cache)
        self._loop = EngineLoop(self.inbox, scheduler, runner, copies, self._clock, self._timer)
        self._thread = threading.Thread(target=self._loop.run, name="kvferry-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread, once."""
        self.inbox.open()
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new requests, abort running ones, wait a bounded time for their transfers, and stop."""
        self._loop.drain_until_s = time.monotonic() + timeout_s
        self.inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s + 5.0)
            if self._thread.is_alive():
                log.error("engine thread did not stop within %.0f s", timeout_s + 5.0)

    def wake(self) -> None:
        """Make an idle engine take a step, because a job has ended or admin work is pending."""
        self.inbox.wake()

    def is_alive(self) -> bool:
        """Return whether the engine thread runs."""
        return self._thread.is_alive()

    def reasons(self) -> list[str]:
        """Return why this engine should get no traffic: a dead thread, a step that hangs, failing steps."""
        if not self.is_alive():
            return [f"engine thread not running; last error: {self.last_error}"]
        return self._loop.reasons()

    @property
    def last_error(self) -> str | None:
        """Return the latest error that the engine survived."""
        return self._loop.errors.last

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, **more: Any) -> OutputStream:
        """Queue one request, with more arguments of `prepare`, and return the stream of its outputs."""
        return self.submit_all([self.prepare(prompt_token_ids, sampling, **more)])

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        aliases: Sequence[str] = (),
        options: ClientOptions | None = None,
    ) -> Request:
        """Create a request for `submit_all`, in time proportional to the prompt.

        An id that is in use when the request is submitted gets a suffix and stays an alias.

        Raises:
            Problem: a 400, because the request can never be served.
        """
        self._check(prompt_token_ids)
        max_tokens = min(sampling.max_tokens, self.max_model_len - len(prompt_token_ids))
        return Request(
            request_id or secrets.token_hex(16),
            prompt_token_ids,
            replace(sampling, max_tokens=max_tokens),
            Detokenizer(self.model.tokenizer),
            self.settings.block_size,
            aliases,
            options or ClientOptions(),
        )

    def submit_all(self, requests: Sequence[Request], trace: TracedCall | None = None) -> OutputStream:
        """Queue the prepared requests of a call, all or none, and return the stream of their outputs.

        Args:
            requests: the requests.
            trace: of their call, if it is sampled.

        Raises:
            Problem: a 503 if the engine does not run.
        """
        stream = OutputStream(len(requests), partial(self.inbox.cancel, requests))
        for index, request in enumerate(requests):
            request.send = partial(stream.push, index)
            request.trace = None if trace is None else trace.request()
        self.inbox.post(requests)
        return stream

    def abort_all(self) -> None:
        """Stop all requests."""
        self.inbox.cancel(self.inbox.live())

    def _check(self, prompt: Sequence[int]) -> None:
        """Raise the 400 for a prompt that can never be served."""
        if not prompt:
            raise bad_request("prompt is empty: send at least one token", "prompt")
        if len(prompt) >= self.max_model_len:
            raise too_long(
                f"prompt has {len(prompt)} tokens, and the limit is {self.max_model_len}, one of them for the answer: "
                f"the model's context, or what KVFERRY_DEVICE_BLOCKS={self.settings.device_blocks} hold",
                "prompt",
            )
        vocab_size = self.model.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise bad_request(
                f"prompt has token id {bounded_repr(outside)}, and the vocabulary is 0 to {vocab_size - 1}", "prompt"
            )
