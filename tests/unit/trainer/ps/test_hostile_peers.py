"""Peers that are invalid, slow, malicious, or disconnected."""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from shoal_trainer.contract import Shard
from shoal_trainer.errors import Unauthorized, Unreachable
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.shard_client import ShardClient
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import Channel
from shoal_trainer.wire.header import Codec, Header, Op
from shoal_trainer.wire.messages import WorkerIdentity
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
    client.hello(MODEL)
    client.initialize(flat(0.0))
    client.pull(out)
    client.close()


def test_wrong_key_is_refused_and_logged_once(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.serve(1)
    stranger = create_secret_dir(tmp_path / "stranger", key_id="other")
    address = Shard(host="127.0.0.1", data_port=cluster.servers[0].port)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with pytest.raises(Unauthorized):
                ShardClient(0, address, WorkerIdentity("uid", 0, 0), stranger).connect()
        check_serving(cluster)
    assert len([record for record in caplog.records if "refused a connection" in record.message]) == 1
    assert stranger.key.hex() not in caplog.text
    assert cluster.credentials.key.hex() not in caplog.text


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(4096), b"\xff" * 4096])
def test_junk_is_refused(cluster: Cluster, junk: bytes) -> None:
    cluster.serve(1)
    with raw(cluster) as sock:
        sock.sendall(junk)
        assert closed_by_server(sock)
    check_serving(cluster)


def test_slow_loris_hits_the_handshake_deadline(cluster: Cluster) -> None:
    cluster.serve(1, handshake_seconds=0.3)
    with raw(cluster) as sock:
        ended = threading.Event()
        pause = threading.Event()
        for _ in range(100):  # single bytes, each within any per-read timeout
            try:
                sock.sendall(b"S")
            except OSError:
                ended.set()
                break
            pause.wait(0.05)
        assert ended.is_set()
    until(lambda: _try(lambda: check_serving(cluster)))  # a slow machine may miss the deadline as well


def test_silent_connections_do_not_block_workers(cluster: Cluster) -> None:
    cluster.serve(1, handshake_seconds=0.5)
    with ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(raw(cluster))
        until(lambda: _try(lambda: check_serving(cluster)))


def _try(function: Callable[[], None]) -> bool:
    try:
        function()
    except (Unreachable, Unauthorized):
        return False
    return True


def test_plain_and_tls_endpoints_refuse_each_other(credentials: Credentials) -> None:
    secure, plain = Cluster(credentials, tls=True).serve(1), Cluster(credentials).serve(1)
    wrong = secure.client()
    address = Shard(host="127.0.0.1", data_port=secure.servers[0].port)
    with pytest.raises((Unauthorized, Unreachable)):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials, timeout=30).connect()
    address = Shard(host="127.0.0.1", data_port=plain.servers[0].port)
    with pytest.raises((Unauthorized, Unreachable)):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials, tls=True, timeout=30).connect()
    check_serving(secure)
    check_serving(plain)
    wrong.close()
    secure.close()
    plain.close()


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
    with pytest.raises(Unauthorized, match="cannot prove"):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials).connect()
    thread.join()
    listener.close()


@contextmanager
def authenticated(cluster: Cluster) -> Iterator[Channel]:
    """A connection after a valid handshake."""
    with raw(cluster) as sock:
        channel = Channel(sock, timeout=30)
        peer = handshake.Peer(handshake.Role.WORKER, 0, 9, 0)
        handshake.connect(channel, cluster.credentials, "uid", peer)
        yield channel
        channel.close()


@pytest.mark.parametrize(
    "request_header",
    [
        Header(Op.PUSH_PULL, Codec.FP32, slot=9, length=1 << 50),
        Header(Op.PUSH_PULL, Codec.BF16, slot=9, length=N * 2 + 2),
        Header(Op.PULL, Codec.NONE, slot=9),
        Header(Op.PULL, Codec.FP32, slot=8),
        Header(Op.PULL, Codec.FP32, slot=9, incarnation=1),
        Header(Op.OFFER, Codec.BF16, slot=9, length=N * 2),
        Header(Op.PARAMETERS, Codec.FP32, slot=9, length=N * 4),
    ],
    ids=[
        "giant",
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
    until(lambda: not cluster.stores[0]._members.has(9))
    assert cluster.stores[0].version == 0
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
