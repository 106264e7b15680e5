"""The exported model: its files from the object store, or how to copy them from a volume of the cluster."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.errors import Unavailable, UsageError

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
    target.mkdir(parents=True, exist_ok=True)
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        filesystem.get(path.rstrip("/") + "/", str(target) + "/", recursive=True)
    except ImportError as error:
        raise UsageError(f"reading {uri} needs another package: {error}") from error
    except Exception as error:  # each store raises its own classes
        raise Unavailable(f"cannot read {uri}: {type(error).__name__}: {error}") from error
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
    overrides = (
        '{"spec":{"volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"'
        + claim
        + '"}}],"containers":[{"name":"c",'
        '"image":"busybox","command":["sleep","600"],"volumeMounts":[{"name":"v","mountPath":"/v"}]}]}}'
    )
    namespace = f"-n {job.namespace}"
    return (
        f"the model is in the volume claim {claim}, which this machine does not see. Copy it:\n"
        f"  kubectl {namespace} run copy --image=busybox --overrides='{overrides}'\n"
        f"  kubectl {namespace} wait --for=condition=Ready pod/copy\n"
        f"  kubectl {namespace} cp copy:/v/{folder} ./model && kubectl {namespace} delete pod copy"
    )
