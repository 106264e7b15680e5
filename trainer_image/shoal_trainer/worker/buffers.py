"""The two parameter buffers of a worker: a step reads one while the exchange thread receives into the other."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from shoal_trainer.ps.coding import coded
from shoal_trainer.worker.layout import Layout
from shoal_trainer.worker.vector import Vector


class Buffers:
    """`current` holds parameters to compute on, coded as the vector's steps take them; `spare` may be received into."""

    def __init__(self, layout: Layout, vector: Vector) -> None:
        self._vector = vector
        self._copy: Any = None
        self._arrays = [coded(layout.size, layout.trainable, vector.dtype) for _ in range(2)]
        self._tensors = [vector.alias(array) for array in self._arrays]
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
    def copy(self) -> Any:
        """`current` where steps compute: uploaded once."""
        if self._copy is None:
            self._copy = self._vector.upload(self.tensor)
        return self._copy

    @property
    def spare_tensor(self) -> Any:
        """`spare` as a tensor over the same memory."""
        return self._tensors[1 - self._index]

    def swap(self, copy: Any = None) -> None:
        """Make the received parameters current. `copy`: of them, if they were uploaded when they came."""
        self._index, self._copy = 1 - self._index, copy
