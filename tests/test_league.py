"""Leagues and gates: who plays whom, what is learnt from it, and the same under every placement."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from everywhere import (
    ONE_DEVICE,
    PLACEMENTS,
    PLAY_ON_HOST,
    all_but,
    assert_eight_devices_learn_the_same,
    stacked_game,
    state_under,
)
from podium import envs, games
from podium.agent import Agent, fresh_carry
from podium.agents import a2c, dqn, impala, ppo
from podium.env import Env, auto_reset
from podium.envs.wrappers import time_limit
from podium.games.psro import responding
from podium.host import on_host
from podium.networks import by_players
from podium.rollout import begin, rollout
from podium.testing import check_agent, probe_game
from podium.types import Trajectory

GAMMA = 0.9
SIZES: dict[str, Any] = {"gamma": GAMMA, "learning_rate": 1e-2, "hidden_sizes": (16,)}
OFF = {"buffer_capacity": 1024, "min_replay_size": 64, "batch_size": 64, "target_update_period": 10, "num_updates": 4}
AGENTS: dict[str, Any] = {
    "ppo": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=1, num_epochs=2)),
    "ppo-gru": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=1, num_epochs=2, memory="gru", memory_size=8)),
    "a2c": lambda: a2c.make(a2c.Config(**SIZES)),
    "impala": lambda: impala.make(impala.Config(**SIZES, num_minibatches=1)),
    "dqn-3-step": lambda: dqn.make(dqn.Config(**SIZES, **OFF, n_step=3)),
}
KUHN, TIC_TAC_TOE = envs.make("podium/Kuhn"), envs.make("podium/TicTacToe", openings=4)


def in_league(name: str = "ppo", size: int = 2, snapshot_every: int = 2, **more: Any) -> Agent:
    return podium.league(AGENTS[name](), size=size, snapshot_every=snapshot_every, **{"self_play": 0.5, **more})


def played(agent: Agent, state: Any, env: Env, num_envs: int, length: int) -> Trajectory:
    env, index = auto_reset(env), jnp.arange(num_envs)
    start = begin(jax.random.key(1), env, index, fresh_carry(agent, env.spec, index))
    return rollout(jax.random.key(2), agent, env, agent.actor(state), start, length, jnp.int32(0))[1]


def fixed(move: Any) -> Agent:
    """An agent whose parameter is a number that `move` makes an action of."""
    base = AGENTS["ppo"]()

    def act(keys: Any, params: Any, carry: Any, obs: Any, first: Any, greedy: bool) -> Any:
        output = base.act(keys, params, carry, obs, first, greedy)
        return output._replace(action=move(params, obs))

    return base._replace(act=act)


def seats(num_envs: int, size: int, share: float) -> list[int | None]:
    """Return where the learner sits in each environment; None where it plays itself."""
    found: list[int | None] = []
    for number in range(num_envs):
        pair = number // (2 * size) * size + number % size
        alone = int((pair + 1) * share + 1e-9) > int(pair * share + 1e-9)
        found.append(None if alone else number // size % 2)
    return found


def moves_of(trajectory: Trajectory, b: int, seat: int) -> list[dict[str, Any]]:
    """Return the learner's moves in one environment with all that followed until its next: the slow obvious way."""
    rows = jax.tree.map(lambda x: np.asarray(x)[:, b], (trajectory.obs, trajectory.next_obs, trajectory.action))
    obs, next_obs, action = rows
    reward, ended = np.asarray(trajectory.reward[:, b]), np.asarray(trajectory.last[:, b])
    over = np.asarray(trajectory.terminated[:, b])
    length, found = len(reward), []
    for t in range(length):
        if obs.player[t] != seat:
            continue
        total, end = float(reward[t]), t
        while not ended[end] and end + 1 < length and obs.player[end + 1] != seat:
            end += 1
            total -= float(reward[end])
        if not ended[end] and end + 1 == length and next_obs.player[end] != seat:
            break  # What the other does then is not known yet.
        worth = 0 if over[end] else 1 if next_obs.player[end] == seat else -1
        found.append({"t": t, "reward": total, "ended": bool(ended[end]), "next": next_obs.view[end], "worth": worth})
    return found


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(KUHN, marks=pytest.mark.slow),
        time_limit(envs.make("podium/TicTacToe"), 5),
        pytest.param(TIC_TAC_TOE, marks=pytest.mark.slow),
        pytest.param(probe_game(3), marks=pytest.mark.slow),
    ],
    ids=["kuhn", "cut", "tic-tac-toe", "probe"],
)
def test_advantages_are_those_of_the_learners_own_moves(env: Env) -> None:
    """What ppo plans from equals GAE by a loop over the learner's own moves; the other is part of the environment."""
    base = AGENTS["ppo"]()
    agent = podium.league(base, size=4, snapshot_every=1, self_play=0.25)
    state = agent.init(jax.random.key(0), env.spec)
    trajectory = played(agent, state, env, 16, 13)
    batch = agent.plan(jax.random.key(0), state, trajectory).data
    network = base.config.network()
    value_of = lambda view, b: float(
        network.apply(
            state.learner.params, (), jax.tree.map(lambda x: x[:1, b], trajectory.obs)._replace(view=view[None]),
            jnp.zeros(1, bool),
        )[0].value[0]
    )  # fmt: skip
    lambda_, checked = base.config.gae_lambda, 0
    for b, seat in enumerate(seats(16, 4, 0.25)):
        if seat is None:
            assert batch.valid[:, b].all()
            continue
        found = moves_of(trajectory, b, seat)
        assert np.asarray(batch.valid[:, b]).tolist() == [i < len(found) for i in range(13)]
        value = [float(trajectory.extras.ours.value[move["t"], b]) for move in found]
        following = 0.0
        for i in reversed(range(len(found))):
            move = found[i]
            reached = move["worth"] * value_of(jnp.asarray(move["next"]), b)
            following = 0.0 if move["ended"] or i + 1 == len(found) else following
            following = move["reward"] + GAMMA * reached - value[i] + GAMMA * lambda_ * following
            assert float(batch.advantage[i, b]) == pytest.approx(following, abs=1e-5)
            assert float(batch.target[i, b]) == pytest.approx(following + value[i], abs=1e-5)
            np.testing.assert_array_equal(batch.obs.view[i, b], trajectory.obs.view[move["t"], b])
            assert batch.action[i, b] == trajectory.action[move["t"], b]
            checked += 1
    assert checked > 20


