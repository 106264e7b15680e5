"""Systems that take turns run one at a time."""

import contextlib
import subprocess
import sys

import psutil

from benchmarks.turns import System, rates

ENDLESS = "import time\nwhile True: time.sleep(0.01)"


@contextlib.contextmanager
def endless():
    with subprocess.Popen([sys.executable, "-c", ENDLESS]) as child:
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def test_only_one_system_runs_at_a_time():
    with endless() as first, endless() as second:
        seen = {first: [], second: []}

        def system(mine, other):
            def steps():
                seen[mine].append((mine.status(), other.status()))
                return 7 * len(seen[mine])

            return System([mine.pid], steps)

        systems = {"first": system(first, second), "second": system(second, first)}
        for each in systems.values():
            each.stop()
        found = rates(systems, turns=2, seconds=0.1)
        assert all(0 < rate <= 70 for rate in found.values())  # 7 steps in a turn of at least 0.1 s
        for states in seen.values():
            assert len(states) == 4
            for mine, other in states:
                assert mine != psutil.STATUS_STOPPED
                assert other == psutil.STATUS_STOPPED
