"""The transport over HTTPS against a server on loopback, and where it finds its API server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster import http
from shoal.cluster import server as servers
from shoal.cluster.http import ANSWER_BYTES, CONNECTIONS, KEPT_OPEN, LONGEST_RETRY_AFTER, HttpTransport
from shoal.cluster.own_thread import OwnThread
from shoal.cluster.server import ApiServer, TokenFile, find, in_pod
from shoal.cluster.transport import APPLY_PATCH, Fenced, StreamRefused
from shoal.controllers.trainingjob.credentials import InstallKey, job_credentials
from shoal.errors import LeaseLost, TooLong, Unavailable, UsageError
from shoal.process.life import TLS_BUFFER
from shoal_trainer.security import Credentials
from tests.meanwhile import during


async def nobody() -> None:
    return None


@asynccontextmanager
async def serving(
    answer: Callable[[web.Request], Any],
    bearer: servers.Bearer = nobody,
    tls: ssl.SSLContext | None = None,
    connections: int = CONNECTIONS,
    **options: Any,
) -> AsyncIterator[HttpTransport]:
    """A transport whose requests `answer` answers."""

    async def handle(request: web.Request) -> web.StreamResponse:
        found = answer(request)
        response: web.StreamResponse = await found if asyncio.iscoroutine(found) else found
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    scheme = "http" if tls is None else "https"
    transport = HttpTransport(ApiServer(f"{scheme}://127.0.0.1:{port}", bearer, **options), connections)
    try:
        yield transport
    finally:
        await transport.close()
        await runner.cleanup()


async def test_request_carries_its_query_body_type_and_token() -> None:
    heard: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        heard.update(
            method=request.method,
            path=request.raw_path,
            body=await request.json(),
            type=request.headers["Content-Type"],
            token=request.headers["Authorization"],
        )
        return web.json_response({"kind": "Pod"}, status=201)

    async def bearer() -> str:
        return "secret"

    async with serving(answer, bearer) as transport:
        got = await transport.request(
            "PATCH",
            "/api/v1/namespaces/a/pods",
            query={"labelSelector": "shoal.dev/job in (a,b)", "force": "true"},
            body={"spec": {"text": "ü", "none": None, "list": [1, "2", 3.5]}},
            content_type=APPLY_PATCH,
        )
    assert got.status == 201
    assert json.loads(got.body) == {"kind": "Pod"}
    assert heard == {
        "method": "PATCH",
        "path": "/api/v1/namespaces/a/pods?labelSelector=shoal.dev%2Fjob+in+%28a%2Cb%29&force=true",
        "body": {"spec": {"text": "ü", "none": None, "list": [1, "2", 3.5]}},
        "type": APPLY_PATCH,
        "token": "Bearer secret",
    }


async def test_requests_in_a_row_use_one_connection_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The official client asked for proxies and ~/.netrc in two threads for each request."""
    peers, threads = set(), 0

    def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response({})

    loop = asyncio.get_running_loop()
    run = loop.run_in_executor

    def counted(*given: Any) -> Any:
        nonlocal threads
        threads += 1
        return run(*given)

    async with serving(answer) as transport:
        await transport.request("GET", "/first")
        monkeypatch.setattr(loop, "run_in_executor", counted)
        for _ in range(20):
            await transport.request("GET", "/next")
    assert len(peers) == 1
    assert threads == 0


