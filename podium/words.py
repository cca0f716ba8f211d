"""A scan whose small arrays travel as one: a rollout's step has dozens, and on a GPU each costs a kernel or a copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.types import Array, PyTree

SMALL = 16
"""Words of a row of one array, above which it travels by itself."""


class Packed(NamedTuple):
    """Arrays [B, ...]: int32 [words, B], the small ones of them (None without any), and the others."""

    words: Array | None
    others: list[Array]


def fold(device: jax.Device) -> Callable[..., Any]:
    """Return how a device repeats the step of a rollout: `scan`, or on a CPU `jax.lax.scan`.

    There a kernel costs nothing, and what joins many arrays takes the compiler long: for PPO in craftax 26 seconds in
    place of 20.
    """
    return jax.lax.scan if device.platform == "cpu" else scan


def scan(step: Callable[[Any, Any], tuple[Any, PyTree]], carry: Any, inputs: PyTree) -> tuple[Any, PyTree]:
    """Do what `jax.lax.scan` does where all that is carried and put out are rows [B, ...]; the numbers are the same.

    Args:
      step: `(carry, one of inputs) -> (carry, outputs)`, [B, ...] all.
      carry: to begin with.
      inputs: [T, ...].

    Returns:
      the last carry, and outputs [T, B, ...].

    Raises:
      TypeError: `step` returns a carry of other shapes or types than it was given.
    """
    shapes: list[PyTree] = []

    def packed(held: Packed, given: Any) -> tuple[Packed, Packed]:
        after, output = step(unpack(held, carry), given)
        _check_same(carry, after)
        shapes[:] = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), output)]
        return pack(after), pack(output)

    end, rows = jax.lax.scan(packed, pack(carry), inputs)
    return unpack(end, carry), unpack(rows, shapes[0])


def pack(tree: PyTree) -> Packed:
    """Return the arrays of a tree, the small ones as words."""
    leaves = jax.tree.leaves(tree)
    words = [_as_words(x) for x in leaves if _width(x)]
    return Packed(jnp.concatenate(words) if words else None, [x for x in leaves if not _width(x)])


def unpack(packed: Packed, like: PyTree) -> Any:
    """Return arrays [..., B, ...] as a tree of rows like `like`, which are [B, ...]."""
    shapes, structure = jax.tree.flatten(like)
    others, found, end = iter(packed.others), [], 0
    for shape in shapes:
        if width := _width(shape):
            assert packed.words is not None
            found.append(_from_words(packed.words[..., end : end + width, :], shape))
            end += width
        else:
            found.append(next(others))
    return jax.tree.unflatten(structure, found)


def _check_same(before: PyTree, after: PyTree) -> None:
    """Raise a TypeError where words would be read as what they are not."""
    given, returned = _types(before), _types(after)
    names = {**given, **returned}
    if differ := [name for name in names if given.get(name) != returned.get(name)]:
        said = [f"{name}: {given.get(name, 'nothing')} became {returned.get(name, 'nothing')}" for name in differ]
        raise TypeError(f"a step must carry on what it is given, of the same shapes and types, but {'; '.join(said)}.")


def _types(tree: PyTree) -> dict[str, str]:
    """Return the type and shape of each array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _width(x: Any) -> int:
    """Return how many words a row of an array is; 0 for one that travels by itself."""
    size = math.prod(x.shape[1:])
    fits = len(x.shape) > 0 and size <= SMALL and x.dtype in (jnp.float32, jnp.int32, jnp.uint32, jnp.bool_)
    return size if fits else 0


def _as_words(x: Array) -> Array:
    """Return [B, ...] as int32 [words, B]."""
    words = x.astype(jnp.int32) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, jnp.int32)
    return words.reshape(x.shape[0], -1).T


def _from_words(words: Array, like: Any) -> Array:
    """Return int32 [..., words, B] as [..., B, ...]."""
    x = jnp.moveaxis(words, -2, -1).reshape(*words.shape[:-2], *like.shape)
    return x != 0 if like.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, like.dtype)
