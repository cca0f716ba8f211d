"""Specs: what is refused where one is made, and what is drawn of one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from podium.types import ArraySpec


@pytest.mark.parametrize(
    ("shape", "num_frames", "words"),
    [
        *(((4,), number, "must be an integer of 1 or more; use 1") for number in (0, -1, 2.0, "2", True, None)),
        ((20, 20, 4), 3, r"must divide the last axis of shape=\(20, 20, 4\); use 1"),
        ((), 4, r"must divide the last axis of shape=\(\); use 1"),
    ],
)
def test_a_number_of_frames_that_is_none_is_refused(shape: tuple[int, ...], num_frames: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^num_frames={num_frames!r} {words} for what is no stack of frames.$"):
        ArraySpec(shape, num_frames=num_frames)
    assert ArraySpec((8, 4), num_frames=np.int64(4)).num_frames == 4


INF, MOST = np.inf, 2**31 - 1


def drawn(dtype: Any, low: Any, high: Any, size: int = 20_000) -> np.ndarray:
    spec = ArraySpec((size, *np.shape(low)), dtype, low, high)
    value = np.asarray(jax.jit(spec.sample)(jax.random.key(0)))
    assert value.dtype == dtype and value.shape == spec.shape
    return value


@pytest.mark.parametrize(
    ("low", "high", "least", "most"),
    [
        (2.0, INF, 2.0, 3.0),
        (-INF, -3.0, -4.0, -3.0),
        (-INF, INF, -1.0, 1.0),
        (-2.0, 5.0, -2.0, 5.0),
        ([0.0, -INF, -INF], [INF, 5.0, INF], [0.0, 4.0, -1.0], [1.0, 5.0, 1.0]),
    ],
)
def test_numbers_are_drawn_within_their_bounds(low: Any, high: Any, least: Any, most: Any) -> None:
    value = drawn(np.float32, low, high)
    assert (value >= np.asarray(least)).all() and (value <= np.asarray(most)).all()
    share = (value - least) / np.subtract(most, least)
    np.testing.assert_allclose(np.quantile(share, [0, 0.25, 0.5, 1], axis=0).T - [0, 0.25, 0.5, 1], 0, atol=0.02)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "least", "most"),
    [
        (np.int32, -1, 1, -1, 1),
        (np.int32, -INF, INF, -1, 1),
        (np.int32, 0.5, 3.5, 1, 3),
        (np.int32, 7, 7, 7, 7),
        (np.int32, MOST - 1, MOST, MOST - 1, MOST),
        (np.int32, -MOST - 1, -MOST, -MOST - 1, -MOST),
        (np.uint32, 2**32 - 2, INF, 2**32 - 2, 2**32 - 1),
        (np.uint8, 0, 255, 0, 255),
        (np.uint8, -INF, INF, 0, 1),
        (np.uint8, 255, INF, 255, 255),
        (np.int8, -128, 127, -128, 127),
    ],
)
def test_every_integer_of_a_range_is_as_likely(dtype: Any, low: Any, high: Any, least: int, most: int) -> None:
    found, counts = np.unique(drawn(dtype, low, high), return_counts=True)
    assert found.tolist() == list(range(least, most + 1))
    mean = 20_000 / len(found)
    assert (abs(counts - mean) < 5 * np.sqrt(mean)).all()


def test_bounds_that_lie_further_apart_than_float32_can_tell_are_drawn_between() -> None:
    most = np.finfo(np.float32).max
    share = drawn(np.float32, -most, most) / most
    np.testing.assert_allclose(np.quantile(share, [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], atol=0.03)


@pytest.mark.parametrize(("dtype", "low"), [(np.int32, -MOST - 1), (np.uint32, 0)])
def test_integers_are_drawn_of_all_that_32_bits_hold(dtype: Any, low: int) -> None:
    share = (drawn(dtype, low, low + 2**32 - 1).astype(float) - low) / 2**32
    np.testing.assert_allclose(np.quantile(share, [0, 0.25, 0.5, 0.75, 1]), [0, 0.25, 0.5, 0.75, 1], atol=0.02)


def test_bounded_numbers_and_flags_are_the_draws_that_they_were() -> None:
    key, low, high = jax.random.key(3), np.float32([-0.3, 0.1, 2e5]), np.float32([1 / 3, 7.0, 3e5])
    uniform = np.asarray(jax.random.uniform(key, (3,)))
    np.testing.assert_array_equal(ArraySpec((3,), low=low, high=high).sample(key), low + uniform * (high - low))
    np.testing.assert_array_equal(ArraySpec((3,), np.bool_, 0, 1).sample(key), uniform > 0.5)