@pytest.mark.slow
def test_self_play_alone_is_the_agent_itself() -> None:
    expected = state_under(ONE_DEVICE, AGENTS["ppo"](), TIC_TAC_TOE)
    found = state_under(ONE_DEVICE, in_league(self_play=1), TIC_TAC_TOE).learner
    assert_close(found, expected, tolerance=1e-6, relative=0)


def test_each_environment_meets_its_opponent_in_its_seat() -> None:
    """Snapshot k always plays the k-th legal move but one; whose move it is tells who moved."""
    moves = lambda params, obs: jnp.broadcast_to(jnp.asarray(params, jnp.int32), obs.player.shape)
    base, size = fixed(moves), 3
    base = base._replace(
        actor=lambda state: state,
        act=lambda keys, params, carry, obs, first, greedy: podium.agent.ActOutput(moves(params, obs), carry, ()),
        policy_mask=None,
    )
    agent = podium.league(base, size=size, snapshot_every=1, self_play=1 / 3)
    params = podium.league.__globals__["Params"](jnp.float32(8), jnp.array([1.0, 3.0, 5.0]), jnp.array([4, 2, 3]))
    for offset in (0, 12, 5):
        for num_envs in (12, 7, 1):
            index = offset + jnp.arange(num_envs)
            carry = fresh_carry(agent, TIC_TAC_TOE.spec, index)
            for player in (0, 1):
                obs = jax.tree.map(lambda spec: spec.zeros(num_envs), TIC_TAC_TOE.spec.obs)  # noqa: B023
                obs = obs._replace(player=jnp.full(num_envs, player, jnp.int32))
                keys, first = jax.random.split(jax.random.key(0), num_envs), jnp.ones(num_envs, bool)
                output = agent.act(keys, params, carry, obs, first, False)
                for b, seat in enumerate(seats(offset + num_envs, size, 1 / 3)[offset:]):
                    mine = seat is None or seat == player
                    opponent = (offset + b) % size
                    assert output.action[b] == (8 if mine else [1, 3, 5][opponent])
                    assert output.extras.mine[b] == mine
                    assert output.extras.against[b] == (-1 if seat is None else [4, 2, 3][opponent])


def test_memory_is_of_the_learners_own_moves() -> None:
    """What the network remembers as it learns is what it remembered as it acted."""
    base = AGENTS["ppo-gru"]()
    agent = podium.league(base, size=2, snapshot_every=1, self_play=0.25)
    state = agent.init(jax.random.key(0), KUHN.spec)
    trajectory = played(agent, state, KUHN, 16, 12)
    plan = agent.plan(jax.random.key(0), state, trajectory)
    batch = plan.data
    output = by_players(base.config.network()).unroll(state.learner.params, plan.per_env, batch.obs, batch.first)
    same = np.asarray(jnp.isclose(output.policy.log_prob(batch.action), batch.log_prob, atol=1e-5))
    assert same[np.asarray(batch.valid)].all() and 0.5 < batch.valid.mean() < 1


