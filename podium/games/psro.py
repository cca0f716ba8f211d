"""Policy-space response oracles (Lanctot et al. 2017, arXiv 1711.00832): best responses to a mixture of earlier ones.

    repeat:  U_ij = what policy i gains against policy j,  sigma = meta-strategy of U,
             the next policy is a best response, by reinforcement learning, to opponents drawn from sigma once a game

With the meta-strategy `nash` it is the double oracle (McMahan et al. 2003) with responses that are learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from podium import seats
from podium.agent import ActOutput, Agent, Aux, Plan, check_is_agent
from podium.env import Env, auto_reset
from podium.evaluate import Policy
from podium.files import name_of
from podium.games.exploitability import GameTree, Probabilities, exploitability, mixed
from podium.games.match import check_games, match
from podium.games.players import check_two_players
from podium.games.responses import Responses
from podium.host import check_is_env
from podium.placement import Anakin, Placement
from podium.ranges import check_positive, check_type, nearest_multiples
from podium.train import agent_record
from podium.types import Array, EnvSpec, Key, PyTree, Seen, Trajectory

MetaStrategy = Callable[[np.ndarray], np.ndarray]
"""`(payoffs [N, N]) -> weights [2, N]`: how often each policy is drawn in the first seat, and in the second; the
payoffs are what the row's policy gains in the first seat against the column's in the second."""


class PSRO(NamedTuple):
    """What was found.

    Attributes:
      policies: N of them, in the order that they were trained; the first is untrained.
      weights: [2, N], the meta-strategy, of the first seat and of the second.
      payoffs: [N, N], what the row's policy gains in the first seat against the column's in the second.
      exploitability: of the mixture before each response and after the last; NaN where the game is too large.
      policy: `(obs [B, ...]) -> probabilities [B, A]` of the mixture as one policy; None where the game is too large.
    """

    policies: list[Policy]
    weights: np.ndarray
    payoffs: np.ndarray
    exploitability: list[float]
    policy: Probabilities | None


def nash(payoffs: np.ndarray) -> np.ndarray:
    """Return an equilibrium [2, N] of a matrix game, exactly, by linear programming.

    >>> nash(np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])).round(3).tolist()
    [[0.333, 0.333, 0.333], [0.333, 0.333, 0.333]]
    """
    return np.stack([_best_mixture(payoffs), _best_mixture(-payoffs.T)])


def _best_mixture(payoffs: np.ndarray) -> np.ndarray:
    """Return the weights [N] of rows whose least gain against a column is greatest."""
    rows, columns = payoffs.shape
    # Maximise v such that x @ payoffs >= v for every column.
    bound = np.concatenate([-payoffs.T, np.ones((columns, 1))], axis=1)
    total = np.append(np.ones(rows), 0.0)[None]
    limits = [(0, None)] * rows + [(None, None)]
    found = optimize.linprog(np.append(np.zeros(rows), -1.0), bound, np.zeros(columns), total, [1.0], limits)
    weights = np.maximum(found.x[:rows], 0)
    return weights / weights.sum()


def psro(
    env: Env,
    agent: Agent,
    iterations: int = 16,
    num_steps: int = 100_000,
    num_envs: int = 64,
    rollout_length: int = 64,
    groups: int = 16,
    meta_strategy: MetaStrategy = nash,
    games: int = 200,
    seed: int = 0,
    placement: Placement | None = None,
    progress: Callable[[int, float], None] = lambda iteration, exploitability: None,
    run_dir: Path | str | None = None,
    resume: bool = False,
) -> PSRO:
    """Train `iterations` best responses, each from the start and to the meta-strategy of all before.

    One program trains them all. A policy of the pool plays greedily: responses are pure, and the mixture mixes.
    Opponents are drawn for `groups` of environments in each seat before every rollout, and only games that began in it
    are learnt from, so that each is against one policy.
    Payoffs are exact where the game is small (`GameTree`), else of `match`.

    Args:
      env: a game of two in turn that does not reset itself.
      agent: that responds; without memory.
      iterations: responses to train.
      num_steps: plies of each response's training.
      num_envs: environments side by side, a multiple of 2 * `groups`.
      rollout_length: plies of each in an iteration of learning, more than the longest game takes.
      groups: opponents drawn for each seat at a time: the resolution of the mixture.
      meta_strategy: `(payoffs [N, N]) -> weights [2, N]`; `nash` is exact.
      games: of a match between two policies, where the game is too large for exact payoffs; an even number.
      seed: of everything.
      placement: where responses are trained; None is Anakin on one device.
      progress: called with the number of responses so far and the mixture's exploitability.
      run_dir: folder of the run, which is saved after every response; None keeps nothing.
      resume: go on with the run in `run_dir`, to what it would have come to: a response that was under way begins anew.

    Returns:
      a `PSRO`.

    Raises:
      ValueError: for a number out of range, another kind of game, an agent with memory, a `run_dir` that holds
        something, or a run that is resumed with other arguments.
    """
    check_positive(iterations=iterations, num_steps=num_steps)
    check_games(games, seed)
    _check(env, agent, num_envs, rollout_length, groups)
    asked = {
        "agent": agent_record(agent),
        "env": {"name": env.spec.name, "spec_sha256": env.spec.sha256()},
        "iterations": iterations,
        "num_steps": num_steps,
        "num_envs": num_envs,
        "rollout_length": rollout_length,
        "groups": groups,
        "meta_strategy": name_of(meta_strategy),
        "games": games,
        "seed": seed,
    }
    check_type("resume", resume, False)
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir, the folder of the run that goes on.")
    folder = None if run_dir is None else Responses(run_dir, resume, asked, iterations + 1)
    updates, placement = -(-num_steps // (num_envs * rollout_length)), placement or Anakin(1)
    program = placement.build(
        responding(agent, iterations + 1, groups),
        auto_reset(env),
        num_envs=num_envs,
        rollout_length=rollout_length,
        max_updates=updates,
    )
    tree, policies, history = _tree(env), list[Policy](), list[float]()
    tables: list[list[np.ndarray]] = []
    payoffs = known = np.zeros((0, 0))
    try:
        begin = program.init(seed)
        pool = jax.device_get(program.agent_state(begin).pool)
        if folder is not None:
            pool, known = folder.begin(pool, placement.explain().words)
        for iteration in range(iterations + 1):
            policies.append(Policy(agent, jax.tree.map(lambda x: x[iteration], pool), env.spec))  # noqa: B023
            if tree is not None:
                tables.append(tree.tables(pure(policies[-1])))
            if iteration < len(known):
                payoffs = known[: iteration + 1, : iteration + 1]
            elif tree is not None:
                payoffs = _by_tree(tree, tables, payoffs)
            else:
                payoffs = _by_matches(env, policies, payoffs, games, seed)
            if folder is not None and iteration >= len(known):
                folder.save(iteration * num_steps, pool, payoffs)
            weights = meta_strategy(payoffs)
            mixture = None if tree is None else mixed(tree, tables, weights)
            history.append(exploitability(tree, mixture) if tree and mixture else np.nan)
            progress(iteration, history[-1])
            if iteration == iterations:
                break
            if iteration + 1 < len(known):
                continue
            # Neighbouring seeds shall share no response.
            state = program.init(int(np.random.SeedSequence((seed, iteration)).generate_state(1)[0]))
            own = jax.device_get(program.agent_state(state))
            padded = np.zeros((2, iterations + 1), np.float32)
            padded[:, : len(policies)] = weights
            state = program.adopt(state, own._replace(pool=pool, weights=padded), 0)
            state, metrics = program.chunk(state, updates)
            if not np.all(metrics["finite"]):
                raise FloatingPointError(f"Response {iteration + 1} became NaN or infinite.")
            found = jax.device_get(agent.actor(program.agent_state(state).learner))
            pool = jax.tree.map(lambda x, new: _put(x, new, iteration + 1), pool, found)  # noqa: B023
    finally:
        program.close()
        if folder is not None:
            folder.close()
    return PSRO(policies, weights, payoffs, history, mixture)


def _check(env: Env, agent: Agent, num_envs: int, rollout_length: int, groups: int) -> None:
    """Raise ValueError for what no response can be trained in."""
    check_is_env(env)
    check_is_agent(agent)
    check_two_players(env, "psro")
    check_positive(groups=groups, rollout_length=rollout_length)
    if num_envs % (2 * groups):
        raise ValueError(
            f"num_envs={num_envs} is not divisible by 2 * groups={2 * groups}, opponents for each seat; use "
            f"{nearest_multiples(num_envs, 2 * groups)}."
        )
    longest = env.spec.max_episode_steps
    if longest is not None and rollout_length <= longest:
        raise ValueError(
            f"rollout_length={rollout_length}: a game of {env.spec.name} takes up to {longest} plies, and one that "
            f"began in an earlier rollout is not learnt from; use {2 * longest} or more."
        )
    if jax.tree.leaves(jax.eval_shape(lambda: agent.carry(env.spec, 1))):
        raise ValueError(f"psro mixes policies without memory, and {agent.name} has one; use memory='none'.")


def _put(pool: np.ndarray, new: np.ndarray, index: int) -> np.ndarray:
    pool = np.array(pool)
    pool[index] = new
    return pool


def pure(policy: Policy) -> Probabilities:
    """Return the probabilities [B, A], 0 and 1, of a policy's greedy play."""

    def of(obs: Seen) -> Any:
        return jax.nn.one_hot(policy.act(obs)[0], obs.legal.shape[-1])

    return of


