"""The process `shoal-operator`. kopf runs it (login, signals, shutdown); its event handler only queues jobs.

Reconciles do not depend on kopf: jobs, pods and nodes come from Shoal's own reflectors. kopf's peering, events and
annotations are off. Exit codes: 0 after a signal, 1 after the Lease was lost or an unexpected error (a restart recovers
from the cluster's state), 2 if the environment is invalid.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from shoal.api.base import GROUP, VERSION
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import HttpTransport, connect
from shoal.controller.endpoints import exposition, healthy, ready, serve
from shoal.controller.operator import Operator
from shoal.controller.settings import Settings
from shoal.errors import UsageError
from shoal.telemetry.coordinator import HttpsCoordinator

logger = logging.getLogger("shoal")

TOKEN_LIFE = timedelta(minutes=5)
"""kopf reads the service account token again after this time; the kubelet rotates it well before it expires."""


def main() -> None:
    """Run until a signal arrives."""
    try:
        settings = Settings.from_environment()
        code = asyncio.run(run(settings))
    except UsageError as error:
        print(f"shoal-operator: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


async def run(settings: Settings) -> int:
    """Run the operator; returns the exit code."""
    _log(settings.log_level)
    transport = await connect()
    coordinator = HttpsCoordinator()
    process = _Process(Operator(transport, settings, coordinator), transport)
    served = []
    try:
        if settings.health_port:
            probes = {"/healthz": healthy, "/readyz": ready(process.operator.unread)}
            served.append(await serve(settings.health_port, probes))
        if settings.metrics_port:
            registry = process.operator.metrics.registry
            served.append(await serve(settings.metrics_port, {"/metrics": exposition(registry)}))
        await kopf.operator(
            registry=process.registry(),
            settings=_kopf_settings(),
            standalone=True,
            clusterwide=not settings.namespace,
            namespaces=[settings.namespace] if settings.namespace else [],
            stop_flag=process.stop,
        )
    finally:
        await process.end()
        await coordinator.close()
        await transport.close()
        for runner in served:
            await runner.cleanup()
    return 1 if process.failed else 0


class _Process:
    """Couples the operator's task to kopf: when one ends, so does the other."""

    def __init__(self, operator: Operator, transport: HttpTransport) -> None:
        self.operator = operator
        self.stop = asyncio.Event()
        self.failed = False
        self._transport = transport
        self._task: asyncio.Task[None] | None = None

    def registry(self) -> kopf.OperatorRegistry:
        """Kopf's handlers."""
        registry = kopf.OperatorRegistry()

        @kopf.on.startup(registry=registry)
        async def start(**_: Any) -> None:
            self._task = asyncio.create_task(self.operator.run(), name="operator")
            self._task.add_done_callback(self._ended)

        @kopf.on.cleanup(registry=registry)
        async def end(**_: Any) -> None:
            await self.end()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            return await self._login()

        @kopf.on.event(GROUP, VERSION, TrainingJob.PLURAL, registry=registry)
        async def changed(namespace: str | None, name: str | None, **_: Any) -> None:
            self.operator.wake((namespace or "", name or ""))

        return registry

    async def end(self) -> None:
        """Stop the operator, which releases the Lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.stop.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed = True
            logger.error("the operator stopped: %s", _innermost(error), exc_info=error)

    async def _login(self) -> kopf.ConnectionInfo:
        """The cluster and credentials of the operator's own client."""
        configuration = self._transport.configuration
        bearer = await configuration.get_api_key_with_prefix("BearerToken")
        token = bearer.split()[-1] if bearer else None
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            token=token,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            expiration=datetime.now(UTC) + TOKEN_LIFE if token else None,
        )


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    return settings


def _log(level: str) -> None:
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    if level != "DEBUG":
        for noisy in ("kopf", "aiohttp.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
