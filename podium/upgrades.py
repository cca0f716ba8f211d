"""Runs of older versions: which leaves of a run's state were kept otherwise then, and what becomes of them.

Also which fields their configurations lack. Nothing is made up for what is merely missing: a checkpoint that lacks a
leaf that is not named here is refused. And leaves that one layout keeps as one vector and another as several arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from podium.ops import counts

SCHEMA = 2
"""What is written now; 1 is podium 0.1.0's."""


NEW_FIELDS: Mapping[str, Any] = {
    "agent.config.actor_obs": "",
    "agent.config.anneal_steps": 0,
    "agent.config.critic_obs": "",
    "agent.config.normalized_reward_bound": 0.0,
    "agent.config.squash": False,
}
"""Fields that the `config.json` of an older run lacks, each with the value that does what was done then."""

NOT_RECORDED: Mapping[str, str] = {
    "agent.brought": "agent.transforms",
    "agent.transforms": "agent.transforms",
    "placement": "placement",
}
"""What the `config.json` of an older run does not tell, though it may have been anything: one that lacks the second."""


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
    # Discounted sums of rewards, one an environment, began anew with every rollout; here they do once more.
    Upgrade(1, ("first", "bool"), {"first": "bool", "past": "float32"}, lambda x: (x, np.zeros(x.shape, np.float32))),
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


def regroup(table: Mapping[str, dict[str, Any]], wanted: Mapping[str, tuple[int, ...]]) -> Upgraded:
    """Return how leaves are joined or split that are wanted as one vector, or as the arrays that make it up in order.

    `podium.ops.optimizers.flatten` keeps moments as either. Leaves "a/b" and "a/c" make up a vector "a".

    Args:
      table: describes the leaves of a checkpoint, in their order.
      wanted: shapes of the leaves wanted, in their order.
    """
    described, steps = dict(table), []
    shapes = {name: tuple(entry["shape"]) for name, entry in table.items()}
    for vectors, arrays in ((shapes, wanted), (wanted, shapes)):
        for name in vectors.keys() - arrays.keys():
            parts = [part for part in arrays if part.startswith(f"{name}/") and part not in vectors]
            if not parts or vectors[name] != (sum(math.prod(arrays[part]) for part in parts),):
                continue
            old, new = ([name], parts) if vectors is shapes else (parts, [name])
            dtypes = {table[part]["dtype"] for part in old}
            if len(dtypes) == 1:
                for part in old:
                    del described[part]
                described |= {part: {"dtype": table[old[0]]["dtype"], "shape": list(wanted[part])} for part in new}
                steps.append((old, new))

    def convert(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = dict(arrays)
        for old, new in steps:
            vector = np.concatenate([arrays.pop(part).ravel() for part in old])
            ends = np.cumsum([math.prod(wanted[part]) for part in new])
            pieces = np.split(vector, ends[:-1])
            arrays |= {part: x.reshape(wanted[part]) for part, x in zip(new, pieces, strict=True)}
        return arrays

    return Upgraded(described, convert)
