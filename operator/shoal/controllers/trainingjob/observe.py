"""Observes one job: everything about it at one moment, from the caches. Makes no request."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from operator import attrgetter

from shoal.api.kube import OwnedMeta
from shoal.api.labels import JOB, Place
from shoal.api.training_job import TrainingJob
from shoal.cluster.clock import loop_time
from shoal.controllers.state import ClusterState
from shoal.controllers.trainingjob.api_answers import AnswerStore
from shoal.controllers.trainingjob.claims import Claims
from shoal.policy.common.times import parse_time
from shoal.policy.model import Images, NameConflict, Observation, Proposal
from shoal.runtime.controller import Key
from shoal.telemetry.poller import Poller


class Observer:
    """Takes observations.

    `node_signals`: whether nodes can be read now; `old_pods`: whether pods cannot be, any more.
    `api_returned_seconds`: for how long the API server has been back after an outage. `no_workloads`: why Workloads of
    Kueue cannot be read now, `no_pools`: why CapacityPools cannot; empty: they can. `proposal`: what the planner
    proposes for the job with this uid.
    """

    def __init__(
        self,
        state: ClusterState,
        answers: AnswerStore,
        poller: Poller,
        claims: Claims,
        *,
        images: Images,
        node_signals: Callable[[], bool],
        old_pods: Callable[[], bool] = lambda: False,
        no_workloads: Callable[[], str] = lambda: "",
        no_pools: Callable[[], str] = lambda: "",
        api_returned_seconds: Callable[[], float | None] = lambda: None,
        proposal: Callable[[str], Proposal | None] = lambda _uid: None,
        wall: Callable[[], datetime],
    ) -> None:
        self._state = state
        self._answers = answers
        self._poller = poller
        self._claims = claims
        self._images = images
        self._node_signals = node_signals
        self._old_pods = old_pods
        self._no_workloads = no_workloads
        self._no_pools = no_pools
        self._api_returned_seconds = api_returned_seconds
        self._proposal = proposal
        self._wall = wall

    def observe(
        self, key: Key, in_flight: frozenset[Place] = frozenset(), failing: str = ""
    ) -> Observation | None:
        """The observation; None if the job does not exist, or has another controller.

        `in_flight`: places whose pods are being created. `failing`: see `Observation`.
        """
        namespace, name = key
        job = self._state.jobs.get(name, namespace)
        if job is None or not job.spec.ours:
            return None
        at = loop_time()
        uid = job.metadata.uid
        answers = self._answers.get(uid)
        pods = self._state.pods.indexed("run", (key, uid))
        services = {
            each.metadata.name: each
            for each in self._state.services.indexed("job", key)
            if each.metadata.controller_uid == uid
        }
        if answers.made_before is None:
            answers.made_before = bool(services) or bool(job.status.observed_generation)
        report, age = self._poller.latest(uid)
        unreachable, because = self._poller.unreachable(uid)
        signals = self._node_signals()
        return Observation(
            job=job,
            now=self._wall(),
            at=at,
            counted_at=answers.counted.get(job.status.counted_until),
            first_look=answers.first_look,
            unseen=answers.unseen,
            images=self._images,
            pods=tuple(sorted(pods, key=attrgetter("metadata.name"))),
            services=services,
            existing=answers.existing_names(at) | self._budgets(key, uid),
            name_conflicts=_Others(self._state, job, answers.conflicts(at)),
            workloads=tuple(
                each
                for each in self._state.workloads.indexed("job", key)
                if each.metadata.controller_uid == uid
            ),
            no_workloads=self._no_workloads(),
            flavors=self._state.flavors_by_name,
            nodes=self._state.nodes_by_name if signals else {},
            silent_nodes=self._state.silent_nodes,
            nodes_heard_again=self._state.nodes_heard_again,
            node_signals=signals,
            unread=self._state.jobs.is_unread(uid),
            old_pods=self._old_pods(),
            report=report,
            report_age=age,
            unreachable_seconds=unreachable,
            unreachable_because=because,
            failing=failing,
            refusals=answers.refusals(at),
            gone_pods=ChainMap[str, str | None](answers.gone_pods, self._state.gone_pods(uid)),
            in_flight=in_flight,
            absent_nodes=answers.absent_nodes(at),
            api_returned_seconds=self._api_returned_seconds(),
            platform=self._state.platform if signals else self._state.platform.unread,
            pools=self._state.pools_by_name,
            unreadable_pools=self._state.unreadable_pools
            if job.spec.workers.pools or job.spec.parameter_servers.pools
            else {},
            no_pools=self._no_pools(),
            proposal=self._proposal(uid),
            taken=self._claims.of_others(job) if job.spec.workers.pools else {},
            others_on=partial(self._state.others_on, uid),
        )

    def _budgets(self, key: Key, uid: str) -> frozenset[str]:
        found = self._state.budgets.indexed("job", key)
        return frozenset(each.metadata.name for each in found if each.metadata.controller_uid == uid)


class _Others(Mapping[str, NameConflict]):
    """The names that objects of other owners have, looked up when one is needed: anybody may label any number of pods.

    `told`: those of which the API server said so.
    """

    def __init__(self, state: ClusterState, job: TrainingJob, told: Mapping[str, NameConflict]) -> None:
        self._state, self._job, self._told = state, job, told

    def __getitem__(self, name: str) -> NameConflict:
        namespace = self._job.metadata.namespace
        if (pod := self._state.pods.get(name, namespace)) is not None and self._is_of_another(pod.metadata):
            return name_conflict(pod.metadata, self._job, pod.spec.node_name)
        service = self._state.services.get(name, namespace)
        if service is not None and self._is_of_another(service.metadata):
            return name_conflict(service.metadata, self._job)
        return self._told[name]

    def _is_of_another(self, found: OwnedMeta) -> bool:
        """Whether it is another owner's, and has the job's label: by this, the watch tells when it goes."""
        meta = self._job.metadata
        return found.labels.get(JOB) == meta.name and found.controller_uid != meta.uid

    def __iter__(self) -> Iterator[str]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)


def name_conflict(metadata: OwnedMeta, job: TrainingJob, node: str | None = None) -> NameConflict:
    """Describe an object of another owner that has a name of the job."""
    earlier_run = any(
        owner.controller and owner.kind == job.kind and owner.name == job.metadata.name
        for owner in metadata.owner_references
    )
    deadline = parse_time(metadata.deletion_timestamp)
    terminating = deadline is not None or earlier_run
    return NameConflict(terminating=terminating, deadline=deadline, node=node or "")
