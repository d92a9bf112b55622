"""vLLM in this very process, with or without kvferry, for tests that look inside and decide when a step is taken."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.engines.vllm.connector import KVFerryConnector
from kvferry.app.engines.vllm.copies import RankCopies
from kvferry.app.engines.vllm.scheduler import ConnectorScheduler
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.stats import Snapshot
from tests.harness.waiting import wait_until
from tests.vllm.workload import BLOCK, Answer, Prompt
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

DEVICE_BLOCKS = 72
POOL_BYTES = "128MiB"


def transfer_config(**extra: object) -> dict[str, Any]:
    """What the connector's users write."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool_bytes": POOL_BYTES, "port": 0, "store_mode": "eager", **extra},
    }


def engine_options(model: Path, **options: object) -> dict[str, Any]:
    """A small engine whose device cache is soon full."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": BLOCK,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "disable_log_stats": False,
        **options,
    }


class InProcess:
    """An engine, and kvferry's connectors in it if it has them."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.vllm_scheduler = self.engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> KVFerryConnector:
        """The connector of the scheduler."""
        found: KVFerryConnector = self.vllm_scheduler.connector
        return found

    @property
    def scheduler(self) -> ConnectorScheduler:
        return self.connector._the_scheduler()

    @property
    def core(self) -> OffloadScheduler:
        return self.connector._the_core().service.scheduler

    @property
    def copies(self) -> RankCopies:
        """The copy engine of the worker."""
        worker = get_kv_transfer_group()._the_worker()
        assert isinstance(worker._copies, RankCopies)
        return worker._copies

    @property
    def pool(self) -> Any:
        """vLLM's own blocks."""
        return self.vllm_scheduler.kv_cache_manager.block_pool

    def snapshot(self) -> Snapshot:
        return self.core.snapshot()

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 8,
        params: Mapping[str, object] | None = None,
        cache_salt: str | None = None,
    ) -> list[Answer]:
        """Greedy answers. `params` is what a client sends as kv_transfer_params."""
        sampling = self.sampling(max_tokens, params)
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for one in asked:
            one.update({} if cache_salt is None else {"cache_salt": cache_salt})
        return [_answer(output) for output in self.llm.generate(asked, sampling, use_tqdm=False)]

    def sampling(self, max_tokens: int, params: Mapping[str, object] | None = None) -> SamplingParams:
        extra = None if params is None else {"kv_transfer_params": dict(params)}
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2, extra_args=extra
        )

    def add(self, request_id: str, prompt: Prompt, max_tokens: int = 8) -> None:
        """Queue a request; it is worked on by `step`."""
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, self.sampling(max_tokens))

    def step(self) -> list[tuple[str, Answer]]:
        """One step; the requests it ended, by the ids they were added with."""
        return [(output.request_id, _answer(output)) for output in self.engine.step() if output.finished]

    def settle(self) -> Snapshot:
        """Take steps until no transfer is open."""
        wait_until(lambda: (self.step(), not self.scheduler.has_open_work())[1], "every transfer has ended")
        return self.snapshot()

    def forget_device(self) -> None:
        """Empty vLLM's own cache, so that everything has to come from the pool."""
        self.settle()
        assert self.vllm_scheduler.reset_prefix_cache()

    def metric(self, name: str) -> float:
        """A counter of vLLM's."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)


@contextmanager
def in_process(model: Path, transfer: Mapping[str, object] | None = None, **options: object) -> Iterator[InProcess]:
    """An engine for as long as this lasts; with kvferry where there is a transfer configuration."""
    extra = {} if transfer is None else {"kv_transfer_config": dict(transfer)}
    with hidden_llvmlite(), collecting_once(), closed_if_not_started():
        llm = LLM(**engine_options(model, **options), **extra)
    try:
        yield InProcess(llm)
    finally:
        with collecting_once():
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextmanager
def closed_if_not_started() -> Iterator[None]:
    """An engine that does not start leaves nothing behind: vLLM would give the worker's connector to the next engine of
    this process, and that of the scheduler would go on writing kvferry's log."""
    create, made = KVConnectorFactory.create_connector, []

    def recorded(*args: Any, **options: Any) -> Any:
        made.append(create(*args, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVConnectorFactory, "create_connector", recorded)
        try:
            yield
        except BaseException:
            for connector in made:
                connector.shutdown()
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise


@contextmanager
def collecting_once() -> Iterator[None]:
    """Garbage is collected at the end of this, once. An engine that starts and stops asks for it nine times, each of
    which looks at everything that was imported: most of the time that a small engine takes."""
    collect, gc.collect = gc.collect, lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect
        gc.collect()


@contextmanager
def hidden_llvmlite() -> Iterator[None]:
    """Hide `llvmlite.binding.ffi`, at whose `lib` vLLM's CPU backend fails when it inspects every loaded module (0.47).

    An engine alone in its process is not concerned: llvmlite is loaded later there. No other module may be hidden:
    a compilation in between would import it twice, and Numba compares its types by identity.
    """
    module = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules["llvmlite.binding.ffi"] = module


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    gaps = []
    for at in completion.logprobs or ():
        best = sorted((entry.logprob for entry in at.values()), reverse=True)
        gaps.append(best[0] - best[1])
    return Answer(tuple(completion.token_ids), tuple(gaps), output.num_cached_tokens or 0)
