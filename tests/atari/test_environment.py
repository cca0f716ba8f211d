"""The environments atari/NAME against ale-py, step by step, and what their options promise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from atari import oracle, play
from podium import envs
from podium.agents import ppo
from podium.env import Env
from podium.envs.atari import states
from podium.envs.atari.environment import Options
from podium.envs.atari.games import find

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')

RAM = {"observation": "ram", "frame_skip": 1, "sticky_actions": 0.0, "noop_max": 0}
BREAKOUT = find("Breakout")
BEFORE = 16
"""Frames before the end of Breakout at which the episodes of most tests begin."""


def batched(env: Env) -> tuple[Any, Any]:
    return jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))


def keys(*shape: int, seed: int = 0) -> Any:
    return jax.random.split(jax.random.key(seed), shape)


def index(action: int) -> int:
    return BREAKOUT.minimal_actions.index(action)


@pytest.fixture(scope="module")
def short() -> Any:
    """Return Breakout shortly before its end: the environment's functions, and what to do in it."""
    ale, actions, state = play.near_end("Breakout", BEFORE)
    env = envs.make("atari/Breakout", **RAM, start_states=state)
    return env, *batched(env), actions


def test_ram_environment_is_ale_py_through_the_end_of_a_game_and_into_the_next(short: Any):
    env, reset, step, actions = short
    ale, _, _ = play.near_end("Breakout", BEFORE)
    state, first = reset(keys(3))
    assert env.spec.name == "atari/Breakout" and env.spec.action.num_values == 4
    np.testing.assert_array_equal(first.obs, np.broadcast_to(ale.getRAM(), (3, 128)))
    np.testing.assert_array_equal(first.info["lives"], ale.lives())
    for number, action in enumerate(actions):
        state, got = step(keys(3, seed=number), state, jnp.full(3, index(action)))
        reward = oracle.act(ale, action)
        np.testing.assert_array_equal(got.next_obs, np.broadcast_to(ale.getRAM(), (3, 128)))
        for values, wanted in (
            (got.reward, reward),
            (got.info["raw_reward"], reward),
            (got.info["lives"], ale.lives()),
            (got.terminated, ale.game_over()),
            (got.info["episode_end"], ale.game_over()),
            (got.truncated, False),
        ):
            np.testing.assert_array_equal(values, wanted, str(number))
        if number < BEFORE - 1:
            np.testing.assert_array_equal(got.obs, got.next_obs)
    assert ale.game_over()
    np.testing.assert_array_equal(got.obs, first.obs)
    assert (np.asarray(got.obs) != np.asarray(got.next_obs)).any()
    # The episode that began by itself is played like the first.
    ale, _, _ = play.near_end("Breakout", BEFORE)
    for number, action in enumerate(actions[:3]):
        state, got = step(keys(3, seed=number), state, jnp.full(3, index(action)))
        oracle.act(ale, action)
        np.testing.assert_array_equal(got.obs, np.broadcast_to(ale.getRAM(), (3, 128)))


def test_get_then_set_replays_exactly(short: Any):
    _, reset, step, _ = short
    state, _ = reset(keys(3))
    ways = np.random.default_rng(0).integers(0, 4, (BEFORE + 8, 3))
    for action in ways[:4]:
        state, _ = step(keys(3), state, action)
    kept, seen = states.get_state(state, 0), []
    for action in ways[4:]:  # Past the end of the game.
        state, got = step(keys(3), state, action)
        seen.append((states.get_state(state, 0), jax.tree.map(lambda x: x[0], got)))
    assert any(bool(got.terminated) for _, got in seen)
    state = states.set_state(state, 0, kept)
    for action, (wanted, wanted_step) in zip(ways[4:], seen, strict=True):
        other = np.roll(action, 1)  # What the others do has no part in it.
        state, got = step(keys(3), state, jnp.asarray([action[0], *other[1:]]))
        again = states.get_state(state, 0), jax.tree.map(lambda x: x[0], got)
        jax.tree.map(np.testing.assert_array_equal, again, (wanted, wanted_step))


def test_one_alone_and_batches_of_batches_are_lanes_of_a_batch(short: Any):
    env, reset, step, actions = short
    state, _ = reset(keys(3))
    wanted = [step(keys(3), state, jnp.array([0, 2, 3]))]
    nested = jax.tree.map(lambda x: jnp.stack([x[:2], x[1:]]), state)
    double = jax.tree.map(lambda x: jnp.stack([x[:2], x[1:]]), (keys(3), jnp.array([0, 2, 3])))
    got = jax.jit(jax.vmap(jax.vmap(env.step)))(double[0], nested, double[1])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.stack([y[:2], y[1:]])), got, wanted[0])
    alone = jax.jit(env.step)(keys(3)[1], states.get_state(state, 1), jnp.array(2))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[1]), alone, wanted[0])


