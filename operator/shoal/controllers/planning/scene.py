"""What a plan is made from: taken from the caches on the event loop, made into the planner's values off it.

To take it costs microseconds for each job, pool and profile; to read them takes up to milliseconds for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.cores import Cores
from shoal.controllers.planning.paces import Paces
from shoal.controllers.planning.priorities import Priorities
from shoal.controllers.planning.progress import Progress
from shoal.controllers.speedprofile.learn import newest
from shoal.controllers.speedprofile.reconcile import Known, Learner
from shoal.controllers.state import ClusterState
from shoal.manifests.placement import ZONE
from shoal.manifests.pods import Images, has_gpu_image
from shoal.policy.decide.homes import in_zone
from shoal.runtime.controller import Key, key_of
from shoal.sizing.fleet import FleetJob, FleetPool
from shoal.sizing.fleet.jobs import fleet_job, server_price
from shoal.sizing.fleet.resources import fleet_pool
from shoal.sizing.fleet.work import samples_per_epoch
from shoal.telemetry.poller import Poller
from shoal_trainer.contract import StatusReport

SILENT_SECONDS = 300.0
"""A report older than this says nothing of the speed of now. Its work left is the newest that is known."""
MOST_ROWS_READ = 8192
"""Rows of SpeedProfiles of one namespace that a plan reads, 16 of the largest: everybody's plan waits for that."""


@dataclass(frozen=True)
class Look:
    """One job that is to be planned."""

    job: TrainingJob
    report: StatusReport | None
    reported_at: float
    """On the loop's clock."""
    pods: Sequence[Pod]
    profile: Key
    """Of its model."""


@dataclass(frozen=True)
class Scene:
    """Everything at one moment. Nothing in it changes."""

    now: datetime
    at: float
    """`now` on the loop's clock."""
    looks: Sequence[Look]
    jobs: Sequence[TrainingJob]
    """All that exist, planned or not."""
    pools: Mapping[str, CapacityPool]
    nodes: Mapping[str, Node]
    profiles: Mapping[Key, Known]
    unread: Mapping[Key, str]
    """Why other profiles are not read."""
    images: Images
    """Of pods whose template names none."""
    priorities: Priorities
    cores: Cores
    """Remembers those of pools without a node."""

    def pool(self, pool: CapacityPool) -> FleetPool:
        """A pool as the planner sees it, with the cores of its nodes where its spec does not say them."""
        values = fleet_pool(pool, self.now)
        return values if values.cores else replace(values, cores=self._cores.get(pool.metadata.name, 0.0))

    @cached_property
    def _cores(self) -> Mapping[str, float]:
        """Of the nodes of each pool."""
        return self.cores.see(self.pools, self.nodes)

    def job(self, look: Look, profile: SpeedProfile | None, progress: Progress, paces: Paces) -> FleetJob:
        """A job as the planner sees it. `progress` and `paces` remember what it did before, and hear of it."""
        progress.observe(look.job, look.report, samples_per_epoch(look.job, profile, look.report))
        silent = look.report is not None and self.at - look.reported_at > SILENT_SECONDS
        planned = fleet_job(
            look.job,
            profile,
            self.now,
            look.report,
            server_price=server_price(look.job, self.pools),
            priority=self.priorities.of(look.job, look.pods),
            watched=paces.observe(look.job, None if silent else look.report, look.reported_at),
        )
        zone = self._zone(look)
        return replace(
            planned,
            pools=self._near(look, zone) or planned.pools,
            gpu_image=has_gpu_image(look.job, self.images),
            servers_zone=zone,
            silent=silent,
        )

    def _zone(self, look: Look) -> str:
        """Where parameter server 0 is, which nothing moves; until it has a node, where all of its pools are."""
        there = ((pod.place, pod.spec.node_name or "") for pod in look.pods if pod.place and not pod.ended)
        servers = sorted((pair for pair in there if pair[0].is_coordinator), reverse=True)  # the newest first
        nodes = (self.nodes.get(name) for _, name in servers)
        named = look.job.spec.parameter_servers.pools
        zones = {self.pools[name].spec.zone for name in named if name in self.pools}
        to_be = zones.pop() if len(zones) == 1 else ""
        return next((node.metadata.labels.get(ZONE, "") for node in nodes if node is not None), to_be)

    def _near(self, look: Look, zone: str) -> tuple[str, ...]:
        """The pools that workers may go to: with `zonePolicy` Same, those in the zone of the servers."""
        spec = look.job.spec.workers
        near = in_zone(self.pools, zone if spec.zone_policy == "Same" else "")
        return tuple(name for name in spec.pools if name in near or name not in self.pools)


def take(
    state: ClusterState,
    poller: Poller,
    learner: Learner,
    images: Images,
    priorities: Priorities,
    cores: Cores,
    now: datetime,
    at: float,
) -> Scene:
    """Take the scene. `at`: `now` on the loop's clock."""
    jobs = list(state.jobs.all())
    looks = []
    for job in jobs:
        if not is_planned(job):
            continue
        report, age = poller.latest(job.metadata.uid)
        fingerprint = report.model.fingerprint if report is not None and report.model is not None else ""
        profile = job.metadata.namespace, learner.name_of(job, fingerprint)
        pods = state.pods.indexed("run", (key_of(job), job.metadata.uid))
        looks.append(Look(job, report, at - age, pods, profile))
    every = {key: learner.known(key) for key in learner.keys} if looks else {}
    asked = {look.profile for look in looks}
    known, unread = read_profiles(every, asked)
    pools, nodes = dict(state.pools_by_name), dict(state.nodes_by_name)
    return Scene(now, at, looks, jobs, pools, nodes, known, unread, images, priorities, cores)


def read_profiles(
    every: Mapping[Key, Known], asked: Collection[Key]
) -> tuple[dict[Key, Known], dict[Key, str]]:
    """Those that a plan reads, and why it reads no others: what their namespace measured before.

    Of each namespace as many as have `MOST_ROWS_READ` rows, those of planned jobs first, and then the newest.
    """
    known, unread, rows = dict[Key, Known](), dict[Key, str](), Counter[str]()
    for key, each in sorted(
        every.items(), key=lambda pair: (pair[0] in asked, newest(pair[1].profile)), reverse=True
    ):
        if key not in asked and each.is_forgotten:
            continue
        has = len(each.profile.spec.rows) + len(each.profile.status.rows)
        rows[key[0]] += has
        if has and rows[key[0]] > MOST_ROWS_READ:
            unread[key] = (
                f"with newer ones its namespace has {rows[key[0]]:,} rows of speeds, of which {MOST_ROWS_READ:,} are"
                " read"
            )
        else:
            known[key] = each
    return known, unread


def is_planned(job: TrainingJob) -> bool:
    """Whether a job is planned: one that names pools, and runs or is to."""
    return (
        bool(job.spec.workers.pools)
        and not job.status.finished
        and not job.spec.suspend
        and job.metadata.deletion_timestamp is None
        and job.spec.ours
    )
