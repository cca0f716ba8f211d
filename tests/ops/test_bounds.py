"""Bounds of actions: there and back, nothing outside, and refusals that name what to do."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops.bounds import Bounds
from podium.types import ArraySpec, DiscreteSpec, EnvSpec


def spec(action: Any) -> EnvSpec:
    return EnvSpec("test", ArraySpec((3,)), action)


def test_there_and_back_and_never_outside() -> None:
    low, high = [-0.1, -2.0, 0.0], [0.3, 2.0, 1e-3]
    bounds = Bounds.of(spec(ArraySpec((3,), low=low, high=high)), "this needs", "do that")
    unit = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, size=(500, 3)), jnp.float32)
    np.testing.assert_allclose(bounds.to_unit(bounds.to_env(unit)), unit, atol=1e-5)
    ends = bounds.to_env(jnp.array([[-1.0] * 3, [1.0] * 3]))
    np.testing.assert_allclose(ends, [low, high], rtol=1e-6, atol=1e-9)
    assert (ends >= bounds.low).all() and (ends <= bounds.high).all()
    np.testing.assert_allclose(bounds.to_env(jnp.zeros(3)), np.mean([low, high], axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (DiscreteSpec(3), "the actions of test are discrete, but this needs continuous actions"),
        (ArraySpec((2, 3), low=-1, high=1), "have shape (2, 3), but this needs a vector (A,); reshape them in the env"),
        (
            ArraySpec((2,), np.int32, 0, 10),
            "the actions of test are int32 in a box, and an agent chooses one index or",
        ),
        (ArraySpec((2,)), "lie between low=[-inf, -inf] and high=[inf, inf], but this needs"),
        (ArraySpec((2,), low=-1, high=[1, np.inf]), "lie between low=[-1.0, -1.0] and high=[1.0, inf]"),
        (ArraySpec((1,), low=2e38, high=3.4e38), "whose sum or difference no float32 holds; scale them in the env"),
        (ArraySpec((1,), low=1, high=1), "low below high; say them in the environment's ArraySpec, or do that."),
    ],
)
def test_what_has_no_bounds_is_refused(action: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Bounds.of(spec(action), "this needs", "do that")
