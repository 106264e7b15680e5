"""The files that the callbacks have written: which the storage has, which come later, and which never. Pure.

A storage that takes no files would hold up the callbacks, and training with them. So callbacks are done once their
result is known: their worker sends the files later. If it is lost, so are these files, which is told; so it is where a
snapshot is all that is left. Of each file the newest epoch that wrote it is kept: an older one never replaces it, and
is not taken for it. Nor does another one of the same epoch, once it is stored: callbacks that ran twice count once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from shoal_trainer.ps.contents import Worker

NAMED = 3
"""Of the files that are missing, so many are named."""
UNKNOWN = -1
"""The epoch of a file of which none is known, as in a snapshot of an earlier version: any other is newer."""
NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class File:
    """A file that the callbacks of an epoch have written: the storage has it, unless it comes later or never.

    `worker`: who sends it later. `lost`: why it never comes; "": it went with its worker. With both, a snapshot says
    that it waits, and its worker has yet to say whether it still does. `copy`: the number of what is sent, as its
    worker has said. `stored`: that of its copy that the storage has.
    """

    epoch: int
    worker: Worker | None = None
    lost: str | None = None
    copy: int | None = None
    stored: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it is on its way to the storage."""
        return self.worker is not None and self.lost is None

    @property
    def has_come(self) -> bool:
        """Whether the storage has what its worker sends, which has yet to say so."""
        return self.copy is not None and self.copy == self.stored


NEVER = File(UNKNOWN, lost="")
"""What is known of a name that nobody has said."""


