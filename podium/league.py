"""Leagues: an agent learns from games against snapshots of its past, and against itself.

Fictitious self-play (Heinrich et al. 2015) with a pool of opponents, of which some are met more often than others:
prioritised fictitious self-play (Vinyals et al. 2019, Nature 575, "Grandmaster level in StarCraft II"). Deliberate
differences: one agent learns, where AlphaStar has main agents, exploiters and their exploiters; the pool holds the
newest snapshots, not all; opponents are drawn for groups of environments, when a snapshot is taken, not for every game.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium import seats
from podium.agent import ActOutput, Agent, Aux, Plan, Transform, parts_of
from podium.files import name_of
from podium.ranges import check_choice, check_positive, check_value
from podium.types import Array, EnvSpec, Key, PyTree, Trajectory

UNFILLED = -2
"""Number of a place of the pool that holds no snapshot yet."""

KEPT = 0.5
"""Share of the games that still counts when opponents are drawn anew: the learner is another by then."""

Matchmaking = Callable[[Array, Array], Array]
"""`(win_rate [K], number [K]) -> weights [K]`, 0 or more: how often the learner is to meet each snapshot. `win_rate` is
the learner's against it, 1/2 before they met; `number` is the snapshot's, the newest has the greatest."""


def uniform(win_rate: Array, number: Array) -> Array:
    """Weigh all snapshots alike: fictitious self-play."""
    return jnp.ones_like(win_rate)


def newest(win_rate: Array, number: Array) -> Array:
    """Meet the newest snapshot only."""
    return (number == number.max()).astype(jnp.float32)


def hard(win_rate: Array, number: Array, power: float = 2.0) -> Array:
    """Weigh by (1 - p)^q, the rather the harder to beat (Vinyals et al. 2019, f_hard; p is the win rate)."""
    return (1 - win_rate) ** power


def variance(win_rate: Array, number: Array) -> Array:
    """Weigh by p (1 - p), the rather the nearer to one's own strength (Vinyals et al. 2019, f_var)."""
    return win_rate * (1 - win_rate)


MATCHMAKING: dict[str, Matchmaking] = {"uniform": uniform, "newest": newest, "hard": hard, "variance": variance}


class State(NamedTuple):
    """What learning needs; K is the pool's size.

    Attributes:
      learner: the agent's own State.
      pool: [K, ...], parameters that the snapshots act with.
      number: int32 [K], of each snapshot, in the order that they were taken; `UNFILLED` where there is none yet.
      games: float32 [K], that the learner ended against each; of those before the last draw a share of `KEPT` counts.
      score: float32 [K], of these: 1 for each that the learner won, 1/2 for a draw.
      opponents: int32 [K], which snapshot each group of environments meets.
      iterations: int32, since the start.
      key: uint32 words of the key that opponents are drawn by.
    """

    learner: PyTree
    pool: PyTree
    number: Array
    games: Array
    score: Array
    opponents: Array
    iterations: Array
    key: Array

    def win_rate(self) -> Array:
        """Return [K], the learner's against each snapshot, with one draw more than they played."""
        return (self.score + 0.5) / (self.games + 1)


class Params(NamedTuple):
    """What acting needs: the learner's parameters, the opponents' [K, ...], and their numbers [K]."""

    learner: PyTree
    opponents: PyTree
    number: Array


