"""The Lease in virtual time: candidates, an unreliable API server, and never two leaders."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.cluster.clock import boot_time
from shoal.cluster.lease import Lease, LeaseTimes
from shoal.cluster.transport import Answer, Fenced, Query
from shoal.errors import LeaseLost, Unavailable
from tests.doubles.patches import json_patched
from tests.meanwhile import during
from tests.unit.cluster.servers import SmallServer

pytestmark = pytest.mark.looptime

TIMES = LeaseTimes()


class LeaseServer(SmallServer):
    """Holds one Lease, with optimistic concurrency."""

    lease: dict[str, Any] | None = None

    def answer(self, method: str, path: str, query: Query, body: Any) -> Answer:
        if method == "GET":
            return Answer(200, json.dumps(self.lease).encode()) if self.lease else Answer(404, b"{}")
        if method == "PATCH":
            if self.lease is None:
                return Answer(404, b"{}")
            if (body := json_patched(self.lease, body)) is None:
                return Answer(422, b"{}")
        if (method == "POST") == (self.lease is not None):
            return Answer(409, b"{}")
        if self.lease and body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            return Answer(409, b'{"message": "the object has been modified"}')
        self.version += 1
        self.lease = json.loads(json.dumps(body))
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self._publish("ADDED" if method == "POST" else "MODIFIED", self.lease)
        return Answer(200, json.dumps(self.lease).encode())


def wall() -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC)  # constant: nothing may depend on it


def candidate(server: SmallServer, identity: str, clock: Callable[[], float] | None = None) -> Lease:
    clock = clock or asyncio.get_running_loop().time
    where = {"namespace": "shoal", "name": "shoal"}
    return Lease(server, **where, identity=identity, times=TIMES, clock=clock, wall=wall)


async def test_first_candidate_acquires_and_renews() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    assert lease.held
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(300)
    assert lease.held
    assert not keeping.done()
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 0
    keeping.cancel()


async def test_second_candidate_waits_for_the_lease_duration() -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    began = asyncio.get_running_loop().time()
    await two.acquire()  # the first is not renewed
    waited = asyncio.get_running_loop().time() - began
    assert TIMES.duration <= waited <= TIMES.duration + 2 * 1.2 * TIMES.retry_period
    assert not one.held


async def test_released_lease_is_free_at_once() -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    await one.release()
    assert not one.held
    began = asyncio.get_running_loop().time()
    await two.acquire()
    assert asyncio.get_running_loop().time() - began < TIMES.retry_period


async def test_release_waits_neither_for_renewals_nor_for_a_request_that_hangs() -> None:
    """Renewals that came between made it a conflict, twice, and it was given up; one that hung took all the time."""
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()

    def renewed(method: str, _path: str) -> None:
        if method in {"PUT", "PATCH"} and server.lease is not None:  # another of its own came between
            server.version += 1
            server.lease["metadata"]["resourceVersion"] = str(server.version)

    loop = asyncio.get_running_loop()
    server.fault = renewed
    server.delay = 3600.0
    loop.call_later(1, setattr, server, "delay", 0.0)  # the second has a connection that works
    began = loop.time()
    await one.release()
    assert loop.time() - began <= TIMES.retry_period
    server.fault = lambda _method, _path: None
    await two.acquire()
    assert loop.time() - began <= 2 * TIMES.retry_period


async def test_release_leaves_the_lease_of_another_alone() -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    await two.acquire()
    await one.release()
    assert two.held
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "two"


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        (None, 0.01),
        (Answer(403, b'{"message": "may not watch"}'), 0.6 * TIMES.retry_period),
        (Unavailable("no connection"), 0.6 * TIMES.retry_period),
    ],
)
@pytest.mark.parametrize("phase", [0.1, 0.5, 0.9])
async def test_standby_has_a_released_lease_at_once(
    phase: float, fault: Answer | Exception | None, seconds: float
) -> None:
    """Whenever it is released; within 1.2 s where the Lease cannot be watched, as under the roles of an older chart."""
    server = LeaseServer()
    server.fault = lambda method, _path: fault if method == "WATCH" else None
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    for _ in range(20):
        waiting = asyncio.create_task(two.acquire())
        await asyncio.sleep(phase * TIMES.retry_period)
        await one.release()
        began = asyncio.get_running_loop().time()
        await waiting
        assert asyncio.get_running_loop().time() - began <= seconds
        one, two = two, one


async def test_standby_asks_nothing_while_a_watch_tells_it_that_the_lease_is_renewed() -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    tasks = [asyncio.create_task(one.keep()), asyncio.create_task(two.acquire())]
    asked: list[str] = []
    server.fault = lambda method, _path: asked.append(method)
    await asyncio.sleep(100 * TIMES.retry_period)
    assert set(asked) == {"PATCH", "GET", "WATCH"}
    assert (asked.count("GET"), asked.count("WATCH")) == (1, 1)
    for task in tasks:
        task.cancel()


async def test_standby_whose_watch_is_cut_off_looks_for_itself() -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(1)
    server.watches[-1].put_nowait = lambda _line: None  # type: ignore[method-assign]
    await one.release()
    began = asyncio.get_running_loop().time()
    await waiting
    assert asyncio.get_running_loop().time() - began <= 3 * TIMES.retry_period


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"type": "MODI',
        b"{}\n",
        b"[]\n",
        b'{"type": "MODIFIED", "object": "x"}\n',
        b'{"type": "ERROR", "object": {"code": 410}}\n',
    ],
)
async def test_watch_that_ends_or_says_nonsense_costs_neither_the_candidate_nor_the_server(
    line: bytes,
) -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    keeping = asyncio.create_task(one.keep())
    waiting = asyncio.create_task(two.acquire())
    asked: list[str] = []
    server.fault = lambda method, _path: asked.append(method) if method != "PATCH" else None
    for _ in range(100):
        server.send(line)
        await asyncio.sleep(1)
    assert not waiting.done()
    assert len(asked) <= 2 * 100 / (0.4 * TIMES.retry_period)
    await one.release()
    keeping.cancel()
    await asyncio.wait_for(waiting, 0.6 * TIMES.retry_period)


@pytest.mark.parametrize("refused", ["PUT", "POST"])
async def test_free_lease_that_may_not_be_taken_is_tried_again_at_the_usual_pace(refused: str) -> None:
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(1)
    asked: list[str] = []

    def fault(method: str, _path: str) -> Answer | None:
        asked.append(method)
        return Answer(403, b'{"message": "forbidden"}') if method == refused else None

    server.fault = fault
    if refused == "PUT":
        await one.release()
    else:
        server.lease, gone = None, server.lease
        assert gone is not None
        server.version += 1
        server._publish("DELETED", gone)
    await asyncio.sleep(100)
    assert 50 <= len(asked) <= 3 + 2 * 100 / (0.4 * TIMES.retry_period)
    server.fault = lambda _method, _path: None
    await asyncio.wait_for(waiting, 0.6 * TIMES.retry_period)
    assert two.held


async def test_lease_that_somebody_deletes_is_its_holders_for_as_long_as_it_was() -> None:
    """Until its next renewal the holder does not know of it, and writes: another that took it at once would, too."""
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    keeping = asyncio.create_task(one.keep())
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(5)
    both = 0
    for number in range(10):
        server.lease, gone = None, server.lease
        assert gone is not None
        server.version += 1
        server._publish("DELETED", gone)
        for _ in range(100):
            await asyncio.sleep(0.05 + 0.003 * number)
            both += one.held and two.held
    assert both == 0
    assert one.held
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    server.lease, gone = None, server.lease
    assert gone is not None
    server.version += 1
    server._publish("DELETED", gone)
    await asyncio.wait_for(waiting, 2 * TIMES.duration)  # of a holder that is gone, it is taken all the same
    assert two.held


async def test_lease_that_cannot_be_given_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As by a release that is uninstalled: its role goes with it, and the next one waits until the Lease ends."""
    server = LeaseServer()
    one = candidate(server, "one")
    await one.acquire()
    server.fault = lambda _method, _path: Answer(403, b'{"message": "leases are forbidden"}')
    await one.release()
    assert "cannot be given back, and ends by itself: leases are forbidden" in caplog.text