async def test_connections_that_a_burst_opened_end_soon_after_it_but_for_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 of them held 7 MiB for as long as a loss may need one at once."""
    monkeypatch.setattr("shoal.cluster.http.SURPLUS_SECONDS", 0.05)
    opened, waiting, all_there = set[asyncio.BaseTransport](), 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal waiting
        assert request.transport is not None
        opened.add(request.transport)
        waiting += 1
        if waiting == 4 * KEPT_OPEN:
            all_there.set()
        await all_there.wait()
        return web.json_response({})

    def still() -> int:
        return sum(not each.is_closing() for each in opened)

    async with serving(answer) as transport:
        async with asyncio.TaskGroup() as burst:
            for _ in range(4 * KEPT_OPEN):
                burst.create_task(transport.request("GET", "/"))
        assert len(opened) == 4 * KEPT_OPEN, "none waits for another"
        async with asyncio.timeout(10):
            while still() > KEPT_OPEN:  # noqa: ASYNC110  # sockets
                await asyncio.sleep(0.01)
        for _ in range(10):
            await transport.request("GET", "/")
        assert (len(opened), still()) == (4 * KEPT_OPEN, KEPT_OPEN), "a request after it finds one open"


async def test_connections_that_are_kept_are_open_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a wave of twelve losses, four waited for connections, which took the API server longer than their pods."""
    monkeypatch.setattr("shoal.cluster.http.USE_SECONDS", 0.0)
    opened, answered, burst = set[asyncio.BaseTransport](), 0, asyncio.Barrier(KEPT_OPEN)

    async def answer(request: web.Request) -> web.Response:
        nonlocal answered
        assert request.transport is not None
        opened.add(request.transport)
        await burst.wait()
        answered += 1
        return web.Response(status=503 if answered < KEPT_OPEN else 200)

    async with serving(answer) as transport:
        async with during(transport.keep_open()), asyncio.timeout(10):
            while answered < 3 * KEPT_OPEN:  # noqa: ASYNC110  # refusals end nothing
                await asyncio.sleep(0)
        assert len(opened) == KEPT_OPEN


