"""Threads that end together, and one that is looked after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from podium.placement.actors import ActorError, Watch, look_after
from podium.placement.together import together

Tick = Callable[[], None]


def nothing() -> None:
    """Tick."""


def test_all_run_at_the_same_time_and_their_results_come_in_order() -> None:
    barrier = threading.Barrier(3, timeout=10)
    names = together([lambda tick: (barrier.wait(), threading.current_thread().name)[1]] * 3, nothing)
    mine = threading.current_thread().name
    assert names == [mine, f"{mine}-1", f"{mine}-2"]


def test_one_runs_in_the_thread_that_calls() -> None:
    assert together([lambda tick: threading.current_thread()], nothing) == [threading.current_thread()]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_that_fails_ends_the_others_which_are_waited_for(failing: int) -> None:
    left = []

    def work(number: int, tick: Tick) -> None:
        try:
            if number == failing:
                raise OSError(f"number {number}")
            while True:
                tick()
                time.sleep(0.001)
        finally:
            left.append(number)

    with pytest.raises(OSError, match=f"number {failing}"):
        together([lambda tick, number=number: work(number, tick) for number in range(3)], nothing)  # type: ignore[misc]
    assert sorted(left) == [0, 1, 2]


def test_a_tick_that_raises_in_one_thread_ends_all() -> None:
    ticks = []

    def tick() -> None:
        ticks.append(threading.current_thread())
        if len(ticks) > 20:
            raise InterruptedError("over")

    def work(tick: Tick) -> None:
        while True:
            tick()
            time.sleep(0.001)

    with pytest.raises(InterruptedError, match="over"):
        together([work, work], tick)
    assert len(set(ticks)) == 2


def test_what_is_looked_after_returns_raises_or_is_missed() -> None:
    assert [look_after("podium-test", lambda tick, i=i: tick() or i, 5.0) for i in range(200)] == list(range(200))
    with pytest.raises(ActorError, match="podium-test died of KeyError"):
        look_after("podium-test", lambda tick: {}["nothing"], 5.0)
    release = threading.Event()
    with pytest.raises(ActorError, match=r"podium-test has not come a step further for 0\.3 s"):
        look_after("podium-test", lambda tick: release.wait(20), 0.3)
    release.set()


def test_who_is_no_longer_looked_after_leaves_off(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0]

    def work(tick: Tick) -> None:
        while True:
            steps[0] += 1
            time.sleep(0.01)
            tick()

    def interrupt(self: Watch, alive: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "look", interrupt)
    with pytest.raises(KeyboardInterrupt):
        look_after("podium-test", work, 5.0)
    time.sleep(0.2)
    seen = steps[0]
    time.sleep(0.2)
    assert steps[0] == seen > 0
