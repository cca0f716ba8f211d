"""Returns and lengths of episodes against a loop, one environment and one step at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import episodes
from podium.types import TimeStep

T, B = 12, 6


def timesteps(raw: bool, masked: bool, lives: bool = False) -> TimeStep:
    """Return steps [T, B] with every kind of end, the first and the last step among them.

    With `lives` only every other end of a learner's episode is one of the environment's.
    """
    rng = np.random.default_rng(0)
    ended = rng.random((2, T, B)) < 0.2
    ended[:, 0, :4] = ended[:, -1, :4] = [[True, False, True, False], [False, True, True, False]]
    reward = rng.normal(size=(T, B)).astype(np.float32)
    valid = rng.random((T, B)) < 0.8 if masked else None
    info = {"raw_reward": 10 * reward} if raw else {}
    if lives:
        info["episode_end"] = ended.any(0) & (np.arange(T)[:, None] % 2 == 0)
    return TimeStep(np.zeros((T, B)), reward, ended[0], ended[1], np.zeros((T, B)), info, valid)


@jax.jit
def accumulate(steps: TimeStep) -> Any:
    return jax.lax.scan(episodes.accumulate, episodes.begin(B), steps)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lives", [False, True])
def test_episodes_are_the_slow_loop(raw: bool, masked: bool, lives: bool) -> None:
    steps = timesteps(raw, masked, lives)
    following, ended = accumulate(steps)
    reward = steps.info["raw_reward"] if raw else steps.reward
    for b in range(B):
        total, length = 0.0, 0
        for t in range(T):
            counts = steps.valid is None or steps.valid[t, b]
            if counts:
                total, length = total + reward[t, b], length + 1
            last = bool(counts and steps.info.get("episode_end", steps.last)[t, b])
            assert bool(ended.ended[t, b]) == last
            np.testing.assert_allclose(ended.episode_return[t, b], total if last else 0, rtol=1e-5, atol=1e-5)
            assert int(ended.episode_length[t, b]) == (length if last else 0)
            if last:
                total, length = 0.0, 0
        np.testing.assert_allclose(following.episode_return[b], total, rtol=1e-5, atol=1e-5)
        assert int(following.episode_length[b]) == length


def test_summaries_are_sums_that_rollouts_can_add() -> None:
    _, ended = accumulate(timesteps(True, True))
    summary = episodes.summarize(ended)
    assert float(summary["episodes"]) == np.sum(ended.ended) > 0
    np.testing.assert_allclose(summary["episode_return_sum"], np.sum(ended.episode_return), rtol=1e-5)
    assert float(summary["episode_length_sum"]) == np.sum(ended.episode_length)
    halves = [episodes.summarize(jax.tree.map(lambda x: x[part], ended)) for part in (slice(5), slice(5, None))]  # noqa: B023
    for name, total in summary.items():
        np.testing.assert_allclose(halves[0][name] + halves[1][name], total, rtol=1e-5, atol=1e-5)


def test_nothing_ended_sums_to_zero() -> None:
    begun = episodes.begin(3)
    no = jnp.zeros(3, bool)
    following, ended = episodes.accumulate(begun, TimeStep(no, jnp.ones(3), no, no, no))
    assert all(float(x) == 0 for x in episodes.summarize(ended).values())
    np.testing.assert_array_equal(following.episode_return, 1)
    assert following.episode_length.dtype == jnp.int32 and following.episode_return.dtype == jnp.float32