async def test_few_connections_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the Lease: a request waits for one of them, and opens none that would end soon."""
    monkeypatch.setattr("shoal.cluster.http.SURPLUS_SECONDS", 0.0)
    opened, all_there = set[asyncio.BaseTransport](), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        opened.add(request.transport)
        if len(opened) == 3:
            all_there.set()
        await all_there.wait()
        return web.json_response({})

    async with serving(answer, connections=3) as transport:
        async with asyncio.TaskGroup() as requests:
            for _ in range(12):
                requests.create_task(transport.request("GET", "/"))
        assert [each.is_closing() for each in opened] == [False] * 3


@pytest.mark.parametrize(
    ("status", "headers", "wanted"),
    [
        (429, {"Retry-After": "7"}, 7.0),
        (503, {"Retry-After": "100000"}, LONGEST_RETRY_AFTER),
        (500, {}, None),
        (504, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ],
)
async def test_what_may_differ_on_retry_is_unavailable(
    status: int, headers: dict[str, str], wanted: float | None
) -> None:
    def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "busy"}, status=status, headers=headers)

    async with serving(answer) as transport:
        with pytest.raises(Unavailable, match="busy") as refused:
            await transport.request("GET", "/")
        assert refused.value.retry_after == wanted
        with pytest.raises(Unavailable, match="busy"):
            async with transport.stream("/", {}):
                pass


async def test_wait_that_is_asked_for_about_one_object_is_told_from_that_of_a_server_without_time() -> None:
    """Only who sheds load answers in plain words; the headers of priority and fairness are everywhere."""
    headers = {"Retry-After": "7", "X-Kubernetes-PF-FlowSchema-UID": "u"}
    denied = {"kind": "Status", "message": "admission webhook denied the request", "code": 429}

    def answer(request: web.Request) -> web.Response:
        if request.path == "/denied":
            return web.json_response(denied, status=429, headers=headers)
        return web.Response(text="Too many requests, please try again later.", status=429, headers=headers)

    async with serving(answer) as transport:
        for path, of_one in (("/denied", True), ("/shed", False)):
            with pytest.raises(Unavailable) as refused:
                await transport.request("GET", path)
            assert (refused.value.of_one, refused.value.retry_after) == (of_one, 7.0)


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 422])
async def test_a_refusal_is_an_answer(status: int) -> None:
    def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "no", "reason": "Because"}, status=status)

    async with serving(answer) as transport:
        got = await transport.request("POST", "/", body={})
        assert (got.status, got.ok, got.message, got.reason) == (status, False, "no", "Because")
        with pytest.raises(StreamRefused) as refused:
            async with transport.stream("/", {}):
                pass
        assert refused.value.status == status


async def test_redirect_is_not_followed_with_the_token() -> None:
    asked = []

    def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with serving(answer) as transport:
        assert (await transport.request("GET", "/here")).status == 307
    assert asked == ["/here"]


async def test_no_answer_is_unavailable() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(10)
        raise AssertionError

    async with serving(answer) as transport:
        with pytest.raises(Unavailable, match="Timeout"):
            await transport.request("GET", "/", timeout=0.05)
    gone = HttpTransport(ApiServer("http://127.0.0.1:1", nobody))
    with pytest.raises(Unavailable):
        await gone.request("GET", "/")
    with pytest.raises(Unavailable):
        async with gone.stream("/", {}):
            pass
    await gone.close()


async def test_a_stream_ends_or_breaks_as_its_server_does() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one\n" + b"x" * 300_000 + b"\n")
        if request.path == "/broken":
            assert request.transport is not None
            request.transport.abort()
        return response

    async with serving(answer) as transport:
        async with transport.stream("/whole", {"watch": "1"}) as lines:
            assert [len(line) async for line in lines] == [4, 300_001]
        with pytest.raises(Unavailable, match="watch of /broken"):
            async with transport.stream("/broken", {}) as lines:
                async for _ in lines:
                    pass


async def test_line_as_long_as_an_object_can_be_is_read() -> None:
    """etcd keeps a pod of 1.4 MB whose user wrote `<` only, and the API server writes six bytes for each of them."""
    longest = b'{"value":"' + b"\\u003c" * 1_400_000 + b'"}\n'

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(longest + b"the next\n")
        return response

    async with serving(answer) as transport, transport.stream("/", {}) as lines:
        read = [line async for line in lines]
    assert [len(line) for line in read] == [len(longest), 9]
    assert read[0] == longest


@pytest.mark.parametrize("status", [200, 403])
async def test_what_is_longer_than_any_object_is_not_read(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LONGEST_BYTES", 300_000)
    written = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                await response.write(b"x" * 100_000)
                written += 100_000
        return response

    async with serving(answer) as transport:
        with pytest.raises(TooLong, match="GET /: more than 300000 bytes"):
            await transport.request("GET", "/")
        with pytest.raises(TooLong, match="more than 300000 bytes"):
            async with transport.stream("/", {}) as lines:
                async for _ in lines:
                    pass
    assert written < 100_000_000, "the connections end with it"


@given(st.lists(st.text("ab\n", max_size=9).map(str.encode), max_size=9))
def test_lines_are_the_same_in_whatever_parts_they_come(parts: list[bytes]) -> None:
    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for part in parts:
                yield part

    async def read() -> list[bytes]:
        response: Any = SimpleNamespace(content=Content())
        return [line async for line in http._lines("/", response)]

    assert asyncio.run(read()) == io.BytesIO(b"".join(parts)).readlines()


def server_tls(folder: Path) -> ssl.SSLContext:
    for name, content in job_credentials(InstallKey(b"k" * 32), "u1").secret_data().items():
        (folder / name).write_bytes(content)
    return Credentials.load(folder).server_context()


async def test_no_socket_outlives_its_loop(tmp_path: Path) -> None:
    """Also of requests that were cancelled at any point of the opening of their connection: a warning is an error."""
    async with serving(lambda _: web.Response(), tls=server_tls(tmp_path), verify=False) as reached:

        async def cancelled(after: float) -> None:
            transport = HttpTransport(reached.server)
            requests = [asyncio.ensure_future(transport.request("GET", "/")) for _ in range(4)]
            await asyncio.wait(requests, timeout=after)
            for each in requests:
                each.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            await transport.close()

        for milliseconds in range(0, 40, 2 if os.environ.get("SHOAL_NIGHTLY") else 5):
            with OwnThread("short") as thread:
                await thread(cancelled(milliseconds / 1000))
            gc.collect()


@pytest.mark.parametrize("watch", [True, False])
async def test_a_long_answer_reads_a_record_at_a_time_and_a_watch_more(
    watch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has the processor fifty times a second would else fall behind 1,000 pods that start."""
    read: list[int] = []
    updated = SSLProtocol.buffer_updated

    def buffer_updated(self: SSLProtocol, count: int) -> None:
        read.append(count)
        updated(self, count)

    monkeypatch.setattr(SSLProtocol, "max_size", TLS_BUFFER)
    monkeypatch.setattr(SSLProtocol, "buffer_updated", buffer_updated)
    opened = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one\n")
        if watch:
            await opened.wait()
        for _ in range(100):
            await response.write(b"x" * 10_000 + b"\n")
        return response

    async with serving(answer, tls=server_tls(tmp_path), verify=False) as transport:
        if watch:
            async with transport.stream("/", {}) as lines:
                opened.set()
                assert len([line async for line in lines]) == 101
        else:
            assert len((await transport.request("GET", "/")).body) > 1_000_000
    assert max(read) > TLS_BUFFER
    assert (max(read) > ANSWER_BYTES) == watch


