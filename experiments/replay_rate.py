"""Measure what a replay holds and how fast it is sampled, beside one of whole stacks; see `benchmark.py replay`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import podium
from podium.film import stacks_of
from podium.host import HostEnvFactory, on_host
from podium.ranges import check_fields
from podium.replay import Replay, Transition
from podium.types import ArraySpec, DiscreteSpec, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Fill a uniform replay with random play, and sample it; beside it one that keeps whole stacks of frames.

    Memory is what the compiled programs say: the replay, and what inserting or sampling needs besides. The play of
    `recorded` steps is inserted again and again. Both are sampled in turn; the one of whole stacks holds
    `whole_capacity` steps, because more may not fit, and rates hardly depend on it.
    """

    env: str = "Pong-v5"
    """Environment, of either kind."""
    capacity: int = 1_000_000
    """Steps that the replay holds."""
    whole_capacity: int = 100_000
    """Steps that the one of whole stacks holds; 0 leaves it out."""
    num_envs: int = 8
    """Environments side by side."""
    rollout_length: int = 4
    """Steps of each that are inserted at once."""
    batch_size: int = 32
    """Transitions in a minibatch."""
    n_step: int = 1
    """Steps of a transition."""
    recorded: int = 2_000
    """Steps of play."""
    updates: int = 200
    """Minibatches of a turn."""
    repeats: int = 9
    """Turns of each."""


class _Filled(NamedTuple):
    """A full replay: its bytes by the compiled programs, steps inserted a second, and what samples it."""

    memory: int
    steps_per_second: float
    sample: Callable[[int], Any]


def measure(flags: ReplayFlags) -> dict[str, Any]:
    """Return bytes, medians of rates, and how they compare."""
    numbers = "capacity", "num_envs", "rollout_length", "batch_size", "n_step", "recorded", "updates", "repeats"
    check_fields(flags, counts=numbers, naturals=("whole_capacity",))
    rollouts, item, specs = _play(flags)
    stacks = stacks_of(specs, item.obs)
    kept = _fill(flags, flags.capacity, item, rollouts, stacks)
    whole = _fill(flags, flags.whole_capacity, item, rollouts, None) if stacks and flags.whole_capacity else None
    rates: list[list[float]] = [[], []]
    for _ in range(flags.repeats):
        for each, filled in zip(rates, (kept, whole), strict=True):
            if filled is not None:
                each.append(flags.updates * flags.batch_size / _seconds(filled.sample, flags.updates))
    row = {
        "what": "replay",
        **dataclasses.asdict(flags),
        "frames_kept_once": stacks is not None,
        "bytes": kept.memory,
        "bytes_per_step": kept.memory / flags.capacity,
        "samples_per_second": statistics.median(rates[0]),
        "inserted_per_second": kept.steps_per_second,
    }
    if whole is None:
        return row
    return {
        **row,
        "whole_bytes_per_step": whole.memory / flags.whole_capacity,
        "whole_samples_per_second": statistics.median(rates[1]),
        "whole_inserted_per_second": whole.steps_per_second,
        "samples_ratio": statistics.median(a / b for a, b in zip(*rates, strict=True)),
    }


def _seconds(sample: Callable[[int], Any], number: int) -> float:
    began = time.perf_counter()
    for i in range(number):
        sample(i)
    return time.perf_counter() - began


def _fill(flags: ReplayFlags, capacity: int, item: Transition, rollouts: list[Transition], stacks: PyTree) -> _Filled:
    """Fill a replay of so many steps."""
    replay: Replay = podium.replay.uniform(capacity, flags.batch_size, 1, n_step=flags.n_step)
    lanes = next(number for number in range(8, 0, -1) if not (flags.num_envs % number or flags.batch_size % number))
    init = lambda: replay.init(item, flags.num_envs, lanes, flags.rollout_length, stacks=stacks)

    def insert(held: PyTree, items: Transition, gap: Any) -> PyTree:
        assert replay.cut is not None
        return replay.add(replay.cut(held, gap), items)

    held = jax.jit(init)()
    gaps = [jnp.full(flags.num_envs, i == 0) for i in range(len(rollouts))]
    add = jax.jit(insert, donate_argnums=0).lower(held, rollouts[0], gaps[0]).compile()
    sample = jax.jit(replay.sample).lower(jax.random.key(0), held).compile()
    number, began = capacity // (flags.num_envs * flags.rollout_length), time.perf_counter()
    for i in range(number):
        held = jax.block_until_ready(add(held, rollouts[i % len(rollouts)], gaps[i % len(rollouts)]))
    rate = capacity / (time.perf_counter() - began)
    memory = max(_bytes(add), _bytes(sample))
    keys = [jax.random.key(i) for i in range(flags.updates)]
    return _Filled(memory, rate, lambda i: jax.block_until_ready(sample(keys[i], held)))


def _bytes(compiled: Any) -> int:
    used = compiled.memory_analysis()
    return int(
        used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    )


def _play(flags: ReplayFlags) -> tuple[list[Transition], Transition, PyTree]:
    """Play at random; return rollouts [T, B, ...], one item, and the specs of observations."""
    env = podium.envs.make(flags.env)
    factory = env if isinstance(env, HostEnvFactory) else on_host(env)
    host, rng, rows = factory.make(flags.num_envs, 0, 0), np.random.default_rng(0), []
    try:
        timestep = host.reset()
        for _ in range(max(flags.recorded // flags.num_envs, flags.rollout_length)):
            action, obs = _random_action(rng, factory.spec.action, flags.num_envs), timestep.obs
            host.send(action)
            timestep = host.recv()
            after = timestep.obs if factory.resets_in_next_step else timestep.next_obs
            ends = timestep.terminated, timestep.truncated
            step: list[Any] = [obs, action, timestep.reward, *ends, after, timestep.valid]
            rows.append(Transition(*step))
    finally:
        host.close()
    length = flags.rollout_length
    parts = [rows[i : i + length] for i in range(0, len(rows) - length + 1, length)]
    rollouts = [jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *part) for part in parts]
    item = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), rollouts[0])
    return rollouts, item, factory.spec.obs


def _random_action(rng: np.random.Generator, spec: DiscreteSpec | ArraySpec, number: int) -> np.ndarray:
    if isinstance(spec, DiscreteSpec):
        return rng.integers(0, spec.num_values, (number, *spec.shape)).astype(spec.dtype)
    return rng.uniform(-1, 1, (number, *spec.shape)).astype(spec.dtype)
