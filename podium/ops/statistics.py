"""Running mean and variance of a stream, updated a batch at a time; masked means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, PyTree, Seen, Trajectory

FLOOR = 1e-4
"""Deviation below which a feature counts as one that does not change."""

MEMORY = 2**20
"""Batches behind which the past weighs no more: in float32 nothing could be added to a longer one."""


class RunningStats(NamedTuple):
    """Count, mean and sum of squared deviations of everything seen; `mean` and `m2` are pytrees.

    Both have None for what is not to be normalised.

    `count` is the weight of what was seen: the number of rows up to `MEMORY` batches, and no more after them.
    """

    count: Array  # type: ignore[assignment]  # a tuple has a method of that name, which nobody calls
    mean: PyTree
    m2: PyTree

    def scale(self) -> PyTree:
        """Return sqrt(std^2 + FLOOR^2), what to divide by; the floor is Gymnasium's."""
        return jax.tree.map(lambda std: jnp.sqrt(jnp.square(std) + FLOOR**2), self.std())

    def reward_scale(self) -> PyTree:
        """Return what to divide rewards by: `scale`, and 1 as long as nothing but returns of 0 was seen.

        By the floor alone the first reward of a sparse task would be 10,000.
        """
        return jax.tree.map(lambda scale, m2: jnp.where(m2 > 0, scale, 1.0), self.scale(), self.m2)

    def std(self) -> PyTree:
        """Return the standard deviation, 1 before anything was seen."""
        return jax.tree.map(
            lambda m2: jnp.where(self.count > 0, jnp.sqrt(m2 / jnp.maximum(self.count, 1.0)), 1.0), self.m2
        )


def init_stats(example: PyTree) -> RunningStats:
    """Return empty statistics for values shaped like `example` (no batch axes)."""
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), example)
    return RunningStats(jnp.zeros((), jnp.float32), zeros, zeros)


def init_obs_stats(wanted: bool, spec: EnvSpec, *names: str) -> RunningStats | None:
    """Return empty statistics for the observations of an environment; of a `Seen` its `view` and `world`.

    None where `wanted` is False: `normalize` and `update_stats` take that for none.

    What is discrete becomes one-hot where a network sees nothing else: it has None for statistics where it is all that
    there is, or all of a part called by one of these `names`.

    Raises:
      ValueError: nothing else is left.
    """
    if not wanted:
        return None

    def begin(seen: PyTree) -> PyTree:
        def zeros(path: Any, leaf: ArraySpec | DiscreteSpec) -> Array | None:
            named = isinstance(seen, Mapping) and path[0].key in names
            together = jax.tree.leaves(seen[path[0].key] if named else seen)
            return None if len(together) == 1 and isinstance(leaf, DiscreteSpec) else leaf.zeros()

        return jax.tree.map_with_path(zeros, seen)

    numbers = _numbers(spec.obs)
    zeros = tuple(map(begin, numbers)) if isinstance(spec.obs, Seen) else begin(numbers)
    if not jax.tree.leaves(zeros):
        raise ValueError(
            f"normalize_obs=True: the observations of {spec.name} are discrete and become one-hot; use False."
        )
    return init_stats(zeros)


def _numbers(obs: PyTree) -> PyTree:
    """Return what of an observation is normalised: all of it, but of a `Seen` neither what is legal nor who moves."""
    return (obs.view, obs.world) if isinstance(obs, Seen) else obs


