"""A gate: the best policy so far plays, and the learner takes its place when it has won clearly more than half.

As the evaluator of AlphaGo Zero (Silver et al. 2017, Nature 550, "Mastering the game of Go without human knowledge"):
the best plays the games that are learnt from; every candidate, a snapshot of the learner, plays 400 games against it
and replaces it with a score above 55%. Deliberate differences: those games are played beside the others, in a share of
the environments, and by sampled moves as those are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium import seats
from podium.agent import ActOutput, Agent, Aux, Plan, Transform, parts_of
from podium.ranges import check_positive, check_value, is_integer
from podium.types import Array, EnvSpec, Key, PyTree, Trajectory


class State(NamedTuple):
    """What learning needs.

    Attributes:
      learner: the agent's own State.
      best: parameters that the best so far acts with.
      candidate: parameters of the snapshot that plays for its place.
      number: int32, of the candidate; how many there were before.
      games: float32, that the candidate ended.
      score: float32, of these: 1 for each that it won, 1/2 for a draw.
      promotions: int32, how often a candidate became the best.
    """

    learner: PyTree
    best: PyTree
    candidate: PyTree
    number: Array
    games: Array
    score: Array
    promotions: Array


class Params(NamedTuple):
    """What acting needs: the parameters of the best and of the candidate, and that one's number."""

    best: PyTree
    candidate: PyTree
    number: Array


def gated(agent: Agent, games: int = 400, threshold: float = 0.55, every: int = 8) -> Agent:
    """Return an agent whose games are played by the best of its policies so far.

    In one of `every` environments a candidate plays the best, from either seat by turns; of these games nothing is
    learnt. Once `games` have ended, the candidate becomes the best if it scored more than `threshold` (a draw is half),
    and the learner as it is then the next candidate (games under way go on with it, and count for it). The agent learns
    throughout, from the games of the best: one that takes data of other policies, such as `alphazero`, is meant.
    Metrics have `promotions`, how many there were so far. Evaluated, loaded and evolved is the best so far
    (`Agent.evaluation`).

    Args:
      agent: any without a memory that it replays.
      games: that decide about a candidate.
      threshold: share of them, 0 to 1.
      every: how many environments there are to each that candidates play in, 2 or more.

    Returns:
      an `Agent` for games of two players in turn.

    Raises:
      ValueError: for a number out of range; from `init` and a placement's `build`, for an environment that is no such
        game; from `build`, for a number of environments that 2 * `every` does not divide.
    """
    check_positive(games=games)
    check_value("threshold", threshold, "fractions", "0.55 is AlphaGo Zero's")
    if not is_integer(every, 2):
        raise ValueError(f"every={every!r} must be an integer, 2 or more: one of so many environments is for the gate.")
    seats.check_agent(agent, "podium.gated")

    def gate(number: Array) -> Array:
        """Return the environments in which a candidate plays: the last of `every`, the last group of `seats.play`."""
        return number % every == every - 1

    def check(spec: EnvSpec, num_envs: int) -> None:
        seats.check_game(agent, spec, "gated")
        seats.check_rounds(num_envs, every, "a gate", f"every={every} groups")

    def init(key: Key, spec: EnvSpec) -> State:
        seats.check_game(agent, spec, "gated")
        learner = agent.init(key, spec)
        best, candidate = (jax.tree.map(jnp.copy, agent.actor(learner)) for _ in range(2))
        none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return State(learner, best, candidate, none, zero, zero, none)

    def candidates(number: Array, player: Array) -> Array:
        return gate(number) & (player == seats.seat_of(number, every))

    def act(keys: Key, params: Params, carry: seats.Carry, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        theirs = jax.tree.map(lambda x: x[None], params.candidate)
        moves = candidates(carry.number, obs.player)
        against = jnp.where(gate(carry.number), params.number, -1)
        return seats.play(agent, keys, params.best, theirs, every, ~moves, against, carry, obs, first, greedy)

    def learnt(trajectory: Trajectory) -> Trajectory:
        """Return the games of the best against itself; the others are not valid."""
        rows = jnp.broadcast_to(~gate(trajectory.carry.number), trajectory.reward.shape)
        return trajectory._replace(
            extras=trajectory.extras.ours,
            carry=trajectory.carry.ours,
            end_carry=trajectory.end_carry.ours,
            valid=rows if trajectory.valid is None else rows & trajectory.valid,
        )

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        return agent.plan(key, state.learner, learnt(trajectory))

    def grad(key: Key, state: State, minibatch: PyTree) -> tuple[PyTree, Aux]:
        grads, aux = agent.grad(key, state.learner, minibatch)
        return grads, aux._replace(metrics={**aux.metrics, "promotions": state.promotions.astype(jnp.float32)})

    def apply(state: State, grads: PyTree) -> State:
        return state._replace(learner=agent.apply(state.learner, grads))

    def observe(state: State, trajectory: Trajectory) -> State:
        ended, score = seats.scores(trajectory)  # Of the best: what it lost the candidate won.
        of = ended & (trajectory.extras.against == state.number)
        played = state.games + jnp.sum(of, dtype=jnp.float32)
        won = state.score + jnp.sum(jnp.where(of, 1 - score, 0.0))
        learner, done = agent.observe(state.learner, learnt(trajectory)), played >= games
        better = done & (won > threshold * played)
        choose = lambda condition, new, old: jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
        return State(
            learner,
            choose(better, state.candidate, state.best),
            choose(done, agent.actor(learner), state.candidate),
            state.number + done,
            jnp.where(done, 0.0, played),
            jnp.where(done, 0.0, won),
            state.promotions + better,
        )

    def policy_mask(state: State) -> State:
        assert agent.policy_mask is not None
        return State(agent.policy_mask(state.learner), *[False] * 6)  # type: ignore[arg-type]

    return agent._replace(
        init=init,
        actor=lambda state: Params(state.best, state.candidate, state.number),
        carry=functools.partial(seats.carry_of, agent),
        act=act,
        plan=plan,
        grad=grad,
        apply=apply,
        observe=observe,
        number=functools.partial(seats.numbered, agent),
        policy_mask=policy_mask if agent.policy_mask else None,
        make=functools.partial(_made, agent.make, (games, threshold, every)) if agent.make else None,
        evaluation=agent._replace(init=init, actor=lambda state: state.best, policy_mask=None),
        check=check,
        brought=parts_of(agent),
        transforms=(*agent.transforms, Transform("gated", {"games": games, "threshold": threshold, "every": every})),
    )


def _made(make: Callable[[Any], Agent], settings: tuple[Any, ...], config: Any) -> Agent:
    return gated(make(config), *settings)
