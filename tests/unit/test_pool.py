"""Jobs on a bounded pool: made as they are needed, stopped by the first failure, and let in as memory allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bridge.converters.pool import WAITING, Room, run_bounded


def test_jobs_are_made_as_they_are_needed() -> None:
    made, done = 0, 0
    ahead: list[int] = []
    lock = threading.Lock()

    def job() -> None:
        nonlocal done
        with lock:
            ahead.append(made - done)
            done += 1

    def jobs() -> Iterator[Callable[[], None]]:
        nonlocal made
        for _ in range(500):
            made += 1
            yield job

    run_bounded(jobs(), 3)
    assert done == 500
    assert max(ahead) <= 3 * WAITING + 1


def test_the_first_failure_stops_what_has_not_begun() -> None:
    begun: list[int] = []

    def job(number: int) -> Callable[[], None]:
        def call() -> None:
            begun.append(number)
            if number == 5:
                raise ValueError("five")

        return call

    with pytest.raises(ValueError, match="five"):
        run_bounded((job(number) for number in range(10_000)), 2)
    assert len(begun) < 100


def test_the_bytes_that_jobs_hold_stay_below_the_limit() -> None:
    """Whatever the order; one that needs more than there is has all of it for itself, and none waits for ever."""
    room, held, most = Room(100), 0, 0
    together: set[frozenset[int]] = set()
    inside: dict[int, int] = {}
    lock = threading.Lock()

    def job(number: int, size: int) -> Callable[[], None]:
        def call() -> None:
            nonlocal held, most
            with room.hold(size):
                with lock:
                    inside[number] = size
                    held += size
                    most = max(most, held if len(inside) > 1 else 0)
                    together.add(frozenset(inside.values()))
                time.sleep(0.001)
                with lock:
                    del inside[number]
                    held -= size

        return call

    sizes = [10, 60, 250, 40, 100, 30, 1, 99] * 10
    run_bounded((job(number, size) for number, size in enumerate(sizes)), 4)
    assert most <= 100
    assert all(len(sizes) == 1 for sizes in together if 250 in sizes)
    assert any(len(sizes) > 1 for sizes in together), "nothing ran side by side"


def test_a_job_that_fails_gives_its_bytes_back() -> None:
    room = Room(10)
    with pytest.raises(ValueError, match="mine"), room.hold(10):
        raise ValueError("mine")
    entered = threading.Event()

    def enter() -> None:
        with room.hold(10):
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert entered.wait(10)
