"""One torch thread, so that the suites of a small machine do not fight, and an engine that is closed in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.settings import Settings
from tests.harness.checkpoints import save_checkpoints
from tests.harness.embedded import NoCopies, NoOffload, random_prompts, reference_answer, reference_model
from tests.harness.fake_cuda import FakeCuda
from tests.harness.identities import check_identities
from tests.harness.offloading import CudaCopies, MakeOffloaded, Offloaded


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of small random models, by architecture; `tiny` needs none."""
    return {"tiny": "tiny", **save_checkpoints(Path(tmp_path_factory.mktemp("models")))}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which most begin like another."""
    starts = random_prompts(21, 4, 60)
    return starts + [starts[i % 4] + tail for i, tail in enumerate(random_prompts(22, 6, 24))]


@pytest.fixture(scope="module")
def answers(prompts: list[list[int]], request: pytest.FixtureRequest) -> list[list[int]]:
    """The plain model's answers to a module's prompts, of its `MAX_TOKENS` tokens."""
    module = reference_model("tiny")
    return [reference_answer(module, prompt, request.module.MAX_TOKENS) for prompt in prompts]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., EmbeddedEngine]]:
    """Makes engines, in float64 unless told otherwise, and closes them; each must have given every block back."""
    made: list[EmbeddedEngine] = []

    def make(clock: Callable[[], float] = time.time, **settings: object) -> EmbeddedEngine:
        given = Settings.model_construct(**{"dtype": "float64", "device": "cpu", **settings})  # type: ignore[arg-type]
        engine = EmbeddedEngine(given, clock)
        engine.attach(NoOffload(), NoCopies())
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
        assert not engine.is_alive()
        assert engine.block_pool.num_free == engine.settings.device_blocks
        assert engine.block_pool.num_held == 0


@pytest.fixture
def make_offloaded(make_engine: Callable[..., EmbeddedEngine]) -> Iterator[MakeOffloaded]:
    """Makes engines with the real offload attached; nothing may be left held, pinned or in flight."""
    made: list[Offloaded] = []

    def make(
        num_slots: int = 400,
        prompt_only: bool = False,
        cuda: FakeCuda | CudaCopies | None = None,
        timer: Callable[[], float] = time.perf_counter,
        **settings: object,
    ) -> Offloaded:
        made.append(Offloaded(make_engine(**settings), num_slots, prompt_only, cuda, timer))
        return made[-1]

    yield make
    for offloaded in made:
        offloaded.close()
        stats = offloaded.stats
        check_identities(asdict(stats))
        assert (stats.requests.running, stats.requests.waiting_for_load, stats.open_jobs) == (0, 0, 0)
        assert (stats.store.in_flight, stats.load.in_flight, stats.pool.loading, stats.pool.pinned) == (0, 0, 0, 0)
