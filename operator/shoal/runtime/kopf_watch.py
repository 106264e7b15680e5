"""kopf's watch of the custom resources, beside Shoal's own reflectors: a second witness of every change.

Its handlers wake a key only for a resource version that the cache has not seen; where the cache still has not seen it
seconds later, the reflector's watch is behind or dead, and is told to list again. Without it that would take a minute
(`reflector.SILENCE_SECONDS`). The process, its start and end, its log-in and its reconciles are not kopf's.

kopf runs in a thread with an event loop of its own, for two reasons: when its operator ends it cancels every task of
its loop that was started after it (`kopf.run_tasks`), and it copies each object. It ends at a watch ERROR other than
410 and after a minute of 403 or 5xx of one resource, and is ended where it finds a resource not served, since it looks
for them once; then it is started again. Its watches of other resources do not end by themselves: see `_refuse`.
Peering, events, annotations and finalizers are off, and so are its own signal handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from shoal.api.base import GROUP, VERSION
from shoal.cluster.server import ApiServer


@contextlib.contextmanager
def _as_if_absent(package: str) -> Iterator[None]:
    """An optional import of this package fails in the block, unless it was imported before."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # what the import system documents
    try:
        yield
    finally:
        del sys.modules[package]


with _as_if_absent(
    "kubernetes"
):  # kopf would load it, 23 MiB, to recognize its models, which no handler here has
    import kopf
    from kopf._cogs.structs.credentials import Vault
    from kopf._cogs.structs.references import Insights

logger = logging.getLogger(__name__)

TOKEN_LIFE = timedelta(minutes=5)
"""kopf reads the service account token again after this time; the kubelet rotates it well before it expires."""
IDLE_SECONDS = 0.1
"""How long kopf keeps the worker of an object that changes no more, and with it the last event: 19 KiB. When 500 jobs
began within its own 5 s these took 34 MiB, of which 20 stayed as holes between what is kept; now it is 8 to 10 and 5
to 7."""
CHUNK = 8
"""Objects that kopf lists at once, all of which it makes Python's objects of, as by default of every one there is."""
_METADATA = "application/json;as={};g=meta.k8s.io;v=v1,application/json"
REFUSE_SECONDS = 1.0
"""How often whoever waits for credentials is told that there are none, once kopf ends."""
RESTART_SECONDS = 5.0
LONGEST_RESTART_SECONDS = 300.0
STEADY_SECONDS = 600.0
"""After a run of this length a failure is the first again."""

Changed = Callable[[str, str, str, str, str], None]
"""Called with (plural, namespace, name, uid, resource version) in the loop that called `run`."""

Credentials = Callable[[], Coroutine[Any, Any, kopf.ConnectionInfo]]


