"""Lists a collection page by page, each as large as may be parsed at once.

Of ordinary objects that is a number of them. Of large ones it is fewer: those of a page that is too long are asked for
again, and the next page goes by the size of this one. Each page takes the server its time: where the rest of a list is
gone before its turn, the next list has larger pages, which are read whole. They become smaller again where one is too
large to be answered, and after each list that succeeds. A later page that is not answered is asked for again: a server
that sheds one of twenty requests would answer no list of a hundred pages.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Generic

from shoal.cluster.cache import T
from shoal.cluster.clock import loop_time
from shoal.cluster.pauses import asked, backoff
from shoal.cluster.reader import Page, Reader
from shoal.cluster.transport import Query, StreamRefused, Transport
from shoal.errors import Expired, TooLong, Unavailable

logger = logging.getLogger(__name__)

PAGE = 100
"""Objects of a list that are taken before others have the event loop: 100 pods are 0.6 MB, some ms."""
PAGE_BYTES = 2**21
"""That are parsed at once, unless it is one object: JSON of a user's own making takes fifty times as much meanwhile."""
MOST_GROWTH = 100
"""Times that of a page, where a list takes so long that its later pages are gone."""
MOST_TRIES = 8
"""Of a later page."""
MOST_WAITED = 150.0
"""Seconds that the later pages of a list are waited for in all. Its rest is gone after 300 to 600 s: the next list
would have larger pages, as if these had taken too long."""
FULL = 0.75
"""Of the bytes that a page may have, those that the next one aims at: objects differ."""


class Pages(Generic[T]):
    """The lists of one collection. `query`: what each page is asked for with, beside its own."""

    def __init__(self, transport: Transport, path: str, query: Query, reader: Reader[T]) -> None:
        self.answered_at = -math.inf
        """When the API server last answered, whatever it said."""
        self._transport = transport
        self._path = path
        self._query = query
        self._reader = reader
        self._growth = 1
        """How many times `PAGE` and `PAGE_BYTES` a page may have."""

    async def list(self) -> AsyncIterator[Page[T]]:
        """All pages of one list: what etcd has now, never what a cache of the API server had a while ago.

        Raises:
            Expired: the rest of the list is gone.
            StreamRefused: the API server refuses the list.
            Unavailable: it does not answer, or not with a list.
        """
        began, count, limit, query = loop_time(), 1, self._growth * PAGE, dict(self._query)
        failures, waited = 0, 0.0
        while True:
            try:
                page_query = {**query, "limit": str(limit)}
                answer = await self._transport.request("GET", self._path, query=page_query)
            except Unavailable as error:
                if limit > PAGE:
                    self._shrink()
                if isinstance(error, TooLong) and limit > 1:
                    limit //= 2
                    continue
                failures += 1
                pause = max(backoff(failures), asked(error) or 0.0)
                waited += pause
                if count == 1 or failures == MOST_TRIES or waited > MOST_WAITED or isinstance(error, TooLong):
                    raise
                logger.info("%s: page %d of a list is asked for again: %s", self._path, count, error)
                limit = min(limit, self._growth * PAGE)
                await asyncio.sleep(pause)
                continue
            failures = 0
            self.answered_at = loop_time()
            if answer.status == 410:  # the page token has expired
                self._growth = min(4 * self._growth, MOST_GROWTH)
                logger.warning(
                    "%s: page %d of a list is gone after %.0f s; the next has pages of %d: %s",
                    self._path,
                    count,
                    loop_time() - began,
                    self._growth * PAGE,
                    answer.message,
                )
                raise Expired(answer.message)
            if not answer.ok:
                raise StreamRefused(answer)
            fitting, too_long = self._fitting(limit, answer.body)
            if too_long and limit > 1:
                limit = fitting
                continue
            page = self._reader.page(answer.body)
            yield page
            if not page.token:
                self._shrink()
                return
            query["continue"] = page.token
            count, limit = count + 1, min(2 * limit, self._growth * PAGE, fitting)

    def _fitting(self, limit: int, body: bytes) -> tuple[int, bool]:
        """How many objects like those of an answer a page has, and whether there are too many in this one.

        The last page has fewer than were asked for. Each has one version, and so has the list.
        """
        most, objects = self._growth * PAGE_BYTES, min(limit, body.count(b'"resourceVersion"') - 1)
        return max(1, int(FULL * objects * most) // max(1, len(body))), len(body) > most

    def _shrink(self) -> None:
        self._growth = max(1, self._growth // 2)
