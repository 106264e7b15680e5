"""Reads the report of parameter server 0 over HTTPS, with the job's own certificate pinned.

The operator derives the certificate and the token from the job's key and takes the pod's address from the cache, so it
reads no Secret and resolves no name. Another pod that gets the same address cannot answer for the job.
"""

from __future__ import annotations

import ssl
import traceback
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Protocol

import aiohttp
from pydantic import ValidationError
from yarl import URL

from shoal.errors import Unavailable
from shoal_trainer.contract import CONTROL_PORT, STATUS_PATH, StatusReport

TIMEOUT_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 28.0
"""More than the longest interval of polls, and less than the server's own limit: a handshake takes ten times as long as
a poll on an open connection."""
MAX_REPORT_BYTES = 2 << 20
"""A report of 1,000 workers, each with a text of the longest, is not longer."""
MAX_VALUES = 1 << 17
"""Of JSON, by its commas: one takes up to 250 times its bytes until it is known whether it is of use. The report of
1,000 workers has 30,000."""
MAX_WORDS = 300
"""Characters of what is said of an answer that could not be used: its sender chose it."""


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
    def pin(self) -> aiohttp.Fingerprint:
        """The certificate, and no other, is accepted. (A TLS context of its own for each job takes 16 KiB.)

        It is compared before anything is sent. That the server has the key is proven in the handshake.
        """
        return aiohttp.Fingerprint(sha256(ssl.PEM_cert_to_DER_cert(self.certificate)).digest())

    @cached_property
    def url(self) -> URL:
        """Of its reports."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return URL(f"https://{host}:{CONTROL_PORT}{STATUS_PATH}")

    @cached_property
    def headers(self) -> dict[str, str]:
        """Of a request for one."""
        return {"Authorization": f"Bearer {self.token}"}

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


class _OtherKey(Unavailable):
    """What answers has other credentials."""


class HttpsCoordinator:
    """A coordinator client over HTTPS."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._earlier: set[str] = set()
        """Jobs whose coordinator has the credentials of before the rotation."""
        self._last: dict[str, tuple[int, StatusReport]] = {}
        """The hash of each job's last answer, and what it said: the same answer is not read again."""

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def forget(self, job_uid: str) -> None:
        """See `Coordinator`."""
        self._earlier.discard(job_uid)
        self._last.pop(job_uid, None)

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
        if self._session is None:
            # No limit over all hosts: coordinators that do not answer must not hold the places of those that do.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=2, keepalive_timeout=KEEP_ALIVE_SECONDS
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            )
        url = endpoint.url
        try:
            # The pod is the user's own: it must not send the operator to where only the operator may go.
            get = self._session.get(url, headers=endpoint.headers, ssl=endpoint.pin, allow_redirects=False)
            async with get as answer:
                if answer.status == 401:
                    raise _OtherKey(f"{url}: HTTP 401")
                if answer.status != 200:
                    raise Unavailable(f"{url}: HTTP {answer.status}")
                body = b""
                while piece := await answer.content.read(MAX_REPORT_BYTES + 1 - len(body)):
                    body += piece
            if len(body) > MAX_REPORT_BYTES:
                raise Unavailable(f"{url}: a report of more than {MAX_REPORT_BYTES} bytes")
            if body.count(b",") > MAX_VALUES:
                raise Unavailable(f"{url}: a report of more than {MAX_VALUES} values")
            last = self._last.get(endpoint.job_uid)
            if last is not None and last[0] == hash(body):
                return last[1]
            report = StatusReport.model_validate_json(body)
        except aiohttp.ServerFingerprintMismatch as error:
            _release(error)
            raise _OtherKey(f"{url}: the certificate is not that of the job") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            _release(error)
            raise Unavailable(f"{url}: {_words(error)}") from error
        if report.job_uid != endpoint.job_uid:
            raise Unavailable(f"{url} reported on another job, {report.job_uid}")
        self._last[endpoint.job_uid] = hash(body), report
        return report


def _words(error: Exception) -> str:
    """What went wrong: the whole error of aiohttp names objects of Python, that of pydantic what was read."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"no report: {place + ': ' if place else ''}{first['msg']}"[:MAX_WORDS]
    cause = getattr(error, "os_error", error)
    return (str(cause) or type(cause).__name__)[:MAX_WORDS]


def _release(error: BaseException) -> None:
    """Clear the frames that an error and its causes came through.

    Those of aiohttp hold them, and with them a connection with 0.3 MiB of TLS: a cycle for each try, that would wait
    for a full garbage collection.
    """
    chain = [error]
    for each in chain:
        traceback.clear_frames(each.__traceback__)
        causes = (each.__cause__, each.__context__, getattr(each, "os_error", None))
        chain += [cause for cause in causes if cause is not None and cause not in chain]
