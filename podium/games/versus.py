"""A game for two as an environment for one: the other player is frozen in it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.env import Env
from podium.film import unstacked
from podium.games.players import as_player, check_two_players
from podium.types import Array, Key, PyTree, TimeStep


class VersusState(NamedTuple):
    """A game against a frozen player.

    Attributes:
      env: the state of the game.
      seat: int32, 0 or 1, which player is the one who learns or is evaluated.
      memory: of the frozen player, [1, ...].
      met: bool, whether the frozen player has moved in this game.
    """

    env: PyTree
    seat: Array
    memory: PyTree
    met: Array


class _Round(NamedTuple):
    """What is played until the player moves again; `plies`, of the opponent, and how many of them `behind` a cut."""

    state: VersusState
    timestep: TimeStep
    plies: Array
    behind: Array


_MOST_BEHIND = 8  # A simulator that lost its numbers stands still.


def versus(env: Env, policy: Any, greedy: bool = True) -> Env:
    """Make an environment for one player, in whose steps a frozen opponent plays too.

    A step is the player's ply and then the opponent's, as many as are its turn; the reward is what the player gained by
    all of them, so that what `podium.evaluate` returns is the mean outcome against this opponent. The seat is drawn at
    each reset; where the opponent sits first it has moved already. Should its plies before the first step end the game
    (after random openings), the player takes the opponent's seat instead. `TimeStep.turn` is None: one acts alone. A
    step brings several frames of a stack, so `ArraySpec.num_frames` is 1.

    Args:
      env: a game of two in turn that does not reset itself.
      policy: the opponent, as `podium.games.as_player` takes it; it must be made of JAX.
      greedy: of a `podium.Policy`, take its best action instead of sampling.

    Raises:
      ValueError: for a game that is not for two in turn, or an opponent that plays on the host (use `match`).
    """
    check_two_players(env, "versus")
    opponent = as_player(policy, greedy)
    opponent.check(env.spec)
    if opponent.on_host:
        raise ValueError(
            "versus compiles the opponent into the environment, and this one plays on the host; use match."
        )

    def opponent_ply(key: Key, round: _Round) -> tuple[_Round, TimeStep]:
        state, obs = round.state, round.timestep.next_obs
        act_key, step_key = jax.random.split(jax.random.fold_in(key, round.plies))
        batch = jax.tree.map(lambda x: x[None], obs)
        action, memory = opponent.act(act_key[None], state.memory, batch, ~state.met[None])
        env_state, timestep = env.step(step_key, state.env, jnp.asarray(action)[0])
        state = VersusState(env_state, state.seat, memory, jnp.ones((), bool))
        return _Round(state, timestep, round.plies + 1, round.behind + round.timestep.truncated), timestep

    def waits(round: _Round) -> Array:
        ended = round.timestep.terminated | (round.behind >= _MOST_BEHIND)
        return ~ended & (round.timestep.next_obs.player != round.state.seat)

    def reset(key: Key) -> tuple[VersusState, TimeStep]:
        env_key, seat_key, play_key = jax.random.split(key, 3)
        env_state, timestep = env.reset(env_key)
        seat = jax.random.randint(seat_key, (), 0, 2, jnp.int32)
        state, none = VersusState(env_state, seat, opponent.carry(1), jnp.zeros((), bool)), jnp.zeros((), jnp.int32)

        def play(round: _Round) -> _Round:
            after, played = opponent_ply(play_key, round)
            after = after._replace(timestep=timestep._replace(obs=played.next_obs, next_obs=played.next_obs))
            instead = round._replace(state=round.state._replace(seat=round.timestep.obs.player.astype(jnp.int32)))
            return jax.tree.map(lambda a, b: jnp.where(played.last, a, b), instead, after)

        round = jax.lax.while_loop(waits, play, _Round(state, timestep, none, none))
        return round.state, round.timestep._replace(turn=None)

    def step(key: Key, state: VersusState, action: Array) -> tuple[VersusState, TimeStep]:
        step_key, play_key = jax.random.split(key)
        env_state, timestep = env.step(step_key, state.env, action)

        def play(round: _Round) -> _Round:
            after, played = opponent_ply(play_key, round)
            return after._replace(timestep=_followed(round.timestep, played))

        none = jnp.zeros((), jnp.int32)
        begin = _Round(state._replace(env=env_state), timestep, none, none)
        round = jax.lax.while_loop(waits, play, begin)
        return round.state, round.timestep._replace(turn=None)

    render = env.render
    spec = dataclasses.replace(unstacked(env.spec), name=f"{env.spec.name} against a frozen player", turns=False)
    picture = None if render is None else lambda state: render(state.env)
    return env._replace(spec=spec, reset=reset, step=step, render=picture)


def _followed(before: TimeStep, played: TimeStep) -> TimeStep:
    """Return both steps as one of who moved before: the opponent's gain in the second is that one's loss."""
    info = played.info
    if "raw_reward" in info:
        info = {**info, "raw_reward": before.info["raw_reward"] - played.info["raw_reward"]}
    for name in {"episode_end", "nonfinite"} & set(info):
        info = {**info, name: before.info[name] | played.info[name]}
    return played._replace(
        reward=before.reward - played.reward, truncated=before.truncated | played.truncated, info=info
    )
