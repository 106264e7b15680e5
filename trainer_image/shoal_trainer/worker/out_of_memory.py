"""Out of memory: what TensorFlow raises, and what to do. Another worker may have more memory, so the job goes on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from shoal_trainer.data.read_errors import chain_of
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import OutOfMemory, TrainerError

_WORDS = re.compile(
    r"RESOURCE_EXHAUSTED|Dst tensor is not initialized|ALLOC_FAILED|out of memory", re.IGNORECASE
)
"""A copy to a full GPU, and cuDNN and cuBLAS on one, raise an `InternalError` with these words."""


@contextlib.contextmanager
def memory_is_enough() -> Iterator[None]:
    """Raise `OutOfMemory` if the block needs more memory than there is."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:  # Keras puts another error around that of a layer
        short = next(filter(_is_short, chain_of(error)), None)
        if short is None:
            raise
        raise OutOfMemory(
            f"The worker ran out of memory: {where(short)}. Use a smaller batch size (--batch-size, or "
            "spec.training.batchSize; spec.training.batchSizes sets it per accelerator), or pools whose accelerators "
            "have more memory."
        ) from error


def _is_short(error: BaseException) -> bool:
    if isinstance(error, tf.errors.InternalError):
        return _WORDS.search(str(error)) is not None
    return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)
