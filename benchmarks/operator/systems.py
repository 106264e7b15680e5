"""What is compared on one control plane: Shoal, Kubeflow's TFJob and JobSet, each as a process with its jobs.

The peers are built from their Go modules in `dev/tools` when they are first needed, and nothing of them is changed:
definitions and webhooks are those of their modules. As the operator they have a token of a service account that may do
everything, log errors only, and are one replica that needs no Lease (the operator has its own).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.operator.world import OPERATOR, Operator, World, job, until, user
from dev.cluster.control_plane import OPERATOR_NAMESPACE, free_ports
from dev.kube import Json, tolerant
from dev.tools.build import ensure_apart, source_of

TRAINING_OPERATOR, JOBSET = "github.com/kubeflow/training-operator", "sigs.k8s.io/jobset"
JOB_CONTROLLER = "system:serviceaccount:kube-system:job-controller"
"""Makes the pods of a JobSet."""
FLAGS = ("--kube-api-qps=300", "--kube-api-burst=600", "--controller-threads=10")
LIMITED, TUNED = "TFJob", "TFJob tuned"
"""With the limit of requests that it comes with, 20 a second, which is what is measured then."""
QUIET = "--zap-log-level=error"
ADDRESS = "127.0.0.1"
HOOKS = "/apis/admissionregistration.k8s.io/v1/"
MOUNTED = Path("/tmp/k8s-webhook-server/serving-certs/tls.crt")
"""The training operator waits until there is such a file; it reads its certificate from below `TMPDIR`."""
MANY = 1_000_000


@dataclass(frozen=True)
class System:
    """One of those that are compared. `path`: of its jobs. `users`: who acts for it. `workers`: their label."""

    name: str
    path: str
    users: frozenset[str]
    workers: str
    job: Callable[[str, str, int], Json]
    running: Callable[[World], AbstractAsyncContextManager[Operator]]

    @property
    def plural(self) -> str:
        """The resource of its jobs."""
        return self.path.rpartition("/")[2]


def systems() -> list[System]:
    """All of them. The peers are built if they are missing."""
    training_operator = ensure_apart("training-operator", f"{TRAINING_OPERATOR}/cmd/training-operator.v1")
    jobset = ensure_apart("jobset", JOBSET)
    return [
        System(
            "Shoal",
            "/apis/shoal.dev/v1alpha1/namespaces/{}/trainingjobs",
            frozenset({OPERATOR}),
            "shoal.dev/role=worker",
            job,
            World.operator,
        ),
        *(
            System(
                name,
                "/apis/kubeflow.org/v1/namespaces/{}/tfjobs",
                frozenset({user("training-operator")}),
                "training.kubeflow.org/replica-type=worker",
                tfjob,
                partial(_training_operator, program=training_operator, flags=flags),
            )
            for name, flags in ((LIMITED, ()), (TUNED, FLAGS))
        ),
        System(
            "JobSet",
            "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
            frozenset({user("jobset"), JOB_CONTROLLER}),
            "jobset.sigs.k8s.io/replicatedjob-name=worker",
            job_set,
            partial(_jobset, program=jobset),
        ),
    ]


def versions() -> str:
    """Which peers these are, in words."""
    found = []
    for folder, module in (("training-operator", TRAINING_OPERATOR), ("jobset", JOBSET)):
        found.append(f"{module.rpartition('/')[2]} {source_of(folder, module).name.rpartition('@')[2]}")
    return ", ".join(found)


def tfjob(namespace: str, name: str, workers: int) -> Json:
    """A TFJob with one parameter server. Its workers are replaced whatever the platform ends them with.

    Without `enableDynamicWorker` it has failed where its controller happens to look while a pod is being deleted.
    """

    def replica(count: int) -> Json:
        container = {"name": "tensorflow", "image": "worker:bench"}
        template = {"spec": {"containers": [container]}}
        return {"replicas": count, "restartPolicy": "ExitCode", "template": template}

    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None"},
            "enableDynamicWorker": True,
            "tfReplicaSpecs": {"PS": replica(1), "Worker": replica(workers)},
        },
    }


def job_set(namespace: str, name: str, workers: int) -> Json:
    """A JobSet with one parameter server. No loss ends it, and each worker has a back-off of its own."""

    def replicated(role: str, count: int) -> Json:
        pod = {"restartPolicy": "Never", "containers": [{"name": role, "image": "worker:bench"}]}
        spec = {
            "parallelism": count,
            "completions": count,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": MANY,
            "template": {"spec": pod},
        }
        return {"name": role, "replicas": 1, "template": {"spec": spec}}

    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicatedJobs": [replicated("ps", 1), replicated("worker", workers)]},
    }


@asynccontextmanager
async def _training_operator(world: World, program: Path, flags: tuple[str, ...]) -> AsyncIterator[Operator]:
    source = source_of("training-operator", TRAINING_OPERATOR)
    folder, certificates = world.folder / "training-operator", "k8s-webhook-server/serving-certs"
    _certificate(world, folder / certificates)
    kubeconfig = await _kubeconfig(world, "training-operator")
    with tolerant(409):
        secret = {"metadata": {"name": "training-operator-webhook-cert"}}
        await world.kube.create(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets", secret)
    health, webhook = free_ports(2)
    command = [
        str(program),
        f"--kubeconfig={kubeconfig}",
        *("--metrics-bind-address=0", f"--health-probe-bind-address={ADDRESS}:{health}"),
        *("--enable-scheme=tfjob", f"--webhook-server-port={webhook}"),
        *(QUIET, *flags),
    ]
    environment = {"TMPDIR": str(folder), "MY_POD_NAMESPACE": OPERATOR_NAMESPACE}
    definition = source / "manifests/base/crds/kubeflow.org_tfjobs.yaml"
    world.plane.kubectl("apply", "--server-side", "-f", str(definition), timeout=300)
    hooks = _documents(source / "manifests/base/webhook/manifests.yaml")
    with _mounted():
        async with (
            _process(world, "training-operator", command, environment, health) as operator,
            _served(world, "training-operator", hooks, webhook),
        ):
            yield operator


@asynccontextmanager
async def _jobset(world: World, program: Path) -> AsyncIterator[Operator]:
    source = source_of("jobset", JOBSET) / "config/components"
    folder = world.folder / "jobset"
    _certificate(world, folder)
    health, webhook = free_ports(2)
    configuration = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": ADDRESS, "port": webhook, "certDir": str(folder)},
        "health": {"healthProbeBindAddress": f"{ADDRESS}:{health}"},
        "metrics": {"bindAddress": "0"},
    }
    (folder / "configuration.json").write_text(json.dumps(configuration))
    command = [
        str(program),
        *(
            f"--kubeconfig={await _kubeconfig(world, 'jobset')}",
            f"--config={folder}/configuration.json",
            QUIET,
        ),
    ]
    world.plane.kubectl("apply", "--server-side", "-f", str(source / "crd/bases"), timeout=300)
    hooks = _documents(source / "webhook/manifests.yaml")
    for each, words in zip(hooks, ("mutating", "validating"), strict=True):  # of pods only those of a JobSet
        for patch in yaml.safe_load((source / f"webhook/patches/{words}-patch.yaml").read_text()):
            each["webhooks"][int(patch["path"].rpartition("/")[2])] = patch["value"]
    async with (
        _process(world, "jobset", command, {}, health) as operator,
        _served(world, "jobset", hooks, webhook),
    ):
        yield operator


@asynccontextmanager
async def _process(
    world: World, name: str, command: list[str], environment: Mapping[str, str], health: int
) -> AsyncIterator[Operator]:
    """The process, once it says that it is ready; its log is in the world's folder."""
    operator = Operator(command, {**os.environ, **environment}, world.folder / f"{name}.log")

    async def ready() -> bool:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{ADDRESS}:{health}/readyz") as answer,
        ):
            return answer.status == 200

    try:
        await operator.start()
        await until(ready)
        yield operator
    finally:
        await operator.stop()


