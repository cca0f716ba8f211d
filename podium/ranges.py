"""Refuse numbers out of range, in a sentence: which it is, its value, the rule and what to do."""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np


def nearest_multiples(number: int, unit: int) -> str:
    """Name the positive multiples of `unit` on both sides of `number`, for a sentence that refuses it.

    >>> nearest_multiples(7, 4), nearest_multiples(3, 4)
    ('4 or 8', '4')
    """
    low, high = number // unit * unit, -(-number // unit) * unit
    return f"{low} or {high}" if low else str(high)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`, 1 or more.

    >>> largest_divisor(12, 5)
    4
    """
    return max(n for n in range(1, limit + 1) if number % n == 0)


class _Rule(NamedTuple):
    """What a number must be, at most and at least; `traced` says whether it may be known only when a program runs."""

    holds: Callable[[Any], bool]
    words: str
    traced: bool = True
    most: float = math.inf
    why: str = ""
    least: float = -math.inf


def is_integer(value: Any, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Say whether a value is an integer, NumPy's too and no bool, from `least` to `most` where these are given.

    >>> is_integer(np.int64(3), least=1), is_integer(True), is_integer(3.0), is_integer(3, 1, 2)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return (least is None or bool(value >= least)) and (most is None or bool(value <= most))


def is_number(value: Any) -> bool:
    """Say whether a value is a number of Python's or NumPy's; True and False are none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Return an integer as Python's, which no sum outgrows, and anything else as it is."""
    return int(value) if is_integer(value) else value


def _is_real(value: Any) -> bool:
    """Say whether a value is a number, or an array of one, as `jnp.float32(1)` is."""
    if isinstance(value, jax.Array | np.ndarray):
        return value.ndim == 0 and (
            jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        )
    return is_number(value)


_INT32 = 2**31 - 1, "2**31 - 1, the largest int32"
_FLOAT32 = float(np.finfo(np.float32).max), "3.4e38, the largest float32"
_TINY = float(np.finfo(np.float32).tiny)
_RULES = {
    "flags": _Rule(lambda x: isinstance(x, bool | np.bool_), "True or False", traced=False),
    "steps": _Rule(lambda x: is_integer(x, 1), "an integer of 1 or more", False, *_FLOAT32),
    "counts": _Rule(lambda x: is_integer(x, 1), "an integer of 1 or more", False, *_INT32),
    "several": _Rule(lambda x: is_integer(x, 2), "an integer of 2 or more", False, *_INT32),
    "naturals": _Rule(lambda x: is_integer(x, 0), "an integer of 0 or more", False, *_INT32),
    "sizes": _Rule(lambda x: _is_real(x) and 0 <= x < math.inf, "finite and 0 or more", traced=False),
    "ratios": _Rule(lambda x: _is_real(x) and 0 < x < math.inf, "finite and greater than 0", traced=False),
    "positive": _Rule(lambda x: _is_real(x) and 0 < x < math.inf, "finite and greater than 0", True, *_FLOAT32, _TINY),
    "not_negative": _Rule(lambda x: _is_real(x) and 0 <= x < math.inf, "finite and 0 or more", True, *_FLOAT32),
    "fractions": _Rule(lambda x: _is_real(x) and 0 <= x <= 1, "between 0 and 1"),
    "shares": _Rule(lambda x: _is_real(x) and 0 < x <= 1, "greater than 0 and at most 1"),
}


def is_traced(value: Any) -> bool:
    """Say whether a number is known only when a program runs, as one that `jax.vmap` or `jax.jit` hands in."""
    return isinstance(value, jax.core.Tracer)


def as_float(value: Any) -> Any:
    """Return a number as a float, which holds counts that no int32 does; one that is traced as it is."""
    return value if is_traced(value) else float(value)


def is_on(value: Any) -> bool:
    """Say whether a number that switches something off at 0 is another; one that is traced counts as another."""
    return is_traced(value) or bool(value != 0)


def check_fields(
    config: Any,
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    fractions: Sequence[str] = (),
    shares: Sequence[str] = (),
    counts: Sequence[str] = (),
    naturals: Sequence[str] = (),
    steps: Sequence[str] = (),
) -> None:
    """Refuse a config with a field out of range; None passes where it is the field's default.

    Fields whose default is True or False must be one of the two, and those that are annotated as strings be strings.

    Numbers may be traced, so that one program has settings as its data; their ranges are for the caller to check then.

    Args:
      config: a dataclass.
      positive: names of fields that must be above 0, and finite in float32.
      not_negative: finite and 0 or more.
      fractions: 0 to 1.
      shares: above 0 and up to 1.
      counts: integers of 1 or more, up to the largest int32; sizes, which cannot be traced.
      naturals: integers of 0 or more, likewise.
      steps: integers of 1 or more, beyond int32 too.

    Raises:
      ValueError: naming the first such field, its value and the rule.
    """
    flags = [field.name for field in dataclasses.fields(config) if isinstance(field.default, bool)]
    named = {
        "flags": flags,
        "counts": counts,
        "naturals": naturals,
        "steps": steps,
        "positive": positive,
        "not_negative": not_negative,
        "fractions": fractions,
        "shares": shares,
    }
    for rule, names in named.items():
        for name in names:
            value, usual = getattr(config, name), getattr(type(config), name)
            if value is not None or usual is not None:
                remedy = "leave it out to have it chosen" if usual is None else f"{usual} is usual"
                check_value(name, value, rule, remedy)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in ("str", str) and not isinstance(value, str):
            raise ValueError(f"{field.name}={reprlib.repr(value)} must be a string; {field.default!r} is usual.")


def check_config(config: Any, kind: type) -> None:
    """Raise ValueError for what is no configuration of this kind, such as another agent's.

    >>> check_config({"gamma": 0.9}, _Rule)
    Traceback (most recent call last):
    ValueError: config={'gamma': 0.9} is no podium.ranges._Rule; make one of fields by name.
    """
    if not isinstance(config, kind):
        full = lambda kind: f"{kind.__module__}.{kind.__qualname__}"
        given = f"a {full(type(config))}" if dataclasses.is_dataclass(config) else reprlib.repr(config)
        raise ValueError(f"config={given} is no {full(kind)}; make one of fields by name.")


def check_atoms(config: Any, low: str, high: str, number: str) -> None:
    """Refuse fields of a config, by name, that are no distribution over `number` values from `low` to `high`.

    Raises:
      ValueError: there are less than two, the ends are not finite and in order, or two values are one in float32.
    """
    check_value(number, getattr(config, number), "several", f"{getattr(type(config), number)} is usual")
    ends = least, largest = getattr(config, low), getattr(config, high)
    known = not any(map(is_traced, ends))
    if known and not (all(map(_is_real, ends)) and -math.inf < least < largest < math.inf):
        raise ValueError(
            f"{low}={least!r} and {high}={largest!r} must be finite numbers, {low} below {high}; use the least and "
            "the largest discounted return there can be."
        )
    if known and not _are_apart(float(least), float(largest), getattr(config, number)):
        raise ValueError(
            f"{low}={least!r} and {high}={largest!r} are too near, or too large, for {number}="
            f"{getattr(config, number)} values between them to differ in float32; use a wider range, or fewer values."
        )


def _are_apart(least: float, largest: float, number: int) -> bool:
    """Say whether so many values from `least` to `largest` are finite in float32, their range too, and none is next."""
    width = (largest - least) / (number - 1)
    with np.errstate(over="ignore"):
        ends = np.array([least, least + width, largest - width, largest, largest - least], np.float32)
    return bool(np.all(np.isfinite(ends)) and ends[0] < ends[1] and ends[2] < ends[3])


def check_value(name: str, value: Any, rule: str, remedy: str) -> None:
    """Refuse a value that breaks a rule: an argument of `check_fields` by name, or "several", "sizes" or "ratios".

    The first of these are integers of 2 or more; the others numbers, not negative or above 0, that cannot be traced.

    >>> check_value("gamma", 1.5, "fractions", "0.99 is usual")
    Traceback (most recent call last):
    ValueError: gamma=1.5 must be between 0 and 1; 0.99 is usual.

    Raises:
      ValueError: the name, the value, the rule and the remedy.
    """
    must = _RULES[rule]
    if is_traced(value):
        if not must.traced:
            raise ValueError(
                f"{name} is traced, but must be {must.words} when the program is made; it cannot vary within."
            )
    elif not must.holds(value):
        raise ValueError(f"{name}={value!r} must be {must.words}; {remedy}.")
    elif value > must.most:
        raise ValueError(f"{name}={value!r} must be at most {must.why}; use less.")
    elif value < must.least:
        least = f"at least {must.least:.3g}, float32's smallest normal number: less may be 0 in a program"
        raise ValueError(f"{name}={value!r} must be {least}; {remedy}.")


def check_type(name: str, value: Any, default: Any) -> None:
    """Refuse a value that is no truth, integer or number, where its default is one; an integer is a number too.

    >>> check_type("rows", 2.5, 10)
    Traceback (most recent call last):
    ValueError: rows=2.5 must be of type int, as 10 is.
    """
    if isinstance(default, bool):
        check_value(name, value, "flags", f"{default} is usual")
        return
    if is_integer(default):
        fits = is_integer(value)
    else:
        fits = not is_number(default) or is_number(value)
    if not fits:
        raise ValueError(f"{name}={value!r} must be of type {type(default).__name__}, as {default!r} is.")
    if is_number(default) and math.isfinite(default) and not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be finite, as {default!r} is.")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}.")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean 'known'?" of the nearest name, or "" where none is as near as `cutoff` (difflib's)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_positive(**values: Any) -> None:
    """Raise ValueError for a value that is not a positive integer."""
    for name, value in values.items():
        if not is_integer(value, 1):
            raise ValueError(f"{name}={value!r} must be a positive integer.")


def check_seed(seed: Any) -> None:
    """Raise ValueError for what is no seed of JAX's, which knows 32 bits: a larger one would be another's twin."""
    if not is_integer(seed, 0, 2**32 - 1):
        raise ValueError(f"seed={seed!r} must be an integer from 0 to 2**32 - 1; 0 is usual.")


def check_divides(num_envs: int, number: int, what: str, unit: int | None = None) -> None:
    """Raise ValueError where `number` of `what` do not share the environments evenly; `unit` would be fine for all."""
    if num_envs % number:
        use = nearest_multiples(num_envs, unit or number)
        raise ValueError(f"num_envs={num_envs} is not divisible by {what}; use {use}.")