def service_account(folder: Path) -> Path:
    (folder / "token").write_text("first\n")
    (folder / "ca.crt").write_text("a certificate")
    return folder


async def test_token_of_a_pod_is_read_again(tmp_path: Path) -> None:
    """The kubelet replaces it."""
    now = 0.0
    token = TokenFile(service_account(tmp_path) / "token", clock=lambda: now)
    assert await token() == "first"
    (tmp_path / "token").write_text("second")
    assert await token() == "first"
    now = servers.TOKEN_SECONDS
    assert await token() == "second"


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_a_pod_finds_its_server(host: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "6443"}
    found = in_pod(environment, service_account(tmp_path))
    assert (found.url, found.ca_file, found.proxy) == (url, str(tmp_path / "ca.crt"), None)
    assert "first" not in repr(found)


def test_a_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.2")
    folder = service_account(tmp_path)
    assert in_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, folder).proxy == "http://127.0.0.1:3128"
    assert in_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.2"}, folder).proxy is None


@pytest.mark.parametrize(
    ("host", "listed", "asked_directly"),
    [
        ("10.96.0.1", "localhost,10.0.0.0/8, 169.254.169.254,.svc", True),
        ("10.96.0.1", "10.96.0.1/12", True),
        ("10.96.0.1", "10.96.0.0/30", True),
        ("10.96.0.1", "192.168.0.0/16,fd00::/8,.svc", False),
        ("fd00::1", "fd00::/8", True),
        ("fd00::1", "fd00::1", True),
        ("fd00::1", "10.0.0.0/8", False),
        ("kubernetes.example", "10.0.0.0/8,.example", True),
        ("kubernetes.example", "10.0.0.0/8", False),
    ],
)
def test_the_api_server_is_asked_directly_where_no_proxy_has_its_network(
    host: str, listed: str, asked_directly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kubectl, helm and each controller beside it do: a pod finds its server by an address."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", listed)
    found = in_pod({"KUBERNETES_SERVICE_HOST": host}, service_account(tmp_path))
    assert (found.proxy is None) == asked_directly


async def test_without_a_cluster_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set KUBECONFIG"):
        await find({}, kubeconfig=tmp_path / "none")
    with pytest.raises(UsageError, match="service account"):
        in_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


async def test_a_kubeconfig_is_read_with_its_token_and_names(tmp_path: Path) -> None:
    path = tmp_path / "config"
    cluster = {
        "server": "https://127.0.0.1:6443",
        "insecure-skip-tls-verify": True,
        "tls-server-name": "kube",
    }
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": "abc"}}],
            }
        )
    )
    found = await find({}, kubeconfig=path)
    assert (found.url, found.verify, found.server_name) == ("https://127.0.0.1:6443", False, "kube")
    assert await found.bearer() == "abc"


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("looks", [1, 2])
async def test_write_that_is_held_up_until_the_lease_has_ended_is_not_sent(method: str, looks: int) -> None:
    """As a process is stopped after it looked, and wakes: what it had in hand goes before its timers."""
    sent: list[str] = []
    left = iter([10.0])

    def seconds_left() -> float:
        if (seconds := next(left, 0.0)) <= 0:
            raise LeaseLost("it has ended")
        return seconds

    def answer(request: web.Request) -> web.Response:
        sent.append(request.method)
        return web.json_response({})

    async with serving(answer) as transport:
        for _ in range(looks):  # the second one has a connection
            left = iter([10.0])
            with pytest.raises(Unavailable, match="it has ended"):
                await Fenced(transport, seconds_left).request(method, "/x")
            await transport.request("GET", "/y")
    assert sent == ["GET"] * looks
