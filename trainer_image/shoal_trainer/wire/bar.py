"""Bars addresses from a listening socket in the kernel, for a time.

To accept a connection and close it at once costs this process 16 µs, on a busy machine many times that, and a pod may
begin 10,000 of them a second. What the socket's filter drops costs the kernel alone: its sender hears nothing, and
tries again after a second, then after two. The filter is a classic BPF program, which needs no privilege; where the
kernel has none, the connections are closed as they come.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator

SECONDS = 0.25
"""How long an address is barred: it may be that of a node, with workers that have a proof. They are let in when their
next attempt comes, which is that of their kernel, after a second."""
MOST = 64
"""Addresses that are barred at a time."""

_ATTACH, _DETACH = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux."""
_LOAD, _LOAD_BYTE, _SHIFT, _IF_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
_NETWORK = 0xFFF00000
"""SKF_NET_OFF: offsets from the IP header, as a filter of TCP begins behind it."""
_SOURCE = {4: 12, 6: 8}
"""Where the source address is in the IP header."""


class Bar:
    """The barred addresses of `listener`. Not thread-safe."""

    def __init__(self, listener: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener, self._clock = listener, clock
        self._until: dict[str, float] = {}

    def add(self, address: str) -> None:
        """Bar an address from now on."""
        if len(self._until) < MOST and address not in self._until:
            self._until[address] = self._clock() + SECONDS
            self._attach()

    def lift(self) -> float | None:
        """Let in again whose time is over; returns the seconds until the next one's is, None if none is barred."""
        now = self._clock()
        barred = {address: until for address, until in self._until.items() if until > now}
        if barred.keys() != self._until.keys():
            self._until = barred
            self._attach()
        return min(barred.values()) - now if barred else None

    def _attach(self) -> None:
        with contextlib.suppress(OSError):
            if self._until:
                program = b"".join(_program(self._until))
                memory = ctypes.create_string_buffer(program, len(program))
                self._listener.setsockopt(
                    socket.SOL_SOCKET, _ATTACH, struct.pack("HP", len(program) // 8, ctypes.addressof(memory))
                )
            else:
                self._listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def free(sock: socket.socket) -> None:
    """Take the filter off an accepted connection, which has inherited it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def _program(addresses: Iterable[str]) -> Iterator[bytes]:
    """The instructions, of 8 bytes each: drop what comes from these addresses."""
    for address in addresses:
        ip = ipaddress.ip_address(address.partition("%")[0])
        words = struct.unpack(f"!{len(ip.packed) // 4}I", ip.packed)
        left = 2 * len(words)  # instructions to the end of this address' block, after the version's jump
        yield _instruction(_LOAD_BYTE, _NETWORK)
        yield _instruction(_SHIFT, 4)
        yield _instruction(_IF_EQUAL, ip.version, no=left + 1)
        for index, word in enumerate(words):
            yield _instruction(_LOAD, _NETWORK + _SOURCE[ip.version] + 4 * index)
            yield _instruction(_IF_EQUAL, word, no=left - 2 * index - 1)
        yield _instruction(_RETURN, 0)
    yield _instruction(_RETURN, 0xFFFFFFFF)


def _instruction(code: int, value: int, no: int = 0) -> bytes:
    """`no`: how many instructions to skip where a comparison fails."""
    return struct.pack("=HBBI", code, 0, no, value)
