"""The permutation is one, whatever the size, and uniform as far as minibatches can tell."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from podium.ops import shuffle
from podium.ops.shuffle import permute
from podium.testing import assert_compiles_once

# Keys are fixed, so a bound that holds, holds always: these are far out in the tail of a fair permutation.
SMALLEST_P = 1e-4


@functools.cache
def permutations(size: int, num_keys: int, seed: int = 0) -> np.ndarray:
    """Return [num_keys, size] permutations."""
    keys = jax.random.split(jax.random.key(seed), num_keys)
    return np.asarray(jax.jit(jax.vmap(lambda key: permute(key, jnp.arange(size), size)))(keys))


def assert_bijection(outputs: np.ndarray, size: int) -> None:
    np.testing.assert_array_equal(np.sort(outputs, axis=-1), np.broadcast_to(np.arange(size), outputs.shape))


def test_bijection_for_every_small_size() -> None:
    keys = jax.random.split(jax.random.key(1), 3)

    @jax.jit
    def all_sizes(keys: jax.Array) -> list[jax.Array]:
        return [jax.vmap(lambda key: permute(key, jnp.arange(n), n))(keys) for n in range(1, 71)]  # noqa: B023

    compiled = all_sizes.lower(keys).compile()
    for size, outputs in enumerate(compiled(keys), start=1):
        assert outputs.dtype == jnp.uint32
        assert_bijection(np.asarray(outputs), size)


def test_equal_words_are_told_apart() -> None:
    # A tie comes once in a million draws of 64 words; the ranks must be a bijection then too.
    words = jnp.array([7, 3, 7, 3, 3], jnp.uint32)
    np.testing.assert_array_equal(shuffle._rank(words, jnp.arange(5)), [3, 0, 4, 1, 2])


@pytest.mark.parametrize("size", [127, 128, 129, 1000, 2048 * 3 + 1, 8192, 65_537])
def test_bijection_for_larger_sizes(size: int) -> None:
    assert_bijection(permutations(size, 2), size)


def test_an_index_goes_to_the_same_place_whatever_else_is_asked() -> None:
    function = jax.jit(permute, static_argnums=2)
    for size in (50, 1000):
        key, some = jax.random.key(2), np.array([[7, size - 1], [0, 7]])
        everything = np.asarray(function(key, jnp.arange(size), size))
        np.testing.assert_array_equal(function(key, jnp.asarray(some), size), everything[some])
        np.testing.assert_array_equal(function(key, jnp.int32(7), size), everything[7])


def test_the_largest_sizes_stay_inside() -> None:
    index = jnp.asarray(np.linspace(0, 2**31 - 1, 1000).astype(np.uint32))
    for size in (2**31, 2**31 - 1):
        inputs = jnp.minimum(index, size - 1)
        outputs = np.asarray(jax.jit(permute, static_argnums=2)(jax.random.key(3), inputs, size))
        assert outputs.max() < size
        assert len(np.unique(outputs)) == len(np.unique(inputs))


def test_compiled_once_for_all_keys() -> None:
    function = jax.jit(permute, static_argnums=2)
    with assert_compiles_once(function):
        for seed in range(3):
            function(jax.random.key(seed), jnp.arange(100), 100)


@pytest.mark.parametrize("size", [5, 64, 65, 100, 128])
def test_every_element_goes_everywhere_equally_often(size: int) -> None:
    outputs = permutations(size, 20_000)
    p = [stats.chisquare(np.bincount(outputs[:, index], minlength=size)).pvalue for index in range(size)]
    assert min(p) > SMALLEST_P / size


def cells(size: int) -> list[np.ndarray]:
    """Return labels [size] to count pairs of outputs by: all, or 16 at most by high, low and middle bits."""
    place = np.arange(size)
    return [place] if size <= 32 else [place * 16 // size, place % 16, place // 4 % 16]


# With few bits the multiplications alone are far from uniform here (p of 1e-200); hence the exact draw up to 64.
@pytest.mark.parametrize("size", [4, 5, 8, 24, 32, 64, 65, 128, 200])
def test_pairs_go_everywhere_equally_often(size: int) -> None:
    outputs = permutations(size, 20_000).astype(int)
    p = []
    for cell in cells(size):
        number = cell.max() + 1
        sizes = np.bincount(cell)
        expected = (np.outer(sizes, sizes) - np.diag(sizes)).ravel() * len(outputs) / (size * (size - 1))
        possible = expected > 0
        for distance in {1, 2, size // 2}:
            for index in range(min(size - distance, 12)):
                pair = cell[outputs[:, index]] * number + cell[outputs[:, index + distance]]
                counts = np.bincount(pair, minlength=number * number)
                assert not counts[~possible].any()
                p.append(stats.chisquare(counts[possible], expected[possible]).pvalue)
    assert min(p) > SMALLEST_P / len(p)


@pytest.mark.parametrize("size", [256, 1000, 8192])
def test_consecutive_outputs_are_not_correlated(size: int) -> None:
    outputs = permutations(size, 200).astype(float)
    for distance in (1, 2, size // 2):
        found = np.array([np.corrcoef(row[:-distance], row[distance:])[0, 1] for row in outputs])
        # Of independent draws each has deviation 1 / sqrt(n), and mean about -1 / n.
        n = size - distance
        assert abs(found.mean()) < 5 / np.sqrt(n * len(found)) + 1 / n
        assert abs(found).max() < 5 / np.sqrt(n) + 1 / n


@pytest.mark.parametrize("size", [96, 128, 1024])
def test_minibatches_take_all_times_and_environments_alike(size: int) -> None:
    # Which quarter an index falls into: chi-square over (quarter of the input, quarter of the output), many keys.
    outputs = permutations(size, 500)
    table = np.zeros((4, 4))
    np.add.at(table, (np.broadcast_to(np.arange(size) * 4 // size, outputs.shape), outputs * 4 // size), 1)
    # Drawing without replacement scatters less than a multinomial: at most as far as chi-square allows.
    assert stats.chisquare(table.ravel(), ddof=6).pvalue > SMALLEST_P
    # And the counts of one permutation do scatter: as a hypergeometric count does, within a tenth.
    first = (outputs[:, : size // 4] < size // 4).sum(1)
    quarter = size // 4
    assert first.std() == pytest.approx(stats.hypergeom(size, quarter, quarter).std(), rel=0.15)


@pytest.mark.parametrize("size", [64, 1000])
def test_keys_and_epochs_differ(size: int) -> None:
    outputs = permutations(size, 500)
    assert len(np.unique(outputs, axis=0)) == 500
    # As `podium.learn` derives them: epochs, then lanes.
    epochs = jax.vmap(lambda e: jax.random.fold_in(jax.random.key(5), e))(jnp.arange(4))
    lanes = jax.vmap(lambda k: jax.vmap(lambda lane: jax.random.fold_in(k, lane))(jnp.arange(8)))(epochs).reshape(-1)
    shuffled = np.asarray(jax.jit(jax.vmap(lambda key: permute(key, jnp.arange(size), size)))(lanes))
    same = (shuffled[:, None] == shuffled[None]).mean(-1)[np.triu_indices(32, 1)]
    # Two permutations agree in one place on average.
    assert same.mean() == pytest.approx(1 / size, rel=0.3)
    assert same.max() < 8 / size
