"""Central inference's server: who acts for whom, and when; in threads, with a policy that is a sum."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from podium.placement.actors import Slot, Stopped
from podium.placement.inference import Answer, Question, Request, Server, ServingError


def add(params: float, question: Question) -> Answer:
    return Answer(question.obs + params, question.first, ())


def request_of(number: float, kind: type[Request] = Request) -> Request:
    request = kind()
    question = Question(np.zeros((1, 2), np.uint32), (), np.array([number]), np.array([False]))
    request.question = jax.tree.flatten(question)
    return request


class Serving:
    """A server, and threads that ask it."""

    def __init__(self, most: int = 4, max_wait: float = 0.0, act: Any = add):
        self.slot, self.stop = Slot(), threading.Event()
        self.slot.put(100.0, 7)
        self.server = Server(dict.fromkeys((most,), act), self.slot, most, max_wait, self.stop)
        self.answers: dict[float, float] = {}
        self.threads: list[threading.Thread] = []

    def tick(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def ask(self, number: float, kind: type[Request] = Request) -> threading.Thread:
        def work() -> None:
            try:
                self.answers[number] = float(self.server.ask(request_of(number, kind), self.tick).action[0])
            except Stopped:
                pass

        thread = threading.Thread(target=work)
        thread.start()
        self.threads.append(thread)
        return thread

    def await_that(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def serving(request: pytest.FixtureRequest) -> Any:
    made: list[Serving] = []

    def make(*arguments: Any, **settings: Any) -> Serving:
        made.append(Serving(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Blocking:
    """A policy that lets nobody through before it is told to."""

    def __init__(self) -> None:
        self.calls, self.go = 0, threading.Event()

    def __call__(self, params: float, question: Question) -> Answer:
        self.calls += 1
        assert self.go.wait(30)
        return add(params, question)


def test_alone_one_acts_at_once_where_nothing_is_waited_for(serving: Any) -> None:
    one = serving()
    one.ask(1.0).join(30)
    assert one.answers == {1.0: 101.0}
    assert one.server.story()[:2] == (1, 1)


def test_who_fills_a_batch_acts_for_all_without_waiting(serving: Any) -> None:
    two = serving(most=2, max_wait=9.0)
    first = two.ask(1.0)
    two.await_that(lambda: len(two.server._waiting) == 1)
    began = time.monotonic()
    two.ask(2.0).join(30)
    first.join(30)
    assert two.answers == {1.0: 101.0, 2.0: 102.0}
    assert time.monotonic() - began < 5
    story = two.server.story()
    assert story[:2] == (1, 2)
    assert story.wait_max < 5


def test_one_who_waits_alone_acts_when_the_bound_is_reached(serving: Any) -> None:
    alone = serving(max_wait=0.1)
    began = time.monotonic()
    alone.ask(1.0).join(30)
    assert 0.1 <= time.monotonic() - began < 5
    assert alone.answers == {1.0: 101.0}
    assert 0.1 <= alone.server.story().wait_max < 5


class Overslept(Request):
    """One whose thread is not woken in time, as where it cannot get Python's lock."""

    alarm = threading.Event()

    def sleep(self, tick: Any, until: float = math.inf) -> None:
        assert self.alarm.wait(30)


def test_whoever_asks_after_the_bound_acts_though_the_first_oversleeps(serving: Any) -> None:
    late = serving(max_wait=0.05)
    first = late.ask(1.0, Overslept)
    late.await_that(lambda: len(late.server._waiting) == 1)
    time.sleep(0.1)
    late.ask(2.0).join(30)
    assert late.answers == {2.0: 102.0}
    assert late.server.story()[:2] == (1, 2)  # For both.
    Overslept.alarm.set()
    first.join(30)
    assert late.answers == {1.0: 101.0, 2.0: 102.0}


def test_those_who_come_meanwhile_are_one_batch_of_the_most_that_fit(serving: Any) -> None:
    act = Blocking()
    busy = serving(most=3, act=act)
    busy.ask(0.0)
    busy.await_that(lambda: act.calls == 1)
    for number in range(1, 6):
        busy.ask(float(number))
    busy.await_that(lambda: len(busy.server._waiting) == 5)
    act.go.set()
    for thread in busy.threads:
        thread.join(30)
    assert busy.answers == {float(n): 100.0 + n for n in range(6)}
    assert busy.server.story()[:2] == (3, 6)  # One, three, two.


def test_being_woken_twice_does_not_disturb_the_next_question(serving: Any) -> None:
    server, request = serving(max_wait=0.05).server, request_of(1.0)
    request.wake()
    request.wake()
    began = time.monotonic()
    assert server.ask(request, lambda: None).action == [101.0]
    assert time.monotonic() - began >= 0.05
    until = time.perf_counter() + 0.05
    request.sleep(lambda: None, until)
    assert time.perf_counter() >= until


def test_who_waits_while_another_acts_hears_that_the_run_is_over(serving: Any) -> None:
    act = Blocking()
    ended = serving(act=act)
    ended.ask(0.0)
    ended.await_that(lambda: act.calls == 1)
    waiting = ended.ask(1.0)
    ended.stop.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert ended.answers == {}
    act.go.set()


def test_a_policy_that_fails_names_its_failure() -> None:
    def fail(*_: Any) -> Any:
        raise FloatingPointError("it burst")

    with pytest.raises(ServingError, match="acting for whoever asked failed: FloatingPointError\\('it burst'\\)"):
        Serving(act=fail).server.ask(request_of(1.0), lambda: None)
