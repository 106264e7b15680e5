"""Mutual authentication with the job's key, and refusal of peers without it."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_trainer.errors import Fenced, TrainerError, Unauthorized, Unreachable, UserError
from shoal_trainer.security import Credentials, create_secret_dir, derive
from shoal_trainer.wire import handshake
from shoal_trainer.wire.channel import Channel
from shoal_trainer.wire.handshake import Peer, Server, Verdict

WORKER = Peer(shard=0, slot=3, incarnation=1)
SERVER = Server(epoch=2, boot=99)


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return create_secret_dir(tmp_path / "secret")


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    with connected() as channels:
        yield channels


@contextlib.contextmanager
def connected() -> Iterator[tuple[Channel, Channel]]:
    listener = socket.create_server(("127.0.0.1", 0))
    left = socket.create_connection(listener.getsockname())
    right, _ = listener.accept()
    listener.close()
    channels = Channel(left, timeout=30), Channel(right, timeout=30)
    yield channels
    for channel in channels:
        channel.close()


def both(client: Callable[[], Any], server: Callable[[], Any]) -> tuple[Any, Any]:
    """Run both sides; each result is what it returned or raised."""
    results: list[Any] = [None, None]

    def run(index: int, function: Callable[[], Any]) -> None:
        try:
            results[index] = function()
        except TrainerError as error:
            results[index] = error

    thread = threading.Thread(target=run, args=(1, server))
    thread.start()
    run(0, client)
    thread.join()
    return results[0], results[1]


def shake_hands(
    pair: tuple[Channel, Channel],
    mine: Credentials,
    theirs: Credentials,
    *,
    peer: Peer = WORKER,
    job: str = "uid",
    binding: tuple[bytes, bytes] = (b"", b""),
    verdict: Verdict = Verdict.WELCOME,
) -> tuple[Any, Any]:
    left, right = pair

    def serve() -> Peer:
        found = handshake.accept(
            right, theirs, "uid", 0, SERVER, binding=binding[1], deadline=time.monotonic() + 30
        )
        handshake.conclude(right, verdict)
        return found

    def ask() -> Any:
        return handshake.connect(left, mine, job, peer, binding=binding[0])

    return both(lambda: or_close(left, ask), lambda: or_close(right, serve))


def or_close(channel: Channel, function: Callable[[], Any]) -> Any:
    """Close the channel after an error, so that the other side does not wait for its timeout."""
    try:
        return function()
    except TrainerError:
        channel.close()
        raise


def test_both_sides_learn_the_others_identity(
    pair: tuple[Channel, Channel], credentials: Credentials
) -> None:
    assert shake_hands(pair, credentials, credentials) == (SERVER, WORKER)


def test_wrong_key_with_the_same_id_is_refused(
    pair: tuple[Channel, Channel], credentials: Credentials, tmp_path: Path
) -> None:
    client, server = shake_hands(pair, create_secret_dir(tmp_path / "other"), credentials)
    assert isinstance(client, Unauthorized)
    assert "cannot prove" in str(client)
    assert isinstance(server, TrainerError)


def test_unknown_key_id_is_refused(
    pair: tuple[Channel, Channel], credentials: Credentials, tmp_path: Path
) -> None:
    client, server = shake_hands(pair, create_secret_dir(tmp_path / "other", key_id="9"), credentials)
    assert isinstance(client, Unauthorized)
    assert isinstance(server, Unauthorized)


@pytest.mark.parametrize(
    "arguments",
    [{"job": "another"}, {"peer": Peer(1, 3, 1)}, {"binding": (b"a", b"b")}],
    ids=["another job", "another shard", "another certificate"],
)
def test_handshake_for_another_target_is_refused(
    pair: tuple[Channel, Channel], credentials: Credentials, arguments: dict[str, Any]
) -> None:
    client, _ = shake_hands(pair, credentials, credentials, **arguments)
    assert isinstance(client, Unauthorized)


def test_replaced_worker_gets_fenced_verdict(pair: tuple[Channel, Channel], credentials: Credentials) -> None:
    client, _ = shake_hands(pair, credentials, credentials, verdict=Verdict.FENCED)
    assert isinstance(client, Fenced)


def test_older_parameter_server_is_rejected(pair: tuple[Channel, Channel], credentials: Credentials) -> None:
    client, _ = shake_hands(pair, credentials, credentials, peer=Peer(0, 3, 1, minimum_epoch=3))
    assert isinstance(client, Unreachable)
    assert "older parameter server" in str(client)


def test_a_token_is_for_one_purpose_and_one_key(credentials: Credentials, tmp_path: Path) -> None:
    assert credentials.token_matches("status", credentials.token("status"))
    assert not credentials.token_matches("status", credentials.token("control"))
    assert not credentials.token_matches("status", create_secret_dir(tmp_path / "other").token("status"))
    assert not credentials.token_matches("status", "")


def test_echo_server_is_refused(pair: tuple[Channel, Channel], credentials: Credentials) -> None:
    left, right = pair

    def echo() -> None:
        right.send(bytes(right.receive_bytes(handshake._CLIENT.size, limit=1000)))

    client, _ = both(lambda: handshake.connect(left, credentials, "uid", WORKER), echo)
    assert isinstance(client, Unauthorized)


def played(credentials: Credentials, answer: Callable[[bytes], bytes]) -> tuple[Any, bytes]:
    """What a client makes of a server that answers its first frame so, and sends no more; and that frame."""
    with connected() as (left, right):

        def serve() -> bytes:
            hello = bytes(right.receive_bytes(handshake._CLIENT.size, limit=1000))
            right.send(answer(hello))
            right.close()
            return hello

        return both(lambda: handshake.connect(left, credentials, "uid", WORKER), serve)


def answer_of_a_server(credentials: Credentials, hello: bytes) -> bytes:
    with connected() as (left, right):

        def accept() -> Peer:
            return handshake.accept(right, credentials, "uid", 0, SERVER, deadline=time.monotonic() + 30)

        def ask() -> bytes:
            left.send(hello)
            answer = bytes(left.receive_bytes(handshake._SERVER.size, limit=1000))
            left.close()
            return answer

        return bytes(both(ask, accept)[0])


def test_server_that_was_recorded_is_refused(credentials: Credentials) -> None:
    recorded: list[bytes] = []

    def record(hello: bytes) -> bytes:
        recorded.append(answer_of_a_server(credentials, hello))
        return recorded[0]

    first, hello = played(credentials, record)
    assert isinstance(first, Unreachable)  # it was believed, and is gone
    again, fresh = played(credentials, lambda _hello: recorded[0])
    assert isinstance(again, Unauthorized)
    assert hello != fresh


def test_each_side_proves_itself_with_a_key_of_its_own(credentials: Credentials) -> None:
    """A proof that is sent back proves nothing."""
    hello = b"hello"
    by_server, by_client = (
        handshake._proof(credentials.key, side, b"b", hello) for side in ("server", "client")
    )
    assert by_server == hmac.digest(derive(credentials.key, "data/server"), b"b" + hello, "sha256")
    assert by_client == hmac.digest(derive(credentials.key, "data/client"), b"b" + hello, "sha256")
    assert by_server != by_client


def test_key_is_not_in_repr(credentials: Credentials) -> None:
    for text in (repr(credentials), str(credentials)):
        assert credentials.key.hex() not in text
        assert repr(credentials.key) not in text


def test_missing_or_short_key_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mount the job's Secret"):
        Credentials.load(tmp_path)
    create_secret_dir(tmp_path)
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(UserError, match="5 bytes, expected 32"):
        Credentials.load(tmp_path)


def test_secret_files_are_owner_readable_only(tmp_path: Path) -> None:
    create_secret_dir(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "secret").iterdir())
