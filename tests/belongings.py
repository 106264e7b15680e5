"""What a job that runs has beside its pods: a Service of each shard that leads to its server, a budget, a Secret.

Read from the API server's objects alone, whoever made them: workers reach a shard by its Service only, so that one
which leads to a pod that is gone ends the training while every pod runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]
KINDS = ("services", "poddisruptionbudgets", "secrets")


def lacking(job: Json, pods: Sequence[Json], found: Mapping[str, Sequence[Json]]) -> list[str]:
    """What is not as it must be while a job's servers run, in words. `found`: objects of each of `KINDS`."""
    mine = {kind: [each for each in found[kind] if _owner(each) == job["metadata"]["uid"]] for kind in KINDS}
    shards = job["spec"].get("parameterServers", {}).get("replicas", 1)
    servers = [pod for pod in pods if _owner(pod) == job["metadata"]["uid"] and _label(pod, "role") == "ps"]
    wrong = [
        f"{len(mine[kind])} of {number} {kind}"
        for kind, number in zip(KINDS, (shards, 1, 1), strict=True)
        if len(mine[kind]) != number
    ]
    for service in mine["services"]:
        name, selector = service["metadata"]["name"], service["spec"]["selector"]
        led_to = [pod for pod in pods if _selects(selector, pod)]
        shard = _label(service, "index")
        if [_label(pod, "index") for pod in led_to if _works(pod) and pod in servers] != [shard]:
            names = [pod["metadata"]["name"] for pod in led_to]
            wrong.append(f"{name} leads to {names}, and not to the server of shard {shard}: {selector}")
    for budget in mine["poddisruptionbudgets"]:
        kept, selector = budget["spec"]["minAvailable"], budget["spec"]["selector"]["matchLabels"]
        covered = [pod for pod in pods if _selects(selector, pod)]
        if kept != shards or covered != servers:
            names = [pod["metadata"]["name"] for pod in covered]
            wrong.append(f"{budget['metadata']['name']} keeps {kept} of {names}, and not {shards} servers")
    return wrong


def _selects(selector: Mapping[str, str], pod: Json) -> bool:
    return bool(selector) and selector.items() <= pod["metadata"].get("labels", {}).items()


def _works(pod: Json) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def _label(each: Json, name: str) -> str:
    return str(each["metadata"].get("labels", {}).get(f"shoal.dev/{name}", ""))


def _owner(each: Json) -> str:
    return str((each["metadata"].get("ownerReferences") or [{}])[0].get("uid", ""))
