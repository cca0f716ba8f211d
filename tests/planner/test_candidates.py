"""How each placement's iteration is made of stages: exact, with stage times that are given and nothing measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

import podium
from podium.planner.candidates import CANDIDATES
from podium.planner.models import Cost, Prediction, Stage, Turn, predict

ROWS = {candidate.name: candidate for candidate in CANDIDATES}
NUM_ENVS, LENGTH = 8, 10
STEPS = NUM_ENVS * LENGTH


class Bench:
    """Stages that cost what is said here; those of a share of the environments cost that share."""

    num_envs, length, env = NUM_ENVS, LENGTH, "a pure one"

    def rollout(self, num_envs: int, devices: Any) -> tuple[Stage, ...]:
        share = num_envs / NUM_ENVS / len(devices)
        return Stage("environment", Cost(2.0 * share, 2.0 * share)), Stage("inference", Cost(1.0 * share, 1.0 * share))

    def update(self, num_envs: int, devices: Any) -> Stage:
        return Stage("update", Cost(4.0 * num_envs / NUM_ENVS / len(devices), 4.0 * num_envs / NUM_ENVS))

    def single(self, program: Any) -> tuple[Stage, ...]:
        return Stage("rollout", Cost(30.0, 30.0)), Stage("update", Cost(10.0, 10.0))

    def acting(self, num_envs: int, device: Any, threads: int) -> Cost:
        return Cost(0.1, 0.05)

    def stepping(self, num_envs: int, batches: int) -> Turn:
        return Turn(Cost(0.4, 0.0), 0.4)

    def transfer(self, num_envs: int, source: Any, devices: Any) -> Cost:
        return Cost(0.5, 0.5)

    def gradients(self, num_envs: int, workers: int, device: Any) -> tuple[tuple[Stage, ...], Stage]:
        own = Stage("environment", Cost(2.0, 0.5)), Stage("gradients", Cost(3.0, 1.0))
        return own, Stage("server", Cost(1.0, 0.25))

    def generation(self, small: Any, members: int) -> tuple[tuple[Stage, ...], float]:
        return (Stage("episodes", Cost(0.5 * members, 0.5 * members)),), 7.0 * members


def predicted(name: str, placement: Any, cores: float, **program: Any) -> tuple[Prediction, float]:
    bench = Bench()
    bench.env = program.pop("env", bench.env)
    made = ROWS[name].iteration(bench, placement, SimpleNamespace(**program))  # type: ignore[arg-type]
    return predict(made.lines, cores), made.steps


def test_single_and_anakin_do_one_thing_after_another() -> None:
    single = predicted("Single", podium.Single(), 2, devices=jax.devices()[:1])
    assert single == (Prediction(40.0, "rollout", 0.75, "the loop"), STEPS)
    anakin = predicted("Anakin", podium.Anakin(1), 2, devices=jax.devices()[:1])
    assert anakin == (Prediction(7.0, "update", 4 / 7, "the program"), STEPS)


def test_workers_of_local_sgd_go_on_side_by_side() -> None:
    program = {"devices": jax.devices()[:2], "workers": 2}
    # Of each worker (2 + 1 + 4) / 2, on a core of its own, or one after the other on one.
    assert predicted("LocalSGD", podium.LocalSGD(2), 2, **program)[0].seconds == 3.5
    assert predicted("LocalSGD", podium.LocalSGD(2), 1, **program)[0] == Prediction(7.0, "update", 4 / 7, "cores")


def test_sebulba_takes_as_long_as_its_slower_side() -> None:
    device = jax.devices()[:1]
    placement = podium.Sebulba(device, device)
    # Each of two groups acts: 10 steps of 0.4 + 0.1. Learning: 0.5 + 4. Cores: 2 * 10 * 0.05 + 4.5.
    assert predicted("Sebulba", placement, 2)[0] == Prediction(5.0, "environment", 0.8, "acting")
    assert predicted("Sebulba", placement, 1)[0] == Prediction(5.5, "update", 4 / 5.5, "cores")


def test_threads_wait_for_the_server_that_acts_for_all() -> None:
    placement, program = podium.CentralInference(envs_per_worker=2), {"devices": jax.devices()[:1]}
    # A thread: 10 steps of 0.4 + 0.1. Learning: 0.5 + 4.
    assert predicted("CentralInference", placement, 2, **program)[0] == Prediction(5.0, "environment", 0.8, "acting")


def test_workers_play_beside_the_learner() -> None:
    device = jax.devices()[:1]
    placement = podium.DistributedActors(workers=4, worker_devices=device, learner_devices=device)
    # A worker plays a quarter of 2 + 1, the learner takes 0.5 + 4; on one core all of it adds up.
    assert predicted("DistributedActors", placement, 4)[0] == Prediction(4.5, "update", 4 / 4.5, "learning")
    assert predicted("DistributedActors", placement, 1)[0] == Prediction(7.5, "update", 4 / 7.5, "cores")
    # On the host: 10 steps of 0.4 + 0.1.
    assert predicted("DistributedActors", placement, 4, env=None)[0] == Prediction(5.0, "environment", 0.8, "a worker")


def test_a_server_serves_one_worker_at_a_time() -> None:
    program = {"devices": jax.devices()[:1]}
    four = predicted("ParameterServer", podium.ParameterServer(workers=4), 4, **program)[0]
    assert four == Prediction(6.0, "gradients", 0.5, "a worker")  # 2 + 3 + 1; the server takes 4 * 1.
    eight = predicted("ParameterServer", podium.ParameterServer(workers=8), 8, **program)[0]
    assert eight == Prediction(8.0, "server", 1.0, "the server")
    few = predicted("ParameterServer", podium.ParameterServer(workers=4), 1, **program)[0]
    assert few == Prediction(7.0, "gradients", 4 / 7, "cores")  # 4 * (0.5 + 1 + 0.25).


def test_a_generation_costs_as_its_members_and_counts_what_they_played() -> None:
    placement, env = podium.Evolution(devices=1), podium.envs.make("podium/Catch")
    program = placement.build(podium.agents.make("ppo"), env, num_envs=32, rollout_length=9)
    made = ROWS["Evolution"].iteration(Bench(), placement, program)  # type: ignore[arg-type]
    assert predict(made.lines, 2) == Prediction(16.0, "episodes", 1.0, "the program") and made.steps == 7 * 32
    assert [name for name, row in ROWS.items() if not row.alike] == ["Evolution"]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_workers_divide_among_devices(devices: int) -> None:
    (placement,) = ROWS["ParameterServer"].values(devices, 64)
    assert placement.workers == 4 and placement.devices == devices
