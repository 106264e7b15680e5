"""Rotates the install key, from which the keys of all jobs are derived.

`rotate` makes a second key. After its restart the operator derives the keys of new jobs from that, and reaches those
that began before with either. `retire` removes the first key, when no job has it any more: a run keeps its key. Which
one that is derived from, its Secret tells, which is asked for by its name: whoever may make Secrets may label one with
any job. When the operator began to give the new key, the API server's own times tell, and no other clock.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from datetime import datetime

from shoal.api.base import API_VERSION
from shoal.api.training_job import TrainingJob
from shoal.client.api import Api, Json
from shoal.client.doctor import scope_of
from shoal.errors import NotFound, Refused
from shoal.manifests.names import secret_name_of
from shoal.words import few
from shoal_trainer.contract import job_key

KEY_BYTES = 32
OPERATOR = "app.kubernetes.io/name=shoal"
RESTART = f"rollout restart deployment -l {OPERATOR}"
"""For `kubectl -n NAMESPACE`. The Deployment has the name of the release."""
FIRST_ID = "1"
FIELDS = {f"f:{prefix}{name}" for prefix in ("", "previous-") for name in ("key", "key-id")}
"""Of the Secret, as the API server names them where it says who wrote them."""


def rotate(api: Api, secret: str, *, make: Callable[[int], bytes] = secrets.token_bytes) -> str:
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
    old = _id(data, "key-id")
    new = str(int(old) + 1) if old.isdigit() else f"{old}-next"
    fresh = {"key": make(KEY_BYTES), "key-id": new.encode(), "previous-key-id": old.encode()}
    body = {
        "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
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
        Refused: no rotation is under way; or, without `force`, a pod of the operator has not the new key, or jobs that
            are not finished have the previous one, or the Secret does not tell when it got the new one.
        Forbidden: this user may not list pods and Deployments beside the Secret, or jobs, or get these jobs' Secrets.
        NotFound: there is no such Secret.
    """
    found = api.get(_path(api, secret))
    if "previous-key" not in (found.get("data") or {}):
        raise Refused("no rotation is under way: `shoal install-key rotate` begins one")
    if not force:
        rotated, restart = _rotated(found), f"kubectl -n {api.namespace} {RESTART}"
        if rotated is not None and (old := _pods_of_before(api, rotated)):
            raise Refused(
                f"{', '.join(old)} began before the rotation and gives new jobs the previous key: restart "
                f"the operator, {restart}"
            )
        if left := _with_previous_key(api, found["data"]):
            raise Refused(
                f"{few(left)} have the previous key and would not be reached any more: "
                "wait for their end, or use --force"
            )
        if rotated is None:
            raise Refused(
                f"no job has the previous key, but {secret} does not tell when it got the new one (managedFields): "
                f"if the operator has not been restarted since then, {restart}, and ask again; else use --force"
            )
    body = {
        "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
        "data": {"previous-key": None, "previous-key-id": None},
    }
    api.patch(_path(api, secret), body)


def _rotated(secret: Json) -> datetime | None:
    """When the Secret got its keys, whoever wrote them, the last of which counts, or later; None: nothing tells."""
    wrote = [
        datetime.fromisoformat(each["time"])
        for each in secret["metadata"].get("managedFields") or ()
        if FIELDS & (each.get("fieldsV1") or {}).get("f:data", {}).keys()
    ]
    return max(wrote, default=None)


def _pods_of_before(api: Api, rotated: datetime) -> list[str]:
    """The operator's pods that may have read the Secret before; of those that are listed, evicted ones have ended."""
    return sorted(
        each["metadata"]["name"]
        for each in api.list(f"/api/v1/namespaces/{api.namespace}/pods", labelSelector=OPERATOR)
        if each.get("status", {}).get("phase") not in {"Succeeded", "Failed"}
        and datetime.fromisoformat(each["metadata"]["creationTimestamp"]) <= rotated
    )


def _with_previous_key(api: Api, data: Json) -> list[str]:
    """The jobs that are not finished and have a key of the previous install key."""
    previous, key_id = base64.b64decode(data["previous-key"]), _id(data, "previous-key-id")
    deployments = api.list(f"/apis/apps/v1/namespaces/{api.namespace}/deployments", labelSelector=OPERATOR)
    scopes = {scope_of(each) for each in deployments}
    within = f"/namespaces/{scopes.pop()}" if len(scopes) == 1 and "" not in scopes else ""
    return sorted(
        f"{meta['namespace']}/{meta['name']}"
        for each in api.list(f"/apis/{API_VERSION}{within}/{TrainingJob.PLURAL}")
        if not (each.get("status") or {}).get("completionTime")
        and _key_of(api, meta := each["metadata"]) == job_key(previous, meta["uid"], key_id)
    )


def _key_of(api: Api, meta: Json) -> bytes:
    """The key of a job; empty: it has none yet."""
    name = secret_name_of(meta["name"], meta["uid"])
    try:
        found = api.get(f"/api/v1/namespaces/{meta['namespace']}/secrets/{name}")
    except NotFound:
        return b""
    return base64.b64decode((found.get("data") or {}).get("key", ""))


def _id(data: Json, field: str) -> str:
    return base64.b64decode(data[field]).decode().strip() if field in data else FIRST_ID


def _path(api: Api, secret: str) -> str:
    return f"/api/v1/namespaces/{api.namespace}/secrets/{secret}"
