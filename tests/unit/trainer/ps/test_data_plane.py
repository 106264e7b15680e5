"""Client and server over real sockets: several shards, both encodings, TLS, and everything that can break."""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal_trainer.contract import Shard, Staleness
from shoal_trainer.errors import Fenced, Unauthorized, Unreachable, UserError
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.client import PSClient, ShardClient
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import Channel
from shoal_trainer.wire.header import Codec, Header, Op
from shoal_trainer.wire.messages import Copy, ModelSpec, OptimizerConfig, Progress, Push, WorkerIdentity

N = 100_000
MODEL = ModelSpec(
    fingerprint="f" * 64,
    parameters=N - 100,
    statistics=100,
    optimizer=OptimizerConfig(learning_rate=1.0, batch_size=1),
)


RECOVERY = 10
"""Seconds. A shard waits so long only where somebody it expects does not come."""


class House:
    """Parameter servers of one job in this process."""

    def __init__(self, credentials: Credentials, *, tls: bool = False) -> None:
        self.credentials, self.tls = credentials, tls
        self.stores: list[ShardStore] = []
        self.servers: list[DataServer] = []
        self._stack = ExitStack()

    def serve(
        self, shards: int = 1, *, epoch: int = 0, ports: list[int] | None = None, **arguments: Any
    ) -> House:
        self.stop()
        self.stores = [ShardStore(i, shards, epoch, recovery_seconds=RECOVERY) for i in range(shards)]
        for index, store in enumerate(self.stores):
            port = 0 if ports is None else ports[index]
            server = DataServer(
                store, "uid", self.credentials, host="127.0.0.1", port=port, tls=self.tls, **arguments
            )
            server.start()
            self.servers.append(server)
        return self

    def client(self, slot: int = 0, incarnation: int = 0, **arguments: Any) -> PSClient:
        addresses = [Shard(host="127.0.0.1", data_port=server.port) for server in self.servers]
        identity = WorkerIdentity("uid", slot, incarnation)
        client = PSClient(
            addresses, identity, self.credentials, tls=self.tls, **({"timeout": 20} | arguments)
        )
        self._stack.callback(client.close)
        return client

    def stop(self) -> list[int]:
        ports = [server.port for server in self.servers]
        for server in self.servers:
            server.close()
        self.servers.clear()
        return ports

    def close(self) -> None:
        self._stack.close()
        self.stop()


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return create_secret_dir(tmp_path / "secret")


