"""Where the API server is, and with which credentials: those of the pod's service account, or of a kubeconfig.

In a pod these are two variables and two files, so nothing of the official client is loaded there: with all that its
kubeconfig understands (plugins, OpenID, clouds) it takes 23 MiB. A kubeconfig is read by that client.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shoal.errors import UsageError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""The kubelet replaces a token well before it expires; the file is read again after this time."""

Bearer = Callable[[], Awaitable[str | None]]


@dataclass(frozen=True)
class ApiServer:
    """One API server. `bearer`: the token of the next request; it may raise OSError."""

    url: str
    bearer: Bearer = field(repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    server_name: str | None = None
    """The name in the server's certificate, where it is not that of the URL."""
    proxy: str | None = None

    def tls(self) -> ssl.SSLContext:
        """The TLS context of its connections."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.certificate_file is not None:
            context.load_cert_chain(self.certificate_file, self.key_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


async def find(environment: Mapping[str, str] = os.environ, kubeconfig: Path | None = None) -> ApiServer:
    """The pod's own API server; or, outside of a pod or where KUBECONFIG is set, that of the kubeconfig.

    Raises:
        UsageError: none of them is available.
    """
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environment and "KUBECONFIG" not in environment:
        return in_pod(environment)
    return await from_kubeconfig(kubeconfig)


def in_pod(environment: Mapping[str, str], folder: Path | None = None) -> ApiServer:
    """The API server as a pod with a service account finds it.

    Raises:
        UsageError: the pod has no service account.
    """
    folder = folder or SERVICE_ACCOUNT
    host = environment["KUBERNETES_SERVICE_HOST"]
    port = environment.get("KUBERNETES_SERVICE_PORT") or "443"
    for needed in ("token", "ca.crt"):
        if not (folder / needed).is_file():
            words = f"{folder / needed} is missing: the pod needs a service account whose token is mounted"
            raise UsageError(f"no cluster configuration: {words}")
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return ApiServer(url, TokenFile(folder / "token"), ca_file=str(folder / "ca.crt"), proxy=_proxy(url))


class TokenFile:
    """The token in a file that is replaced now and then."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._token = ""
        self._until = float("-inf")

    async def __call__(self) -> str:
        """The token, read again after `TOKEN_SECONDS`."""
        if self._clock() >= self._until:
            self._token = (await asyncio.to_thread(self._path.read_text)).strip()
            self._until = self._clock() + TOKEN_SECONDS
        return self._token


async def from_kubeconfig(path: Path | None = None) -> ApiServer:
    """The API server of a kubeconfig, by default of KUBECONFIG or ~/.kube/config.

    Raises:
        UsageError: it cannot be read.
    """
    from kubernetes.aio import client, config

    known: Any = client.Configuration()
    try:
        await config.load_kube_config(
            None if path is None else str(path), client_configuration=known, persist_config=False
        )
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster configuration: set KUBECONFIG, or run in a pod with a service account ({error})"
        ) from error

    async def bearer() -> str | None:
        words = await known.get_api_key_with_prefix("BearerToken")
        return str(words).split()[-1] if words else None

    return ApiServer(
        known.host,
        bearer,
        ca_file=known.ssl_ca_cert,
        certificate_file=known.cert_file,
        key_file=known.key_file,
        verify=bool(known.verify_ssl),
        server_name=known.tls_server_name,
        proxy=known.proxy or _proxy(known.host),
    )


def _proxy(url: str) -> str | None:
    """The proxy of the environment (HTTPS_PROXY, NO_PROXY)."""
    found, known = urlsplit(url), getproxies()
    bypassed = proxy_bypass(found.netloc) or _is_of(found.hostname or "", known.get("no", ""))
    return None if bypassed else known.get("https")


def _is_of(host: str, listed: str) -> bool:
    """Whether the host is an address of one of these networks, as programs in Go read NO_PROXY. Python knows names."""
    with suppress(ValueError):
        address = ip_address(host)
        for each in listed.split(","):
            with suppress(ValueError):
                if address in ip_network(each.strip(), strict=False):
                    return True
    return False
