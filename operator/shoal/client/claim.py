"""The files of a model in a volume claim: a short-lived pod mounts it, and the API server passes on what it reads.

The pod is like the job's parameter servers, which wrote the files: their image, which is small, their user, and nodes
like theirs, as far as the job tells them after its end: the architecture of the image, the labels and taints of their
CapacityPool, and what their template says. It can only read, and it ends by itself should nobody delete it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from shoal.api.base import API_VERSION
from shoal.api.capacity_pool import CapacityPool
from shoal.client.api import read_as
from shoal.errors import ClusterError, NotFound, Refused, Unavailable, UsageError
from shoal.manifests.merge import merge
from shoal.manifests.placement import Where, tolerations, with_installed
from shoal.manifests.platforms import GENERIC

if TYPE_CHECKING:
    from shoal.client.api import Api
    from shoal.client.job import Job

log = logging.getLogger(__name__)

Json = dict[str, Any]
MOUNT = "/claim"
START_SECONDS = 180.0
"""A node may have to be made, and a volume to be attached."""
LIFE_SECONDS = 3600
AS_THE_SERVERS = (
    *("imagePullSecrets", "nodeSelector", "affinity", "tolerations", "securityContext", "priorityClassName"),
    *("runtimeClassName", "schedulerName"),
)
"""What the pod has of their template."""


@contextlib.contextmanager
def reading(
    where: str, job: Job, api: Api, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Callable[[str], Iterable[bytes]]]:
    """Reads the files of a model that the job's servers wrote to this path, by their names.

    Raises:
        UsageError: the job has no claim: the model went with its pod, or is on a volume of the job's template.
        Refused, Forbidden: the pod may not be created, or nothing may be run in it; with the API server's words.
        Unavailable: the pod does not start, or a file cannot be read.
    """
    storage = job.seen.spec.storage
    claim = storage.volume_claim
    if storage.uri is not None:
        raise UsageError(
            f"the model lies in {where}, on a volume that the job's template mounts (storage.uri {storage.uri}), which "
            "this machine does not have there: copy it from that volume, or mount it here, too"
        )
    if claim is None:
        raise UsageError(
            f"the model was in {where} of a pod without lasting storage (storage: ephemeral), and went with it. Use a "
            "volume claim or a bucket."
        )
    folder = PurePosixPath(MOUNT, where.partition("/storage/")[2])
    pods = f"/api/v1/namespaces/{job.namespace}/pods"
    pod = f"{pods}/{api.create(pods, manifest(job, claim.name, api))['metadata']['name']}"
    try:
        _wait(pod, api, sleep)
        yield lambda name: api.run(pod, ["cat", str(folder / name)])
    finally:
        try:
            api.delete(pod)
        except ClusterError as error:  # what was read is read; the pod ends by itself, and goes with the job
            if not isinstance(error, NotFound):
                log.warning("the pod %s stays for at most an hour: %s", pod.rpartition("/")[2], error)


def manifest(job: Job, claim: str, api: Api) -> Json:
    """The pod."""
    template = job.seen.spec.parameter_servers.template.read().get("spec") or {}
    where = Where("Any", _pool(job, api))
    containers = template.get("containers") or ()
    image = next((each["image"] for each in containers if each["name"] == "ps" and each.get("image")), None)
    images = job.seen.status.images
    locked = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {
        "name": "copy",
        "image": image or (images.ps if images else "busybox"),
        "command": ["sleep", str(LIFE_SECONDS)],
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "256Mi"},
        },
        "volumeMounts": [{"name": "claim", "mountPath": MOUNT, "readOnly": True}],
        "securityContext": locked,
    }
    like_theirs = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": with_installed(
            (images and images.node_selector) or {}, where, template.get("affinity")
        ),
        "tolerations": tolerations(where, GENERIC, gpu=False) if where.pool else [],
    }
    spec = {
        **merge(like_theirs, {key: template[key] for key in AS_THE_SERVERS if template.get(key)}),
        "containers": [container],
        "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    owner = {
        "apiVersion": API_VERSION,
        "kind": "TrainingJob",
        "name": job.name,
        "uid": job.seen.metadata.uid,
    }
    metadata = {"name": f"{job.name}-model-{secrets.token_hex(3)}", "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _pool(job: Job, api: Api) -> CapacityPool | None:
    """The CapacityPool that parameter server 0 was in; None: in none, or it cannot be read."""
    slots = job.seen.status.slots
    name = next((each.pool for each in slots if each.role == "ps" and each.index == 0), "")
    if not name:
        return None
    with contextlib.suppress(NotFound, Refused):  # who may not read pools may read the model
        return read_as(CapacityPool, api.get(f"/apis/{API_VERSION}/{CapacityPool.PLURAL}/{name}"))
    return None


def _wait(path: str, api: Api, sleep: Callable[[float], None]) -> None:
    """Until the pod runs. Raises Unavailable with what holds it up."""
    waited, pause = 0.0, 0.25
    while True:
        status = api.get(path).get("status") or {}
        if status.get("phase") == "Running":
            return
        if status.get("phase") in {"Succeeded", "Failed"} or waited >= START_SECONDS:
            raise Unavailable(
                f"the pod that reads the claim does not run after {waited:.0f} s: {_why(status) or 'no reason is told'}"
            )
        sleep(pause)
        waited, pause = waited + pause, min(2 * pause, 4.0)


def _why(status: Json) -> str:
    """What its conditions and its container say."""
    said = [each.get("message") for each in status.get("conditions") or [] if each["status"] == "False"]
    states = [
        (each.get("state") or {}).get("waiting") or {} for each in status.get("containerStatuses") or []
    ]
    said += [f"{each.get('reason', '')} {each.get('message', '')}".strip() for each in states]
    return "; ".join(each for each in [status.get("message"), *said] if each)
