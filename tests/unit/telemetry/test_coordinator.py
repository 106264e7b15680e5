"""Reading a coordinator's report over real TLS, with the job's certificate and token."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from shoal.controllers.trainingjob.credentials import InstallKey, JobCredentials, job_credentials
from shoal.errors import ShoalError, Unavailable
from shoal.telemetry.connection import Answer, Connection
from shoal.telemetry.coordinator import MAX_REPORT_BYTES, MAX_WORDS, Endpoint, HttpsCoordinator
from shoal_trainer.contract import (
    CONTROL_PORT,
    MAX_EPOCHS,
    MAX_WORKERS,
    MOST_METRICS,
    MOST_SHORT,
    STATUS_PATH,
    EpochReport,
    Phase,
    ShardReport,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.advice import with_advice

KEY = InstallKey(b"k" * 32)


def mounted(folder: Path, job_uid: str, key: InstallKey = KEY) -> Credentials:
    """The job's Secret as mounted in a pod."""
    for name, content in job_credentials(key, job_uid).secret_data().items():
        (folder / name).write_bytes(content)
    return Credentials.load(folder)


@asynccontextmanager
async def serving(
    folder: Path,
    job_uid: str,
    answer: web.Response | None = None,
    key: InstallKey = KEY,
    asked: list[str] | None = None,
) -> AsyncIterator[str]:
    """A coordinator with the trainer's credentials; yields its address. `asked`: takes the tokens that it is sent."""
    credentials = mounted(folder, job_uid, key)

    async def status(request: web.Request) -> web.Response:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        if asked is not None:
            asked.append(token)
        if token != job_credentials(key, job_uid).token:
            return web.Response(status=401)
        return answer or web.Response(
            text=StatusReport(job_uid=job_uid, phase=Phase.TRAINING, step=3).to_json()
        )

    app = web.Application()
    app.router.add_get(STATUS_PATH, status)
    runner = web.AppRunner(app)
    await runner.setup()
    address = await _listen(runner, credentials.server_context())
    try:
        yield address
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, context: ssl.SSLContext) -> str:
    """Listen on a random loopback address, since the contract fixes the port."""
    for _ in range(20):
        address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(1, 254)}"
        try:
            await web.TCPSite(runner, address, CONTROL_PORT, ssl_context=context).start()
        except OSError:
            continue
        return address
    raise AssertionError("no free address on loopback")


@pytest.fixture
async def coordinator() -> AsyncIterator[HttpsCoordinator]:
    reader = HttpsCoordinator()
    yield reader
    await reader.close()


def endpoint(job_uid: str, address: str, credentials: JobCredentials | None = None) -> Endpoint:
    made = credentials or job_credentials(KEY, job_uid)
    return Endpoint(job_uid, address, made.token, made.certificate)


async def test_same_answer_is_read_once(tmp_path: Path) -> None:
    """A thousand coordinators of which nothing is new are polled 45 times a second."""
    credentials = job_credentials(KEY, "u")
    reports = [StatusReport(job_uid="u", phase=Phase.TRAINING, step=step) for step in (3, 3, 4, 3)]
    coordinator = HttpsCoordinator()
    read = []
    try:
        for report in reports:
            async with serving(tmp_path, "u", web.Response(text=report.to_json())) as address:
                endpoint = Endpoint("u", address, credentials.token, credentials.certificate)
                read.append(await coordinator.read(endpoint))
    finally:
        await coordinator.close()
    assert read == reports
    assert read[1] is read[0]
    assert read[3] is not read[0]


