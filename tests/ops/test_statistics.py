"""Running statistics against NumPy on the whole stream, however it was cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops.statistics import (
    RunningStats,
    init_obs_stats,
    init_stats,
    masked_mean,
    masked_means,
    normalize,
    update_stats,
)
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Seen

update = jax.jit(update_stats)


def stream(length: int = 24, num_envs: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "vector": (5 + 3 * rng.normal(size=(length, num_envs, 2))).astype(np.float32),
        "far": (1000 + rng.normal(size=(length, num_envs))).astype(np.float32),
        "bytes": rng.integers(0, 256, size=(length, num_envs, 2, 2)).astype(np.uint8),
    }


def empty() -> RunningStats:
    return init_stats({"vector": jnp.zeros(2), "far": jnp.zeros(()), "bytes": jnp.zeros((2, 2), jnp.uint8)})


def assert_statistics(stats: RunningStats, rows: dict[str, np.ndarray]) -> None:
    """Compare with rows [N, ...]."""
    assert float(stats.count) == len(rows["far"])
    for name, x in rows.items():
        x = x.astype(np.float64)
        np.testing.assert_allclose(stats.mean[name], x.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stats.std()[name], x.std(0), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 23], [6, 12, 18]], ids=str)
def test_equals_numpy_however_the_stream_is_cut(cuts: list[int]) -> None:
    x, stats = stream(), empty()
    for begin, end in zip([0, *cuts], [*cuts, 24], strict=True):
        stats = update(stats, jax.tree.map(lambda x: x[begin:end], x))  # noqa: B023
    assert_statistics(stats, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x))


def test_rows_that_are_not_valid_are_left_out() -> None:
    x, stats = stream(), empty()
    valid = np.random.default_rng(1).random((24, 3)) < 0.6
    valid[4:8] = False
    for begin in range(0, 24, 4):
        stats = update(stats, jax.tree.map(lambda x: x[begin : begin + 4], x), valid[begin : begin + 4])  # noqa: B023
    assert_statistics(stats, jax.tree.map(lambda x: x[valid], x))


def test_a_batch_without_valid_rows_changes_nothing() -> None:
    stats = update(empty(), stream(4))
    again = update(stats, stream(4), jnp.zeros((4, 3), bool))
    jax.tree.map(np.testing.assert_array_equal, stats, again)
    nothing = update(empty(), stream(4), jnp.zeros((4, 3), bool))
    jax.tree.map(np.testing.assert_array_equal, nothing, empty())


def test_the_first_deviation_is_1_and_normalises_nothing() -> None:
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.ones(x.shape)), empty().std())
    x = {"vector": jnp.array([[3.0, -4.0]]), "far": jnp.array([2.0]), "bytes": jnp.full((1, 2, 2), 7, jnp.uint8)}
    normal = normalize(empty(), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b, np.float32), rtol=1e-6), normal, x)


def test_the_first_reward_of_a_sparse_task_is_what_it_is() -> None:
    """Not 10,000 of them, as a deviation of 0 and its floor would have it; a small one that was seen is one."""
    stats = init_stats(jnp.zeros(()))
    assert stats.reward_scale() == 1
    nothing = update_stats(stats, jnp.zeros((8, 4)))
    assert nothing.reward_scale() == 1
    for size in (1.0, 1e-4):
        seen = update_stats(nothing, jnp.zeros((8, 4)).at[3, 1].set(size))
        assert seen.reward_scale() == seen.scale()


def test_normalize_gives_mean_0_and_deviation_1_and_clips() -> None:
    x = stream()
    stats = update(empty(), x)
    normal = jax.jit(normalize)(stats, x)
    for each in jax.tree.leaves(normal):
        np.testing.assert_allclose(np.mean(each, (0, 1)), 0, atol=2e-3)
        np.testing.assert_allclose(np.std(each, (0, 1)), 1, rtol=2e-3)
    far = normalize(stats, jax.tree.map(lambda x: 0.0 * x + 1e6, x), limit=3.0)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 3.0), far)


def test_a_constant_stays_finite() -> None:
    stats = update_stats(init_stats(jnp.zeros(())), jnp.full((5, 2), 3.0))
    np.testing.assert_array_equal(normalize(stats, jnp.array([3.0, 4.0, 2.0])), [0, 10, -10])


def test_a_feature_that_never_changes_is_0_whatever_rows_are_valid() -> None:
    """Its deviation is rounding noise, which must not be divided by; Gymnasium's wrapper gives 0 as well."""
    rng, update_ = np.random.default_rng(3), jax.jit(update_stats)
    for constant in (0.1, -3.7, 123.4, 1e-3):
        stats = init_stats(jnp.zeros(()))
        for _ in range(50):
            stats = update_(stats, jnp.full((16, 8), constant, jnp.float32), jnp.asarray(rng.random((16, 8)) < 0.7))
            assert abs(float(normalize(stats, jnp.float32(constant)))) < 0.01 * max(1.0, abs(constant))


