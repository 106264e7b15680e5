"""How a process ends, and what it tells of what fails beside it."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

import pytest

from shoal.process.life import allow_open_files, until

PLANS = """
import asyncio, time
from shoal.process.life import end_with

async def work():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    await asyncio.sleep(0)
    print("stopped")
    return 3

end_with(work())
"""


def test_process_ends_while_a_plan_is_made_in_a_thread() -> None:
    """`asyncio.run` waited for it, beyond the grace period."""
    done = subprocess.run(
        [sys.executable, "-c", PLANS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (3, "stopped\n"), done.stderr


CLOUD = """
import asyncio, os, signal, time
from shoal.process import pools

async def size():
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.to_thread(time.sleep, 600)

async def run(settings):
    stop = pools.signalled()
    return await pools.until(stop, "scaler", size())

pools.run = run
pools.main()
"""


def test_pools_end_while_a_cloud_does_not_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOUD], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


FILES = """
import asyncio, importlib, resource, sys
from types import SimpleNamespace

async def connect(*_):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    raise SystemExit

process = importlib.import_module(sys.argv[1])
process.connect = connect
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
asyncio.run(process.run(SimpleNamespace(log_level="INFO", log_format="text")))
"""


@pytest.mark.parametrize("process", ["main", "pools"])
def test_each_process_may_open_as_many_files_as_the_hard_limit_lets_it(process: str) -> None:
    """Of a usual soft limit each running job takes one, for its coordinator."""
    done = subprocess.run(
        [sys.executable, "-c", FILES, f"shoal.process.{process}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "1024\n", done.stderr


async def test_what_fails_beside_is_logged_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()

    async def operator() -> None:
        await asyncio.Event().wait()

    async def watch() -> None:
        raise RuntimeError("kopf's watch died")

    running = asyncio.create_task(until(stop, "operator", operator(), watch()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert "kopf's watch died" in caplog.text
    assert not running.done()
    stop.set()
    assert await running == 0


def test_process_begins_though_the_kernel_refuses_as_many_files_as_its_hard_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    allow_open_files()
    assert "the limit of open files stays 1024" in caplog.text
