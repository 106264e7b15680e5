"""Hands the job's code to workers, where it lies in the storage: they have no credentials for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO

from shoal_trainer.contract import RuntimeConfig, code_name
from shoal_trainer.errors import UserError
from shoal_trainer.snapshot.storage import open_storage


@contextlib.contextmanager
def opened(config: RuntimeConfig) -> Iterator[tuple[int, IO[bytes]]]:
    """The size and the content of the archive.

    Raises:
        UserError: there is none.
        Unreachable: the storage does not answer.
    """
    storage, name = open_storage(config.storage_uri), code_name(config.job.namespace, config.code_digest)
    try:
        size = storage.size(name)
    except FileNotFoundError:
        raise UserError(
            f"The job's code, {name}, is not in its storage {config.storage_uri}. Submit the job again: shoal submit "
            "puts it there."
        ) from None
    with storage.open(name) as content:
        yield size, content
