"""Fixtures, options and the time limit that all tests share."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest

from tests.support.comparisons import NEAR, Comparison, take_nearest
from tests.support.kernels import forced_kernel, take_kernels

# Before anything imports DeepSpeed: on a machine with a GPU it would pick that one for the CPU tests too.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The ninja of this environment, as in every rank: another version finds all commands changed and builds anew.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

# No test depends on how fast a busy machine makes its inputs.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

DEFAULT_TIMEOUT = 300.0
"""Seconds for one test with its fixtures' calls; ``@pytest.mark.time_limit(seconds)`` sets another."""


NEAREST = "nearest comparison"
"""The user property of a test's report with name, error and limit; pytest-xdist sends it to the main process."""


class TestTimedOut(Exception):
    """A test took longer than its limit."""

    __test__ = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    parser.addoption("--full", action="store_true", help="run the long matrices (marker 'full') too")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test file that does not mention the marker with which ``-m`` begins: that saves half of the time."""
    marker = config.getoption("markexpr").partition(" ")[0]
    if marker in ("compat", "kernels") and collection_path.match("test_*.py"):
        text = collection_path.read_text()
        return None if f"mark.{marker}" in text or f"{marker}=" in text else True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long matrices unless asked for, put long tests first, and skip GPU tests where there is no GPU."""
    if forced_kernel():
        take_kernels()
    if forced_kernel() == "no-compiler":
        for item in items:
            if item.get_closest_marker("native"):
                item.add_marker(pytest.mark.skip(reason="needs the native library"))
    if not config.getoption("--full") and not config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("full")]
    # Files with the longest tests first, unit tests last, and otherwise those with the most tests first: no process is
    # left alone with a long one at the end. Needs pytest-xdist's --no-loadscope-reorder.
    limits: dict[Path, float] = {}
    numbers: Counter[Path] = Counter(item.path for item in items)
    for item in items:
        limits[item.path] = max(limits.get(item.path, 0.0), time_limit(item))
    items.sort(
        key=lambda item: (-limits[item.path], item.path.parent.name == "unit", -numbers[item.path], item.path)
    )
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def time_limit(item: pytest.Item) -> float:
    """Return the seconds that a test may take."""
    marker = item.get_closest_marker("time_limit")
    return float(marker.args[0]) if marker else DEFAULT_TIMEOUT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End a test that takes longer than its limit, whatever it waits for."""
    limit = time_limit(item)

    def expire(_signal: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise TestTimedOut(f"the test took longer than {limit:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit)
    take_nearest()
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if nearest := take_nearest():
            item.user_properties.append((NEAREST, [nearest.name, nearest.error, nearest.limit]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the five tests whose comparisons with float64 came nearest to their limits, and all that came too near."""
    reports = (report for key in ("passed", "failed") for report in terminalreporter.getreports(key))
    rows = sorted(
        (
            (comparison.ratio, report.nodeid, comparison)
            for report in reports
            for comparison in _comparisons(report)
        ),
        key=lambda row: -row[0],
    )
    if not rows:
        return
    near = sum(ratio > NEAR for ratio, *_ in rows)
    terminalreporter.section(f"nearest of {len(rows)} tests that compare with float64")
    for ratio, test, comparison in rows[: max(5, near)]:
        terminalreporter.line(
            f"{ratio:.2f} of the limit: {comparison.error:.2e} of {comparison.limit:.2e} {comparison.name} {test}"
        )
    if near:
        terminalreporter.line(
            f"{near} above {NEAR:g} of the limit: argue that limit anew (CONTRIBUTING.md, Tolerances)",
            yellow=True,
        )


def _comparisons(report: pytest.TestReport) -> list[Comparison]:
    """Return the nearest comparison of a test, if it has one: a planted defect may fail one in a test that passes."""
    comparisons = [Comparison(*value) for name, value in report.user_properties if name == NEAREST]
    return [one for one in comparisons if report.when == "call" and (one.ratio <= 1 or report.failed)]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:  # noqa: F821
    """Give the pool of a world size: ``ranks(2).run(fn, stage=3)``; at most one lives per world size."""
    from tests.support.harness import RankPool

    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    try:
        yield pool
    finally:
        for pool_of_size in pools.values():
            pool_of_size.close()