@pytest.mark.parametrize(
    "learning", [in_league, lambda name: responding(AGENTS[name](), 2, 2)], ids=["league", "response"]
)
def test_a_replay_keeps_the_learners_own_moves_in_a_game_of_stacks(learning: Any) -> None:
    """They are two plies apart: a replay that keeps frames once would join none to the one before, nor keep it."""
    agent, env = learning("dqn-3-step"), stacked_game(4)
    state = ONE_DEVICE.build(agent, env, num_envs=8, rollout_length=8).init(0)
    data = agent.plan(jax.random.key(0), state.agent, played(agent, state.agent, env, 8, 8)).data
    items = agent.replay.add(state.replay, data).items
    assert data.valid.sum() > 24
    np.testing.assert_array_equal(items.valid.sum(), data.valid.sum())


def test_results_count_for_the_snapshot_that_was_met() -> None:
    agent = podium.league(AGENTS["ppo"](), size=2, snapshot_every=100, self_play=0.5)
    state = agent.init(jax.random.key(0), KUHN.spec)
    state = state._replace(number=jnp.array([3, 7]), opponents=jnp.array([1, 0]))
    trajectory = played(agent, state, KUHN, 8, 40)
    following = agent.observe(state, trajectory)
    won, games_ended = np.zeros(2), np.zeros(2)
    reward, last = np.asarray(trajectory.reward), np.asarray(trajectory.last)
    for b, seat in enumerate(seats(8, 2, 0.5)):
        if seat is None:
            continue
        for t in np.flatnonzero(last[:, b]):
            gain = reward[t, b] * (1 if trajectory.obs.player[t, b] == seat else -1)
            games_ended[[1, 0][b % 2]] += 1
            won[[1, 0][b % 2]] += gain > 0
    np.testing.assert_array_equal(following.games, games_ended)
    np.testing.assert_array_equal(following.score, won)
    late = agent.observe(state._replace(number=jnp.array([4, 7])), trajectory)  # Of a snapshot that is gone.
    np.testing.assert_array_equal(late.games, [0, games_ended[1]])


def test_the_pool_holds_the_newest_snapshots() -> None:
    state = state_under(ONE_DEVICE, in_league(size=2, snapshot_every=2), TIC_TAC_TOE, updates=7)
    assert state.number.tolist() == [2, 3] and state.iterations == 7
    earlier = state_under(ONE_DEVICE, in_league(size=2, snapshot_every=2), TIC_TAC_TOE, updates=6)
    newest = in_league().evaluated.actor(earlier)
    jax.tree.map(lambda pool, x: np.testing.assert_array_equal(pool[1], x), state.pool, newest)


@pytest.mark.parametrize(
    ("matchmaking", "expected"),
    [
        ("uniform", [1, 1, 1, 1]),
        ("hard", [0.01, 0.64, 0.25, 0.25]),
        pytest.param("newest", [0, 0, 4, 0], marks=pytest.mark.slow),
        pytest.param("variance", [0.09, 0.16, 0.25, 0.25], marks=pytest.mark.slow),
        pytest.param(lambda win_rate, number: win_rate > 0.85, [4, 0, 0, 0], marks=pytest.mark.slow),
        pytest.param(lambda win_rate, number: 0 * win_rate, [1, 1, 1, 1], marks=pytest.mark.slow),
    ],
)
def test_opponents_are_drawn_by_their_weights(matchmaking: Any, expected: list[float]) -> None:
    agent = in_league(size=4, snapshot_every=1, matchmaking=matchmaking)
    state = agent.init(jax.random.key(0), KUHN.spec)
    trajectory = played(agent, state, KUHN, 8, 1)
    win_rate = np.array([0.9, 0.2, 0.5, 0.5])  # Of the third, which is taken now, nothing is known.
    games_of = np.array([199.0, 199, 0, 0])
    state = state._replace(
        number=jnp.array([4, 5, -2, 3]), games=jnp.asarray(games_of), score=jnp.asarray(win_rate * (games_of + 1) - 0.5)
    )
    # Half of the games count at the draw.
    state = state._replace(games=2 * state.games, score=2 * state.score)

    def draw(key: Any) -> Any:
        return agent.observe(state._replace(key=jax.random.key_data(key), iterations=jnp.int32(5)), trajectory)

    drawn = jax.vmap(draw)(jax.random.split(jax.random.key(1), 2000))
    assert drawn.number[0].tolist() == [4, 5, 6, 3]
    counts = np.bincount(np.asarray(drawn.opponents).reshape(-1), minlength=4) / 2000
    np.testing.assert_allclose(counts, 4 * np.array(expected) / sum(expected), atol=0.06)
    groups = np.stack([np.bincount(column, minlength=4) for column in np.asarray(drawn.opponents).T]) / 2000
    np.testing.assert_allclose(groups, np.broadcast_to(counts / 4, (4, 4)), atol=0.05)  # No group is one's own.


