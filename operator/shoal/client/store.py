"""The job's storage from a laptop or a notebook, with the user's credentials: code goes there, models come from it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from shoal.errors import Unavailable, UsageError
from shoal_trainer.contract import code_name

EXTRAS = ("s3", "gs")
"""The schemes for which there is an extra of this name."""


@contextlib.contextmanager
def reached(uri: str, doing: str) -> Iterator[None]:
    """Errors of a store as ours: a package that is missing is a UsageError, all others are Unavailable."""
    try:
        yield
    except ImportError as error:
        extra = (
            f": pip install '.[{scheme}]' in a checkout"
            if (scheme := uri.partition("://")[0]) in EXTRAS
            else ""
        )
        raise UsageError(f"the storage {uri} needs another package ({error}){extra}") from error
    except Exception as error:  # each store raises its own classes
        raise Unavailable(f"cannot {doing} {uri}: {type(error).__name__}: {error}") from error


def put(uri: str, namespace: str, archive: bytes) -> None:
    """Write an archive of code, under its digest; once, however many jobs have it.

    Raises:
        UsageError: a package for the store is missing.
        Unavailable: the store does not answer, or does not let this user in.
    """
    import fsspec

    target = f"{uri.rstrip('/')}/{code_name(namespace, hashlib.sha256(archive).hexdigest())}"
    with reached(target, "write the code to"):
        filesystem, path = fsspec.core.url_to_fs(target)
        if not filesystem.exists(path) or filesystem.size(path) != len(archive):
            filesystem.pipe_file(path, archive)
