"""Drawing by weight: sums against sums, frequencies against weights, and what rounding must not do."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops import sum_tree

SIZES = [1, 32, 33, 40_000]


def build(weights: np.ndarray) -> sum_tree.Levels:
    levels = sum_tree.empty(weights.size)
    return sum_tree.replace(levels, levels[0].at[: weights.size].set(weights), jnp.arange(weights.size))


@pytest.mark.parametrize("size", SIZES)
def test_every_level_sums_the_one_below(size: int) -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(size).astype(np.float32)
    levels = jax.jit(build)(weights)
    replace = jax.jit(lambda levels, index, new: sum_tree.replace(levels, levels[0].at[index].set(new), index))
    for _ in range(20):
        index = rng.integers(size, size=min(size, 50))
        weights[index] = new = np.where(rng.random(index.size) < 0.3, 0, index % 7).astype(np.float32)
        levels = replace(levels, index, new)
    below = np.zeros(levels[0].size, np.float32)
    below[:size] = weights
    np.testing.assert_array_equal(levels[0], below)
    for level in levels[1:]:
        below = below.reshape(-1, sum_tree.FANOUT).sum(-1)
        np.testing.assert_allclose(level[: below.size], below, rtol=1e-6)
        np.testing.assert_array_equal(level[below.size :], 0)
        below = np.asarray(level)
    assert levels[-1].size == sum_tree.FANOUT
    np.testing.assert_allclose(sum_tree.total(levels), weights.sum(dtype=np.float64), rtol=1e-6)


def test_many_writes_leave_no_drift() -> None:
    """Sums corrected by differences would be off by what a large weight once rounded away."""
    size = 1_000
    levels = sum_tree.empty(size)

    @jax.jit
    def shake(levels: sum_tree.Levels, key: jax.Array) -> sum_tree.Levels:
        def write(levels: sum_tree.Levels, key: jax.Array) -> tuple[sum_tree.Levels, None]:
            index = jax.random.randint(key, (100,), 0, size)
            new = 10.0 ** jax.random.uniform(key, (100,), minval=-4, maxval=6)
            return sum_tree.replace(levels, levels[0].at[index].set(new), index), None

        return jax.lax.scan(write, levels, jax.random.split(key, 2_000))[0]

    levels = shake(levels, jax.random.key(0))
    exact = np.asarray(levels[0], np.float64).sum()
    np.testing.assert_allclose(sum_tree.total(levels), exact, rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_frequencies_are_as_the_weights(size: int) -> None:
    rng = np.random.default_rng(1)
    weights = np.where(rng.random(size) < 0.3, 0, rng.random(size) ** 3).astype(np.float32)
    weights[0] = 0.5
    number, repeats = 500, 400
    draw = jax.jit(jax.vmap(lambda key, levels: sum_tree.draw(key, levels, number), in_axes=(0, None)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), repeats), build(weights)))
    assert drawn.dtype == np.int32
    counts = np.bincount(drawn.reshape(-1), minlength=size)
    assert counts.size == size and (counts[weights == 0] == 0).all()
    expected = weights.astype(np.float64) / weights.sum(dtype=np.float64) * drawn.size
    # Cells that expect few are taken together. Strata only make the statistic smaller than independent draws would.
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    cells = np.minimum(np.cumsum(expected[order]) // 20, size).astype(int)
    seen, mean = (np.bincount(cells, x[order]) for x in (counts, expected))
    seen, mean = seen[mean > 0], mean[mean > 0]
    chi_square, free = ((seen - mean) ** 2 / mean).sum(), mean.size - 1
    assert chi_square < free + 5 * math.sqrt(2 * free) + 1e-6


def test_segments_hold_their_share() -> None:
    """Of four equal quarters of the weight, each gives a quarter of every draw."""
    weights = np.ones(4 * sum_tree.FANOUT, np.float32)
    index = sum_tree.draw(jax.random.key(0), build(weights), 64)
    np.testing.assert_array_equal(np.bincount(index // sum_tree.FANOUT), [16] * 4)


@pytest.mark.parametrize("position", [0, 1, 511, 998, 999])
def test_a_weight_of_zero_is_never_drawn(position: int) -> None:
    """One tiny weight among zeros, and one beside an enormous one, at both ends."""
    for others in (0.0, 1e6):
        weights = np.zeros(1_000, np.float32)
        weights[position] = 1e-6
        weights[(position + 37) % 1_000] = others
        drawn = jax.jit(lambda key, weights: sum_tree.draw(key, build(weights), 4096))(jax.random.key(0), weights)
        assert (weights[np.asarray(drawn)] > 0).all()
    # The largest share there is: rounding must not carry it past the end.
    upto = sum_tree._pick(jnp.asarray(weights[None, : sum_tree.FANOUT] * 0 + 0.1), jnp.array([1.0, 0.0]))
    np.testing.assert_array_equal(upto, [sum_tree.FANOUT - 1, 0])


def test_nothing_to_draw_gives_the_first() -> None:
    np.testing.assert_array_equal(sum_tree.draw(jax.random.key(0), sum_tree.empty(2_000), 8), 0)
