"""The contract of environments as pure functions, and automatic reset; `podium.host` is for those on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.types import Array, EnvSpec, Key, PyTree, TimeStep


class Env(NamedTuple):
    """An environment as pure functions of one environment; podium batches them with `jax.vmap`.

    Attributes:
      spec: what an agent may know.
      reset: `(key) -> (state, TimeStep)`; make the TimeStep with `podium.env.restart`.
      step: `(key, state, action) -> (state, TimeStep)`; make it with `podium.env.transition`. Does NOT reset
        itself at the end of an episode (`auto_reset` below does, and every placement applies it).
      render: `(state) -> uint8 [H, W, 3]` picture, or None where there is no renderer. Runs on the host.
      resets_itself: True once `auto_reset` has been applied.
    """

    spec: EnvSpec
    reset: Callable[[Key], tuple[PyTree, TimeStep]]
    step: Callable[[Key, PyTree, Array], tuple[PyTree, TimeStep]]
    render: Callable[[PyTree], np.ndarray] | None = None
    resets_itself: bool = False


def restart(obs: PyTree, info: dict[str, Any] | None = None) -> TimeStep:
    """Return the first TimeStep of an episode: reward 0, not ended."""
    no = jnp.zeros((), bool)
    return TimeStep(obs, jnp.zeros((), jnp.float32), no, no, obs, info or {})


def transition(
    obs: PyTree, reward: Any, terminated: Any, truncated: Any = False, info: dict[str, Any] | None = None
) -> TimeStep:
    """Return the TimeStep after an action: casts the reward to float32 and the flags to bool."""
    return TimeStep(
        obs,
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(terminated, bool),
        jnp.asarray(truncated, bool),
        obs,
        info or {},
    )


def auto_reset(env: Env, pool_size: int = 0, pool_seed: int = 0) -> Env:
    """Begin the next episode in the same step in which one ends.

    `obs` becomes the first observation of the next episode; `next_obs` stays the true last one.

    Args:
      env: any `Env`; returned as it is when it already resets itself.
      pool_size: 0 draws a fresh reset at every end. A positive number draws that many reset states once, when
        this function is called, and starts each later episode from one of them: for environments whose reset is
        dear (under `vmap` a reset is computed every step, needed or not).
      pool_seed: of the pool.

    Raises:
      ValueError: for a negative `pool_size`.
    """
    if pool_size < 0:
        raise ValueError(f"pool_size={pool_size} is negative; use 0 (fresh resets) or a positive number of states.")
    if env.resets_itself:
        return env
    begin = env.reset
    if pool_size:
        begin = _from_pool(env, pool_size, pool_seed)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        new_state, new = begin(reset_key(key))
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(timestep.last, n, o), new, old)
        return choose(new_state, state), timestep._replace(obs=choose(new.obs, timestep.obs))

    return env._replace(reset=begin, step=step, resets_itself=True)


def reset_key(key: Key) -> Key:
    """Return the key that begins the next episode in a step with `key`: another one, without the draw of a split.

    A counter-based generator promises independent streams for keys that differ anywhere, so one flipped bit will do.
    (On CPU a split of 64 keys costs as much as the whole of CartPole's physics.)
    """
    return jax.random.wrap_key_data(jax.random.key_data(key) ^ jnp.uint32(1 << 31), impl=jax.random.key_impl(key))


def _from_pool(env: Env, size: int, seed: int) -> Callable[[Key], tuple[PyTree, TimeStep]]:
    pool = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(seed), size))

    def begin(key: Key) -> tuple[PyTree, TimeStep]:
        index = jax.random.randint(key, (), 0, size)
        return jax.tree.map(lambda x: x[index], pool)

    return begin
