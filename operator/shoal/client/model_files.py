"""The exported model: its files from the object store, or from a volume of the cluster."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.client.claim import fetch
from shoal.client.store import reached
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.client.api import Api
    from shoal.client.job import Job


def download(uri: str, target: Path, job: Job, api: Api) -> Path:
    """Copy the files of a model into a folder, which is created; returns it.

    Raises:
        UsageError: the model went with its pod, or a package for the store is missing.
        Unavailable: the store does not answer or does not let this user in, or the volume cannot be read.
    """
    import fsspec

    if urlsplit(uri).scheme in {"", "file"} and not Path(urlsplit(uri).path).is_dir():
        fetch(uri, target, job, api)
        return target
    with reached(uri, "read"):
        filesystem, path = fsspec.core.url_to_fs(uri)
        if not filesystem.find(path):
            raise FileNotFoundError("there is no file")
        target.mkdir(parents=True, exist_ok=True)
        filesystem.get(path.rstrip("/") + "/", str(target) + "/", recursive=True)
    return target


def load(uri: str, job: Job, api: Api) -> Any:
    """The model as Keras loads it. Its files are deleted when it is loaded.

    Raises:
        UsageError: Keras is not installed here, could not save a whole model, or does not know a class of it here.
    """
    try:
        import keras
    except ImportError as error:
        raise UsageError(
            "loading a model needs keras: install it, or give a folder to download the files to"
        ) from error
    folder = download(uri, Path(tempfile.mkdtemp(prefix=f"shoal-{job.name}-")), job, api)
    file = folder / "model.keras"
    there = ", ".join(sorted(path.name for path in folder.iterdir()))
    if not file.exists():
        raise UsageError(f"the job saved no model.keras, since Keras could not; {folder} has {there}")
    try:
        model = keras.models.load_model(file)
    except Exception as error:  # whatever a class of the user's raises
        why = str(error).partition(" Full object config")[0]
        raise UsageError(
            f"Keras cannot load model.keras here: {type(error).__name__}: {why}\n"
            "Where a class of yours is missing, import the module that has it, and ask again; or load what you need "
            f"yourself: {folder} has {there}"
        ) from error
    shutil.rmtree(folder)
    return model
