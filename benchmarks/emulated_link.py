"""A link of a given rate, delay and loss between two network namespaces.

Not every kernel has netem, so each packet of two TUN devices passes through a loop of this process, compiled by numba.
It needs root, ip, and a core. Packets have 1,500 bytes, as the devices have no offloads, and are lost one by one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numba import njit

NEAR, FAR = "10.213.8.1", "10.213.8.2"
"""The addresses of its ends."""
TUNSETIFF, TUN, NO_PROTOCOL = 0x400454CA, 0x0001, 0x1000
SLOTS, SLOT = 1 << 14, 2048
"""Packets that are under way in one direction, and bytes for each."""
QUEUE_SECONDS = 0.05
"""The buffer in front of the link; what finds it full is lost."""

_libc = ctypes.CDLL(None)
_read, _write, _usleep = _libc.read, _libc.write, _libc.usleep
_read.argtypes = _write.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
_read.restype = _write.restype = ctypes.c_ssize_t
_usleep.argtypes = [ctypes.c_uint]
_now = _libc.clock_gettime
_now.argtypes = [ctypes.c_int, ctypes.c_size_t]


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _forward(
    fds: Any,
    rate: float,
    delay: float,
    loss: float,
    memory: Any,
    lengths: Any,
    due: Any,
    clock: Any,
    stop: Any,
) -> None:
    """Move packets both ways until `stop`: direction d from fds[d] to fds[1 - d]."""
    head, tail = np.zeros(2, np.int64), np.zeros(2, np.int64)
    free = np.zeros(2)  # when the link of a direction has sent what it was given
    while not stop[0]:
        idle = True
        for d in range(2):
            _now(1, clock.ctypes.data)
            now = clock[0] + clock[1] * 1e-9
            for _ in range(16):
                if head[d] - tail[d] == SLOTS:
                    break
                slot = head[d] % SLOTS
                count = _read(fds[d], memory[d, slot].ctypes.data, SLOT)
                if count <= 0:
                    break
                idle = False
                free[d] = max(free[d], now)
                if free[d] - now > QUEUE_SECONDS or np.random.random() < loss:
                    continue
                free[d] += count / rate
                lengths[d, slot], due[d, slot] = count, free[d] + delay
                head[d] += 1
            for _ in range(16):
                slot = tail[d] % SLOTS
                if tail[d] == head[d] or due[d, slot] > now:
                    break
                idle = False
                _write(fds[1 - d], memory[d, slot].ctypes.data, lengths[d, slot])
                tail[d] += 1
        if idle:
            _usleep(30)


@contextmanager
def emulated_link(
    rate: float, rtt: float, loss: float, congestion: str = "cubic"
) -> Iterator[tuple[list[str], list[str]]]:
    """The prefixes of commands that run at NEAR and at FAR. `rate`: bytes per second and direction.

    `rtt`: seconds; `loss`: the share of packets, in both directions; `congestion`: TCP's control on both sides.
    """
    prefixes = []
    with ExitStack() as stack:
        fds = []
        for side, address in (("a", NEAR), ("b", FAR)):
            name, device = f"shoal-link-{os.getpid()}{side}", f"shl{os.getpid() % 10**8}{side}"
            inside = f"ip netns exec {name}"
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            fds.append(_tun(device))
            stack.callback(os.close, fds[-1])
            for command in (
                f"ip link set {device} netns {name}",
                f"{inside} sysctl -qw net.ipv4.tcp_congestion_control={congestion}",
                f"{inside} ip addr add {address}/30 dev {device}",
                f"{inside} ip link set {device} up mtu 1500 txqueuelen 10000",
            ):
                subprocess.run(command.split(), check=True)
            prefixes.append(inside.split())
        stop = np.zeros(1, np.bool_)
        memory, lengths = np.zeros((2, SLOTS, SLOT), np.uint8), np.zeros((2, SLOTS), np.int64)
        rest = memory, lengths, np.zeros((2, SLOTS)), np.zeros(2, np.int64), stop
        thread = threading.Thread(target=_forward, args=(np.array(fds), rate, rtt / 2, loss, *rest))
        thread.start()
        try:
            yield prefixes[0], prefixes[1]
        finally:
            stop[0] = True
            thread.join()


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | NO_PROTOCOL))
    return fd