def league(
    agent: Agent,
    size: int = 8,
    snapshot_every: int = 50,
    matchmaking: str | Matchmaking = "hard",
    self_play: float = 0.25,
) -> Agent:
    """Return an agent that learns in a league: against snapshots of itself, and in a share of the games itself.

    Environment i belongs to group i mod K, whose opponent is one snapshot, and the learner sits in seat (i div K) mod
    2; of these pairs of seats a share is self-play, spread evenly. Every `snapshot_every` iterations the learner takes
    the place of the oldest snapshot, and the K groups draw their opponents: by systematic sampling, so that with equal
    weights each snapshot is met by one group. Games under way go on against the new opponent, and count for it.

    Of a game against a snapshot the learner's own moves are learnt from, as `podium.seats.own_moves` has them: gamma
    and lambda count moves, those of both in self-play, its own in the others. The agent's own counters, such as those
    of schedules, count these moves: about half of the environments' steps. A replay holds their observations whole, and
    no frames once. Metrics have `win_rate`, the mean of the learner's against the pool. Evaluated, loaded and evolved
    is the agent itself (`Agent.evaluation`).

    Args:
      agent: any without a memory that it replays; PPO is the usual.
      size: K, snapshots in the pool.
      snapshot_every: iterations from one snapshot to the next.
      matchmaking: "uniform", "newest", "hard" ((1 - p)^2), "variance" (p (1 - p)), or a function; see `Matchmaking`.
      self_play: share of the environments in which the learner plays itself, 0 to 1.

    Returns:
      an `Agent` for games of two players in turn.

    Raises:
      ValueError: for a number out of range; from `init` and a placement's `build`, for an environment that is no such
        game; from `build`, for a number of environments that the groups and two seats do not divide, or of whose pairs
        `self_play` is less than one.

    >>> import podium
    >>> from podium.agents import ppo
    >>> agent = podium.league(ppo.make(), size=2, snapshot_every=1)
    >>> result = podium.train(
    ...     agent, "podium/TicTacToe", num_steps=256, num_envs=16, rollout_length=8, progress=False
    ... )
    >>> result.state.number.tolist()
    [2, 1]
    """
    check_positive(size=size, snapshot_every=snapshot_every)
    check_value("self_play", self_play, "fractions", "0.25 is usual")
    if not callable(matchmaking):
        check_choice("matchmaking", matchmaking, tuple(MATCHMAKING))
    seats.check_agent(agent, "podium.league")
    weigh: Matchmaking = matchmaking if callable(matchmaking) else MATCHMAKING[matchmaking]
    share = Fraction(self_play).limit_denominator(1000)

    def alone(number: Array) -> Array:
        """Return which environments are self-play: both seats of a pair, and pairs evenly."""
        pair = number // (2 * size) * size + number % size
        upto = lambda count: count * share.numerator // share.denominator
        return upto(pair + 1) > upto(pair)

    def check(spec: EnvSpec, num_envs: int) -> None:
        seats.check_game(agent, spec, "league")
        seats.check_rounds(num_envs, size, "a league", f"size={size} opponents")
        if share and share * (num_envs // 2) < 1:
            raise ValueError(
                f"self_play={self_play} of num_envs={num_envs} is less than two environments, one for each seat; use "
                f"0, or {2 / num_envs:.3g} and more."
            )

    def init(key: Key, spec: EnvSpec) -> State:
        seats.check_game(agent, spec, "league")
        learner = agent.init(key, spec)
        pool = jax.tree.map(lambda x: jnp.repeat(x[None], size, axis=0), agent.actor(learner))
        number = jnp.full(size, UNFILLED, jnp.int32).at[0].set(0)
        draws = jax.random.key_data(jax.random.fold_in(key, size))
        none, nobody = jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.int32)
        return State(learner, pool, number, none, none, nobody, jnp.zeros((), jnp.int32), draws)

    def actor(state: State) -> Params:
        met = jax.tree.map(lambda x: x[state.opponents], state.pool)
        return Params(agent.actor(state.learner), met, state.number[state.opponents])

    def act(keys: Key, params: Params, carry: seats.Carry, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        itself = alone(carry.number)
        mine = itself | (obs.player == seats.seat_of(carry.number, size))
        against = jnp.where(itself, -1, params.number[carry.number % size])
        others = params.learner, params.opponents
        return seats.play(agent, keys, *others, size, mine, against, carry, obs, first, greedy)

    def own(trajectory: Trajectory) -> Trajectory:
        number = trajectory.carry.number
        return seats.own_moves(trajectory, seats.seat_of(number, size), alone(number))

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        return agent.plan(key, state.learner, own(trajectory))

    def grad(key: Key, state: State, minibatch: PyTree) -> tuple[PyTree, Aux]:
        grads, aux = agent.grad(key, state.learner, minibatch)
        met = state.number != UNFILLED
        rate = jnp.sum(jnp.where(met, state.win_rate(), 0.0)) / jnp.sum(met)
        return grads, aux._replace(metrics={**aux.metrics, "win_rate": rate})

    def apply(state: State, grads: PyTree) -> State:
        return state._replace(learner=agent.apply(state.learner, grads))

    def observe(state: State, trajectory: Trajectory) -> State:
        ended, score = seats.scores(trajectory)
        of = ended[..., None] & (trajectory.extras.against[..., None] == state.number)
        games = state.games + jnp.sum(of, axis=(0, 1), dtype=jnp.float32)
        scored = state.score + jnp.sum(jnp.where(of, score[..., None], 0.0), axis=(0, 1))
        learner, iterations = agent.observe(state.learner, own(trajectory)), state.iterations + 1
        state = state._replace(learner=learner, games=games, score=scored, iterations=iterations)
        following = drawn(snapshot(state, iterations // snapshot_every))
        due = iterations % snapshot_every == 0
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), following, state)

    def snapshot(state: State, number: Array) -> State:
        """Put the learner in the place of the oldest snapshot, as that of this `number`."""
        here = jnp.arange(size) == number % size
        params = agent.actor(state.learner)
        put = lambda pool, x: jnp.where(here.reshape(-1, *[1] * x.ndim), x[None], pool)
        return state._replace(
            pool=jax.tree.map(put, state.pool, params),
            number=jnp.where(here, number, state.number).astype(jnp.int32),
            games=jnp.where(here, 0.0, KEPT * state.games),
            score=jnp.where(here, 0.0, KEPT * state.score),
        )

    def drawn(state: State) -> State:
        """Draw the opponent of every group."""
        there = state.number != UNFILLED
        weights = jnp.where(there, weigh(state.win_rate(), state.number), 0.0)
        weights = jnp.where(jnp.sum(weights) > 0, weights, there.astype(jnp.float32))
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.iterations)
        return state._replace(opponents=seats.draw(key, weights, size))

    def policy_mask(state: State) -> State:
        assert agent.policy_mask is not None
        return State(agent.policy_mask(state.learner), *[False] * 7)  # type: ignore[arg-type]

    # By the name of a function `podium.load` cannot make it again, and asks for the agent.
    drawn_by = name_of(matchmaking) if callable(matchmaking) else matchmaking
    options = {"size": size, "snapshot_every": snapshot_every, "matchmaking": drawn_by, "self_play": self_play}
    mask = policy_mask if agent.policy_mask else None
    again = functools.partial(_made, agent.make, (size, snapshot_every, matchmaking, self_play)) if agent.make else None
    return agent._replace(
        init=init,
        actor=actor,
        carry=functools.partial(seats.carry_of, agent),
        act=act,
        plan=plan,
        grad=grad,
        apply=apply,
        observe=observe,
        replay=seats.replay_of(agent),
        number=functools.partial(seats.numbered, agent),
        policy_mask=mask,
        make=again,
        evaluation=agent._replace(init=init, actor=lambda state: agent.actor(state.learner), policy_mask=mask),
        check=check,
        brought=parts_of(agent),
        transforms=(*agent.transforms, Transform("league", options)),
    )


def _made(make: Callable[[Any], Agent], settings: tuple[Any, ...], config: Any) -> Agent:
    return league(make(config), *settings)
