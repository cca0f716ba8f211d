"""The leaves of a state: their names, what is recorded of them, and how they become arrays on the host and back."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium import distributed
from podium.checkpoint.errors import CheckpointError
from podium.types import PyTree

KEY_WIDTHS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""Widths of the uint32 data behind a typed key; also the list of key types that a checkpoint may name."""


def params_sha256(params: PyTree) -> str:
    """Hash a pytree of arrays: names, dtypes, shapes and bytes, in the order of the names.

    The number of devices and the sharding do not matter; a change of one bit does. Every leaf enters as
    `name NUL dtype NUL shape NUL bytes`.

    >>> params_sha256({"w": np.zeros(2)}) == params_sha256({"w": jnp.zeros(2, float)})
    False
    """
    digest = hashlib.sha256()
    names, leaves = named_leaves(params)
    for name, leaf in sorted(zip(names, leaves, strict=True), key=lambda pair: pair[0]):
        dtype, shape = dtype_and_shape(leaf)
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(np.ascontiguousarray(to_host(leaf)).tobytes())
    return digest.hexdigest()


def named_leaves(tree: PyTree, prefix: str = "") -> tuple[list[str], list[Any]]:
    """Return the leaves and their names, such as `agent/params/Dense_0/kernel`; a name must be unique."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [
        "/".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="/")))) for path, _ in pairs
    ]
    names = [name or "value" for name in names]
    # Orbax joins names with dots, so "a.b" and "a/b" would share a file.
    counts = collections.Counter(name.replace("/", ".") for name in names)
    for name in names:
        if counts[name.replace("/", ".")] > 1:
            raise ValueError(f"Two leaves of the state share the name {name!r}; rename one.")
    return names, [leaf for _, leaf in pairs]


def dtype_and_shape(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Return what a leaf is, array or number."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return str(leaf.dtype), tuple(leaf.shape)


def snapshot(names: Sequence[str], leaves: Sequence[Any]) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Copy the leaves to the host and describe them; Orbax cannot store arrays of size 0, their description can."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not _is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    arrays, table = {}, {}
    for name, leaf in zip(names, leaves, strict=True):
        dtype, shape = dtype_and_shape(leaf)
        table[name] = {"dtype": dtype, "shape": list(shape)}
        if _is_key(leaf):
            table[name]["key"] = str(jax.random.key_impl(leaf))
            if table[name]["key"] not in KEY_WIDTHS:
                raise ValueError(f"{name} is a key of type {table[name]['key']}; podium saves {sorted(KEY_WIDTHS)}.")
        array = to_host(leaf)
        if array.dtype.kind in "OUSMm":
            raise ValueError(f"{name} is no array of numbers ({type(leaf).__name__}); a state holds arrays only.")
        if array.size:
            arrays[name] = array
    return arrays, table


def nest(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Turn `{"a/b": x}` into `{"a": {"b": x}}`."""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"Two leaves of the state share the name {name!r}; rename one.")
        if last in node:
            raise ValueError(f"Two leaves of the state share the name {name!r}; rename one.")
        node[last] = array
    return tree


def under(table: dict[str, dict[str, Any]], prefix: str) -> dict[str, dict[str, Any]]:
    """Return the part of a table that lies under a name; all of it for ""."""
    if not prefix:
        return table
    return {name: entry for name, entry in table.items() if name == prefix or name.startswith(prefix + "/")}


def is_entry(entry: Any) -> bool:
    """Return whether a leaf's description has a dtype, a shape and at most a known key type."""
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("dtype"), str)
        or entry.get("key", "rbg") not in KEY_WIDTHS
    ):
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def compare(step: int, target: dict[str, Any], saved: dict[str, dict[str, Any]]) -> None:
    """Raise one short sentence that names the first differences between a target and what was saved."""
    problems = []
    for name in sorted({*target, *saved}):
        if name not in saved:
            problems.append(f"{name} is expected but was not saved")
        elif name not in target:
            problems.append(f"{name} was saved but is not expected")
        else:
            dtype, shape = dtype_and_shape(target[name])
            here, there = (dtype, list(shape)), (saved[name]["dtype"], saved[name]["shape"])
            if here != there:
                problems.append(f"{name} is {there[0]}{there[1]} there and {here[0]}{here[1]} here")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"checkpoint {step} does not fit this agent and environment: {'; '.join(problems[:3])}{more}. "
            "Use the configuration it was saved with."
        )


def place(array: np.ndarray, entry: dict[str, Any], target: Any) -> Any:
    """Put a restored array where `target` lives, with its dtype, weak type and sharding."""
    if isinstance(target, (np.ndarray, np.generic)):
        return array
    if isinstance(target, (bool, int, float, complex)):
        return type(target)(array.item())
    sharding = getattr(target, "sharding", None)
    if isinstance(target, jax.Array) and not target.committed:
        sharding = None  # A committed copy would refuse to meet arrays on a mesh.
    if "key" in entry:
        value: Any = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["key"])
    elif getattr(target, "weak_type", False):
        # A weak type takes part in promotion, so losing it would change the program; `set` keeps the operand's.
        weak = jnp.broadcast_to(jnp.asarray(np.zeros((), array.dtype).item()), array.shape)
        value = weak.at[...].set(array)
    else:
        value = array
    return jnp.asarray(value) if sharding is None else distributed.put(value, sharding)


def stored_shape(entry: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape on disk; of a typed key that of its data."""
    shape = tuple(entry["shape"])
    return (*shape, KEY_WIDTHS[entry["key"]]) if "key" in entry else shape


def to_host(leaf: Any) -> np.ndarray:
    """Return an array that shares no memory with `leaf`; on a CPU `np.asarray` is a view of the device's memory."""
    if isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError("A state spread over several processes cannot be saved; gather it to one first.")
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        on_cpu = all(device.platform == "cpu" for device in data.devices())
        return np.array(data) if on_cpu else np.asarray(data)
    return np.array(leaf)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
