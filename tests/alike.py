"""What it means here that two trees are alike: the same leaves, whose numbers differ by no more than rounding does."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5, relative: float | None = None) -> None:
    """Assert that every number is as expected, but for `tolerance` and `relative` of itself (None: `tolerance`)."""
    for path, x, y in _pairs(found, expected):
        np.testing.assert_allclose(x, y, tolerance if relative is None else relative, tolerance, err_msg=path)


def assert_close_in_scale(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Assert that numbers differ by no more than `tolerance` of the largest in their array (or of a thousandth)."""
    for path, x, y in _pairs(found, expected):
        np.testing.assert_allclose(x, y, 0, tolerance * (np.abs(y).max() + 1e-3), err_msg=path)


def _pairs(found: Any, expected: Any) -> list[tuple[str, Any, Any]]:
    """Return the leaves of both beside each other, and where they lie."""
    ours, theirs = _by_path(found), _by_path(expected)
    assert list(ours) == list(theirs)
    return [(path, numbers, theirs[path]) for path, numbers in ours.items()]


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): _numbers(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def _numbers(leaf: Any) -> Any:
    key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)
