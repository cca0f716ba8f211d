"""Checkpoints of older schemas: which leaves of a run's state were kept otherwise then, and what becomes of them.

Nothing is made up for a leaf that is merely missing: what is not named here, a checkpoint that lacks it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from podium.ops import counts

SCHEMA = 2
"""What is written now; 1 is podium 0.1.0's."""


class Upgrade(NamedTuple):
    """A leaf of an older checkpoint that a newer State keeps otherwise; names are the last parts of leaves' names.

    Attributes:
      schema: the last one that has `old`.
      old: its name and dtype then.
      new: names and dtypes of what it is now, all of its shape; where the leaf itself stays it is among them.
      convert: `(array) -> arrays`, one for each of `new`.
    """

    schema: int
    old: tuple[str, str]
    new: Mapping[str, str]
    convert: Callable[[np.ndarray], tuple[np.ndarray, ...]]


UPGRADES = (
    # A float32 stood still from 2^24 on.
    Upgrade(1, ("env_steps", "float32"), {"env_steps/low": "uint32", "env_steps/high": "uint32"}, counts.split),
    # That the rest of an iteration is skipped is known to the fold over gradients alone.
    Upgrade(1, ("stopped", "bool"), {}, lambda array: ()),
)


class Upgraded(NamedTuple):
    """A checkpoint's leaves as they are now: the `table` that describes them, and `convert`, of arrays by name."""

    table: dict[str, dict[str, Any]]
    convert: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def upgrade(schema: int, table: Mapping[str, dict[str, Any]], wanted: Set[str]) -> Upgraded:
    """Return how the leaves of a checkpoint of this schema, which `table` describes, become the leaves `wanted`.

    A leaf is taken for an old one only where all that it is now is wanted, and was not saved.
    """
    described, steps = dict(table), []
    for name, entry in table.items():
        for each in UPGRADES:
            head, last = name[: -len(each.old[0])], name[-len(each.old[0]) :]
            new = [head + ending for ending in each.new]
            whole = not head or head.endswith("/")
            if schema > each.schema or (last, entry["dtype"]) != each.old or not whole:
                continue
            if (name in wanted) != (name in new) or not set(new) <= wanted or described.keys() & set(new) - {name}:
                continue
            del described[name]
            described |= {now: {**entry, "dtype": dtype} for now, dtype in zip(new, each.new.values(), strict=True)}
            steps.append((name, new, each.convert))

    def convert(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = dict(arrays)
        for name, new, function in steps:
            arrays |= dict(zip(new, function(arrays.pop(name)), strict=True))
        return arrays

    return Upgraded(described, convert)
