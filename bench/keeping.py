"""Cost of journal and checksums on the serving path: the same traffic with and without them.

All engines are in this process, and asked in turns, in an order that changes: `bare`, which has the same pool in shared
memory but neither journal, headers nor checksums; the same once more, as a control of what is noise; one with the
journal alone; and one with all that a service with a kept pool has. The traffic is the hardest there is for them: no
prompt has anything in common with another and the pool is full, so that each block is stored and another leaves for it.

Besides the wall time until the last token, the CPU time of the engine's thread is compared, which others on the machine
disturb less, and that of the process until all is stored, sealed and written.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.report import median_interval, spread, verdict
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.model import TINY
from kvferry.app.engines.embedded.request import SamplingParams
from kvferry.app.settings import Settings
from kvferry.app.store import MetadataStore
from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.events import EventSink
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from kvferry.cuda_ops.persistent.sealing import KeptCopies
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.waiting import wait_until

GOAL = 1.01
BLOCK_TOKENS = 16
STREAMS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 32
POOL_SLOTS = 256
DEVICE_BLOCKS = 256
SETTLE_S = 120.0
SEED = 11
LAYERS = 8

BARE, AGAIN, JOURNAL, ALL = "bare", "bare again", "journal", "journal and checksums"


def save_llama(folder: Path, hidden: int) -> None:
    """Save a random Llama without a tokenizer; `hidden` must be a multiple of 64."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_model(hidden: int, folder: Path) -> tuple[str, str]:
    """Return the name of a model and what tables call it: a random Llama of this hidden size, or `tiny` if it is 0."""
    if not hidden:
        return TINY, TINY
    model = folder / "model"
    save_llama(model, hidden)
    return str(model), f"Llama, 8 layers of {hidden}"


@dataclass(frozen=True)
class Taken:
    """Times of one round of an arm."""

    wall_s: float
    engine_cpu_s: float
    process_cpu_s: float


class Arm:
    """An engine with its pool. It is idle except between `begin` and `settle`."""

    def __init__(
        self, model: str, name: str, memory: Path, folder: Path, closers: ExitStack, sink: EventSink | None = None
    ) -> None:
        """Start the engine; `sink` receives the events of an arm without a journal."""
        engine = EmbeddedEngine(Settings.model_construct(model=model, device="cpu", device_blocks=DEVICE_BLOCKS))
        block_bytes = engine.block_bytes
        shape = PoolShape(POOL_SLOTS, block_bytes, 1, POOL_SLOTS)
        file = KeptFile(memory / f"{name}.pool", shape, {"model": "bench"})
        pool = HostPool(POOL_SLOTS, block_bytes, POOL_SLOTS * block_bytes, backing=file)
        self.store = MetadataStore(f"sqlite:///{folder / name}.db", "bench", "shm") if name in (JOURNAL, ALL) else None
        writer = HeaderWriter(file) if name == ALL else None
        headers = SlotHeaders(file, pool)
        self.manager = OffloadManager(
            POOL_SLOTS,
            block_bytes,
            sink=sink if self.store is None else self.store.journal.append,
            header_queue=writer,
        )
        self.scheduler = OffloadScheduler(
            self.manager,
            PolicyResolver(RequestPolicy(), {}, self.manager.lock),
            engine.block_pool,
            GroupLayout([GroupSpec(BLOCK_TOKENS, block_bytes)]),
            cost_model=LoadOrCompute(LoadDecision.ALWAYS),
        )
        copies: CopyEngine = CpuCopyEngine(
            DeviceLayout.of_tensors([[engine.cache.blocks]]),
            pool,
            engine.wake,
            before=headers.before_copy if name == ALL else None,
        )
        self._kept: KeptCopies | None = None
        if name == ALL:
            copies = self._kept = KeptCopies(copies, headers, engine.wake)
        self.engine = engine
        engine.attach(self.scheduler, copies)
        engine.start()
        self._engine_clock = time.pthread_getcpuclockid(engine._thread.ident or 0)
        for close in (file.close, pool.close, copies.close, engine.close):
            closers.callback(close)
        if writer is not None:
            writer.start()
            closers.callback(writer.close)
        if self.store is not None:
            closers.callback(self.store.close, SETTLE_S)

    def timed(self, prompts: Sequence[Sequence[int]]) -> Taken:
        """Answer all prompts with bounded concurrency, until all blocks are stored and written."""
        if self.store is not None:
            self.store.start(Inventory(self.manager))
        process_s, engine_s, started_s = time.process_time(), self._engine_cpu_s(), time.perf_counter()
        asyncio.run(self._answer(prompts))
        wall_s = time.perf_counter() - started_s
        wait_until(self._is_settled, "all stored and sealed", SETTLE_S)
        # The engine thread ends here, because its polling would slow down the other arms.
        if self.store is not None and not self.store.journal.close(SETTLE_S):
            raise SystemExit("the journal did not write all rows")
        return Taken(wall_s, self._engine_cpu_s() - engine_s, time.process_time() - process_s)

    async def _answer(self, prompts: Sequence[Sequence[int]]) -> None:
        turns = asyncio.Semaphore(STREAMS)
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

        async def one(prompt: Sequence[int]) -> None:
            async with turns:
                async for _ in self.engine.submit(prompt, sampling):
                    pass

        await asyncio.gather(*map(one, prompts))

    def _engine_cpu_s(self) -> float:
        """Return the CPU time of the engine thread."""
        return time.clock_gettime(self._engine_clock)

    def _is_settled(self) -> bool:
        snapshot = self.scheduler.snapshot()
        unsealed = 0 if self._kept is None else self._kept.num_unsealed
        return not (snapshot.requests.running or snapshot.open_jobs or unsealed or self.scheduler.has_open_work())


