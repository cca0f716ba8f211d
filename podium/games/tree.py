"""Whole trees of small games: every line of play from every deal, expanded a ply at a time in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.types import PyTree, Seen

MOST_NODES = 300_000
"""Of one ply; larger trees are refused."""

_DRAWS = 8192


class Level(NamedTuple):
    """The nodes of one ply, [n, ...], NumPy.

    Attributes:
      obs: what who is to move sees.
      player: int, who is to move.
      ended: whether the game is over.
      gain: float64, what player 0 gained by the ply that led here.
      parent: index into the level above; the number of the deal at the top.
      action: that led here.
    """

    obs: Seen
    player: np.ndarray
    ended: np.ndarray
    gain: np.ndarray
    parent: np.ndarray
    action: np.ndarray


Choose = Callable[[Level], np.ndarray]
"""`(level) -> [n, A]` bool, which actions to follow from each node that goes on."""


def legal_actions(level: Level) -> np.ndarray:
    """Follow every legal action."""
    return np.asarray(level.obs.legal)


def expand(env: Env, choose: Choose = legal_actions) -> Iterator[Level]:
    """Yield a game's tree, a ply at a time, from all its deals.

    A step may use no chance. The deals are found by resetting 8,192 times; they must be equally likely, which is
    checked to six standard deviations.

    Raises:
      ValueError: for a game whose deals are not equally likely or too many, whose steps use chance, or whose tree is
        larger than `MOST_NODES` in one ply.
    """
    states, obs = _deals(env)
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))
    number = len(obs.view)
    zero = np.zeros(number)
    level = Level(obs, np.asarray(obs.player), zero > 0, zero, np.arange(number), zero.astype(np.int32))
    yield level
    at_the_top = True
    while not level.ended.all():
        follow = choose(level) & ~level.ended[:, None]
        parent, action = np.nonzero(follow)
        if len(parent) > MOST_NODES:
            raise ValueError(
                f"The tree of env={env.spec.name} has {len(parent)} nodes in one ply, more than {MOST_NODES}; only "
                "small games, such as podium/TicTacToe, podium/Kuhn and podium/Leduc, can be expanded."
            )
        given = jax.tree.map(lambda x: x[parent], states), action.astype(np.int32)  # noqa: B023
        states, timestep = _padded(step, jax.random.key(0), *given)
        if at_the_top and _differs(step, given, timestep):
            raise ValueError(f"A step of env={env.spec.name} uses chance; all of it must be in the deal.")
        at_the_top = False
        sign = np.where(level.player[parent] == 0, 1.0, -1.0)
        ended = np.asarray(timestep.terminated | timestep.truncated)
        gain = sign * np.asarray(timestep.reward, np.float64)
        level = Level(timestep.next_obs, np.asarray(timestep.next_obs.player), ended, gain, parent, action)
        yield level


def _deals(env: Env) -> tuple[PyTree, Seen]:
    """Return the different states that games begin in, and what is seen there."""
    keys = jax.random.split(jax.random.key(0), _DRAWS)
    states, timestep = jax.tree.map(np.asarray, jax.jit(jax.vmap(env.reset))(keys))
    words = [np.ascontiguousarray(x.reshape(_DRAWS, -1)).view(np.uint8) for x in jax.tree.leaves(states)]
    _, first, counts = np.unique(np.concatenate(words, -1), axis=0, return_index=True, return_counts=True)
    expected = _DRAWS / len(counts)
    if expected < 30 or np.abs(counts - expected).max() > 6 * np.sqrt(expected):
        raise ValueError(
            f"env={env.spec.name} does not begin in a few deals that are equally likely ({len(counts)} kinds in "
            f"{_DRAWS} resets, {counts.min()} to {counts.max()} of each); make it without openings."
        )
    return jax.tree.map(lambda x: x[first], (states, timestep.obs))


def _padded(step: Callable, key: Any, *rows: PyTree) -> Any:
    """Call `step` with rows up to the next power of four, so that few shapes are compiled; NumPy comes back."""
    number = len(jax.tree.leaves(rows)[0])
    padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], _room(number) - number, 0)]), rows)
    return jax.tree.map(lambda x: np.asarray(x)[:number], step(key, *padded))


def _room(number: int) -> int:
    return 4 ** -(-max(number - 1, 63).bit_length() // 2)


def _differs(step: Callable, given: PyTree, timestep: Any) -> bool:
    again = _padded(step, jax.random.key(1), *given)[1]
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), (again.reward, again.next_obs), (timestep.reward, timestep.next_obs)
    )
    return not jax.tree.all(same)


def batched(function: Callable[[PyTree], Any], rows: PyTree) -> np.ndarray:
    """Return `function(rows)`, NumPy, of rows [n, ...] that are padded to few different numbers of them."""
    number = len(jax.tree.leaves(rows)[0])
    index = np.minimum(np.arange(_room(number)), number - 1)
    return np.asarray(function(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), rows)))[:number]
