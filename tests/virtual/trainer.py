"""A virtual trainer: jobs whose speed and length only it knows, and the coordinators that report on them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import Unavailable
from shoal.telemetry.coordinator import Endpoint
from shoal_trainer.contract import (
    EXIT_FENCED,
    BesideSums,
    DataReport,
    EpochReport,
    LogSums,
    ModelReport,
    Outcome,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    TerminationMessage,
    WorkerReport,
    WorkerState,
)
from tests.virtual.cluster import Cluster, Process
from tests.virtual.loop import BEGIN, now
from tests.virtual.server import Json

JOIN_SECONDS = 2.0
SILENT_SECONDS = 5.0
SETTLE_SECONDS = 5.0
SNAPSHOT_SECONDS = 20.0
NOISE = 0.05


@dataclass(frozen=True)
class Truth:
    """What nobody but the trainer knows: seconds of a worker's step by device, and of an update on the servers."""

    samples: float
    compute: Callable[[str], float] = lambda _device: 0.1
    update: float = 0.002
    batch: int = 128
    model: ModelReport = ModelReport(
        fingerprint="ab" * 32, parameters=460_000, tensors=98, flops_per_sample=8.1e7
    )
    noise: float = NOISE
    epoch: float = 0.0
    """Samples of an epoch, after each of which one worker evaluates; 0: the job is one epoch, without evaluation."""
    evaluation: float = 0.0
    """Seconds that it takes, in which the others wait."""

    def alone(self, device: str) -> float:
        """Seconds of a step of a worker with servers that nobody else uses."""
        return self.compute(device) + 2 * self.update

    def speed(self, devices: list[str], servers: int = 1) -> float:
        """Samples per second of these workers together."""
        alone = sum(self.batch / self.alone(d) for d in devices)
        ceiling = self.batch * servers / self.update
        return (alone**-4 + ceiling**-4) ** -0.25 if alone else 0.0


@dataclass
class Worker:
    """One process as the coordinator knows it."""

    process: Process
    joined_at: float
    heard_at: float
    steps: float = 0.0
    fenced: bool = False
    left: bool = False
    device: str = "CPU"
    beside: float = 0.0


@dataclass
class Training:
    """One run of a job."""

    uid: str
    truth: Truth
    shards: int
    folder: str
    """Where its snapshots lie: that of an earlier job, if both name the same run."""
    done: float = 0.0
    saved: float = 0.0
    saved_at: float = 0.0
    repeated: float = 0.0
    workers: dict[tuple[int, int], Worker] = field(default_factory=dict)
    servers: dict[int, Process | None] = field(default_factory=dict)
    sums: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    settled_at: float = 0.0
    epoch: str = ""
    finishing_at: float | None = None
    ended: bool = False
    ended_at: float | None = None
    rate: float = 0.0
    wait: float = 1.0
    """How many times as long as alone a step takes, because of the servers."""
    active: int = 0
    serving: dict[int, tuple[str, int]] = field(default_factory=dict)
    evaluates_until: float = 0.0
    beside: BesideSums = BesideSums()


def folder_of(job: Json) -> str:
    """In the storage."""
    meta = job["metadata"]
    return f"{meta['namespace']}/{meta['name']}/{job['spec']['storage'].get('run', meta['uid'])}"


