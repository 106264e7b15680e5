"""Rotates the install key, from which the keys of all jobs are derived.

`rotate` makes a second key. After its restart the operator derives the keys of new jobs from that, and reaches those
that began before with either. `retire` removes the first key, when no job has it any more: a run keeps its key.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta

from shoal.api.base import API_VERSION, GROUP
from shoal.api.training_job import TrainingJob
from shoal.client.api import Api, Json
from shoal.errors import Refused
from shoal.words import few

KEY_BYTES = 32
ROTATED = f"{GROUP}/install-key-rotated"
"""Annotation of the Secret: when."""
REPLACED_WITHIN = timedelta(minutes=10)
"""A pod of the operator may work so long beside its successor. Jobs that began until then may have its key."""
OPERATOR = "app.kubernetes.io/name=shoal"
RESTART = f"rollout restart deployment -l {OPERATOR}"
"""For `kubectl -n NAMESPACE`. The Deployment has the name of the release."""
FIRST_ID = "1"


def rotate(
    api: Api, secret: str, *, now: datetime, make: Callable[[int], bytes] = secrets.token_bytes
) -> str:
    """Add a new key to the Secret in the namespace of `api`; returns the new key's id.

    Raises:
        Refused: a rotation is under way, or the Secret has no key.
        NotFound: there is no such Secret.
    """
    found = api.get(_path(api, secret))
    data: Json = found.get("data") or {}
    if "key" not in data:
        raise Refused(f"the Secret {secret} has no field key")
    if "previous-key" in data:
        raise Refused("the previous rotation is not over: `shoal install-key retire` ends it")
    old = base64.b64decode(data["key-id"]).decode() if "key-id" in data else FIRST_ID
    new = str(int(old) + 1) if old.isdigit() else f"{old}-next"
    fresh = {"key": make(KEY_BYTES), "key-id": new.encode(), "previous-key-id": old.encode()}
    body = {
        "metadata": {
            "resourceVersion": found["metadata"]["resourceVersion"],
            "annotations": {ROTATED: now.isoformat(timespec="seconds")},
        },
        "data": {
            **{name: base64.b64encode(value).decode() for name, value in fresh.items()},
            "previous-key": data["key"],
        },
    }
    api.patch(_path(api, secret), body)
    return new


def retire(api: Api, secret: str, *, force: bool = False) -> None:
    """Remove the previous key from the Secret.

    Raises:
        Refused: no rotation is under way; or, without `force`, the operator was not restarted since, or jobs that may
            have the previous key are not finished.
        NotFound: there is no such Secret.
    """
    found = api.get(_path(api, secret))
    if "previous-key" not in (found.get("data") or {}):
        raise Refused("no rotation is under way: `shoal install-key rotate` begins one")
    rotated = (found["metadata"].get("annotations") or {}).get(ROTATED)
    if not force and (left := _begun_before(api, rotated)):
        raise Refused(
            f"{few(left)} began before the operator had the new key and would not be reached any more: "
            "wait for their end, or use --force"
        )
    body = {
        "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
        "data": {"previous-key": None, "previous-key-id": None},
    }
    api.patch(_path(api, secret), body)


def _begun_before(api: Api, rotated: str | None) -> list[str]:
    """Jobs that are not finished and may have the previous key: those of before the youngest pod of the operator."""
    pods = api.list(f"/api/v1/namespaces/{api.namespace}/pods", labelSelector=OPERATOR)
    began = {
        each["metadata"]["name"]: datetime.fromisoformat(each["metadata"]["creationTimestamp"])
        for each in pods
    }
    if rotated is not None and (
        old := sorted(n for n, at in began.items() if at < datetime.fromisoformat(rotated))
    ):
        raise Refused(
            f"{', '.join(old)} began before the rotation and gives new jobs the previous key: restart the operator, "
            f"kubectl -n {api.namespace} {RESTART}"
        )
    until = max(began.values()) + REPLACED_WITHIN if rotated is not None and began else None
    left = []
    for job in api.list(f"/apis/{API_VERSION}/{TrainingJob.PLURAL}"):
        meta, status = job["metadata"], job.get("status") or {}
        created = datetime.fromisoformat(meta["creationTimestamp"])
        if not status.get("completionTime") and (until is None or created <= until):
            left.append(f"{meta['namespace']}/{meta['name']}")
    return sorted(left)


def _path(api: Api, secret: str) -> str:
    return f"/api/v1/namespaces/{api.namespace}/secrets/{secret}"
