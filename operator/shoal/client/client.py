"""`Client`: the jobs of one namespace of one cluster."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from shoal.api.base import API_VERSION
from shoal.api.capacity_pool import CapacityPool
from shoal.api.mistakes import advice
from shoal.api.speed_profile import SpeedProfile
from shoal.client import store
from shoal.client.api import Api, Json, read_as
from shoal.client.job import Job
from shoal.client.manifest import Manifests, Submission, manifests
from shoal.errors import ClusterError, Forbidden, NotFound, Refused, Unavailable, UsageError

log = logging.getLogger(__name__)

JOBS = f"/apis/{API_VERSION}/namespaces/{{namespace}}/trainingjobs"
POOLS = f"/apis/{API_VERSION}/capacitypools"


class Client:
    """The cluster that kubectl uses.

    Args:
        namespace: Where jobs are. Default: that of the kubeconfig's context.
        kubeconfig: A kubeconfig file. Default: KUBECONFIG, ~/.kube/config, or the service account of a pod.
        context: A context of it. Default: the current one.

    It connects when it is first used, and then raises `Unavailable` if there is no cluster to talk to.
    """

    def __init__(
        self, namespace: str | None = None, *, kubeconfig: str | None = None, context: str | None = None
    ) -> None:
        self._where = kubeconfig, context, namespace
        self._unread: set[str] = set()

    @cached_property
    def api(self) -> Api:
        """The API server."""
        return Api.connect(*self._where)

    @property
    def namespace(self) -> str:
        """The namespace of the jobs."""
        return self.api.namespace

    def submit(self, entrypoint: str, *, storage: str, **more: Any) -> Job:
        """Create a job and return at once.

        Args:
            entrypoint: `digits.py:job`, a file that travels with the job, or `digits:job`, a module of the image.
            storage: `s3://bucket/folder`, `gs://bucket/folder`, `claim:NAME` or `ephemeral`.
            more: As for `prepare`.

        Raises:
            UsageError: an argument is wrong.
            Refused: the API server does not take the job; its words say why.
        """
        return self.create(self.prepare(entrypoint, storage=storage, **more))

    def prepare(
        self, entrypoint: str, *, storage: str, accelerator: str | None = None, **more: Any
    ) -> Manifests:
        """The manifests that `submit` creates, where the code gets a name that is free.

        Args:
            entrypoint: As for `submit`.
            storage: As for `submit`.
            accelerator: Of the workers' nodes, such as "L4": they run on the CapacityPools that have it, of the kind
                that `capacity` names: those of `pools`, if given; else spot nodes first, then by price.
            more: `workers` (1), `image` (the operator's, which has Keras and no other packages of yours), `args` (a
                dict of JSON values), `files` (more code to send along), `pools` (CapacityPools by name), `capacity`,
                `max_workers`, `epochs`, `steps`, `until` (metric, value), `mode` ("Min" or "Max": where the
                metric is one of your own), `batch_size` (32), `parameter_servers`, `deadline_seconds`, `max_cost`,
                `run`, `initial_from` (the folder of another run), `weights_only`, `snapshot_seconds`,
                `max_staleness`, `tls`, `name`, `template` (a pod template, as a dict or a YAML file, for what has
                no argument: service account, env, resources; of both roles, but for their containers `ps` and
                `worker`).

        Raises:
            UsageError: an argument is wrong.
        """
        try:
            wanted = Submission(entrypoint=entrypoint, storage=storage, **more)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, each['loc']))}: {advice(each)}" for each in error.errors())
            raise UsageError(f"submit(): {'; '.join(wrong)}") from error
        if accelerator is not None:
            wanted = replace(wanted, pools=self._pools_of(accelerator, wanted), capacity=None)
        return manifests(wanted)

    def create(self, made: Manifests) -> Job:
        """Create the objects of a job. The ConfigMap of the code belongs to the job and is deleted with it.

        The job comes first, so that its ConfigMap is never without an owner; its pods wait for it as for an image.

        Raises:
            Refused: the API server does not take the job, or its code; then there is neither.
            UsageError: its storage is a claim, or its pools are CapacityPools, that do not exist.
            Unavailable: the API server does not answer; the message says if the job may be there all the same. Or the
                storage does not, to which the code goes.
        """
        made = made.with_new_code()
        for path, each in self._objects(made):
            self.api.create(path, each, dry_run=True)  # so a job of this name that is found later is this one
        self._must_have_claim(made)
        self._must_have_pools(made)
        if made.archive is not None:
            store.put(made.job["spec"]["storage"]["uri"], self.namespace, made.archive)
        mine, created = Job(self.api, made.name).path, None
        try:
            (jobs, _), *code = self._objects(made)
            created = self._create(jobs, made.job)
            uid = created["metadata"]["uid"]
            owner = {"apiVersion": API_VERSION, "kind": "TrainingJob", "name": made.name, "uid": uid}
            for path, each in code:
                self._create(path, {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}})
        except (ClusterError, KeyboardInterrupt) as error:
            if created is None and not isinstance(error, KeyboardInterrupt):
                raise
            try:
                self.api.delete(mine, created["metadata"]["uid"] if created is not None else None)
            except (ClusterError, KeyboardInterrupt) as kept:
                if isinstance(kept, (NotFound, Refused)) and not isinstance(kept, Forbidden):
                    raise error from None  # it is gone; what has its name now is another one
                left = f"{made.name} may be there, without its code: shoal delete {made.name} -n {self.namespace}"
                if isinstance(error, ClusterError):
                    raise type(error)(f"{str(error).rstrip('.')}. {left}") from error
                log.warning(left)
            raise
        return Job(self.api, made.name, manifest=created)

    def _create(self, path: str, manifest: Json) -> Json:
        """Create an object of a new name. Where the answer is lost, what is there says whether it was created."""
        name = manifest["metadata"]["name"]
        try:
            return self.api.create(path, manifest)
        except Unavailable as error:
            try:
                return self.api.get(f"{path}/{name}")
            except NotFound:
                raise error from None
            except ClusterError:
                raise Unavailable(
                    f"{error} Whether {name} was created is not known: shoal list shows it"
                ) from error

    def check(self, made: Manifests) -> None:
        """Ask the API server whether it would take the job and its code; nothing is created.

        Raises:
            Refused: it would not.
            Forbidden, NotFound, Unavailable: it cannot be asked.
        """
        # By another name: a job of this name may be there, whose manifest this is.
        name = f"dry-run-{secrets.token_hex(4)}"
        for path, each in self._objects(made):
            self.api.create(path, {**each, "metadata": {**each["metadata"], "name": name}}, dry_run=True)

    def _objects(self, made: Manifests) -> list[tuple[str, Json]]:
        """What is to be created, and where: the job, then its code if it is a ConfigMap."""
        found = [(JOBS.format(namespace=self.namespace), made.job)]
        if made.code is not None:
            found.append((f"/api/v1/namespaces/{self.namespace}/configmaps", made.code))
        return found

    def _must_have_claim(self, made: Manifests) -> None:
        """Raise UsageError if the claim of the storage does not exist. Who may not read claims is not asked."""
        name = (made.job["spec"]["storage"].get("volumeClaim") or {}).get("name")
        if name is None:
            return
        try:
            known = self.claims()
        except (NotFound, Refused):
            return
        if name not in known:
            there_are = f"it has {', '.join(known[:20])}" if known else "it has none"
            raise UsageError(
                f"the namespace {self.namespace} has no PersistentVolumeClaim {name!r}: {there_are}. Create it "
                "(examples/digits.yaml has one), or choose another --storage"
            )

    def _must_have_pools(self, made: Manifests) -> None:
        """Raise UsageError if the job names a CapacityPool that does not exist. Who may not read them is not asked."""
        named = made.job["spec"]["workers"].get("pools") or []
        try:
            known = [each.metadata.name for each in self.pools()] if named else []
        except (NotFound, Refused):
            return
        if missing := [name for name in named if name not in known]:
            there_are = f"there are {', '.join(known[:20])}" if known else "there is none"
            raise UsageError(
                f"the cluster has no CapacityPool {', '.join(missing)}: {there_are}. Create it (docs/pools.md), or "
                "name others (pools=…, --pool)"
            )

    def job(self, name: str) -> Job:
        """One job. Raises NotFound, and names similar ones."""
        job = Job(self.api, name)
        try:
            job.read()  # what cannot be understood of it is told to who needs it
        except NotFound as error:
            try:
                known = self.names()
            except Forbidden:  # who may read only jobs that a role names
                raise NotFound(f"no job {name!r}") from error
            where = f"the namespace {self.namespace}"
            hint = (
                f"{where} has {', '.join(known[:20])}"
                if known
                else f"{where} has no jobs; another is chosen with -n"
            )
            raise NotFound(f"no job {name!r}: {hint}") from error
        return job

    def list(self, *, all_namespaces: bool = False, cached: bool = False) -> list[Job]:
        """The jobs, by namespace and name. One that this version cannot read is left out, which is logged once.

        Args:
            all_namespaces: Of all of them.
            cached: As the API server remembers them, which costs it little: for what asks again and again.

        Raises:
            NotFound: there is no such namespace.
        """
        manifests = self._manifests(all_namespaces=all_namespaces, cached=cached)
        found = [job for each in manifests if (job := self._read(each)) is not None]
        return sorted(found, key=lambda job: (job.namespace, job.name))

    def names(self) -> Sequence[str]:
        """The names of the jobs, as the API server remembers them; also of those that cannot be read.

        Raises:
            NotFound: there is no such namespace.
        """
        return sorted(each["metadata"]["name"] for each in self._manifests(cached=True))

    def _manifests(self, *, all_namespaces: bool = False, cached: bool = False) -> Sequence[Json]:
        path = (
            f"/apis/{API_VERSION}/trainingjobs" if all_namespaces else JOBS.format(namespace=self.namespace)
        )
        found = self.api.list(path, **({"resourceVersion": "0"} if cached else {}))
        if not found and not all_namespaces:
            with contextlib.suppress(Forbidden):  # a list of a namespace that does not exist is empty
                self.api.get(f"/api/v1/namespaces/{self.namespace}")
        return found

    def _read(self, manifest: Json) -> Job | None:
        try:
            return Job.of(self.api, manifest)
        except UsageError as error:
            if (words := str(error)) not in self._unread:
                self._unread.add(words)
                log.warning("%s. It is left out.", words)
            return None

    def claims(self) -> Sequence[str]:
        """The names of the PersistentVolumeClaims of the namespace."""
        path = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims"
        return sorted(each["metadata"]["name"] for each in self.api.list(path))

    def pools(self) -> Sequence[CapacityPool]:
        """The CapacityPools of the cluster."""
        return sorted(
            (read_as(CapacityPool, each) for each in self.api.list(POOLS)),
            key=lambda pool: pool.metadata.name,
        )

    def profiles(self, namespace: str | None = None) -> Sequence[SpeedProfile]:
        """The SpeedProfiles of a namespace. Default: that of the jobs."""
        path = f"/apis/{API_VERSION}/namespaces/{namespace or self.namespace}/speedprofiles"
        return [read_as(SpeedProfile, each) for each in self.api.list(path)]

    def _pools_of(self, accelerator: str, wanted: Submission) -> Sequence[str]:
        """The names of the pools with this accelerator and capacity: as given, or what costs least first."""
        kinds = {"Spot", "OnDemand"} if wanted.capacity in {None, "Any"} else {wanted.capacity}
        pools = [
            each
            for each in self.pools()
            if each.spec.capacity_type in kinds and (not wanted.pools or each.metadata.name in wanted.pools)
        ]
        matching = [
            each.metadata.name
            for each in sorted(pools, key=_costs_less)
            if each.spec.accelerator and each.spec.accelerator.name.lower() == accelerator.lower()
        ]
        if not matching:
            known = sorted({each.spec.accelerator.name for each in pools if each.spec.accelerator})
            there_are = f"there are {', '.join(known)}" if known else "there is none with an accelerator"
            of = f" of {wanted.capacity} nodes" if len(kinds) == 1 else ""
            raise UsageError(
                f"no CapacityPool{of} has the accelerator {accelerator}: {there_are}. Create one, or name pools "
                "(pools=…, --pool)"
            )
        return [name for name in wanted.pools or matching if name in matching]


def _costs_less(pool: CapacityPool) -> tuple[bool, float, str]:
    """Spot nodes first, then by the price of one accelerator; a pool without a price after those that have one."""
    price, accelerator = pool.spec.price, pool.spec.accelerator
    each = price.per_hour / (accelerator.count if accelerator else 1) if price else math.inf
    return pool.spec.capacity_type != "Spot", each, pool.metadata.name