@asynccontextmanager
async def _served(world: World, name: str, configurations: list[Json], port: int) -> AsyncIterator[None]:
    """The API server asks these webhooks until the end of the block."""
    paths = []
    for configuration in configurations:
        for hook in configuration["webhooks"]:
            hook["clientConfig"] = {
                "url": f"https://{ADDRESS}:{port}{hook['clientConfig']['service']['path']}",
                "caBundle": world.plane.pki.encoded("ca.crt"),
            }
        configuration["metadata"]["name"] = f"bench-{name}"
        kind = configuration["kind"].lower() + "s"
        paths.append(f"{HOOKS}{kind}/bench-{name}")
        await world.kube.create(f"{HOOKS}{kind}", configuration)
    try:
        yield
    finally:
        for path in paths:
            await world.kube.delete(path)


async def _kubeconfig(world: World, name: str) -> Path:
    """Of a service account, with its token."""
    folder = await world.account(name)
    cluster = {"server": world.plane.server, "certificate-authority": str(folder / "ca.crt")}
    file = folder / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "bench", "cluster": cluster}],
                "users": [{"name": name, "user": {"tokenFile": str(folder / "token")}}],
                "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": name}}],
                "current-context": "bench",
            }
        )
    )
    return file


def _certificate(world: World, folder: Path) -> None:
    """Of a server on loopback, as cert-manager would mount it."""
    folder.mkdir(parents=True, exist_ok=True)
    world.plane.pki.issue("webhook", "webhook", hosts=(ADDRESS,))
    for kind in ("crt", "key"):
        (folder / f"tls.{kind}").write_bytes(Path(world.plane.pki.path(f"webhook.{kind}")).read_bytes())


def _documents(file: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


@contextmanager
def _mounted() -> Iterator[None]:
    if MOUNTED.exists():
        yield
        return
    MOUNTED.parent.mkdir(parents=True, exist_ok=True)
    MOUNTED.touch()
    try:
        yield
    finally:
        MOUNTED.unlink(missing_ok=True)
        for folder in (MOUNTED.parent, MOUNTED.parent.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()
