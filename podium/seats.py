"""Two policies in one batch of games of two: who sits where, whose move it is, and what one of them learns from.

What leagues, the gate and PSRO share. An environment's number, the same under every placement, says where it
belongs: of G groups it is in that of its number modulo G, and what plays there sits second in every other round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.agent import ActOutput, Agent, Replay, check_is_agent
from podium.types import Array, EnvSpec, Key, PyTree, Seen, Trajectory, choose_rows


class Carry(NamedTuple):
    """What two policies remember of their games, and which those are.

    Attributes:
      number: int32 [B], of each environment.
      ours: [B, ...], memory of the policy that is learnt from.
      theirs: [B, ...], memory of the other.
      waiting: bool [B, 2], whether each of the two has not moved yet in the episode.
    """

    number: Array
    ours: PyTree
    theirs: PyTree
    waiting: Array


class Extras(NamedTuple):
    """What acting leaves for the learner, [B, ...].

    Attributes:
      ours: extras of the policy that is learnt from; as if it had moved, where it has not.
      mine: bool, whether it moved.
      first: bool, whether it had not moved before in the episode.
      against: int32, the number of the snapshot that it plays; -1 where it plays itself.
    """

    ours: PyTree
    mine: Array
    first: Array
    against: Array


def check_two_players(spec: EnvSpec, who: str) -> None:
    """Raise ValueError unless two play in turn."""
    obs = spec.obs
    if not spec.turns or not isinstance(obs, Seen) or obs.player is None or obs.legal is None:
        raise ValueError(
            f"{who} needs a game of two players in turn, whose observations are podium.types.Seen with legal and "
            f"player; env={spec.name} is none. podium/TicTacToe is one."
        )
    number = obs.player.num_values
    if number != 2:
        raise ValueError(
            f"{who} counts what one wins as the other's loss, and env={spec.name} has {number} players; it must have 2."
        )


def check_rounds(num_envs: int, num_groups: int, who: str, what: str) -> None:
    """Raise ValueError unless every group has as many environments in one seat as in the other."""
    unit = 2 * num_groups
    if num_envs % unit:
        above = -(-num_envs // unit) * unit
        near = " or ".join(str(n) for n in (above - unit, above) if n)
        raise ValueError(
            f"num_envs={num_envs} is not divisible by {unit}: {who} deals them to {what} and two seats; use {near}."
        )


def check_agent(agent: Agent, who: str) -> None:
    """Raise ValueError for an agent that a part of its moves says too little."""
    check_is_agent(agent)
    if agent.reward_discount is not None:
        raise ValueError(
            f"{agent.name} keeps discounted sums of rewards (normalize_reward=True), and in a game of two no sum of "
            "them is one player's; leave it out."
        )
    if agent.settings is not None:
        raise ValueError(
            f"use {who} first, and vary the agent's numbers then, as podium.sweep and podium.Population do."
        )


def check_game(agent: Agent, spec: EnvSpec, who: str) -> None:
    """Raise ValueError unless two play in turn, and for an agent with memory that replays sequences."""
    check_two_players(spec, who)
    memory = jax.tree.leaves(jax.eval_shape(lambda: agent.carry(spec, 1)))
    if agent.replay is not None and any(x.ndim > 1 for x in memory):  # One number an environment is no memory.
        raise ValueError(
            f"{agent.name} has memory and replays sequences, and what it plays in two rollouts of a {who} does not "
            "join to one sequence of its own moves; use memory='none', or an agent without a replay."
        )


def seat_of(number: Array, num_groups: int) -> Array:
    """Return where the policy that is learnt from sits, 0 or 1; of environments by `number`."""
    return number // num_groups % 2


def carry_of(agent: Agent, spec: EnvSpec, num_envs: int) -> Carry:
    """Return fresh memory, before its environments are numbered."""
    memory = agent.carry(spec, num_envs)
    return Carry(jnp.zeros(num_envs, jnp.int32), memory, memory, jnp.ones((num_envs, 2), bool))


def numbered(agent: Agent, carry: Carry, index: Array) -> Carry:
    """Return the memory of the environments numbered `index` [B]."""
    number = agent.number or (lambda memory, index: memory)
    return Carry(index.astype(jnp.int32), number(carry.ours, index), number(carry.theirs, index), carry.waiting)


def play(
    agent: Agent,
    keys: Key,
    ours: PyTree,
    theirs: PyTree,
    num_groups: int,
    mine: Array,
    against: Array,
    carry: Carry,
    obs: Seen,
    first: Array,
    greedy: bool,
    others_greedy: bool = False,
) -> ActOutput:
    """Let two policies of one agent act, each where it is to move; a memory moves with its policy's moves only.

    Args:
      agent: whose `act` chooses for both.
      keys: [B].
      ours: parameters of the policy that is learnt from.
      theirs: parameters [n, ...] of the others, each of one of the last n groups.
      num_groups: G.
      mine: bool [B], where the policy that is learnt from is to move.
      against: int32 [B], for `Extras`.
      carry: of both.
      obs: [B, ...].
      first: bool [B].
      greedy: of both.
      others_greedy: of the others, whatever `greedy` is.
    """
    fresh = first[:, None] | carry.waiting
    own = agent.act(keys, ours, carry.ours, obs, fresh[:, 0], greedy)

    def act(params: PyTree, rows: tuple[Any, ...]) -> tuple[Array, PyTree]:
        keys, memory, obs, first = rows
        output = agent.act(keys, params, memory, obs, first, greedy or others_greedy)
        return output.action, output.carry

    rows = keys, carry.theirs, obs, fresh[:, 1]
    action, memory = _in_groups(act, theirs, num_groups, carry.number, rows)
    following = Carry(
        carry.number,
        choose_rows(mine, own.carry, carry.ours),
        choose_rows(mine, carry.theirs, memory),
        fresh & jnp.stack([~mine, mine], axis=-1),
    )
    return ActOutput(
        choose_rows(mine, own.action, action),
        following,
        Extras(own.extras, mine, fresh[:, 0], against.astype(jnp.int32)),
    )


def draw(key: Key, weights: Array, count: int) -> Array:
    """Draw `count` numbers, int32, of 0 to K - 1 by `weights` [K], by systematic sampling and in any order.

    Each is drawn `count * weights / sum(weights)` times, rounded up or down, and so often on average.
    """
    point_key, order_key = jax.random.split(key)
    upto = jnp.cumsum(weights)
    points = (jnp.arange(count) + jax.random.uniform(point_key)) / count * upto[-1]
    last = jnp.max(jnp.where(weights > 0, jnp.arange(len(weights)), 0))  # For a point that rounding puts behind all.
    chosen = jnp.minimum(jnp.searchsorted(upto, points, side="right"), last)
    return jax.random.permutation(order_key, chosen).astype(jnp.int32)


def _in_groups(
    act: Callable[[PyTree, PyTree], PyTree], params: PyTree, num_groups: int, number: Array, rows: PyTree
) -> PyTree:
    """Return `act(params, rows)`, [B, ...], by the parameters of each row's group; of those without any, whatever.

    Where the rows are neighbours and as many of each group, they are dealt to [n, B / G, ...] and every policy acts for
    its own. Any others, such as a batch of an inference server, are acted for by every policy.
    """
    num_params, size = jax.tree.leaves(params)[0].shape[0], number.shape[0]
    policy_of = lambda group: jnp.maximum(group - (num_groups - num_params), 0)

    def by_all() -> PyTree:
        policy = policy_of(number % num_groups)
        return jax.tree.map(lambda x: x[policy, jnp.arange(size)], jax.vmap(act, (0, None))(params, rows))

    if size % num_groups:
        return by_all()

    def dealt() -> PyTree:
        columns = jnp.arange(num_groups)
        column_of, group_of = (columns - number[0]) % num_groups, (columns + number[0]) % num_groups
        deal = lambda x: jnp.moveaxis(x.reshape(-1, num_groups, *x.shape[1:]), 1, 0)[column_of[-num_params:]]
        gather = lambda x: jnp.moveaxis(x[policy_of(group_of)], 0, 1).reshape(size, *x.shape[2:])
        return jax.tree.map(gather, jax.vmap(act)(params, jax.tree.map(deal, rows)))

    return jax.lax.cond(jnp.all(number == number[0] + jnp.arange(size)), dealt, by_all)


def gains(trajectory: Trajectory) -> Array:
    """Return [T, B], what each row gained the policy that is learnt from, whoever moved; 0 where not valid."""
    gain = jnp.where(trajectory.extras.mine, trajectory.reward, -trajectory.reward)
    return gain if trajectory.valid is None else jnp.where(trajectory.valid, gain, 0.0)


def scores(trajectory: Trajectory) -> tuple[Array, Array]:
    """Return where games ended, bool [T, B], and 1, 1/2 or 0 where the policy that is learnt from won, drew or lost.

    Of a game that began in an earlier rollout what was gained there does not count: games pay at their end.
    """

    def step(total: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        first, gain = row
        total = jnp.where(first, 0.0, total) + gain
        return total, total

    gain = gains(trajectory)
    _, total = jax.lax.scan(step, jnp.zeros_like(gain[0]), (trajectory.first, gain))
    ended = trajectory.last if trajectory.valid is None else trajectory.last & trajectory.valid
    return ended, (jnp.sign(total) + 1) / 2


class _After(NamedTuple):
    """What follows a row before the next move of one's own, [B].

    Attributes:
      gain: of all rows until then.
      terminated: whether the episode terminated there.
      truncated: whether it was truncated.
      known: whether the rollout holds all of it.
      end: the row whose `next_obs` is reached.
    """

    gain: Array
    terminated: Array
    truncated: Array
    known: Array
    end: Array


def replay_of(agent: Agent) -> Replay | None:
    """Return the agent's replay, to hold `own_moves`: observations whole, for some frames lie between them."""
    return None if agent.replay is None else agent.replay._replace(keeps_frames=False)


