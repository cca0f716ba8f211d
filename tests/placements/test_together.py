"""Threads that end together, and one that is supervised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from podium.placement.threads.supervision import ActorError, Supervisor, run_together, supervise

Heartbeat = Callable[[], None]


def nothing() -> None:
    """Do nothing."""


def test_all_run_at_the_same_time_and_their_results_come_in_order() -> None:
    barrier = threading.Barrier(3, timeout=10)
    names = run_together([lambda heartbeat: (barrier.wait(), threading.current_thread().name)[1]] * 3, nothing)
    mine = threading.current_thread().name
    assert names == [mine, f"{mine}-1", f"{mine}-2"]


def test_one_runs_in_the_thread_that_calls() -> None:
    assert run_together([lambda heartbeat: threading.current_thread()], nothing) == [threading.current_thread()]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_that_fails_ends_the_others_which_are_waited_for(failing: int) -> None:
    left = []

    def work(number: int, heartbeat: Heartbeat) -> None:
        try:
            if number == failing:
                raise OSError(f"number {number}")
            while True:
                heartbeat()
                time.sleep(0.001)
        finally:
            left.append(number)

    with pytest.raises(OSError, match=f"number {failing}"):
        run_together([lambda heartbeat, number=number: work(number, heartbeat) for number in range(3)], nothing)  # type: ignore[misc]
    assert sorted(left) == [0, 1, 2]


def test_a_heartbeat_that_raises_in_one_thread_ends_all() -> None:
    beats = []

    def heartbeat() -> None:
        beats.append(threading.current_thread())
        if len(beats) > 20:
            raise InterruptedError("over")

    def work(heartbeat: Heartbeat) -> None:
        while True:
            heartbeat()
            time.sleep(0.001)

    with pytest.raises(InterruptedError, match="over"):
        run_together([work, work], heartbeat)
    assert len(set(beats)) == 2


def test_what_is_supervised_returns_raises_or_is_missed() -> None:
    for i in range(200):
        assert supervise("podium-test", lambda heartbeat, i=i: heartbeat() or i, 5.0) == i
    with pytest.raises(ActorError, match="podium-test died of KeyError"):
        supervise("podium-test", lambda heartbeat: {}["nothing"], 5.0)
    release = threading.Event()
    with pytest.raises(ActorError, match=r"podium-test has not come a step further for 0\.3 s"):
        supervise("podium-test", lambda heartbeat: release.wait(20), 0.3)
    release.set()


def test_who_is_no_longer_supervised_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0]

    def work(heartbeat: Heartbeat) -> None:
        while True:
            steps[0] += 1
            time.sleep(0.01)
            heartbeat()

    def interrupt(self: Supervisor, alive: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        supervise("podium-test", work, 5.0)
    time.sleep(0.2)
    seen = steps[0]
    time.sleep(0.2)
    assert steps[0] == seen > 0
