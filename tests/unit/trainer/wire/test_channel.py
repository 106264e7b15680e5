"""Connections that end while a thread waits: a machine that disappears, in a network namespace, and `close`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal_trainer.errors import Unreachable
from shoal_trainer.security import create_secret_dir
from shoal_trainer.wire import channel
from shoal_trainer.wire.channel import Channel

SERVER = (
    "import socket, sys; s = socket.create_server(('10.213.9.2', 7000)); print(flush=True); "
    "a, _ = s.accept(); sys.stdin.read()"
)

Gone = tuple[tuple[str, int], Callable[[], None]]


@pytest.fixture
def peer() -> Iterator[Gone]:
    """The address of a server in another namespace, and a function that cuts its link."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("makes a network namespace: needs root and ip")
    name = f"shoal-gone-{os.getpid()}"
    near, far = f"shg{os.getpid() % 10**8}a", f"shg{os.getpid() % 10**8}b"
    inside = ["ip", "netns", "exec", name]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        stack.callback(ip, "link", "del", near)  # deleting the namespace removes it only later
        ip("addr", "add", "10.213.9.1/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "addr", "add", "10.213.9.2/30", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        server = subprocess.Popen(
            [*inside, sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.enter_context(server)
        assert server.stdout is not None
        assert server.stdin is not None
        server.stdout.readline()
        yield ("10.213.9.2", 7000), lambda: ip("-n", name, "link", "set", far, "down")
        server.stdin.close()


def test_dead_machine_is_detected_before_the_timeout(peer: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "DEAD_SECONDS", 1.0)
    address, cut_link = peer
    client = Channel(socket.create_connection(address, timeout=5), timeout=30)
    client.send(b"a question")
    cut_link()
    start = time.monotonic()
    with pytest.raises(Unreachable):
        client.receive_bytes(1, limit=1)
    assert time.monotonic() - start < 10
    client.close()


def test_slow_peer_is_waited_for_until_the_timeout(peer: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "DEAD_SECONDS", 1.0)
    client = Channel(socket.create_connection(peer[0], timeout=5), timeout=4)
    client.send(b"a question")
    with pytest.raises(Unreachable, match="sent nothing for 4 s"):
        client.receive_bytes(1, limit=1)
    client.close()


def connected(folder: Path, *, tls: bool) -> tuple[Channel, Channel]:
    """A client's and a server's channel, connected to each other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near, far = socket.create_connection(listener.getsockname()), listener.accept()[0]
    if not tls:
        return Channel(near, timeout=60), Channel(far, timeout=60)
    credentials = create_secret_dir(folder / "secret")
    with ThreadPoolExecutor() as pool:
        server = pool.submit(credentials.server_context().wrap_socket, far, server_side=True)
        client = credentials.client_context().wrap_socket(near)
        return Channel(client, timeout=60), Channel(server.result(), timeout=60)


@pytest.mark.parametrize("waits", ["receive", "receive_first"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_close_wakes_the_thread_that_receives(tmp_path: Path, tls: bool, waits: str) -> None:
    client, server = connected(tmp_path, tls=tls)
    server.send(b"some")
    received, begun = bytearray(8), threading.Event()

    def receive() -> Any:
        if waits == "receive_first":
            client.receive_first(4)
            begun.set()
            return client.receive_first(4)
        client.receive(memoryview(received)[:4])
        begun.set()
        return client.receive(memoryview(received)[4:])

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receive)
        assert begun.wait(10)
        time.sleep(0.05)  # most often it waits by now; the result is the same if it does not
        client.close()
        assert isinstance(waiting.exception(timeout=10), Unreachable)
    assert received[4:] == bytes(4)
    with pytest.raises(Unreachable):
        server.receive_first(1)
    server.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_peer_that_reads_a_trickle_misses_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """Each call makes some progress, so the kernel's own timeout never ends it."""
    monkeypatch.setattr(channel, "MIN_RATE", 1 << 30)
    monkeypatch.setattr(channel, "TLS_CHUNK", 1 << 16)
    client, server = connected(tmp_path, tls=tls)
    client.set_timeout(0.3)
    for end in (client, server):
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.005):
            try:
                server.receive_bytes(1 << 12, limit=1 << 12)
            except Unreachable:
                return

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(trickle)
        start = time.monotonic()
        with pytest.raises(Unreachable):
            client.send(b"head", bytes(64 << 20))
        assert time.monotonic() - start < 10  # at this rate it takes minutes
        ended.set()
        reading.result(timeout=10)
    with pytest.raises(Unreachable):  # it is closed: what follows would be read as the rest of this message
        client.send(b"more")
    server.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_parts_arrive_in_order_whatever_the_kernel_takes_at_a_time(tmp_path: Path, tls: bool) -> None:
    client, server = connected(tmp_path, tls=tls)
    client._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    parts: list[bytes | memoryview] = [b"a" * 70_001, b"", memoryview(bytearray(b"b" * 3_000_017)), b"c"]
    expected = b"".join(bytes(part) for part in parts)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(server.receive_bytes, len(expected), limit=len(expected))
        client.send(*parts)
        assert received.result(timeout=30) == expected
    client.close()
    server.close()
