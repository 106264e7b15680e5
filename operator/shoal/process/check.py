"""`shoal-operator check`: whether an installation works. `helm test` runs it, with the operator's account and settings.

The API server allows the account each right of the chart's roles and serves the kinds that the operator must list, the
Lease is being renewed, and the metrics' Service leads to a ready pod. Nothing is created: rights are asked for
(SelfSubjectAccessReview). That the Lease is renewed is seen in it changing, since clocks of machines differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import aiohttp

from shoal.cluster.http import connect
from shoal.cluster.transport import Transport
from shoal.controllers.sources import sources
from shoal.errors import Unavailable
from shoal.process.operator import NEEDED

LOOK_SECONDS = 1.0
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
FORBIDDEN = 403

Fetch = Callable[[str], Awaitable[str]]
"""The text at an address; raises Unavailable."""
Role = dict[str, Any]
"""`namespace`, empty for the whole cluster, and `rules` as in RBAC, each of one API group."""


async def check(words: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="shoal-operator check")
    parser.add_argument("--namespace", default="", help="of the jobs; empty: all")
    parser.add_argument(
        "--roles", required=True, type=json.loads, help="JSON: what the operator must be allowed"
    )
    parser.add_argument("--lease", required=True)
    parser.add_argument("--metrics", required=True, help="address of the operator's metrics")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to wait for the Lease")
    given = parser.parse_args(words)
    home = os.environ.get("POD_NAMESPACE") or "default"
    transport = await connect()
    try:
        wrong = await problems(
            transport,
            _fetch,
            watched=given.namespace,
            roles=given.roles,
            lease=f"/apis/coordination.k8s.io/v1/namespaces/{home}/leases/{given.lease}",
            metrics=given.metrics,
            seconds=given.seconds,
        )
    finally:
        await transport.close()
    print("\n".join(wrong) or "the operator leads, and may do what it must")
    return 1 if wrong else 0


async def _fetch(address: str) -> str:
    try:
        async with aiohttp.ClientSession() as session, session.get(address) as answer:
            return await answer.text()
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(str(error)) from error


async def problems(
    transport: Transport,
    fetch: Fetch,
    *,
    watched: str,
    roles: Sequence[Role],
    lease: str,
    metrics: str,
    seconds: float,
) -> list[str]:
    """What is wrong; empty if nothing is. Waits for the Lease at most `seconds`.

    `watched`: the operator's namespace, empty for all; `lease`: the path of its Lease; `metrics`: an address.
    """
    wrong = await _missing_rights(transport, roles)
    found = sources(watched)
    for name in NEEDED:
        try:
            answer = await transport.request(
                "GET", found[name].path, query={**found[name].query, "limit": "1"}
            )
        except Unavailable as error:
            wrong.append(f"{name} cannot be listed: {error}")
        else:
            if not answer.ok and answer.status != FORBIDDEN:  # that is a right, told above
                wrong.append(f"{name} cannot be listed: {answer.status} {answer.message}")
    if (why := await _not_led(transport, lease, seconds)) is not None:
        wrong.append(why)
    try:
        if "shoal_leading" not in await fetch(metrics):
            wrong.append(f"{metrics} is not the operator's")
    except Unavailable as error:
        wrong.append(f"no operator answers at {metrics}: {error}")
    return wrong


async def _missing_rights(transport: Transport, roles: Sequence[Role]) -> list[str]:
    """What the account may not do, a sentence for each kind of object and namespace."""
    denied: dict[str, list[str]] = {}
    for right in (right for role in roles for right in _rights(role)):
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": right},
        }
        try:
            answer = await transport.request("POST", REVIEWS, body=body)
            answer.accept()
        except Unavailable as error:
            return [f"what the account may do cannot be asked: {error}"]
        if not json.loads(answer.body)["status"].get("allowed"):
            where = f"in the namespace {right['namespace']}" if right["namespace"] else "in the whole cluster"
            kind = "/".join(filter(None, (right["resource"], right["subresource"])))
            of = f"{kind}.{right['group']}".rstrip(".") + (f" {right['name']}" if right["name"] else "")
            denied.setdefault(f"{of} {where}", []).append(right["verb"])
    return [f"the operator's account may not {', '.join(verbs)} {what}" for what, verbs in denied.items()]


def _rights(role: Role) -> Iterator[dict[str, str]]:
    """The resource attributes of each right of a role."""
    for rule in role["rules"]:
        for full in rule["resources"]:
            resource, _, subresource = full.partition("/")
            for name in rule.get("resourceNames", [""]):
                for verb in rule["verbs"]:
                    yield {
                        "namespace": role["namespace"],
                        "group": rule["apiGroups"][0],
                        "resource": resource,
                        "subresource": subresource,
                        "name": name,
                        "verb": verb,
                    }


async def _not_led(transport: Transport, lease: str, seconds: float) -> str | None:
    """Why nobody seems to lead; None once the Lease was seen to be renewed."""
    first, why = None, "nobody holds the Lease"
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            answer = await transport.request("GET", lease)
            spec = json.loads(answer.body).get("spec", {}) if answer.ok else {}
            why = why if answer.ok else f"the Lease cannot be read: {answer.status} {answer.message}"
        except Unavailable as error:
            spec, why = {}, f"the Lease cannot be read: {error}"
        if holder := spec.get("holderIdentity"):
            seen = holder, spec.get("renewTime")
            if first is not None and seen != first:
                return None
            first, why = seen, f"{holder} does not renew the Lease"
        if asyncio.get_running_loop().time() >= deadline:
            return why
        await asyncio.sleep(LOOK_SECONDS)
