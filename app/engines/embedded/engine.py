"""The engine as others see it: a model with its KV cache, a door for requests, and a place to attach offload.

To attach a copy engine and an `OffloadScheduler`: build them over `engine.cache.block_bytes` and `engine.pool` (the
`DeviceView`), give the copy engine `engine.wake` to call when a job has ended, and `attach` both before `start`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvferry.app.engines.embedded.admission import Admission, Call
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.check import inspect_model
from kvferry.app.engines.embedded.config import EngineConfig
from kvferry.app.engines.embedded.kv_cache import PagedKVCache, check_fits
from kvferry.app.engines.embedded.loop import CanceledRequest, EngineLoop, EngineStoppedError, NewRequest
from kvferry.app.engines.embedded.model import TINY, load_model
from kvferry.app.engines.embedded.offload import NoCopies, NoOffload, Offload
from kvferry.app.engines.embedded.request import Request, Sampling
from kvferry.app.engines.embedded.runner import ModelRunner
from kvferry.app.engines.embedded.scheduler import StepScheduler
from kvferry.app.engines.embedded.stream import RequestStream
from kvferry.core.policy import bounded_repr
from kvferry.cuda_ops.copy.engine import CopyEngine

log = logging.getLogger(__name__)


HUNG_STEP_S = 10.0
"""A step that takes longer is a reason not to be ready."""


class EngineBusyError(RuntimeError):
    """As many requests wait as may: a client should try again later."""


class InvalidRequestError(ValueError):
    """A request that can never be served; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. `block_bytes` is one block on the device, `kv_bytes` all of them."""

    name: str
    model: str
    revision: str | None
    device: str
    dtype: str
    block_size: int
    block_bytes: int
    device_blocks: int
    kv_bytes: int
    num_layers: int
    vocab_size: int
    context_tokens: int

    @property
    def served_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together: the model's context, as far as the device holds it."""
        return min(self.context_tokens, self.device_blocks * self.block_size)