def _tree(env: Env) -> GameTree | None:
    """Return a game's tree, or None for one that is too large or not all in the deal."""
    try:
        return GameTree.of(env)
    except ValueError:
        return None


def _by_matches(env: Env, policies: list[Policy], payoffs: np.ndarray, games: int, seed: int) -> np.ndarray:
    """Return the payoffs [N, N] of all policies, given those of all but the last, by matches: both seats are alike."""
    extended = np.pad(payoffs, (0, 1))
    for i in range(len(policies) - 1):
        score = match(env, policies[-1], policies[i], games, seed)
        extended[-1, i] = (score.won - score.lost) / games
        extended[i, -1] = -extended[-1, i]
    return extended


def _by_tree(tree: GameTree, tables: list[list[np.ndarray]], payoffs: np.ndarray) -> np.ndarray:
    """Return the payoffs [N, N] of all policies, given those of all but the last, exactly."""
    extended = np.pad(payoffs, (0, 1))
    for i, table in enumerate(tables):
        extended[-1, i], extended[i, -1] = tree.value(tables[-1], table), tree.value(table, tables[-1])
    return extended


class Responding(NamedTuple):
    """The State of an agent that learns a response: its own, and what it responds to.

    Attributes:
      learner: the agent's own State.
      pool: [N, ...], parameters of the policies.
      weights: float32 [2, N], how often each is drawn in the first seat, and in the second; any sum.
      opponents: int32 [2 * groups], who plays in each group; the learner sits first in the first half.
      iterations: int32, since the start.
      key: uint32 words of the key that opponents are drawn by.
    """

    learner: PyTree
    pool: PyTree
    weights: Array
    opponents: Array
    iterations: Array
    key: Array


