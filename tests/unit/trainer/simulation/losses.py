"""What the loss of a parameter server may cost at most: samples that are trained again, or applied twice."""

from __future__ import annotations

RECOVERY_SECONDS = 0.75
"""For so long a shard waits at least for workers with a copy, from the first worker on."""


class Losses:
    """The lost servers of a job, and what workers and successors had when they were lost."""

    def __init__(self, world):
        self._world = world
        self._lost = []
        """The lost servers 0, with the samples of the leases that running workers held."""
        self._forgotten = self._stray = 0
        """The samples of lost servers that left no snapshot, and those that replaced servers have granted since."""
        self._begun = {}
        """When the first worker greeted each new server."""

    def lost(self, server):
        """A server is lost; it may keep running."""
        if server.index == 0:
            workers = [worker for worker in self._world.workers if worker.end is None]
            self._lost.append((server, sum(worker.held() for worker in workers)))

    def begins(self, server, found):
        """A server begins with this snapshot: the newest one that is published, unless it was damaged."""
        numbers = [int(name[-15:-5]) for name in self._world.storage.files if "/manifest-" in name]
        newest = max(numbers, default=None)
        assert self._world.worn or (None if found is None else found[0].number) == newest, found
        if server.index == 0 and found is None:
            self._forgotten = sum(lost.shard.history.samples for lost, _ in self._lost)

    def granted(self, server, samples):
        """A server has granted a lease."""
        if server is not self._world.server:
            self._stray += samples

    def most_repeated(self):
        """As many samples may be in the parameters twice.

        Those that workers held when a server was lost: they push them also if they are late, and others have trained
        them by then. And if nothing was left but a copy of the parameters, all that is in it.
        """
        return self._stray + self._forgotten + sum(held for _, held in self._lost)

    def greeted(self, server, copy):
        """A worker has greeted a server, and was asked for its copy if that is newer.

        About one step is lost if it comes in time: its last push and those of the others may be on their way. And one
        more if a worker lost the server between its push and its pull.
        """
        shard = server.shard
        begun = self._begun.setdefault(shard.first_boot, self._world.now)
        if not shard.follows or shard.first_boot != shard.boot or self._world.now > begun + RECOVERY_SECONDS:
            return
        if copy.pulled is None or copy.pulled.answers[shard.index].torn:
            return
        version, history = copy.pulled.versions[shard.index], shard.history
        if copy.generation == history.generation and history.accepts(copy.meta(shard.index).journal):
            steps = 2 if self._world.unpulled else 1
            assert history.version >= version - steps * len(self._world.slots), (
                f"shard {shard.index} goes on at {history.version}, a worker in time has {version}"
            )
