"""Peers that are invalid, slow, malicious, or disconnected."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shoal_trainer.contract import Shard
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard_client import ShardClient
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import Channel
from shoal_trainer.wire.header import Codec, Header, Op
from shoal_trainer.wire.listener import HANDSHAKE_SECONDS, RefusalLog
from shoal_trainer.wire.messages import Copy, WorkerIdentity
from tests.unit.trainer.ps.cluster import MODEL, Cluster, N, flat, until


@contextmanager
def raw(cluster: Cluster) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", cluster.servers[0].port), timeout=30) as sock:
        yield sock


def closed_by_server(sock: socket.socket) -> bool:
    """Wait until the server closes the connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def check_serving(cluster: Cluster) -> None:
    """Check that a valid worker is served."""
    out = aligned(N)
    client = cluster.client(slot=77)
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    client.pull(out)
    client.close()


# --- refused peers ------------------------------------------------------------------------------------------------


class Recorder(Channel):
    """Records what it sends."""

    sent = b""

    def send(self, *parts: bytes | memoryview) -> None:
        self.sent += b"".join(bytes(part) for part in parts)
        super().send(*parts)


class Attacker:
    """The connections of a hostile peer to shard 0 of a cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self._folder = cluster, folder
        self.address = Shard(host="127.0.0.1", data_port=cluster.servers[0].port)
        with raw(cluster) as sock:  # a valid client on a network that the peer can read
            recorder = Recorder(sock, timeout=30)
            if not cluster.tls:
                handshake.connect(recorder, cluster.credentials, "uid", handshake.Peer(0, 5, 0))
        self.hello, self.proof = recorder.sent[:-32], recorder.sent[-32:]

    def connect(self, *, key_id: str = "", job: str = "uid", tls: bool = False) -> None:
        """Connect with Shoal's client; with another key if `key_id` is given."""
        credentials = self.cluster.credentials
        if key_id:
            credentials = create_secret_dir(self._folder / secrets.token_hex(4), key_id=key_id)
        client = ShardClient(0, self.address, WorkerIdentity(job, 5, 0), credentials, tls=tls, timeout=30)
        with pytest.raises(Unreachable):
            client.connect()

    def send(self, *parts: bytes) -> None:
        """Send these bytes in turn, each after an answer to the one before."""
        with raw(self.cluster) as sock:
            for part in parts[:-1]:
                sock.sendall(part)
                assert sock.recv(4096)
            sock.sendall(parts[-1])
            assert closed_by_server(sock)

    def reflect(self) -> None:
        """Send the server's own proof back to it."""
        with raw(self.cluster) as sock:
            sock.sendall(self.hello)
            sock.sendall(sock.recv(4096)[-32:])
            assert closed_by_server(sock)

    def giant(self) -> None:
        """Announce a giant payload, after a valid handshake."""
        with authenticated(self.cluster) as channel:
            channel.send(header.encode(Header(Op.PUSH_PULL, Codec.FP32, slot=9, length=1 << 50)), b"\0")
            assert closed_by_server(channel._sock)
        assert self.cluster.servers[0]._pool.made <= 2 * N * 4

    def slow_loris(self) -> None:
        """Send single bytes, each within any timeout of one read."""
        pause = threading.Event()
        with raw(self.cluster) as sock:
            for byte in self.hello:
                try:
                    sock.sendall(bytes([byte]))
                except OSError:
                    return
                pause.wait(0.05)
        raise AssertionError("the server did not close the connection")

    def silent(self) -> None:
        """Send nothing."""
        with raw(self.cluster) as sock:
            assert closed_by_server(sock)


@dataclass(frozen=True)
class Hostile:
    """A hostile peer, and the reason that the server logs."""

    attack: Callable[[Attacker], None]
    reason: str
    tls: bool = False
    handshake_seconds: float = HANDSHAKE_SECONDS