async def test_report_is_read(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    async with serving(tmp_path, "u1") as address:
        for _ in range(3):
            report = await coordinator.read(endpoint("u1", address))
            assert (report.phase, report.step) == (Phase.TRAINING, 3)


async def test_job_of_before_a_rotation_is_read_with_its_own_key_and_the_next_with_the_new_one(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    """Both keys of a rotation are valid. After the first poll the right one is tried first."""
    rotated = InstallKey(b"n" * 32, "2", KEY)

    def known(uid: str, address: str) -> Endpoint:
        made = job_credentials(rotated, uid)
        assert made.previous is not None
        assert made.previous == job_credentials(KEY, uid)
        return replace(endpoint(uid, address, made), previous=endpoint(uid, address, made.previous))

    async with serving(tmp_path, "old") as address:
        for _ in range(3):
            assert (await coordinator.read(known("old", address))).job_uid == "old"
        with pytest.raises(Unavailable):  # after `retire`
            await coordinator.read(replace(known("old", address), previous=None))
    async with serving(tmp_path, "new", key=rotated) as address:
        assert (await coordinator.read(known("new", address))).job_uid == "new"
    with pytest.raises(Unavailable):
        await coordinator.read(known("old", "127.0.0.1"))


async def test_of_a_job_that_is_forgotten_nothing_is_kept(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    async with serving(tmp_path, "u1") as address:
        first = await coordinator.read(endpoint("u1", address))
        coordinator.forget("u1")
        assert (coordinator._kept, coordinator._last) == ({}, {})
        again = await coordinator.read(endpoint("u1", address))
    assert again == first
    assert again is not first


async def test_a_connection_to_what_has_another_certificate_now_is_closed(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    async with serving(tmp_path, "u1") as address:
        await coordinator.read(endpoint("u1", address))
        first = coordinator._kept["u1"]
        with pytest.raises(Unavailable):
            await coordinator.read(endpoint("u1", address, job_credentials(InstallKey(b"n" * 32), "u1")))
        assert not first.is_open


async def test_polls_share_a_connection(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    """A handshake takes ten times as long as a poll."""
    async with serving(tmp_path, "u1") as address:
        known = endpoint("u1", address)
        await coordinator.read(known)
        first = coordinator._kept["u1"]
        for _ in range(2):
            await coordinator.read(known)
        assert coordinator._kept == {"u1": first}


async def test_a_connection_that_the_server_closed_is_opened_again(
    tmp_path: Path, coordinator: HttpsCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does what was idle for long, perhaps while the next request is on its way."""
    async with serving(tmp_path, "u1") as address:
        known = endpoint("u1", address)
        await coordinator.read(known)
        first = coordinator._kept["u1"]
        first.close()
        await coordinator.read(known)
        second = coordinator._kept["u1"]
        assert second is not first
        get, used = Connection.get, list[Connection]()

        async def once_closed(self: Connection, request: bytes, limit: int) -> Answer:
            used.append(self)
            if self is second:
                raise ConnectionResetError
            return await get(self, request, limit)

        monkeypatch.setattr(Connection, "get", once_closed)
        await coordinator.read(known)
        assert used == [second, coordinator._kept["u1"]]
        coordinator.forget("u1")
        assert coordinator._kept == {}


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no answer of HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000, "its head does not end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "Content-Length is no number"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "in pieces"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}", "the connection was closed"),
        (b"", "the connection was closed"),
    ],
)
async def test_what_is_no_answer_is_unavailable(
    sent: bytes, refused: str, tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()

    tls = mounted(tmp_path, "u1").server_context()
    address = "127.77.0.9"
    server = await asyncio.start_server(answer, address, CONTROL_PORT, ssl=tls)
    async with server:
        with pytest.raises(Unavailable, match=refused):
            await coordinator.read(endpoint("u1", address))
    assert coordinator._kept == {}


async def test_an_answer_comes_in_any_number_of_pieces(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    body = StatusReport(job_uid="u1", phase=Phase.TRAINING, step=7).to_json().encode()
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            for at in range(0, len(whole), 7):
                writer.write(whole[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    tls = mounted(tmp_path, "u1").server_context()
    address = "127.77.0.10"
    server = await asyncio.start_server(answer, address, CONTROL_PORT, ssl=tls)
    async with server:
        for _ in range(2):
            assert (await coordinator.read(endpoint("u1", address))).step == 7


async def test_large_answers_that_come_together_are_not_mixed(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    reports = [
        StatusReport(
            job_uid=uid,
            phase=Phase.TRAINING,
            workers=tuple(
                WorkerReport(slot=slot, incarnation=0, state=WorkerState.ACTIVE, message=uid * 400)
                for slot in range(300)
            ),
        )
        for uid in ("u1", "u2")
    ]
    async with contextlib.AsyncExitStack() as serves:
        known = []
        for report in reports:
            folder = tmp_path / report.job_uid
            folder.mkdir()
            answer = web.Response(text=report.to_json())
            address = await serves.enter_async_context(serving(folder, report.job_uid, answer))
            known.append(endpoint(report.job_uid, address))
        assert await asyncio.gather(*map(coordinator.read, known)) == reports


async def test_token_is_sent_to_no_other_certificate(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    asked: list[str] = []
    async with serving(tmp_path, "u2", asked=asked) as address:
        with pytest.raises(Unavailable, match="not that of the job"):
            await coordinator.read(endpoint("u1", address))
        assert not asked
        await coordinator.read(endpoint("u2", address))
        assert asked == [job_credentials(KEY, "u2").token]


async def test_report_of_another_job_is_rejected(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    async with serving(tmp_path, "u2") as address:
        with pytest.raises(Unavailable, match="not that of the job"):
            await coordinator.read(endpoint("u1", address))
        with pytest.raises(Unavailable, match="another job"):
            await coordinator.read(endpoint("u1", address, job_credentials(KEY, "u2")))


async def test_wrong_token_is_rejected(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    async with serving(tmp_path, "u1") as address:
        right = endpoint("u1", address)
        with pytest.raises(Unavailable, match="HTTP 401"):
            await coordinator.read(Endpoint("u1", address, "wrong", right.certificate))
        assert right.token not in repr(right)


@pytest.mark.parametrize("body", ["", "{", '{"phase": "Dreaming", "jobUid": "u1"}', "[]"])
async def test_invalid_report_is_unavailable(
    tmp_path: Path, coordinator: HttpsCoordinator, body: str
) -> None:
    async with serving(tmp_path, "u1", web.Response(text=body)) as address:
        with pytest.raises(Unavailable):
            await coordinator.read(endpoint("u1", address))


HOSTILE = {
    "workers": ",".join(["{}"] * 30_000),
    "shards": ",".join(["1"] * 60_000),
    "speed": ",".join(['{"device":1}'] * 30_000),
    "epochs": ",".join(['{"epoch":-1,"metrics":{"a":"b"}}'] * 15_000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_report_is_given_up_at_its_first_errors(
    name: str, tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    """A text with an entry for each error took 2 GiB for 3.6 MB, on the event loop of all jobs."""
    body = f'{{"{name}":[{HOSTILE[name]}]}}'
    assert len(body) <= MAX_REPORT_BYTES
    async with serving(tmp_path, "u1", web.Response(text=body)) as address:
        with pytest.raises(Unavailable, match="no report") as refused:
            await coordinator.read(endpoint("u1", address))
    assert len(str(refused.value)) < 400
    cause = refused.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 10


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (" " * (2 << 20) + " ", "bytes$"),
        ("[" + "{}," * 40_000 + "{}]", "values$"),
        ('{"metrics":{"a":[' + ",".join(["[[[[[[[]]]]]]]"] * 10_000) + "]}}", "values$"),
    ],
    ids=["long", "objects", "lists in lists"],
)
async def test_a_report_that_would_take_much_memory_is_not_parsed(
    body: str, refused: str, tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    """2 MiB of `{},` take 176 MiB."""
    async with serving(tmp_path, "u1", web.Response(text=body)) as address:
        with pytest.raises(Unavailable, match=f"a report of more than [0-9]+ {refused}"):
            await coordinator.read(endpoint("u1", address))


async def test_a_report_of_the_largest_job_is_read(tmp_path: Path, coordinator: HttpsCoordinator) -> None:
    """With the longest texts, and with more metrics and epochs than are told."""
    largest = StatusReport(
        job_uid="u1",
        phase=Phase.TRAINING,
        workers=tuple(
            WorkerReport(
                slot=slot,
                incarnation=2**40,
                state=WorkerState.ACTIVE,
                last_seen_seconds=1 / 3,
                step_seconds=1 / 3,
                compute_seconds=1 / 3,
                pull_seconds=1 / 3,
                push_seconds=1 / 3,
                input_seconds=1 / 3,
                wait_seconds=1 / 3,
                device_name="d" * 63,
                node="n" * 253,
                message="m" * 5000,
            )
            for slot in range(MAX_WORKERS)
        ),
        shards=tuple(ShardReport(index=index, epoch=1) for index in range(16)),
        epochs=tuple(
            EpochReport(epoch=n, metrics={f"metric {k}": 1 / 3 for k in range(300)})
            for n in range(MAX_EPOCHS)
        ),
    )
    assert len(largest.to_json()) < MAX_REPORT_BYTES
    async with serving(tmp_path, "u1", web.Response(text=largest.to_json())) as address:
        assert await coordinator.read(endpoint("u1", address)) == largest
    assert len(largest.epochs[0].metrics) == MOST_METRICS
    assert len(largest.workers[0].message) == MOST_SHORT


def test_names_of_nodes_and_devices_take_no_more_memory_than_bytes() -> None:
    """One letter beyond ASCII takes four bytes for each of the others: 60 jobs filled the operator's memory."""
    worker = WorkerReport(
        slot=0, incarnation=0, state=WorkerState.ACTIVE, node="n" * 955 + "\U0001f41f", device_name="Tesla T4"
    )
    assert (worker.node, worker.device_name) == ("", "Tesla T4")


async def test_no_redirect_is_followed_and_nothing_that_was_read_is_told(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    """Conditions are for users to read: what the operator can reach, and they cannot, must not be told there."""
    async with serving(tmp_path, "u2", web.Response(text="the secret of another service")) as elsewhere:
        to = {"Location": f"https://{elsewhere}:{CONTROL_PORT}{STATUS_PATH}"}
        async with serving(tmp_path, "u1", web.Response(status=307, headers=to)) as address:
            with pytest.raises(Unavailable, match=r"HTTP 307$"):
                await coordinator.read(endpoint("u1", address))
        with pytest.raises(Unavailable) as refused:
            await coordinator.read(endpoint("u2", elsewhere))
    assert "secret" not in str(refused.value)


async def test_what_a_server_waits_for_is_told_in_its_words(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    words = "waiting for the storage: there is no such bucket" + "!" * 10_000
    async with serving(tmp_path, "u1", web.Response(status=503, text=words)) as address:
        with pytest.raises(
            Unavailable, match=r"waiting for the storage: there is no such bucket!+ … !+$"
        ) as told:
            await coordinator.read(endpoint("u1", address))
    assert len(str(told.value)) <= MAX_WORDS


async def test_what_to_change_is_told_with_what_a_server_waits_for_and_not_who_was_refused(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    """It comes last, and was cut off. Conditions are read by more people than the account concerns."""
    role = "arn:aws:sts::123456789012:assumed-role/team/prod-5b1f9d2f"
    reason = (
        f'User: {role} is not authorized to perform: s3:PutObject on resource: "arn:aws:s3:::b/run/probe"'
    )
    why = with_advice(f"{reason} because no identity-based policy allows the s3:PutObject action")
    words = f"waiting for the storage: cannot write s3://b/{'r' * 400}/probe: {why}"
    async with serving(tmp_path, "u1", web.Response(status=503, text=words)) as address:
        with pytest.raises(Unavailable, match=r"^waiting for the storage: cannot write s3://b/r+ … ") as told:
            await coordinator.read(endpoint("u1", address))
    assert str(told.value).endswith(
        "Let the account of these credentials read, write, list and delete in the bucket"
    )
    assert "123456789012" not in str(told.value)
    assert 'on resource: "arn:…" because' in str(told.value)


async def test_coordinators_that_never_answer_hold_up_no_other_one(
    tmp_path: Path, coordinator: HttpsCoordinator
) -> None:
    """B15: there is nothing that they share."""
    made, hole = job_credentials(KEY, "u"), "127.0.0.98"
    with socket.create_server((hole, CONTROL_PORT), backlog=256):  # the kernel connects, and nobody answers
        async with serving(tmp_path, "u") as address:
            tasks = [asyncio.create_task(coordinator.read(endpoint(str(n), hole, made))) for n in range(200)]
            await asyncio.sleep(0)
            assert (await coordinator.read(endpoint("u", address, made))).step == 3
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_unreachable_coordinator_is_unavailable(coordinator: HttpsCoordinator) -> None:
    async with asyncio.timeout(50):
        with pytest.raises(Unavailable, match="Connect call failed") as refused:
            await coordinator.read(endpoint("u1", "127.0.0.99"))
    assert "object at" not in str(refused.value)


@pytest.mark.parametrize("answers", [False, True])
async def test_a_try_in_vain_leaves_no_garbage(answers: bool, tmp_path: Path) -> None:
    """What errors, frames and connections hold of each other would wait for a full collection."""
    coordinator, made = HttpsCoordinator(), job_credentials(KEY, "u1")
    async with serving(tmp_path, "u1", key=InstallKey(b"o" * 32)) as other:
        endpoint = Endpoint("u1", other if answers else "127.9.9.9", made.token, made.certificate)

        async def ask() -> None:
            with pytest.raises(Unavailable):
                await coordinator.read(endpoint)

        await ask()
        gc.collect()
        gc.disable()
        try:
            await ask()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = [each for each in gc.garbage if isinstance(each, Connection | OSError | ShoalError)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            await coordinator.close()
    assert found == []