async def test_restarted_holder_does_not_wait() -> None:
    server = LeaseServer()
    await candidate(server, "one").acquire()
    began = asyncio.get_running_loop().time()
    await candidate(server, "one").acquire()
    assert asyncio.get_running_loop().time() - began < 0.1


async def test_nothing_is_sent_after_the_renew_deadline() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    fenced = Fenced(server, lease.seconds_left)
    await lease.acquire()
    await fenced.request("POST", "/x")
    await asyncio.sleep(TIMES.renew_deadline + 0.01)
    with pytest.raises(LeaseLost):
        await fenced.request("POST", "/x")
    await fenced.request("GET", "/x")


async def test_write_that_waits_is_given_up_before_the_lease_ends() -> None:
    """B12: a write that waited for a connection could leave after another leader had taken over."""
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    await asyncio.sleep(TIMES.renew_deadline - 1)
    server.delay = 30
    began = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable):
        await Fenced(server, lease.seconds_left).request("POST", "/x")
    assert asyncio.get_running_loop().time() - began <= 1
    assert ("POST", "/x", None) not in server.writes


async def test_write_may_take_longer_than_a_renewal_is_good_for_while_the_lease_is_renewed() -> None:
    """As with a webhook that takes 11 s for each pod: none would ever be made."""
    lease, slow = candidate(LeaseServer(), "one"), LeaseServer()
    await lease.acquire()
    await candidate(slow, "another server").acquire()
    slow.delay = TIMES.renew_deadline + 1
    keeping = asyncio.create_task(lease.keep())
    await Fenced(slow, lease.seconds_left).request("POST", "/x")
    keeping.cancel()
    assert slow.writes[-1][:2] == ("POST", "/x")


