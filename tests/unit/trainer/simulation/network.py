"""A worker's calls over a simulated network.

It loses requests and answers, duplicates requests, cuts single links, and delivers late: a server may read a request,
or learn that the worker has closed the connection, after the worker has connected again and has sent more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace

import numpy as np

from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.encoding import decode_answer, encode_answer
from shoal_trainer.wire.messages import Pulled, Welcome
from tests.unit.trainer.ps.shards import blocked, held_up, push_to
from tests.unit.trainer.simulation.invariants import check_journal
from tests.unit.trainer.simulation.job import STEPS_AT, decoded, encoded


class Answer:
    """A future that makes its call when its result is requested, or asked for."""

    def __init__(self, call):
        self._call = call
        self._value = self._error = None

    def result(self, timeout=None):
        if self._error is not None:
            raise self._error
        while self._value is None:
            self._value = self._call()
            if self._value is None and timeout is not None:
                raise FutureTimeout
        return self._value

    def done(self):
        try:
            self.result(0)
        except FutureTimeout:
            return False
        except (Unreachable, Fenced) as error:
            self._error = error
        return True


class Drain:
    """The event that stops a worker; `wait` passes virtual time."""

    def __init__(self, worker):
        self._worker = worker
        self._event = threading.Event()
        self.is_set, self.set = self._event.is_set, self._event.set

    def wait(self, timeout):
        self._worker.world.sleep(self._worker, timeout)
        return self.is_set()


class Exchange:
    """A worker's connections to all shards, in place of the real `Exchange`."""

    def __init__(self, worker):
        self.worker, self.world = worker, worker.world
        self.identity = worker.slot, worker.incarnation
        shards = self.world.shards
        self.servers = [None] * shards
        self.connected = [False] * shards
        self.boots = [0] * shards
        self.pulled = [Counter() for _ in range(shards)]
        """How many steps may follow on each version that a shard has answered with since it greeted this worker."""
        self.applied = [{} for _ in range(shards)]
        """The last push of each worker in each version of a shard that it has answered with."""
        self.cut_until = [0.0] * (shards + 1)
        """When each link works again: those to the shards, and at last that to the coordinator."""

    def ask(self, request, *, late=True):
        """Send a request to the coordinator; `late`: whether it may be delivered late."""
        return self.call(request, link=-1, late=request if late else None)

    def call(self, request, *, index=0, link=None, expected=None, anew=False, late=None):
        """Send a request to server `index`.

        `expected`: the server that the connection was opened to. `anew`: over a new connection. `late`: what the server
        does if it reads the request later; None if it never does.
        """
        world = self.world
        self.worker.pause()
        connected = self.connected[index] and self.servers[index] in world.cut_off and not anew
        server = self.servers[index] if connected else world.servers[index]
        if server is None or world.clock() < self.cut_until[index if link is None else link]:
            raise Unreachable("the link is down")
        if world.random.random() < world.loss:
            self._deliver_later(server, late)
            raise Unreachable("the request is lost")
        if expected is not None and expected is not server:
            raise Unreachable("the connection was closed by its server")
        answer = request(server)
        if world.random.random() < world.loss:
            with contextlib.suppress(Unreachable):
                request(server)  # a duplicate
        elif world.random.random() < world.loss:
            self._deliver_later(server, late)
        if world.random.random() < world.loss:
            raise Unreachable("the answer is lost")
        return answer

    def _deliver_later(self, server, request):
        """Maybe have the server read a request after what the worker sends next."""
        if request is not None and self.world.random.random() < 0.5:
            self.world.later(server, request)

    def disconnect(self, index=None):
        for i in range(self.world.shards) if index is None else (index,):
            if self.connected[i] and self.servers[i] is not None:
                if self.world.random.random() < 20 * self.world.loss:
                    self.world.later(self.servers[i], self._closed)
                else:
                    self._closed(self.servers[i])
            self.connected[i] = False

    def _closed(self, server):
        server.shard.disconnect(self.worker.slot)

    def connect(self, copy):
        def connect_all():
            welcomes = []
            for index in range(self.world.shards):  # reachable shards get the copy even if others are not
                with contextlib.suppress(Unreachable):
                    welcomes.append(
                        self.call(
                            lambda server: self._hello(server, copy),
                            index=index,
                            anew=True,
                            late=self._late_hello(index, copy),
                        )
                    )
            if len(welcomes) < self.world.shards:
                self.disconnect()
                return None
            welcome = Welcome(tuple(welcomes))
            return welcome if welcome.ready else None

        return Answer(connect_all)

    def _hello(self, server, copy):
        index, shard = server.shard.index, server.shard
        self.disconnect(index)
        shard.workers.connect(*self.identity)
        self.servers[index], self.connected[index], self.boots[index] = server, True, shard.boot
        meta, held = copy.meta(index), copy.held(index)
        if meta is not None:
            told = self.worker.loop.upstream.pulled.answers[index].journal
            check_journal(meta.journal, told.floor)
        welcome = shard.hello(*self.identity, self.world.model, held)
        self.pulled[index].clear()
        if welcome.wants_copy:
            low, high = self.world.bounds[index]
            part, known = self._coded(copy.flat()[low:high], exact=meta is None), ()
            if meta is not None:
                assert meta.applied == self.applied[index][held.version], "a copy with other pushes"
                known = held.version, decode_answer(encode_answer(meta))
            welcome = shard.offer(*self.identity, part, *known, generation=held.generation)
        self.world.losses.greeted(server, copy)
        return welcome

    def _late_hello(self, index, copy):
        """The HELLO of a connection that the worker has closed when the server reads it."""

        def hello(server):
            server.shard.workers.connect(*self.identity)
            self.world.later(server, self._closed)
            server.shard.hello(*self.identity, self.world.model, copy.held(index))

        return hello

    def end(self):
        """See `Exchange`: nothing is under way that could be hurried."""

    def close(self):
        self.disconnect()

    def submit(self, call):
        return call(self)

    def probe(self):
        def hello(server, _part):
            self.pulled[server.shard.index].clear()
            if self.boots[server.shard.index] != server.shard.boot:
                raise Unreachable("the shard was rolled back to a snapshot")
            return server.shard.hello(*self.identity, self.world.model)

        return Answer(lambda: Welcome(tuple(self._on_all(hello))))

    def pull(self, out, idle=False, exact=False, ahead=0.0, known=()):
        def pull_part(server, part):
            index = server.shard.index
            told = known[index] if known else -1
            stream = server.shard.pulling(
                *self.identity,
                boot=self.boots[index],
                idle=idle,
                ahead=ahead,
                known=told,
            )
            return self._walk(server, stream, self._coded(aligned(part.stop - part.start), exact=exact), told)

        return Answer(lambda: self._pulled(self._on_all(pull_part), out))

    def push_pull(self, update, out, push, again=None):
        if again is not None and self.world.steady and self.world.random.random() < 0.5:
            return Answer(lambda: self._pushed_and_pulled(update, out, push))
        # The answer of the push is one that a worker may always go on with.
        future = Answer(lambda: self._push(update, out, push))
        if self.world.random.random() < 0.5:
            error = None
            try:
                future.result()
            except Unreachable as unreachable:
                error = unreachable

            def finished():
                if error is not None:
                    raise error
                return future.result()

            return Answer(finished)
        return future

    def _pushed_and_pulled(self, update, out, push):
        """As `Exchange.push_pull` with a pull just before the parameters are needed."""
        made = self._push(update, out, push).versions[0]
        self.world.sleep(self.worker, self.world.random.expovariate(20))
        try:
            pulled = self.pull(out, ahead=push.ahead, known=push.base_versions).result()
        except Unreachable:
            self.world.unpulled += push.meta.steps
            raise
        return replace(pulled, made=made)

    def push_round(self, update, out, push):
        """As `PSClient.push_round`: push to all shards, wait for other workers in each, and pull."""

        def wait(server, _part):
            while server.shard.workers.waits(self.worker.slot) > 0:
                world.sleep(self.worker, 0.02)
                self._check_link(server, server.shard.index)

        def pushed_and_pulled():
            made, began = self._push(update, out, push, arrives=True).versions[0], world.now
            self._on_all(wait)
            return replace(self.pull(out).result(), wait_seconds=world.now - began, made=made)

        world = self.world
        return Answer(pushed_and_pulled)

    def push_delta(self, delta, out, push):
        push = replace(push, meta=push.meta._replace(scale=1.0))  # local steps count fully in the simulation
        return Answer(lambda: self._push(delta, out, push, delta=True))

    def _push(self, update, out, push, *, delta=False, arrives=False):
        meta, delta = push.meta, delta or not self.world.gradients
        for step in np.flatnonzero(update[STEPS_AT : STEPS_AT + self.world.steps]):
            self.world.sent.setdefault(int(step), set()).add((*self.identity, push.seq))
            if not delta:
                self.world.pushes[int(step)] = (*self.identity, push.seq)

        def apply(server, part):
            base, boot = push.base_versions[server.shard.index], self.boots[server.shard.index]
            with self._admitted(server, base, push.seq):
                stream = server.shard.pushing(*self.identity, push.seq, base, meta, delta=delta, boot=boot)
                answer = self._walk(server, stream, self._coded(update[part]), base)
            if arrives:
                server.shard.workers.arrive(self.worker.slot, 20.0)
            return answer

        def late(index, part):
            sent, base, boot = self._coded(update[part]), push.base_versions[index], self.boots[index]
            arguments = (*self.identity, push.seq, base, meta)

            def read_late(server):
                push_to(server.shard, *arguments, sent, boot=boot, delta=delta)

            return read_late

        if self.world.bound is not None:  # a late one would have to wait for its admission as well
            return self._pulled(self._on_all(apply), out)
        return self._pulled(self._on_all(apply, late), out)

    @contextlib.contextmanager
    def _admitted(self, server, base, seq):
        """Wait while this push would make another gradient too stale."""
        workers, index = server.shard.workers, server.shard.index
        try:
            workers.wait_admitted(self.worker.slot, base, 20.0)
            self._check_link(server, index)
            if self.world.bound is not None and self.pulled[index][base]:
                self.world.awaited.add((server.shard.boot, *self.identity, seq))
                self.pulled[index][base] -= 1
            yield
        finally:
            workers.push_ended(self.worker.slot)

    def _walk(self, server, stream, io, known):
        """Move a request over the pieces of a shard; other workers run in between, and the connection may break.

        `known`: the version up to which the worker has the journal. Returns the answer and its parameters.
        """
        world, index = self.world, server.shard.index
        close = stream.close
        try:
            for low, high in stream.spans():
                if low:
                    self.worker.pause()
                    self._check_link(server, index)
                for _ in range(world.random.randrange(3)):
                    if held_up(stream):
                        world.sleep(self.worker, 0.02)
                while blocked(stream):
                    world.sleep(self.worker, 0.02)
                stream.step(io[low:high])
                begun = stream._walk.push
                if begun is not None and begun.weighed is not None:
                    world.weighed(begun.push, begun.weighed.weight)
        except Unreachable:
            if world.random.random() < 0.5:  # the server notices it later
                world.later(server, lambda _: stream.close())
                close = lambda: None  # noqa: E731
            raise
        finally:
            close()
        check_journal(stream.result.meta.journal, known)
        self.applied[index][stream.result.version] = dict(server.shard.history.applied)
        self.pulled[index][stream.result.version] = 2  # the second one is computed while the first is pushed
        return stream.result, self._decoded(io)

    def _coded(self, values, *, exact=False):
        """A copy of values as the wire has them; `exact`: in fp32 there, too."""
        if exact or not self.world.bf16:
            return values.copy()
        return encoded(values)

    def _decoded(self, io):
        """The values of an answer."""
        return io if io.dtype == np.float32 else decoded(io)

    def _check_link(self, server, index):
        world = self.world
        if server not in world.servers and server not in world.cut_off:
            raise Unreachable("the server is lost")
        if world.clock() < self.cut_until[index] or world.random.random() < world.loss:
            raise Unreachable("the connection broke in the middle of a message")

    def _on_all(self, request, late=lambda _index, _part: None):
        """Send a request to every shard. After a failure it may or may not reach the following shards."""
        world, answers, failed = self.world, [], None
        for index, (low, high) in enumerate(world.bounds):
            part = slice(low, high)
            try:
                answers.append(
                    self.call(
                        lambda s: request(s, part),  # noqa: B023
                        index=index,
                        expected=self.servers[index],
                        late=late(index, part),
                    )
                )
            except (Unreachable, Fenced) as error:
                failed = failed or error
                if index + 1 == world.shards or world.random.random() < 0.5:
                    break
        if failed is None:
            return answers
        self.disconnect()
        raise failed

    def _pulled(self, found, out):
        for (_, values), (low, high) in zip(found, self.world.bounds, strict=True):
            out[low:high] = values
        answers = [answer for answer, _ in found]
        versions, metas = tuple(a.version for a in answers), tuple(a.meta for a in answers)
        return Pulled(versions, metas, filled=answers[0].filled)
