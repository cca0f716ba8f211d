"""What games of two players in turn share: rules as a value, and an `Env` made of them.

A row of experience is one ply: the observation is the mover's, and so is the reward. `TimeStep.turn` is -1 where the
opponent moves next and 1 where the same player does; at an end it says the same and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.ranges import is_integer
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, Seen, TimeStep


class Ply(NamedTuple):
    """What a ply led to: the state, what its mover gained (float32), and whether that ended the game (bool)."""

    state: PyTree
    gain: Array
    ended: Array


class Rules(NamedTuple):
    """A game of two players whose gains are each other's losses, with all of its chance in the deal.

    Attributes:
      name: of the environment.
      view: spec of what a mover sees.
      num_actions: A.
      max_plies: of the longest game.
      deal: `(key) -> state`.
      play: `(state, action) -> Ply`, of a legal action.
      legal: `(state) -> [A]` bool, while the game goes on.
      player: `(state) -> int32`, 0 or 1, who is to move.
      see: `(state) -> view` of who is to move.
      forfeit: `(state) -> float32`, what the mover of an illegal action gains: a loss.
      picture: `(state) -> uint8 [H, W, 3]`.
    """

    name: str
    view: ArraySpec
    num_actions: int
    max_plies: int
    deal: Callable[[Key], PyTree]
    play: Callable[[PyTree, Array], Ply]
    legal: Callable[[PyTree], Array]
    player: Callable[[PyTree], Array]
    see: Callable[[PyTree], Array]
    forfeit: Callable[[PyTree], Array]
    picture: Callable[[PyTree], np.ndarray]


def make_env(game: Rules, openings: int = 0, rules: bool = False) -> Env:
    """Make an environment of a game's rules.

    An illegal action loses at once: the position stays, the episode terminates, and who moved gains `game.forfeit`.
    At an end all actions are marked legal, for none is taken. A step uses no randomness.

    Args:
      game: the rules.
      openings: an episode begins after 0 to so many random legal plies (how many is drawn uniformly), so that
        self-play sees more than one line. A ply that would end the game is left out.
      rules: whether observations hold the state, `Seen.rules`, from which `step` of this environment without `rules`
        goes on.

    Returns:
      An `Env` with observations `Seen(view, legal [A], player, rules)`.

    Raises:
      ValueError: for `openings` that are no number of plies of this game.
    """
    if not is_integer(openings, 0, game.max_plies - 1):
        raise ValueError(
            f"openings={openings!r} must be an integer, 0 to {game.max_plies - 1}: a game of {game.name} is over after "
            f"{game.max_plies} plies; {game.max_plies // 4 or 1} is usual."
        )
    if not isinstance(rules, bool):
        raise ValueError(f"rules={rules!r} must be True or False; planners that step the game need True.")

    def observe(state: PyTree, ended: Array | bool) -> Seen:
        legal = game.legal(state) | ended
        return Seen(game.see(state), legal, player=game.player(state), rules=state if rules else ())

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        deal_key, opening_key = jax.random.split(key)
        state = _open(game, opening_key, game.deal(deal_key), openings)
        return state, restart(observe(state, False), turn=1.0)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        del key
        action = jnp.asarray(action, jnp.int32)
        legal = game.legal(state)[action]
        new, gain, ended = game.play(state, action)
        new = jax.tree.map(lambda new, old: jnp.where(legal, new, old), new, state)
        gain, ended = jnp.where(legal, gain, game.forfeit(state)), ended | ~legal
        turn = jnp.where(game.player(new) == game.player(state), 1.0, -1.0)
        return new, transition(observe(new, ended), gain, ended, turn=turn)

    shapes = jax.eval_shape(game.deal, jax.eval_shape(lambda: jax.random.key(0)))
    state_spec = jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), shapes) if rules else ()
    legal_spec = ArraySpec((game.num_actions,), np.bool_, 0, 1)
    obs = Seen(game.view, legal_spec, player=DiscreteSpec(2), rules=state_spec)
    spec = EnvSpec(game.name, obs, DiscreteSpec(game.num_actions), game.max_plies, turns=True)
    return Env(spec, reset, step, game.picture)


def _open(game: Rules, key: Key, state: PyTree, openings: int) -> PyTree:
    """Play 0 to `openings` random legal plies, none of which ends the game."""
    if not openings:
        return state
    count_key, draw_key = jax.random.split(key)
    number = jax.random.randint(count_key, (), 0, openings + 1)
    draws = jax.random.uniform(draw_key, (openings,))

    def ply(i: Array, state: PyTree) -> PyTree:
        legal = game.legal(state)
        action = jnp.argmax(jnp.cumsum(legal) > draws[i] * legal.sum())  # The first is legal: the sum grows there.
        new, _, ended = game.play(state, action)
        goes_on = (i < number) & ~ended
        return jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), new, state)

    return jax.lax.fori_loop(0, openings, ply, state)
