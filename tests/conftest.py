"""What no test may depend on is taken away here: chance, and the environment that it runs in."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import browser, made

ROOT = Path(__file__).resolve().parents[1]

# --- the environment: of this process and of all that tests start -------------------------------
_TERMINAL = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")
for name in list(os.environ):
    # Options of Python change what is printed; a proxy would get what is for 127.0.0.1.
    of_rich = name.startswith(("TTY_", "JUPYTER_"))
    if of_rich or name.startswith("PYTHON") or name.lower().endswith("_proxy") or name in _TERMINAL:
        del os.environ[name]
os.environ["TERM"] = "xterm"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PYTHONPATH"] = str(ROOT)  # processes take the program from here, whatever is installed

# --- chance: the same examples everywhere, however long they take -------------------------------
settings.register_profile(
    "emu",
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("soak", settings.get_profile("emu"), derandomize=False, print_blob=True)
settings.load_profile("soak" if os.environ.get("EMU_SOAK") else "emu")
# Hypothesis tries numbers that stand in the sources, of the modules that happen to be loaded.
if hasattr(providers, "_get_local_constants"):
    _NONE = providers.Constants()
    providers._get_local_constants = lambda: _NONE


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Where a browser keeps its things. Skips where there is none."""
    reason = browser.reason_to_skip()
    if reason:
        pytest.skip(reason)
    return tmp_path / "profile"


def pytest_collection_finish() -> None:
    """Modules and ten thousand tests stay to the end: collecting after a file need not walk them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a test has left open is told with its own file, not with the test that runs when it is found.

    What is left then stays to the end (modules, trees of sources), so that nothing walks it again.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print the time of the tests by folder")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds that tests took, with what they set up and took down, by folder; workers summed."""
    if not terminalreporter.config.getoption("--times"):
        return
    seconds: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if isinstance(report, pytest.TestReport):
            parts = report.nodeid.split("::")[0].split("/")
            folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
            seconds[folder] += report.duration
            cases[folder] += report.when == "call"
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.line(f"{spent:8.1f}  {cases[folder]:6,} tests  {folder}")
    terminalreporter.line(f"{seconds.total():8.1f}  {cases.total():6,} tests  all")


# --- the night and the compiled build ------------------------------------------------------------
made.requests_can_be_copied()
if made.IS_COMPILED:
    from emu.testing import Bench

    Bench.before_fakes = staticmethod(made.takes_the_place_of_compiled_code)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` takes ten minutes, and extension classes take no object of another class."""
    for item in items:
        if item.get_closest_marker("nightly") and not os.environ.get("EMU_NIGHTLY"):
            item.add_marker(pytest.mark.skip(reason="minutes: make nightly"))
        if made.IS_COMPILED and item.get_closest_marker("doubles"):
            item.add_marker(pytest.mark.skip(reason="stands in for a compiled class"))
