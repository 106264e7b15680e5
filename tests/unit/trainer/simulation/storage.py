"""An in-memory storage that can become unreachable, and an executor that runs calls in the caller's thread."""

from __future__ import annotations

import contextlib
import io
import random
from concurrent.futures import Executor, Future

from shoal_trainer.errors import Unreachable
from tests.unit.trainer.simulation.invariants import check_published


class MemoryStorage:
    """A storage in memory. While `down` is set, every call raises Unreachable."""

    uri = "memory://run"
    calm = True
    """Whether it does none of its faults."""

    def __init__(self):
        self.files = {}
        self.down = False
        self.created = []
        """The names of all files that were created, in order."""

    def _check(self):
        if self.down:
            raise Unreachable("the storage is down")

    def write(self, name, chunks, confirm=lambda: None):
        self._check()
        content = b"".join(bytes(chunk) for chunk in chunks)
        confirm()
        self.files[name] = content

    def create(self, name, data):
        self._check()
        check_published(self, name, data)
        created = self.files.setdefault(name, data) is data
        if created:
            self.created.append((name, data))
        return created

    @contextlib.contextmanager
    def open(self, name):
        yield io.BytesIO(self.read(name))

    def read(self, name):
        self._check()
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def size(self, name):
        return len(self.read(name))

    def names(self, folder):
        self._check()
        return sorted(
            {name[len(folder) + 1 :].split("/")[0] for name in self.files if name.startswith(folder + "/")}
        )

    def remove(self, name):
        self._check()
        self.files = {n: d for n, d in self.files.items() if n != name and not n.startswith(name + "/")}


class Crash(BaseException):
    """The process died inside a call of the storage."""


class MeanStorage(MemoryStorage):
    """A storage whose calls take effect and answer with an error, or end the process that makes them."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)
        self.calm = True
        """Whether every answer arrives."""
        self.dies_after = None
        """After how many steps of writing calls the process dies; None: not at all."""

    def _step(self):
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                self.dies_after = None
                raise Crash

    def _answer(self, name):
        self._step()
        if not self.calm and not name.startswith("model/") and self.random.random() < 0.15:
            raise Unreachable("the answer is lost")

    def write(self, name, chunks, confirm=lambda: None):
        self._step()
        super().write(name, chunks, confirm)
        self._answer(name)

    def create(self, name, data):
        self._step()
        created = super().create(name, data)
        self._answer(name)
        return created

    def remove(self, name):
        self._step()
        super().remove(name)
        self._answer(name)


class WornStorage(MemoryStorage):
    """A storage that is full now and then, tears files or flips a bit of them, and lists late what was published."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)

    def _happens(self):
        return not self.calm and self.random.random() < 0.1

    def write(self, name, chunks, confirm=lambda: None):
        if self._happens():
            raise Unreachable("no space is left on the device")
        super().write(name, chunks, confirm)
        if name.startswith("snapshots/") and self._happens():
            content, at = self.files[name], self.random.randrange(len(self.files[name]))
            torn = self.random.random() < 0.5
            self.files[name] = content[:at] + (b"" if torn else bytes([content[at] ^ 4]) + content[at + 1 :])

    def create(self, name, data):
        if self._happens():
            raise Unreachable("no space is left on the device")
        return super().create(name, data)

    def names(self, folder):
        names = super().names(folder)
        manifests = [name for name in names if name.startswith("manifest-")]
        late = manifests[-1:] if manifests and self._happens() else []
        return [name for name in names if name not in late]


class AtOnce(Executor):
    """Runs each call immediately, in the caller's thread."""

    def __init__(self, workers):
        del workers

    def submit(self, call, *arguments):
        future = Future()
        try:
            future.set_result(call(*arguments))
        except Unreachable as error:
            future.set_exception(error)
        return future
