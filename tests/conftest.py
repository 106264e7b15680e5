"""For all tiers: who may run beside whom, what is tried once more, and no event loop but those of the tests."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.scheduler import LoadScopeScheduling

from dev.night import by_day, examples

HERE = Path(__file__).parent
SHARED = ("nodes", "control_plane")
"""Tiers whose tests share one cluster: one process runs all of them. They mostly wait, so the others run beside."""
TRIES = 2
"""Of a test of those tiers: a real cluster on a shared machine may stall. The summary counts and names every rerun."""
WORDS_OF_A_TRY = 6000
"""Characters of a failed try that the summary has: the end says what happened."""
NICENESS = 5
"""Of the processes that run other tiers beside: a third of the time of those whose tests judge seconds, not less."""
SPREAD = ("simulation", "virtual")
"""Folders whose single tests are long."""
NIGHTLY_SECONDS = 1800
"""The least after which a nightly test is stopped: on a busy machine, what is slow looks hung much earlier."""
SUMMED = ("test_hidden_truth.py",)
"""Files of those whose nightly tests look at what all the others of the file have played: once, in one process."""
ROOM_FOR_FILES = 2 << 30
"""Bytes that the tests' own files are given in memory; those of tests that passed are deleted at once."""
NIGHTLY = bool(os.environ.get("SHOAL_NIGHTLY"))

# By day XLA makes programs that are compiled sooner and run slower: those of the tests run for a few steps. At night
# they are those of a worker.
if not NIGHTLY:
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )

# By day Go's processes (API servers, kubelets, kubectl, helm) look for garbage a quarter as often: of an API server's
# time that is an eighth, and 0.2 GiB.
if not NIGHTLY:
    os.environ.setdefault("GOGC", "400")

# To delete a file of a disk may take milliseconds, and the tests make thousands. Those of a night may be large.
MEMORY = Path("/dev/shm")
if not NIGHTLY and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_FOR_FILES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A process of the tests has less than a core: threads of numpy's would wait for each other in loops.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Hypothesis' own deadline, 200 ms for an example, would measure the machine. The same examples each time: what a change
# breaks is found by the change, and not by chance in another one.
settings.register_profile(
    "shoal",
    max_examples=examples(200),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shoal")
settings.register_profile(
    "any-example", settings.get_profile("shoal"), phases=(Phase.explicit, Phase.generate)
)
"""For mutants (`--hypothesis-profile`): to shrink the example that kills one takes minutes."""

# Asked for "the current event loop" before the first test, Python up to 3.13 makes one that nobody closes; its warning
# would then fail whichever test the garbage collector runs in. After this call it is not made (pytest-asyncio asks).
asyncio.set_event_loop(None)


def group(nodeid: str) -> str:
    """What one process runs: a shared cluster's tests, one long test, else the tests of a file."""
    path = Path(nodeid.partition("::")[0])
    tier = path.parts[1]
    if tier in SHARED:
        return tier
    together = path.name in SUMMED and NIGHTLY
    return nodeid if path.parent.name in SPREAD and not together else str(path)


class ByCluster(LoadScopeScheduling):
    """Gives whole groups to the processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def tier(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0]


def parameters(item: pytest.Item) -> dict[str, str]:
    """The values of a case, as text: arrays and lists are no keys."""
    assert isinstance(item, pytest.Function)
    return {name: repr(value) for name, value in item.callspec.params.items()}


def leave_to_the_night(items: list[pytest.Item]) -> None:
    """Mark as nightly the cases of one test beyond those that its `by_day` says."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("by_day") and not item.get_closest_marker("nightly"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        mark = same[0].get_closest_marker("by_day")
        assert mark is not None
        played = {item.nodeid for item in by_day(same, *mark.args, parameters)}
        for item in same:
            if item.nodeid not in played:
                item.add_marker(pytest.mark.nightly)


def pytest_collection() -> None:
    """What imports make stays: looking for garbage in it would take half as long as the imports themselves."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on there is garbage, and none of it in what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # also with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByCluster:
    return ByCluster(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first; what needs a cluster may be tried again; what is nightly runs only then."""
    leave_to_the_night(items)
    if not NIGHTLY:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)

    first = (*SHARED, "virtual")  # short tests at the end keep all processes busy until then
    items.sort(key=lambda item: first.index(tier(item)) if tier(item) in first else len(first))
    for item in items:
        if tier(item) in SHARED and item.get_closest_marker("flaky") is None:
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1))
        limit = item.get_closest_marker("timeout")
        if item.get_closest_marker("nightly") and (limit is None or limit.args[0] < NIGHTLY_SECONDS):
            item.add_marker(pytest.mark.timeout(NIGHTLY_SECONDS), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Of several processes those give way that run no shared cluster, or none any more: it is what begins first."""
    if "PYTEST_XDIST_WORKER" in os.environ and tier(item) not in SHARED and not os.nice(0):
        os.nice(NICENESS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was tried once more: the second try, which passes, would hide it."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}", sep="-")
        terminalreporter.line(report.longreprtext[-WORDS_OF_A_TRY:])
