"""Measure how much of what its slowest stage allows is left to CentralInference; `benchmark.py central`."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from typing import Any

import jax
import numpy as np

import podium
from podium.agents import impala
from podium.host import CheckedHostEnv, HostEnv, HostEnvFactory
from podium.placement.actors.host import HostActing
from podium.placement.actors.inference import CompiledInference, request_shapes
from podium.ranges import check_fields
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep

STAGES = ("environments", "inference", "learning", "serving")

WARM_UP = 4
"""Updates that are not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CentralFlags:
    """Time CentralInference with slow environments, in turn with its stages: environments, inference, learning."""

    num_envs: int = 64
    """Environments."""
    envs_per_actor: int = 1
    """Those of a thread."""
    in_turn: bool = False
    """Whether those of a thread step one after another, as Gymnasium's do in one process; else they step at once, and
    each step waits for the slowest of them."""
    shortest: float = 0.001
    """Seconds that a step sleeps at least."""
    longest: float = 0.005
    """Seconds that it sleeps at most; between the two it is drawn at random."""
    rollout_length: int = 32
    """Steps of every environment in an update."""
    hidden_size: int = 64
    """Units of each of the network's two hidden layers."""
    batch_size: int | None = None
    """Environments that are acted for at once, at most; None is all."""
    max_wait: float = 0.0
    """Seconds that an observation waits for others."""
    queue_depth: int = 1
    """Rollouts that environments may run ahead."""
    updates: int = 30
    """Updates in one timed turn, after a few that are not counted."""
    repeats: int = 3
    """Turns of each."""


class SlowEnv(CheckedHostEnv):
    """Environments that sleep for a random time in each step, and otherwise do next to nothing."""

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, shortest: float, longest: float, in_turn: bool):
        super().__init__(spec, num_envs)
        self._random = np.random.default_rng(seed)
        self._shortest, self._longest, self._in_all = shortest, longest, np.sum if in_turn else np.max
        self._ready = 0.0

    def _step(self) -> TimeStep:
        obs, ended = np.zeros((self.num_envs, 4), np.float32), np.zeros(self.num_envs, bool)
        return TimeStep(obs, np.zeros(self.num_envs, np.float32), ended, ended, obs)  # type: ignore[arg-type]

    def _reset(self) -> TimeStep:
        return self._step()

    def _send(self, action: np.ndarray) -> None:
        seconds = self._random.uniform(self._shortest, self._longest, self.num_envs)
        self._ready = time.perf_counter() + self._in_all(seconds)

    def _recv(self) -> TimeStep:
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return self._step()

    def _close(self) -> None:
        pass


def slow_envs(shortest: float, longest: float, in_turn: bool = False) -> HostEnvFactory:
    """Return environments that sleep between so many seconds in every step, at once or one after another."""
    spec = EnvSpec("slow", ArraySpec((4,)), DiscreteSpec(2), max_episode_steps=1000)

    def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
        return SlowEnv(spec, num_envs, seed + first_index, shortest, longest, in_turn)

    return HostEnvFactory(spec, make, resets_in_next_step=False)


def measure(flags: CentralFlags) -> dict[str, Any]:
    """Measure; see `CentralFlags`. Each turn of the whole stands between two of the environments alone.

    The stages are `environments`, in the same threads; `inference`, full batches one after another; `learning`; and
    `serving`, the whole with environments that take no time: asking, batching, acting and answering, which many threads
    do under Python's one lock. `ratio` is to the slowest of them, and `ratio_of_environments` to the environments.
    """
    check_fields(flags, counts=("num_envs", "envs_per_actor", "rollout_length", "hidden_size", "updates", "repeats"))
    if not 0 <= flags.shortest <= flags.longest:
        raise ValueError(f"shortest={flags.shortest} must be 0 to longest={flags.longest} seconds.")
    if flags.num_envs % flags.envs_per_actor:
        raise ValueError(f"num_envs={flags.num_envs} is not divisible by envs_per_actor={flags.envs_per_actor}.")
    envs = slow_envs(flags.shortest, flags.longest, flags.in_turn)
    alone, turns = [_environments_alone(envs, flags)], []
    for _ in range(flags.repeats):
        turns.append(_turn(envs, flags))
        alone.append(_environments_alone(envs, flags))
        turns[-1]["serving_steps_per_second"] = _turn(slow_envs(0.0, 0.0), flags)["steps_per_second"]
    for turn, before, after in zip(turns, alone, alone[1:], strict=False):
        turn["environments_steps_per_second"] = (before + after) / 2
        turn["ratio"] = turn["steps_per_second"] / min(turn[f"{stage}_steps_per_second"] for stage in STAGES)
        turn["ratio_of_environments"] = turn["steps_per_second"] / turn["environments_steps_per_second"]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "what": "central",
        **dataclasses.asdict(flags),
        **medians,
        "slowest_stage": min(STAGES, key=lambda stage: medians[f"{stage}_steps_per_second"]),
        "ratios": [turn["ratio"] for turn in turns],
    }


