"""The process `shoal-trainer serve`: one shard of the parameters, and on shard 0 the coordinator.

It starts from the newest snapshot, or another run's, or empty; serves until the job has ended or it is told to stop;
and leaves a last snapshot behind. It imports no TensorFlow, so it is back within a second or two.

Exit codes: 0 the job has ended (the termination message says how), 2 the configuration is wrong, 4 a newer incarnation
of this shard is there, 143 told to stop.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from pydantic import ValidationError

from shoal_trainer.contract import (
    CONFIG_ENV,
    EXIT_DRAINED,
    EXIT_FENCED,
    EXIT_OK,
    EXIT_USER,
    METRICS_PORT,
    Message,
    Outcome,
    RuntimeConfig,
    ShardReport,
    StatusReport,
    TerminationMessage,
)
from shoal_trainer.coordinator.artefacts import Artefacts
from shoal_trainer.coordinator.client import ShardControl
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.coordinator.metrics import serve_metrics
from shoal_trainer.coordinator.protocol import (
    Diverged,
    Done,
    Failed,
    FileEnded,
    Heartbeat,
    Leave,
    Next,
    RollBackShard,
    ShardReady,
    SnapshotShard,
    TaskDone,
)
from shoal_trainer.coordinator.reconciler import Reconciler, tell
from shoal_trainer.coordinator.rollback import RollBack
from shoal_trainer.coordinator.snapshotter import Snapshotter, write_part
from shoal_trainer.coordinator.tasks import Task
from shoal_trainer.errors import Fenced, Overtaken, Unreachable, UserError
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.manifest import ShardFile
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.termination import write_termination

log = logging.getLogger(__name__)

T = TypeVar("T")
TICK_SECONDS = 0.25
LINGER_SECONDS = 10.0
"""After the end: how long workers may take to hear of it."""
RETRY_SECONDS = 1.0
TELL_SECONDS = 30.0
"""How long another shard may take to go back before it is told once more."""


class ParameterServer:
    """One shard and everything around it. `run` serves until the end and returns the exit code."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._stop = threading.Event()
        self._fenced: Fenced | None = None
        self._restored = False
        self._credentials = Credentials.load(config.secret_dir)
        self._storage = open_storage(config.storage_uri, config.job.prefix)
        self._store = SnapshotStore(self._storage)
        self.shard = ShardStore(
            config.index, len(config.parameter_servers), config.incarnation, staleness=config.staleness
        )
        self.coordinator: Coordinator | None = None
        self._artefacts = Artefacts(self._storage, config.job.uid)
        self._snapshotter: Snapshotter | None = None
        self._reconciler: Reconciler | None = None
        self._rollback: RollBack | None = None
        self._going_back = threading.Lock()
        if config.index == 0:
            self.coordinator = Coordinator(config.job, config.stop_after, config.batch_size, self.shard)
            others = [ShardControl(address, self._credentials) for address in config.parameter_servers[1:]]
            asked = [
                ShardControl(address, self._credentials, timeout=2.0)
                for address in config.parameter_servers[1:]
            ]
            self._reconciler = Reconciler(self.shard, asked, self.coordinator)
            self._snapshotter = Snapshotter(
                self.shard,
                others,
                self.coordinator,
                self._reconciler,
                self._store,
                config.snapshot,
                fenced=self._give_up,
            )
            told = {
                index: ShardControl(address, self._credentials, timeout=TELL_SECONDS)
                for index, address in enumerate(config.parameter_servers)
                if index
            }
            self._rollback = RollBack(
                self.shard, told, self.coordinator, self._store, self._snapshotter, fenced=self._give_up
            )

    # --- life -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Restore, serve, end."""
        self._restore()
        address = self.config.parameter_servers[self.config.index]
        data = DataServer(
            self.shard,
            self.config.job.uid,
            self._credentials,
            host=self.config.bind_host,
            port=address.data_port,
            tls=self.config.data_tls,
            on_superseded=lambda epoch: self._give_up(Fenced(f"a worker knows epoch {epoch} of this shard")),
        )
        control = ControlServer(
            self._credentials,
            self._handlers(),
            host=self.config.bind_host,
            port=address.control_port,
            status=self.status if self.coordinator else None,
            upload=self._upload if self.coordinator else None,
        )
        data.start()
        control.start()
        if self.coordinator:
            serve_metrics(self.status, self.config.bind_host, METRICS_PORT)
        if self._snapshotter:
            self._snapshotter.start()
        if self._reconciler:
            self._reconciler.start()
            if self.config.incarnation or self._restored:
                self._reconciler.due()
        if self._rollback:
            self._rollback.start()
        log.info("shard %d epoch %d serves on port %d", self.config.index, self.config.incarnation, data.port)
        try:
            return self._serve()
        finally:
            if self._rollback:
                self._rollback.stop()
            data.close()
            control.close()

    def stop(self) -> None:
        """Told to stop: take a last snapshot and end."""
        self._stop.set()

    def _serve(self) -> int:
        ended_at: float | None = None
        told = self.config.index == 0 or not (self.config.incarnation or self._restored)
        while not self._stop.wait(TICK_SECONDS):
            if self._fenced is not None:
                log.error("fenced: %s", self._fenced)
                return EXIT_FENCED
            if not told and self.shard.state is State.READY:
                told = self._tell_ready()
            if self.coordinator is None:
                continue
            self.coordinator.tick()
            if self.coordinator.finished is not None:
                now = time.monotonic()
                ended_at = now if ended_at is None else ended_at
                if not self.coordinator.members.present() or now - ended_at > LINGER_SECONDS:
                    return self._ended(self.coordinator.finished)
        self._last_snapshot()
        return EXIT_DRAINED

    def _ended(self, message: TerminationMessage) -> int:
        write_termination(message)
        log.info("the job has ended: %s: %s", message.outcome.value, message.message)
        return EXIT_OK

    def _last_snapshot(self) -> None:
        if self._snapshotter is None:
            return
        self._snapshotter.stop()
        try:
            if (manifest := self._snapshotter.take()) is not None:
                log.info("told to stop: snapshot %d is the last", manifest.number)
        except (Unreachable, Fenced, OSError) as error:
            log.warning("told to stop, and no last snapshot could be taken: %s", error)

    # --- the beginning --------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        if self.coordinator is not None and (message := self._patiently(self._artefacts.published)):
            self.coordinator.end(message)
            return
        index, shards = self.config.index, len(self.config.parameter_servers)
        found = self._patiently(lambda: self._store.load_newest(index, shards))
        if found is not None:
            manifest, copy = found
            if manifest.epoch > self.config.incarnation and index == 0:
                raise Fenced(f"the storage holds a snapshot of epoch {manifest.epoch}")
            self.shard.restore(copy)
            self._restored = True
            if self.coordinator is not None:
                self.coordinator.load(manifest.ledger)
            log.info(
                "restored snapshot %d: version %d, %d samples", manifest.number, copy.version, copy.samples
            )
            return
        initial = self.config.initial_from
        if initial is None:
            return
        other = SnapshotStore(open_storage(initial.uri))
        begun = self._patiently(lambda: other.load_newest(index, shards))
        if begun is None:
            raise UserError(
                f"spec.training.initialFrom.uri {initial.uri} holds no complete snapshot: give the folder of a run, "
                "<storage>/<namespace>/<job>/<uid>."
            )
        manifest, copy = begun
        self.shard.restore(copy, other_run=True, weights_only=initial.weights_only)
        if self.coordinator is not None and not initial.weights_only:
            self.coordinator.load(manifest.ledger, other_run=True)
        log.info("begins with snapshot %d of %s", manifest.number, initial.uri)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Try until the storage answers, or we are told to stop."""
        said = ""
        while True:
            try:
                return call()
            except Unreachable as error:
                if str(error) != said:
                    log.warning("waiting for the storage: %s", error)
                said = str(error)
            if self._stop.wait(RETRY_SECONDS):
                sys.exit(EXIT_DRAINED)

    def _tell_ready(self) -> bool:
        """The shard was lost and is back: tell the coordinator."""
        client = ShardControl(self.config.parameter_servers[0], self._credentials, timeout=2.0)
        try:
            client.shard_ready(self.config.index, self.config.incarnation)
        except Unreachable:
            return False
        finally:
            client.close()
        return True

    # --- requests -------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Callable[..., Message]]:
        if self.coordinator is None:
            return {
                "snapshot": self._write_part,
                "pushes": lambda request: tell(self.shard, request.of),
                "roll-back": self._go_back,
            }
        coordinator, rollback, reconciler = self.coordinator, self._rollback, self._reconciler
        assert rollback is not None
        assert reconciler is not None

        def next_work(request: Next) -> Message:
            return coordinator.next_work(
                request.slot, request.incarnation, request.generation, request.number
            )

        def heartbeat(request: Heartbeat) -> Message:
            coordinator.heartbeat(request.slot, request.incarnation, request.message)
            return Done()

        def leave(request: Leave) -> Message:
            coordinator.leave(request.slot, request.incarnation)
            return Done()

        def failed(request: Failed) -> Message:
            coordinator.failed(request.slot, request.incarnation, request.message)
            return Done()

        def file_ended(request: FileEnded) -> Message:
            coordinator.file_ended(request)
            return Done()

        def shard_ready(request: ShardReady) -> Message:
            log.warning("shard %d is back at epoch %d", request.index, request.epoch)
            rollback.came_back(request.index)
            reconciler.due()
            return Done()

        def diverged(request: Diverged) -> Message:
            rollback.diverged(request)
            reconciler.due()
            return Done()

        return {
            "join": coordinator.join,
            "next": next_work,
            "heartbeat": heartbeat,
            "file-ended": file_ended,
            "task-done": self._task_done,
            "leave": leave,
            "failed": failed,
            "shard-ready": shard_ready,
            "diverged": diverged,
        }

    def _task_done(self, request: TaskDone) -> Message:
        """Take a result. The export is done when its model is in the storage, not before: it may be away just now."""
        coordinator = self.coordinator
        assert coordinator is not None
        task = coordinator.held_task(request.slot, request.incarnation, request.token)
        if task is None:  # somebody else's by now, or done: its answer was lost
            return Done()
        self._artefacts.check(request.token, request.files)
        if task.kind == "export":
            assert self._reconciler is not None
            self._reconciler.settle()
            message = self._artefacts.publish_model(request.token, coordinator.succeeded("", ""))
            coordinator.task_done(request)
            coordinator.end(message)
        else:
            coordinator.task_done(request)
        return Done()

    def _upload(
        self, slot: int, incarnation: int, token: tuple[int, int], name: str, chunks: Iterator[bytes]
    ) -> None:
        assert self.coordinator is not None
        coordinator = self.coordinator

        def held() -> Task:
            if (task := coordinator.held_task(slot, incarnation, token)) is None:
                raise Overtaken("this worker does not hold this task")
            return task

        def all_of_it() -> Iterator[bytes]:
            yield from chunks
            held()  # else it would replace a file of the one who holds it now

        self._artefacts.receive(token, held().kind, name, all_of_it())

    def _write_part(self, request: SnapshotShard) -> ShardFile:
        return write_part(self.shard, self._store, request)

    def _go_back(self, request: RollBackShard) -> Message:
        with self._going_back:
            if self.shard.generation < request.generation:
                found = self._store.load_newest(self.config.index, len(self.config.parameter_servers))
                if found is None or found[0].generation < request.generation:
                    raise Unreachable("the storage does not show that snapshot yet")
                self.shard.roll_back(found[1])
                log.warning("rolled back to snapshot %d: version %d", found[0].number, found[1].version)
            return Done()

    def status(self) -> StatusReport:
        """The coordinator's status with what is known of the shards."""
        assert self.coordinator is not None
        assert self._snapshotter is not None
        last = self._snapshotter.last
        shards = [
            ShardReport(
                index=0,
                epoch=self.shard.epoch,
                version=self.shard.version,
                ready=self.shard.state is State.READY,
                last_snapshot_at=last.wall_time if last else None,
            )
        ]
        if last is not None:
            shards += [
                ShardReport(index=p.index, epoch=p.epoch, version=p.version, last_snapshot_at=last.wall_time)
                for p in last.shards[1:]
            ]
        return self.coordinator.status().model_copy(update={"shards": tuple(shards)})

    def _give_up(self, error: Fenced) -> None:
        self._fenced = error


def main() -> int:
    """Serve the shard that `$SHOAL_CONFIG` describes; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        try:
            config = RuntimeConfig.model_validate_json(os.environ[CONFIG_ENV])
        except KeyError:
            raise UserError(
                f"${CONFIG_ENV} is not set. Use `shoal-trainer run` to train on this machine."
            ) from None
        except ValidationError as error:
            raise UserError(
                f"${CONFIG_ENV} is not a valid configuration: {error.errors()[0]['msg']}"
            ) from error
        server = ParameterServer(config)

        def told(_signal: int, _frame: FrameType | None) -> None:
            server.stop()

        signal.signal(signal.SIGTERM, told)
        return server.run()
    except UserError as error:
        log.error("%s", error)
        write_termination(TerminationMessage(outcome=Outcome.FAILED, reason="UserError", message=str(error)))
        return EXIT_USER
    except Fenced as error:
        log.error("fenced: %s", error)
        return EXIT_FENCED


if __name__ == "__main__":
    sys.exit(main())
