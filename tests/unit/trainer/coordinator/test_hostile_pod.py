"""A hostile pod on the network: idle connections, endless headers and trickles on the ports of parameter server 0.

It has another address than the workers. A worker still joins, training goes on, and the server stays small. The nightly
run does this for a minute, and measures how much processor time the attack takes from the server.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from shoal_trainer.contract import Phase, Role, Shard, StatusReport, StopAfter
from shoal_trainer.coordinator import bounded_http, metrics
from shoal_trainer.coordinator.bounded_http import HEAD_BYTES
from shoal_trainer.coordinator.http import MAX_UNPROVEN
from shoal_trainer.ps.server import MAX_UNAUTHENTICATED
from shoal_trainer.run.processes import LocalJob, LocalRun
from shoal_trainer.wire.gate import BURST
from tests.unit.trainer.coordinator.served import Served
from tests.unit.trainer.test_local_run import JOB, PATIENCE, trained, until

SECONDS = float(os.environ.get("SHOAL_HOSTILE_SECONDS", "4"))
IDLE = 500
HOSTILE = ("127.0.0.2", 0)
MEMORY = 50 << 20
MINUTE, SHARE = 60.0, 0.02
"""How long an attack is measured, and the part of a core that the server's pushes may lack meanwhile."""


class Pod:
    """Attacks a port until it is closed."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.headers = 0
        """Bytes of headers that were accepted."""

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def idle(self, port: int, count: int) -> None:
        """Keep `count` connections open that send nothing."""

        def hold() -> None:
            held: list[socket.socket] = []
            while not self._stop.wait(0.01):
                with suppress(OSError):
                    held.append(connect(port))
                if len(held) >= count:
                    held.pop(0).close()
            for sock in held:
                sock.close()

        self._start(hold)

    def headers_without_end(self, port: int) -> None:
        """Send header lines of 60 KiB over TLS, without a token."""

        def send() -> None:
            while not self._stop.wait(0.05):
                with suppress(OSError), secured(port) as sock:
                    sock.sendall(b"POST /v1/join HTTP/1.1\r\n")
                    for _ in range(100):
                        sock.sendall(b"X: " + b"a" * 60_000 + b"\r\n")
                        self.headers += 60_000

        self._start(send)

    def trickle(self, port: int, *, tls: bool) -> None:
        """Send and read one byte at a time."""

        def drip() -> None:
            while not self._stop.is_set():
                with suppress(OSError), secured(port) if tls else connect(port) as sock:
                    while not self._stop.wait(0.05):
                        sock.send(b"G")

        self._start(drip)

    def all_at_once(self, shard: Shard) -> None:
        """Attack both ports of a server in every way."""
        self.idle(shard.data_port, IDLE)
        self.idle(shard.control_port, IDLE)
        self.headers_without_end(shard.control_port)
        self.trickle(shard.data_port, tls=False)
        self.trickle(shard.control_port, tls=True)

    def _start(self, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()


def connect(port: int, timeout: float = 5) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout, source_address=HOSTILE)


def secured(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connect(port))


@pytest.mark.nightly
def test_worker_joins_and_trains_while_a_pod_attacks_the_data_and_control_ports(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local_job.py").write_text(JOB)
    job = LocalJob(
        "local_job:job", stop_after=StopAfter(epochs=100_000), storage_uri=(tmp_path / "runs").as_uri()
    )
    with LocalRun(job) as run, Pod() as pod:
        until(run, lambda: trained(run, steps=50))
        (server,) = (each for each in run.processes if each.role is Role.PS)
        process = psutil.Process(server.popen.pid)
        memory, threads = process.memory_info().rss, process.num_threads()
        pod.all_at_once(run.shards[0])
        before = until(run, lambda: trained(run, steps=51))
        run._start(Role.WORKER, 1, 0)
        turn, most, most_threads, deadline = threading.Event(), memory, threads, time.monotonic() + SECONDS
        while time.monotonic() < deadline or not joined(run.status()):
            assert time.monotonic() < deadline + PATIENCE, "the worker could not join"
            most = max(most, process.memory_info().rss)
            most_threads = max(most_threads, process.num_threads())
            turn.wait(0.05)
        until(run, lambda: trained(run, steps=before + 50))
    assert pod.headers > 0
    assert most - memory < MEMORY
    assert most_threads - threads <= MAX_UNAUTHENTICATED + MAX_UNPROVEN + 10


@pytest.mark.nightly
def test_a_minute_of_the_pod_takes_no_more_than_two_percent_of_a_core_from_the_server(
    tmp_path, monkeypatch
) -> None:
    """Processor time, since other load does not lengthen it much. The worker is stopped meanwhile: its pushes
    would take many times as much."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local_job.py").write_text(JOB)
    job = LocalJob(
        "local_job:job", stop_after=StopAfter(epochs=100_000), storage_uri=(tmp_path / "runs").as_uri()
    )
    with LocalRun(job) as run:
        until(run, lambda: trained(run, steps=50))
        (server,) = (psutil.Process(each.popen.pid) for each in run.processes if each.role is Role.PS)
        run.kill(Role.WORKER, signal.SIGSTOP)
        calm = [cores(server, MINUTE / 4)]
        with Pod() as pod:
            pod.all_at_once(run.shards[0])
            attacked = cores(server, MINUTE)
        calm.append(cores(server, MINUTE / 4))
        assert pod.headers > 0
    print(f"of a core, calm: {calm[0]:.4f}, attacked: {attacked:.4f}, calm: {calm[1]:.4f}")
    assert attacked - sum(calm) / 2 <= SHARE


