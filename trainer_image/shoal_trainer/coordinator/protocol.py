"""What workers and coordinator say to each other: JSON over TLS, one request for each message.

`POST /v1/<name>` with a message, answered by a message. Bulk never goes this way: gradients have the data plane, and
what tasks produce is streamed by `PUT /v1/files/…`. Every request carries the worker's slot and incarnation; an older
incarnation than the newest that was heard is answered with 409 (`Fenced`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal_trainer.contract import Message
from shoal_trainer.coordinator.leased import Lease as Leased
from shoal_trainer.ps.contents import Span
from shoal_trainer.wire.messages import MAX_JOURNAL, Entry

PURPOSE = "control"
"""What the bearer token of these requests is derived for (`Credentials.token`)."""
MAX_BODY = 4 << 20
MAX_LIST = 28 << 20
"""Of the names of the data's files, which go with a hello only."""
MAX_JOIN = MAX_LIST + MAX_BODY
MAX_FILE = 64 << 30
MAX_TEXT = 4096
MAX_SPANS = 1 << 20


class DataSpec(Message):
    """What the data are: `size` samples that any range can be read of, or files of unknown length."""

    size: int | None = Field(default=None, ge=1)
    files: tuple[str, ...] = ()
    validation: bool = False
    callbacks: bool = False

    @property
    def words(self) -> str:
        """How much it is: "100 samples", "3 files"."""
        return f"{len(self.files):,} files" if self.size is None else f"{self.size:,} samples"

    def beside(self, other: DataSpec) -> str:
        """How the files that a worker lists differ from these, the job's."""
        mine, theirs = set(self.files), set(other.files)
        return (
            f"a worker lists {len(theirs):,} files of training data: {len(theirs - mine):,} of them are new, and "
            f"{len(mine - theirs):,} of the job's {len(mine):,} are missing; the job keeps to its own list"
        )

    def told(self, lease: Leased) -> Lease:
        """A lease of these data as a worker is told of it."""
        segment = lease.segment
        return Lease(
            term=lease.token[0],
            counter=lease.token[1],
            epoch=segment.epoch,
            start=segment.start,
            stop=segment.stop,
            file=self.files[segment.file] if segment.file >= 0 else None,
            number=segment.file,
        )


class Lease(Message):
    """A leased range: positions [start, stop) of pass `epoch`, or of `file` (`stop` None: to its end).

    `number`: the file's, in the order of the job's files. (`term`, `counter`) is the fencing token: of which
    process of parameter server 0, and a number.
    """

    term: int
    counter: int
    epoch: int
    start: int
    stop: int | None = None
    file: str | None = None
    number: int = -1

    @property
    def token(self) -> tuple[int, int]:
        """The fencing token."""
        return self.term, self.counter


class Caller(Message):
    """Who speaks."""

    slot: int = Field(ge=0)
    incarnation: int = Field(ge=0)


class Join(Caller):
    """A worker says hello; after the loss of parameter server 0, with what it holds from its last answered push on."""

    data: DataSpec
    batch_size: int = Field(ge=1)
    node: str = Field(default="", max_length=256)
    pool: str = Field(default="", max_length=256)
    held: tuple[Lease, ...] = Field(default=(), max_length=4096)
    generation: int = Field(default=0, ge=0)
    """Of what it holds."""
    wasted_steps: int = Field(default=0, ge=0)
    """All its steps so far that are in no surviving parameters, though they were answered or given up."""
    wasted_told: int = Field(default=0, ge=0)
    """Those of them that it told before, in a request that was answered."""


class Renamed(Message):
    """A lease that goes on under another token."""

    old: tuple[int, int]
    new: tuple[int, int]


class Joined(Message):
    """Which of the held leases go on, and under which tokens; the others are somebody else's now."""

    renamed: tuple[Renamed, ...] = ()


class Next(Caller):
    """Asks for something to do; data are given to those who have the parameters of this generation.

    Who got no answer asks with the same `number` again, and is given the same: else what the lost answer gave would
    be in the hands of somebody who does not know of it.
    """

    number: int = Field(ge=1)
    generation: int = Field(default=0, ge=0)


class Given(Message):
    """Something to do: a lease of data, a task, nothing for `seconds`, or the end."""

    kind: Literal["data", "task", "idle", "finished"]
    lease: Lease | None = None
    task: Literal["evaluate", "callbacks", "export"] | None = None
    token: tuple[int, int] = (0, 0)
    epoch: int = 0
    history: tuple[dict[str, float], ...] = ()
    seconds: float = 0.0
    message: str = ""


class Heartbeat(Caller):
    """A worker is alive, whatever it does."""

    message: str = Field(default="", max_length=MAX_TEXT)


class Alive(Message):
    """The answer to a heartbeat: whether the job has finished."""

    finished: bool = False


class FileEnded(Caller):
    """A leased file has `length` samples."""

    token: tuple[int, int]
    length: int = Field(ge=0)


class TaskDone(Caller):
    """A task is done; its files were uploaded before. A metric that is not finite is None.

    `message`: what the job's last word is to say of an export, where it lacks something.
    """

    token: tuple[int, int]
    metrics: dict[str, float | None] = Field(default_factory=dict, max_length=1024)
    files: tuple[str, ...] = Field(default=(), max_length=65536)
    stop: bool = False
    message: str = Field(default="", max_length=MAX_TEXT)


class Leave(Caller):
    """A worker goes, on purpose."""


class Failed(Caller):
    """A worker ends because the user's code is at fault."""

    message: str = Field(max_length=MAX_TEXT)


class Diverged(Caller):
    """A batch gave a loss or a gradient that is not finite, at parameters of this generation: the job is to go back."""

    generation: int = Field(ge=0)
    epoch: int = Field(ge=0)
    file: int = Field(default=-1, ge=-1)
    start: int = Field(ge=0)
    stop: int = Field(ge=1)
    what: str = Field(max_length=MAX_TEXT)


class ShardReady(Message):
    """Another parameter server came back."""

    index: int = Field(ge=1)
    epoch: int = Field(ge=0)


class SnapshotShard(Message):
    """Parameter server 0 asks another one to write its part of snapshot `number`; answered by a `ShardFile`.

    `published`: the newest one of this `epoch` that can be seen by everyone; 0 for none.
    """

    number: int = Field(ge=1)
    epoch: int = Field(ge=0)
    published: int = Field(default=0, ge=0)
    generation: int = Field(default=0, ge=0)


class AskPushes(Message):
    """Parameter server 0 asks another one which pushes are in it, and what those of `of` cover; see `Pushes`."""

    of: tuple[Span, ...] = Field(default=(), max_length=MAX_JOURNAL)


class Pushes(Message):
    """The pushes that are in a shard, and parts of its journal."""

    held: tuple[Span, ...] = Field(default=(), max_length=MAX_SPANS)
    entries: tuple[Entry, ...] = Field(default=(), max_length=MAX_JOURNAL)


class RollBackShard(Message):
    """Parameter server 0 tells another one to go back to the snapshot with which this generation begins."""

    generation: int = Field(ge=1)


class Done(Message):
    """The answer where there is nothing to tell."""


REQUESTS: dict[str, type[Message]] = {
    "join": Join,
    "next": Next,
    "heartbeat": Heartbeat,
    "file-ended": FileEnded,
    "task-done": TaskDone,
    "leave": Leave,
    "failed": Failed,
    "shard-ready": ShardReady,
    "snapshot": SnapshotShard,
    "pushes": AskPushes,
    "diverged": Diverged,
    "roll-back": RollBackShard,
}
