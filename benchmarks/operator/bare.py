"""The bare client: it makes the same objects, or replaces pods as they go, and nothing else. The limit of each row.

A process of its own, as the operator is: `python -m benchmarks.operator.bare make|replace …`. The objects are those
of a TrainingJob, or those of a file (`sample`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.operator.sample import KINDS, Sample
from dev.kube import Json, Kube
from shoal import manifests
from shoal.api.kube import Pod
from shoal.api.labels import ROLE
from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.credentials import InstallKey, job_credentials
from shoal.policy.actions import CreateDisruptionBudget, CreatePod, CreateSecret, CreateService
from shoal.policy.plan import plan
from tests.unit.policy import build

IN_FLIGHT = 64
STRICT = {"fieldValidation": "Strict"}
MADE = (CreatePod, CreateService, CreateSecret, CreateDisruptionBudget)


def objects(namespace: str, name: str, workers: int) -> Iterator[tuple[str, Json]]:
    """What the operator makes of one job: the kind and the body of each object, without an owner."""
    manifest = build.job_manifest(workers={"replicas": workers, "maxReplicas": workers, "capacity": "Any"})
    uid = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
    manifest["metadata"] |= {"name": name, "namespace": namespace, "uid": uid}
    job = TrainingJob.model_validate(manifest)
    made, pods = set[str](), list[Pod]()
    while actions := [
        each
        for each in plan(build.observe(job, *pods)).actions
        if isinstance(each, MADE) and each.name not in made
    ]:  # a plan begins some of a large job's pods
        for action in actions:
            made.add(action.name)
            match action:
                case CreatePod():
                    body = action.manifest
                    stored = {
                        **body["metadata"],
                        "uid": action.name,
                        "creationTimestamp": build.stamp(build.NOW),
                    }
                    pods.append(
                        Pod.model_validate({**body, "metadata": stored, "status": {"phase": "Pending"}})
                    )
                    yield "pods", _without_owner(body)
                case CreateService(_, body):
                    yield "services", _without_owner(body)
                case CreateSecret(_):
                    data = job_credentials(InstallKey(bytes(32)), uid).secret_data()
                    yield "secrets", _without_owner(manifests.secret(job, data))
                case CreateDisruptionBudget(_, body):
                    yield "poddisruptionbudgets", _without_owner(body)


def _without_owner(body: Json, **metadata: Any) -> Json:
    kept = {key: value for key, value in body["metadata"].items() if key != "ownerReferences"}
    return {**body, "metadata": {**kept, **metadata}}


def worker(namespace: str) -> Json:
    """The pod of a worker."""
    pods = (body for kind, body in objects(namespace, "bare", 1) if kind == "pods")
    return next(body for body in pods if body["metadata"]["labels"][ROLE] == "worker")


async def make(
    kube: Kube, namespace: str, jobs: int, objects_of: Callable[[str], Iterable[tuple[str, Json]]]
) -> None:
    """The objects of these jobs, `IN_FLIGHT` requests at a time."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def create(kind: str, body: Json) -> None:
        async with places:
            await kube.request("POST", KINDS[kind].format(namespace), body, params=STRICT)

    async with asyncio.TaskGroup() as tasks:
        for number in range(jobs):
            for kind, body in objects_of(f"bare-{number}"):
                tasks.create_task(create(kind, body))


async def replace(kube: Kube, namespace: str, body: Json) -> None:
    """Each pod that is deleted, or whose node is shutting down, is replaced at once; until the process is ended."""
    pods: dict[str, Json] = {}
    path = KINDS["pods"].format(namespace)
    tasks: set[asyncio.Task[Any]] = set()
    made = 0

    def post() -> None:
        nonlocal made
        made += 1
        fresh = {**body, "metadata": {**body["metadata"], "name": f"replacement-{made}"}}
        task = asyncio.create_task(kube.request("POST", path, fresh, params=STRICT))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def follow_pods(version: str) -> None:
        async for kind, pod in kube.watch(path, resourceVersion=version):
            if kind == "DELETED":
                if pods.pop(pod["metadata"]["name"], None) is not None:
                    post()
            elif kind != "BOOKMARK":
                pods[pod["metadata"]["name"]] = pod

    async def follow_nodes(version: str) -> None:
        told: set[str] = set()
        async for kind, node in kube.watch("/api/v1/nodes", resourceVersion=version):
            name = node["metadata"].get("name", "")
            if kind == "BOOKMARK" or name in told or not _is_leaving(node):
                continue
            told.add(name)
            for pod in list(pods.values()):
                if pod["spec"].get("nodeName") == name:
                    post()

    listed = await kube.get(path)
    pods |= {pod["metadata"]["name"]: pod for pod in listed["items"]}
    nodes = await kube.get("/api/v1/nodes")
    async with asyncio.TaskGroup() as group:
        group.create_task(follow_pods(listed["metadata"]["resourceVersion"]))
        group.create_task(follow_nodes(nodes["metadata"]["resourceVersion"]))
        print(json.dumps({"pods": len(pods)}), flush=True)


def _is_leaving(node: Json) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "False" for each in conditions)


async def _main(options: argparse.Namespace) -> None:
    like = Sample.read(options.like) if options.like else None
    space = options.namespace
    async with Kube(options.kubeconfig) as kube:
        if options.what == "replace":
            await replace(kube, space, like.worker if like else worker(space))
        else:
            ours = partial(objects, space, workers=options.workers)
            await make(kube, space, options.jobs, like.renamed if like else ours)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "replace"])
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--like", type=Path, help="a file with the objects of one job")
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
