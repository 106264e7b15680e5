"""Connections to the control plane: unauthenticated, slow, too many, or closed."""

import contextlib
import gc
import http.client
import socket
import ssl
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from shoal_trainer.coordinator import control_client
from shoal_trainer.coordinator import http as http_server
from shoal_trainer.coordinator.control_client import (
    CONNECT_SECONDS,
    ControlClient,
    CoordinatorClient,
    _Connection,
)
from shoal_trainer.coordinator.protocol import (
    PURPOSE,
    Assignment,
    Done,
    Heartbeat,
    Leave,
    Next,
)
from shoal_trainer.errors import Unauthorized, Unreachable
from shoal_trainer.security import create_secret_dir
from shoal_trainer.wire.channel import DEAD_SECONDS
from tests.unit.trainer.coordinator.served import SECONDS


def test_key_of_another_job_is_refused_by_both_sides(start_server, tmp_path):
    served, other = start_server(), create_secret_dir(tmp_path / "other")
    client = ControlClient(served.address, other, timeout=SECONDS)
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # accepts any certificate
    plain = socket.create_connection(("127.0.0.1", served.server.port), SECONDS)
    with context.wrap_socket(plain) as connection:
        token = other.token(PURPOSE)
        connection.sendall(
            f"POST /v1/heartbeat HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        assert b" 401 " in connection.recv(4096).splitlines()[0]
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    client._headers = {"Authorization": f"Bearer {token}"}  # trusts the certificate but lacks the key
    with pytest.raises(Unauthorized):
        client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
    client.close()


def test_connection_is_sent_no_ticket(start_server):
    """With one it holds 16 KiB for as long as it lasts: of 36 and 52 that the operator has of each job."""
    served = start_server()
    plain = socket.create_connection(("127.0.0.1", served.server.port), SECONDS)
    with served.credentials.client_context().wrap_socket(plain) as connection:
        connection.sendall(b"POST /v1/heartbeat HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        assert b" 401 " in connection.recv(4096).splitlines()[0]
        assert not connection.session.has_ticket


@pytest.mark.parametrize("server_side", [True, False])
def test_connection_reset_before_its_handshake_is_closed(server_side, tmp_path):
    """Python warns of a socket that is dropped open, and tests make errors of warnings."""
    credentials = create_secret_dir(tmp_path / "secret")
    context = credentials.server_context() if server_side else credentials.client_context()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ends = [socket.create_connection(listening.getsockname(), SECONDS), listening.accept()[0]]
        kept = ends.pop(server_side)
        (reset,) = ends
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with contextlib.suppress(ConnectionResetError):
                context.wrap_socket(kept, server_side=server_side, do_handshake_on_connect=False)
            del kept
            gc.collect()
    assert said == []


def test_plain_client_does_not_block_others(start_server):
    served = start_server()
    with socket.create_connection(("127.0.0.1", served.server.port), SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert served.works()
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(4096):
                pass  # a TLS alert, then the end
    assert served.works()


@pytest.mark.parametrize("part", [b"", b"POST /v1/next HT", b"POST /v1/next HTTP/1.1\r\nAuthorization: Bea"])
def test_unauthenticated_connection_is_closed_at_the_deadline(start_server, part):
    served = start_server(proof_seconds=0.2)
    with served.connect() as connection:
        connection.sendall(part)
        assert served.works()
        assert connection.recv(4096) == b""
    assert served.works()


def test_authenticated_connection_may_be_slow(start_server):
    served = start_server(proof_seconds=0.2)
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    served.answer(client, 0)
    kept = client._connection
    with served.connect() as silent:
        assert silent.recv(1) == b""  # the silent connection timed out
    client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
    assert client._connection is kept
    client.close()


def test_unauthenticated_connections_take_no_authenticated_slot(start_server, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_UNPROVEN", 1)
    served = start_server()
    clients = [ControlClient(served.address, served.credentials, timeout=SECONDS) for _ in range(4)]
    for client in clients[:3]:
        assert served.answer(client, 3) == 3  # each keeps its connection
    late = clients[3]
    with served.connect():
        with pytest.raises(Unreachable):
            late.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
        assert served.answer(clients[0], 5) == 5
    assert served.answer(late, 3) == 3  # the silent connection timed out
    for client in clients:
        client.close()


def test_connections_are_limited(start_server, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    served = start_server()
    clients = [ControlClient(served.address, served.credentials, timeout=SECONDS) for _ in range(3)]
    for client in clients[:2]:
        assert served.answer(client, 3) == 3
    with pytest.raises(Unreachable):
        clients[2].call("next", Next(slot=0, incarnation=0, number=1), Assignment)
    clients[0].close()
    assert served.answer(clients[2], 3) == 3
    for client in clients:
        client.close()


def test_keepalive_detects_a_dead_coordinator_node(start_server):
    served = start_server()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
    sock = client._connection.sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEAD_SECONDS * 1000
    client.close()


def test_closed_idle_connection_is_reopened(start_server):
    served = start_server()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
    served.server.listener.end_connections()
    while served.server.listener.open:
        pass
    assert client.call("next", Next(slot=5, incarnation=0, number=1), Assignment).seconds == 5
    client.close()


def test_close_during_connect_leaves_no_socket(start_server, monkeypatch):
    served = start_server()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    connect, opened = http.client.HTTPSConnection.connect, []

    def closed_meanwhile(connection):
        client.close()
        connect(connection)
        opened.append(connection.sock)

    monkeypatch.setattr(http.client.HTTPSConnection, "connect", closed_meanwhile)
    with pytest.raises(Unreachable):
        client.call("next", Next(slot=5, incarnation=0, number=1), Assignment)
    assert [sock.fileno() for sock in opened] == [-1]


def test_close_during_a_request_opens_no_new_connection(start_server, monkeypatch):
    served = start_server()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    assert served.answer(client, 3) == 3

    def closed_meanwhile(_connection):
        client.close()
        raise ConnectionResetError

    monkeypatch.setattr(http.client.HTTPSConnection, "getresponse", closed_meanwhile)
    with pytest.raises(Unreachable):
        client.call("next", Next(slot=3, incarnation=0, number=2), Assignment)
    assert client._connection is None


def test_closed_client_opens_no_connection_again(start_server):
    """A thread that asks for work may see only afterwards that the worker has ended."""
    served = start_server()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    assert served.answer(client, 3) == 3
    client.close()
    with pytest.raises(Unreachable, match="closed"):
        client.call("next", Next(slot=3, incarnation=0, number=2), Assignment)
    assert client._connection is None


@pytest.fixture
def silent(start_server):
    """A client of a server that answers nothing, and a request that waits for its answer in a thread."""
    served, asked, ends = start_server(), threading.Event(), threading.Event()

    def hangs(_request):
        asked.set()
        assert ends.wait(SECONDS)
        return Done()

    served.server.handlers |= {"next": hangs, "leave": hangs}
    client = CoordinatorClient(served.address, served.credentials, 0, 0, timeout=SECONDS)
    client.server = served.server
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.next_work)
        assert asked.wait(SECONDS)
        yield client, waiting
        ends.set()
    client.close()


def test_a_worker_leaves_in_time_though_no_request_of_it_has_an_answer(silent):
    """It has 20 s, and each request takes 10 s while parameter server 0 hangs."""
    client, waiting = silent
    with pytest.raises(Unreachable, match="does not answer"):
        client.send(Leave(slot=0, incarnation=0), 0.01)
    assert not waiting.done()


def test_a_worker_that_leaves_ends_what_it_has_asked_and_can_still_say_so(silent, tmp_path):
    """Its main thread may wait for 10 s in a request, or for 600 s in an upload, and it has 20 s."""
    client, waiting = silent
    file = tmp_path / "a"
    file.write_bytes(b"content")
    uploading, ends = threading.Event(), threading.Event()

    def hangs(*_):
        uploading.set()
        assert ends.wait(SECONDS)

    client.server.upload = hangs
    with ThreadPoolExecutor() as pool:
        upload = pool.submit(client.upload, (0, 0), "logs/a", file)
        assert uploading.wait(SECONDS)
        client.end_requests()
        assert isinstance(waiting.exception(SECONDS / 2), Unreachable)
        assert isinstance(upload.exception(SECONDS / 2), Unreachable)
        ends.set()
    for request in (client.next_work, lambda: client.upload((0, 0), "logs/a", file)):
        with pytest.raises(Unreachable, match="closed"):
            request()
    client.server.handlers["leave"] = lambda _: Done()
    client.send(Leave(slot=0, incarnation=0), SECONDS)


def test_a_request_over_a_connection_that_was_reset_has_what_is_left_of_its_time(start_server, monkeypatch):
    served, now, given = start_server(), [0.0], []
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    assert served.answer(client, 3) == 3
    within = control_client._Connection.within

    def reset(_connection):
        now[0] += 4.0
        raise ConnectionResetError

    monkeypatch.setattr(control_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        control_client._Connection, "within", lambda c, seconds: given.append(seconds) or within(c, seconds)
    )
    monkeypatch.setattr(http.client.HTTPSConnection, "getresponse", reset)
    with pytest.raises(Unreachable):
        client.call("next", Next(slot=3, incarnation=0, number=2), Assignment, 5.0)
    assert given == [5.0, 1.0, 1.0]


def test_closing_a_client_ends_a_request_without_an_answer(silent):
    client, waiting = silent
    client.close()
    assert isinstance(waiting.exception(SECONDS / 2), Unreachable)


def test_client_that_is_closed_while_it_opens_a_connection_keeps_none(start_server, monkeypatch):
    served = start_server()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    made = control_client._Connection

    def closed_meanwhile(*words, **options):
        client.close()
        return made(*words, **options)

    monkeypatch.setattr(control_client, "_Connection", closed_meanwhile)
    with pytest.raises(Unreachable, match="closed"):
        client.call("next", Next(slot=3, incarnation=0, number=1), Assignment)
    assert client._connection is None


def test_server_close_ends_its_connections(start_server):
    served = start_server()
    connection = served.connect()
    connection.sendall(b"POST /v1/next HTTP/1.1\r\n")
    served.works()
    served.server.close()
    assert connection.recv(1) == b""
    connection.close()
    with pytest.raises(OSError):
        served.connect()


def test_connecting_takes_seconds_where_a_request_may_take_minutes(monkeypatch):
    connection, asked = _Connection("127.0.0.1", 1, timeout=600.0), []

    def refuse(_address, timeout, *_):
        asked.append(timeout)
        raise OSError("no route")

    monkeypatch.setattr(connection, "_create_connection", refuse)
    with pytest.raises(OSError, match="no route"):
        connection.connect()
    assert (asked, connection.timeout) == ([CONNECT_SECONDS], 600.0)
