"""The process `shoal-trainer serve`: one shard of the parameters, and on shard 0 the coordinator.

It claims its shard in the storage, which stops older incarnations; starts from the newest snapshot, one of another run,
or without parameters; serves until the job ends or SIGTERM arrives; and takes a final snapshot, or, on the other
shards, writes its part of it. It does not import TensorFlow, so it restarts quickly.

Exit codes: 0 the job has ended (see the termination message), 1 an unexpected error, 2 the configuration is wrong or a
snapshot is damaged, 4 a newer incarnation of this shard exists, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from shoal_trainer.contract import (
    EXIT_DRAINED,
    EXIT_OK,
    METRICS_PORT,
    RuntimeConfig,
    TerminationMessage,
)
from shoal_trainer.coordinator import code_server
from shoal_trainer.coordinator.artefacts import FOLDER as MODEL
from shoal_trainer.coordinator.epoch_history import EpochHistory
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.http import MAX_CONNECTIONS as CONTROL_CONNECTIONS
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.coordinator.metrics import serve_metrics
from shoal_trainer.coordinator.service import CoordinatorService
from shoal_trainer.environment import configuration
from shoal_trainer.errors import Fenced, OtherFormat, TrainerError, Unreachable, UserError
from shoal_trainer.ps.malloc import return_freed_memory
from shoal_trainer.ps.server import MAX_CONNECTIONS, DataServer
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.retry import Backoff, until_reachable
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.claims import FOLDER, Claim, Watch, check_storage
from shoal_trainer.snapshot.initial import load_initial
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.termination.exits import exit_code, log_to_stderr
from shoal_trainer.termination.sigterm import in_thread
from shoal_trainer.termination.termination_log import write_termination

log = logging.getLogger(__name__)

T = TypeVar("T")
SETTLE_SECONDS = 30.0
"""How long the end of the job waits for the snapshot of the end of training, from which another run may start."""
TICK_SECONDS = 0.25
MANIFEST_SECONDS = 20.0
"""A shard other than 0 still serves after SIGTERM, for the pod's grace period without these seconds. If shard 0 stops
as well (a drain), its final snapshot needs a part of every shard, and it may have to finish another snapshot before.
They are for the manifest, which shard 0 publishes after the last part. A part that is being written goes on."""
LINGER_SECONDS = 10.0
"""How long workers can still learn that the job has ended."""
HISTORY_SECONDS = 5.0
"""How long the end of the process waits for the file of the history, and until what it has half written is removed."""
RETRY_SECONDS = 1.0
READS = "the parameter server reads the storage"
OPEN_FILES = MAX_CONNECTIONS + CONTROL_CONNECTIONS + 1024
"""Enough for the connections of a large job; a common default is 1,024."""


class ParameterServer:
    """One shard with its servers and, on shard 0, the coordinator. `run` returns the exit code."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._stop = threading.Event()
        self._stopped_at = math.inf
        self._fenced: Fenced | None = None
        self._restored = self._marked = False
        self._waits_for = READS
        """Before it serves: what it does instead."""
        self._ledger_unread = ""
        """Of which snapshot, and why."""
        self._credentials = Credentials.load(config.secret_dir)
        self._storage = storage = open_storage(config.storage_uri, config.job.prefix, f"ps-{config.index}")
        self._store = SnapshotStore(storage)
        self._claim = Claim(storage, config.index, config.incarnation, config.job.uid)
        self._watch = Watch(self._claim, self._on_fenced)
        # The pod's temporary folder may outlive the container. If this file exists, an earlier container had
        # parameters, and workers may have copies even before the first snapshot. In it are the counters that it told.
        self._marker = (
            Path(tempfile.gettempdir()) / f"shoal-{config.job.uid}-{config.index}-{config.incarnation}"
        )
        self.shard = ShardStore(
            config.index,
            len(config.parameter_servers),
            config.incarnation,
            follows=config.incarnation > config.first_incarnation or self._marker.exists(),
            staleness=config.staleness,
        )
        self.service: CoordinatorService | None = None
        self._history = EpochHistory(storage, self._claim.check)
        self._follower = Follower(self.shard, self._store)
        if config.index == 0:
            self.service = CoordinatorService(
                config,
                self.shard,
                storage,
                self._store,
                self._claim,
                self._credentials,
                fenced=self._on_fenced,
            )

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Restore the shard, serve until the end, and return the exit code."""
        control = self._control_server()
        control.start()  # the operator is told what the storage says while that is waited for
        try:
            return self._run(control)
        finally:
            control.close()

    def _control_server(self) -> ControlServer:
        service = self.service
        return ControlServer(
            self._credentials,
            service.handlers() if service else self._follower.handlers(),
            host=self.config.bind_host,
            port=self.config.parameter_servers[self.config.index].control_port,
            status=service.status if service else None,
            upload=service.upload if service else None,
            download=service.download if service else None,
            code=partial(code_server.opened, self.config) if service and self.config.code_digest else None,
            waits_for=lambda: self._waits_for,
        )

    def _run(self, control: ControlServer) -> int:
        try:
            self._restore()
        except OtherFormat as error:
            raise UserError(
                f"{error}. Another version of Shoal wrote it: use that version's images (suspend the job, name them in "
                "its templates, resume it), or remove this run's snapshots to begin from nothing. Nothing was changed."
            ) from None
        address = self.config.parameter_servers[self.config.index]
        data = DataServer(
            self.shard,
            self.config.job.uid,
            self._credentials,
            host=self.config.bind_host,
            port=address.data_port,
            tls=self.config.data_tls,
            on_superseded=lambda epoch: self._on_fenced(
                Fenced(f"a worker has connected to epoch {epoch} of this shard")
            ),
        )
        service = self.service
        data.start()
        self._waits_for = ""
        self._watch.start()
        threading.Thread(target=self._sweep, name="sweep", daemon=True).start()
        if service:
            serve_metrics(service.status, self.config.bind_host, METRICS_PORT, self._marker)
            service.start(follows=self.shard.follows or self._restored)
            self._history.start()
        log.info(
            "serving shard %d, epoch %d, on port %d", self.config.index, self.config.incarnation, data.port
        )
        try:
            return self._serve()
        finally:
            self._watch.stop()
            if service:
                service.stop()
                self._history.close(HISTORY_SECONDS)
            data.close()
            control.close()
            closing = threading.Thread(target=self._storage.close, name="close storage", daemon=True)
            closing.start()
            closing.join(HISTORY_SECONDS)

    def stop(self, at: float | None = None) -> None:
        """Make `run` take a final snapshot and return. `at`: when this was requested, by `time.monotonic`."""
        self._stopped_at = min(self._stopped_at, time.monotonic() if at is None else at)
        self._stop.set()

    def _serve(self) -> int:
        ended_at: float | None = None
        while not self._stop.wait(TICK_SECONDS):
            self._create_marker()
            if self._fenced is not None:
                return exit_code(self._fenced)
            if self._follower.failed is not None:
                raise self._follower.failed
            if self.service is None:
                continue
            coordinator = self.service.coordinator
            coordinator.tick()
            self._history.update(coordinator.complete_epochs())
            if coordinator.finished is not None:
                now = time.monotonic()
                ended_at = now if ended_at is None else ended_at
                if coordinator.deserted() or now - ended_at > LINGER_SECONDS:
                    return self._ended(coordinator.finished)
        if self.service is not None and self.service.coordinator.finished is not None:
            return self._ended(self.service.coordinator.finished)
        if self._final_snapshot():
            self._marker.unlink(missing_ok=True)
        return EXIT_DRAINED

    def _create_marker(self) -> None:
        if not self._marked and self.shard.state is State.READY:
            self._marked = True
            with contextlib.suppress(OSError):
                self._marker.touch()

    def _ended(self, message: TerminationMessage) -> int:
        if self.service is not None:
            self._history.update(self.service.coordinator.complete_epochs())
            if not self.service.snapshotter.settled(SETTLE_SECONDS):
                log.warning("the last snapshot of this run is from before the end of training")
        write_termination(message)
        self._marker.unlink(missing_ok=True)
        log.info("the job has ended: %s: %s", message.outcome.value, message.message)
        return EXIT_OK

    def _final_snapshot(self) -> bool:
        """Save this shard; returns whether it is saved: on shard 0 in a snapshot, on others as a part of one."""
        if self.service is None:
            self._await_final_snapshot()
            return self._follower.saved >= self._stopped_at
        snapshotter, backoff, never = (
            self.service.snapshotter,
            Backoff(longest=RETRY_SECONDS),
            threading.Event(),
        )
        snapshotter.stop()
        while True:
            try:
                if (manifest := snapshotter.take()) is not None:
                    log.info("stopping: wrote final snapshot %d", manifest.number)
                return snapshotter.last is not None  # `take` returns None if the last one is up to date
            except (TrainerError, OSError) as error:
                if backoff.is_new(error):
                    log.warning("stopping: cannot take a final snapshot: %s", error)
                if isinstance(error, Fenced):
                    return False
            except Exception:
                log.exception("stopping: cannot take a final snapshot")
                return False
            if self._fenced is not None or time.monotonic() > self._grace_ends:
                return False
            backoff.wait(never)

    def _await_final_snapshot(self) -> None:
        """Serve until this shard has written its part of a snapshot requested since `stop`, if shard 0 still serves."""
        while self._fenced is None and self.shard.state is State.READY and self._coordinator_serves():
            saved = self._follower.saved >= self._stopped_at
            time.sleep(TICK_SECONDS)  # also for the answer to be sent
            if saved or (time.monotonic() > self._grace_ends and not self._follower.writing):
                return

    @property
    def _grace_ends(self) -> float:
        """Until when a part of the final snapshot may begin."""
        return self._stopped_at + self.config.grace_seconds - MANIFEST_SECONDS

    def _coordinator_serves(self) -> bool:
        """Whether shard 0 accepts connections. It stops after its final snapshot or the end of the job."""
        address = self.config.parameter_servers[0]
        try:
            socket.create_connection((address.host, address.data_port), timeout=3).close()
        except OSError:
            return False
        return True

    # --- starting -------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        service = self.service
        self._when_reachable(self._claim.check)
        for folder in (FOLDER, MODEL):  # what a killed server left there may be all that fills the volume
            self._sweep(folder)
        job = self.config.job
        this = f"{job.uid}-{self.config.index}-{self.config.incarnation}"
        self._when_reachable(lambda: check_storage(self._storage, this, self._stop.wait))
        self._when_reachable(self._claim.make)
        if service is not None and (message := self._when_reachable(service.artefacts.published)):
            service.coordinator.end(message)
            return
        index, shards = self.config.index, len(self.config.parameter_servers)
        found = self._when_reachable(lambda: self._store.load_settled(index, shards, self._has_ledger))
        if found is None and self._ledger_unread:
            raise OtherFormat(self._ledger_unread)
        if found is not None:
            manifest, copy = found
            if manifest.epoch > self.config.incarnation and index == 0:
                raise Fenced(
                    f"the storage has a snapshot of epoch {manifest.epoch}, this is {self.config.incarnation}"
                )
            self.shard.restore(copy)
            self._restored = True
            if service is not None:
                service.restored(manifest, copy.version)
            log.info(
                "restored snapshot %d: version %d, %d samples", manifest.number, copy.version, copy.samples
            )
            return
        if self.shard.follows:  # before the first snapshot; or its folder is not that of the server before it
            log.warning(
                "no snapshot is in %s: training goes on from a worker's copy, or anew", self._storage.uri
            )
        initial = self.config.initial_from
        if initial is None:
            return
        uri = initial.uri
        other = SnapshotStore(open_storage(uri))
        manifest, copy = self._when_reachable(
            lambda: load_initial(self._storage, uri, index, shards, follows=self.shard.follows, other=other),
            "the snapshot to start from",
        )
        self.shard.restore(copy, other_run=True, weights_only=initial.weights_only)
        if service is not None:
            service.coordinator.load({} if initial.weights_only else manifest.ledger, other_run=True)
        log.info("starting from snapshot %d of %s", manifest.number, uri)

    def _has_ledger(self, manifest: Manifest) -> bool:
        """Whether shard 0 can go on with this snapshot's ledger: else the next older one is better than no start."""
        if self.service is None or not manifest.ledger:
            return True
        try:
            self.service.coordinator.blank().load(manifest.ledger)
        except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
            self._ledger_unread = f"snapshot {manifest.number}: its ledger cannot be read: {error!r}"
            log.error("%s: skipped", self._ledger_unread)
            return False
        return True

    def _when_reachable(self, call: Callable[[], T], target: str = "the storage") -> T:
        """The result of `call`; retried until `target` is reachable."""

        def attempt() -> T:
            try:
                result = call()
            except Unreachable as error:
                self._waits_for = f"waiting for {target}: {error}"
                raise
            self._waits_for = READS
            return result

        return until_reachable(attempt, target, self._stop, longest=RETRY_SECONDS)

    def _sweep(self, folder: str = "") -> None:
        with contextlib.suppress(Unreachable):  # nothing reads these files
            self._storage.sweep(folder)

    def _on_fenced(self, error: Fenced) -> None:
        self._fenced = error


def allow_open_files(wanted: int = OPEN_FILES) -> None:
    """Raise this process's limit of open files to `wanted`, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def stop_on_sigterm(server: ParameterServer) -> None:
    """Stop the server on SIGTERM."""
    stop = in_thread(server.stop)

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop()

    signal.signal(signal.SIGTERM, handle)


def main() -> int:
    """Serve the shard of the configuration in `$SHOAL_CONFIG`; returns the exit code."""
    log_to_stderr()
    try:
        config = configuration()
        allow_open_files()
        return_freed_memory()
        server = ParameterServer(config)
        stop_on_sigterm(server)
        return server.run()
    except (UserError, Fenced) as error:
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
