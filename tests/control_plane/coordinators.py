"""Coordinators that answer as a parameter server does: over TLS with their job's certificate, each from an address."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from pathlib import Path

from shoal.controllers.trainingjob.credentials import InstallKey, job_credentials
from shoal_trainer.contract import CONTROL_PORT, StatusReport
from shoal_trainer.security import Credentials


class Coordinators:
    """The coordinators of some jobs, on loopback. `report`: what that of the job with this uid says."""

    def __init__(self, key: InstallKey, folder: Path, report: Callable[[str], StatusReport]) -> None:
        self._key = key
        self._folder = folder
        self._report = report
        self._servers: list[asyncio.Server] = []
        self._network = random.randint(2, 250)  # the port is fixed, and other tests run beside

    def address(self, number: int) -> str:
        """The address of one of them."""
        return f"127.{self._network}.{number // 250}.{number % 250 + 1}"

    async def serve(self, number: int, uid: str) -> None:
        """Answer for one job until `close`."""
        known = job_credentials(self._key, uid)
        (self._folder / "tls.crt").write_text(known.certificate)
        (self._folder / "tls.key").write_text(known.private_key)
        context = Credentials(self._folder, uid, b"").server_context()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    body = self._report(uid).to_json().encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
                pass
            finally:
                writer.close()

        host = self.address(number)
        self._servers.append(await asyncio.start_server(answer, host, CONTROL_PORT, ssl=context))

    async def close(self) -> None:
        """Stop answering."""
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)