async def test_failed_renewal_loses_the_lease() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    began = asyncio.get_running_loop().time()
    server.fault = lambda _method, _path: Unavailable("partition")
    with pytest.raises(LeaseLost):
        await lease.keep()
    assert asyncio.get_running_loop().time() - began <= TIMES.renew_deadline + TIMES.retry_period


@pytest.mark.parametrize(
    "page",
    [
        b"<html>Log in</html>",
        b'{"error": "who are you?"}',
        b"[]",
        b"null",
        b'{"metadata": {"resourceVersion": "1"}}',
    ],
)
async def test_what_a_proxy_answers_instead_is_no_renewal_and_no_end(page: bytes) -> None:
    """With 200: a leader ended at the first one that it read, and took one to its renewal for the Lease."""
    server = LeaseServer()
    one, two = candidate(server, "one"), candidate(server, "two")
    await one.acquire()
    keeping = asyncio.create_task(one.keep())
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(1)
    server.fault = lambda method, _path: Answer(404, b"{}") if method == "PATCH" else Answer(200, page)
    await asyncio.sleep(TIMES.renew_deadline - 2 * TIMES.retry_period)
    server.fault = lambda _method, _path: None
    await asyncio.sleep(TIMES.retry_period)
    assert one.held
    server.fault = lambda _method, _path: Answer(200, page)
    with pytest.raises(LeaseLost):
        await keeping
    assert not waiting.done()
    server.fault = lambda _method, _path: None
    await waiting


async def test_server_that_answers_slowly_does_not_lose_the_lease() -> None:
    """At machine load 20 requests took seconds, and the operator ended."""
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    server.delay = TIMES.renew_deadline - TIMES.retry_period - 0.1
    keeping = asyncio.create_task(lease.keep())
    for _ in range(300):
        await asyncio.sleep(1)
        assert lease.held
    keeping.cancel()


