"""Environments so small that the value of every observation is known on paper.

An agent that misses it has a bug of the kind the probe is named after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import native
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, Seen, TimeStep

_BOX = ArraySpec((1,), np.float32, -1, 1)


def probe_environments() -> dict[str, Env]:
    """Return every probe environment by name, with its default arguments."""
    probes = (
        probe_value,
        probe_truncation,
        probe_termination,
        probe_discount,
        probe_policy,
        probe_continuous,
        probe_memory,
        probe_game,
    )
    return {probe.__name__: probe() for probe in probes}


def probe_value(reward: float = 1.0) -> Env:
    """Make one step with one observation and a constant reward: the value is `reward`.

    Missed: the value loss, its optimiser, or the reward on its way there.
    """
    return _clock("probe_value", 1, lambda time, action, cue: jnp.float32(reward))


def probe_truncation(reward: float = 1.0, episode_length: int = 5, continuous: bool = False) -> Env:
    """Make episodes that are only ever truncated: the value is `reward / (1 - gamma)`.

    The observation is constant, the reward too. Missed (too low): truncation is taken for termination, or the
    bootstrap comes from another observation than the true last one. Actions, which do nothing, are 0 or 1, or
    `continuous`: one number in [-1, 1].
    """
    return _clock(
        "probe_truncation",
        episode_length,
        lambda time, action, cue: jnp.float32(reward),
        action=_BOX if continuous else None,
        truncates=True,
        shows="nothing",
    )


def probe_termination(reward: float = 1.0, episode_length: int = 3, continuous: bool = False) -> Env:
    """Make episodes that terminate: after t steps the value is `reward * (1 - gamma**(L - t)) / (1 - gamma)`.

    L is `episode_length`; the observation is t as one-hot [L]. Missed (too high): values bootstrap over termination.
    Actions are those of `probe_truncation`.
    """
    return _clock(
        "probe_termination",
        episode_length,
        lambda time, action, cue: jnp.float32(reward),
        action=_BOX if continuous else None,
    )


def probe_discount(reward: float = 1.0) -> Env:
    """Make two steps with the reward at the second: the values are `gamma * reward`, then `reward`.

    The observation is the step as one-hot [2]. Missed: discounting, or the bootstrap from one step to the next.
    """
    return _clock("probe_discount", 2, lambda time, action, cue: jnp.where(time == 1, jnp.float32(reward), 0.0))


def probe_policy(num_actions: int = 2) -> Env:
    """Make one step that pays 1 for the action that the observation shows and -1 for others.

    The observation is one-hot [num_actions], drawn uniformly. The best policy has value 1 everywhere. Missed, where
    `probe_value` is met: the policy's loss, or actions and observations that are shuffled apart.
    """
    return _clock(
        "probe_policy",
        1,
        lambda time, action, cue: jnp.where(action == cue, 1.0, -1.0),
        action=DiscreteSpec(num_actions),
        shows="cue",
        num_cues=num_actions,
    )


def probe_continuous(target: float = 0.5) -> Env:
    """Make one step with an action in [-1, 1] that pays `-(action - target)**2`: the best action is `target`.

    The observation is constant; the best value is 0. Missed: the continuous policy's loss, or the scale of actions.
    """
    if not -1 <= target <= 1:
        raise ValueError(f"target={target} is no action; use a number in [-1, 1].")
    return _clock(
        "probe_continuous",
        1,
        lambda time, action, cue: -jnp.square(jnp.clip(action[0], -1, 1) - target),
        action=_BOX,
    )


def probe_memory(num_cues: int = 2, delay: int = 2) -> Env:
    """Make a cue that must be named `delay` steps later: return 1 with memory, `1 / num_cues` without.

    This is `podium/RepeatFirst`. Missed: recurrent memory that is lost, leaks between episodes or is off by one.
    """
    return native.repeat_first(num_cues, delay)


def probe_game(num_moves: int = 2) -> Env:
    """Make a game of two who move in turn, which whoever makes the last of `num_moves` moves wins: it pays 1.

    The observation is a `Seen`: its view is the move as one-hot, and action 1 is not legal, though it pays 10. So the
    values are 1 at the last move, -gamma at the one before it, gamma ** 2 before that. Missed: the sign of a turn, or
    what is legal.
    """
    if num_moves < 1:
        raise ValueError(f"num_moves={num_moves} is below 1.")
    legal = np.array([True, False, True])

    def observe(time: Array) -> Seen:
        return Seen(jax.nn.one_hot(time, num_moves, dtype=jnp.float32), jnp.asarray(legal), player=time % 2)

    def reset(key: Key) -> tuple[Array, TimeStep]:
        time = jnp.zeros((), jnp.int32)
        return time, restart(observe(time), turn=1.0)

    def step(key: Key, time: Array, action: Array) -> tuple[Array, TimeStep]:
        time = time + 1
        paid = jnp.where(time == num_moves, 1.0, 0.0) + jnp.where(action == 1, 10.0, 0.0)
        return time, transition(observe(time), paid, time >= num_moves, turn=-1.0)

    obs = Seen(ArraySpec((num_moves,), np.float32, 0, 1), ArraySpec((3,), np.bool_, 0, 1), player=DiscreteSpec(2))
    return Env(EnvSpec("probe_game", obs, DiscreteSpec(3), num_moves, turns=True), reset, step)


def probe_team(num_agents: int = 3, length: int = 2, dies: bool = False) -> Env:
    """Make agents that act together: each sees a cue of its own, and is paid 1 in each step for naming it.

    Three cues are drawn, as one-hot [N, 4]; action 3 is legal for nobody, and pays nothing. The `world` is all cues. So
    the return of each, and their mean, is `length` at best. Where it `dies`, the last of them is dead after two steps
    (`valid`). Missed: what happens to one is taken for another's, or the order of agents.

    Raises:
      ValueError: for a number below 1.
    """
    for name, value in {"num_agents": num_agents, "length": length}.items():
        if value < 1:
            raise ValueError(f"{name}={value} is below 1.")
    cues = 4
    allowed = np.broadcast_to(np.arange(cues) < cues - 1, (num_agents, cues))

    def observe(cue: Array) -> Seen:
        view = jax.nn.one_hot(cue, cues, dtype=jnp.float32)
        return Seen(view, jnp.asarray(allowed), jnp.broadcast_to(view.reshape(-1), (num_agents, num_agents * cues)))

    def draw(key: Key) -> Array:
        return jax.random.randint(key, (num_agents,), 0, cues - 1)

    def alive(time: Array) -> Array | None:
        return (jnp.arange(num_agents) < num_agents - 1) | (time <= 1) if dies else None

    def reset(key: Key) -> tuple[_ClockState, TimeStep]:
        state = _ClockState(jnp.zeros((), jnp.int32), draw(key))
        timestep = restart(observe(state.cue))
        return state, timestep._replace(reward=jnp.zeros(num_agents), valid=alive(state.time))

    def step(key: Key, state: _ClockState, action: Array) -> tuple[_ClockState, TimeStep]:
        following = _ClockState(state.time + 1, draw(key))
        timestep = transition(observe(following.cue), action == state.cue, following.time >= length)
        return following, timestep._replace(valid=alive(following.time))

    obs = Seen(
        ArraySpec((num_agents, cues), np.float32, 0, 1),
        ArraySpec((num_agents, cues), np.bool_, 0, 1),
        ArraySpec((num_agents, num_agents * cues), np.float32, 0, 1),
    )
    action = DiscreteSpec(cues, shape=(num_agents,))
    return Env(EnvSpec("probe_team", obs, action, length, num_agents=num_agents), reset, step)


class _ClockState(NamedTuple):
    time: Array
    cue: Array


def _clock(
    name: str,
    episode_length: int,
    reward: Callable[[Array, Array, Array], Array],
    *,
    action: DiscreteSpec | ArraySpec | None = None,
    truncates: bool = False,
    shows: str = "time",
    num_cues: int = 1,
) -> Env:
    """Make episodes of a fixed length that pay `reward(time, action, cue)` and show the time, a cue or nothing."""
    if episode_length < 1:
        raise ValueError(f"episode_length={episode_length} is below 1.")
    size = {"time": episode_length, "cue": num_cues, "nothing": 1}[shows]

    def observe(state: _ClockState) -> Array:
        if shows == "nothing":
            return jnp.ones((1,), jnp.float32)
        return jax.nn.one_hot(state.time if shows == "time" else state.cue, size, dtype=jnp.float32)

    def reset(key: Key) -> tuple[_ClockState, TimeStep]:
        state = _ClockState(jnp.zeros((), jnp.int32), jax.random.randint(key, (), 0, num_cues))
        return state, restart(observe(state))

    def step(key: Key, state: _ClockState, action: Array) -> tuple[_ClockState, TimeStep]:
        del key
        paid = reward(state.time, jnp.asarray(action), state.cue)
        state = _ClockState(state.time + 1, state.cue)
        ended = state.time >= episode_length
        return state, transition(observe(state), paid, ended & (not truncates), ended & truncates)

    obs = ArraySpec((size,), np.float32, 0, 1)
    return Env(EnvSpec(name, obs, action or DiscreteSpec(2), episode_length), reset, step)
