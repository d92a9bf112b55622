"""How tests run: without the user's settings, with fixed examples, and with no deadline per example.

The short suite is the default. With `TEST_LONG=1` (`make test-long`) only those tests run that are marked `long`, and
those that do more then: property tests, and tests marked `sampled`.
"""

import os
import signal
import tempfile
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from tests.harness.effort import LONG, examples

for name in [name for name in os.environ if name.upper().startswith("KVFERRY_")]:
    del os.environ[name]
# Services of tests are announced to tests alone, in processes of tests too.
_runtime = tempfile.TemporaryDirectory(prefix="kvferry-tests-")
os.environ["XDG_RUNTIME_DIR"] = _runtime.name

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in what a shell runs in the background; commands that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of one suite."""
    chosen = [item for item in items if _is_chosen(item)]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not _is_chosen(item)])
        items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason to skip tests, such as a package that the machine lacks."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")


def _is_chosen(item: pytest.Item) -> bool:
    if not LONG:
        return item.get_closest_marker("long") is None
    if any(item.get_closest_marker(name) for name in ("long", "sampled")):
        return True
    return is_hypothesis_test(getattr(item, "obj", None))
