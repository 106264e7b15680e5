"""tf.distribute.ParameterServerStrategy on the same models, written in its favour.

Plain variables, the fused update operation on the parameter server, the queue kept full. Its gRPC servers always listen
on every interface, so the whole cluster runs in a new network namespace and fails where none can be made.

As a script: `python -m benchmarks.strategy_peer '{"model": "resnet110", …}'` prints one JSON line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Case:
    """`spans` measurements: `step_seconds` makes the step a sleep of that length instead of compute."""

    model: str
    workers: int
    batch: int = 4
    parameter_servers: int = 1
    steps_per_closure: int = 1
    step_seconds: float = 0.0
    seconds: float = 20.0
    spans: int = 1
    base_port: int = 21000


@dataclass(frozen=True)
class Outcome:
    """`rate` in steps/s of all workers; CPU time in seconds per step; memory of a PS process in bytes."""

    rate: float
    ps_cpu: float
    worker_cpu: float
    ps_memory: int


def in_namespace(command: list[str]) -> list[str]:
    """The command in a new network namespace with only a loopback."""
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    return ["unshare", *user, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def run(case: Case) -> list[Outcome]:
    """Measure a case in a separate process. Raises RuntimeError with its output if it fails."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = in_namespace([sys.executable, "-m", "benchmarks.strategy_peer", json.dumps(asdict(case))])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if not lines:
        raise RuntimeError(f"ParameterServerStrategy did not finish: {done.stderr[-2000:]}")
    return [Outcome(**span) for span in json.loads(lines[-1])]


def cluster_spec(case: Case) -> dict[str, list[str]]:
    """Addresses of the chief, the parameter servers and the workers."""

    def at(offset: int, count: int) -> list[str]:
        return [f"127.0.0.1:{case.base_port + offset + i}" for i in range(count)]

    return {"chief": at(0, 1), "ps": at(1, case.parameter_servers), "worker": at(20, case.workers)}


