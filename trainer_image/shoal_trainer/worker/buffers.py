"""The two parameter buffers of a worker: a step reads one while the exchange thread receives into the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from shoal_trainer.ps.aligned import aligned


class Buffers:
    """`current` holds parameters to compute on (`FlatModel.dtype`, shape (size,)); `spare` may be received into."""

    def __init__(self, size: int, dtype: npt.DTypeLike, alias: Callable[[npt.NDArray[Any]], Any]) -> None:
        self._arrays = [aligned(size, dtype) for _ in range(2)]
        self._tensors = [alias(array) for array in self._arrays]
        self._index = 0

    @property
    def current(self) -> npt.NDArray[Any]:
        """The parameters to compute on."""
        return self._arrays[self._index]

    @property
    def spare(self) -> npt.NDArray[Any]:
        """The buffer to receive into."""
        return self._arrays[1 - self._index]

    @property
    def tensor(self) -> Any:
        """`current` as a tensor over the same memory."""
        return self._tensors[self._index]

    @property
    def spare_tensor(self) -> Any:
        """`spare` as a tensor over the same memory."""
        return self._tensors[1 - self._index]

    def swap(self) -> None:
        """Make the received parameters current."""
        self._index = 1 - self._index
