"""AlphaZero: what its search knows, what it learns from, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from everywhere import ONE_DEVICE, PLACEMENTS, state_under
from podium import envs
from podium.agents import alphazero
from podium.env import auto_reset
from podium.rollout import begin, rollout

pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')

TICTACTOE = "podium/TicTacToe"
SMALL: dict[str, Any] = {
    "hidden_sizes": (16,),
    "num_simulations": 8,
    "batch_size": 32,
    "num_updates": 2,
    "buffer_capacity": 1024,
    "min_replay_size": 64,
}


def game(**options: Any) -> Any:
    return envs.make(TICTACTOE, rules=True, **options)


def agent(**changes: Any) -> Any:
    return alphazero.make(alphazero.Config(**{**SMALL, **changes}), model=envs.make(TICTACTOE))


def position(*plies: int) -> Any:
    """Return what is seen after some plies, [1, ...]."""
    env = game()
    state, timestep = env.reset(jax.random.key(0))
    for ply in plies:
        state, timestep = env.step(jax.random.key(0), state, jnp.int32(ply))
    return jax.tree.map(lambda x: jnp.asarray(x)[None], timestep.obs)


def play(agent: Any, obs: Any, greedy: bool = True, seed: int = 0) -> Any:
    state = agent.init(jax.random.key(seed), game().spec)
    keys = jax.random.split(jax.random.key(seed + 1), 1)
    return agent.act(keys, agent.actor(state), (), obs, jnp.ones(1, bool), greedy)


@pytest.mark.parametrize("search", ["gumbel", "puct"])
@pytest.mark.parametrize("seed", range(3))
def test_a_search_wins_in_one_and_does_not_lose_in_one(search: str, seed: int) -> None:
    """With a network that knows nothing: the rules alone tell."""
    searching = agent(search=search, num_simulations=512)
    # X has 0 and 1, O has 3 and 4, X to move: 2 wins.
    output = play(searching, position(0, 3, 1, 4), seed=seed)
    assert output.action[0] == 2 and output.extras.policy[0, 2] > 0.5 and output.extras.value[0] > 0
    # X has 0 and 1, O has 4, O to move: all but 2 lose.
    output = play(searching, position(0, 4, 1), seed=seed)
    assert output.action[0] == 2


@pytest.mark.parametrize("search", [pytest.param("gumbel", marks=pytest.mark.slow), "puct"])
def test_greedy_play_is_the_same_whatever_is_drawn(search: str) -> None:
    """Also where moves are visited equally often."""
    searching, env = agent(search=search, num_simulations=8), game()
    state = searching.init(jax.random.key(0), env.spec)
    _, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 32))
    act = jax.jit(searching.act, static_argnums=5)
    found = [
        act(jax.random.split(jax.random.key(n), 32), searching.actor(state), (), timestep.obs, jnp.ones(32, bool), True)
        for n in range(3)
    ]
    assert all((each.action == found[0].action).all() for each in found)


def test_what_is_not_legal_is_never_played_nor_learnt() -> None:
    learner, env = agent(), auto_reset(game(openings=5))
    state = learner.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(16), ())
    _, trajectory, _ = rollout(jax.random.key(2), learner, env, learner.actor(state), start, 32, jnp.int32(0))
    legal, action = np.asarray(trajectory.obs.legal), np.asarray(trajectory.action)
    assert np.take_along_axis(legal, action[..., None], -1).all()
    policy = np.asarray(trajectory.extras.policy)
    np.testing.assert_allclose(policy.sum(-1), 1.0, rtol=1e-5)
    assert policy[~legal].max() < 1e-6


def test_targets_are_what_the_game_came_to_for_who_moved() -> None:
    learner, env = agent(), auto_reset(game())
    state = learner.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(4), ())
    _, trajectory, _ = rollout(jax.random.key(2), learner, env, learner.actor(state), start, 24, jnp.int32(0))
    stored = learner.plan(jax.random.key(3), state, trajectory).data
    for b in range(4):
        ends = np.flatnonzero(np.asarray(trajectory.terminated[:, b]))
        begin_of = 0
        for end in ends:
            outcome = float(trajectory.reward[end, b])
            for t in range(end, begin_of - 1, -1):
                assert stored.reward[t, b] == pytest.approx(outcome)
                outcome = -outcome
            begin_of = end + 1
    assert stored.obs.rules == () and stored.next_obs == ()
    np.testing.assert_array_equal(stored.action, trajectory.extras.policy)


def test_the_gradient_is_that_of_the_loss() -> None:
    learner = agent()
    state = learner.init(jax.random.key(0), game().spec)
    obs = position(0, 4)._replace(player=None, rules=())
    policy = jnp.full((1, 9), 1 / 7) * obs.legal
    batch = podium.replay.Batch(obs, policy, jnp.array([0.5]), jnp.zeros(1), ())
    _, aux = learner.grad(jax.random.key(0), state, batch)
    network = learner.config.network()
    output = network.unroll(state.params, (), obs, jnp.zeros(1, bool))
    probs = jax.nn.softmax(output.policy.logits)
    expected = -jnp.sum(policy * jnp.log(jnp.where(obs.legal, probs, 1.0)))
    assert float(aux.metrics["policy_loss"]) == pytest.approx(float(expected), rel=1e-4)
    assert float(aux.metrics["value_loss"]) == pytest.approx(float((0.5 - output.value[0]) ** 2), rel=1e-4)


def test_policy_and_value_are_heads_of_one_torso() -> None:
    params = agent().init(jax.random.key(0), game().spec).params
    assert set(params) == {"torso", "policy", "value"}


@functools.cache
def by_one_device() -> Any:
    return state_under(ONE_DEVICE, agent(), game(openings=3), updates=4)


@pytest.mark.parametrize("placement", ["single", "two devices", "sebulba", "distributed actors"])
def test_every_placement_learns_the_same(placement: str) -> None:
    found = state_under(PLACEMENTS[placement], agent(), game(openings=3), updates=4)
    assert_close(found, by_one_device(), relative=0)


def test_a_resumed_run_is_the_same_and_loads_by_name(tmp_path: Any) -> None:
    def train(folder: str, num_steps: int, **more: Any) -> podium.Result:
        env = podium.envs.make(TICTACTOE, rules=True, openings=3)
        made = podium.agents.make("alphazero", SMALL, env)
        sizes = {"num_envs": 8, "rollout_length": 8, "eval_every": 256, "checkpoint_every": 256, "progress": False}
        options = {"rules": True, "openings": 3}
        return podium.train(made, TICTACTOE, env_options=options, num_steps=num_steps, run_dir=tmp_path / folder,
                            **sizes, **more)  # fmt: skip

    whole = train("whole", 512).summary["params_sha256"]
    train("halves", 256)
    result = train("halves", 512, resume=True)
    assert result.summary["params_sha256"] == whole
    policy = podium.load(tmp_path / "halves")
    assert policy.agent.name == "alphazero"
    obs = position(0, 3, 1, 4)
    np.testing.assert_array_equal(policy.act(obs)[0], result.policy.act(obs)[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: alphazero.make(alphazero.Config()), "give model"),
        (lambda: agent(search="mcts"), "search='mcts'"),
        (lambda: agent(num_simulations=-1), "num_simulations=-1"),
        (lambda: agent(memory="gru"), "memory"),
        (lambda: agent(critic_obs="state"), "in agents that search, policy and value share"),
        (lambda: agent(td_lambda=2.0), "td_lambda=2.0"),
        (lambda: agent().init(jax.random.key(0), envs.make(TICTACTOE).spec), "no rules to search by; make it with"),
        (lambda: agent().init(jax.random.key(0), envs.make("podium/ConnectFour", rules=True).spec), "of the same game"),
        (lambda: agent().init(jax.random.key(0), envs.make("podium/Catch").spec), "no rules to search by; use muzero"),
        (lambda: agent().init(jax.random.key(0), envs.make("Pendulum-v1").spec), "one discrete action"),
        (lambda: podium.agents.make("alphazero"), "give env"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("search", ["gumbel", "puct"])
def test_it_learns_tic_tac_toe(search: str) -> None:
    """The network alone loses to nobody who plays at random, nor does the search."""
    config = alphazero.Config(num_simulations=16, search=search, buffer_capacity=50_000)
    env = game(openings=5)
    result = podium.train(
        alphazero.make(config, model=env), env, num_steps=400_000, num_envs=256, rollout_length=16, progress=False
    )
    alone = alphazero.make(dataclasses.replace(config, num_simulations=0), model=env)
    policy = dataclasses.replace(result.policy, agent=alone)
    # The first move, by a network that knows: a draw at best, so that it thinks the start worth nothing.
    state_value = policy.agent.act(
        jax.random.split(jax.random.key(0), 1), policy.params, (), position(), jnp.ones(1, bool), True
    ).extras.value
    assert abs(float(state_value[0])) < 0.25
    assert policy.act(position(0, 3, 1, 4))[0][0] == 2 and policy.act(position(0, 4, 1))[0][0] == 2