def responding(agent: Agent, size: int, groups: int) -> Agent:
    """Return an agent that learns to play against a fixed mixture of `size` policies, which its State holds."""

    def drawn(state: Responding) -> Responding:
        keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.key), state.iterations))
        second, first = (seats.draw(key, state.weights[seat], groups) for key, seat in zip(keys, (1, 0), strict=True))
        return state._replace(opponents=jnp.concatenate([second, first]))

    def init(key: Key, spec: EnvSpec) -> Responding:
        learner = agent.init(key, spec)
        pool = jax.tree.map(lambda x: jnp.repeat(x[None], size, axis=0), agent.actor(learner))
        weights = jnp.ones((2, size), jnp.float32)
        words = jax.random.key_data(jax.random.fold_in(key, size))
        return Responding(learner, pool, weights, jnp.zeros(2 * groups, jnp.int32), jnp.zeros((), jnp.int32), words)

    def actor(state: Responding) -> tuple[PyTree, PyTree]:
        opponents = drawn(state).opponents
        return agent.actor(state.learner), jax.tree.map(lambda x: x[opponents], state.pool)

    def act(keys: Key, params: PyTree, carry: seats.Carry, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        number = carry.number
        mine, nobody = obs.player == seats.seat_of(number, groups), jnp.zeros_like(number)
        ours, theirs = params
        return seats.play(agent, keys, ours, theirs, 2 * groups, mine, nobody, carry, obs, first, greedy, True)

    def own(trajectory: Trajectory) -> Trajectory:
        number = trajectory.carry.number
        begun = jnp.cumsum(trajectory.first, axis=0) > 0
        begun = begun if trajectory.valid is None else begun & trajectory.valid
        return seats.own_moves(
            trajectory._replace(valid=begun), seats.seat_of(number, groups), jnp.zeros(number.shape, bool)
        )

    def plan(key: Key, state: Responding, trajectory: Trajectory) -> Plan:
        return agent.plan(key, state.learner, own(trajectory))

    def grad(key: Key, state: Responding, minibatch: PyTree) -> tuple[PyTree, Aux]:
        return agent.grad(key, state.learner, minibatch)

    def apply(state: Responding, grads: PyTree) -> Responding:
        return state._replace(learner=agent.apply(state.learner, grads))

    def observe(state: Responding, trajectory: Trajectory) -> Responding:
        learner = agent.observe(state.learner, own(trajectory))
        return state._replace(learner=learner, iterations=state.iterations + 1)

    return agent._replace(
        init=init,
        actor=actor,
        carry=lambda spec, num_envs: seats.carry_of(agent, spec, num_envs),
        act=act,
        plan=plan,
        grad=grad,
        apply=apply,
        observe=observe,
        replay=seats.replay_of(agent),
        number=lambda carry, index: seats.numbered(agent, carry, index),
        policy_mask=None,
        make=None,
    )
