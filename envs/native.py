"""Small environments of podium's own: exact optima, no dependencies, for teaching and for tests."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import render
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, TimeStep


class CatchState(NamedTuple):
    """Where things are, int32 scalars."""

    ball_row: Array
    ball_column: Array
    paddle_column: Array


def catch(rows: int = 10, columns: int = 5) -> Env:
    """Make Catch (Mnih et al. 2014; bsuite, Osband et al. 2020): move a paddle under a falling ball.

    The ball starts in a random column of the top row and falls one row a step; the episode terminates when it
    reaches the last row, after `rows - 1` steps, with reward 1 if the paddle is there and -1 if not. The best return
    is 1 in every episode. Actions: 0 left, 1 stay, 2 right. Nothing but the start is random.

    Args:
      rows: of the grid.
      columns: of the grid; the paddle starts in the middle one.

    Returns:
      An `Env` with observations [rows, columns, 2] in {0, 1}: the ball, the paddle.

    Raises:
      ValueError: for a grid in which some balls cannot be caught.

    >>> env = catch()
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> timestep.obs.shape
    (10, 5, 2)
    """
    if columns < 1 or rows < 2:
        raise ValueError(f"rows={rows}, columns={columns}: Catch needs at least 2 rows and 1 column.")
    if rows - 1 < columns // 2:
        raise ValueError(
            f"rows={rows} is too few for columns={columns}: the paddle could not reach every ball; "
            f"use at least {columns // 2 + 1} rows."
        )

    def observe(state: CatchState) -> Array:
        obs = jnp.zeros((rows, columns, 2), jnp.float32)
        return obs.at[state.ball_row, state.ball_column, 0].set(1).at[rows - 1, state.paddle_column, 1].set(1)

    def reset(key: Key) -> tuple[CatchState, TimeStep]:
        column = jax.random.randint(key, (), 0, columns)
        state = CatchState(jnp.zeros((), jnp.int32), column, jnp.full((), columns // 2, jnp.int32))
        return state, restart(observe(state))

    def step(key: Key, state: CatchState, action: Array) -> tuple[CatchState, TimeStep]:
        del key
        paddle = jnp.clip(state.paddle_column + jnp.asarray(action, jnp.int32) - 1, 0, columns - 1)
        state = CatchState(state.ball_row + 1, state.ball_column, paddle)
        landed = state.ball_row >= rows - 1
        reward = jnp.where(landed, jnp.where(state.paddle_column == state.ball_column, 1.0, -1.0), 0.0)
        return state, transition(observe(state), reward, landed)

    def picture(state: CatchState) -> np.ndarray:
        ball_row, ball_column, paddle_column = (int(x) for x in state)
        return render.catch(ball_row, ball_column, paddle_column, rows, columns)

    spec = EnvSpec("podium/Catch", ArraySpec((rows, columns, 2), np.float32, 0, 1), DiscreteSpec(3), rows - 1)
    return Env(spec, reset, step, picture)


class CorridorState(NamedTuple):
    """Where the agent is, and the steps taken: int32 scalars."""

    position: Array
    time: Array


def corridor(length: int = 6, max_steps: int = 30) -> Env:
    """Make a corridor: walk from the left end to the right end. Nothing in it is random.

    Actions: 0 left, 1 right (walls hold). Reaching the last cell pays 1 and terminates; `max_steps` steps truncate.
    The best policy needs `length - 1` steps, so a cell at distance d from the goal is worth `gamma ** (d - 1)`.

    Args:
      length: cells, at least 2.
      max_steps: the time limit, at least `length - 1`.

    Returns:
      An `Env` with the cell as one-hot observation [length].

    Raises:
      ValueError: for a corridor that cannot be walked within the limit.

    >>> env = corridor(length=3)
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> timestep.obs.tolist()
    [1.0, 0.0, 0.0]
    """
    if length < 2:
        raise ValueError(f"length={length}: a corridor has at least 2 cells.")
    if max_steps < length - 1:
        raise ValueError(f"max_steps={max_steps} is too few to walk length={length}; use at least {length - 1}.")

    def observe(position: Array) -> Array:
        return jax.nn.one_hot(position, length, dtype=jnp.float32)

    def reset(key: Key) -> tuple[CorridorState, TimeStep]:
        del key
        state = CorridorState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        return state, restart(observe(state.position))

    def step(key: Key, state: CorridorState, action: Array) -> tuple[CorridorState, TimeStep]:
        del key
        move = 2 * jnp.asarray(action, jnp.int32) - 1
        state = CorridorState(jnp.clip(state.position + move, 0, length - 1), state.time + 1)
        arrived = state.position == length - 1
        return state, transition(observe(state.position), arrived, arrived, state.time >= max_steps)

    def picture(state: CorridorState) -> np.ndarray:
        cells = np.zeros((1, length, 2))
        cells[0, int(state.position), 0] = 1
        cells[0, -1, 1] = 1
        return render.grid(cells)

    spec = EnvSpec("podium/Corridor", ArraySpec((length,), np.float32, 0, 1), DiscreteSpec(2), max_steps)
    return Env(spec, reset, step, picture)


class RepeatFirstState(NamedTuple):
    """The cue to repeat, and the steps taken: int32 scalars."""

    cue: Array
    time: Array


def repeat_first(num_cues: int = 3, delay: int = 4) -> Env:
    """Make a memory task: see a cue, wait, then name it.

    The first observation shows one of `num_cues` cues. `delay` observations without a cue follow, the last of them
    with the go signal; the action there terminates the episode and pays 1 if it equals the cue, else 0. With memory
    the best return is 1; without, no policy exceeds `1 / num_cues` on average.

    Args:
      num_cues: cues, and actions; at least 2.
      delay: observations between the cue and the answer; at least 1 (at 0 no memory would be needed).

    Returns:
      An `Env` with observations [num_cues + 1]: the cue as one-hot, then the go signal.

    Raises:
      ValueError: for fewer than 2 cues or no delay.

    >>> env = repeat_first(num_cues=2, delay=1)
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> state, timestep = env.step(jax.random.key(1), state, 0)
    >>> timestep.obs.tolist(), bool(timestep.terminated)
    ([0.0, 0.0, 1.0], False)
    """
    if num_cues < 2:
        raise ValueError(f"num_cues={num_cues}: there is nothing to remember below 2.")
    if delay < 1:
        raise ValueError(f"delay={delay}: the cue must be out of sight when it is asked for; use 1 or more.")

    def observe(state: RepeatFirstState) -> Array:
        cue = jax.nn.one_hot(state.cue, num_cues, dtype=jnp.float32) * (state.time == 0)
        return jnp.append(cue, (state.time == delay).astype(jnp.float32))

    def reset(key: Key) -> tuple[RepeatFirstState, TimeStep]:
        state = RepeatFirstState(jax.random.randint(key, (), 0, num_cues), jnp.zeros((), jnp.int32))
        return state, restart(observe(state))

    def step(key: Key, state: RepeatFirstState, action: Array) -> tuple[RepeatFirstState, TimeStep]:
        del key
        asked = state.time >= delay
        state = RepeatFirstState(state.cue, state.time + 1)
        return state, transition(observe(state), asked & (jnp.asarray(action) == state.cue), asked)

    def picture(state: RepeatFirstState) -> np.ndarray:
        return render.grid(np.asarray(observe(state))[None])

    obs = ArraySpec((num_cues + 1,), np.float32, 0, 1)
    return Env(EnvSpec("podium/RepeatFirst", obs, DiscreteSpec(num_cues), delay + 1), reset, step, picture)
