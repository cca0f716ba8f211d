"""What a sweep varies: for each field of a configuration the values it takes, or how they are drawn."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podium.ranges import is_integer, is_number

Setting = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Draws:
    """Numbers to be drawn between two bounds, evenly, or evenly in their logarithm.

    Args:
      low: the smallest.
      high: the largest.
      log: whether evenly in the logarithm.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high, self.log)

    def draw(self, rng: np.random.Generator) -> float:
        """Return one."""
        if self.log:
            return float(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return float(rng.uniform(self.low, self.high))


Space = Mapping[str, Sequence[Any] | Draws]


def log_range(low: float, high: float, number: int) -> tuple[float, ...]:
    """Return numbers from `low` to `high`, each the same multiple of the one before.

    >>> [round(x, 6) for x in log_range(1e-4, 1e-2, 3)]
    [0.0001, 0.001, 0.01]

    Raises:
      ValueError: the bounds are reversed or not positive, or there are fewer than two numbers.
    """
    _check_bounds(low, high, log=True)
    _check_number(number)
    return tuple(float(x) for x in np.geomspace(low, high, number))


def linear_range(low: float, high: float, number: int) -> tuple[float, ...]:
    """Return numbers from `low` to `high`, equally far apart.

    >>> linear_range(0.0, 1.0, 3)
    (0.0, 0.5, 1.0)

    Raises:
      ValueError: the bounds are reversed or infinite, or there are fewer than two numbers.
    """
    _check_bounds(low, high, log=False)
    _check_number(number)
    return tuple(float(x) for x in np.linspace(low, high, number))


def listed(space: Space) -> Space:
    """Return a space with lists in place of arrays of one axis, such as `np.geomspace` returns, and Python's numbers.

    >>> listed({"gamma": np.linspace(0.5, 1.0, 2), "memory": ("none", "gru")})
    {'gamma': [0.5, 1.0], 'memory': ('none', 'gru')}
    """

    def plain(value: Any, axes: int) -> Any:
        is_array = isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim == axes
        return value.tolist() if is_array else value

    def of(values: Any) -> Any:
        values = plain(values, 1)
        return type(values)(plain(value, 0) for value in values) if type(values) in (list, tuple) else values

    return {name: of(values) for name, values in space.items()}


def settings_of(space: Space, samples: int | None, seed: int) -> list[Setting]:
    """Return the settings of a space: of a grid all of them, or `samples` draws of it.

    Args:
      space: by field its values, or `Draws`.
      samples: settings to draw, each field by itself; None takes every setting of a grid.
      seed: of the draws.

    >>> settings_of({"gamma": (0.9, 0.99), "gae_lambda": (1.0,)}, None, 0)
    [{'gamma': 0.9, 'gae_lambda': 1.0}, {'gamma': 0.99, 'gae_lambda': 1.0}]

    Raises:
      ValueError: a field has no value, one twice, or `Draws` without `samples`; or the space has a single setting.
    """
    for name, values in space.items():
        if isinstance(values, Draws):
            if samples is None:
                raise ValueError(f"{name}={values} is drawn from; say how many settings with samples, or use a range.")
        elif isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name}={values!r} must be a sequence of one value or more, or podium.Draws(low, high).")
        elif any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError(f"{name}={list(values)} has a value twice; leave one of them out.")
    if samples is None:
        grid = itertools.product(*(values for values in space.values() if not isinstance(values, Draws)))
        found = [dict(zip(space, values, strict=True)) for values in grid]
    else:
        if not is_integer(samples, 1):
            raise ValueError(f"samples={samples!r} must be an integer of 1 or more.")
        rng = np.random.default_rng(seed)

        def one(values: Sequence[Any] | Draws) -> Any:
            return values.draw(rng) if isinstance(values, Draws) else values[int(rng.integers(len(values)))]

        found = [{name: one(values) for name, values in space.items()} for _ in range(samples)]
        found = [setting for i, setting in enumerate(found) if setting not in found[:i]]
    if len(found) < 2:
        raise ValueError(f"space={dict(space)} has a single setting; give two or more, or use podium.train.")
    return found


def read_space(pairs: Sequence[str], flag: str = "--space") -> dict[str, Sequence[Any] | Draws]:
    """Return what a command line says of every field, as FIELD=VALUES.

    >>> read_space(["learning-rate=0.1,0.2"])
    {'learning_rate': (0.1, 0.2)}

    Raises:
      ValueError: one is no such pair, or a field is there twice; names the flag.
    """
    space: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier() or name in space:
            raise ValueError(f"{flag} {pair} is not FIELD=VALUES, each field once; such as learning_rate=1e-4,1e-3.")
        space[name] = read_values(text)
    return space


def read_values(text: str) -> Sequence[Any] | Draws:
    """Return what a command line says of one field.

    >>> read_values("0.1,0.2"), read_values("tanh,relu"), read_values("1..3:3")
    ((0.1, 0.2), ('tanh', 'relu'), (1.0, 2.0, 3.0))
    >>> read_values("(64,64),(128,)")
    ((64, 64), (128,))
    >>> read_values("1e-4..1e-2:log:3")[1] == log_range(1e-4, 1e-2, 3)[1], read_values("1e-4..1e-2:log")
    (True, Draws(low=0.0001, high=0.01, log=True))

    Raises:
      ValueError: it is none of these.
    """
    if ".." not in text:
        # A comma between parentheses is one of a value's own.
        return tuple(_value(part) for part in re.split(r",(?![^(]*\))", text))
    bounds, *how = text.split(":")
    try:
        low, high = (float(bound) for bound in bounds.split(".."))
        log, number = "log" in how, [int(part) for part in how if part not in ("log", "linear")]
        if len(number) > 1 or len(how) > 2:
            raise ValueError
    except ValueError:
        raise ValueError(f"{text} is no range; use LOW..HIGH:log:NUMBER, LOW..HIGH:NUMBER, or values A,B,C.") from None
    if not number:
        return Draws(low, high, log)
    return log_range(low, high, number[0]) if log else linear_range(low, high, number[0])


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if text.startswith("("):
        with contextlib.suppress(ValueError, SyntaxError):
            return ast.literal_eval(text)
    return {"True": True, "False": False}.get(text, text)


def _check_bounds(low: float, high: float, log: bool) -> None:
    for name, bound in (("low", low), ("high", high)):
        if not is_number(bound):
            raise ValueError(f"{name}={bound!r} must be a number.")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low={low} must be less than high={high}, and both finite; exchange them.")
    if log and low <= 0:
        raise ValueError(f"low={low} must be greater than 0 for a range of logarithms; use a linear one.")


def _check_number(number: int) -> None:
    if not is_integer(number, 2):
        raise ValueError(f"number={number!r} must be an integer of 2 or more; use 8.")