def measure_keeping(pairs: int, round_s: float, widths: Sequence[int]) -> None:
    """Compare all arms, in rounds of about `round_s` seconds, under random Llamas of these hidden sizes.

    0 is `tiny`, whose steps are all interpreter, and so the hardest.
    """
    for hidden in widths:
        with ExitStack() as closers:
            memory = Path(closers.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
            folder = Path(closers.enter_context(tempfile.TemporaryDirectory()))
            model, title = make_model(hidden, folder)
            arms = {name: Arm(model, name, memory, folder, closers) for name in (BARE, AGAIN, JOURNAL, ALL)}
            _compare(title, arms, pairs, round_s)


def _compare(model: str, arms: Mapping[str, Arm], pairs: int, round_s: float) -> None:
    rng = random.Random(SEED)

    def fresh(count: int) -> list[list[int]]:
        return [[rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    filling = fresh(2 * POOL_SLOTS * BLOCK_TOKENS // PROMPT_TOKENS)
    for arm in arms.values():
        arm.timed(filling)
    per_prompt_s = arms[BARE].timed(filling).wall_s / len(filling)
    num_prompts = max(STREAMS, round(round_s / per_prompt_s / STREAMS) * STREAMS)
    before = arms[ALL].scheduler.snapshot()
    times: dict[str, list[Taken]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(pairs):
        prompts = fresh(num_prompts)
        at = number % len(names)
        for name in (*names[at:], *names[:at]):
            times[name].append(arms[name].timed(prompts))
    after = arms[ALL].scheduler.snapshot()
    stored = (after.store.stored - before.store.stored) / pairs
    evicted = (after.evictions.total - before.evictions.total) / pairs
    print(
        f"\n{model}: {pairs} rounds of {num_prompts} prompts of {PROMPT_TOKENS} tokens, {STREAMS} at a time, "
        f"{OUTPUT_TOKENS} tokens each; {stored:.0f} blocks stored and {evicted:.0f} evicted a round"
    )
    _show(times)


def _show(times: Mapping[str, Sequence[Taken]]) -> None:
    columns: tuple[tuple[str, Callable[[Taken], float], bool], ...] = (
        ("wall", lambda taken: taken.wall_s, True),
        ("engine's thread, CPU", lambda taken: taken.engine_cpu_s, True),
        # CPU time of other threads has no goal, as long as the two above are unaffected.
        ("process, CPU", lambda taken: taken.process_cpu_s, False),
    )
    print(f"| arm | time | s | ratio to {BARE} | 95% interval | at most {GOAL} |")
    print("| --- | --- | --- | ---: | --- | --- |")
    for name, taken in times.items():
        for what, of, is_judged in columns:
            cells = [name, what, spread(list(map(of, taken))), "", "", ""]
            if name != BARE:
                ratios = [of(mine) / of(bare) for mine, bare in zip(taken, times[BARE], strict=True)]
                low, high = median_interval(ratios)
                judged = verdict(ratios, GOAL) if is_judged else ""
                cells[3:] = [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}", judged]
            print(f"| {' | '.join(cells)} |", flush=True)