def update_stats(stats: RunningStats | None, batch: PyTree, valid: Array | None = None) -> RunningStats | None:
    """Add a batch (Chan et al. 1979, the parallel update of mean and variance).

    Args:
      stats: so far; None, where nothing is normalised, stays None.
      batch: pytree [T, B, ...].
      valid: [T, B] bool rows to count, or None for all.

    Returns:
      the statistics of everything seen up to now; exact whatever way the stream is cut in batches. What lies more
      than `MEMORY` batches back is forgotten slowly.
    """
    if stats is None:
        return None
    batch = _numbers(batch)
    leading = jax.tree.leaves(batch)[0].shape[:2]
    mask = jnp.ones(leading, jnp.float32) if valid is None else valid.astype(jnp.float32)
    added = jnp.sum(mask)
    count = jnp.minimum(stats.count, float(MEMORY * mask.size))
    kept = jnp.where(stats.count > count, count / jnp.maximum(stats.count, 1.0), 1.0)
    total = jnp.maximum(count + added, 1.0)

    def merge(x: Array, mean: Array | None, m2: Array | None) -> tuple[Array | None, Array | None]:
        if mean is None or m2 is None:
            return None, None
        weight = mask.reshape(leading + (1,) * (x.ndim - 2))
        x = x.astype(jnp.float32)
        batch_mean = jnp.sum(x * weight, axis=(0, 1)) / jnp.maximum(added, 1.0)
        batch_m2 = jnp.sum(jnp.square(x - batch_mean) * weight, axis=(0, 1))
        shift = batch_mean - mean
        new_mean = mean + shift * added / total
        return new_mean, m2 * kept + batch_m2 + jnp.square(shift) * count * added / total

    structure: Any = jax.tree.structure(batch)
    parts = (structure.flatten_up_to(tree) for tree in (batch, stats.mean, stats.m2))
    merged = [merge(*part) for part in zip(*parts, strict=True)]
    means, m2s = ([pair[i] for pair in merged] for i in (0, 1))
    return RunningStats(count + added, structure.unflatten(means), structure.unflatten(m2s))


def normalize(stats: RunningStats | None, x: PyTree, limit: float = 10.0) -> PyTree:
    """Return (x - mean) / `RunningStats.scale`, clipped to +-limit, leaf by leaf; x itself where `stats` is None.

    Leaves with None for statistics stay too. A feature that never changes, whose deviation is rounding noise, gives 0.
    """
    if stats is None:
        return x
    if isinstance(x, Seen):
        view, world = normalize(stats, _numbers(x), limit)
        return x._replace(view=view, world=world)
    normal = lambda x, mean, scale: x if mean is None else jnp.clip((x - mean) / scale, -limit, limit)
    return jax.tree.map(normal, x, stats.mean, stats.scale())


def kept(stats: RunningStats | None, trajectory: Trajectory) -> PyTree:
    """Return what was seen, for the data of a Plan: `normalize` of it, or `Trajectory.kept` where `stats` is None."""
    return trajectory.kept() if stats is None else normalize(stats, trajectory.obs)


def masked_mean(x: Array, valid: Array | None = None, num_valid: Array | None = None) -> Array:
    """Return the mean of `x` over the rows where `valid`, or over all where it is None.

    `num_valid`, of `count_rows`, saves counting them where that was done before.
    """
    if valid is None:
        return jnp.mean(x)
    rows = jnp.maximum(jnp.sum(valid), 1) if num_valid is None else num_valid
    return jnp.sum(jnp.where(valid, x, 0.0)) / rows


def count_rows(valid: Array | None) -> Array | None:
    """Return how many rows are `valid`, 1 where none is; None for None."""
    return None if valid is None else jnp.maximum(jnp.sum(valid), 1)


def masked_means(valid: Array | None, num_valid: Array | None = None, /, **rows: Array) -> dict[str, Array]:
    """Return the `masked_mean` of each of several arrays of one shape; devices sum them together, not each by itself.

    >>> import jax.numpy as jnp
    >>> means = masked_means(None, loss=jnp.array([1.0, 2.0]), entropy=jnp.array([0.0, 0.5]))
    >>> {name: float(mean) for name, mean in means.items()}
    {'loss': 1.5, 'entropy': 0.25}
    """
    counted = list(rows.values()) if valid is None else [jnp.where(valid, x, 0.0) for x in rows.values()]
    stacked = jnp.stack(counted if valid is None or num_valid is not None else [*counted, valid])
    sums = jnp.sum(stacked, axis=tuple(range(1, stacked.ndim)))
    if num_valid is None:
        num_valid = jnp.asarray(stacked[0].size) if valid is None else jnp.maximum(sums[-1], 1)
    return {name: sums[i] / num_valid for i, name in enumerate(rows)}


def count_valid(x: Array, valid: Array | None = None) -> Array | int:
    """Return how many rows of `x` [T, B] are `valid`; all where it is None."""
    return x.size if valid is None else jnp.sum(valid)
