"""A logind for one node, so that the kubelet's graceful shutdown works without systemd.

A cloud shuts a spot machine down with its power button; logind notifies the kubelet, which sets its node's status,
ends the pods, and releases the shutdown. The kubelet uses three parts of org.freedesktop.login1
(https://www.freedesktop.org/wiki/Software/systemd/inhibit/): it reads the maximum delay, takes an inhibitor (a file
descriptor), and waits for the signal PrepareForShutdown. This process serves those on a socket, and sends the signal
on SIGUSR1. It implements the necessary part of D-Bus (https://dbus.freedesktop.org/doc/dbus-specification.html),
little endian.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALL, RETURN, ERROR, SIGNAL = 1, 2, 3, 4
PATH, INTERFACE, MEMBER, ERROR_NAME, REPLY_SERIAL, DESTINATION, SENDER, SIGNATURE, UNIX_FDS = range(1, 10)
_FIELD_TYPES = {PATH: "o", REPLY_SERIAL: "u", SIGNATURE: "g", UNIX_FDS: "u"}
DELAY_MICROSECONDS = 600_000_000
LOGIND = "org.freedesktop.login1"


class Writer:
    """Marshals the necessary types, each aligned to its size."""

    def __init__(self) -> None:
        self.data = bytearray()

    def align(self, size: int) -> None:
        """Pad with zeros."""
        self.data += bytes(-len(self.data) % size)

    def put(self, kind: str, value: Any) -> None:
        """One value: y byte, u uint32, h descriptor, b boolean, t uint64, s o string, g signature, v variant."""
        if kind == "y":
            self.data.append(value)
        elif kind in "uhb":
            self.align(4)
            self.data += struct.pack("<I", int(value))
        elif kind == "t":
            self.align(8)
            self.data += struct.pack("<Q", value)
        elif kind in "so":
            self.put("u", len(value.encode()))
            self.data += value.encode() + b"\0"
        elif kind == "g":
            self.data += bytes([len(value)]) + value.encode() + b"\0"
        elif kind == "v":
            self.put("g", value[0])
            self.put(*value)
        else:
            raise ValueError(f"unsupported type: {kind}")


class Reader:
    """Unmarshals headers, and strings in bodies."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def align(self, size: int) -> None:
        """Skip the padding."""
        self.at += -self.at % size

    def take(self, kind: str) -> Any:
        """One value of a type of `Writer`."""
        if kind == "y":
            self.at += 1
            return self.data[self.at - 1]
        if kind in "uhb":
            self.align(4)
            self.at += 4
            return struct.unpack_from("<I", self.data, self.at - 4)[0]
        if kind in "so":
            length = self.take("u")
            self.at += length + 1
            return self.data[self.at - length - 1 : self.at - 1].decode()
        if kind == "g":
            length = self.take("y")
            self.at += length + 1
            return self.data[self.at - length - 1 : self.at - 1].decode()
        if kind == "v":
            return self.take(self.take("g"))
        raise ValueError(f"unsupported type: {kind}")


@dataclass
class Message:
    """One message: its type, serial, header fields, and its body as (signature, values) or raw bytes."""

    kind: int
    serial: int
    fields: dict[int, Any] = field(default_factory=dict)
    body: bytes = b""

    @classmethod
    def make(cls, kind: int, serial: int, fields: dict[int, Any], body: list[tuple[str, Any]]) -> Message:
        """A message with a body of these values."""
        writer = Writer()
        for each in body:
            writer.put(*each)
        if body:
            fields = {**fields, SIGNATURE: "".join(kind for kind, _ in body)}
        return cls(kind, serial, fields, bytes(writer.data))

    def encode(self) -> bytes:
        """The encoded message."""
        entries = Writer()
        for code, value in self.fields.items():
            entries.align(8)
            entries.put("y", code)
            entries.put("v", (_FIELD_TYPES.get(code, "s"), value))
        head = Writer()
        head.data += struct.pack("<cBBBII", b"l", self.kind, 0, 1, len(self.body), self.serial)
        head.put("u", len(entries.data))
        head.data += entries.data
        head.align(8)
        return bytes(head.data) + self.body

    @classmethod
    def decode(cls, data: bytes) -> tuple[Message, int] | None:
        """The first message in a buffer and its length; None while it is incomplete."""
        if len(data) < 16:
            return None
        _, kind, _, _, body_length, serial, fields_length = struct.unpack_from("<cBBBIII", data)
        header = 16 + fields_length
        header += -header % 8
        if len(data) < header + body_length:
            return None
        reader = Reader(data[: 16 + fields_length])
        reader.at = 16
        fields: dict[int, Any] = {}
        while reader.at < 16 + fields_length:
            reader.align(8)
            code = reader.take("y")
            fields[code] = reader.take("v")
        length = header + body_length
        return cls(kind, serial, fields, data[header:length]), length


class Logind:
    """Answers one client at a time; `shut_down` sends the signal to those that are connected."""

    def __init__(self) -> None:
        self._clients: set[socket.socket] = set()
        self._serial = 0

    def shut_down(self) -> None:
        """Send PrepareForShutdown(true)."""
        fields = {
            PATH: "/org/freedesktop/login1",
            INTERFACE: f"{LOGIND}.Manager",
            MEMBER: "PrepareForShutdown",
        }
        message = Message.make(SIGNAL, self._next(), {**fields, SENDER: LOGIND}, [("b", True)])
        for client in list(self._clients):
            client.sendall(message.encode())

    def serve(self, client: socket.socket) -> None:
        """Serve one connection."""
        rest = authenticate(client)
        self._clients.add(client)
        try:
            while True:
                while (decoded := Message.decode(rest)) is not None:
                    message, length = decoded
                    rest = rest[length:]
                    self._answer(client, message)
                chunk = client.recv(65536)
                if not chunk:
                    return
                rest += chunk
        finally:
            self._clients.discard(client)
            client.close()

    def _answer(self, client: socket.socket, call: Message) -> None:
        if call.kind != CALL:
            return
        member = call.fields.get(MEMBER)
        fields = {REPLY_SERIAL: call.serial, SENDER: LOGIND, DESTINATION: ":1.1"}
        body: list[tuple[str, Any]] = []
        descriptor: int | None = None
        if member == "Hello":
            body = [("s", ":1.1")]
        elif member == "Get":
            body = [("v", ("t", DELAY_MICROSECONDS))]
        elif member == "Inhibit":
            descriptor, ours = os.pipe()
            os.close(ours)
            body = [("h", 0)]
            fields[UNIX_FDS] = 1
        elif member not in ("AddMatch", "RemoveMatch", "ReleaseName", "ReloadUnit", "Reload"):
            fields[ERROR_NAME] = "org.freedesktop.DBus.Error.UnknownMethod"
        kind = ERROR if ERROR_NAME in fields else RETURN
        data = Message.make(kind, self._next(), fields, body).encode()
        if descriptor is None:
            client.sendall(data)
            return
        rights = array.array("i", [descriptor])
        client.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(descriptor)

    def _next(self) -> int:
        self._serial += 1
        return self._serial


def authenticate(client: socket.socket) -> bytes:
    """Authenticate a client: anyone who can open the socket (root). Returns the bytes after the handshake."""
    buffer = b""
    while True:
        while b"\r\n" in buffer:
            line, buffer = buffer.split(b"\r\n", 1)
            command = line.lstrip(b"\0").split(b" ")
            if command[0] == b"AUTH":
                client.sendall(
                    b"OK 0123456789abcdef0123456789abcdef\r\n"
                    if len(command) > 1
                    else b"REJECTED EXTERNAL\r\n"
                )
            elif command[0] == b"NEGOTIATE_UNIX_FD":
                client.sendall(b"AGREE_UNIX_FD\r\n")
            elif command[0] == b"BEGIN":
                return buffer
            else:
                client.sendall(b"ERROR\r\n")
        chunk = client.recv(4096)
        if not chunk:
            return b""
        buffer += chunk


def main(path: Path) -> None:
    """Listen on a socket; SIGUSR1 is the power button."""
    logind = Logind()
    signal.signal(signal.SIGUSR1, lambda _number, _frame: logind.shut_down())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            client, _ = listener.accept()
            threading.Thread(target=logind.serve, args=[client], daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
