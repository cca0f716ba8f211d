"""atari/NAME as an environment: what ale-py does, for one and for many, with every option."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from atari import oracle
from podium import envs
from podium.agents import ppo
from podium.env import Env
from podium.envs.atari import pictures, states
from podium.envs.atari.games import find

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')

RAW = {"observation": "ram", "frame_skip": 1, "sticky_actions": 0.0}
KEY = jax.random.key(0)


def ale_at_start(name: str) -> Any:
    ale = oracle.make(find(name).rom)
    ale.reset_game()
    return ale


@functools.cache
def recorded(name: str) -> Any:
    """The state after ale-py's reset, so that no console has to be started for it."""
    return states.from_ale(ale_at_start(name), name)


def make(name: str, **options: Any) -> Env:
    env = envs.make(f"atari/{name}", start_states=recorded(name), **options)
    assert isinstance(env, Env)
    return env


class Play:
    """A batch of an environment, compiled once."""

    def __init__(self, env: Env, num_envs: int):
        self.env, self.num_envs = env, num_envs
        self.keys = jax.random.split(KEY, num_envs)
        self._step = jax.jit(jax.vmap(env.step))
        self.state, self.timestep = jax.jit(jax.vmap(env.reset))(self.keys)

    def __call__(self, action: Any, key: int = 0) -> Any:
        actions = jnp.broadcast_to(jnp.asarray(action, jnp.int32), (self.num_envs,))
        keys = jax.random.split(jax.random.key(key), self.num_envs)
        self.state, self.timestep = self._step(keys, self.state, actions)
        return self.timestep


def test_memory_rewards_lives_and_ends_are_those_of_ale_py() -> None:
    """From shortly before the end of a game of SpaceInvaders, which begins again there."""
    ale, game, rng = ale_at_start("SpaceInvaders"), find("SpaceInvaders"), np.random.default_rng(0)
    moments, actions = [ale.cloneState()], []
    while not ale.game_over():
        actions.append(int(rng.integers(len(game.minimal_actions))) if len(actions) % 4 == 0 else actions[-1])
        oracle.act(ale, game.minimal_actions[actions[-1]])
        moments.append(ale.cloneState())
    begin = max(len(actions) - 60, 0)
    ale.restoreState(moments[begin])
    start = np.asarray(ale.getRAM())
    play = Play(envs.make("atari/SpaceInvaders", start_states=states.from_ale(ale, game), **RAW), 2)
    assert (np.asarray(play.timestep.obs) == start).all()
    for action in actions[begin:]:
        assert not ale.game_over()
        reward = oracle.act(ale, game.minimal_actions[action])
        step = play(action)
        assert (np.asarray(step.next_obs[1]) == ale.getRAM()).all()
        assert (float(step.reward[1]), bool(step.terminated[1])) == (reward, ale.game_over())
        assert bool(step.info["episode_end"][0]) == ale.game_over() and not bool(step.truncated[0])
        assert ale.game_over() or int(step.info["lives"][0]) == ale.lives()
    assert ale.game_over() and (np.asarray(step.obs) == start).all()


def test_observations_are_the_last_two_frames_at_84_by_84() -> None:
    """Against pictures of ale-py's screens; those against its own vector environment are in test_pictures."""
    ale, play = ale_at_start("Pong"), Play(make("Pong", sticky_actions=0.0), 2)
    first = pictures.resize(pictures.grey(ale.getScreen()))
    assert (np.asarray(play.timestep.obs[0]) == np.asarray(first)[..., None]).all()
    stack = [np.asarray(first)] * 4
    for action in (2, 2, 3, 0, 1, 2, 3, 3):
        screens = []
        for _ in range(4):
            oracle.act(ale, find("Pong").minimal_actions[action])
            screens.append(ale.getScreen())
        stack = [*stack[1:], np.asarray(pictures.preprocess(screens[2], screens[3]))]
        step = play(action)
        assert (np.asarray(step.obs[1]) == np.stack(stack, -1)).all()
    one = jax.tree.map(lambda x: np.asarray(x[0]), play.state)
    assert (play.env.render(one) == ale.getScreenRGB()).all()


