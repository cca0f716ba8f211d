"""How likely everything in a replay is drawn: weights of TD errors, in a sum tree a lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.ops import sum_tree
from podium.ranges import check_value
from podium.types import Array

DIVERGED = 1e30
"""A TD error of more, or NaN, is of an agent that diverged; sums of as large ones would overflow."""


class Priorities(NamedTuple):
    """How likely everything in a replay is drawn.

    Attributes:
      levels: weights [L, n] float32, row (or start of a window) * E + environment, 0 for what is not drawn; and sums;
        see `ops.sum_tree`.
      largest: [L] float32, largest TD error that each lane has met, of what is drawn; 1 if none is more.
      updates: int32 scalar, minibatches learnt from.
    """

    levels: sum_tree.Levels
    largest: Array
    updates: Array


def no_priorities(num_lanes: int, size: int) -> Priorities:
    """Return those of `size` places a lane of which none can be drawn yet."""
    levels = jax.tree.map(lambda x: jnp.zeros((num_lanes, *x.shape)), sum_tree.empty(size))
    return Priorities(levels, jnp.ones(num_lanes), jnp.zeros((), jnp.int32))


def weight_of(td_error: Array, exponent: float, smallest: float) -> Array:
    """Return what something is drawn in proportion to, (|TD error| + smallest) ** exponent."""
    return (jnp.abs(td_error) + smallest) ** exponent


def known(td_error: Array, largest: Array) -> Array:
    """Return |TD error|, and the largest so far in place of one that is no number or none to reckon with.

    Of several settings one may diverge and begin anew (`podium.Population`): its replay must not keep what it was.
    """
    error = jnp.abs(td_error)
    return jnp.where(error < DIVERGED, error, largest)


def importance(share: Array, exponent: float, annealing_updates: int, updates: Array) -> Array:
    """Return [N], the weights in the loss of what was drawn with probabilities `share` [N], at most 1.

    They are share ** -exponent by the largest of them; the exponent rises to 1 over `annealing_updates`, or stays
    where that is 0. What cannot be drawn, of share 0, comes from a lane in which nothing can: it counts nothing.
    """
    power = jnp.asarray(exponent)
    if annealing_updates:
        power = power + jnp.minimum(updates / annealing_updates, 1.0) * (1.0 - power)
    weight = jnp.where(share > 0, share**-power, 0.0)
    return weight / jnp.maximum(jnp.max(weight), jnp.finfo(jnp.float32).tiny)


def rank(priorities: Priorities, indices: Array, td_error: Array | None, weigh: Callable[[Array], Array]) -> Priorities:
    """Return the priorities after a minibatch; what is never drawn stays so.

    Args:
      priorities: before it.
      indices: [L, n], where the minibatch is from.
      td_error: [L * n], its new errors; among duplicates the largest counts, and `known` says what counts for one that
        is no number.
      weigh: what turns an error into a weight.

    Raises:
      ValueError: there are no errors.
    """
    if td_error is None:
        raise ValueError("priorities=None from grad, but the replay is prioritised; return |TD error| in Aux.")
    errors = known(td_error.reshape(indices.shape), priorities.largest[:, None])

    def rank_lane(levels: sum_tree.Levels, largest: Array, index: Array, error: Array) -> tuple[sum_tree.Levels, Array]:
        weights = levels[0]
        # What is never drawn stays so, whoever asks, and its error means nothing.
        drawable = weights.at[index].get(mode="promise_in_bounds") > 0
        error = jnp.where(drawable, error, 0.0)
        # Duplicates are made alike, so that their order means nothing, and all is written at once: between two
        # writes XLA would read `drawable` from a copy of every weight.
        alike = index[:, None] == index
        error = jnp.max(jnp.where(alike, error, 0.0), axis=1)
        weight = jnp.where(drawable, weigh(error), 0.0)
        levels = sum_tree.replace(levels, weights.at[index].set(weight, mode="promise_in_bounds"), index)
        return levels, jnp.maximum(largest, jnp.max(error))

    levels, largest = jax.vmap(rank_lane)(priorities.levels, priorities.largest, indices, errors)
    return Priorities(levels, largest, priorities.updates + 1)


def check_exponents(
    priority_exponent: float, importance_exponent: float, annealing_updates: int, smallest_priority: float
) -> None:
    """Refuse numbers out of range."""
    check_value("priority_exponent", priority_exponent, "fractions", "0.6 is usual")
    check_value("importance_exponent", importance_exponent, "fractions", "0.4 is usual")
    check_value("annealing_updates", annealing_updates, "naturals", "use 0 for none")
    check_value("smallest_priority", smallest_priority, "positive", "1e-6 is usual")
