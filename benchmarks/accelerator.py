"""A simulated accelerator and its bus, in the process of a worker: what crosses the bus, and computes, takes its time.

The worker is the real one, with its threads; each transfer and each step waits on a clock, outside of the GIL and
without the processor. The bus is full duplex, like PCIe: each way takes one transfer after the other. The numbers are
not computed: an update is zeros that lie on the host already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PCIE_4_X16 = 25e9
"""Bytes/s each way that copies reach of the 31.5e9 of the standard, with pinned memory."""
MEMORY = 1e12
"""Bytes/s of the accelerator's memory, of which an addition of updates and what the next step computes on are made."""


class Queue:
    """What is done one after the other, such as the copies of one way of the bus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = 0.0

    def add(self, seconds: float) -> float:
        """The time at which work of so many seconds that is added now is done."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + seconds
            return self._free

    def run(self, seconds: float) -> None:
        """Wait until work of so many seconds is done."""
        time.sleep(max(0.0, self.add(seconds) - time.monotonic()))


class Resident:
    """Parameters on the accelerator."""


class Mean:
    """As `DeviceMean`: sums in fp32 of updates on the accelerator."""

    clips = False

    def __init__(self, device: Queue, update: Callable[[], Any]) -> None:
        self._device, self._update = device, update

    def add(self, update: Any, samples: int) -> None:
        """Add an update of so many samples."""
        del samples
        self._device.add(10 * update.size / MEMORY)

    def result(self, samples: int) -> Any:
        """The mean over so many samples."""
        del samples
        update = self._update()
        self._device.run(6 * update.size / MEMORY)
        return update

    def clear(self) -> None:
        """Drop what was added."""


def install(seconds: float, bus: float = PCIE_4_X16) -> None:
    """Let the models of this process compute on such an accelerator, in so many seconds per step."""
    import tensorflow as tf

    from shoal_trainer.ps import coding
    from shoal_trainer.worker import flat_model, on_device
    from shoal_trainer.worker.flat_model import FlatModel
    from shoal_trainer.worker.inputs import Inputs
    from shoal_trainer.worker.on_device import DeviceVector, OnDevice, cut

    module: Any = flat_model
    model: Any = FlatModel  # whose methods are replaced
    vector: Any = DeviceVector
    batches: Any = Inputs
    device, into, back = Queue(), Queue(), Queue()
    resident, placed = Resident(), Inputs._place

    def place(self: Any, batch: Any) -> Any:
        tensors, shapes = placed(self, batch)
        into.run(sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors) / bus)
        return tensors, shapes

    def upload(self: Any, parameters: Any) -> Any:
        if parameters is not resident:
            layout, dtype = self._layout, np.dtype(self.dtype)
            into.run(coding.place(layout.size, layout.trainable, dtype) * dtype.itemsize / bus)
        return resident

    def read(tensor: Any) -> Any:
        array = np.asarray(memoryview(tensor))
        back.run(array.nbytes / bus)
        return array

    updates: dict[int, list[Any]] = {}

    def update_of(self: Any) -> list[Any]:
        if id(self) not in updates:
            sizes = cut(self._width(self._wire_dtype), self.layout.trainable)
            updates[id(self)] = [tf.zeros(size, self._wire_dtype) for size in sizes]
        return updates[id(self)]

    def call(self: Any, parameters: Any, batch: Any, upcoming: Any) -> Any:
        del parameters
        self._inputs.place(batch, upcoming)
        device.run(seconds)
        numbers = np.ones(1 + 2 * len(self.found.metrics) + 3, np.float32)
        return update_of(self), numbers

    def included(current: Any, update: Any, lead: Any) -> Any:
        del lead
        device.add(8 * update.size / MEMORY)
        return current

    module.device_name = lambda: "a simulated accelerator"
    on_device._read = read
    batches._place, vector.upload, model._call = place, upload, call
    model.inclusion = lambda _: included
    model.mean = lambda self: Mean(device, lambda: OnDevice(update_of(self), 1.0, self.vector._reader))