async def test_writes_end_with_what_the_others_see_of_the_lease() -> None:
    """A renewal counts from before it was sent: the server may have stored it then, and answered late."""
    server, sent = LeaseServer(), list[float]()
    loop, inner = asyncio.get_running_loop(), server.request

    async def answered(*args: Any, **options: Any) -> Answer:
        at = loop.time()
        answer = await inner(*args, **options)
        sent.append(at)
        return answer

    server.request = answered  # type: ignore[method-assign]
    lease = candidate(server, "one")
    await lease.acquire()
    server.delay = 6.0
    keeping = asyncio.create_task(lease.keep())
    for _ in range(60):
        await asyncio.sleep(1)
        assert lease.seconds_left() == pytest.approx(max(sent) + TIMES.renew_deadline - loop.time())
    keeping.cancel()


async def test_thread_without_a_loop_may_ask() -> None:
    """That of a cloud's client, before it sets a size."""
    lease = candidate(LeaseServer(), "one")
    await lease.acquire()
    with ThreadPoolExecutor() as threads:
        assert threads.submit(lease.seconds_left).result() == pytest.approx(lease.seconds_left())
        await asyncio.sleep(TIMES.renew_deadline)
        with pytest.raises(LeaseLost):
            threads.submit(lease.seconds_left).result()


class Suspended:
    """The clock of a machine that was suspended, and the loop's, which stood still, beside it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._loop = asyncio.get_running_loop().time

    def __call__(self) -> float:
        return self._loop() + self.seconds


async def test_leader_whose_machine_was_suspended_writes_no_more() -> None:
    """By the loop's clock, which stands still meanwhile, it wrote for ten seconds more, and so did the next leader."""
    server, clock = LeaseServer(), Suspended()
    lease = candidate(server, "one", clock)
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(5)
    clock.seconds += 60
    assert not lease.held
    with pytest.raises(LeaseLost):
        await Fenced(server, lease.seconds_left).request("POST", "/x")
    with pytest.raises(LeaseLost):
        await keeping


async def test_write_that_waits_while_the_machine_is_suspended_is_given_up() -> None:
    """Its own timers stand still meanwhile, too."""
    server, clock = LeaseServer(), Suspended()
    lease = candidate(server, "one", clock)
    await lease.acquire()
    server.delay = 5
    writing = asyncio.create_task(Fenced(server, lease.seconds_left).request("POST", "/x"))
    await asyncio.sleep(3.5)
    clock.seconds += 60
    with pytest.raises(Unavailable):
        await writing
    assert ("POST", "/x", None) not in server.writes


async def test_candidate_whose_machine_was_suspended_takes_no_lease_that_was_renewed_meanwhile() -> None:
    server, clock = LeaseServer(), Suspended()
    one, two = candidate(server, "one"), candidate(server, "two", clock)
    await one.acquire()
    async with during(one.keep()):
        waiting = asyncio.create_task(two.acquire())
        await asyncio.sleep(5)
        clock.seconds += 60
        await asyncio.sleep(60)
        assert one.held
        assert not waiting.done()
    await asyncio.wait_for(waiting, TIMES.duration + 1)


