"""Who asks first is first, a thread may ask again inside, and no interrupt leaves it held."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
from polling import PATIENCE_SECONDS, wait_until

from paged_trt.runtime import fair_lock
from paged_trt.runtime.fair_lock import FairLock


class Worker(threading.Thread):
    """Runs something in the lock once, as soon as it is its turn."""

    def __init__(self, lock: FairLock, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._lock, self._work = lock, work

    def run(self) -> None:
        self._lock.run(self._work)


def start_and_see_it_wait(worker: Worker, lock: FairLock) -> None:
    last = lock._last
    worker.start()
    wait_until(lambda: lock._last is not last)


def assert_is_free(lock: FairLock) -> None:
    """Any thread gets in, and this one too."""
    worker = Worker(lock, lambda: None)
    worker.start()
    worker.join(PATIENCE_SECONDS)
    assert not worker.is_alive()
    assert lock.run(lambda: 5) == 5
    assert not lock.is_waited_for


def test_who_lets_go_and_asks_again_stands_behind_all_who_wait() -> None:
    lock, order, gate = FairLock(), [], threading.Event()
    entered = threading.Event()

    def hold() -> None:
        order.append("holder")
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)

    def loop() -> None:
        for _ in range(3):
            lock.run(hold)

    holder = threading.Thread(target=loop, daemon=True)
    holder.start()
    assert entered.wait(PATIENCE_SECONDS)
    assert not lock.is_waited_for
    workers = [Worker(lock, lambda name=name: order.append(name)) for name in "abcde"]
    for worker in workers:
        start_and_see_it_wait(worker, lock)
        assert lock.is_waited_for
    gate.set()
    for thread in (holder, *workers):
        thread.join(PATIENCE_SECONDS)
    assert order == ["holder", *"abcde", "holder", "holder"]
    assert_is_free(lock)


def test_a_thread_may_ask_again_inside_and_others_still_wait_for_the_outer_work() -> None:
    lock, order = FairLock(), []
    other = Worker(lock, lambda: order.append("other"))

    def inner() -> int:
        order.append("inner")
        return 3

    def outer() -> int:
        start_and_see_it_wait(other, lock)
        found = lock.run(inner) + lock.run(lambda: lock.run(inner))
        assert lock.is_waited_for
        order.append("outer")
        return found

    assert lock.run(outer) == 6
    other.join(PATIENCE_SECONDS)
    assert order == ["inner", "inner", "outer", "other"]
    assert_is_free(lock)


def test_what_the_work_raises_is_raised_and_the_next_one_works() -> None:
    lock = FairLock()

    def nested() -> None:
        with pytest.raises(ZeroDivisionError):
            lock.run(lambda: 1 // 0)
        # The lock is still this thread's.
        assert threading.get_ident() == lock._inside[0]
        assert lock._inside[1].locked()
        raise KeyError("outer")

    with pytest.raises(KeyError, match="outer"):
        lock.run(nested)
    assert_is_free(lock)


class InterruptAt:
    """Raises KeyboardInterrupt at one of the points of a module where the interpreter may.

    Those are the beginning of a function and the end of a call of one written in C.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_filename != fair_lock.__file__ or event not in ("call", "c_return"):
            return
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_nested", [False, True])
def test_an_interrupt_at_any_point_leaves_it_free(is_nested: bool) -> None:
    lock = FairLock()
    came = 0
    for number in range(1, 100):
        interrupt = InterruptAt(number)

        def run(interrupt: InterruptAt = interrupt) -> None:
            sys.setprofile(interrupt)
            try:
                lock.run(lambda: None)
            finally:
                sys.setprofile(None)

        try:
            lock.run(run) if is_nested else run()
        except KeyboardInterrupt:
            came += 1
        assert_is_free(lock)
        if interrupt.left > 0:
            break
    assert came >= (2 if is_nested else 5)
    assert came == number - 1


def test_ctrl_c_ends_the_wait_of_the_main_thread_and_nobody_else_is_disturbed() -> None:
    lock, order, gate = FairLock(), [], threading.Event()
    holds = threading.Event()

    def hold() -> None:
        holds.set()
        assert gate.wait(PATIENCE_SECONDS)
        order.append("holder")

    def interrupt() -> None:
        wait_until(lambda: lock.is_waited_for)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    holder, after = Worker(lock, hold), Worker(lock, lambda: order.append("after"))
    holder.start()
    assert holds.wait(PATIENCE_SECONDS)
    interrupter = threading.Thread(target=interrupt, daemon=True)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        lock.run(lambda: order.append("interrupted"))
    interrupter.join(PATIENCE_SECONDS)
    # Nobody stands in front of this one any more but the holder, who still works.
    start_and_see_it_wait(after, lock)
    assert order == []
    gate.set()
    for worker in (holder, after):
        worker.join(PATIENCE_SECONDS)
    assert order == ["holder", "after"]
    assert_is_free(lock)


def test_a_signal_handler_may_ask_while_its_thread_waits() -> None:
    lock, order, gate = FairLock(), [], threading.Event()
    holds, asks = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        assert gate.wait(PATIENCE_SECONDS)
        order.append("holder")

    def handle(*_: object) -> None:
        asks.set()
        # Nested too, as any work.
        lock.run(lambda: lock.run(lambda: order.append("handler")))

    def signal_it() -> None:
        wait_until(lambda: lock.is_waited_for)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert asks.wait(PATIENCE_SECONDS)
        start_and_see_it_wait(after, lock)
        gate.set()

    holder, after = Worker(lock, hold), Worker(lock, lambda: order.append("after"))
    former = signal.signal(signal.SIGUSR1, handle)
    try:
        holder.start()
        assert holds.wait(PATIENCE_SECONDS)
        signalling = threading.Thread(target=signal_it, daemon=True)
        signalling.start()
        lock.run(lambda: order.append("waiter"))
    finally:
        signal.signal(signal.SIGUSR1, former)
    for thread in (holder, signalling, after):
        thread.join(PATIENCE_SECONDS)
    assert order == ["holder", "handler", "waiter", "after"]
    assert_is_free(lock)