def resized(grey: np.ndarray) -> np.ndarray:
    """Return [84, 84], the mean over areas, not rounded."""

    def weights(old: int) -> np.ndarray:
        edges = np.arange(85) * old / 84
        pixels = np.arange(old)
        overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
        return np.maximum(overlap, 0) * 84 / old

    return weights(210) @ grey.astype(np.float64) @ weights(160).T


def test_pictures_lives_and_rewards_of_held_actions():
    """Four frames an action; both losses of a life and the end of the game, each in an episode of its own."""
    games = [play.near_end("Breakout", 28, lives) for lives in (1, 0)]
    found = states.join([state for _, _, state in games])
    env = envs.make("atari/Breakout", life_loss=True, start_states=found)
    reset, step = batched(env)
    state, first = reset(keys(16))
    lanes = [int(np.flatnonzero(np.asarray(first.info["lives"]) == lives)[0]) for lives in (2, 1)]
    state, first = jax.tree.map(lambda x: x[jnp.asarray(lanes)], (state, first))
    assert env.spec.obs.shape == (84, 84, 4)
    for number, (ale, _, _) in enumerate(games):
        picture = resized(ale.getScreenGrayscale())
        assert np.abs(np.asarray(first.obs[number], float) - picture[..., None]).max() <= 0.5 + 1e-6
        np.testing.assert_array_equal(env.render(states.get_state(state, number)), ale.getScreenRGB())
    lost, over = np.zeros(2, bool), np.zeros(2, bool)
    taken = [[resized(ale.getScreenGrayscale())] * 4 for ale, _, _ in games]
    for number in range(8):
        held = [actions[4 * number] if 4 * number < len(actions) else 1 for _, actions, _ in games]
        before = [ale.lives() for ale, _, _ in games]
        state, got = step(keys(2, seed=number), state, jnp.asarray([index(action) for action in held]))
        for lane, (ale, _, _) in enumerate(games):
            if over[lane]:
                continue
            reward, greys = 0, []
            for _ in range(4):
                if not ale.game_over():
                    reward += oracle.act(ale, held[lane])
                    greys.append(ale.getScreenGrayscale())
            loses = ale.lives() < before[lane]
            assert float(got.info["raw_reward"][lane]) == reward and float(got.reward[lane]) == np.sign(reward)
            assert bool(got.terminated[lane]) == (loses or ale.game_over())
            assert bool(got.info["episode_end"][lane]) == ale.game_over()
            assert int(got.info["lives"][lane]) == ale.lives()
            lost[lane] |= loses and not ale.game_over()
            over[lane] = ale.game_over()
            if not over[lane]:
                taken[lane] = [*taken[lane][1:], resized(np.maximum(greys[-2], greys[-1]))]
                difference = np.asarray(got.next_obs[lane], float) - np.stack(taken[lane], -1)
                assert np.abs(difference).max() <= 0.5 + 1e-6
                # After a lost life the game goes on, with the pictures that it has.
                np.testing.assert_array_equal(got.obs[lane], got.next_obs[lane])
                np.testing.assert_array_equal(env.render(states.get_state(state, lane)), ale.getScreenRGB())
    assert lost[0] and over[1]


def test_sticky_actions_and_limits_on_frames():
    """A fourth of the frames keeps the action before; all 18 actions; episodes of 12 frames, of which the last cut."""
    _, _, start = play.near_end("Breakout", 12)
    options: dict[str, Any] = {"observation": "ram", "noop_max": 0, "start_states": start, "full_action_space": True}
    env = envs.make("atari/Breakout", frame_skip=1, sticky_actions=0.25, max_episode_frames=9, **options)
    assert env.spec.action.num_values == 18 and env.spec.max_episode_steps == 9
    reset, step = batched(env)
    num_envs = 128
    state, first = reset(keys(num_envs))
    assert not np.asarray(first.info["episode_end"]).any()
    rng, stuck, count, before = np.random.default_rng(0), 0, 0, np.zeros(num_envs, int)
    for number in range(1, 20):
        action = (before + rng.integers(1, 18, num_envs)) % 18
        state, got = step(keys(num_envs, seed=number), state, action)
        ends = number % 9 == 0
        np.testing.assert_array_equal(got.truncated, ends)
        np.testing.assert_array_equal(got.terminated, False)
        np.testing.assert_array_equal(got.info["episode_end"], ends)
        held = np.asarray(state.consoles.held)
        if ends:
            np.testing.assert_array_equal(held, 0)  # A new episode begins with no action before.
        else:
            assert ((held == action) | (held == before)).all()
            stuck, count = stuck + (held == before).sum(), count + num_envs
        before = held
    assert abs(stuck / count - 0.25) < 4 * np.sqrt(0.25 * 0.75 / count)