class Trainers:
    """All runs, and the `Coordinator` that the operator reads."""

    def __init__(self, cluster: Cluster, truth: Callable[[str], Truth]) -> None:
        self.cluster = cluster
        self.runs: dict[str, Training] = {}
        self._truth = truth
        self._random = random.Random(7)
        self.deaf: Callable[[str], bool] = lambda _uid: False
        """Whether the operator cannot reach a job's coordinator."""
        cluster.on_stop = self._stopped

    def run_of(self, uid: str, folder: str, shards: int = 1) -> Training:
        """The run of a job, which begins with its first process."""
        if uid not in self.runs:
            self.runs[uid] = Training(uid, self._truth(uid), shards, folder)
        return self.runs[uid]

    def step(self, seconds: float) -> None:
        """Time passes."""
        by_job: dict[str, list[Process]] = {}
        for process in self.cluster.processes.values():
            by_job.setdefault(process.job, []).append(process)
        for uid, processes in by_job.items():
            jobs = [o for o in self.cluster.server.all("trainingjobs") if o["metadata"]["uid"] == uid]
            shards = jobs[0]["spec"].get("parameterServers", {}).get("replicas", 1) if jobs else 1
            run = self.run_of(uid, folder_of(jobs[0]) if jobs else uid)
            run.shards = shards
            self._train(run, processes, seconds)

    def _train(self, run: Training, processes: list[Process], seconds: float) -> None:
        serving = self._serve(run, processes)
        if run.ended:
            self._end_workers(processes)
            return
        before = len(run.workers)
        for process in processes:
            if process.role == "worker":
                self._hear(run, process)
        active = [w for w in run.workers.values() if w.process.runs and not w.fenced and not w.left]
        if len(run.workers) != before or len(active) != run.active:
            run.active = len(active)
            run.settled_at = now() + SETTLE_SECONDS
        run.rate = run.truth.speed([w.device for w in active], run.shards) if serving else 0.0
        if not serving:
            return
        if run.rate:
            run.wait = sum(run.truth.batch / run.truth.alone(w.device) for w in active) / run.rate
        if now() < run.evaluates_until:
            self._evaluate(run, active, seconds)
        else:
            self._advance(run, active, seconds)
        if now() - run.saved_at >= SNAPSHOT_SECONDS:
            run.saved, run.saved_at = run.done, now()
        if run.done >= run.truth.samples and active and now() >= run.evaluates_until:
            run.finishing_at = run.finishing_at or now() + 3.0
        if run.finishing_at is not None and now() >= run.finishing_at:
            self._end(run)

    def _advance(self, run: Training, active: list[Worker], seconds: float) -> None:
        """Train, to the end of the epoch at most."""
        before, length = run.done, run.truth.epoch or run.truth.samples
        run.done = min(run.truth.samples, run.done + run.rate * seconds)
        for worker in active:
            self._measure(run, worker, len(active), seconds)
        if run.done // length > before // length and run.truth.evaluation:
            run.evaluates_until = now() + run.truth.evaluation
            if run.done < run.truth.samples:
                sums = run.beside
                run.beside = sums.model_copy(
                    update={"epochs": sums.epochs + 1, "others": sums.others + len(active) - 1}
                )

    def _evaluate(self, run: Training, active: list[Worker], seconds: float) -> None:
        """One evaluates, and the others wait."""
        for number, worker in enumerate(active):
            worker.beside += seconds
            if run.done < run.truth.samples:
                part = "waits" if number else "tasks"
                lost = seconds * run.truth.batch / run.truth.alone(worker.device)
                run.beside = run.beside.model_copy(update={part: getattr(run.beside, part) + lost})

    def _serve(self, run: Training, processes: list[Process]) -> bool:
        """Whether all shards are there; a new one takes the newest snapshot."""
        for index in range(run.shards):
            found = max(
                (p for p in processes if p.role == "ps" and p.index == index and p.runs),
                key=lambda p: p.incarnation,
                default=None,
            )
            key = (found.uid, found.restarts) if found else None
            known = run.serving.get(index)
            if key is not None and key != known:
                run.serving[index] = key
                if index == 0:
                    run.epoch = f"{key[0]}-{key[1]}"
                    run.sums, run.beside = {}, BesideSums()
                    run.workers = {}
                if known is None and index == 0:
                    others = (each for each in self.runs.values() if each.folder == run.folder)
                    run.done = run.saved = max(each.saved for each in others)
                if known is not None:
                    alive = any(p.role == "worker" and p.runs for p in processes)
                    back = run.done if alive else run.saved
                    run.repeated += run.done - back
                    run.done = back
                    run.settled_at = now() + SETTLE_SECONDS
            run.servers[index] = found
        return all(run.servers.get(i) is not None for i in range(run.shards))

    def _hear(self, run: Training, process: Process) -> None:
        coordinates = run.servers.get(0) is not None  # a shard that is gone silences nobody
        if not process.runs or not coordinates or now() < process.extra["begun_at"] + JOIN_SECONDS:
            return
        key = process.index, process.incarnation
        worker = run.workers.get(key)
        if worker is None:
            if process.ends_at is not None:  # told to stop before it holds leases, it does so at once
                return
            device = process.machine.labels.get("accelerator", "CPU")
            worker = run.workers[key] = Worker(process, now(), now(), device=device)
            for (index, incarnation), other in run.workers.items():
                if index == process.index and incarnation < process.incarnation:
                    other.fenced = True
        if any(i == process.index and n > process.incarnation for i, n in run.workers):
            worker.fenced = True
        if worker.fenced:
            process.end = process.end or (EXIT_FENCED, "")
        elif process.extra.get("hangs_until", 0.0) <= now():
            worker.heard_at = now()

    def _measure(self, run: Training, worker: Worker, active: int, seconds: float) -> None:
        truth = run.truth
        mean = truth.compute(worker.device)
        count = seconds / (mean + 2 * truth.update)
        worker.steps += count
        if now() < run.settled_at:
            return
        row = run.sums.setdefault((worker.device, active), [0.0] * 7)
        row[0] += count
        for at, value in ((1, mean), (3, truth.update), (5, truth.update)):
            log = math.log(value) - truth.noise**2 / 2
            row[at] += count * log + truth.noise * math.sqrt(count) * self._random.gauss(0, 1)
            row[at + 1] += count * (log * log + truth.noise**2)

    def _stopped(self, process: Process) -> None:
        run = self.runs.get(process.job)
        if run is None:
            return
        if process.role == "ps":
            run.saved, run.saved_at = run.done, now()
        elif (worker := run.workers.get((process.index, process.incarnation))) is not None:
            worker.left = True

    def _end(self, run: Training) -> None:
        coordinator = run.servers[0]
        assert coordinator is not None
        message = TerminationMessage(
            outcome=Outcome.SUCCEEDED,
            model_uri="s3://bucket/model",
            model_digest="d" * 64,
            samples=int(run.done),
        )
        coordinator.end = 0, message.to_json()
        run.ended, run.ended_at = True, now()

    @staticmethod
    def _end_workers(processes: list[Process]) -> None:
        for process in processes:
            if process.runs and process.role == "worker":
                process.end = 0, ""

    # --- the coordinator

    async def read(self, endpoint: Endpoint) -> StatusReport:
        """See `Coordinator`."""
        run = self.runs.get(endpoint.job_uid)
        server = run.servers.get(0) if run is not None else None
        if run is None or server is None or not server.runs or server.address != endpoint.address:
            raise Unavailable("connection refused")
        if self.deaf(endpoint.job_uid):
            raise Unavailable("timed out")
        left = run.truth.samples - run.done
        epoch = int(run.truth.epoch or run.truth.samples)
        return StatusReport(
            job_uid=run.uid,
            phase=Phase.FINISHING if run.finishing_at else Phase.TRAINING if run.workers else Phase.STARTING,
            step=int(run.done / run.truth.batch),
            samples=int(run.done),
            loss=1.0,
            samples_per_second=run.rate or None,
            progress_percent=100 * run.done / run.truth.samples,
            remaining_seconds=left / run.rate if run.rate else None,
            samples_left=left,
            data=DataReport(done=int(run.done) % epoch, total=epoch, repeated=int(run.repeated)),
            workers=tuple(self._worker(run, w) for _, w in sorted(run.workers.items())),
            shards=tuple(self._shard(run, i) for i in range(run.shards)),
            model=run.truth.model if run.workers else None,
            speed=tuple(self._sums(run, key, row) for key, row in run.sums.items()),
            speed_epoch=run.epoch,
            beside=run.beside,
            epochs=self._epochs(run),
        )

    @staticmethod
    def _epochs(run: Training) -> tuple[EpochReport, ...]:
        """The last one that ended: its evaluation may still run."""
        ended = int(run.done // run.truth.epoch) if run.truth.epoch else 0
        return (EpochReport(epoch=ended - 1, complete=now() >= run.evaluates_until),) if ended else ()

    def forget(self, job_uid: str) -> None:
        """See `Coordinator`."""

    def _worker(self, run: Training, worker: Worker) -> WorkerReport:
        process = worker.process
        silent = now() - worker.heard_at
        state = WorkerState.ACTIVE
        if worker.fenced:
            state = WorkerState.FENCED
        elif worker.left:
            state = WorkerState.DRAINED
        elif silent > SILENT_SECONDS:
            state = WorkerState.SILENT
        return WorkerReport(
            slot=process.index,
            incarnation=process.incarnation,
            state=state,
            steps=int(worker.steps),
            samples=int(worker.steps * run.truth.batch),
            last_seen_seconds=silent,
            first_push_at=BEGIN.timestamp() + worker.joined_at,
            step_seconds=run.truth.alone(worker.device) * run.wait,
            batch_size=run.truth.batch,
            device=worker.device,
            cores=process.machine.cores,
            node=process.machine.name,
            beside_seconds=worker.beside,
        )

    def _shard(self, run: Training, index: int) -> ShardReport:
        server = run.servers.get(index)
        updates = run.done / run.truth.batch
        return ShardReport(
            index=index,
            epoch=server.incarnation if server else 0,
            boot=server.restarts + 1 if server else 0,
            version=int(updates),
            ready=server is not None,
            last_snapshot_at=BEGIN.timestamp() + run.saved_at if run.saved_at else None,
            busy_seconds=updates * run.truth.update,
            updates=int(updates),
            batches=int(updates),
            bytes_received=int(updates) * 1000,
        )

    @staticmethod
    def _sums(run: Training, key: tuple[str, int], row: list[float]) -> SpeedSums:
        count = int(row[0])
        share = count / row[0] if row[0] else 0.0
        parts = [LogSums(count=count, total=row[i] * share, squares=row[i + 1] * share) for i in (1, 3, 5)]
        return SpeedSums(
            device=key[0],
            devices=1,
            cores=4,
            batch_size=run.truth.batch,
            workers=key[1],
            servers=run.shards,
            compute=parts[0],
            pull=parts[1],
            push=parts[2],
        )
