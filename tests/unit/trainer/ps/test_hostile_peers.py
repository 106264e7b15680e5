"""Peers that are wrong, slow, malicious, or gone."""

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
from shoal_trainer.ps.client import ShardClient
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import Channel
from shoal_trainer.wire.header import Codec, Header, Op
from shoal_trainer.wire.messages import WorkerIdentity
from tests.unit.trainer.ps.house import MODEL, House, N, flat, until


@contextmanager
def raw(house: House) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", house.servers[0].port), timeout=30) as sock:
        yield sock


def gone(sock: socket.socket) -> bool:
    """Whether the server ended the connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def serving(house: House) -> None:
    """A legitimate worker is served."""
    out = aligned(N)
    client = house.client(slot=77)
    client.hello(MODEL)
    client.initialize(flat(0.0))
    client.pull(out)
    client.close()


def test_wrong_key_is_refused_and_logged_once(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house.serve(1)
    stranger = create_secret_dir(tmp_path / "stranger", key_id="other")
    address = Shard(host="127.0.0.1", data_port=house.servers[0].port)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with pytest.raises(Unauthorized):
                ShardClient(0, address, WorkerIdentity("uid", 0, 0), stranger).connect()
        serving(house)
    assert len([record for record in caplog.records if "refused a connection" in record.message]) == 1
    assert stranger.key.hex() not in caplog.text
    assert house.credentials.key.hex() not in caplog.text


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(4096), b"\xff" * 4096])
def test_junk_is_refused(house: House, junk: bytes) -> None:
    house.serve(1)
    with raw(house) as sock:
        sock.sendall(junk)
        assert gone(sock)
    serving(house)


def test_slow_loris_hits_the_handshake_deadline(house: House) -> None:
    house.serve(1, handshake_seconds=0.3)
    with raw(house) as sock:
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
    until(lambda: _try(lambda: serving(house)))  # a slow machine may miss the deadline, too


def test_silent_connections_do_not_block_workers(house: House) -> None:
    house.serve(1, handshake_seconds=0.5)
    with ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(raw(house))
        until(lambda: _try(lambda: serving(house)))


def _try(function: Callable[[], None]) -> bool:
    try:
        function()
    except (Unreachable, Unauthorized):
        return False
    return True


def test_plain_and_tls_endpoints_refuse_each_other(credentials: Credentials) -> None:
    secure, plain = House(credentials, tls=True).serve(1), House(credentials).serve(1)
    wrong = secure.client()
    address = Shard(host="127.0.0.1", data_port=secure.servers[0].port)
    with pytest.raises((Unauthorized, Unreachable)):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials, timeout=30).connect()
    address = Shard(host="127.0.0.1", data_port=plain.servers[0].port)
    with pytest.raises((Unauthorized, Unreachable)):
        ShardClient(0, address, WorkerIdentity("uid", 0, 0), credentials, tls=True, timeout=30).connect()
    serving(secure)
    serving(plain)
    wrong.close()
    secure.close()
    plain.close()


def test_impostor_server_receives_no_values(credentials: Credentials, tmp_path: Path) -> None:
    """With another certificate, or without the key: the client stops before it sends a value."""
    false = House(create_secret_dir(tmp_path / "false"), tls=True).serve(1)
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
def authenticated(house: House) -> Iterator[Channel]:
    """A connection after a valid handshake."""
    with raw(house) as sock:
        channel = Channel(sock, timeout=30)
        peer = handshake.Peer(handshake.Role.WORKER, 0, 9, 0)
        handshake.connect(channel, house.credentials, "uid", peer)
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
def test_authenticated_peer_with_a_bad_request_is_disconnected(house: House, request_header: Header) -> None:
    house.serve(1)
    serving(house)
    before = sum(b.nbytes for b in house.servers[0]._pool._free)
    with authenticated(house) as channel:
        data = header.encode(request_header)
        channel.send(data, bytes(min(request_header.length, N * 4)) or b"\0")
        assert gone(channel._sock)
    assert sum(b.nbytes for b in house.servers[0]._pool._free) <= max(before, 2 * N * 4)
    serving(house)


def test_random_bytes_after_the_handshake_are_refused(house: House) -> None:
    house.serve(1)
    serving(house)
    rng = np.random.default_rng(0)
    for _ in range(50):
        with authenticated(house) as channel:
            noise = bytearray(rng.bytes(300))
            if rng.random() < 0.8:  # a valid prefix, so that the rest is parsed
                noise[:6] = struct.pack("<4sBB", header.MAGIC, header.VERSION, int(rng.integers(0, 12)))
            channel.send(bytes(noise))
            with suppress(OSError):  # the server may have closed it already
                channel._sock.shutdown(socket.SHUT_WR)
            assert gone(channel._sock)
    serving(house)


def test_push_cut_off_in_the_middle_is_not_applied(house: House) -> None:
    house.serve(1)
    serving(house)
    with authenticated(house) as channel:
        whole = Header(Op.PUSH_PULL, Codec.BF16, slot=9, seq=1, length=N * 2)
        channel.send(header.encode(whole), bytes(N))
    until(lambda: not house.stores[0]._members.has(9))
    assert house.stores[0].version == 0
    serving(house)


def test_closed_server_wakes_waiting_clients(house: House) -> None:
    client = house.serve(1).client()
    client.hello(MODEL)
    house.stop()
    with pytest.raises(Unreachable):
        client.pull(aligned(N))


def test_only_the_jobs_certificate_is_trusted(credentials: Credentials) -> None:
    context = credentials.client_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
