"""How tests run: without the user's settings, with fixed examples, and with no deadline per example.

The short suite is the default. With `TEST_LONG=1` (`make test-long`) only those tests run that are marked `long`, and
those that do more then: property tests, and tests marked `sampled`.
"""

import gc
import os
import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from tests.harness.commands import RUN
from tests.harness.effort import LONG, examples

for name in [name for name in os.environ if name.upper().startswith("KVFERRY_")]:
    del os.environ[name]

settings.register_profile(
    "kvferry",
    max_examples=examples(100),
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# For whoever wants to know only whether there is a failing example.
settings.register_profile("unshrunk", settings.get_profile("kvferry"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvferry"))


SLOW = (
    "tests/sim/test_simulation.py",
    "tests/deploy/test_release.py",
    "tests/service/test_upgrade.py",
    "tests/kill/",
    "tests/ui/",
    "tests/service/",
    "tests/cli/",
    "tests/sim/",
    "tests/deploy/",
)
"""Files and folders that begin first, the slowest of the long suite before others, so that processes end together."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Fork the processes of a run from one that has imported kvferry. vLLM's start subprocesses by themselves."""
    if os.environ.get("TEST_VLLM") != "1":
        os.environ[RUN] = str(os.getpid())
        for spec in specs:
            spec.python = shlex.join([sys.executable, "-S", str(Path(__file__).parent / "harness/forked_worker.py")])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without garbage collections, leave those modules out of the later ones, and make these fewer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of one suite, the slowest files first."""
    chosen = [item for item in items if _is_chosen(item)]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not _is_chosen(item)])
        items[:] = chosen
    items.sort(
        key=lambda item: next((place for place, path in enumerate(SLOW) if item.nodeid.startswith(path)), len(SLOW))
    )


def _is_chosen(item: pytest.Item) -> bool:
    if not LONG:
        return item.get_closest_marker("long") is None
    if any(item.get_closest_marker(name) for name in ("long", "sampled")):
        return True
    return is_hypothesis_test(getattr(item, "obj", None))