def _turn(envs: HostEnvFactory, flags: CentralFlags) -> dict[str, float]:
    """Build, warm up, and time updates that follow one another without a pause; then inference alone."""
    agent = impala.make(impala.Config(hidden_sizes=(flags.hidden_size,) * 2))
    placement = podium.CentralInference(
        flags.envs_per_actor,
        devices=1,
        batch_size=flags.batch_size,
        max_wait=flags.max_wait,
        queue_depth=flags.queue_depth,
    )
    sizes = {"num_envs": flags.num_envs, "rollout_length": flags.rollout_length}
    program = placement.build(agent, envs, max_updates=flags.updates, **sizes)
    steps = flags.num_envs * flags.rollout_length * flags.updates
    try:
        state, _ = program.chunk(program.init(0), min(WARM_UP, flags.updates))
        began = time.perf_counter()
        state, metrics = program.chunk(state, flags.updates)
        seconds = time.perf_counter() - began
    finally:
        program.close()
    values: dict[str, np.ndarray] = {name: np.asarray(value) for name, value in metrics.items()}
    return {
        "steps_per_second": steps / seconds,
        "inference_steps_per_second": _inference_alone(program, placement, state),
        "learning_steps_per_second": steps / float(values["learn_seconds"].sum()),
        "inference_batch": float(values["inference_batch_mean"].mean()),
        "inference_latency_max": float(values["inference_latency_max"].max()),
        "inference_wait_max": float(values["inference_wait_max"].max()),
        "inference_wait_99": float(np.quantile(values["inference_wait_max"], 0.99)),
        "policy_lag_mean": float(values["policy_lag_mean"].mean()),
    }


def _environments_alone(envs: HostEnvFactory, flags: CentralFlags) -> float:
    """Return the steps a second of the same threads, under actions that nobody has to think of."""
    steps, each = flags.rollout_length * max(1, flags.updates // 4), flags.envs_per_actor
    actors = flags.num_envs // each
    barrier, rates = threading.Barrier(actors), [0.0] * actors

    def play(number: int) -> None:
        env = envs.make(each, 0, number * each)
        env.reset()
        barrier.wait()
        action, began = np.zeros(each, np.int32), time.perf_counter()
        for _ in range(steps):
            env.send(action)
            env.recv()
        rates[number] = each * steps / (time.perf_counter() - began)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(actors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def _inference_alone(program: podium.Program, placement: podium.CentralInference, state: Any) -> float:
    """Return the steps a second of acting for full batches, one after the other, with what goes up and comes down."""
    agent, device, sizes = program.agent, program.devices[0], program.sizes
    assert isinstance(program.env, podium.HostEnvFactory)
    acting = HostActing(agent, program.env, sizes.num_envs, sizes.rollout_length)
    size = placement.batch_size or sizes.num_envs
    act = CompiledInference(acting, acting.params_shapes(), device, size).act[size]
    params = agent.actor(program.agent_state(state))
    request = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), request_shapes(acting, size))
    jax.device_get(act(params, request))
    began, calls = time.perf_counter(), 200
    for _ in range(calls):
        jax.device_get(act(params, request))
    return calls * size / (time.perf_counter() - began)
