"""What the operator's process holds: what every installation pays for, and what each pod and connection adds."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal.process.life import TLS_BUFFER, keep_tls_small

HEAVY = ("google", "kubernetes", "requests", "oauthlib", "numpy", "pandas", "scipy", "sklearn", "tensorflow")
LOADED_MIB = 78
"""67 on Linux with Python 3.11. With the official client it were 80."""
POD_KIB = 1.5
"""1.0 there, of pods that share what is alike: it were 2.7 if they did not, and 11 with a model for each part."""

RESIDENT = """
def resident():
    return int(open('/proc/self/status').read().partition('VmRSS:')[2].split()[0])
"""
LOADED = f"""
import sys
import shoal.process.main
print([name for name in {HEAVY!r} if name in sys.modules])
print(resident() / 1024)
"""
WALKED = """
import gc
import shoal.process.main
from shoal.process.life import exempt_what_is_loaded
print(len(gc.get_objects()))
exempt_what_is_loaded()
print(len(gc.get_objects()))
"""
PODS = """
import gc, json
from shoal.api.kube import Pod
from tests.unit.policy import build

def line(number):
    pod = build.pod_manifest("worker", number, node=f"node-{number % 10}")
    pod["metadata"]["uid"] = f"0a1b2c3d-0000-4000-8000-{number:012d}"
    pod["status"]["conditions"] = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-11-25T01:00:00Z"}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    return json.dumps(pod)

lines = [line(number) for number in range(4000)]
gc.collect()
before = resident()
pods = [Pod.model_validate_json(line) for line in lines]
print((resident() - before) / len(pods))
"""


def printed(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT + script], capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.splitlines()


def test_operator_loads_no_library_that_it_does_not_run() -> None:
    loaded, mib = printed(LOADED)
    assert loaded == "[]"
    assert float(mib) < LOADED_MIB


def test_garbage_collections_do_not_walk_the_modules_again() -> None:
    """Each full one would hold the event loop for 40 ms."""
    before, after = map(int, printed(WALKED))
    assert before > 50_000
    assert after < 1000


def test_a_pod_in_the_cache_is_small() -> None:
    assert 0.5 < float(printed(PODS)[0]) < POD_KIB


@pytest.fixture
def default_buffer() -> Iterator[int]:
    before = asyncio.sslproto.SSLProtocol.max_size
    yield before
    asyncio.sslproto.SSLProtocol.max_size = before


async def test_connections_hold_a_record_and_not_sixteen(default_buffer: int) -> None:
    """The attribute is asyncio's own: where it is gone, the memory is back."""
    assert default_buffer > TLS_BUFFER
    keep_tls_small()
    loop = asyncio.get_running_loop()
    context, waiter = ssl.create_default_context(), loop.create_future()
    protocol = asyncio.sslproto.SSLProtocol(loop, asyncio.Protocol(), context, waiter)
    assert len(protocol.get_buffer(-1)) == TLS_BUFFER
    protocol._get_app_transport().close()
