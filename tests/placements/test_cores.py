"""How threads that need Python's lock share cores: a trial finds whether one core is faster, and that is kept."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import podium
from podium.agents import impala
from podium.host import CheckedHostEnv, HostEnv, HostEnvs
from podium.placement.cores import PERIOD, TRIAL, OneCore, pushing_nobody_aside
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="threads choose their cores on Linux alone, and need two",
)
LENGTH = 3


def after_trial(seconds: Callable[[bool], float], cores: OneCore, period: int = 0, threads: int = 3) -> bool:
    """Play a trial in which a rollout takes so long on one core, or on all; return what was decided."""
    for position, one in enumerate(TRIAL):
        for _ in range(threads):
            number = period * PERIOD + position
            assert cores.chosen(number) == one
            cores.tell(number, seconds(one))
    return cores.chosen(period * PERIOD + len(TRIAL))


def test_what_was_faster_is_kept_until_the_next_trial() -> None:
    cores = OneCore(threads=3)
    assert after_trial(lambda one: 1.0 if one else 2.0, cores)
    assert cores.chosen(PERIOD - 1)
    assert not after_trial(lambda one: 2.0 if one else 1.0, cores, period=1)
    assert not cores.chosen(2 * PERIOD - 1)
    assert after_trial(lambda one: 1.0 if one else 2.0, cores, period=2)


def test_one_core_must_be_worth_it() -> None:
    assert not after_trial(lambda one: 0.97 if one else 1.0, OneCore(threads=3))
    assert after_trial(lambda one: 0.93 if one else 1.0, OneCore(threads=3))


def test_a_rollout_that_something_held_up_decides_nothing() -> None:
    times = itertools.cycle([1.0, 60.0, 1.0])
    assert not after_trial(lambda one: 2.0 if one else next(times), OneCore(threads=3))


def test_a_thread_that_is_behind_decides_nothing_in_the_next_trial() -> None:
    cores = OneCore(threads=3)
    after_trial(lambda one: 1.0, cores)
    assert not cores.chosen(PERIOD)
    for _ in range(9):
        cores.tell(3, 0.01)  # A rollout on one core, of the trial before.
    assert not after_trial(lambda one: 1.0, cores, period=1)


def test_without_a_trial_nothing_is_kept() -> None:
    cores = OneCore(threads=3)
    assert not cores.chosen(0)
    assert not cores.chosen(len(TRIAL))


def test_numbers_count_from_the_first_and_who_is_behind_starts_nothing() -> None:
    cores = OneCore(threads=2)
    assert [cores.chosen(1000 + number) for number in range(len(TRIAL))] == list(TRIAL)
    assert not cores.chosen(1000 + PERIOD + len(TRIAL))
    assert not cores.chosen(1000 + 2)  # Of the trial before.


def test_a_thread_and_those_it_starts_are_where_they_should_be_while_they_play() -> None:
    everywhere, cores = os.sched_getaffinity(0), OneCore(threads=2)
    for number, one in enumerate(TRIAL):
        where: list[set[int]] = []
        with cores.rollout(number):
            thread = threading.Thread(target=lambda where=where: where.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
            assert where == [os.sched_getaffinity(0)] and len(where[0]) == (1 if one else len(everywhere))
        assert os.sched_getaffinity(0) == everywhere
    with pytest.raises(ZeroDivisionError), cores.rollout(2):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == everywhere


def test_a_single_thread_stays_where_it_is() -> None:
    cores, everywhere = OneCore(threads=1), os.sched_getaffinity(0)
    for number in range(len(TRIAL) + 1):
        with cores.rollout(number):
            assert os.sched_getaffinity(0) == everywhere


def test_only_while_it_plays_a_thread_is_scheduled_as_one_that_pushes_nobody_aside() -> None:
    before = os.sched_getscheduler(0)
    with pushing_nobody_aside():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == before


class Seen:
    """Where environments were, made or stepped, by thread; and one that fails once."""

    def __init__(self, fails_at: int | None = None):
        self.made: list[int] = []
        self.stepped: dict[str, list[frozenset[int]]] = {}
        self.fails_at = fails_at

    def envs(self) -> HostEnvs:
        spec = EnvSpec("seen", ArraySpec((2,)), DiscreteSpec(2), max_episode_steps=1000)
        return HostEnvs(spec, lambda num_envs, *_: self._make(spec, num_envs), resets_in_next_step=False)

    def _make(self, spec: EnvSpec, num_envs: int) -> HostEnv:
        self.made.append(len(os.sched_getaffinity(0)))
        return Watching(spec, num_envs, self)


class Watching(CheckedHostEnv):
    """Environments of no content, which note the cores that they may run on."""

    def __init__(self, spec: EnvSpec, num_envs: int, seen: Seen):
        super().__init__(spec, num_envs)
        self._seen = seen

    def _step(self) -> TimeStep:
        obs, ended = np.zeros((self.num_envs, 2), np.float32), np.zeros(self.num_envs, bool)
        return TimeStep(obs, np.zeros(self.num_envs, np.float32), ended, ended, obs)  # type: ignore[arg-type]

    def _reset(self) -> TimeStep:
        return self._step()

    def _send(self, action: np.ndarray) -> None:
        pass

    def _recv(self) -> TimeStep:
        steps = self._seen.stepped.setdefault(threading.current_thread().name, [])
        steps.append(frozenset(os.sched_getaffinity(0)))
        if len(steps) == self._seen.fails_at:
            self._seen.fails_at = None
            raise OSError("the simulator is gone")
        return self._step()

    def _close(self) -> None:
        pass


PLACEMENTS: dict[str, Any] = {
    "CentralInference": podium.CentralInference(envs_per_worker=2, devices=1, restarts=1),
    "Sebulba": podium.Sebulba(actor_threads=2, groups=2),
    "DistributedActors": podium.DistributedActors(workers=4, restarts=1),
    "ParameterServer": podium.ParameterServer(workers=4, devices=1, restarts=1),
    "LocalSGD": podium.LocalSGD(workers=4, devices=1),
}


def run(seen: Seen, placement: Any, updates: int) -> None:
    agent = impala.make(impala.Config(hidden_sizes=(4,)))
    program = placement.build(agent, seen.envs(), num_envs=8, rollout_length=LENGTH, max_updates=updates)
    try:
        program.chunk(program.init(0), updates)
    finally:
        program.close()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_threads_that_step_environments_try_one_core_and_all_are_on_the_same(name: str) -> None:
    """Of DistributedActors' workers, whose rollouts are taken as they come, one may play fewer than others."""
    seen, everywhere = Seen(), frozenset(os.sched_getaffinity(0))
    run(seen, PLACEMENTS[name], len(TRIAL))
    assert len(seen.stepped) == 4 and os.sched_getaffinity(0) == everywhere
    on_one = set[frozenset[int]]()
    for steps in seen.stepped.values():
        places = [len(place) == 1 for place in steps[: len(TRIAL) * LENGTH : LENGTH]]
        assert places == list(TRIAL[: len(places)])
        assert len(places) == len(TRIAL) or name == "DistributedActors"
        on_one |= set(steps) - {everywhere}
    assert len(on_one) == 1


@pytest.mark.parametrize("name", ["CentralInference", "DistributedActors", "ParameterServer"])
def test_an_environment_made_anew_may_start_threads_on_all_cores(name: str) -> None:
    seen = Seen(fails_at=2 * LENGTH + 2)  # In a rollout that is played on one core.
    run(seen, PLACEMENTS[name], len(TRIAL))
    assert seen.made == [len(os.sched_getaffinity(0))] * 5
