"""The settings of the process, from environment variables that the Helm chart sets."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.controllers.trainingjob.credentials import FIRST_KEY_ID, InstallKey
from shoal.errors import UsageError
from shoal.manifests.installed import labels_of, own_spot_of
from shoal.manifests.platforms import NO_OWN, PLATFORMS, Platform
from shoal.policy.model import Images
from shoal.process.install_key import KEY_BYTES


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What is set of each process."""

    identity: str = "shoal"
    """The holder identity in the Lease."""
    lease_namespace: str = "default"
    lease_name: str = "shoal"
    metrics_port: int = 8080
    """0: no metrics endpoint."""
    health_port: int = 8081
    """0: no health endpoint."""
    log_level: str = "INFO"
    log_format: str = "text"
    """text or json."""


@dataclass(frozen=True, kw_only=True)
class Settings(ProcessSettings):
    """The settings of one installation."""

    install_key: InstallKey
    images: Images
    namespace: str = ""
    """The namespace to watch; empty for all namespaces."""
    node_signals: bool = True
    """Whether to watch nodes."""
    pools: bool = True
    """Whether to watch CapacityPools, and to write their status."""
    kueue: bool = False
    """Whether to watch Workloads and ResourceFlavors of Kueue."""
    platform: Platform | None = None
    """The platform of the nodes; None: as their labels say."""
    own_spot: Platform = NO_OWN
    """Labels and taints of spot nodes that are this cluster's own."""
    page_port: int = 0
    """0: no web page."""
    page_hosts: tuple[str, ...] = ()
    """Names by which browsers may ask for it."""
    telemetry_seconds: float = 30.0
    """Minimum interval of a job's status updates that only change telemetry."""
    plan_seconds: float = 60.0
    """Interval of plans of jobs with pools, where nothing calls for one sooner."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            UsageError: a variable is missing or invalid; the message names it.
        """
        get = environment.get
        return cls(
            **of_any_process(environment),
            install_key=_key(_required(environment, "SHOAL_INSTALL_KEY_FILE")),
            images=Images(
                ps=_required(environment, "SHOAL_IMAGE_PS"),
                worker=_required(environment, "SHOAL_IMAGE_WORKER"),
                worker_gpu=get("SHOAL_IMAGE_WORKER_GPU", ""),
                node_selector=labels_of(environment, "SHOAL_NODE_SELECTOR"),
            ),
            namespace=get("SHOAL_NAMESPACE", ""),
            node_signals=_flag(environment, "SHOAL_NODE_SIGNALS", True),
            pools=_flag(environment, "SHOAL_POOLS", True),
            kueue=_flag(environment, "SHOAL_KUEUE", False),
            platform=said_platform(environment),
            own_spot=own_spot_of(environment),
            lease_namespace=get("POD_NAMESPACE") or "default",
            lease_name=get("SHOAL_LEASE_NAME") or "shoal",
            page_port=_number(environment, "SHOAL_PAGE_PORT", 0),
            page_hosts=tuple(filter(None, get("SHOAL_PAGE_HOSTS", "").split(","))),
            telemetry_seconds=_number(environment, "SHOAL_TELEMETRY_SECONDS", 30),
            plan_seconds=max(1, _number(environment, "SHOAL_PLAN_SECONDS", 60)),
        )


def _required(environment: Mapping[str, str], name: str) -> str:
    if not (value := environment.get(name, "")):
        raise UsageError(f"{name} is not set: set it in the operator's environment")
    return value


def _key(path: str) -> InstallKey:
    """The key in this file. Beside it may be `key-id` and, during a rotation, `previous-key` and `previous-key-id`."""
    file = Path(path)
    previous = file.with_name("previous-key")
    return InstallKey(
        _secret(file),
        _id(file.with_name("key-id")),
        InstallKey(_secret(previous), _id(previous.with_name("previous-key-id")))
        if previous.exists()
        else None,
    )


def _secret(file: Path) -> bytes:
    try:
        key = file.read_bytes()
    except OSError as error:
        raise UsageError(f"SHOAL_INSTALL_KEY_FILE={file} cannot be read: {error.strerror}") from error
    if len(key) < KEY_BYTES:
        raise UsageError(f"the install key in {file} has {len(key)} bytes: it needs at least {KEY_BYTES}")
    return key


def _id(file: Path) -> str:
    return file.read_text().strip() if file.exists() else FIRST_KEY_ID


def of_any_process(environment: Mapping[str, str]) -> dict[str, Any]:
    """What is set of each process. The namespace and the name of its Lease are not: some have one for all."""
    get = environment.get
    level = (get("SHOAL_LOG_LEVEL") or "info").lower()
    return {
        "identity": get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        "metrics_port": _number(environment, "SHOAL_METRICS_PORT", 8080),
        "health_port": _number(environment, "SHOAL_HEALTH_PORT", 8081),
        "log_level": _choice("SHOAL_LOG_LEVEL", level, "debug", "info", "warning", "error").upper(),
        "log_format": _choice("SHOAL_LOG_FORMAT", get("SHOAL_LOG_FORMAT") or "text", "text", "json"),
    }


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A variable that is a non-negative integer."""
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise UsageError(f"{name}={text} must be a non-negative integer")
    return int(text)


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    return _choice(name, (environment.get(name) or str(default)).lower(), "true", "false") == "true"


def _choice(name: str, text: str, *choices: str) -> str:
    if text not in choices:
        raise UsageError(f"{name}={text} must be {', '.join(choices[:-1])} or {choices[-1]}")
    return text


def said_platform(environment: Mapping[str, str]) -> Platform | None:
    """The platform of the nodes; None: as their labels say."""
    name = environment.get("SHOAL_PLATFORM") or "auto"
    if name == "auto":
        return None
    if name not in PLATFORMS:
        raise UsageError(f"SHOAL_PLATFORM={name} must be auto or one of {', '.join(PLATFORMS)}")
    return PLATFORMS[name]
