"""Asks PS 0 how the training goes: HTTPS to the pod itself, trusting the job's own certificate and no other.

The certificate and the token come from the job's key, which the operator derives; nothing is read from Secrets, and
no name is looked up: the pod's address is in the cache. A pod that took over the address cannot answer for the job.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Protocol

import aiohttp
from pydantic import ValidationError

from shoal.errors import Unavailable
from shoal_trainer.contract import CONTROL_PORT, STATUS_PATH, StatusReport

TIMEOUT_SECONDS = 3.0
LARGEST_REPORT = 4 << 20


@dataclass(frozen=True)
class Endpoint:
    """Where a job's coordinator is, and how both sides know each other. Its repr shows no token."""

    job_uid: str
    address: str
    token: str
    certificate: str
    """PEM."""

    def __repr__(self) -> str:
        return f"Endpoint({self.job_uid}, {self.address})"


class Coordinator(Protocol):
    """Reads one report. Tests put another one in its place."""

    async def read(self, endpoint: Endpoint) -> StatusReport:
        """The report of the coordinator at this endpoint.

        Raises:
            Unavailable: no answer, or none that is to be believed.
        """
        ...

    def forget(self, job_uid: str) -> None:
        """The job has ended or is gone: what was kept for its reports is given up."""
        ...


class HttpsCoordinator:
    """The real one. Close it at the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._contexts: dict[str, tuple[str, ssl.SSLContext]] = {}

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def forget(self, job_uid: str) -> None:
        """As the protocol says."""
        self._contexts.pop(job_uid, None)

    async def read(self, endpoint: Endpoint) -> StatusReport:
        """As the protocol says."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        url = f"https://{host}:{CONTROL_PORT}{STATUS_PATH}"
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        context = self._context(endpoint)
        try:
            async with self._session.get(url, headers=headers, ssl=context) as answer:
                body = await answer.content.read(LARGEST_REPORT)
                while not answer.content.at_eof() and len(body) < LARGEST_REPORT:
                    body += await answer.content.read(LARGEST_REPORT - len(body))
                if answer.status != 200:
                    raise Unavailable(f"{url}: HTTP {answer.status}")
            report = StatusReport.model_validate_json(body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            raise Unavailable(f"{url}: {error!r}") from error
        if report.job_uid != endpoint.job_uid:
            raise Unavailable(f"{url} reported on another job, {report.job_uid}")
        return report

    def _context(self, endpoint: Endpoint) -> ssl.SSLContext:
        certificate, context = self._contexts.get(endpoint.job_uid, ("", None))
        if context is None or certificate != endpoint.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the certificate itself is pinned
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=endpoint.certificate)
            self._contexts[endpoint.job_uid] = endpoint.certificate, context
        return context