def own_moves(trajectory: Trajectory, seat: Array, alone: Array) -> Trajectory:
    """Return a trajectory of one policy's own moves: to it the other is a part of the environment.

    As in `podium.games.versus` a step is a move and all that the other plays then: its reward is what was gained by
    both, it ends where either ended the game, and what it leads to is the next observation of who learns. So values are
    only ever of what that one sees, and their sign turns only where a time limit cuts a game as the other is to move.
    The moves of an environment come first, in their order; the rows behind them are not valid. A move whose reply lies
    behind the rollout is left out, and the one before it cut, to be bootstrapped from what was seen there. Where the
    policy plays itself all stays as it was, signs of turns and all.

    Args:
      trajectory: [T, B, ...], with `Extras` and `Carry`.
      seat: int32 [B], of the policy that is learnt from.
      alone: bool [B], where it plays both seats.

    Returns:
      [T, B, ...], with the extras and the memory of that policy.
    """
    extras, length = trajectory.extras, trajectory.reward.shape[0]
    valid = jnp.ones_like(extras.mine) if trajectory.valid is None else trajectory.valid
    own, time = extras.mine & valid, jnp.arange(length)
    terminated, truncated = trajectory.terminated & valid, trajectory.truncated & valid

    def step(after: _After, row: tuple[Array, ...]) -> tuple[_After, _After]:
        time, own, gain, terminated, truncated = row
        nothing = lambda end: _After(jnp.zeros_like(gain), *(jnp.zeros_like(own),) * 2, jnp.ones_like(own), end)
        here = jnp.full_like(after.end, time)
        after = choose_rows(terminated | truncated, nothing(here), after)
        after = after._replace(
            gain=gain + after.gain,
            terminated=terminated | after.terminated,
            truncated=truncated | after.truncated,
        )
        return choose_rows(own, nothing(here - 1), after), after

    end = jnp.full_like(seat, length - 1)
    never = jnp.zeros_like(alone)
    known = alone | (trajectory.next_obs.player[-1] == seat)
    behind = _After(jnp.zeros_like(trajectory.reward[0]), never, never, known, end)
    rows = time, own, gains(trajectory), terminated, truncated
    _, after = jax.lax.scan(step, behind, rows, reverse=True)

    whole = own & after.known
    order = jnp.where(alone, time[:, None], jnp.argsort(~whole, axis=0, stable=True))
    pick = lambda tree, at: jax.tree.map(
        lambda x: jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=0), tree
    )
    after, count = pick(after, order), jnp.sum(whole, axis=0)
    kept = jnp.where(alone, valid, time[:, None] < count)
    cut = ~alone & (time[:, None] == count - 1) & ~after.terminated
    reached, turn = pick(trajectory.next_obs, after.end), trajectory.turn
    # There it is the other's value that is bootstrapped from, the opposite of one's own.
    facing = jnp.where(after.truncated & (reached.player != seat), -1.0, 1.0)
    return trajectory._replace(
        obs=pick(trajectory.obs, order),
        action=pick(trajectory.action, order),
        reward=after.gain,
        terminated=after.terminated & kept,
        truncated=(after.truncated & kept) | cut,
        next_obs=reached,
        first=pick(extras.first, order),
        extras=pick(extras.ours, order),
        carry=trajectory.carry.ours,
        end_carry=trajectory.end_carry.ours,
        valid=kept,
        turn=None if turn is None else jnp.where(alone, turn, facing),
    )
