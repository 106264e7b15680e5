"""The exported model: its files from the object store, or how to copy them from a volume of the cluster."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.client.store import reached
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.client.job import Job


def download(uri: str, target: Path, job: Job) -> Path:
    """Copy the files of a model into a folder, which is created; returns it.

    Raises:
        UsageError: the model is in a volume, or a package for the store is missing.
        Unavailable: the store does not answer, or does not let this user in.
    """
    import fsspec

    if urlsplit(uri).scheme in {"", "file"} and not Path(urlsplit(uri).path).is_dir():
        raise UsageError(in_volume(uri, job))
    with reached(uri, "read"):
        filesystem, path = fsspec.core.url_to_fs(uri)
        if not filesystem.find(path):
            raise FileNotFoundError("there is no file")
        target.mkdir(parents=True, exist_ok=True)
        filesystem.get(path.rstrip("/") + "/", str(target) + "/", recursive=True)
    return target


def load(uri: str, job: Job) -> Any:
    """The model as Keras loads it.

    Raises:
        UsageError: Keras is not installed here, or the job could not save a whole model.
    """
    try:
        import keras
    except ImportError as error:
        raise UsageError(
            "loading a model needs keras: install it, or give a folder to download the files to"
        ) from error
    folder = download(uri, Path(tempfile.mkdtemp(prefix=f"shoal-{job.name}-")), job)
    file = folder / "model.keras"
    if not file.exists():
        there = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise UsageError(f"the job saved no model.keras, since Keras could not; {folder} has {there}")
    return keras.models.load_model(file)


def in_volume(uri: str, job: Job) -> str:
    """How to get at a model in a volume claim."""
    storage = job.seen.spec.storage
    if storage.volume_claim is None:
        return (
            f"the model was in {uri} of a pod without lasting storage (storage: ephemeral), and went with it. "
            f"Use a volume claim "
            "or a bucket."
        )
    claim, folder = storage.volume_claim.name, uri.partition("/storage/")[2]
    image = _image(job)
    container = {
        "name": "c",
        "image": image,
        "command": ["sleep", "600"],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        **_pull_secrets(job),
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    namespace = f"-n {job.namespace}"
    return (
        f"the model is in the volume claim {claim}, which this machine does not see. Copy it:\n"
        f"  kubectl {namespace} run copy --image={image} --overrides='{json.dumps({'spec': spec})}'\n"
        f"  kubectl {namespace} wait --for=condition=Ready pod/copy\n"
        f"  kubectl {namespace} cp copy:/v/{folder} ./model && kubectl {namespace} delete pod copy"
    )


def _template(job: Job) -> dict[str, Any]:
    return (job.seen.spec.workers.template or {}).get("spec") or {}


def _pull_secrets(job: Job) -> dict[str, Any]:
    """Those of the job's workers, whose image it is."""
    return {key: value for key, value in _template(job).items() if key == "imagePullSecrets"}


def _image(job: Job) -> str:
    """That of the job's workers: it is on the nodes."""
    containers = _template(job).get("containers") or ()
    named = next((each.get("image") for each in containers if each["name"] == "worker"), None)
    return named or (job.seen.status.images.worker if job.seen.status.images else "busybox")
