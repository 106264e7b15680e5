"""A job's credentials: deterministic, and accepted by the trainer's TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from shoal.controllers.trainingjob import credentials
from shoal.controllers.trainingjob.credentials import CredentialsOfJobs, InstallKey, job_credentials
from shoal_trainer.contract import job_key, status_token
from shoal_trainer.security import Credentials

KEY = InstallKey(bytes(range(32)))


def test_credentials_are_deterministic() -> None:
    one, two = job_credentials(KEY, "uid-1"), job_credentials(KEY, "uid-1")
    assert one == two
    assert one.secret_data() == two.secret_data()
    other = job_credentials(KEY, "uid-2")
    assert {one.key, one.certificate, one.private_key}.isdisjoint(
        {other.key, other.certificate, other.private_key}
    )
    assert one != job_credentials(InstallKey(b"x" * 32), "uid-1")


def test_credentials_of_a_run_are_derived_once_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more jobs than a bounded cache had room for, all were derived anew in each round of plans."""
    derived = list[str]()
    monkeypatch.setattr(credentials, "job_credentials", lambda _key, uid: derived.append(uid) or uid)
    known = CredentialsOfJobs(KEY)
    uids = [f"uid-{number}" for number in range(1100)]
    for uid in uids * 2:
        assert known.get(uid) == uid
    assert derived == uids
    known.forget("uid-7")
    known.get("uid-7")
    assert derived == [*uids, "uid-7"]


def test_repr_shows_no_secret() -> None:
    made = job_credentials(KEY, "uid-1")
    assert made.private_key not in repr(made)
    assert repr(made.key) not in repr(made)


async def test_trainer_accepts_the_credentials_and_rejects_another_jobs(tmp_path: Path) -> None:
    made = job_credentials(KEY, "uid-1")
    for name, content in made.secret_data().items():
        (tmp_path / name).write_bytes(content)
    theirs = Credentials.load(tmp_path)
    assert theirs.key == job_key(KEY.secret, "uid-1", theirs.key_id)
    assert made.token == status_token(theirs.key)

    async def hello(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=theirs.server_context())
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=theirs.client_context())
    assert await reader.read() == b"hello"
    writer.close()
    other_job = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other_job.check_hostname = False
    other_job.load_verify_locations(cadata=job_credentials(KEY, "uid-2").certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("127.0.0.1", port, ssl=other_job)
    server.close()
    await server.wait_closed()
