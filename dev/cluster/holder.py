"""Who uses a cluster.

Names and addresses are per machine: without this, the demo of another checkout, or a second one in another terminal,
would remove the cluster of a demo or a test that still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from dev.cluster.processes import Identity
from dev.errors import DevError
from dev.paths import ROOT, clusters


class Holder(NamedTuple):
    """The process, its checkout, and where its pid is that number: a container may share the cache."""

    process: Identity
    checkout: str
    namespace: str


def record(cluster: str) -> Path:
    """The file that names the process; beside the cluster's folder, which `up` empties."""
    return clusters() / f".{cluster}.holder"


def hold(cluster: str) -> None:
    """Record that this process uses the cluster, until it ends or `release`."""
    if me := Identity.of(os.getpid()):
        record(cluster).parent.mkdir(parents=True, exist_ok=True)
        holder = {"process": asdict(me), "checkout": str(ROOT), "namespace": _namespace()}
        new = record(cluster).with_suffix(".new")
        new.write_text(json.dumps(holder))
        new.replace(record(cluster))


def is_left(cluster: str) -> bool:
    """Whether a process held it that ended without `release`. Of what nobody held, or elsewhere, that is not known."""
    held = _read(cluster)
    return held is not None and held.namespace == _namespace() and not held.process.running


def release(cluster: str) -> None:
    """Nobody uses it any more."""
    record(cluster).unlink(missing_ok=True)


def refuse_another(cluster: str) -> None:
    """Do nothing where nobody uses the cluster, or this very process does.

    Raises:
        DevError: another process, which still runs, uses it.
    """
    if (held := _read(cluster)) is None:
        return
    process, checkout, _ = held
    if process.running and process.pid != os.getpid():
        raise DevError(
            f"The cluster {cluster} is used by process {process.pid} of the checkout {checkout}. "
            f"Wait for it, or end it with `kill {process.pid}`."
        )


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _read(cluster: str) -> Holder | None:
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        found = json.loads(record(cluster).read_text())
        return Holder(Identity(**found["process"]), found["checkout"], found.get("namespace", ""))
    return None
