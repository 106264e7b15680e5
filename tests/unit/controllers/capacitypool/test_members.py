"""What is kept of pools as nodes, jobs and pools change is what a look at all of them finds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dev.night import examples
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool import selectors
from shoal.controllers.capacitypool.members import Members
from shoal.controllers.capacitypool.selectors import selects
from shoal.controllers.state import ClusterState, Wakes
from shoal.controllers.trainingjob.claims import holdings
from tests.unit.policy import build

NAMES = st.sampled_from(["a", "b", "c"])
LABELS = st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from(["x", "y"]))
COUNTS = st.dictionaries(NAMES, st.integers(0, 3))


class Changes(RuleBasedStateMachine):
    """Nodes, pools and jobs come, change, go, and come again under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[str] = set()
        self.members = Members(self.told.add)
        self.before: dict[str, object] = {}
        self.state = ClusterState(Wakes())
        self.state.on_node.append(self.members.see_node)
        self.state.on_pool.append(self.members.see_pool)
        self.state.on_job.append(self.members.see_job)
        self.version = 0

    def metadata(self, name: str, again: bool) -> dict[str, Any]:
        self.version += 1
        return {
            "name": name,
            "uid": f"{name}-{self.version if again else 0}",
            "resourceVersion": str(self.version),
        }

    @rule(name=NAMES, labels=LABELS, again=st.booleans())
    def node(self, name: str, labels: dict[str, str], again: bool) -> None:
        self.state.nodes.put(
            Node.model_validate({"metadata": {**self.metadata(name, again), "labels": labels}})
        )

    @rule(name=NAMES, selector=LABELS, again=st.booleans())
    def pool(self, name: str, selector: dict[str, str], again: bool) -> None:
        spec = {"nodeSelector": selector, "limits": {"nodes": 3}}
        found = CapacityPool.model_validate({"metadata": self.metadata(name, again), "spec": spec})
        self.state.pools.put(found)

    @rule(
        name=NAMES,
        used=COUNTS,
        planned=COUNTS,
        slots=st.lists(NAMES, max_size=3),
        again=st.booleans(),
        by=st.sampled_from([None, "kueue.x-k8s.io/multikueue"]),
    )
    def job(
        self,
        name: str,
        used: dict[str, int],
        planned: dict[str, int],
        slots: list[str],
        again: bool,
        by: str | None,
    ) -> None:
        manifest = build.job_manifest(elasticity={"mode": "Auto"}, managedBy=by)
        manifest["metadata"] |= self.metadata(name, again)
        status = {
            "poolUsage": {pool: {"starts": count} for pool, count in used.items()},
            "plan": {"pools": planned},
            "slots": [{"index": index, "pool": pool} for index, pool in enumerate(slots)],
        }
        self.state.jobs.put(TrainingJob.model_validate({**manifest, "status": status}))

    @rule(kind=st.sampled_from(["nodes", "pools", "jobs"]), name=NAMES)
    def go(self, kind: str, name: str) -> None:
        cache = getattr(self.state, kind)
        found = cache.get(name, "team" if kind == "jobs" else "")
        if found is not None:
            cache.drop(found.metadata.uid)

    @invariant()
    def nodes_are_those_that_match(self) -> None:
        pools = list(self.state.pools.all())
        of = {
            pool.metadata.name: {
                n.metadata.name
                for n in self.state.nodes.all()
                if selects(pool.spec.node_selector, n.metadata.labels)
            }
            for pool in pools
        }
        of_pools = {pool.metadata.name: pool.spec.node_selector for pool in pools}
        for name, nodes in of.items():
            others = {other for other, theirs in of.items() if other != name and theirs & nodes}
            assert self.members.nodes(name) == nodes
            assert self.members.sharing(name) == others
            selector = of_pools[name]
            related = {o for o, s in of_pools.items() if selects(s, selector) or selects(selector, s)}
            assert self.members.rivals(name) == others | related - {name}
        assert not any(self.members.nodes(name) for name in "abc" if name not in of)

    @invariant()
    def jobs_are_those_that_use_it(self) -> None:
        jobs = list(self.state.jobs.all())
        for name in "abc":
            held = {f"team/{job.metadata.name}": count for job in jobs if (count := holdings(job)[name])}
            assert self.members.held(name) == held
            ours = [job for job in jobs if job.spec.ours]  # what others used was in another cluster
            using = {job.metadata.uid for job in ours if name in job.status.pool_usage}
            found = {job.metadata.uid: job for job in self.members.jobs(name)}
            assert using <= found.keys() <= {job.metadata.uid for job in ours}
            assert all(self.state.jobs.by_uid(uid) is job for uid, job in found.items())

    @invariant()
    def what_changed_is_told(self) -> None:
        now: dict[str, object] = {
            name: (set(self.members.nodes(name)), self.members.held(name)) for name in "abc"
        }
        changed = {name for name in "abc" if now[name] != self.before.get(name, (set(), {}))}
        assert changed <= self.told
        self.before = now
        self.told.clear()


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=examples(100), deadline=None)


def test_a_node_is_compared_with_the_pools_of_its_labels_and_a_pool_with_those_that_ask_for_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each was compared with all: of 1,000 pools and 5,000 nodes the looks alone took a quarter of a core."""
    compared = list[object]()
    monkeypatch.setattr(selectors, "selects", lambda *pair: compared.append(pair) or selects(*pair))
    members = Members()
    for number in range(100):
        spec = {"nodeSelector": {"zone": "z", "pool": str(number)}, "limits": {"nodes": 3}}
        members.see_pool(
            None, CapacityPool.model_validate({"metadata": {"name": f"p{number}"}, "spec": spec})
        )
    for number in range(100):
        labels = {"zone": "z", "pool": str(number), "team": "t"}
        members.see_node(None, Node.model_validate({"metadata": {"name": f"n{number}", "labels": labels}}))
    assert len(compared) <= 200
    compared.clear()
    assert not any(members.rivals(f"p{number}") for number in range(100))
    assert len(compared) <= 400
