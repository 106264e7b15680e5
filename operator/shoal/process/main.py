"""The process `shoal-operator`: starts the operator, its endpoints and kopf's watch, and stops them at a signal.

Exit codes: 0 after a signal; 1 after the Lease was lost, an unexpected error, or where the API server does not answer
(a restart recovers from the cluster's state); 2 if the environment or the install key is invalid. kopf's trouble never
ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from shoal.cluster.http import HttpTransport, connect
from shoal.cluster.lease import MOST_UNANSWERED
from shoal.cluster.own_thread import OwnThread
from shoal.errors import Unavailable, UsageError
from shoal.page import Page
from shoal.process.check import check
from shoal.process.endpoints import exposition, healthy, open_ports, ready
from shoal.process.install_key import NoKey, write
from shoal.process.life import (
    allow_open_files,
    end_with,
    exempt_what_is_loaded,
    keep_tls_small,
    signalled,
    until,
)
from shoal.process.log import start_log
from shoal.process.operator import SEEN_WITHIN_SECONDS, Operator
from shoal.process.settings import Settings
from shoal.runtime.kopf_watch import KopfWatch, credentials
from shoal.telemetry.coordinator import HttpsCoordinator

LEASE_CONNECTIONS = MOST_UNANSWERED
WATCHED_BY_KOPF = ("trainingjobs", "capacitypools", "speedprofiles")


def main() -> None:
    """Run until a signal arrives; or `shoal-operator install-key …` or `check …`."""
    try:
        if sys.argv[1:2] == ["install-key"]:
            asyncio.run(_install_key(sys.argv[2:]))
            return
        if sys.argv[1:2] == ["check"]:
            sys.exit(asyncio.run(check(sys.argv[2:])))
        settings = Settings.from_environment()
        end_with(run(settings))
    except (UsageError, Unavailable, NoKey) as error:
        print(f"shoal-operator: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, Unavailable) else 2)


async def _install_key(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="shoal-operator install-key")
    parser.add_argument("--secret", required=True)
    parser.add_argument("--file", required=True, type=Path)
    given = parser.parse_args(words)
    transport = await connect()
    try:
        await write(transport, os.environ.get("POD_NAMESPACE") or "default", given.secret, given.file)
    finally:
        await transport.close()


async def run(settings: Settings) -> int:
    """Run the operator; returns the exit code."""
    start_log(settings.log_level, settings.log_format)
    allow_open_files()
    keep_tls_small()
    exempt_what_is_loaded()
    stop = signalled()
    async with AsyncExitStack() as resources:
        transport = await connect()
        resources.push_async_callback(transport.close)
        aside = resources.enter_context(OwnThread("lease"))
        lease_transport = await connect(LEASE_CONNECTIONS)
        resources.push_async_callback(lambda: aside(lease_transport.close()))
        coordinator = HttpsCoordinator()
        resources.push_async_callback(coordinator.close)
        operator = Operator(
            transport, settings, coordinator, lease_transport=lease_transport, lease_runs=aside
        )
        page = Page(operator.state.jobs.all, operator.state.pools.all, hosts=settings.page_hosts)
        if settings.page_port:
            looking = asyncio.create_task(page.run(), name="page")
            resources.callback(looking.cancel)
        await open_ports(
            resources,
            (settings.health_port, {"/healthz": healthy, "/readyz": ready(operator.manager.unread)}),
            (settings.metrics_port, {"/metrics": exposition(operator.metrics.registry)}),
            (settings.page_port, page.answers),
        )
        watch = _kopf(operator, settings, transport)
        beside = watch.run(), operator.garbage.run(), transport.keep_open()
        return await until(stop, "operator", operator.run(), *beside)
    return 1


def _kopf(operator: Operator, settings: Settings, transport: HttpTransport) -> KopfWatch:
    loop = asyncio.get_running_loop()

    def changed(plural: str, namespace: str, name: str, uid: str, version: str) -> None:
        if operator.changed(plural, namespace, name, uid, version):
            loop.call_later(SEEN_WITHIN_SECONDS, operator.missed, plural, uid, version)

    restarts = operator.metrics.watch_restarts.labels("kopf", "ended")
    login = partial(credentials, transport.server)
    plurals = [each for each in WATCHED_BY_KOPF if each in operator.watched]
    return KopfWatch(plurals, settings.namespace, changed, login, on_restart=restarts.inc)


if __name__ == "__main__":
    main()