@pytest.fixture
def house(credentials: Credentials) -> Iterator[House]:
    house = House(credentials)
    yield house
    house.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; 30 s at most."""
    event, left = threading.Event(), 3000
    while not condition():
        event.wait(0.01)
        left -= 1
        assert left, "it never happened"


def flat(value: float) -> np.ndarray:
    out = aligned(N)
    out[:] = value
    return out


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_worker_trains(credentials: Credentials, shards: int, dtype: Any, tls: bool) -> None:
    house = House(credentials, tls=tls).serve(shards)
    client, out = house.client(dtype=dtype), aligned(N)
    welcome = client.hello(MODEL)
    assert not welcome.initialized
    assert len(welcome.shards) == shards
    start = np.linspace(-1, 1, N, dtype=np.float32)
    client.initialize(start)
    pulled = client.pull(out)
    np.testing.assert_allclose(out, start, rtol=0 if dtype == "fp32" else 2**-8)
    for seq in range(1, 4):
        push = Push(seq, 1, pulled.versions, progress=(Progress(0, -1, seq - 1, seq),))
        pulled = client.push_pull(flat(0.25), out, push)
    expected = start + np.where(np.arange(N) < MODEL.parameters, -0.75, 0.75).astype(np.float32)
    np.testing.assert_allclose(out, expected, rtol=0 if dtype == "fp32" else 2**-8, atol=1e-6)
    assert pulled.versions == (3,) * shards
    assert pulled.applied == ({(0, 0): 3},) * shards
    assert pulled.samples == 3
    house.close()


def test_a_worker_that_pulls_idly_is_waited_for_by_nobody(house: House) -> None:
    house.serve()
    store = house.stores[0]
    store.staleness = Staleness(max=0)
    busy, idle = house.client(slot=0), house.client(slot=1)
    for client in (busy, idle):
        client.hello(MODEL)
    busy.initialize(flat(0.0))
    for client in (busy, idle):
        client.pull(aligned(N))
    assert not store._permits.admits(0, 1, 1, 0)
    idle.pull(aligned(N), idle=True)
    assert store._permits.admits(0, 1, 1, 0)


def test_buffers_may_hold_bf16_themselves(house: House) -> None:
    client = house.serve(2).client()
    client.hello(MODEL)
    client.initialize(flat(1.5))
    out = aligned(N, np.uint16)
    client.pull(out)
    assert set(out) == {0x3FC0}
    client.push_pull(out.copy(), out, Push(1, 1, (0, 0)))
    np.testing.assert_array_equal(out[: MODEL.parameters], 0)


def test_workers_come_and_go(house: House) -> None:
    house.serve(2)
    first, out = house.client(0), aligned(N)
    first.hello(MODEL)
    first.initialize(flat(0.0))
    second = house.client(1)
    assert second.hello(MODEL).initialized
    assert second.pull(out).live_workers == 2
    second.push_pull(flat(1.0), out, Push(1, 1, (0, 0)))
    second.close()
    until(lambda: house.stores[0].live_workers == 1)
    pulled = first.push_pull(flat(1.0), out, Push(1, 1, (1, 1)))
    assert pulled.applied[0] == {(0, 0): 1, (1, 0): 1}
    np.testing.assert_array_equal(out[:10], -2)


def test_a_replaced_worker_is_fenced_at_once(house: House) -> None:
    house.serve(1)
    old, new, out = house.client(0, 0), house.client(0, 1), aligned(N)
    old.hello(MODEL)
    old.initialize(flat(0.0))
    new.hello(MODEL)
    with pytest.raises(Fenced):
        old.push_pull(flat(1.0), out, Push(1, 1, (0,)))
    with pytest.raises(Fenced):
        old.hello(MODEL)
    new.pull(out)
    np.testing.assert_array_equal(out, 0)


def test_a_resend_over_a_new_connection_is_not_applied_twice(house: House) -> None:
    house.serve(2)
    client, out = house.client(), aligned(N)
    client.hello(MODEL)
    client.initialize(flat(0.0))
    push = Push(1, 1, (0, 0))
    client.push_pull(flat(1.0), out, push)
    before = client.hello(MODEL)
    assert [shard.last_seq for shard in before.shards] == [1, 1]
    pulled = client.push_pull(flat(1.0), out, push)
    assert pulled.versions == (1, 1)
    np.testing.assert_array_equal(out[:10], -1)


def test_another_model_is_a_user_error(house: House) -> None:
    house.serve(1)
    house.client(0).hello(MODEL)
    other = MODEL.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(UserError, match="build the same model"):
        house.client(1).hello(other)


def test_a_worker_rides_through_the_loss_of_all_parameter_servers(house: House, tmp_path: Path) -> None:
    """Version counters: at most the push in flight is lost, though the snapshot is old."""
    store = SnapshotStore(open_storage(tmp_path.as_uri()))
    house.serve(2)
    client, out = house.client(dtype="bf16"), aligned(N)
    known = client.hello(MODEL)
    client.initialize(flat(0.0))
    pulled = client.pull(out)
    for seq in range(1, 11):
        pulled = client.push_pull(flat(0.125), out, Push(seq, 1, pulled.versions))
        if seq == 4:
            files = [store.write_shard(1, 0, copy) for s in house.stores if (copy := s.copy())]
            store.publish(Manifest(number=1, epoch=0, job_uid="uid", shards=tuple(files), model=MODEL))
    ports = house.stop()
    with pytest.raises(Unreachable):
        client.push_pull(flat(0.125), aligned(N), Push(11, 1, pulled.versions))
    with pytest.raises(Unreachable):
        client.hello(MODEL)
    house.serve(2, epoch=1, ports=ports)
    for index, shard in enumerate(house.stores):
        found = store.load_newest(index, 2)
        assert found is not None
        shard.restore(found[1])
        assert shard.version == 4
    welcome = client.hello(MODEL, Copy(out.copy(), pulled))
    assert welcome.boots != known.boots
    assert [shard.version for shard in welcome.shards] == [10, 10]
    assert [shard.last_seq for shard in welcome.shards] == [10, 10]
    pulled = client.push_pull(flat(0.125), out, Push(11, 1, pulled.versions))
    assert pulled.versions == (11, 11)
    np.testing.assert_allclose(out[:10], -1.375, rtol=2**-8)


@pytest.mark.parametrize("away", [0, 1])
def test_a_shard_gets_the_copy_though_another_one_is_still_away(
    house: House, tmp_path: Path, away: int
) -> None:
    # Both were lost with their node: the one that is back first waits for copies only for a moment.
    store = SnapshotStore(open_storage(tmp_path.as_uri()))
    house.serve(2)
    client, out = house.client(dtype="bf16"), aligned(N)
    client.hello(MODEL)
    client.initialize(flat(0.0))
    pulled = client.push_pull(flat(0.125), out, Push(1, 1, client.pull(out).versions))
    files = [store.write_shard(1, 0, copy) for s in house.stores if (copy := s.copy())]
    store.publish(Manifest(number=1, epoch=0, job_uid="uid", shards=tuple(files), model=MODEL))
    pulled = client.push_pull(flat(0.125), out, Push(2, 1, pulled.versions))
    house.serve(2, epoch=1, ports=house.stop())
    for index, shard in enumerate(house.stores):
        found = store.load_newest(index, 2)
        assert found is not None
        shard.restore(found[1])
    house.servers[away].close()
    with pytest.raises(Unreachable):
        client.hello(MODEL, Copy(out.copy(), pulled))
    assert [shard.version for shard in house.stores] == ([1, 2] if away == 0 else [2, 1])


def test_a_client_never_goes_back_to_an_older_server(house: House) -> None:
    house.serve(1, epoch=3)
    client = house.client()
    client.hello(MODEL)
    superseded: list[int] = []
    house.serve(1, epoch=2, ports=house.stop(), on_superseded=superseded.append)
    with pytest.raises(Unreachable, match="older parameter server"):
        client.hello(MODEL)


# --- those who do not belong here ---------------------------------------------------------------------------------


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
    """Those who belong here are served as before."""
    out = aligned(N)
    client = house.client(slot=77)
    client.hello(MODEL)
    client.initialize(flat(0.0))
    client.pull(out)
    client.close()


def test_a_wrong_key_is_refused_and_said_once(
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


def test_a_slow_loris_is_ended_by_one_deadline(house: House) -> None:
    house.serve(1, handshake_seconds=0.3)
    with raw(house) as sock:
        ended = threading.Event()
        pause = threading.Event()
        for _ in range(100):  # a byte now and then, each well within any single timeout
            try:
                sock.sendall(b"S")
            except OSError:
                ended.set()
                break
            pause.wait(0.05)
        assert ended.is_set()
    until(lambda: _try(lambda: serving(house)))  # this machine may be slower than the deadline, too


def test_many_who_say_nothing_do_not_shut_others_out(house: House) -> None:
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


def test_a_plain_client_at_a_tls_port_and_the_other_way_round(credentials: Credentials) -> None:
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


def test_a_false_parameter_server_learns_nothing(credentials: Credentials, tmp_path: Path) -> None:
    """It has another certificate, or the same address without the key: the client stops before it sends a number."""
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
def proven(house: House) -> Iterator[Channel]:
    """A connection that passed the handshake, for misbehaving afterwards."""
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
def test_a_proven_peer_that_misbehaves_is_ended(house: House, request_header: Header) -> None:
    house.serve(1)
    serving(house)
    before = sum(b.nbytes for b in house.servers[0]._pool._free)
    with proven(house) as channel:
        data = header.encode(request_header)
        channel.send(data, bytes(min(request_header.length, N * 4)) or b"\0")
        assert gone(channel._sock)
    assert sum(b.nbytes for b in house.servers[0]._pool._free) <= max(before, 2 * N * 4)
    serving(house)


def test_random_bytes_after_the_handshake(house: House) -> None:
    house.serve(1)
    serving(house)
    rng = np.random.default_rng(0)
    for _ in range(50):
        with proven(house) as channel:
            noise = bytearray(rng.bytes(300))
            if rng.random() < 0.8:  # far enough to be taken for a request
                noise[:6] = struct.pack("<4sBB", header.MAGIC, header.VERSION, int(rng.integers(0, 12)))
            channel.send(bytes(noise))
            with suppress(OSError):  # it may have been ended already
                channel._sock.shutdown(socket.SHUT_WR)
            assert gone(channel._sock)
    serving(house)


def test_a_connection_that_breaks_in_the_middle_of_a_push_leaves_no_trace(house: House) -> None:
    house.serve(1)
    serving(house)
    with proven(house) as channel:
        whole = Header(Op.PUSH_PULL, Codec.BF16, slot=9, seq=1, length=N * 2)
        channel.send(header.encode(whole), bytes(N))
    until(lambda: not house.stores[0]._members.has(9))
    assert house.stores[0].version == 0
    serving(house)


def test_a_closed_server_wakes_those_who_wait(house: House) -> None:
    client = house.serve(1).client()
    client.hello(MODEL)
    house.stop()
    with pytest.raises(Unreachable):
        client.pull(aligned(N))


def test_the_certificate_is_the_only_one_that_is_trusted(credentials: Credentials) -> None:
    context = credentials.client_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
