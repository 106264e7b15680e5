"""How the process is told what to do: environment variables, as the Helm chart sets them."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import UsageError
from shoal.policy.model import Images

LEAST_KEY_BYTES = 32


@dataclass(frozen=True)
class Settings:
    """Everything that may differ between installations."""

    install_key: bytes = field(repr=False)
    """The secret from which every job's key is derived."""
    images: Images
    namespace: str = ""
    """The namespace to watch; empty: all."""
    node_signals: bool = True
    """Whether nodes are read."""
    identity: str = "shoal"
    """Who this process is in the Lease."""
    lease_namespace: str = "default"
    lease_name: str = "shoal"
    metrics_port: int = 8080
    """0: no metrics."""
    health_port: int = 8081
    """0: no health endpoint."""
    log_level: str = "INFO"
    telemetry_seconds: float = 30.0
    """Status updates that only show progress: at most one of a job in this time."""
    workers: int = 16
    """Jobs worked on at the same time."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            UsageError: one lacks or cannot be read; the message names it.
        """
        get = environment.get
        return cls(
            install_key=_key(_required(environment, "SHOAL_INSTALL_KEY_FILE")),
            images=Images(
                ps=_required(environment, "SHOAL_IMAGE_PS"),
                worker=_required(environment, "SHOAL_IMAGE_WORKER"),
            ),
            namespace=get("SHOAL_NAMESPACE", ""),
            node_signals=_flag(environment, "SHOAL_NODE_SIGNALS", True),
            identity=get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
            lease_namespace=get("POD_NAMESPACE") or "default",
            lease_name=get("SHOAL_LEASE_NAME") or "shoal",
            metrics_port=_number(environment, "SHOAL_METRICS_PORT", 8080),
            health_port=_number(environment, "SHOAL_HEALTH_PORT", 8081),
            log_level=_level(environment),
            telemetry_seconds=_number(environment, "SHOAL_TELEMETRY_SECONDS", 30),
            workers=max(1, _number(environment, "SHOAL_WORKERS", 16)),
        )


def _required(environment: Mapping[str, str], name: str) -> str:
    if not (value := environment.get(name, "")):
        raise UsageError(f"{name} is not set: set it in the operator's environment")
    return value


def _key(path: str) -> bytes:
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"SHOAL_INSTALL_KEY_FILE={path} cannot be read: {error.strerror}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise UsageError(
            f"the install key in {path} has {len(key)} bytes: it needs at least {LEAST_KEY_BYTES}"
        )
    return key


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise UsageError(f"{name}={text} must be a non-negative integer")
    return int(text)


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = (environment.get(name) or str(default)).lower()
    if text not in {"true", "false"}:
        raise UsageError(f"{name}={text} must be true or false")
    return text == "true"


def _level(environment: Mapping[str, str]) -> str:
    level = (environment.get("SHOAL_LOG_LEVEL") or "info").upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise UsageError(f"SHOAL_LOG_LEVEL={level.lower()} must be debug, info, warning or error")
    return level
