"""One bound for all requests of the process to the API server, and a share of it for each namespace.

The API server sheds load with 429 and a Retry-After. A process that goes on meanwhile with all its other requests is
what it has to shed next, so ordinary requests wait out the longest pause that was asked for. Watches do not pass here,
nor does the Lease, which has a connection of its own: it must be renewed above all when the server is busy.

Urgent requests, which are the replacement of a lost pod and what it waits for, do not wait behind the many of jobs that
begin: some places are kept for them, and they pause only after one of theirs was shed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Unpack

from shoal.cluster.clock import loop_time
from shoal.cluster.transport import Answer, Options, Transport, Wrapper
from shoal.errors import Unavailable
from shoal.runtime.shares import Shares

MAX_IN_FLIGHT, KEPT = 64, 8
"""Concurrent requests, and how many of them are kept for urgent ones.

Fewer than the connections, so that none waits where its time-out already runs."""


class Limited(Wrapper):
    """A transport with at most `in_flight` requests, `kept` of them for urgent ones, that honours Retry-After.

    A body that is a function is made when the request has its place: many wait when hundreds of jobs begin, and a pod's
    takes 10 KiB. `on_answer` is told the verb, the HTTP status (0: no answer) and the seconds of each request.
    """

    def __init__(
        self,
        inner: Transport,
        in_flight: int = MAX_IN_FLIGHT,
        kept: int = KEPT,
        *,
        on_answer: Callable[[str, int, float], None] = lambda _verb, _code, _seconds: None,
    ) -> None:
        super().__init__(inner)
        self._on_answer = on_answer
        self._places = Shares(in_flight)
        self._ordinary = Shares(max(1, in_flight - kept))
        self._closed_until = dict.fromkeys((False, True), 0.0)

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """See `Transport`."""
        space = _namespace(path)
        if options.pop("urgent", False):
            async with self._places.place((space, True)):
                return await self._request(method, path, True, options)
        async with self._ordinary.place(space), self._places.place((space, False)):
            return await self._request(method, path, False, options)

    async def _request(self, method: str, path: str, urgent: bool, options: Options) -> Answer:
        await self._open(urgent)
        if callable(make := options.get("body")):
            options["body"] = make()
        began, code = loop_time(), 0
        try:
            answer = await super().request(method, path, **options)
            code = answer.status
            return answer
        except Unavailable as error:
            if error.retry_after is not None and not error.of_one:
                until = loop_time() + error.retry_after
                for kind in {urgent, False}:
                    self._closed_until[kind] = max(self._closed_until[kind], until)
            raise
        finally:
            self._on_answer(method, code, loop_time() - began)

    async def _open(self, urgent: bool) -> None:
        while (wait := self._closed_until[urgent] - loop_time()) > 0:  # noqa: ASYNC110  # a time, not an event
            await asyncio.sleep(wait * random.uniform(1.0, 1.1))  # so that not all come back at once


def _namespace(path: str) -> str:
    """Of the object of a request; empty: it has none."""
    _, _, rest = path.partition("/namespaces/")
    return rest.partition("/")[0]
