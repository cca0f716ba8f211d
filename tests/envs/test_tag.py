"""Tag against a slow loop over agents."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from podium import envs, testing
from podium.env import auto_reset


class Slow:
    """Tag for one environment, an agent at a time."""

    def __init__(self, state, num_taggers, num_seen, max_steps):
        self.position = np.asarray(state.position, np.float64)
        self.heading, self.speed = np.asarray(state.heading, np.float64), np.asarray(state.speed, np.float64)
        self.number, self.taggers, self.num_seen, self.max_steps = len(self.heading), num_taggers, num_seen, max_steps
        self.side, self.playing, self.time = np.sqrt(4 * self.number), [True] * self.number, 0

    def step(self, action):
        for i in filter(self.playing.__getitem__, range(self.number)):
            fastest = 0.3 if i < self.taggers else 0.25
            self.heading[i] += np.pi / 8 * (action[i] % 3 - 1)
            self.speed[i] = min(max(self.speed[i] + 0.05 * (action[i] // 3 - 1), 0), fastest)
            self.position[i] += self.speed[i] * np.array([np.cos(self.heading[i]), np.sin(self.heading[i])])
            self.position[i] = np.clip(self.position[i], 0, self.side)
        reward, self.time = np.zeros(self.number), self.time + 1
        for runner in range(self.taggers, self.number):
            away = [np.hypot(*(self.position[runner] - self.position[tagger])) for tagger in range(self.taggers)]
            if self.playing[runner] and min(away) < 0.25:
                reward[runner], self.playing[runner], self.speed[runner] = -1, False, 0
                reward[int(np.argmin(away))] += 1
            elif self.playing[runner]:
                reward[runner] = 1 / self.max_steps
        return reward, not any(self.playing[self.taggers :]), self.time >= self.max_steps

    def see(self, i):
        if not self.playing[i]:
            return np.zeros(7 + 10 * self.num_seen)
        ahead = np.array([np.cos(self.heading[i]), np.sin(self.heading[i])])
        left = np.array([-ahead[1], ahead[0]])
        fastest = 0.3 if i < self.taggers else 0.25
        seen = [*(2 * self.position[i] / self.side - 1), *ahead, self.speed[i] / fastest, float(i < self.taggers)]
        seen.append(1 - self.time / self.max_steps)
        for kind in (range(self.taggers), range(self.taggers, self.number)):
            others = [j for j in kind if j != i and self.playing[j]]
            others.sort(key=lambda j: np.hypot(*(self.position[j] - self.position[i])))
            others = [j for j in others if np.hypot(*(self.position[j] - self.position[i])) < 8][: self.num_seen]
            for j in others:
                towards = (self.position[j] - self.position[i]) / 8
                velocity = self.speed[j] * np.array([np.cos(self.heading[j]), np.sin(self.heading[j])]) / 0.3
                seen += [1, towards @ ahead, towards @ left, velocity @ ahead, velocity @ left]
            seen += [0] * 5 * (self.num_seen - len(others))
        return np.clip(seen, -1, 1)


@pytest.mark.parametrize(("num_taggers", "num_runners", "num_seen"), [(3, 5, 2), (4, 20, 3)])
def test_it_is_the_game_of_a_slow_loop(num_taggers, num_runners, num_seen):
    env = envs.make("podium/Tag", num_taggers=num_taggers, num_runners=num_runners, num_seen=num_seen, max_steps=60)
    number, step, tags = num_taggers + num_runners, jax.jit(env.step), 0
    generator = np.random.default_rng(0)
    for seed in range(3):
        state, timestep = env.reset(jax.random.key(seed))
        slow = Slow(state, num_taggers, num_seen, 60)
        assert timestep.valid.all() and not timestep.reward.any()
        while not timestep.last:
            before = list(slow.playing)
            action = generator.choice([3, 4, 5, 6, 7, 8, 7, 7], number)
            state, timestep = step(jax.random.key(0), state, action)
            reward, terminated, truncated = slow.step(action)
            np.testing.assert_allclose(state.position, slow.position, atol=1e-5)
            slow.position = np.asarray(state.position, np.float64)  # Or rounding adds up to what one sees and one not.
            np.testing.assert_allclose(timestep.reward, reward, atol=1e-7)
            np.testing.assert_array_equal(timestep.valid, before)
            assert (timestep.terminated, timestep.truncated) == (terminated, truncated)
            seen = np.stack([slow.see(i) for i in range(number)])
            np.testing.assert_allclose(timestep.obs, seen, atol=2e-4)
            tags += int((reward == 1).sum())
    assert tags > 0


def test_who_is_tagged_is_out_and_the_last_ends_the_game():
    env = envs.make("podium/Tag", num_taggers=1, num_runners=2)
    state, _ = env.reset(jax.random.key(0))
    state = state._replace(position=np.array([[1, 1], [1.2, 1], [3, 1]], np.float32))
    state, timestep = env.step(jax.random.key(0), state, np.full(3, 4))
    np.testing.assert_allclose(timestep.reward, [1, -1, 0.01])
    assert timestep.valid.all(), "the step that tags counts"
    assert not timestep.terminated and not timestep.obs[1].any()
    moved, timestep = env.step(jax.random.key(0), state, np.full(3, 7))
    np.testing.assert_allclose(timestep.reward, [0, 0, 0.01])
    assert timestep.valid.tolist() == [True, False, True]
    np.testing.assert_array_equal(moved.position[1], state.position[1])
    _, timestep = env.step(jax.random.key(0), state._replace(position=np.ones((3, 2), np.float32)), np.full(3, 4))
    assert timestep.reward.tolist() == [1, 0, -1] and timestep.terminated


def test_a_batch_of_a_thousand_agents():
    env = auto_reset(envs.make("podium/Tag", num_taggers=50, num_runners=950, num_seen=1))
    state, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 2))
    actions = np.full((2, 1000), 7, np.int32)
    state, timestep = jax.jit(jax.vmap(env.step))(jax.random.split(jax.random.key(0), 2), state, actions)
    assert timestep.obs.shape == (2, 1000, 17) and timestep.reward.shape == timestep.valid.shape == (2, 1000)
    assert timestep.terminated.shape == (2,)
    in_play = np.asarray(state.playing)[:, 50:].sum(-1)
    np.testing.assert_allclose(timestep.reward.sum(-1), in_play / 100, rtol=1e-4)  # What taggers gain the tagged lose.


def test_the_contract_of_agents_that_reset_themselves():
    testing.check_env(auto_reset(envs.make("podium/Tag", num_taggers=3, num_runners=4, max_steps=30)), num_steps=70)


def test_its_picture_shows_who_is_in_play():
    env = envs.make("podium/Tag")
    state, _ = env.reset(jax.random.key(0))
    few = env.render(state._replace(playing=np.arange(10) < 3))
    assert env.render(state).shape == few.shape == (240, 240, 3) and (env.render(state) != few).any()


@pytest.mark.parametrize("option", ["num_taggers", "num_runners", "num_seen", "max_steps"])
def test_numbers_below_one_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=0 must be an integer of 1 or more; [0-9]+ is usual"):
        envs.make("podium/Tag", **{option: 0})
