"""The coordinator with its helpers on PS 0, and the handlers of the control port.

Each helper has a thread: the snapshotter saves, the reconciler counts pushes that some shards lack, and each of the
other shards is told what holds for all (`other_shard`). The output of tasks goes to the storage through `Artefacts`.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import IO

from shoal_trainer.contract import RuntimeConfig, StatusReport
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.artefacts import Artefacts, MadeBy
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.http import Handler
from shoal_trainer.coordinator.other_shard import OtherShard
from shoal_trainer.coordinator.protocol import LATE, Diverged, TaskDone
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.rollback import Rollback
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.errors import Fenced, Overtaken, Unreachable
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.claims import Claim
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import Storage
from shoal_trainer.snapshot.store import SnapshotStore

log = logging.getLogger(__name__)

STALLED_SECONDS = 30.0
"""A shard whose part of a snapshot has not grown for so long is named as the reason why there is no snapshot."""


class CoordinatorService:
    """The coordinator of one job and its helpers. Calls `fenced` when a newer incarnation has claimed the storage."""

    def __init__(
        self,
        config: RuntimeConfig,
        shard: ShardStore,
        storage: Storage,
        store: SnapshotStore,
        claim: Claim,
        credentials: Credentials,
        *,
        fenced: Callable[[Fenced], None],
    ) -> None:
        controls = [ShardControl(address, credentials) for address in config.parameter_servers[1:]]
        self._shard, self._store = shard, store
        self._claim = claim
        self._fenced = fenced
        self.coordinator = Coordinator(config.job, config.stop_after, config.batch_size, shard)
        made_by = MadeBy(entrypoint=config.entrypoint, args=config.args, batch_size=config.batch_size)
        self.artefacts = Artefacts(storage, config.job.run_id, made_by)
        self._others = [
            OtherShard(
                shard,
                index,
                control,
                self._shard_restarted,
                self._overtaken,
            )
            for index, control in enumerate(controls, 1)
        ]
        self._reconciler = Reconciler(shard, controls, self.coordinator)
        self.coordinator.course.compare_soon = self._reconciler.wake
        self.snapshotter = Snapshotter(
            shard,
            controls,
            self.coordinator,
            self._reconciler,
            store,
            config.snapshot,
            fenced=fenced,
        )
        self.coordinator.course.snapshot_soon = self.snapshotter.schedule
        self._rollback = Rollback(
            shard, self.coordinator, store, self.snapshotter, fenced=fenced, done=self._tell_others
        )
        self.coordinator.departures.refused = self._tell_others

    def _overtaken(self, generation: int) -> None:
        self._rollback.overtaken(generation)

    def restored(self, manifest: Manifest, version: int) -> None:
        """The shard begins with this snapshot of the run, and this version. Call it before `start`."""
        self.coordinator.load(manifest.ledger)
        if manifest.ledger:  # else the next one is the first that can be rolled back to
            self.snapshotter.set_latest(manifest, version)

    def start(self, *, follows: bool) -> None:
        """Start the helpers. `follows`: an earlier process served this job, so the shards may differ."""
        self.snapshotter.start()
        self._reconciler.start()
        if follows:
            self._reconciler.wake()
        for other in self._others:
            other.start()

    def stop(self) -> None:
        """Tell the other shards nothing more."""
        for other in self._others:
            other.stop()

    # --- requests -------------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each request of the control port."""
        return {
            "join": self.coordinator.join,
            "next": self.coordinator.next_work,
            "heartbeat": self.coordinator.heartbeat,
            "file-ended": self.coordinator.file_ended,
            "task-done": self.task_done,
            "unsent-files": self.coordinator.unsent_files,
            "leave": self.coordinator.leave,
            "failed": self.coordinator.failed,
            "diverged": self._diverged,
        }

    def task_done(self, request: TaskDone) -> None:
        """Accept a result. The export is done only when its model is in the storage, which may be unreachable now."""
        coordinator = self.coordinator
        task = coordinator.held_task(request.worker, request.token)
        if task is None:  # reassigned, or done and its answer lost
            return
        self.artefacts.check(request.token, request.files)
        if task.kind == "export":
            self._reconciler.settle()
            with self._as_server_error(), self.artefacts.publishing():
                self._claim.check()
                if coordinator.held_task(request.worker, request.token) is None:
                    raise Overtaken("this worker no longer holds this task")
                message = self.artefacts.publish_model(
                    request.token, report.succeeded(coordinator, request.message)
                )
            coordinator.end(message)  # even if this worker was replaced meanwhile
        coordinator.task_done(request)

    def upload(
        self, slot: int, incarnation: int, token: tuple[int, int], name: str, chunks: Iterator[bytes]
    ) -> None:
        """Write one file of a task, as long as this worker holds it, or may send it later."""
        worker = slot, incarnation

        def check() -> str:
            if token[0] == LATE and self.coordinator.sends_later(worker, name):
                kind = "late"
                self.artefacts.check_newest(worker, token[1], name)
            elif (task := self.coordinator.held_task(worker, token)) is not None:
                kind = task.kind
            else:
                raise Overtaken("this worker does not hold this task")
            self._check_not_replaced(exports=kind == "export")
            return kind

        kind = check()
        self.artefacts.receive(token, kind, name, chunks, check)
        with self.coordinator.lock:
            tasks = self.coordinator.record.tasks
            if kind == "callbacks":
                tasks.stores(worker, token, name)
            elif kind == "late":
                tasks.files.arrived(worker, name, token[1])

    @contextlib.contextmanager
    def download(
        self, slot: int, incarnation: int, token: tuple[int, int], name: str
    ) -> Iterator[tuple[int, IO[bytes]]]:
        """The size and the content of a file of the callbacks, for the worker that exports the model."""
        task = self.coordinator.held_task((slot, incarnation), token)
        if task is None or task.kind != "export":
            raise Overtaken("this worker does not hold the export")
        if self.coordinator.lacks(name):  # that of an earlier epoch may be there
            yield 0, io.BytesIO()
            return
        with self.artefacts.open(name) as found:
            yield found

    def status(self) -> StatusReport:
        """The coordinator's status with that of the shards."""
        last = self.snapshotter.last
        at = {"last_snapshot_at": last.wall_time if last else None}
        own = self._shard.report().model_copy(update={"snapshot_idle_seconds": self._store.idle_seconds()})
        shards = [own, *(other.report for other in self._others if other.report is not None)]
        seconds, because = self.snapshotter.trouble()
        for shard in shards:
            if (idle := shard.snapshot_idle_seconds) >= STALLED_SECONDS:
                because = f"shard {shard.index} has written nothing of its part for {idle:.0f} s"
        return report.status(self.coordinator).model_copy(
            update={
                "shards": tuple(shard.model_copy(update=at) for shard in shards),
                "snapshots_fail_seconds": seconds,
                "snapshots_fail_because": because,
                "snapshots_stay_because": self.snapshotter.not_removed,
            }
        )

    # ---

    def _tell_others(self) -> None:
        for other in self._others:
            other.wake()

    @contextlib.contextmanager
    def _as_server_error(self) -> Iterator[None]:
        """Convert `Fenced`, which here concerns this server, to `Unreachable` for the worker."""
        try:
            yield
        except Fenced as error:
            self._fenced(error)
            raise Unreachable(str(error)) from None

    def _check_not_replaced(self, *, exports: bool) -> None:
        """`Unreachable` if a successor exists: never overwrite its files. `Overtaken` if the model is published."""
        with self._as_server_error():
            self._claim.check()
            message = self.artefacts.published() if exports else None
        if message is not None:
            self.coordinator.end(message)
            raise Overtaken("the model is published already")

    def _shard_restarted(self) -> None:
        self.coordinator.disturbed()
        self._reconciler.wake()

    def _diverged(self, request: Diverged) -> None:
        self._rollback.diverged(request)
        self._reconciler.wake()
