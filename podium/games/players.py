"""What plays: anything that chooses actions for a batch of observations, brought to one form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import seats
from podium.env import Env
from podium.evaluate import Policy
from podium.league import State
from podium.types import Array, EnvSpec, Key, PyTree, Seen


class Player(NamedTuple):
    """Somebody who plays many games at once.

    Attributes:
      act: `(keys [B], carry, obs [B, ...], first [B]) -> (action [B], carry)`; one key a game, and `first` is True
        where this player has not moved yet in the game.
      carry: `(num_games) -> carry`, memory [B, ...].
      on_host: whether `act` computes in NumPy or plain Python, and so cannot be a part of a compiled program.
      check: `(EnvSpec) -> None`, raises ValueError for a game that it cannot play.
    """

    act: Callable[[Key, PyTree, PyTree, Array], tuple[Any, PyTree]]
    carry: Callable[[int], PyTree] = lambda num_games: ()
    on_host: bool = False
    check: Callable[[EnvSpec], None] = lambda spec: None


def as_player(policy: Any, greedy: bool = True) -> Player:
    """Return a `Player` of what plays.

    Args:
      policy: a `podium.Policy` (from `podium.load` or `Result.policy`, memory and all), a `Player`, or a function of
        JAX `(obs [B, ...]) -> action [B]` or `(keys [B], obs [B, ...]) -> action [B]`.
      greedy: of a `podium.Policy`, take its best action instead of sampling.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(policy, Player):
        return policy
    if isinstance(policy, Policy):
        fixed = policy

        @jax.jit
        def act(keys: Key, carry: PyTree, obs: PyTree, first: Array) -> tuple[Array, PyTree]:
            output = fixed.agent.act(keys, fixed.params, carry, obs, first, greedy)
            return output.action, output.carry

        return Player(act, fixed.carry)
    if not callable(policy):
        raise ValueError(
            f"policy={policy!r} cannot play; give a podium.Policy, a podium.games.Player, or a function of obs."
        )
    wants = _num_arguments(policy)
    if wants == 1:
        return Player(lambda keys, carry, obs, first: (policy(obs), carry))
    if wants == 2:
        return Player(lambda keys, carry, obs, first: (policy(keys, obs), carry))
    raise ValueError(
        f"policy={policy!r} takes {wants} arguments; a function that plays takes (obs) or (keys, obs), of a batch."
    )


def snapshots(result: Any) -> dict[str, Policy]:
    """Return who is in a league: the learner, and its snapshots as policies, by name and newest first.

    Args:
      result: a `podium.Result` of one seed of a `podium.league`.

    Raises:
      ValueError: for a result of anything else.

    >>> import podium
    >>> from podium.agents import ppo
    >>> agent = podium.league(ppo.make(), size=2, snapshot_every=1)
    >>> sizes = {"num_steps": 256, "num_envs": 16, "rollout_length": 8, "progress": False}
    >>> list(snapshots(podium.train(agent, "podium/TicTacToe", **sizes)))
    ['learner', 'snapshot 2', 'snapshot 1']
    """
    state, learner = result.state, result.policy
    if not isinstance(state, State) or not isinstance(learner, Policy):
        raise ValueError(
            f"result.state is a {type(state).__module__}.{type(state).__name__}, result.policy a "
            f"{type(learner).__name__}: these are no league's of one seed; train podium.league(agent, ...) with one."
        )
    numbers = state.number.tolist()
    newest_first = sorted((number for number in numbers if number >= 0), reverse=True)
    pool = {number: jax.tree.map(itemgetter(numbers.index(number)), state.pool) for number in newest_first}
    return {"learner": learner} | {f"snapshot {n}": replace(learner, params=params) for n, params in pool.items()}


def _num_arguments(function: Callable) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def uniform(keys: Key, obs: Seen) -> Array:
    """Play legal moves at random, all alike: the weakest opponent worth the name.

    Args:
      keys: [B].
      obs: [B, ...].

    Returns:
      [B] int32.
    """
    logits = jnp.where(jnp.asarray(obs.legal), 0.0, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def uniform_probabilities(obs: Seen) -> np.ndarray:
    """Return the probabilities [B, A] of `uniform`."""
    legal = np.asarray(obs.legal, np.float64)
    return legal / legal.sum(-1, keepdims=True)


def check_two_players(env: Env, who: str) -> None:
    """Raise ValueError unless two play in turn and nobody resets the game between."""
    seats.check_two_players(env.spec, who)
    if env.resets_itself:
        raise ValueError(
            f"{who} needs to see how games end, and env={env.spec.name} resets itself; leave out auto_reset."
        )
