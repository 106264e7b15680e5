"""Fetches the job's code, where it is too large for a ConfigMap, from the coordinator. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from shoal_trainer.contract import CODE_ARCHIVE, RuntimeConfig
from shoal_trainer.coordinator.control_client import ControlClient
from shoal_trainer.coordinator.protocol import CODE
from shoal_trainer.errors import UserError
from shoal_trainer.security import Credentials


def fetch(config: RuntimeConfig, credentials: Credentials, folder: Path) -> Path:
    """The archive, in `folder`.

    Raises:
        UserError: there is none, or it has another content than the job was submitted with.
        Unreachable: the coordinator, or its storage, does not answer.
    """
    path = folder / CODE_ARCHIVE
    with contextlib.closing(ControlClient(config.parameter_servers[0], credentials)) as coordinator:
        coordinator.get(CODE, path)
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != config.code_digest:
        raise UserError(
            f"The job's code in the storage has the digest {digest}, and not {config.code_digest}: it was changed. "
            "Submit the job again."
        )
    return path
