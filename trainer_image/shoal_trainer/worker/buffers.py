"""The two parameter buffers of a worker: a step reads one while the exchange thread receives into the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from shoal_trainer.ps.coding import coded


class Buffers:
    """`current` holds parameters to compute on, coded in `dtype` (`ps/coding`); `spare` may be received into.

    `alias` makes a tensor of an array, and `upload` a copy of it where steps compute.
    """

    def __init__(
        self,
        size: int,
        trainable: int,
        dtype: npt.DTypeLike,
        alias: Callable[[npt.NDArray[Any]], Any],
        upload: Callable[[Any], Any] = lambda tensor: tensor,
    ) -> None:
        self._upload = upload
        self._copy: Any = None
        self._arrays = [coded(size, trainable, dtype) for _ in range(2)]
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
    def copy(self) -> Any:
        """`current` where steps compute: uploaded once."""
        if self._copy is None:
            self._copy = self._upload(self.tensor)
        return self._copy

    @property
    def spare_tensor(self) -> Any:
        """`spare` as a tensor over the same memory."""
        return self._tensors[1 - self._index]

    def swap(self, copy: Any = None) -> None:
        """Make the received parameters current. `copy`: of them, if they were uploaded when they came."""
        self._index, self._copy = 1 - self._index, copy
