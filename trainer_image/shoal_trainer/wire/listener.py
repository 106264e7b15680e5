"""Accepts the connections to a port, each in a thread, at a bounded cost before a peer has proved anything.

Bounded are the connections (see `Gate`), so also their threads; and the time of a TLS handshake, which runs in the
connection's thread: a client that stalls delays no other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial

from shoal_trainer.errors import Fenced, ProtocolError, Unauthorized, Unreachable
from shoal_trainer.wire import bar
from shoal_trainer.wire.gate import Gate, Visit, shut

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
PAUSE_SECONDS = 0.05
"""Before the next accept if the process has reached its limit of file descriptors or threads."""
LOOK_SECONDS = 0.1
"""How often connections that proved nothing in time are closed."""


class RefusalLog:
    """Logs refused connections: at most one message per `interval` seconds and address, with a count."""

    def __init__(self, clock: Callable[[], float], interval: float = 60.0, max_addresses: int = 1024) -> None:
        self._clock, self._interval, self._max_addresses = clock, interval, max_addresses
        self._seen: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def refused(self, address: str, reason: object) -> None:
        """Count a refusal, and log it unless the address was logged recently."""
        with self._lock:
            now = self._clock()
            last, count = self._seen.get(address, (-self._interval, 0))
            if now - last < self._interval:
                self._seen[address] = (last, count + 1)
                return
            if len(self._seen) >= self._max_addresses:
                self._seen.clear()
            self._seen[address] = (now, 0)
        earlier = f" ({count} more since the last message)" if count else ""
        log.warning("refused a connection from %s: %s%s", address, reason, earlier)


class Listener:
    """Calls `serve` for each connection to `host`:`port` (0: any free port, then in `port`), and closes it afterwards.

    At most `unproven` connections without proof, each for at most `proof_seconds`, and `connections` in all. With a
    `context`, the socket that `serve` gets is secured. `name`: of the threads.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        serve: Callable[[socket.socket, Visit], object],
        *,
        unproven: int,
        connections: float = math.inf,
        proof_seconds: float = math.inf,
        context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._serve = name, serve
        self._connections, self._proof_seconds = connections, proof_seconds
        self._context, self._clock = context, clock
        self.handshake_seconds = HANDSHAKE_SECONDS
        self.refusals = RefusalLog(clock)
        self.open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=256)
        self._bar = bar.Bar(self._socket)
        self.gate = Gate(unproven, clock, self._bar.add)
        self.port: int = self._socket.getsockname()[1]
        self.acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        """Start accepting connections."""
        self.acceptor.start()

    def close(self) -> None:
        """Stop accepting, and end all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.end_connections()
        if self.acceptor.is_alive():
            self.acceptor.join(5)

    def end_connections(self) -> None:
        """Wake the threads of all connections, which then close them."""
        with self._open_lock:
            connections = list(self.open)
        for connection in connections:
            shut(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                waits = [self._bar.lift(), None if self._proof_seconds == math.inf else LOOK_SECONDS]
                self._socket.settimeout(min((wait for wait in waits if wait is not None), default=None))
                sock, address = self._socket.accept()
            except TimeoutError:
                sock = None
            except OSError:
                if self._closed:
                    return
                time.sleep(PAUSE_SECONDS)
                continue
            self.gate.expire(self._clock())
            if sock is not None:
                self._admit(sock, str(address[0]))

    def _admit(self, sock: socket.socket, address: str) -> None:
        bar.free(sock)
        sock.settimeout(self.handshake_seconds)
        with self._open_lock:
            full = len(self.open) >= self._connections
        deadline = self._clock() + self._proof_seconds
        visit = None if full else self.gate.enter(address, partial(shut, sock), deadline)
        if visit is None:
            self.refusals.refused(address, "too many connections")
            sock.close()
            return
        try:
            run = threading.Thread(
                target=self._run, args=(sock, visit), name=f"{self._name}-{address}", daemon=True
            )
            run.start()
        except RuntimeError as error:  # the pod's PID limit, which counts threads
            self.gate.leave(visit)
            self.refusals.refused(address, error)
            sock.close()
            time.sleep(PAUSE_SECONDS)

    def _run(self, sock: socket.socket, visit: Visit) -> None:
        address = visit.address
        try:
            try:
                self._add(sock)
                if self._context is not None:
                    sock = self._secured(sock, self._context, visit)
                self._serve(sock, visit)
            finally:
                self.gate.leave(visit)
                if visit.evicted:
                    self.refusals.refused(address, "too many connections without proof, or no proof in time")
        except (ProtocolError, Fenced) as error:
            self.refusals.refused(address, error)
        except (Unreachable, OSError) as error:
            log.debug("%s: %s", address, error)
        except Exception:
            log.exception("closed the connection from %s after an internal error", address)
        finally:
            with self._open_lock:
                self.open.discard(sock)
            shut(sock)
            sock.close()

    def _secured(self, sock: socket.socket, context: ssl.SSLContext, visit: Visit) -> socket.socket:
        """The connection after the TLS handshake, in place of the one that was accepted."""
        secured = sock
        try:
            secured = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._add(secured, instead_of=sock)
            visit.close = partial(shut, secured)
            if visit.evicted:
                raise Unreachable("too many connections")
            secured.do_handshake()
            return secured
        except BaseException as error:
            with self._open_lock:
                self.open.discard(secured)
            secured.close()
            if isinstance(error, TimeoutError):
                raise Unauthorized(f"no TLS handshake within {self.handshake_seconds:g} s") from None
            # Closed by the peer, as by a health probe, is no refusal.
            if isinstance(error, ssl.SSLError) and not isinstance(
                error, ssl.SSLEOFError | ssl.SSLZeroReturnError
            ):
                raise Unauthorized(f"TLS handshake failed: {error.reason}") from None
            raise

    def _add(self, sock: socket.socket, instead_of: socket.socket | None = None) -> None:
        with self._open_lock:
            if instead_of is not None:
                self.open.discard(instead_of)
            self.open.add(sock)
        if self._closed:
            raise Unreachable("the server is closing")
