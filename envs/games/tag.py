"""Tag, ten to a thousand agents in one environment: taggers hunt runners."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import render
from podium.ranges import check_value
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, TimeStep

_SPACE = 4.0
"""Area an agent, in units of length squared: the square grows with their number."""

_REACH = 0.25
_TURN = np.pi / 8
_ACCELERATION = 0.05
_TAGGER_SPEED, _RUNNER_SPEED = 0.3, 0.25
_SIGHT = 8.0
_OWN, _OTHER = 7, 5
NUM_ACTIONS = 9


class TagState(NamedTuple):
    """Where N agents are, taggers first.

    Attributes:
      position: float32 [N, 2], in units of length, 0 to the side of the square.
      heading: float32 [N], radians.
      speed: float32 [N], units a step.
      playing: bool [N], False for runners that were tagged.
      time: int32, steps taken.
    """

    position: Array
    heading: Array
    speed: Array
    playing: Array
    time: Array


def tag(num_taggers: int = 2, num_runners: int = 8, num_seen: int = 2, max_steps: int = 100) -> Env:
    """Make Tag: on a square, taggers are paid for every runner that they come near to, and runners pay for it.

    The game is that of WarpDrive (Lan et al. 2021, its continuous Tag), written anew. All N = num_taggers +
    num_runners agents act at once, taggers first. Action 3 * a + t changes the speed by a - 1 times 0.05 a step and the
    heading by t - 1 times pi / 8; speeds are 0 to 0.3 for taggers, to 0.25 for runners, and walls stop. Then every
    runner within 0.25 of a tagger is tagged: it gets -1, the nearest tagger 1, and it is out: it stays where it is,
    sees zeros, is `valid` False from the next step on, and its actions do nothing. A runner that is not tagged gets
    1 / max_steps in each step. The episode terminates when no runner is left and is truncated after `max_steps`. The
    square has 4 units of area an agent. Only the start is random: places and headings uniform, speeds 0.

    Deliberate differences from WarpDrive's: one action of 9 in place of two of 10 levels each; what is seen is the
    `num_seen` nearest of either kind, all within 8 units, in the seer's own frame; rewards are 1 in place of 10;
    nothing is paid for walls, and what survivors get there at the end is paid a share in each step.

    Args:
      num_taggers: 1 or more.
      num_runners: 1 or more.
      num_seen: how many taggers and how many runners an agent sees, 1 or more; those that there are not are zeros.
      max_steps: the time limit.

    Returns:
      An `Env` with observations float32 [N, 7 + 10 * num_seen] in [-1, 1]: of itself the place (2), cosine and sine of
      the heading, the speed in terms of the fastest, whether it tags, the time that is left; of each of the nearest
      taggers, then runners, whether there is one, where it is ahead and to the left over 8 units (2), and its velocity
      in the same frame over 0.3 (2). Actions int32 [N], rewards float32 [N], `valid` bool [N], ends scalars.

    Raises:
      ValueError: for a number below 1.

    >>> env = tag(num_taggers=1, num_runners=3)
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> timestep.obs.shape, timestep.reward.shape, timestep.valid.tolist()
    ((4, 27), (4,), [True, True, True, True])
    """
    usual = {"num_taggers": 2, "num_runners": 8, "num_seen": 2, "max_steps": 100}
    given = {
        "num_taggers": num_taggers,
        "num_runners": num_runners,
        "num_seen": num_seen,
        "max_steps": max_steps,
    }
    for name, value in given.items():
        check_value(name, value, "counts", f"{usual[name]} is usual")
    number = num_taggers + num_runners
    side = float(np.sqrt(_SPACE * number))
    is_tagger = np.arange(number) < num_taggers
    fastest = np.where(is_tagger, _TAGGER_SPEED, _RUNNER_SPEED).astype(np.float32)
    taggers, runners = slice(0, num_taggers), slice(num_taggers, number)

    def nearest(state: TagState, who: slice) -> Array:
        """Describe to each of [N] the nearest of some others, [N, num_seen * 5]."""
        direction = jnp.stack([jnp.cos(state.heading), jnp.sin(state.heading)], -1)
        velocity = direction * state.speed[:, None]
        others = np.arange(number)[who]
        hidden = (np.arange(number)[:, None] == others) | ~state.playing[who]
        apart = jnp.where(hidden, jnp.inf, _distance(state.position, state.position[who]))
        # Floats of one sign are ordered as their bits are: with the index in the lowest, plain minima find the nearest.
        # A step of 1,000 agents takes a third of what it takes with argmin on a CPU. Distances that agree to 13 bits
        # count as equal.
        low_bits = (1 << len(others).bit_length()) - 1
        ranked = jax.lax.bitcast_convert_type(apart, jnp.int32) & ~low_bits | np.arange(len(others), dtype=np.int32)
        out_of_sight = np.float32(_SIGHT**2).view(np.int32)
        seen, last = [], jnp.full(number, -1, jnp.int32)
        for _ in range(num_seen):
            last = jnp.where(ranked > last[:, None], ranked, np.iinfo(np.int32).max).min(-1)
            index, there = jnp.minimum(last & low_bits, len(others) - 1), (last < out_of_sight)[:, None]
            towards = (state.position[who][index] - state.position) / _SIGHT
            moving = velocity[who][index] / _TAGGER_SPEED
            along = [_turned(towards, direction), _turned(moving, direction)]
            seen.append(jnp.concatenate([jnp.ones_like(there, jnp.float32), *along], -1) * there)
        return jnp.concatenate(seen, -1)

    def observe(state: TagState) -> Array:
        itself = jnp.stack(
            [
                *(2 * state.position.T / side - 1),
                jnp.cos(state.heading),
                jnp.sin(state.heading),
                state.speed / fastest,
                jnp.asarray(is_tagger, jnp.float32),
                jnp.full(number, 1 - state.time / max_steps),
            ],
            -1,
        )
        others = [nearest(state, who) for who in (taggers, runners)]
        return jnp.concatenate([itself, *others], -1).clip(-1, 1) * state.playing[:, None]

    def reset(key: Key) -> tuple[TagState, TimeStep]:
        place_key, heading_key = jax.random.split(key)
        state = TagState(
            position=jax.random.uniform(place_key, (number, 2), jnp.float32, 0, side),
            heading=jax.random.uniform(heading_key, (number,), jnp.float32, 0, 2 * np.pi),
            speed=jnp.zeros(number, jnp.float32),
            playing=jnp.ones(number, bool),
            time=jnp.zeros((), jnp.int32),
        )
        timestep = restart(observe(state))
        return state, timestep._replace(reward=jnp.zeros(number, jnp.float32), valid=state.playing)

    def step(key: Key, state: TagState, action: Array) -> tuple[TagState, TimeStep]:
        del key
        action = jnp.asarray(action, jnp.int32)
        heading = state.heading + state.playing * _TURN * (action % 3 - 1)
        heading = jnp.mod(heading, 2 * np.pi).astype(jnp.float32)
        speed = (state.speed + _ACCELERATION * (action // 3 - 1)).clip(0, fastest) * state.playing
        move = jnp.stack([jnp.cos(heading), jnp.sin(heading)], -1) * speed[:, None]
        position = (state.position + move).clip(0, side)

        distance = _distance(position[taggers], position[runners])
        tagged = (distance.min(0) < _REACH**2) & state.playing[runners]
        by = (distance.argmin(0) == np.arange(num_taggers)[:, None]) & tagged
        playing = state.playing.at[runners].set(state.playing[runners] & ~tagged)
        reward = jnp.concatenate([by.sum(1), jnp.where(tagged, -1, playing[runners] / max_steps)])

        new = TagState(position, heading, speed * playing, playing, state.time + 1)
        ended = ~playing[runners].any()
        timestep = transition(observe(new), reward, ended, new.time >= max_steps)
        return new, timestep._replace(valid=state.playing)

    def picture(state: TagState) -> np.ndarray:
        return render.crowd(state.position, state.heading, is_tagger, state.playing, side)

    obs = ArraySpec((number, _OWN + 2 * num_seen * _OTHER), np.float32, -1, 1)
    spec = EnvSpec("podium/Tag", obs, DiscreteSpec(NUM_ACTIONS, shape=(number,)), max_steps, num_agents=number)
    return Env(spec, reset, step, picture)


def _distance(a: Array, b: Array) -> Array:
    """Return squared distances, [M, N], of places [M, 2] and [N, 2]."""
    x, y = (a[:, None, i] - b[None, :, i] for i in range(2))
    return x * x + y * y


def _turned(vector: Array, direction: Array) -> Array:
    """Return vectors [N, 2] as seen by who faces `direction` [N, 2]: how far ahead, how far to the left."""
    ahead = (vector * direction).sum(-1)
    left = vector[:, 1] * direction[:, 0] - vector[:, 0] * direction[:, 1]
    return jnp.stack([ahead, left], -1)
