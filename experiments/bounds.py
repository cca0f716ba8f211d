"""What bounds a rate: environments stepped with random actions, and products of matrices."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import machine

import podium
from podium import ArraySpec, DiscreteSpec
from podium.env import auto_reset
from podium.ranges import check_fields
from podium.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvFlags:
    """Time bare stepping with random actions in one compiled scan: the bound of what an agent can reach."""

    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    num_envs: int = 64
    """Environments side by side."""
    num_steps: int = 10_000_000
    """Environment steps of a repeat; rounded down to whole steps of all environments."""
    repeats: int = 5
    """Timed repeats, after a warm-up that is not counted."""
    seed: int = 0
    """Fixes everything random."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulFlags:
    """Time float32 matrix products on one device: the machine's bound."""

    size: int = 1024
    """Rows and columns of the matrices."""
    repeats: int = 5
    """Timed repeats, after a warm-up that is not counted."""


def of_environments(flags: EnvFlags) -> dict[str, Any]:
    """Measure bare stepping; see `EnvFlags`."""
    check_fields(flags, counts=("num_envs", "num_steps", "repeats"))
    env = auto_reset(podium.envs.make_pure(flags.env))
    length = flags.num_steps // flags.num_envs
    if not length:
        raise ValueError(f"num_steps={flags.num_steps} is less than num_envs={flags.num_envs}; use {flags.num_envs}.")
    act = random_action(env.spec.action)

    def body(state: tuple[Any, Array], key: Array) -> tuple[tuple[Any, Array], None]:
        env_state, total = state
        act_key, step_key = jax.random.split(key)
        action = act(act_key, flags.num_envs)
        env_state, timestep = jax.vmap(env.step)(jax.random.split(step_key, flags.num_envs), env_state, action)
        # What an agent would read has to be computed here too.
        seen = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(timestep.obs))
        return (env_state, total + timestep.reward.sum() + 1e-9 * seen), None

    def rollout(key: Array, env_state: Any) -> tuple[Any, Array]:
        def step(t: Array, state: tuple[Any, Array]) -> tuple[Any, Array]:
            return body(state, jax.random.fold_in(key, t))[0]

        return jax.lax.fori_loop(0, length, step, (env_state, jnp.zeros(())))

    key = jax.random.key(flags.seed)
    env_state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(key, flags.num_envs))
    began = time.perf_counter()
    compiled = jax.jit(rollout).lower(key, env_state).compile()
    compile_seconds = time.perf_counter() - began
    timings = machine.repeat(lambda: compiled(key, env_state), flags.repeats)
    return {
        "what": "env",
        "agent": "random",
        "env": flags.env,
        "num_envs": flags.num_envs,
        "devices": 1,
        "num_steps": length * flags.num_envs,
        **machine.timing(length * flags.num_envs, timings),
        "compile_seconds": compile_seconds,
    }


def of_products(flags: MatmulFlags) -> dict[str, Any]:
    """Measure matrix products; see `MatmulFlags`."""
    check_fields(flags, counts=("size", "repeats"))
    began = time.perf_counter()
    timings, flops, compile_seconds = _time_matmul(flags.size, flags.repeats)
    return {
        "what": "matmul",
        "size": flags.size,
        "devices": 1,
        "seconds": statistics.median(timings),
        "repeats": timings,
        "compile_seconds": compile_seconds,
        "gflops_per_second": flops / statistics.median(timings) / 1e9,
        "wall_seconds": time.perf_counter() - began,
    }


def matmul_flops_per_second(size: int = 1024, repeats: int = 5) -> float:
    """Return the median rate of float32 matrix products on one device."""
    timings, flops, _ = _time_matmul(size, repeats)
    return flops / statistics.median(timings)


def random_action(spec: DiscreteSpec | ArraySpec) -> Callable[[Array, int], Array]:
    """Return a function `(key, B) -> actions [B, ...]`, uniform between the bounds (within 1 where there are none)."""
    if isinstance(spec, DiscreteSpec):
        return lambda key, batch: jax.random.randint(key, (batch,), 0, spec.num_values)
    low, high = (
        jnp.nan_to_num(jnp.broadcast_to(x, spec.shape), neginf=-1.0, posinf=1.0) for x in (spec.low, spec.high)
    )
    return lambda key, batch: jax.random.uniform(key, (batch, *spec.shape), spec.dtype, low, high)


def _time_matmul(size: int, repeats: int) -> tuple[list[float], float, float]:
    """Return seconds of every repeat, operations of one, and seconds of compiling."""
    times = max(1, round(2e10 / (2 * size**3)))
    matrix = jax.random.normal(jax.random.key(0), (size, size)) / math.sqrt(size)

    def products(matrix: Array) -> Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x @ matrix, matrix)

    began = time.perf_counter()
    compiled = jax.jit(products).lower(matrix).compile()
    return machine.repeat(lambda: compiled(matrix), repeats), 2.0 * size**3 * times, time.perf_counter() - began