ANOTHER_PROTOCOL = "not a Shoal data-plane client"
HOSTILE = {
    "wrong key": Hostile(lambda peer: peer.connect(key_id="other"), "another key than this job's"),
    "wrong key with the same id": Hostile(lambda peer: peer.connect(key_id="1"), "sent no proof"),
    "no key": Hostile(lambda peer: peer.send(peer.hello, bytes(32)), "cannot prove"),
    "wrong job": Hostile(lambda peer: peer.connect(job="another"), "another job or shard"),
    "replayed": Hostile(lambda peer: peer.send(peer.hello, peer.proof), "cannot prove"),
    "reflected": Hostile(Attacker.reflect, "cannot prove"),
    "giant length": Hostile(Attacker.giant, f"PUSH_PULL has {1 << 50} bytes"),
    "slow-loris": Hostile(Attacker.slow_loris, "no handshake", handshake_seconds=0.5),
    "silent": Hostile(Attacker.silent, "no handshake", handshake_seconds=0.5),
    "silent on a TLS port": Hostile(Attacker.silent, "no TLS handshake", tls=True, handshake_seconds=0.5),
    "plain client on a TLS port": Hostile(Attacker.connect, "TLS handshake failed", tls=True),
    "TLS client on a plain port": Hostile(lambda peer: peer.connect(tls=True), ANOTHER_PROTOCOL),
    "HTTP": Hostile(lambda peer: peer.send(b"GET / HTTP/1.1\r\n\r\n" * 10), ANOTHER_PROTOCOL),
    "zeros": Hostile(lambda peer: peer.send(bytes(4096)), ANOTHER_PROTOCOL),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_hostile_peer_gets_one_warning_and_others_are_served(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, hostile: Hostile
) -> None:
    cluster.tls = hostile.tls
    cluster.serve(1)
    worker, out = cluster.client(slot=1), aligned(N)
    worker.hello(MODEL, Copy(lambda: flat(3.0)))
    attacker = Attacker(cluster, tmp_path)
    cluster.servers[0].listener.handshake_seconds = hostile.handshake_seconds
    for _ in range(3):
        hostile.attack(attacker)
        worker.pull(out)
        np.testing.assert_array_equal(out, flat(3.0))
    until(lambda: bool(refusals(caplog)))
    cluster.servers[0].listener.handshake_seconds = HANDSHAKE_SECONDS
    check_serving(cluster)
    until(lambda: len(cluster.servers[0].listener.open) == 1)  # the worker's
    (message,) = refusals(caplog)
    assert "refused a connection from 127.0.0.1: " in message
    assert hostile.reason in message
    assert cluster.credentials.key.hex() not in caplog.text


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("tls", [False, True])
def test_health_probe_is_not_logged(cluster: Cluster, caplog: pytest.LogCaptureFixture, tls: bool) -> None:
    cluster.tls = tls
    cluster.serve(1)
    for _ in range(5):
        with raw(cluster):
            pass
    if not tls:  # CPython's TLS leaves a socket that was reset to the garbage collector, with a warning
        with raw(cluster) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    check_serving(cluster)
    until(
        lambda: not cluster.servers[0].listener.open
    )  # else the connection limit is reached after an hour of probes
    assert refusals(caplog) == []


def test_refusals_are_counted_until_the_next_message(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refused = RefusalLog(lambda: now[0], interval=60)
    for now[0] in (0.0, 1.0, 59.0, 60.0):
        refused.refused("10.0.0.1", "no handshake")
    refused.refused("10.0.0.2", "no handshake")
    assert refusals(caplog) == [
        "refused a connection from 10.0.0.1: no handshake",
        "refused a connection from 10.0.0.1: no handshake (2 more since the last message)",
        "refused a connection from 10.0.0.2: no handshake",
    ]


def test_silent_connections_do_not_block_workers(cluster: Cluster) -> None:
    cluster.serve(1, handshake_seconds=0.5)
    with ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(raw(cluster))
        until(lambda: _try(lambda: check_serving(cluster)))


def _try(function: Callable[[], None]) -> bool:
    try:
        function()
    except Unreachable:
        return False
    return True


def test_impostor_server_receives_no_values(credentials: Credentials, tmp_path: Path) -> None:
    """With another certificate, or without the key, the client stops before it sends a value."""
    false = Cluster(create_secret_dir(tmp_path / "false"), tls=True).serve(1)
    address = Shard(host="127.0.0.1", data_port=false.servers[0].port)
    with pytest.raises(Unreachable, match="TLS"):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials, tls=True).connect()
    false.close()
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        sock, _ = listener.accept()
        with sock:
            while sock.recv(4096):
                sock.sendall(handshake.MAGIC + bytes(84))

    thread = threading.Thread(target=impostor)
    thread.start()
    address = Shard(host="127.0.0.1", data_port=listener.getsockname()[1])
    with pytest.raises(Unreachable, match="cannot prove"):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials).connect()
    thread.join()
    listener.close()


@contextmanager
def stranger(kind: str, credentials: Credentials, folder: Path, *, tls: bool) -> Iterator[int]:
    """The port of what answers where shard 0 was."""
    if kind == "a web server":
        listener = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            sock, _ = listener.accept()
            with sock, suppress(ConnectionError):
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 99\r\n\r\n" + b"?" * 99)
                sock.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
        listener.close()
        return
    key = create_secret_dir(folder / "theirs") if kind == "another job" else credentials
    cluster = Cluster(key, tls=tls).serve(2)
    yield cluster.servers[kind == "another shard"].port
    cluster.close()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("kind", ["another job", "another shard", "a web server"])