class CallbackFiles:
    """The newest file of each name."""

    def __init__(self, files: Mapping[str, File] = MappingProxyType({})) -> None:
        self._files = dict(files)
        self._missing: dict[str, Worker | str] | None = None
        """What `missing` has returned since the last change."""

    @property
    def missing(self) -> dict[str, Worker | str]:
        """The worker that sends a file later, or why it never comes; "": it went with its worker."""
        if self._missing is None:
            of = {name: file.worker if file.lost is None else file.lost for name, file in self._files.items()}
            self._missing = {name: who for name, who in of.items() if who is not None}
        return self._missing

    @property
    def sender(self) -> Worker | None:
        """The worker that sends files later, until it has sent them or is lost."""
        return next((who for who in self.missing.values() if not isinstance(who, str)), None)

    def are_of(self, worker: Worker) -> bool:
        """Whether this worker sends files later, or a snapshot says that it does."""
        return any(file.worker == worker for file in self._files.values())

    @property
    def left_out(self) -> dict[str, str]:
        """The missing files that never come although their worker is there, and why."""
        return {name: why for name, why in self.missing.items() if isinstance(why, str) and why}

    @property
    def lacking(self) -> str:
        """Which files the storage will lack, in words; "" if none is known."""
        said = [f"{name} is left out: {why}" for name, why in islice(self.left_out.items(), NAMED)]
        if lost := sorted(name for name, why in self.missing.items() if why == ""):
            more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
            names = ", ".join(lost[:NAMED])
            said.append(
                f"{names}{more} went with the worker that had written them, before the storage took them"
            )
        return "; ".join(said)

    def stored(self, name: str, epoch: int) -> None:
        """The storage has this file of the callbacks of an epoch."""
        self._change({name: File(epoch)})

    def arrived(self, worker: Worker, name: str, copy: int) -> None:
        """The storage has this copy of a file that waits, which is not lost with its worker if no newer one comes."""
        if (file := self._files.get(name, NEVER)).worker == worker:
            self._change({name: replace(file, stored=copy)})

    def sends_later(
        self,
        worker: Worker,
        waits: Mapping[str, int],
        given_up: Mapping[str, int],
        *,
        writes: int | None,
        alone: bool,
        told: Collection[str],
        copies: Mapping[str, int],
    ) -> bool:
        """This worker has yet to send files of these epochs, and no others. False if others follow it.

        What was to come from it, and it names no more, the storage has taken since, unless it has given it up. A newer
        file of another worker stays, whatever becomes of that one.

        `writes`: the epoch whose callbacks it runs now. `alone`: no other one runs callbacks. `told`: the files of
        which it has said the epoch itself, which an earlier version does not. `copies`: see `File`; of what it does not
        name, as when a worker joins, what it named last.
        """
        mine = {name: file for name, file in self._files.items() if file.worker == worker}
        self._change({n: File(f.epoch) for n, f in mine.items() if n not in waits and n not in given_up})
        newer = {n for n, e in waits.items() if e != writes and n not in mine and not self._gives_way(n, e)}
        # An earlier version drops all its copies with the first that is refused, and does not say so.
        follows = alone and self.sender in {None, worker} and newer <= set(told)
        lost = dict(given_up) if follows else {**given_up, **waits}
        self._change(
            {n: File(e, lost="") for n, e in lost.items() if n in mine or self._gives_way(n, e, lost=True)}
        )
        if follows:
            comes = {n: mine.get(n, NEVER) for n in waits if n not in newer}
            self._change(
                {n: File(waits[n], worker, None, copies.get(n, f.copy), f.stored) for n, f in comes.items()}
            )
        return follows

    def leave_out(self, names: Mapping[str, str], written: Mapping[str, int], newest: int) -> None:
        """These files never come, because the storage can never have them or they are lost, unless they do later.

        A worker says so again and again: what another one has written since counts. `written`: the epoch of each, at
        most `newest`; an earlier version does not say it.
        """
        told = dict[str, File]()
        for name, why in names.items():
            said = name in written
            epoch = min(newest, written[name]) if said else self.epoch(name)
            if self._gives_way(name, epoch if said else epoch + 1):  # unsaid, it may be newer
                told[name] = File(epoch, lost=why)
        self._change(told)

    def begins_anew(self, worker: Worker) -> None:
        """A new process of this worker knows of no files: what a snapshot says that it would send is lost."""
        told = {n: f for n, f in self._files.items() if f.worker == worker and f.lost is not None}
        self._change({n: replace(f, worker=None) for n, f in told.items()})

    def release(self, worker: Worker) -> list[str]:
        """This worker is gone; returns the files that it has yet to send, which are lost."""
        mine = {name: file for name, file in self._files.items() if file.worker == worker}
        lost = sorted(name for name, file in mine.items() if file.waits and not file.has_come)
        self._change({n: File(f.epoch, lost=None if f.has_come else "") for n, f in mine.items()})
        return lost

    def dump(self) -> dict[str, Any]:
        """As JSON.

        Files that wait are lost, for a version that knows no better, and unless their worker says otherwise.
        """
        return {
            "lost": sorted(self.missing.keys() - self.left_out.keys()),
            "leftOut": self.left_out,
            "waiting": {
                name: list(file.worker) for name, file in self._files.items() if file.worker is not None
            },
            "written": {name: file.epoch for name, file in self._files.items()},
        }

    def rewound(self, saved: Mapping[str, Any], newest: int) -> CallbackFiles:
        """What was saved, with what was said since, which is as true: of epochs up to `newest`, that may come again."""
        # A snapshot of an earlier version has none of these.
        written = {str(name): int(epoch) for name, epoch in saved.get("written", {}).items()}
        lost = {str(name): str(why) for name, why in saved.get("leftOut", {}).items()}
        lost = dict.fromkeys(map(str, saved.get("lost", ())), "") | lost
        waiting = {str(name): (int(who[0]), int(who[1])) for name, who in saved.get("waiting", {}).items()}
        since = {name: replace(file, epoch=min(file.epoch, newest)) for name, file in self._files.items()}
        then = {
            name: File(written.get(name, UNKNOWN), waiting.get(name), lost.get(name))
            for name in written.keys() | lost.keys()
        }
        return CallbackFiles(then | since)

    def epoch(self, name: str) -> int:
        """Of the callbacks that wrote the newest file of this name, as far as is known."""
        return self._files.get(name, NEVER).epoch

    def _gives_way(self, name: str, epoch: int, *, lost: bool = False) -> bool:
        """Whether what is known of this name gives way to another worker's file of this epoch.

        Not if it is on its way. In the same epoch what the storage has stays, as it is of the attempt that counted, and
        so does what is known of a file that never comes if the other is `lost` as well.
        """
        known = self._files.get(name, NEVER)
        stays = lost or known.lost is None
        return not known.waits and known.epoch + stays <= epoch

    def _change(self, files: Mapping[str, File]) -> None:
        self._files.update(files)
        self._missing = None
