"""The contract of environments as pure functions, and automatic reset; `podium.host` is for those on the CPU."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import contracts
from podium.ranges import check_value
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
      pool_size: start states that `auto_reset` draws where it is not told how many: above 0 where a reset is dear.
      random_first_length: whether `auto_reset` cuts the first episode of a run after a random number of steps; set by
        `podium.envs.wrappers.random_first_length`.
      evaluation: the environment that an evaluation plays, of the same observations and actions, where that is another:
        of a game of two, one in which an opponent moves too. None for this one.
    """

    spec: EnvSpec
    reset: Callable[[Key], tuple[PyTree, TimeStep]]
    step: Callable[[Key, PyTree, Array], tuple[PyTree, TimeStep]]
    render: Callable[[PyTree], np.ndarray] | None = None
    resets_itself: bool = False
    pool_size: int = 0
    random_first_length: bool = False
    evaluation: Env | None = None

    def __repr__(self) -> str:
        """Return the environment in a line."""
        return f"Env({self.spec!r})"


def check_is_pure(env: Any, who: str) -> None:
    """Raise ValueError for what is no `Env`, such as the name of one."""
    if not isinstance(env, Env):
        raise ValueError(
            f"{who} was given {reprlib.repr(env)}, which is no podium.env.Env; podium.envs.make makes one."
        )


def restart(obs: PyTree, info: dict[str, Any] | None = None, turn: Any = None) -> TimeStep:
    """Return the first TimeStep of an episode: reward 0, not ended. Give `turn` where `transition` is given it."""
    return transition(obs, 0.0, False, False, info, turn)


def transition(
    obs: PyTree,
    reward: Any,
    terminated: Any,
    truncated: Any = False,
    info: dict[str, Any] | None = None,
    turn: Any = None,
) -> TimeStep:
    """Return the TimeStep after an action: casts reward and turn to float32 and the flags to bool."""
    return TimeStep(
        obs,
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(terminated, bool),
        jnp.asarray(truncated, bool),
        obs,
        info or {},
        turn=None if turn is None else jnp.asarray(turn, jnp.float32),
    )


def truncate(timestep: TimeStep, where: Array) -> TimeStep:
    """Return a step whose episode is cut where `where`, bool, is set.

    It is an end as well where the environment tells those from marks for the learner (`info["episode_end"]`).
    """
    info = timestep.info
    if "episode_end" in info:
        info = {**info, "episode_end": info["episode_end"] | where}
    return timestep._replace(truncated=timestep.truncated | where, info=info)


def auto_reset(env: Env, pool_size: int | None = None, pool_seed: int = 0) -> Env:
    """Begin the next episode in the same step in which one ends.

    `obs` becomes the first observation of the next episode; `next_obs` stays the true last one.

    Args:
      env: any `Env`; returned as it is when it already resets itself.
      pool_size: 0 draws a fresh reset at every end. A positive number draws that many reset states once, when
        this function is called, and starts each later episode from one of them: for environments whose reset is
        dear (under `vmap` a reset is computed every step, needed or not). None takes the environment's own
        `pool_size`.
      pool_seed: of the pool.

    Raises:
      ValueError: for a `pool_size` that is no integer of 0 or more.
    """
    check_is_pure(env, "auto_reset")
    pool_size = env.pool_size if pool_size is None else pool_size
    check_value("pool_size", pool_size, "naturals", "use 0 (fresh resets) or a positive number of states")
    if env.resets_itself:
        return env
    if env.random_first_length:
        return _with_random_first_length(env, pool_size, pool_seed)
    env = traced_once(env)
    begin = env.reset
    if pool_size:
        begin = _from_pool(env, pool_size, pool_seed)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        new_state, new = begin(reset_key(key))
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(timestep.last, n, o), new, old)
        return choose(new_state, state), timestep._replace(obs=choose(new.obs, timestep.obs))

    return env._replace(reset=begin, step=step, resets_itself=True)


class _Staggered(NamedTuple):
    env: PyTree
    steps_left: Array


