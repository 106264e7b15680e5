"""The pool of request buffers, which grows while links are slow."""

import threading
from contextlib import ExitStack

import numpy as np

from shoal_trainer.ps.pool import KEEP_SECONDS, MAX_BUFFERS, SLOW_SECONDS, BufferPool
from shoal_trainer.wire.header import Codec


def test_pool_bounds_buffers_in_flight() -> None:
    pool, taken = BufferPool(limit=0), []
    with ExitStack() as stack:
        taken.extend(stack.enter_context(pool.lend(10, Codec.BF16, 40)) for _ in range(2))
        third = threading.Event()

        def wait() -> None:
            with pool.lend(10, Codec.FP32, 40):
                third.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not third.wait(0.05)
    assert third.wait(5)
    thread.join()
    assert [buffer.dtype for buffer in taken] == [np.uint16, np.uint16]


def test_waiter_gets_a_buffer_of_the_right_size() -> None:
    pool, got = BufferPool(limit=0), []

    def wait() -> None:
        with pool.lend(8, Codec.FP32, 32) as buffer:
            got.append(buffer.size)

    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(pool.lend(8, Codec.FP32, 32))
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not pool._changed._waiters:  # type: ignore[attr-defined]
            pass
        with pool.lend(8, Codec.BF16, 16):
            pass
        waiter.join(20)
    assert got == [8]


def test_pool_grows_for_slow_links_and_shrinks_later() -> None:
    now = 0.0
    pool = BufferPool(limit=0, clock=lambda: now)

    def lend() -> object:
        return pool.lend(8, Codec.FP32, 32)

    with ExitStack() as slow:
        for _ in range(2):
            slow.enter_context(lend())  # type: ignore[arg-type]
        now += SLOW_SECONDS
        for _ in range(20):  # fast links share the third buffer
            with lend():  # type: ignore[attr-defined]
                assert pool._made == 3
            now += 0.1
    now += KEEP_SECONDS + 1
    for _ in range(3):
        with lend():  # type: ignore[attr-defined]
            pass
    assert pool._made == 2


def test_pool_does_not_grow_beyond_its_maximum() -> None:
    now = 0.0
    pool = BufferPool(limit=0, clock=lambda: now)
    got = threading.Event()

    def wait() -> None:
        with pool.lend(8, Codec.FP32, 32):
            got.set()

    with ExitStack() as slow:
        for _ in range(MAX_BUFFERS):
            slow.enter_context(pool.lend(8, Codec.FP32, 32))
            now += SLOW_SECONDS
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not pool._changed._waiters:  # type: ignore[attr-defined]
            pass
        assert pool._made == MAX_BUFFERS
        assert not got.is_set()
    waiter.join(20)
    assert got.is_set()