def test_clock_of_a_lease_goes_on_while_the_machine_sleeps() -> None:
    """Where there is such a clock: on Linux."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before = time.clock_gettime(clock)
    assert before <= boot_time() <= time.clock_gettime(clock)


async def test_request_that_hangs_does_not_delay_the_next() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    for _ in range(20):
        server.delay = 3600.0  # until its time-out
        await asyncio.sleep(TIMES.retry_period)
        server.delay = 0.0
        await asyncio.sleep(TIMES.renew_deadline)
        assert lease.held
    keeping.cancel()


async def test_renewal_is_one_request() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    asked: list[str] = []
    server.fault = lambda method, _path: asked.append(method)
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(10 * TIMES.retry_period + 1)
    assert asked == ["PATCH"] * 10
    keeping.cancel()


async def test_holder_that_stands_still_leaves_the_lease_to_another() -> None:
    """It could renew in its thread for ever, and nobody would decide anything."""
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    for _ in range(100):
        lease.beat()
        await asyncio.sleep(1)
    assert lease.held
    began = asyncio.get_running_loop().time()
    with pytest.raises(LeaseLost, match="stands still"):
        await keeping
    waited = asyncio.get_running_loop().time() - began
    assert TIMES.stalled - 1 <= waited <= TIMES.stalled + TIMES.retry_period
    assert not lease.held


@pytest.mark.parametrize("refused", [None, Answer(403, b'{"message": "may not watch"}')])
async def test_candidate_takes_over_when_the_lease_ends_and_not_at_its_next_look(
    refused: Answer | None,
) -> None:
    for _ in range(20):
        server = LeaseServer()
        server.fault = lambda method, _path: refused if method == "WATCH" else None
        one, two = candidate(server, "one"), candidate(server, "two")
        await one.acquire()
        began = asyncio.get_running_loop().time()
        await two.acquire()
        assert asyncio.get_running_loop().time() - began <= TIMES.duration + 0.2


async def test_conflicting_update_does_not_lose_the_lease() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    conflicts = 2

    def touch(method: str, _path: str) -> Answer | None:
        nonlocal conflicts
        if method == "PUT" and conflicts:
            conflicts -= 1
            return Answer(409, b"{}")
        return None

    server.fault = touch
    await asyncio.sleep(60)
    assert lease.held
    keeping.cancel()


async def test_lease_of_another_holder_is_lost() -> None:
    server = LeaseServer()
    lease = candidate(server, "one")
    await lease.acquire()
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "two"
    with pytest.raises(LeaseLost, match="another process"):
        await lease.keep()
    assert not lease.held


@pytest.mark.by_day(4)
@pytest.mark.parametrize("seed", range(20))
async def test_two_candidates_never_lead_at_once(seed: int) -> None:
    dice, server = random.Random(seed), LeaseServer()
    cut: set[str] = set()

    class Connection:
        """One candidate's slow connection to the server, which can be cut."""

        def __init__(self, identity: str) -> None:
            self.identity = identity

        async def request(self, method: str, path: str, *, timeout: float = 30.0, **options: Any) -> Answer:
            delay = dice.random() * 4
            if delay > timeout:
                await asyncio.sleep(timeout)
                raise Unavailable("timeout")
            await asyncio.sleep(delay)
            if self.identity in cut:
                raise Unavailable("cut")
            answer = await server.request(method, path, **options)
            if dice.random() < 0.1:
                raise Unavailable("the answer was lost")
            return answer

        @asynccontextmanager
        async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
            await asyncio.sleep(dice.random() * 4)
            if self.identity in cut:
                raise Unavailable("cut")
            async with server.stream(path, query) as lines:
                yield self.told(lines)

        async def told(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for line in lines:
                await asyncio.sleep(dice.random() * 4)
                if self.identity in cut:
                    raise Unavailable("cut")
                if dice.random() < 0.9:
                    yield line

    leases: dict[str, Lease] = {}

    async def live(identity: str) -> None:
        while True:
            leases[identity] = lease = candidate(Connection(identity), identity)  # type: ignore[arg-type]
            await lease.acquire()
            try:
                await lease.keep()
            except LeaseLost:
                await asyncio.sleep(dice.random() * 5)

    led = set()
    async with during(*(live(identity) for identity in ("one", "two", "three"))):
        for _ in range(600):
            await asyncio.sleep(dice.random())
            if dice.random() < 0.05:
                cut ^= {dice.choice(["one", "two", "three"])}
            leading = [identity for identity, lease in leases.items() if lease.held]
            assert len(leading) <= 1
            led |= set(leading)
    assert led
