"""No process of a run on one machine outlives the one that started it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

CHILD = """
import signal
from shoal_trainer.termination.orphans import follow_parent
follow_parent()
print("up", flush=True)
signal.pause()  # no end of a file tells it that its parent is gone
"""
PARENT = """
import os, subprocess, sys
pid = {pid}
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=os.environ | {{"SHOAL_PARENT_PID": str(pid)}}, text=True,
)
print(child.pid, child.stdout.readline().strip(), flush=True)
input()
"""


def parent(pid: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT.format(pid=pid), CHILD]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_child_exits_when_its_parent_is_killed() -> None:
    with parent("os.getpid()") as process:
        assert process.stdout is not None
        pid, word = process.stdout.readline().split()
        assert word == "up"
        child = psutil.Process(int(pid))
        try:
            process.kill()
            child.wait(30)
        finally:
            if child.is_running():
                child.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_child_of_a_dead_parent_does_not_start() -> None:
    with parent("1") as process:
        assert process.stdout is not None
        assert len(process.stdout.readline().split()) == 1  # the child printed nothing
        process.kill()
