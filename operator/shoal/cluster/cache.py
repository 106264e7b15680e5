"""What is known of one kind of objects: filled by a reflector, written through by whoever creates or deletes.

Writing through replaces the expectations of client-go: who has created a pod sees it in the next plan, though the
watch has not told of it yet. So facts arrive in any order, and the cache keeps the newest (resource versions of one
kind are integers that grow: Kubernetes, KEP-5504) and never lets an object rise again that was seen to vanish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from shoal.api.base import ObjectMeta


class HasMetadata(Protocol):
    """Anything from the API server."""

    @property
    def metadata(self) -> ObjectMeta:
        """Its metadata."""
        ...


T = TypeVar("T", bound=HasMetadata)

OnChange = Callable[[T | None, T | None], None]
"""Called with what was known before and what is now; one of them may be None."""

REMEMBERED_DEAD = 10_000


class Cache(Generic[T]):
    """Objects by uid, by (namespace, name), and by the indices given: index name -> its key of an object, or None."""

    def __init__(
        self, on_change: OnChange[T], indices: Mapping[str, Callable[[T], Hashable | None]] | None = None
    ) -> None:
        self._on_change = on_change
        self._key_of = dict(indices or {})
        self._by_uid: dict[str, T] = {}
        self._by_name: dict[tuple[str, str], str] = {}
        self._indices: dict[str, dict[Hashable, dict[str, T]]] = {name: {} for name in self._key_of}
        self._dead: set[str] = set()
        self._dead_order: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._by_uid)

    def all(self) -> Iterable[T]:
        """Every object."""
        return self._by_uid.values()

    def get(self, name: str, namespace: str = "") -> T | None:
        """The object of this name, the newest where two had it."""
        return self._by_uid.get(self._by_name.get((namespace, name), ""))

    def of(self, index: str, key: Hashable) -> tuple[T, ...]:
        """The objects that an index files under a key."""
        return tuple(self._indices[index].get(key, {}).values())

    def put(self, fresh: T) -> None:
        """An object was seen. What is older than what is known, or known to be gone, is ignored."""
        uid = fresh.metadata.uid
        old = self._by_uid.get(uid)
        if uid in self._dead or (old is not None and version(old) >= version(fresh)):
            return
        if old is not None:
            self._unfile(old)
        self._by_uid[uid] = fresh
        self._by_name[fresh.metadata.namespace, fresh.metadata.name] = uid
        for name, key_of in self._key_of.items():
            if (key := key_of(fresh)) is not None:
                self._indices[name].setdefault(key, {})[uid] = fresh
        self._on_change(old, fresh)

    def drop(self, uid: str) -> None:
        """An object is gone for good."""
        self._bury(uid)
        if (old := self._by_uid.pop(uid, None)) is None:
            return
        self._unfile(old)
        where = (old.metadata.namespace, old.metadata.name)
        if self._by_name.get(where) == uid:
            del self._by_name[where]
        self._on_change(old, None)

    def replace(self, listed: Iterable[T], at: int, unread: Collection[str] = ()) -> None:
        """All objects as they were at resource version `at`: what is not among them and not newer is gone.

        `unread`: uids that were listed but could not be parsed; of these the last that was known stays.
        """
        fresh = {each.metadata.uid: each for each in listed}
        there = fresh.keys() | set(unread)
        for uid in [u for u, old in self._by_uid.items() if u not in there and version(old) <= at]:
            self.drop(uid)
        for each in fresh.values():
            self.put(each)

    def _unfile(self, old: T) -> None:
        for name, key_of in self._key_of.items():
            if (key := key_of(old)) is not None and (filed := self._indices[name].get(key)) is not None:
                filed.pop(old.metadata.uid, None)
                if not filed:
                    del self._indices[name][key]

    def _bury(self, uid: str) -> None:
        if uid in self._dead:
            return
        self._dead.add(uid)
        self._dead_order.append(uid)
        if len(self._dead_order) > REMEMBERED_DEAD:
            self._dead.discard(self._dead_order.popleft())


def version(seen: HasMetadata) -> int:
    """The resource version as a number."""
    return int(seen.metadata.resource_version or 0)
