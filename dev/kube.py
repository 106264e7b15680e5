"""A small asynchronous client of the Kubernetes API for `dev`.

It uses plain JSON over aiohttp: the fake kubelet serves hundreds of nodes, and typed models would dominate its CPU
time.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

Json = dict[str, Any]
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server answered with an error: `status` is HTTP's, `body` the Status object."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(f"{status} {body.get('reason', '')}: {body.get('message', '')}")
        self.status = status
        self.body = body


class Kube:
    """One cluster, as an asynchronous context manager. Errors: `ApiError`, or aiohttp's."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(Path(kubeconfig).read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server: str = cluster["server"]
        self._ssl = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as pem:  # the ssl module reads a client key only from a file
            pem.write(base64.b64decode(user["client-certificate-data"]))
            pem.write(base64.b64decode(user["client-key-data"]))
            pem.flush()
            self._ssl.load_cert_chain(pem.name)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=64)
        self._session = aiohttp.ClientSession(self.server, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("use `async with Kube(...)`")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """One request; the answer's JSON."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type}
        timeout = aiohttp.ClientTimeout(total=60)
        async with self.session.request(
            method, path, data=data, params=params, headers=headers, timeout=timeout
        ) as answer:
            text = await answer.text()
            try:
                content = json.loads(text)
            except ValueError:
                content = {"message": text}
            if answer.status >= 400:
                raise ApiError(answer.status, content)
            return dict(content)

    async def get(self, path: str, **params: str) -> Json:
        """GET; query parameters by keyword."""
        return await self.request("GET", path, params=params)

    async def create(self, path: str, body: Json) -> Json:
        """POST."""
        return await self.request("POST", path, body)

    async def patch(self, path: str, body: Any) -> Json:
        """PATCH with a JSON merge patch."""
        return await self.request("PATCH", path, body, content_type=MERGE)

    async def delete(self, path: str, *, grace_seconds: int | None = None, uid: str | None = None) -> Json:
        """DELETE, with the uid as an optional precondition."""
        options: Json = {}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        return await self.request("DELETE", path, options or None)

    async def watch(self, path: str, **params: str) -> AsyncIterator[tuple[str, Json]]:
        """The events of one watch, until the server ends it. An ERROR event is raised as `ApiError`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": "300", **params}
        async with self.session.get(path, params=query, timeout=timeout, read_bufsize=1 << 22) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, {"message": await answer.text()})
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code", 500)), event["object"])
                yield event["type"], event["object"]


@contextlib.contextmanager
def tolerant(*statuses: int) -> Iterator[None]:
    """Ignore these statuses, such as 404 after a delete."""
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise
