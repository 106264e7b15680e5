"""The node's logind: D-Bus messages, and the signal to a client that acts like the kubelet."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.cluster.logind import (
    CALL,
    INTERFACE,
    MEMBER,
    PATH,
    REPLY_SERIAL,
    RETURN,
    SIGNAL,
    SIGNATURE,
    Logind,
    Message,
    Reader,
    Writer,
    authenticate,
)

VALUES = st.one_of(
    st.tuples(st.just("u"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("y"), st.integers(0, 255)),
    st.tuples(st.just("s"), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)),
)


@given(st.lists(VALUES, max_size=8))
def test_reader_returns_written_values(values: list[tuple[str, Any]]) -> None:
    writer = Writer()
    for kind, value in values:
        writer.put(kind, value)
    reader = Reader(bytes(writer.data))
    assert [reader.take(kind) for kind, _ in values] == [value for _, value in values]


@given(st.text("abc/.", min_size=1, max_size=30), st.lists(VALUES, max_size=4), st.integers(1, 2**31))
def test_decoded_message_equals_encoded_message(
    member: str, body: list[tuple[str, Any]], serial: int
) -> None:
    message = Message.make(CALL, serial, {PATH: "/", MEMBER: member}, body)
    data = message.encode()
    assert Message.decode(data[:-1]) is None
    decoded = Message.decode(data + b"next")
    assert decoded is not None
    assert decoded == (message, len(data))


class Client:
    """A client that acts like the kubelet."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.rest = b""
        self.serial = 0

    def greet(self) -> None:
        self.end.sendall(b"\0AUTH\r\n")
        assert self.end.recv(100) == b"REJECTED EXTERNAL\r\n"
        self.end.sendall(b"AUTH EXTERNAL 30\r\n")
        assert self.end.recv(100).startswith(b"OK ")
        self.end.sendall(b"NEGOTIATE_UNIX_FD\r\n")
        assert self.end.recv(100) == b"AGREE_UNIX_FD\r\n"
        self.end.sendall(b"BEGIN\r\n")

    def call(self, member: str, body: list[tuple[str, Any]] | None = None) -> Message:
        self.serial += 1
        fields = {PATH: "/org/freedesktop/login1", MEMBER: member}
        self.end.sendall(Message.make(CALL, self.serial, fields, body or []).encode())
        answer = self.receive()
        assert (answer.kind, answer.fields[REPLY_SERIAL]) == (RETURN, self.serial)
        return answer

    def receive(self) -> Message:
        while (decoded := Message.decode(self.rest)) is None:
            data, self.descriptors, _, _ = socket.recv_fds(self.end, 4096, 4)
            assert data, "the connection was closed"
            self.rest += data
        self.rest = self.rest[decoded[1] :]
        return decoded[0]


@pytest.fixture
def client() -> Any:
    ours, theirs = socket.socketpair()
    logind = Logind()
    thread = threading.Thread(target=logind.serve, args=[theirs])
    thread.start()
    with ours:
        each = Client(ours)
        each.greet()
        yield each, logind
    thread.join(30)
    assert not thread.is_alive()


def test_calls_of_kubelet_and_shutdown_signal(client: tuple[Client, Logind]) -> None:
    kubelet, logind = client
    assert kubelet.call("Hello").fields[SIGNATURE] == "s"
    delay = kubelet.call("Get", [("s", "org.freedesktop.login1.Manager"), ("s", "InhibitDelayMaxUSec")])
    assert delay.fields[SIGNATURE] == "v"
    assert int.from_bytes(delay.body[-8:], "little") >= 30_000_000
    kubelet.call("Inhibit", [("s", "shutdown"), ("s", "kubelet"), ("s", "why"), ("s", "delay")])
    assert len(kubelet.descriptors) == 1
    os.close(kubelet.descriptors[0])
    kubelet.call("AddMatch", [("s", "type='signal'")])
    logind.shut_down()
    signal = kubelet.receive()
    assert (signal.kind, signal.fields[MEMBER]) == (SIGNAL, "PrepareForShutdown")
    assert signal.fields[INTERFACE] == "org.freedesktop.login1.Manager"
    assert signal.body == (1).to_bytes(4, "little")


def test_client_that_disconnects_in_handshake_is_ignored() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert authenticate(theirs) == b""
