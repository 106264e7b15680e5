"""`Source`: what the trainer needs of training data in any form, and `Part`, what a worker reads at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal_trainer.data.batch import Batch
    from shoal_trainer.data.downloads import Download


UNPLACED = "and not each of them exactly once"
"""In the remark of data whose ranges are not the same samples for every worker."""


class Part(NamedTuple):
    """The positions [start, stop) in the order of an epoch, or of a file (`stop` None: to its end).

    `epoch` None: in the data's own order.
    """

    start: int
    stop: int | None
    epoch: int | None = 0
    file: str | None = None


@dataclass(frozen=True)
class Extent:
    """`size` samples, or `files` of unknown length (`size` None).

    Two workers find the same sample at a position if `order` and the seed are the same; "": no position is a certain
    sample. `seed`: that of the data; None: the job's.
    """

    size: int | None
    files: tuple[str, ...] = ()
    order: str = ""
    seed: int | None = None

    def parts(self) -> Iterator[Part]:
        """All samples once, in their own order."""
        if self.size is not None:
            yield Part(0, self.size, None)
        for name in self.files:
            yield Part(0, None, None, name)


class Probes(NamedTuple):
    """A number of each of some samples. Another split, or another order, has other numbers."""

    numbers: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    """Of each, the norm of what is added in it; none: of arrays, which nothing computes when they are read."""


class Epochs(NamedTuple):
    """Training data as Keras' `fit` reads them, one epoch after another. `batches`: of each; None: reading tells."""

    read: Callable[[], Iterator[Batch]]
    batches: int | None


class Source(ABC):
    """Training or validation data."""

    lengths: Sequence[int] = ()
    """To which samples are padded; none: all have the same shape, or the data pad them."""
    remark: str = ""
    """What a user should know of how these data are read; logged when a worker starts."""

    @property
    def batch_size(self) -> int | None:
        """The rows of the user's own batches, which are cut and joined to those of the job; None: there are none.

        May read some of the data.
        """
        return None

    @property
    def block(self) -> int:
        """So many neighbouring samples are read together, whoever needs one of them; 0: each is read by itself.

        May read some of the data.
        """
        return 0

    def check_countable(self) -> None:  # noqa: B027 - of most data it is known
        """Raise `UserError` if nobody can say how many samples make an epoch of training. Reads none."""

    @abstractmethod
    def describe(self) -> Extent:
        """How much data there is. Raises `UserError` if there is none, `Unreachable` if the storage does not answer."""

    def probes(self) -> Probes:
        """Of some samples, the same wherever the same samples are read; none: unknown. Reads them.

        Raises as `read` does.
        """
        return Probes()

    @abstractmethod
    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:
        """Read a part in batches of `batch_size` rows.

        Args:
            part: What to read. Its form must match the data: a file, or a range with a stop.
            batch_size: Rows of each batch; the last batch is padded (see `Batch`).
            download: The file of the part if it was downloaded before. It is deleted afterwards.

        Raises:
            UserError: The data or the data function are wrong.
            Unreachable: The storage does not answer; retry later.
        """

    @abstractmethod
    def example(self, batch_size: int) -> Batch:
        """Read one batch to build and trace a model with."""

    def epochs(self, batch_size: int) -> Epochs | None:  # noqa: ARG002
        """The data for `fit`, if they have an order of their own; None: ranges or files, which each epoch orders anew.

        Call it of the data that were `placed`.
        """
        return None

    def whole(self, batch_size: int) -> Iterator[Batch]:
        """All data once, in their own order."""
        for part in self.describe().parts():
            yield from self.read(part, batch_size)

    def placed(self, seed: int, worker: tuple[int, ...] = (0, 0)) -> Source:  # noqa: ARG002
        """These data for one worker (slot, incarnation), in the order of the job's `seed`.

        In a run that continues another one, a third number in `worker` is that of the run.
        """
        return self
