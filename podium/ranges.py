"""Refuse numbers out of range, in a sentence: which it is, its value, the rule and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any


def nearest_multiples(number: int, unit: int) -> str:
    """Name the positive multiples of `unit` on both sides of `number`, for a sentence that refuses it.

    >>> nearest_multiples(7, 4), nearest_multiples(3, 4)
    ('4 or 8', '4')
    """
    low, high = number // unit * unit, -(-number // unit) * unit
    return f"{low} or {high}" if low else str(high)


def check_fields(
    config: Any,
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    fractions: Sequence[str] = (),
    counts: Sequence[str] = (),
    naturals: Sequence[str] = (),
) -> None:
    """Refuse a config with a field out of range; None passes where it is the field's default.

    Args:
      config: a dataclass.
      positive: names of fields that must be finite and above 0.
      not_negative: finite and 0 or more.
      fractions: 0 to 1.
      counts: integers of 1 or more.
      naturals: integers of 0 or more.

    Raises:
      ValueError: naming the first such field, its value and the rule.
    """
    is_integer = lambda x: isinstance(x, int) and not isinstance(x, bool)
    rules: list[tuple[Sequence[str], Callable[[Any], bool], str]] = [
        (counts, lambda x: is_integer(x) and x >= 1, "an integer of 1 or more"),
        (naturals, lambda x: is_integer(x) and x >= 0, "an integer of 0 or more"),
        (positive, lambda x: 0 < x < math.inf, "finite and greater than 0"),
        (not_negative, lambda x: 0 <= x < math.inf, "finite and 0 or more"),
        (fractions, lambda x: 0 <= x <= 1, "between 0 and 1"),
    ]
    for names, holds, rule in rules:
        for name in names:
            value, usual = getattr(config, name), getattr(type(config), name)
            if value is usual is None or holds(value):
                continue
            remedy = "leave it out to have it chosen" if usual is None else f"{usual} is usual"
            raise ValueError(f"{name}={value!r} must be {rule}; {remedy}.")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}.")


def check_positive(**values: Any) -> None:
    """Raise ValueError for a value that is not a positive integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer.")


def check_divides(num_envs: int, number: int, what: str, unit: int | None = None) -> None:
    """Raise ValueError where `number` of `what` do not share the environments evenly; `unit` would be fine for all."""
    if num_envs % number:
        use = nearest_multiples(num_envs, unit or number)
        raise ValueError(f"num_envs={num_envs} is not divisible by {what}; use {use}.")
