"""An address is barred in the kernel for a time, and others are not."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from shoal_trainer.wire.bar import MOST, SECONDS, Bar, free

OTHER, HOSTILE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((OTHER, 0)) as server:
        yield server


def begins(listener: socket.socket, source: str, wait: float = 5.0) -> bool:
    """Whether a connection from this address is accepted."""
    with socket.socket() as sock:
        sock.bind((source, 0))
        sock.setblocking(False)
        sock.connect_ex(listener.getsockname())
        if not select.select([listener], [], [], wait)[0]:
            return False
        accepted, (address, _) = listener.accept()
        free(accepted)
        accepted.close()
        return address == source


def test_barred_address_is_not_heard_until_its_time_is_over(listener: socket.socket) -> None:
    now = [0.0]
    bar = Bar(listener, lambda: now[0])
    assert bar.lift() is None
    assert begins(listener, HOSTILE)
    bar.add(HOSTILE)
    bar.add(HOSTILE)
    assert not begins(listener, HOSTILE, wait=0.05)
    assert begins(listener, OTHER)
    assert bar.lift() == SECONDS
    now[0] = SECONDS
    assert bar.lift() is None
    assert begins(listener, HOSTILE)


def test_each_of_many_addresses_is_barred_and_lifted_by_itself(listener: socket.socket) -> None:
    now = [0.0]
    bar = Bar(listener, lambda: now[0])
    many = [f"127.0.1.{index}" for index in range(MOST + 1)]
    for address in many:
        now[0] += 0.1 / MOST
        bar.add(address)
    assert not any(
        begins(listener, address, wait=0.01) for address in (many[0], many[MOST // 2], many[MOST - 1])
    )
    assert begins(listener, many[MOST])  # more than fit: it is refused as it comes
    now[0] = SECONDS + 0.1 / MOST
    bar.lift()
    assert begins(listener, many[0])
    assert not begins(listener, many[1], wait=0.01)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_addresses_are_barred() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with listener:
        bar = Bar(listener, lambda: 0.0)
        bar.add("::2")
        bar.add("127.0.0.2")
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            listener.accept()[0].close()
        bar.add("::1")
        with socket.socket(socket.AF_INET6) as sock:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
            assert not select.select([listener], [], [], 0.05)[0]


def test_accepted_connection_keeps_no_filter(listener: socket.socket) -> None:
    bar = Bar(listener, lambda: 0.0)
    bar.add(HOSTILE)
    with socket.create_connection(listener.getsockname(), timeout=5) as sock:
        accepted, _ = listener.accept()
        with accepted:
            free(accepted)
            with pytest.raises(OSError, match="No such file"):
                accepted.setsockopt(socket.SOL_SOCKET, 27, 0)
            accepted.sendall(b"x")
            assert sock.recv(1) == b"x"
