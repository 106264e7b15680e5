"""How a process ends, and what it tells of what fails beside it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from shoal.process.life import until

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