def cores(process: psutil.Process, seconds: float) -> float:
    """The processor time that a process takes in each of the next seconds."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    threading.Event().wait(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


def joined(report: StatusReport | None) -> bool:
    return report is not None and any(worker.slot == 1 and worker.steps > 0 for worker in report.workers)


def test_head_of_a_request_is_bounded_before_it_is_proved(start_server: Any) -> None:
    served: Served = start_server()
    with served.connect() as sock:
        sock.settimeout(20)
        sock.sendall(b"POST /v1/next HTTP/1.1\r\n")
        sent = 0
        with suppress(OSError):
            while sent < 64 * HEAD_BYTES:
                sock.sendall(b"X: " + b"a" * 1000 + b"\r\n")
                sent += 1000
            sent = -1
        assert sent != -1 or b" 431 " in sock.recv(4096)
    assert served.works()


def test_a_long_request_line_is_refused(start_server: Any) -> None:
    served: Served = start_server()
    with served.connect() as sock:
        sock.settimeout(20)
        with suppress(OSError):
            sock.sendall(b"GET /" + b"a" * (4 * HEAD_BYTES))
            assert sock.recv(4096) == b""
    assert served.works()


def test_body_of_a_proved_request_may_be_longer_than_a_head(start_server: Any) -> None:
    served: Served = start_server()
    status, _ = served.ask("PUT", "/v1/files/0/0/0/1/x", b"a" * (8 * HEAD_BYTES))
    assert (status, len(served.files[0, 0, (0, 1), "x"])) == (200, 8 * HEAD_BYTES)


def test_pod_that_has_no_credit_left_is_not_heard(start_server: Any) -> None:
    served: Served = start_server()
    with pytest.raises(TimeoutError, match="timed out"):
        for _ in range(2 * BURST):
            with connect(served.server.port, timeout=0.5) as sock, suppress(ConnectionError):
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(20)
                while sock.recv(4096):
                    pass
    assert served.works()


def test_metrics_are_served_in_few_threads_while_a_pod_holds_connections() -> None:
    reports: list[float] = []

    def status() -> StatusReport:
        reports.append(time.monotonic())
        return StatusReport(job_uid="u", phase=Phase.TRAINING, step=7)

    server = metrics.MetricsServer(status, "127.0.0.1", 0)
    threads = threading.active_count()
    try:
        idle = [connect(server.port) for _ in range(100)]
        for _ in range(20):
            assert b"shoal_steps_total 7.0" in scrape(server.port)
        assert threading.active_count() - threads <= metrics.MAX_CONNECTIONS + 2
        assert len(reports) <= 2 + (reports[-1] - reports[0]) / metrics.CACHED_SECONDS
        for sock in idle:
            sock.close()
    finally:
        server.close()


def scrape(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return answer


def test_a_metrics_connection_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SECONDS", 0.2)
    server = metrics.MetricsServer(lambda: StatusReport(job_uid="u", phase=Phase.TRAINING), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(b"GET /metrics HT")
            assert sock.recv(1) == b""
    finally:
        server.close()


def test_head_has_one_limit_for_all_of_its_lines() -> None:
    class File:
        lines = 0

        def readline(self, limit: int) -> bytes:
            self.lines += 1
            return (b"a" * 100 + b"\n")[:limit]

    file = File()
    head = bounded_http.Head(file)  # type: ignore[arg-type]
    with pytest.raises(bounded_http.HeadTooLong):
        while True:
            head.readline(65537)
    assert file.lines <= HEAD_BYTES // 101 + 1
