"""Central inference's server: what is acted for in one batch, and when; with a policy that is a sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from podium.agent import ActOutput
from podium.placement.actors.inference import ActRequest, InferenceServer, Replies, get
from podium.placement.threads.channels import LatestParams
from podium.placement.threads.supervision import ActorError, SupervisedThread, Supervisor, end_threads

PARAMS, VERSION = 100.0, 7


class Policy:
    """Adds the parameters to the observations, once it is let; notes the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, params: float, request: ActRequest) -> ActOutput:
        self.sizes.append(len(request.obs))
        assert self.go.wait(30)
        return ActOutput(request.obs + params, ())


class Serving:
    """A server in a thread of its own, and those who ask it."""

    def __init__(self, most: int, max_wait: float = 0.0, sizes: tuple[int, ...] = (), each: int = 1, act: Any = None):
        self.policy, self.stop, self.each = act or Policy(), threading.Event(), each
        latest = LatestParams()
        latest.publish(PARAMS, VERSION)
        self.server = InferenceServer(dict.fromkeys((*sizes, most), self.policy), each, max_wait, latest)
        serve = lambda heartbeat: self.server.serve(self.stop, heartbeat)
        self.thread = SupervisedThread("podium-inference-0", serve, self.stop)
        self.waiting: dict[float, Replies] = {}
        self.thread.start()

    def ask(self, *numbers: float) -> None:
        for number in numbers:
            request = ActRequest(
                np.zeros((self.each, 2), np.uint32), (), np.full(self.each, number), np.zeros(self.each, bool)
            )
            self.waiting[number] = Replies()
            self.server.ask(request, self.waiting[number])

    def replies(self) -> dict[float, list[float]]:
        """Return the actions of all who asked, by what they observed."""
        got = {}
        for number, replies in self.waiting.items():
            reply, version = replies.get(timeout=30)
            assert version == VERSION
            got[number] = list(reply.action)
        self.waiting = {}
        return got

    def await_that(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def serving() -> Iterator[Any]:
    made: list[Serving] = []

    def make(*arguments: Any, **settings: Any) -> Serving:
        made.append(Serving(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        if isinstance(each.policy, Policy):
            each.policy.go.set()
        end_threads([each.thread], each.stop)
        assert not each.thread.is_alive()


def test_alone_one_is_acted_for_at_once_where_nothing_is_waited_for(serving: Any) -> None:
    one = serving(4)
    one.ask(1.0)
    assert one.replies() == {1.0: [101.0]}
    ((envs, waited, seconds),) = one.server.served
    assert envs == 1 and waited < 0.1 and seconds >= 0


def test_a_full_batch_is_acted_for_without_waiting(serving: Any) -> None:
    two = serving(2, max_wait=9.0)
    began = time.monotonic()
    two.ask(1.0, 2.0)
    assert two.replies() == {1.0: [101.0], 2.0: [102.0]}
    assert time.monotonic() - began < 5
    ((envs, waited, _),) = two.server.served
    assert envs == 2 and waited < 5


def test_one_who_waits_alone_is_acted_for_when_the_bound_is_reached(serving: Any) -> None:
    alone = serving(4, max_wait=0.5)
    began = time.monotonic()
    alone.ask(1.0)
    assert alone.replies() == {1.0: [101.0]}
    assert 0.5 <= time.monotonic() - began < 5
    ((_, waited, _),) = alone.server.served
    assert 0.5 <= waited < 5


def test_a_server_that_waits_for_others_is_well(serving: Any) -> None:
    slow = serving(4, max_wait=1.0)
    slow.ask(1.0)
    began = slow.thread.heartbeats
    slow.replies()
    assert slow.thread.heartbeats >= began + 3  # It waits for 0.2 s at a time.


def test_those_who_come_meanwhile_are_one_batch_of_the_most_that_fit(serving: Any) -> None:
    busy = serving(3)
    busy.policy.go.clear()
    busy.ask(0.0)
    busy.await_that(lambda: len(busy.policy.sizes) == 1)
    busy.ask(1.0, 2.0, 3.0, 4.0, 5.0)
    busy.policy.go.set()
    assert busy.replies() == {float(n): [100.0 + n] for n in range(6)}
    assert [envs for envs, _, _ in busy.server.served] == [1, 3, 2]


@pytest.mark.parametrize(
    ("number", "batches"), [(1, [2]), (2, [4]), (3, [8]), (4, [8]), (5, [8, 2])], ids=lambda value: str(value)
)
def test_a_batch_is_padded_to_the_smallest_size_that_holds_it(number: int, batches: list[int], serving: Any) -> None:
    """Requests for two environments each; nine fit, but no fifth request, and a size of nine is never needed."""
    padded = serving(9, sizes=(2, 4, 8), each=2)
    padded.policy.go.clear()
    padded.ask(0.0)
    padded.await_that(lambda: len(padded.policy.sizes) == 1)
    asked = [float(n) for n in range(1, number + 1)]
    padded.ask(*asked)
    padded.policy.go.set()
    assert padded.replies() == {n: [100.0 + n] * 2 for n in (0.0, *asked)}
    assert padded.policy.sizes == [2, *batches]


def test_who_waits_while_another_is_acted_for_hears_that_the_run_is_over(serving: Any) -> None:
    ended = serving(1)
    ended.policy.go.clear()
    ended.ask(0.0, 1.0)

    def work(heartbeat: Callable[[], None]) -> None:
        get(ended.waiting[1.0], heartbeat)

    thread = SupervisedThread("podium-actor-0", work, ended.stop)
    thread.start()
    end_threads([thread], ended.stop)
    assert not thread.is_alive() and thread.error is None and not thread.done


def test_a_policy_that_fails_names_the_thread_and_the_failure() -> None:
    def fail(*_: Any) -> Any:
        raise FloatingPointError("it burst")

    failing = Serving(1, act=fail)
    failing.ask(1.0)
    failing.await_that(lambda: not failing.thread.is_alive())
    with pytest.raises(ActorError, match="(?s)podium-inference-0 died of FloatingPointError.*in fail.*it burst"):
        Supervisor(failing.thread, 60.0).check(alive=False)