def test_a_state_taken_and_put_back_replays_exactly() -> None:
    play, before, after = Play(make("Pong", **RAW), 3), [], []
    play(2)
    # Its picture is that of the frame that would follow.
    ale = ale_at_start("Pong")
    for _ in range(2):
        oracle.act(ale, find("Pong").minimal_actions[2])
    assert (play.env.render(states.get_state(play.state, 1)) == ale.getScreenRGB()).all()
    kept = states.get_state(play.state, 1)
    for record in (before, after):
        for action in (2, 3, 0, 1):
            record.append(np.asarray(play(action).obs))
        play.state = states.set_state(play.state, 1, kept)
    assert (np.stack(before)[:, 1] == np.stack(after)[:, 1]).all()
    assert (np.stack(before)[:, 1] != np.stack(after)[:, 0]).any()


@pytest.mark.slow
def test_a_batch_is_its_lanes_and_so_is_a_mixed_one() -> None:
    """Eleven lanes of two games in one program, vmapped twice, give what each gives alone."""
    names = ("Pong", "Breakout")
    starts = {name: recorded(name) for name in names}
    mixed = envs.make("atari/Mixed", games=names, start_states=starts, **RAW)
    assert isinstance(mixed, Env) and mixed.spec.action.num_values == 18
    step = jax.jit(jax.vmap(jax.vmap(mixed.step)))
    keys = jax.random.split(KEY, (2, 6))
    state, first = jax.vmap(jax.vmap(mixed.reset))(keys)
    games = np.asarray(first.info["game"])
    assert set(games.reshape(-1)) == {0, 1}
    alone = {}
    for number, name in enumerate(names):
        play = Play(make(name, full_action_space=True, **RAW), 1)
        alone[number] = [np.asarray(play(action).obs[0]) for action in (1, 3, 4, 2)]
    for frame, action in enumerate((1, 3, 4, 2)):
        state, timestep = step(keys, state, jnp.full((2, 6), action))
        for place in np.ndindex(2, 6):
            assert (np.asarray(timestep.obs[place]) == alone[games[place]][frame]).all()


@pytest.mark.slow
def test_lost_lives_end_what_is_learnt_from_and_the_game_goes_on() -> None:
    """And the frame limit ends both."""
    env = make("Breakout", life_loss=True, max_episode_frames=1000, observation="ram")
    play = Play(env, 1)
    assert env.spec.max_episode_steps == 250
    ends, lives = [], [int(play.timestep.info["lives"][0])]
    for number in range(250):
        step = play(1 if number % 5 == 0 else 0)
        ends.append((bool(step.terminated[0]), bool(step.truncated[0]), bool(step.info["episode_end"][0])))
        lives.append(int(step.info["lives"][0]))
    lost = [after < before for before, after in zip(lives, lives[1:], strict=False)]
    over = lives.index(0) if 0 in lives else None
    assert any(lost)
    for number, (terminated, truncated, end) in enumerate(ends):
        if over is None or number < over - 1:
            assert terminated == lost[number] and end == truncated == (number == 249)
            continue
        assert terminated and end and not truncated
        break


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observation": "sound"}, "observation='sound' is not one of 'pixels', 'ram'"),
        ({"frame_skip": 0}, "frame_skip=0 must be an integer from 1"),
        ({"noop_max": -1}, "noop_max=-1 must be an integer from 0"),
        ({"sticky_actions": 1.5}, "sticky_actions=1.5 must be a probability"),
        ({"life_loss": 1}, "life_loss=1 must be True or False"),
        ({"screen": 161}, "screen=161 must be an integer from 1 to 160"),
        ({"backend": "cuda"}, "backend='cuda' is not one of 'xla', 'pallas'"),
        ({"reward_clip": 2}, "reward_clip=2 must be True, False or None"),
    ],
)
def test_options_out_of_range_are_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        envs.make("atari/Pong", **options)


def test_games_go_with_mixed_only() -> None:
    with pytest.raises(ValueError, match="no option 'games'"):
        envs.make("atari/Pong", games=("Pong",))
    with pytest.raises(ValueError, match="games=\\(\\) is empty"):
        envs.make("atari/Mixed", games=())


@pytest.mark.slow
def test_single_frames_keep_the_contract() -> None:
    podium.testing.check_env(make("Pong", **RAW), num_steps=20)


@pytest.mark.slow
def test_it_trains_on_two_devices() -> None:
    """Statistics are of whole episodes, whatever lives are lost."""
    env = make("Breakout", life_loss=True, max_episode_frames=32, observation="ram")
    result = podium.train(
        ppo.make(ppo.Config(num_minibatches=2)),
        env,
        num_envs=16,
        rollout_length=8,
        num_steps=16 * 16,
        placement=podium.Anakin(devices=min(2, jax.device_count())),
        eval_every=0,
        eval_episodes=4,
    )
    assert result.metrics[-1]["episode_length"] == 8