def test_many_small_updates_do_not_drift() -> None:
    x = (100 + np.random.default_rng(2).normal(size=(2000, 1, 4))).astype(np.float32)

    @jax.jit
    def many(x: jax.Array) -> RunningStats:
        start = init_stats(jnp.zeros(()))
        return jax.lax.scan(lambda stats, row: (update_stats(stats, row), None), start, x)[0]

    stats = many(x)
    np.testing.assert_allclose(stats.mean, x.mean(dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(stats.std(), x.std(dtype=np.float64), rtol=1e-3)


@pytest.mark.parametrize("valid", [None, [[True, True], [False, True]], [[False, False], [False, False]]])
def test_masked_means_are_masked_means(valid: Any) -> None:
    valid = None if valid is None else jnp.array(valid)
    rows = {"a": jnp.array([[1.0, 2.0], [np.nan if valid is not None else 3.0, 6.0]]), "b": jnp.ones((2, 2))}
    for name, mean in masked_means(valid, **rows).items():
        np.testing.assert_allclose(mean, masked_mean(rows[name], valid), rtol=1e-6)


def test_masked_mean() -> None:
    x = jnp.array([[1.0, 2.0], [jnp.nan, 6.0]])
    assert float(masked_mean(x, jnp.array([[True, True], [False, True]]))) == 3.0
    assert float(masked_mean(x, jnp.zeros((2, 2), bool))) == 0.0
    assert float(masked_mean(x[0])) == 1.5


def test_a_discrete_part_is_left_alone_where_a_network_sees_nothing_else() -> None:
    place, speed = DiscreteSpec(5), ArraySpec((2,))
    row = {"place": jnp.array([[4, 1]]), "speed": jnp.ones((1, 2, 2))}

    def normal(obs: Any, row: Any, *names: str) -> Any:
        stats = update_stats(init_obs_stats(True, EnvSpec("mixed", obs, DiscreteSpec(2)), *names), row)
        return normalize(stats, row)

    # As numbers, beside others, it is normalised.
    both = normal({"place": place, "speed": speed}, row, "", "speed")
    np.testing.assert_allclose(both["place"], [[1, -1]], rtol=1e-3)
    np.testing.assert_array_equal(both["speed"], np.zeros((1, 2, 2)))
    alone = normal({"place": place, "speed": speed}, row, "place", "")
    seen = normal(Seen(place, None, speed), Seen(row["place"], None, row["speed"]))
    for left, numbers in ((alone["place"], alone["speed"]), (seen.view, seen.world)):
        np.testing.assert_array_equal(left, row["place"])
        assert left.dtype == jnp.int32
        np.testing.assert_array_equal(numbers, np.zeros((1, 2, 2)))


@pytest.mark.parametrize(
    "obs", [DiscreteSpec(5), Seen({"only": DiscreteSpec(5)}), Seen(DiscreteSpec(5), None)], ids=str
)
def test_where_nothing_is_left_to_normalise_it_is_said(obs: Any) -> None:
    with pytest.raises(
        ValueError, match="normalize_obs=True: the observations of mixed are discrete and become one-hot"
    ):
        init_obs_stats(True, EnvSpec("mixed", obs, DiscreteSpec(2)))
