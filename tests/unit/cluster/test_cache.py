"""The cache with updates that arrive late, twice, out of order, or only with a relist."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dev.night import examples
from shoal.api.kube import OwnedMeta, Pod, PodSpec
from shoal.cluster.cache import Cache, version

NODES = [None, "n1", "n2"]
NAMES = ["a", "b", "c"]


class ServerAndCache(RuleBasedStateMachine):
    """A server whose events reach the cache late, while writes and relists reach it at once."""

    @initialize()
    def begin(self) -> None:
        self.version = 0
        self.existing: dict[str, Pod] = {}
        self.undelivered: list[tuple[str, Pod]] = []
        self.notified: dict[str, Pod] = {}
        self.cache: Cache[Pod] = Cache(self.changed, {"node": lambda pod: pod.spec.node_name})
        self.uids = 0

    def changed(self, old: Pod | None, new: Pod | None, _ours: bool) -> None:
        """The old object of a change must be the one that the listener knows."""
        if old is not None:
            assert self.notified[old.metadata.uid] == old
        if new is None:
            assert old is not None
            del self.notified[old.metadata.uid]
        else:
            self.notified[new.metadata.uid] = new

    def write(self, pod: Pod) -> Pod:
        self.version += 1
        meta = replace(pod.metadata, resource_version=str(self.version))
        return pod.model_copy(update={"metadata": meta})

    @rule(name=st.sampled_from(NAMES), through=st.booleans())
    def create(self, name: str, through: bool) -> None:
        if name in self.existing:
            return
        self.uids += 1
        pod = self.write(Pod(metadata=OwnedMeta(name=name, namespace="ns", uid=f"u{self.uids}")))
        self.existing[name] = pod
        self.undelivered.append(("ADDED", pod))
        if through:
            self.cache.put(pod)

    @rule(name=st.sampled_from(NAMES), node=st.sampled_from(NODES))
    def bind(self, name: str, node: str | None) -> None:
        if name in self.existing:
            pod = self.write(self.existing[name].model_copy(update={"spec": PodSpec(node_name=node)}))
            self.existing[name] = pod
            self.undelivered.append(("MODIFIED", pod))

    @rule(name=st.sampled_from(NAMES), through=st.booleans())
    def delete(self, name: str, through: bool) -> None:
        if name in self.existing:
            pod = self.write(self.existing.pop(name))
            self.undelivered.append(("DELETED", pod))
            if through:
                self.cache.drop(pod.metadata.uid)

    @rule(name=st.sampled_from(NAMES))
    def leave_the_selector_and_return(self, name: str) -> None:
        """Someone removes the label by which objects are watched, and puts it back."""
        if name in self.existing:
            self.undelivered.append(("DELETED", self.write(self.existing[name])))
            self.existing[name] = self.write(self.existing[name])
            self.undelivered.append(("ADDED", self.existing[name]))

    @precondition(lambda self: self.undelivered)
    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for kind, pod in self.undelivered[:count]:
            if kind == "DELETED":
                self.cache.drop(pod.metadata.uid, at=version(pod))
            else:
                self.cache.put(pod)
        del self.undelivered[:count]

    @rule(late=st.lists(st.sampled_from(NAMES), max_size=2))
    def relist(self, late: list[str]) -> None:
        """Relist after a lost watch, whose pending events are lost. Pods may be created after the list was taken."""
        listed, at = list(self.existing.values()), self.version
        self.undelivered.clear()
        for number, each in enumerate([*listed, None]):
            if number == len(listed) // 2:  # between two pages
                for name in late:
                    self.create(name, through=True)
            if each is not None:
                self.cache.put(each)
        self.cache.keep({each.metadata.uid for each in listed}, at)

    @invariant()
    def cache_matches_the_server_once_all_is_delivered(self) -> None:
        if not self.undelivered:
            known = {pod.metadata.uid: pod for pod in self.cache.all()}
            assert known == {pod.metadata.uid: pod for pod in self.existing.values()}

    @invariant()
    def a_name_is_that_of_one_object(self) -> None:
        names = [pod.metadata.name for pod in self.cache.all()]
        assert len(names) == len(set(names))

    @invariant()
    def indices_and_listeners_agree(self) -> None:
        known = {pod.metadata.uid: pod for pod in self.cache.all()}
        assert known == self.notified
        for node in ("n1", "n2"):
            filed = {pod.metadata.uid for pod in self.cache.indexed("node", node)}
            assert filed == {uid for uid, pod in known.items() if pod.spec.node_name == node}
        for name in NAMES:
            if (found := self.cache.get(name, "ns")) is not None:
                assert found.metadata.name == name
                assert known[found.metadata.uid] is found


ServerAndCache.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestServerAndCache = ServerAndCache.TestCase


def pod(name: str, uid: str, version: int) -> Pod:
    return Pod(metadata=OwnedMeta(name=name, namespace="ns", uid=uid, resource_version=str(version)))


def test_late_answer_does_not_restore_a_deleted_object() -> None:
    cache: Cache[Pod] = Cache(lambda _old, _new, _ours: None)
    cache.put(pod("a", "u1", 5))
    cache.drop("u1")
    cache.put(pod("a", "u1", 6))
    assert cache.get("a", "ns") is None


def test_object_that_is_not_listed_is_dropped_unless_it_is_newer() -> None:
    cache: Cache[Pod] = Cache(lambda _old, _new, _ours: None)
    for name, uid, at in (("a", "u1", 5), ("b", "u2", 6), ("c", "u3", 11)):
        cache.put(pod(name, uid, at))
    cache.keep({"u1"}, 10)
    assert [each.metadata.uid for each in cache.all()] == ["u1", "u3"]


def test_late_event_about_an_earlier_object_of_the_name_is_no_news() -> None:
    cache: Cache[Pod] = Cache(lambda _old, _new, _ours: None)
    cache.put(pod("a", "u2", 6))
    cache.put(pod("a", "u1", 5))
    assert [each.metadata.uid for each in cache.all()] == ["u2"]


def test_unread_object_is_kept() -> None:
    cache: Cache[Pod] = Cache(lambda _old, _new, _ours: None)
    cache.put(pod("a", "u1", 5))
    cache.put(pod("b", "u2", 6))
    assert cache.leave_unread("u1", 9)
    assert not cache.leave_unread("u1", 9), "it is known"
    cache.keep(set(), 10, unread={"u1"})
    assert cache.is_unread("u1")
    assert [each.metadata.uid for each in cache.all()] == ["u1"]


def test_name_refers_to_the_newest_object() -> None:
    cache: Cache[Pod] = Cache(lambda _old, _new, _ours: None)
    cache.put(pod("a", "u1", 5))
    cache.put(pod("a", "u2", 8))
    cache.drop("u1")
    found = cache.get("a", "ns")
    assert found is not None
    assert found.metadata.uid == "u2"