class KopfWatch:
    """Runs kopf for the custom resources. `login` gives the credentials, in the loop that called `run`."""

    def __init__(
        self,
        plurals: Sequence[str],
        namespace: str,
        changed: Changed,
        login: Credentials,
        *,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._plurals = plurals
        self._namespace = namespace
        self._changed = changed
        self._login = login
        self._on_restart = on_restart

    async def run(self) -> None:
        """Watch until cancelled; whatever ends kopf, it is started again."""
        delay = RESTART_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            why = await self._once(loop)
            if loop.time() - began > STEADY_SECONDS:
                delay = RESTART_SECONDS
            logger.warning("kopf's watch ended (%s); it starts again in %.0f s", why, delay)
            self._on_restart()
            await asyncio.sleep(delay)
            delay = min(LONGEST_RESTART_SECONDS, 2 * delay)

    async def _once(self, loop: asyncio.AbstractEventLoop) -> str:
        """Run kopf in a thread until it ends, or until this is cancelled; returns why it ended."""
        stop = threading.Event()
        ended: asyncio.Future[str] = loop.create_future()

        def tell(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        def work() -> None:
            try:
                why = asyncio.run(self._operator(loop, stop))
            except BaseException as error:  # whatever it is, it must not end the process
                why = repr(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(tell, why)

        threading.Thread(target=work, name="kopf", daemon=True).start()
        try:
            return await ended
        finally:
            stop.set()

    async def _operator(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> str:
        """Run it until it ends; returns why it did."""
        found, vault, ending = Insights(), Vault(), asyncio.Event()
        unserved = asyncio.create_task(self._unserved(found, stop))
        refusing = asyncio.create_task(_refuse(vault, ending))
        try:
            await kopf.operator(
                registry=self._registry(loop, stop, ending),
                settings=_settings(),
                insights=found,
                vault=vault,
                standalone=True,
                clusterwide=not self._namespace,
                namespaces=[self._namespace] if self._namespace else [],
                stop_flag=stop,
            )
        except kopf.LoginError:  # of a watch that was refused: the one that failed before is in kopf's log
            return "one of its watches failed"
        finally:
            refusing.cancel()
            stop.set()  # for which a thread waits, and for that the end of this loop
        missing = unserved.result() if unserved.done() else []
        return (
            f"the API server does not say that it serves {', '.join(missing)}" if missing else "it returned"
        )

    async def _unserved(self, found: Insights, stop: threading.Event) -> list[str]:
        """What kopf has not found. It looks once: then it is stopped, for it would watch nothing of these, for ever."""
        await found.ready_resources.wait()
        missing = sorted(set(self._plurals) - {each.plural for each in found.watched_resources})
        if missing:
            stop.set()
        return missing

    def _registry(
        self, loop: asyncio.AbstractEventLoop, stop: threading.Event, ending: asyncio.Event
    ) -> kopf.OperatorRegistry:
        """What kopf calls: to log in, of each change, and once it ends, when `ending` is set."""
        registry = kopf.OperatorRegistry()

        @kopf.on.cleanup(registry=registry)
        async def ends(**_: Any) -> None:
            ending.set()
            stop.set()  # a task that waits for it would be waited for

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            info = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._login(), loop))
            return _session(info, self._plurals)

        async def changed(resource: kopf.Resource, event: Any, **_: Any) -> None:
            found = event["object"]
            meta = found["metadata"]
            loop.call_soon_threadsafe(
                self._changed,
                resource.plural,
                meta.get("namespace", ""),
                meta.get("name", ""),
                meta.get("uid", ""),
                str(meta.get("resourceVersion", "")),
            )
            # kopf's views of an object hold it in a cycle until a full collection; a proxy may have sent all of it.
            for part, name in ((found, "spec"), (found, "status"), (meta, "managedFields")):
                part.pop(name, None)

        for plural in self._plurals:
            kopf.on.event(GROUP, VERSION, plural, registry=registry)(changed)
        return registry


async def _refuse(vault: Vault, ending: asyncio.Event) -> None:
    """Once kopf ends, tell its tasks that no credentials will come any more.

    When one of its watches has failed, kopf ends what would log in and closes the session. The other watches take that
    for a call to log in again, and wait for it; being cancelled they begin to watch again, and wait for it for ever.
    """
    await ending.wait()
    while True:
        await vault.populate({})
        await asyncio.sleep(REFUSE_SECONDS)


async def credentials(server: ApiServer) -> kopf.ConnectionInfo:
    """The API server and credentials, for kopf."""
    token = await server.bearer()
    return kopf.ConnectionInfo(
        server=server.url,
        ca_path=server.ca_file,
        insecure=not server.verify,
        token=token,
        certificate_path=server.certificate_file,
        private_key_path=server.key_file,
        expiration=datetime.now(UTC) + TOKEN_LIFE if token else None,
    )


class _Answer(aiohttp.ClientResponse):
    """As aiohttp's. The items of a list of metadata are null where there are none, which kopf does not expect."""

    async def json(self, **options: Any) -> Any:
        """See aiohttp."""
        found = await super().json(**options)
        if isinstance(found, dict) and found.get("items", ()) is None:
            found["items"] = []
        return found


def _session(info: kopf.ConnectionInfo, plurals: Sequence[str]) -> kopf.AiohttpSession:
    """A session of kopf's own kind, but that the API server answers with the metadata of these resources only.

    Whoever may write an object may make it as large as etcd takes, which is twenty times as much in Python.
    """

    async def ask(_session: object, _context: object, asked: aiohttp.TraceRequestStartParams) -> None:
        if asked.url.name in plurals:
            form = "PartialObjectMetadata" if "watch" in asked.url.query else "PartialObjectMetadataList"
            asked.headers["Accept"] = _METADATA.format(form)

    asking = aiohttp.TraceConfig()
    asking.on_request_start.append(ask)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        trace_configs=[asking],
        response_class=_Answer,
    )
    return kopf.AiohttpSession(
        aiohttp_session=session,
        server=info.server,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
    )


class _NoDiffBase(kopf.DiffBaseStorage):
    """Keeps nothing to compare an object with: only handlers of changes ask for that, and kopf would copy each object.

    While 200 jobs began, kopf took 15 % of the process's time with that, and 10 % without (samples of a profiler).
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # after which kopf would kill this process
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.watching.chunk_size = CHUNK
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    return settings