class EmbeddedEngine:
    """Loads the model and allocates its KV when made; serves from `start` to `close`."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.time) -> None:
        """Raises `EngineStartError` for what cannot be served. `clock` gives Unix time in seconds."""
        self.config = config
        self.model = load_model(config.model, config.device, config.dtype, config.state_dir)
        shape = inspect_model(self.model)
        kv_bytes = check_fits(shape, config.device_blocks, config.block_size, self.model.device)
        self.info = EngineInfo(
            name="embedded",
            model=config.model,
            revision=self.model.revision,
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            block_size=config.block_size,
            block_bytes=shape.block_bytes(config.block_size),
            device_blocks=config.device_blocks,
            kv_bytes=kv_bytes,
            num_layers=shape.num_layers,
            vocab_size=self.model.vocab_size,
            context_tokens=self.model.context_tokens,
        )
        _log_start(self.info)
        self.cache = PagedKVCache(shape, config.device_blocks, config.block_size, self.model.device)
        self.pool = BlockPool(config.device_blocks)
        self._clock = clock
        self._live_lock = threading.Lock()
        self._live: dict[str, Request] = {}
        self.admission = Admission(config.max_running, config.max_wait_s)
        self._loop = self._make_loop(NoOffload(), NoCopies())

    # ---- what wires and watches it ----------------------------------------------------------------------------------

    def attach(self, offload: Offload, copies: CopyEngine) -> None:
        """Attach an offload scheduler and its copy engine, before `start`."""
        if self._loop.is_started():
            raise RuntimeError("offload must be attached before the engine starts")
        self._loop = self._make_loop(offload, copies)

    def start(self) -> None:
        """Start the engine's thread."""
        if self._loop.is_started():
            raise RuntimeError("the engine was started before")
        self._loop.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Take no more requests, abort those that run, wait a bounded time for their transfers, and stop."""
        self._loop.close(timeout_s)

    def wake(self) -> None:
        """Have an idle engine take a step, since a job has ended or an operator has left work. Any thread."""
        self._loop.wake()

    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._loop.is_alive()

    def reasons(self) -> list[str]:
        """Why this engine should get no traffic: a dead thread, or a step that hangs. Thread: any."""
        if not self.is_alive():
            return [f"the engine's thread does not run; its last error: {self.last_error}"]
        started_s = self._loop.step_started_s
        step_s = 0.0 if started_s is None else self._clock() - started_s
        return [f"an engine step has been under way for {step_s:.0f} s"] if step_s > HUNG_STEP_S else []

    @property
    def last_error(self) -> str | None:
        """The latest error that the engine survived."""
        return self._loop.last_error

    @property
    def thread_cpu_s(self) -> float:
        """CPU time of the engine's thread, up to its last step."""
        return self._loop.thread_cpu_s

    # ---- what clients call ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        aliases: Sequence[str] = (),
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Queue a request; its answer comes out of the stream. Call in the event loop that will read it.

        An id that is in use gets a suffix, and stays an alias. Raises `InvalidRequestError` for what can never be
        served, `EngineBusyError` and `EngineStoppedError`.
        """
        request = self.prepare(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            aliases=aliases,
            cache_salt=cache_salt,
            kv_transfer_params=kv_transfer_params,
            priority=priority,
        )
        return self.submit_all([request])[0]

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        aliases: Sequence[str] = (),
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Request:
        """Make a request for `submit_all`, in time that grows with the prompt. Thread: any.

        Raises `InvalidRequestError` for what can never be served.
        """
        limit_tokens = self.check(prompt_token_ids, sampling)
        return Request(
            request_id or secrets.token_hex(16),
            prompt_token_ids,
            replace(sampling, max_tokens=min(sampling.max_tokens, limit_tokens - len(prompt_token_ids))),
            self.model.tokenizer.stream(),
            self.config.block_size,
            aliases=aliases,
            cache_salt=cache_salt,
            kv_transfer_params=kv_transfer_params,
            priority=priority,
        )

    def submit_all(self, requests: Sequence[Request], call: Call | None = None) -> list[RequestStream]:
        """Queue prepared requests, all or none, in the event loop that will read their streams.

        `call` is what `admission` counted for them; it ends with the last of them.

        Raises `EngineBusyError` where more would wait than may, `InvalidRequestError` where that is so even of an idle
        engine, and `EngineStoppedError`.
        """
        self._reserve(requests)
        streams = []
        for number, request in enumerate(requests):
            request.number_in_call = number
            request.call = call
            stream = RequestStream(request.request_id, partial(self._cancel, request))
            request.sink = stream.push
            streams.append(stream)
        if call is not None:
            call.num_open = len(requests)
        try:
            self._loop.post(*map(NewRequest, requests))
        except BaseException:
            for request in requests:
                self._release_id(request.request_id)
            raise
        return streams

    def has_room(self) -> bool:
        """Whether another request would be taken now. Thread: any."""
        return self.num_live < self.config.max_running + self.config.max_waiting

    def retry_after_s(self, client: str) -> int | None:
        """Return after how many seconds a client address should call again; None where it may now. Thread: any."""
        return self.admission.retry_after_s(client) if self.has_room() else 1

    @property
    def num_live(self) -> int:
        """Requests that were accepted and have not ended. Thread: any."""
        return len(self._live)

    def cancel(self, request_id: str) -> None:
        """Stop a request wherever it is; an unknown or ended one is no error. Any thread."""
        with self._live_lock:
            request = self._live.get(request_id)
        if request is not None:
            self._cancel(request)

    def abort_all(self) -> None:
        """Stop every request. Any thread."""
        with self._live_lock:
            requests = list(self._live.values())
        for request in requests:
            self._cancel(request)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Tokens that prompt and answer may have together. Raises `InvalidRequestError` where that is too few."""
        if not prompt:
            raise InvalidRequestError("prompt is empty: send at least one token", "prompt")
        pool_tokens = self.config.device_blocks * self.config.block_size
        for limit_tokens, what in (
            (self.model.context_tokens, "the model's context"),
            (pool_tokens, f"the device's KV cache (KVFERRY_DEVICE_BLOCKS={self.config.device_blocks})"),
        ):
            if len(prompt) >= limit_tokens:
                raise InvalidRequestError(
                    f"prompt has {len(prompt)} tokens, and {what} holds {limit_tokens}, one of them for the answer",
                    "prompt",
                )
        if not 0 <= min(prompt) <= max(prompt) < self.model.vocab_size:
            outside = next(token for token in prompt if not 0 <= token < self.model.vocab_size)
            raise InvalidRequestError(
                f"prompt has token id {bounded_repr(outside)}, and the vocabulary is 0 to {self.model.vocab_size - 1}",
                "prompt",
            )
        if sampling.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens is {bounded_repr(sampling.max_tokens)}, and must be at least 1", "max_tokens"
            )
        return self.info.served_tokens

    def _cancel(self, request: Request) -> None:
        try:
            self._loop.post(CanceledRequest(request))
        except EngineStoppedError:
            log.debug("request %s ends with the engine", request.request_id)

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Count these requests and give each an id of its own, all or none.

        Live requests are those in the inbox, waiting, loading and running.
        """
        limit = self.config.max_running + self.config.max_waiting
        setting = f"KVFERRY_MAX_WAITING={self.config.max_waiting}"
        if len(requests) > limit:
            raise InvalidRequestError(f"prompt has {len(requests)} prompts, more than {setting} accepts", "prompt")
        with self._live_lock:
            if len(self._live) + len(requests) > limit:
                raise EngineBusyError(f"too many requests are waiting ({setting}); try again later")
            for request in requests:
                unique_id = request.request_id
                while unique_id in self._live:
                    unique_id = f"{request.request_id}-{secrets.token_hex(4)}"
                if unique_id != request.request_id:
                    request.rename(unique_id)
                self._live[unique_id] = request

    def _release_id(self, request_id: str) -> None:
        with self._live_lock:
            request = self._live.pop(request_id, None)
        if request is not None:
            self.admission.end_request(request.call, has_run=request.num_output_tokens > 0)

    def _make_loop(self, offload: Offload, copies: CopyEngine) -> EngineLoop:
        config = self.config
        scheduler = StepScheduler(self.pool, offload, config.block_size, config.max_batched_tokens, config.max_running)
        runner = ModelRunner(self.model, self.cache)
        return EngineLoop(scheduler, runner, copies, self.model.eos_token_ids, self._release_id, self._clock)


def _log_start(info: EngineInfo) -> None:
    log.info(
        "model %s%s on %s in %s: %d device blocks of %d tokens, %s bytes each, %s bytes in all",
        info.model,
        ", which is UNTRAINED and answers noise," if info.model == TINY else "",
        info.device,
        info.dtype,
        info.device_blocks,
        info.block_size,
        f"{info.block_bytes:,}",
        f"{info.kv_bytes:,}",
    )