def test_an_end_at_the_limit_is_an_end():
    _, actions, start = play.near_end("Breakout", 4)
    env = envs.make("atari/Breakout", **RAM, start_states=start, max_episode_frames=4)
    state, _ = env.reset(jax.random.key(0))
    run = jax.jit(lambda state, actions: jax.lax.scan(lambda s, a: env.step(jax.random.key(1), s, a), state, actions))
    _, got = run(state, jnp.asarray([index(action) for action in actions]))
    np.testing.assert_array_equal(got.terminated, [False, False, False, True])
    np.testing.assert_array_equal(got.truncated, False)


def test_mixed_games_are_each_ale_py():
    names = ["Breakout", "Asterix", "RoadRunner"]
    ends = [play.near_end(name, 6) for name in names]
    given = {name: state for name, (_, _, state) in zip(names, ends, strict=True)}
    given["Asterix"] = states.join([given["Asterix"]] * 5)  # Games are drawn alike, however many states they have.
    env = envs.make("atari/Mixed", games=names, **RAM, start_states=given)
    assert env.spec.action.num_values == 18
    reset, step = batched(env)
    state, first = reset(keys(300))
    drawn = np.asarray(first.info["game"])
    assert (np.abs(np.bincount(drawn) - 100) < 40).all()
    lanes = [int(np.flatnonzero(drawn == number)[0]) for number in range(3)]
    state = jax.tree.map(lambda x: x[jnp.asarray(lanes)], state)
    for number in range(6):
        actions = [actions[number] for _, actions, _ in ends]
        state, got = step(keys(3, seed=number), state, jnp.asarray(actions))
        for lane, (ale, _, _) in enumerate(ends):
            reward = oracle.act(ale, actions[lane])
            np.testing.assert_array_equal(got.next_obs[lane], ale.getRAM())
            assert (float(got.reward[lane]), int(got.info["lives"][lane])) == (reward, ale.lives())
            assert bool(got.terminated[lane]) == ale.game_over()
    assert np.asarray(got.terminated).all()


@pytest.mark.slow
def test_training_counts_whole_games_where_lost_lives_are_ends_for_learning():
    """Two devices, one program; episodes that lose a life and go on, cut after 20 steps."""
    _, _, state = play.near_end("Breakout", 8, 1)
    env = envs.make(
        "atari/Breakout", **RAM, life_loss=True, start_states=state, max_episode_frames=20, full_action_space=True
    )
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
    steps = 4 * 10
    result = podium.train(
        agent, env, num_steps=4 * steps, num_envs=4, rollout_length=10, placement=podium.Anakin(2), log_every=steps,
        eval_every=0, progress=False,
    )  # fmt: skip
    ended = [row["episodes"] for row in result.metrics]
    assert ended == [0, 4, 0, 4]
    assert [row["episode_length"] for row in result.metrics[1::2]] == [20, 20]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("observation", "text", "observation='text' is not one of 'pixels', 'ram'"),
        ("frame_skip", 0, "frame_skip=0 must be an integer from 1 to 1000"),
        ("frame_skip", True, "frame_skip=True must be an integer"),
        ("noop_max", -1, "noop_max=-1 must be an integer from 0"),
        ("screen", 161, "screen=161 must be an integer from 1 to 160"),
        ("sticky_actions", 1.5, "sticky_actions=1.5 must be a probability"),
        ("life_loss", 1, "life_loss=1 must be True or False"),
        ("reward_clip", "yes", "reward_clip='yes' must be True, False or None"),
        ("backend", "cuda", "backend='cuda' is not one of 'xla', 'pallas'"),
    ],
)
def test_options_out_of_range(option: str, value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        envs.make("atari/Pong", **{option: value})


def test_rewards_are_signs_with_pictures_and_whole_with_memory():
    assert Options().clips and not Options(observation="ram").clips
    assert not Options(reward_clip=False).clips and Options(observation="ram", reward_clip=True).clips


def test_games_that_cannot_be_mixed():
    with pytest.raises(ValueError, match=r"games=\(\) is empty"):
        envs.make("atari/Mixed", games=())
    with pytest.raises(ValueError, match="No Atari game is named 'Doom'"):
        envs.make("atari/Mixed", games=("Pong", "Doom"))
    with pytest.raises(ValueError, match="has no option 'games'"):
        envs.make("atari/Pong", games=("Pong",))
