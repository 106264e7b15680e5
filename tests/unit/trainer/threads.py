"""A job in threads of this process: real parameter servers, workers and TensorFlow, on loopback, with real faults."""

import socket
import threading
import time
from typing import Any, NamedTuple

from shoal_trainer.contract import JobIdentity, Role, Shard, SnapshotPolicy, StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.errors import Fenced
from shoal_trainer.security import create_secret_dir
from shoal_trainer.serve import ParameterServer
from shoal_trainer.worker.compose import Worker, build_flat_model, compose
from shoal_trainer.worker.coordination import ControlPlane
from tests.unit.trainer.configs import pod_config


class Running(NamedTuple):
    worker: Worker
    plane: ControlPlane
    drain: threading.Event
    thread: threading.Thread
    incarnation: int


class Job:
    """Parameter servers by index, and workers by slot, each in a thread. `errors`: how workers ended, by slot."""

    def __init__(
        self, folder, training=None, *, shards=1, epochs, batch_size=16, snapshot_seconds=3600
    ) -> None:
        self.folder, self.training = folder, training
        self.fields: dict[str, Any] = {
            "batch_size": batch_size,
            "stop_after": StopAfter(epochs=epochs),
            "snapshot": SnapshotPolicy(every_seconds=snapshot_seconds),
        }
        self.credentials = create_secret_dir(folder / "secret")
        self.codes, self.workers, self.errors = {}, {}, {}
        self.start_servers(shards, 0)

    def start_servers(self, shards, epoch):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * shards)]
        ports = [listener.getsockname()[1] for listener in sockets]
        for listener in sockets:
            listener.close()
        self.shards = tuple(
            Shard(host="127.0.0.1", data_port=data, control_port=control)
            for data, control in zip(ports[::2], ports[1::2], strict=True)
        )
        self.servers, self.serving = {}, {}
        for index in range(shards):
            self.start_server(index, epoch)

    def config(self, role, index, incarnation=0):
        job = JobIdentity(namespace="test", name="digits", uid=self.folder.name)
        place = {"index": index, "incarnation": incarnation, "parameter_servers": self.shards}
        return pod_config(role, self.folder, job=job, **place, entrypoint="test:job", **self.fields)

    def start_server(self, index, epoch):
        server = ParameterServer(self.config(Role.PS, index, epoch))

        def serve():
            self.codes[index] = server.run()

        self.servers[index], self.serving[index] = server, threading.Thread(target=serve, daemon=True)
        self.serving[index].start()

    def kill_server(self, index=0, meanwhile=lambda: None):
        """Stop it at once, without a last snapshot or a message, call `meanwhile`, and start its successor."""
        server = self.servers[index]
        server._on_fenced(Fenced("killed by the test"))
        self.serving[index].join(30)
        meanwhile()
        self.start_server(index, server.config.incarnation + 1)

    def start_worker(self, slot, incarnation=0):
        config = self.config(Role.WORKER, slot, incarnation)
        flat_model = build_flat_model(self.training, config)
        plane = ControlPlane(config, self.credentials, self.training)
        plane.start()
        drain = threading.Event()
        worker = compose(self.training, config, flat_model, plane, self.credentials, drain)
        thread = threading.Thread(target=self.run_worker, args=(slot, worker, plane), daemon=True)
        self.workers[slot] = Running(worker, plane, drain, thread, incarnation)
        thread.start()

    def run_worker(self, slot, worker, plane):
        try:
            worker.loop.run()
        except Exception as error:
            self.errors[slot] = error
        finally:
            worker.close()
            plane.close()

    def vanish(self, slot):
        """Lose the worker's machine: it sends nothing more, and a replacement starts."""
        lost = self.workers[slot]
        lost.plane.close()
        lost.worker.close()
        self.start_worker(slot, lost.incarnation + 1)

    def drain(self, slot):
        left = self.workers[slot]
        left.drain.set()
        left.thread.join(30)
        self.start_worker(slot, left.incarnation + 1)

    @property
    def coordinator(self):
        return self.servers[0].service.coordinator

    @property
    def samples(self):
        return self.servers[0].shard.history.samples

    def wait(self, condition, seconds=120):
        deadline, turn = time.monotonic() + seconds, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, (report.status(self.coordinator), self.errors)
            turn.wait(0.01)

    def finish(self):
        self.wait(lambda: self.coordinator.finished is not None)
        self.serving[0].join(30)
        return self.coordinator.finished

    def stop(self):
        for server in self.servers.values():
            server.stop()
