"""The gate: who plays which games, what is learnt from them, and who becomes the best."""

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
    all_but,
    assert_eight_devices_learn_the_same,
    state_under,
)
from podium import envs
from podium.agent import Agent, fresh_carry
from podium.agents import alphazero, ppo
from podium.env import Env, auto_reset
from podium.rollout import begin, rollout
from podium.testing import check_agent, probe_game
from podium.types import Trajectory

KUHN, TIC_TAC_TOE = envs.make("podium/Kuhn"), envs.make("podium/TicTacToe", openings=4)
SIZES: dict[str, Any] = {"learning_rate": 1e-2, "hidden_sizes": (16,), "num_minibatches": 1, "num_epochs": 2}
PPO = ppo.make(ppo.Config(**SIZES))


def gate(**more: Any) -> Agent:
    return podium.gated(PPO, **{"games": 20, "every": 2, **more})


def played(agent: Agent, state: Any, env: Env, num_envs: int, length: int) -> Trajectory:
    env, index = auto_reset(env), jnp.arange(num_envs)
    start = begin(jax.random.key(1), env, index, fresh_carry(agent, env.spec, index))
    return rollout(jax.random.key(2), agent, env, agent.actor(state), start, length, jnp.int32(0))[1]


def test_the_best_plays_and_a_candidate_in_its_share() -> None:
    """Of the best and a candidate that plays by other parameters, and nothing learnt of the candidate's games."""
    agent, other = gate(every=4), PPO.actor(PPO.init(jax.random.key(9), TIC_TAC_TOE.spec))
    state = agent.init(jax.random.key(0), TIC_TAC_TOE.spec)._replace(candidate=other)
    trajectory = played(agent, state, TIC_TAC_TOE, 16, 10)
    valid = np.asarray(agent.plan(jax.random.key(0), state, trajectory).data.valid)
    keys = jax.random.split(jax.random.key(0), 1)
    for b in range(16):
        assert (valid[:, b] == (b % 4 != 3)).all()
        for t in range(10):
            obs = jax.tree.map(lambda x: x[t, b][None], trajectory.obs)  # noqa: B023
            candidate = b % 4 == 3 and int(obs.player[0]) == b // 4 % 2
            assert trajectory.extras.mine[t, b] == (not candidate)
            if not candidate:
                value = PPO.act(keys, state.best, (), obs, jnp.ones(1, bool), False).extras.value[0]
                assert float(value) == pytest.approx(float(trajectory.extras.ours.value[t, b]), abs=1e-5)


@pytest.mark.parametrize(("share_won", "promoted"), [(0.4, False), (0.55, False), (0.7, True)])
def test_a_candidate_that_wins_more_than_the_threshold_becomes_the_best(share_won: float, promoted: bool) -> None:
    agent = gate(games=100, threshold=0.55, every=2)
    state = agent.init(jax.random.key(0), probe_game(1).spec)
    state = state._replace(candidate=jax.tree.map(lambda x: x + 1, state.candidate))
    trajectory = played(agent, state, probe_game(1), 4, 1)
    # The trajectory of a game of one move, of which who moves gains `reward`: two environments of the gate, 1 and 3.
    trajectory = trajectory._replace(reward=jnp.zeros((1, 4)), terminated=jnp.ones((1, 4), bool))
    short = agent.observe(state, trajectory)
    assert (short.games, short.score, short.number) == (2, 1, 0)
    jax.tree.map(np.testing.assert_array_equal, (short.best, short.candidate), (state.best, state.candidate))
    nearly = state._replace(games=jnp.float32(98), score=jnp.float32(100 * share_won - 1))
    following = agent.observe(nearly, trajectory)
    assert (following.games, following.score, following.number) == (0, 0, 1)
    assert following.promotions == promoted
    jax.tree.map(np.testing.assert_array_equal, following.best, state.candidate if promoted else state.best)
    jax.tree.map(np.testing.assert_array_equal, following.candidate, PPO.actor(following.learner))


def test_games_count_for_who_won_them() -> None:
    agent = gate(games=10_000, every=2)
    state = agent.init(jax.random.key(0), KUHN.spec)
    trajectory = played(agent, state, KUHN, 8, 40)
    following, won, count = agent.observe(state, trajectory), 0.0, 0
    for b in range(1, 8, 2):
        for t in np.flatnonzero(np.asarray(trajectory.last[:, b])):
            moved = int(trajectory.obs.player[t, b]) == b // 2 % 2
            won += float(trajectory.reward[t, b]) * (1 if moved else -1) > 0
            count += 1
    assert (following.games, following.score) == (count, won)


@functools.cache
def by_one_device() -> Any:
    return state_under(ONE_DEVICE, gate(games=10), TIC_TAC_TOE)


@pytest.mark.slow
@pytest.mark.parametrize("placement", all_but("single", "eight devices"))
def test_every_placement_learns_the_same(placement: str) -> None:
    assert by_one_device().number > 0
    assert_close(state_under(PLACEMENTS[placement], gate(games=10), TIC_TAC_TOE), by_one_device(), relative=0)


@pytest.mark.slow
def test_eight_devices_learn_the_same() -> None:
    state = assert_eight_devices_learn_the_same(gate(games=10), TIC_TAC_TOE, num_envs=32)
    assert state.number > 0


@pytest.mark.slow
def test_alphazero_goes_through_the_gate_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("mctx", reason="needs podium[games]")
    env = envs.make("podium/TicTacToe", rules=True, openings=3)
    config = alphazero.Config(
        hidden_sizes=(16,), num_simulations=4, batch_size=32, num_updates=2, buffer_capacity=1024, min_replay_size=64
    )
    agent = podium.gated(alphazero.make(config, model=env), games=20, threshold=0.4, every=4)
    sizes = {"num_envs": 16, "rollout_length": 16, "checkpoint_every": 1024, "eval_every": 1024, "progress": False}
    train = lambda folder, num_steps, **more: podium.train(
        agent, env, num_steps=num_steps, run_dir=tmp_path / folder, **sizes, **more
    )
    whole = train("whole", 4096)
    train("halves", 2048)
    halves = train("halves", 4096, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.state, halves.state)
    assert whole.state.promotions > 0
    jax.tree.map(np.testing.assert_array_equal, whole.policy.params, whole.state.best)


@pytest.mark.slow
def test_the_contract_is_kept() -> None:
    check_agent(gate(), KUHN, num_envs=8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gate(games=0), "games=0"),
        (lambda: gate(threshold=1.5), "threshold=1.5"),
        (lambda: gate(every=1), "every=1 must be an integer, 2 or more"),
        (lambda: gate().init(jax.random.key(0), envs.make("podium/Catch").spec), "gated needs a game of two players"),
        (
            lambda: podium.Anakin(1).build(gate(every=4), KUHN, num_envs=12, rollout_length=8),
            "num_envs=12 is not divisible by 8: .* use 8 or 16",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
