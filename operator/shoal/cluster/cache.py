"""A cache of the objects of one kind, filled by a reflector and written through by creates and deletes.

Writing through replaces client-go's expectations: the next plan sees a created pod before the watch reports it. Updates
may thus arrive in any order. The cache keeps the newest (resource versions of one kind are increasing integers:
Kubernetes, KEP-5504) and never restores an object that was deleted. An object that leaves the watch's label selector is
also reported as deleted; what is newer than that report is an object that came back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from typing import Generic, Protocol, TypeVar


class Identity(Protocol):
    """What of an object's metadata says which one it is, and how new."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def namespace(self) -> str:
        """Its namespace; empty for a cluster-scoped one."""
        ...

    @property
    def uid(self) -> str:
        """Never that of another object."""
        ...

    @property
    def resource_version(self) -> str:
        """Which state of it this is."""
        ...


class HasMetadata(Protocol):
    """Any Kubernetes object."""

    @property
    def metadata(self) -> Identity:
        """Its metadata."""
        ...


T = TypeVar("T", bound=HasMetadata)

OnChange = Callable[[T | None, T | None, bool], None]
"""Called with the old and the new object, one of which may be None, and whether the change is this process's own."""

MAX_DELETED_UIDS = 10_000


class Cache(Generic[T]):
    """Objects by uid, by (namespace, name), and by `indices`: index name -> function from an object to its key.

    `shared`: a new object as it is kept, with those parts of the old one, if there is one, that have not changed.
    """

    def __init__(
        self,
        on_change: OnChange[T],
        indices: Mapping[str, Callable[[T], Hashable | None]] | None = None,
        *,
        shared: Callable[[T | None, T], T] = lambda _old, new: new,
    ) -> None:
        self._on_change = on_change
        self._shared = shared
        self._key_of = dict(indices or {})
        self._by_uid: dict[str, T] = {}
        self._by_name: dict[tuple[str, str], str] = {}
        self._indices: dict[str, dict[Hashable, dict[str, T]]] = {name: {} for name in self._key_of}
        self._deleted: dict[str, float] = {}
        """uid -> the resource version of its deletion; infinite if it is not known."""
        self._unread: dict[str, int] = {}
        """uid -> the resource version at which the object could not be parsed."""

    def __len__(self) -> int:
        return len(self._by_uid)

    def all(self) -> Iterable[T]:
        """Every object."""
        return self._by_uid.values()

    def get(self, name: str, namespace: str = "") -> T | None:
        """The newest object of this name."""
        return self._by_uid.get(self._by_name.get((namespace, name), ""))

    def by_uid(self, uid: str) -> T | None:
        """The object with this uid."""
        return self._by_uid.get(uid)

    def indexed(self, index: str, key: Hashable) -> tuple[T, ...]:
        """The objects with this key in an index."""
        return tuple(self._indices[index].get(key, {}).values())

    def keys(self, index: str) -> Set[Hashable]:
        """The keys in an index."""
        return self._indices[index].keys()

    def put(self, fresh: T, *, ours: bool = False) -> None:
        """Add or update an object, unless it is older than the known one or was deleted.

        `ours`: it is the answer to a write of this process. The watch's event about it has the same version and is
        no news then.
        """
        uid = fresh.metadata.uid
        old = self._by_uid.get(uid)
        if version(fresh) <= (self._deleted.get(uid, -1) if old is None else version(old)):
            return
        if old is None and (namesake := self.get(fresh.metadata.name, fresh.metadata.namespace)) is not None:
            if version(namesake) > version(fresh):
                return  # it is gone: a name is that of one object at a time
            self.drop(namesake.metadata.uid, version(fresh))
        fresh = self._shared(old, fresh)
        keys = {name: key for name, key_of in self._key_of.items() if (key := key_of(fresh)) is not None}
        if version(fresh) >= self._unread.get(uid, 0):
            self._unread.pop(uid, None)
        if old is not None:
            self._unindex(old)
        self._by_uid[uid] = fresh
        self._by_name[fresh.metadata.namespace, fresh.metadata.name] = uid
        for name, key in keys.items():
            self._indices[name].setdefault(key, {})[uid] = fresh
        self._on_change(old, fresh, ours)

    def leave_unread(self, uid: str, at: int) -> bool:
        """An object changed, at this resource version, to what cannot be parsed; False if that was known.

        The last state that could is kept.
        """
        news = self._unread.get(uid) != at
        self._unread[uid] = at
        return news

    def is_unread(self, uid: str) -> bool:
        """Whether a newer state of the object than the known one cannot be parsed: nothing can be written to it."""
        return uid in self._unread

    def unread(self) -> int:
        """Of how many objects the newest state cannot be parsed."""
        return len(self._unread)

    def newest_of(self, uid: str) -> float:
        """The resource version at which the object was last known, be it as deleted or unreadable; -1: it never was."""
        known = self._by_uid.get(uid)
        return max(self._unread.get(uid, -1), self._deleted.get(uid, -1) if known is None else version(known))

    def has_seen(self, uid: str, at: int) -> bool:
        """Whether the object is known as it was at this resource version, or later, or as deleted or unreadable."""
        return self.newest_of(uid) >= at

    def drop(self, uid: str, at: float = math.inf) -> None:
        """Remove an object that was deleted, `at` this resource version according to the watch.

        By default for good: whoever has the API server's word that there is none, since a uid never returns.
        """
        self._mark_deleted(uid, at)
        self._unread.pop(uid, None)
        if (old := self._by_uid.pop(uid, None)) is None:
            return
        self._unindex(old)
        where = (old.metadata.namespace, old.metadata.name)
        if self._by_name.get(where) == uid:
            del self._by_name[where]
        self._on_change(old, None, False)

    def keep(self, listed: Set[str], at: int, unread: Set[str] = frozenset()) -> None:
        """Drop what a list at resource version `at` has not. What is newer is kept.

        `listed`: the uids of its objects that were put; `unread`: those of objects that cannot be parsed.
        """
        there = listed | unread
        for uid in [u for u, old in self._by_uid.items() if u not in there and version(old) <= at]:
            self.drop(uid, at)
        self._unread = {uid: seen for uid, seen in self._unread.items() if uid in unread or seen > at}

    def _unindex(self, old: T) -> None:
        for name, key_of in self._key_of.items():
            if (key := key_of(old)) is not None and (entries := self._indices[name].get(key)) is not None:
                entries.pop(old.metadata.uid, None)
                if not entries:
                    del self._indices[name][key]

    def _mark_deleted(self, uid: str, at: float) -> None:
        self._deleted.pop(uid, None)  # so that the last one is the newest
        self._deleted[uid] = at
        if len(self._deleted) > MAX_DELETED_UIDS:
            del self._deleted[next(iter(self._deleted))]


def version(known: HasMetadata) -> int:
    """The resource version as a number."""
    return int(known.metadata.resource_version or 0)
