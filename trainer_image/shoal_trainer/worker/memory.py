"""Out of memory: what TensorFlow raises, and what to do. Another worker may have more memory, so the job goes on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from shoal_trainer.data.user_code import where
from shoal_trainer.errors import OutOfMemory

_WORDS = re.compile(
    r"RESOURCE_EXHAUSTED|Dst tensor is not initialized|ALLOC_FAILED|out of memory", re.IGNORECASE
)
"""A copy to a full GPU, and cuDNN and cuBLAS on one, raise an `InternalError` with these words."""


@contextlib.contextmanager
def memory_is_enough() -> Iterator[None]:
    """Raise `OutOfMemory` if the block needs more memory than there is."""
    try:
        yield
    except (tf.errors.ResourceExhaustedError, tf.errors.InternalError) as error:
        if isinstance(error, tf.errors.InternalError) and not _WORDS.search(str(error)):
            raise
        raise OutOfMemory(
            f"The worker ran out of memory: {where(error)}. Use a smaller batch size (--batch-size, or "
            "spec.training.batchSize; spec.training.batchSizes sets it per accelerator), or pools whose accelerators "
            "have more memory."
        ) from error