def serve(spec: dict[str, list[str]], job: str, index: int) -> None:
    """Run one server process, with one intra-op thread as in our workers."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)
    tf.distribute.Server(
        tf.train.ClusterSpec(spec), job_name=job, task_index=index, protocol="grpc", config=config, start=True
    ).join()


@contextlib.contextmanager
def servers(spec: dict[str, list[str]]) -> Iterator[dict[str, list[psutil.Process]]]:
    """All servers as child processes."""
    started: list[subprocess.Popen[bytes]] = []
    processes: dict[str, list[psutil.Process]] = {"ps": [], "worker": []}
    try:
        for job, members in processes.items():
            for index in range(len(spec[job])):
                arguments = json.dumps({"spec": spec, "job": job, "index": index})
                child = subprocess.Popen([sys.executable, "-m", "benchmarks.strategy_peer", arguments])
                started.append(child)
                members.append(psutil.Process(child.pid))
        yield processes
    finally:
        for child in started:
            child.kill()
        for child in started:
            child.wait()


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """User and system time so far."""
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def measure(case: Case) -> list[Outcome]:
    """Run the chief: connect, warm up, keep the queue full for about `case.seconds`, `case.spans` times."""
    import tensorflow as tf

    spec = cluster_spec(case)
    with servers(spec) as processes:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(4)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        model = build_model(case)
        closure = training_closure(case, model, *sharded_variables(strategy, model))
        dataset = functools.partial(random_dataset, case, model.input_shape[1:])
        iterator = iter(coordinator.create_per_worker_dataset(dataset))

        def run_closures(closures: int) -> float:
            start = time.perf_counter()
            for _ in range(closures):
                coordinator.schedule(closure, args=(iterator,))
            coordinator.join()
            return time.perf_counter() - start

        run_closures(2 * case.workers)
        warm_up = run_closures(4 * case.workers)
        closures = max(2 * case.workers, round(4 * case.workers / warm_up * case.seconds))
        steps = closures * case.steps_per_closure

        def span() -> Outcome:
            before = {job: cpu_seconds(members) for job, members in processes.items()}
            elapsed = run_closures(closures)
            spent = {job: cpu_seconds(members) - before[job] for job, members in processes.items()}
            memory = max(p.memory_info().rss for p in processes["ps"])
            return Outcome(steps / elapsed, spent["ps"] / steps, spent["worker"] / steps, memory)

        return [span() for _ in range(case.spans)]


def build_model(case: Case) -> Any:
    """The Keras model of the case."""
    from benchmarks import models

    return models.mlp() if case.model == "mlp" else models.resnet(int(case.model.removeprefix("resnet")))


def sharded_variables(strategy: Any, model: Any) -> tuple[list[Any], list[Any]]:
    """The trainable variables and their momenta, on the parameter servers."""
    import tensorflow as tf

    initial = [v.numpy() for v in model.trainable_variables]
    with strategy.scope():
        variables = [tf.Variable(v) for v in initial]
        momenta = []
        for v in variables:
            with strategy.extended.colocate_vars_with(v):
                momenta.append(tf.Variable(tf.zeros(v.shape)))
    return variables, momenta


def training_closure(case: Case, model: Any, variables: list[Any], momenta: list[Any]) -> Any:
    """The function that a worker runs: pull, compute the gradients (or sleep), update, `steps_per_closure` times."""
    import tensorflow as tf

    frozen = [tf.constant(v.numpy()) for v in model.non_trainable_variables]

    def gradients(values: list[Any], iterator: Any) -> list[Any]:
        if case.step_seconds:
            with tf.control_dependencies(values):
                slept = sleep_op(tf.identity(tf.reshape(values[0], [-1])[0]) * 0.0, case.step_seconds)
            with tf.control_dependencies([slept]):
                return [tf.identity(v) for v in values]  # as in `jobs.sleeping`: no work for the host
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            tape.watch(values)
            logits, _ = model.stateless_call(values, frozen, x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        computed: list[Any] = tape.gradient(loss, values)
        return computed

    @tf.function  # type: ignore[untyped-decorator]
    def closure(iterator: Any) -> None:
        for _ in tf.range(case.steps_per_closure):
            values = [tf.convert_to_tensor(v) for v in variables]
            for v, m, g in zip(variables, momenta, gradients(values, iterator), strict=True):
                with tf.device(v.device):
                    tf.raw_ops.ResourceApplyKerasMomentum(
                        var=v.handle, accum=m.handle, lr=0.01, grad=g, momentum=0.9
                    )

    return closure


def random_dataset(case: Case, shape: tuple[int, ...]) -> Any:
    """Random samples, cached and repeated."""
    import tensorflow as tf

    x = tf.random.stateless_normal((case.batch * 8, *shape), (1, 2))
    y = tf.random.stateless_uniform((case.batch * 8,), (3, 4), 0, 10, tf.int32)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(case.batch, drop_remainder=True)
    return batches.cache().repeat().prefetch(2)


def sleep_op(after: Any, seconds: float) -> Any:
    """A TensorFlow operation that sleeps for `seconds` after `after`."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing  # TensorFlow's only sleeping op

    # It sleeps at each request, and a single element takes two requests: the second finds the end.
    dataset = testing.sleep(int(seconds * 5e5))(tf.data.Dataset.from_tensors(after))
    return tf.raw_ops.DatasetToSingleElement(
        dataset=dataset._variant_tensor, output_types=[tf.float32], output_shapes=[None]
    )[0]


def main() -> None:
    """Run a server, or the chief of a case."""
    arguments = json.loads(sys.argv[1])
    if "job" in arguments:
        serve(arguments["spec"], arguments["job"], arguments["index"])
        return
    print(json.dumps([asdict(span) for span in measure(Case(**arguments))]), flush=True)
    os._exit(0)  # its threads outlive the strategy


if __name__ == "__main__":
    main()
