"""Fixtures of the vLLM suite. It needs a venv with vLLM, which `make test-vllm` makes; else it is left out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.excuses import EXCUSES

EXCUSES_OF_WORKER = "kvferry_excuses"
FIRST = ("test_parallel.py", "test_server.py", "test_trouble.py", "test_tiers.py")
"""Files that begin first, so that none of them runs alone at the end. Servers of two ranks do not start together."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}

if os.environ.get("TEST_VLLM"):
    # Read when vLLM is imported, which the tests' modules do.
    os.environ.update(ENVIRONMENT)
    import torch

    if torch.cuda.is_available():
        # Kernels that give a prompt the same answer whatever it is batched with.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one group of full attention."""
    from tests.vllm.models import write_llama

    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two groups of sliding windows and one of full attention."""
    from tests.vllm.models import write_gemma

    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def truth(llama: Path, request: pytest.FixtureRequest) -> list[Any]:
    """Answers of vLLM alone to the `PROMPTS` of a module, most of which differ."""
    from tests.vllm.engines import in_process

    with in_process(llama) as engine:
        answers = engine.generate(request.module.PROMPTS)
    assert len({answer.token_ids for answer in answers}) > len(answers) // 2
    return answers


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees another's state folder, nor KVFERRY_* variables of the environment."""
    for name in list(os.environ):
        if name.startswith("KVFERRY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the files take them in this order (`--no-loadscope-reorder`)."""
    places = {Path(__file__).with_name(name): place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker that runs some of the files hands over what it excused."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[EXCUSES_OF_WORKER] = EXCUSES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; one that crashed handed nothing over."""
    EXCUSES.extend(getattr(node, "workeroutput", {}).get(EXCUSES_OF_WORKER, []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which answers differed from vLLM's own where vLLM was undecided."""
    if os.environ.get("TEST_VLLM"):
        terminalreporter.section(f"near ties that fell the other way: {len(EXCUSES)}")
        for excuse in EXCUSES:
            terminalreporter.line(excuse)