def test_address_that_is_a_strangers_for_a_while_is_one_where_nobody_answers(
    credentials: Credentials, tmp_path: Path, kind: str, tls: bool
) -> None:
    """A lost pod's IP may be another's before its successor's is known everywhere: the worker tries again."""
    with stranger(kind, credentials, tmp_path, tls=tls) as port:
        address = Shard(host="127.0.0.1", data_port=port)
        client = ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials, tls=tls)
        with pytest.raises(Unreachable, match="shard 0"):
            client.connect()


def test_servers_that_do_not_answer_delay_nothing_for_one_that_does(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several nodes lost at once: for a server that is back, the worker's copy must come before it stops waiting."""
    cluster, connect = Cluster(credentials).serve(3), ShardClient.connect
    all_try = threading.Barrier(3)

    def black_hole(client: ShardClient) -> None:
        all_try.wait(30)
        if client.index < 2:
            raise Unreachable(f"shard {client.index}: timed out")
        connect(client)

    monkeypatch.setattr(ShardClient, "connect", black_hole)
    client = cluster.client()
    with pytest.raises(Unreachable, match="shard 0"):
        client.hello(MODEL)
    assert [store.model is not None for store in cluster.stores] == [False, False, True]
    client.close()
    cluster.close()


@contextmanager
def authenticated(cluster: Cluster) -> Iterator[Channel]:
    """A connection after a valid handshake."""
    with raw(cluster) as sock:
        channel = Channel(sock, timeout=30)
        peer = handshake.Peer(0, 9, 0)
        handshake.connect(channel, cluster.credentials, "uid", peer)
        yield channel
        channel.close()


@pytest.mark.parametrize(
    "request_header",
    [
        Header(Op.PUSH_PULL, Codec.BF16, slot=9, length=N * 2 + 2),
        Header(Op.PULL, Codec.NONE, slot=9),
        Header(Op.PULL, Codec.FP32, slot=8),
        Header(Op.PULL, Codec.FP32, slot=9, incarnation=1),
        Header(Op.OFFER, Codec.BF16, slot=9, length=N * 2),
        Header(Op.PARAMETERS, Codec.FP32, slot=9, length=N * 4),
    ],
    ids=[
        "too long",
        "no codec",
        "another slot",
        "another incarnation",
        "no vector",
        "an answer",
    ],
)
def test_authenticated_peer_with_a_bad_request_is_disconnected(
    cluster: Cluster, request_header: Header
) -> None:
    cluster.serve(1)
    check_serving(cluster)
    before = cluster.servers[0]._pool.made
    with authenticated(cluster) as channel:
        data = header.encode(request_header)
        channel.send(data, bytes(min(request_header.length, N * 4)) or b"\0")
        assert closed_by_server(channel._sock)
    assert cluster.servers[0]._pool.made <= max(before, 2 * N * 4)
    check_serving(cluster)


def test_random_bytes_after_the_handshake_are_refused(cluster: Cluster) -> None:
    cluster.serve(1)
    check_serving(cluster)
    rng = np.random.default_rng(0)
    for _ in range(50):
        with authenticated(cluster) as channel:
            noise = bytearray(rng.bytes(300))
            if rng.random() < 0.8:  # a valid prefix, so that the rest is parsed
                noise[:6] = struct.pack("<4sBB", header.MAGIC, header.VERSION, int(rng.integers(0, 12)))
            channel.send(bytes(noise))
            with suppress(OSError):  # the server may have closed it already
                channel._sock.shutdown(socket.SHUT_WR)
            assert closed_by_server(channel._sock)
    check_serving(cluster)


def test_push_cut_off_in_the_middle_is_not_applied(cluster: Cluster) -> None:
    cluster.serve(1)
    check_serving(cluster)
    with authenticated(cluster) as channel:
        whole = Header(Op.PUSH_PULL, Codec.BF16, slot=9, seq=1, length=N * 2)
        channel.send(header.encode(whole), bytes(N))
    until(lambda: not cluster.stores[0].workers.connected(9))
    assert cluster.stores[0].history.version == 0
    check_serving(cluster)


def test_closed_server_wakes_waiting_clients(cluster: Cluster) -> None:
    client = cluster.serve(1).client()
    client.hello(MODEL)
    cluster.stop()
    with pytest.raises(Unreachable):
        client.pull(aligned(N))


def test_only_the_jobs_certificate_is_trusted(credentials: Credentials) -> None:
    context = credentials.client_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