def _with_random_first_length(env: Env, pool_size: int, pool_seed: int) -> Env:
    """Reset automatically, and cut the episodes that `reset` begins (and no later ones) after a random length."""
    longest = env.spec.max_episode_steps
    assert longest is not None
    endless = np.iinfo(np.int32).max

    def begin(key: Key) -> tuple[_Staggered, TimeStep]:
        state, timestep = env.reset(key)
        return _Staggered(state, jnp.full((), endless, jnp.int32)), timestep

    def step(key: Key, state: _Staggered, action: Array) -> tuple[_Staggered, TimeStep]:
        env_state, timestep = env.step(key, state.env, action)
        steps_left = jnp.where(state.steps_left == endless, endless, state.steps_left - 1)
        return _Staggered(env_state, steps_left), truncate(timestep, steps_left == 0)

    render = env.render
    resetting = auto_reset(
        env._replace(
            reset=begin,
            step=step,
            render=None if render is None else lambda state: render(state.env),
            random_first_length=False,
        ),
        pool_size,
        pool_seed,
    )

    def reset(key: Key) -> tuple[_Staggered, TimeStep]:
        state, timestep = resetting.reset(key)
        steps_left = jax.random.randint(reset_key(key), (), 1, longest + 1)
        return state._replace(steps_left=steps_left), timestep

    return resetting._replace(reset=reset)


def traced_once(env: Env) -> Env:
    """Return an environment whose `reset` and `step` jax traces once a process, however many programs have them.

    Tracing a simulator takes seconds, and what is to be built asks for its shapes several times. The programs stay the
    same: what was traced is put where the call stood. Where they become a part of a program, their shapes are checked.

    Raises:
      podium.contracts.ContractError: from `reset` and `step`, where the environment breaks a rule that shapes tell of.
    """
    spec, traced_reset, traced_step = env.spec, jax.jit(env.reset, inline=True), jax.jit(env.step, inline=True)

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state, timestep = contracts.pair(spec, "reset", contracts.trace(spec, "reset", traced_reset, key))
        contracts.check_timestep(spec, "reset", timestep)
        return state, timestep

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        contracts.check_actions(f"{spec.name}: step is sent", spec, action)
        returned = contracts.trace(spec, "step", traced_step, key, state, action)
        next_state, timestep = contracts.pair(spec, "step", returned)
        contracts.check_timestep(spec, "step", timestep)
        contracts.same_shapes(spec, "state", state, next_state, weak=False)
        return next_state, timestep

    return env._replace(reset=reset, step=step)


def check_shapes(env: Env) -> None:
    """Raise ContractError for a rule that the environment breaks and shapes tell of; nothing runs."""
    contracts.check_spec(env.spec)
    env, action = traced_once(env), jax.eval_shape(env.spec.action.zeros)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, _ = jax.eval_shape(env.reset, key)
    jax.eval_shape(env.step, key, state, action)


def reset_key(key: Key) -> Key:
    """Return the key that begins the next episode in a step with `key`: another one, without the draw of a split.

    A counter-based generator promises independent streams for keys that differ anywhere, so one flipped bit will do.
    (On CPU a split of 64 keys costs as much as the whole of CartPole's physics.)
    """
    return jax.random.wrap_key_data(jax.random.key_data(key) ^ jnp.uint32(1 << 31), impl=jax.random.key_impl(key))


def _from_pool(env: Env, size: int, seed: int) -> Callable[[Key], tuple[PyTree, TimeStep]]:
    drawn = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(seed), size))
    # A simulator's state is mostly what every episode starts with; the pool is a constant of programs, so that is kept
    # once.
    alike = jax.tree.map(_rows_alike, drawn)
    pool = jax.tree.map(lambda x, alike: x[0] if alike else x, drawn, alike)

    def begin(key: Key) -> tuple[PyTree, TimeStep]:
        index = jax.random.randint(key, (), 0, size)
        return jax.tree.map(lambda x, alike: x if alike else x[index], pool, alike)

    return begin


def _rows_alike(x: Array) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    rows = np.asarray(x)
    return bool((rows == rows[:1]).all())
