"""Reads the report of parameter server 0 over HTTPS, with the job's own certificate pinned.

The operator derives the certificate and the token from the job's key and takes the pod's address from the cache, so it
reads no Secret and resolves no name. Another pod that gets the same address cannot answer for the job.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import traceback
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Protocol

from pydantic import ValidationError

from shoal.errors import Unavailable
from shoal.telemetry.connection import Answer, Connection, NoAnswer, OtherCertificate, connect
from shoal_trainer.contract import CONTROL_PORT, STATUS_PATH, StatusReport

TIMEOUT_SECONDS = 3.0
MAX_REPORT_BYTES = 2 << 20
"""A report of 1,000 workers, each with a text of the longest, is not longer."""
MAX_VALUES = 1 << 16
"""Of JSON, by its commas and what it opens: one takes up to 250 times its bytes until it is known whether it is of use.
The report of 1,000 workers has 30,000."""
MAX_WORDS = 500
"""Characters of what is said of an answer that could not be used: its sender chose it."""
MAX_SAID = 4096
"""Bytes of it that are looked at: a parameter server says no more."""
_ARN = re.compile(r"\barn:[^\s\"',;)]*[^\s\"',;).:]")


@dataclass(frozen=True)
class Endpoint:
    """Address and credentials of a job's coordinator. Its repr shows no token."""

    job_uid: str
    address: str
    token: str
    certificate: str
    """PEM."""
    previous: Endpoint | None = None
    """The same with the credentials of before the install key was rotated."""

    @cached_property
    def pin(self) -> bytes:
        """SHA-256 of the certificate: no other is accepted."""
        return sha256(ssl.PEM_cert_to_DER_cert(self.certificate)).digest()

    @property
    def url(self) -> str:
        """Of its reports."""
        return f"https://{self._host}:{CONTROL_PORT}{STATUS_PATH}"

    @cached_property
    def request(self) -> bytes:
        """For one."""
        lines = (f"GET {STATUS_PATH} HTTP/1.1", f"Host: {self._host}", f"Authorization: Bearer {self.token}")
        return "\r\n".join((*lines, "", "")).encode()

    @property
    def _host(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address

    def __repr__(self) -> str:
        return f"Endpoint({self.job_uid}, {self.address})"


class Coordinator(Protocol):
    """Reads reports. Tests replace it."""

    async def read(self, endpoint: Endpoint) -> StatusReport:
        """The report of the coordinator at this endpoint.

        Raises:
            Unavailable: no answer, or an invalid one.
        """
        ...

    def forget(self, job_uid: str) -> None:
        """Release the resources of a job that finished or was deleted."""
        ...


class NoReport(Unavailable):
    """It answers, and not with a report: to read that again costs as much, and is as vain."""


class _OtherKey(Unavailable):
    """What answers has other credentials."""


class HttpsCoordinator:
    """A coordinator client over HTTPS."""

    def __init__(self) -> None:
        self._kept: dict[str, Connection] = {}
        """The connection to each job's coordinator, while nobody uses it: a handshake takes ten times as long as a poll
        on an open one."""
        self._earlier: set[str] = set()
        """Jobs whose coordinator has the credentials of before the rotation."""
        self._last: dict[str, tuple[int, StatusReport]] = {}
        """The hash of each job's last answer, and what it said: the same answer is not read again."""

    async def close(self) -> None:
        """Close all connections."""
        for each in self._kept.values():
            each.close()
        self._kept.clear()
        await asyncio.sleep(0)  # they end with the next turn of the loop

    def forget(self, job_uid: str) -> None:
        """See `Coordinator`."""
        self._earlier.discard(job_uid)
        self._last.pop(job_uid, None)
        if (kept := self._kept.pop(job_uid, None)) is not None:
            kept.close()

    async def read(self, endpoint: Endpoint) -> StatusReport:
        """See `Coordinator`."""
        if endpoint.previous is None:
            return await self._read(endpoint)
        uid = endpoint.job_uid
        first, second = endpoint, endpoint.previous
        if uid in self._earlier:
            first, second = second, first
        try:
            return await self._read(first)
        except _OtherKey:
            found = await self._read(second)
            self._earlier ^= {uid}
            return found

    async def _read(self, endpoint: Endpoint) -> StatusReport:
        url = endpoint.url
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                answer = await self._ask(endpoint)
            # The pod is the user's own: it must not send the operator to where only the operator may go.
            if answer.status == 401:
                raise _OtherKey(f"{url}: HTTP 401")
            if answer.status == 503:
                raise Unavailable(_told(answer.body))
            if answer.status != 200:
                raise Unavailable(f"{url}: HTTP {answer.status}")
            body = answer.body
            last = self._last.get(endpoint.job_uid)
            if last is not None and last[0] == hash(body):
                return last[1]
            if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
                raise NoReport(f"{url}: a report of more than {MAX_VALUES} values")
            report = StatusReport.model_validate_json(body)
        except OtherCertificate as error:
            _release(error)
            raise _OtherKey(f"{url}: {error}") from error
        except ValidationError as error:
            _release(error)
            raise NoReport(f"{url}: {_words(error)}") from error
        except (NoAnswer, TimeoutError, OSError) as error:
            _release(error)
            raise Unavailable(f"{url}: {_words(error)}") from error
        if report.job_uid != endpoint.job_uid:
            raise NoReport(f"{url} reported on another job, {report.job_uid}")
        self._last[endpoint.job_uid] = hash(body), report
        return report

    async def _ask(self, endpoint: Endpoint) -> Answer:
        kept = self._kept.pop(endpoint.job_uid, None)
        if kept is not None and (kept.address, kept.pin) == (endpoint.address, endpoint.pin) and kept.is_open:
            try:
                return await self._get(kept, endpoint)
            except ConnectionError:
                pass  # the server closes what was idle for long
        elif kept is not None:
            kept.close()
        return await self._get(await connect(endpoint.address, CONTROL_PORT, endpoint.pin), endpoint)

    async def _get(self, connection: Connection, endpoint: Endpoint) -> Answer:
        try:
            answer = await connection.get(endpoint.request, MAX_REPORT_BYTES)
        except BaseException:
            connection.close()
            raise
        self._kept[endpoint.job_uid] = connection
        return answer


def _told(body: bytes) -> str:
    """What a server waits for: at first what failed, and at last what to change. Others read it: no ARN tells who."""
    text = _ARN.sub("arn:…", body[:MAX_SAID].decode("utf-8", "replace"))
    half = MAX_WORDS // 2 - 2
    return text if len(text) <= MAX_WORDS else f"{text[:half]} … {text[-half:]}"


def _words(error: Exception) -> str:
    """What went wrong: the whole error of pydantic names what was read."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"no report: {place + ': ' if place else ''}{first['msg']}"[:MAX_WORDS]
    return (str(error) or type(error).__name__)[:MAX_WORDS]


def _release(error: BaseException) -> None:
    """Clear the frames that an error and its causes came through.

    They hold them, and with them a connection: a cycle for each try, that would wait for a full garbage collection.
    """
    chain = [error]
    for each in chain:
        traceback.clear_frames(each.__traceback__)
        causes = (each.__cause__, each.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]