@functools.cache
def by_one_device(name: str) -> Any:
    return state_under(ONE_DEVICE, in_league(name), probe_game(3))


FAST = [("two devices", "ppo-gru")]


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        pytest.param(placement, name, marks=[] if (placement, name) in FAST else [pytest.mark.slow])
        for placement in all_but("eight devices")
        for name in ("ppo-gru", "impala", "dqn-3-step")
    ],
)
def test_every_placement_learns_the_same(placement: str, name: str) -> None:
    agent, env = in_league(name), probe_game(3)
    assert_close(state_under(PLACEMENTS[placement], agent, env), by_one_device(name), relative=0)
    if placement in PLAY_ON_HOST and name == "dqn-3-step":
        assert_close(state_under(PLACEMENTS[placement], agent, on_host(env)), by_one_device(name), relative=0)


@pytest.mark.slow
def test_eight_devices_learn_the_same() -> None:
    assert_eight_devices_learn_the_same(in_league(size=4, matchmaking="variance"), TIC_TAC_TOE, num_envs=32, updates=5)


@pytest.mark.slow
def test_what_is_evaluated_and_loaded_is_the_agent_alone(tmp_path: Path) -> None:
    sizes = {"num_envs": 8, "rollout_length": 8, "checkpoint_every": 128, "eval_every": 128, "progress": False}
    train = lambda folder, num_steps, **more: podium.train(
        in_league(), TIC_TAC_TOE, num_steps=num_steps, run_dir=tmp_path / folder, **sizes, **more
    )
    whole = train("whole", 384)
    train("halves", 128)
    halves = train("halves", 384, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.state, halves.state)
    assert not jax.tree.leaves(whole.policy.carry(1))
    jax.tree.map(np.testing.assert_array_equal, whole.policy.params, AGENTS["ppo"]().actor(whole.state.learner))
    assert games.every_line(envs.make("podium/TicTacToe"), whole.policy).lost >= 0
    members = games.snapshots(whole)
    newest = int(whole.state.number.max())
    assert list(members)[:2] == ["learner", f"snapshot {newest}"]
    place = whole.state.number.tolist().index(newest)
    jax.tree.map(
        lambda found, pool: np.testing.assert_array_equal(found, pool[place]),
        members[f"snapshot {newest}"].params,
        whole.state.pool,
    )
    loaded = podium.load(tmp_path / "halves", agent=in_league(), env=TIC_TAC_TOE)
    jax.tree.map(np.testing.assert_array_equal, whole.policy.params, loaded.params)
    assert 0 <= whole.metrics[-1]["win_rate"] <= 1


@pytest.mark.slow
def test_evolution_and_populations_play_it() -> None:
    env = probe_game(2)
    state_under(podium.Evolution(devices=1), in_league(), env, updates=2)
    space = {"learning_rate": podium.log_range(1e-4, 1e-2, 2)}
    population = podium.Population(members=2, space=space, devices=1)
    sizes = {"num_envs": 8, "rollout_length": 8, "num_steps": 256, "progress": False}
    result = podium.train(in_league(), env, placement=population, **sizes)
    for policy in result.policy:
        assert not jax.tree.leaves(policy.carry(1)) and policy.act(env.spec.obs.view.zeros(1)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("agent", [in_league("ppo-gru"), in_league("dqn-3-step", self_play=0)], ids=["gru", "dqn"])
def test_the_contract_is_kept(agent: Agent) -> None:
    check_agent(agent, KUHN, num_envs=8)


def _build(agent: Agent, env: Env = KUHN, num_envs: int = 8) -> None:
    podium.Anakin(devices=1).build(agent, env, num_envs=num_envs, rollout_length=8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: in_league(size=0), "size=0"),
        (lambda: in_league(snapshot_every=0), "snapshot_every=0"),
        (lambda: in_league(self_play=1.5), "self_play=1.5"),
        (lambda: in_league(matchmaking="oldest"), "matchmaking='oldest'"),
        (lambda: _build(in_league(), envs.make("podium/Catch")), "league needs a game of two players in turn"),
        (lambda: _build(in_league(), envs.make("podium/Tag")), "league needs a game of two players in turn"),
        (lambda: in_league().init(jax.random.key(0), envs.make("podium/Catch").spec), "two players in turn"),
        (lambda: _build(in_league(size=4), num_envs=12), "num_envs=12 is not divisible by 8: .* use 8 or 16"),
        (lambda: _build(in_league(self_play=0.1)), "self_play=0.1 of num_envs=8 .* use 0, or 0.25"),
        (lambda: podium.league(ppo.make(ppo.Config(normalize_reward=True))), "normalize_reward=True"),
        (lambda: games.snapshots(podium.Result((), [], {}, None, None)), "are no league's of one seed"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
