"""Checkpoints: the whole training state on disk through Orbax, hashed, verified before anything is loaded.

One step is one folder, built under another name and renamed when it is whole:

    checkpoints/<env_steps>/arrays/          Orbax (OCDBT): every array of the state
    checkpoints/<env_steps>/checkpoint.json  names, dtypes and shapes of the arrays, and the caller's `meta`
    checkpoints/<env_steps>/manifest.json    size and SHA-256 of every other file; written last

Orbax restores flipped bytes without a word, hence the manifest. Nothing here unpickles, evaluates or imports by name:
a checkpoint from a stranger can hold wrong numbers, but no code.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import json
import math
import os
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium import distributed
from podium.files import to_jsonable, write_atomic
from podium.types import PyTree
from podium.upgrades import SCHEMA, regroup, upgrade

MANIFEST = "manifest.json"
DESCRIPTION = "checkpoint.json"
ARRAYS = "arrays"
PARTIAL = ".partial"
# Widths of the uint32 data behind a typed key; also the list of key types that a checkpoint may name.
_KEY_WIDTHS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
_MAX_JSON_BYTES = 64 * 2**20


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message says which file or leaf, and what to do."""


class _Damaged(CheckpointError):
    """The files are not those that were saved; an older checkpoint may serve."""


class Checkpoints:
    """Save, verify, restore and thin out the checkpoints of one run.

    Saving happens in one background thread; the arrays are copied to the host before `save` returns, so the caller
    may donate them to the next compiled chunk at once. One process writes; any number may read.

    Args:
      directory: the folder of the steps; created by the first save.
      keep: how many of the newest steps stay, at least 1.
      keep_best: also keep the step with the highest finite `meta["eval_return"]`, however old.

    Raises:
      ValueError: `keep` is below 1.
    """

    def __init__(self, directory: Path, keep: int = 3, keep_best: bool = True):
        if keep < 1:
            raise ValueError(f"keep={keep} would keep no checkpoint; use 1 or more.")
        self.directory = Path(directory)
        self.keep = keep
        self.keep_best = keep_best
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "podium-checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._restored: int | None = None
        self._cleaned = False

    def save(self, env_steps: int, state: PyTree, meta: Mapping[str, Any] | None = None) -> None:
        """Copy `state` to the host and write it in the background; finish the previous save first.

        A second save at the same `env_steps` replaces the first. Saving after a `restore` of an older step removes
        the steps after it, once the new one is whole: that future is being run again.

        Args:
          env_steps: environment steps behind `state`; the name of the folder.
          state: pytree of arrays, typed PRNG keys and numbers.
          meta: anything JSON can hold; `meta["eval_return"]`, of exactly this state, decides which step is best.

        Raises:
          CheckpointError: the previous save failed.
          ValueError: `env_steps` is negative or before the newest checkpoint, or `state` cannot be saved.
        """
        self.finish()
        env_steps = int(env_steps)
        if env_steps < 0:
            raise ValueError(f"env_steps={env_steps} is negative.")
        later = [step for step in self.steps() if step > env_steps]
        if later and (self._restored is None or env_steps < self._restored):
            raise ValueError(
                f"env_steps={env_steps} is before the newest checkpoint, {later[-1]}, in {self.directory}; "
                "restore one first, or use another folder."
            )
        names, leaves = _named_leaves(state)
        arrays, table = _snapshot(names, leaves)
        description = {"schema": SCHEMA, "env_steps": env_steps, "leaves": table, "meta": to_jsonable(dict(meta or {}))}
        self._pending = self._executor.submit(self._write, env_steps, arrays, description)

    def check(self) -> None:
        """Raise the error of a background save that has failed; never wait.

        Raises:
          CheckpointError: the save failed; the run and the older checkpoints are unharmed.
        """
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the background save.

        Raises:
          CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    wait = finish

    def close(self) -> None:
        """Finish, and end the background thread."""
        try:
            self.finish()
        finally:
            self._executor.shutdown()

    def steps(self) -> list[int]:
        """Return the complete steps, oldest first. Complete says nothing about damage: see `verify`."""
        return sorted(step for step, folder in self._folders() if (folder / MANIFEST).is_file())

    def best_step(self) -> int | None:
        """Return the step with the highest finite `meta["eval_return"]`, the newest of equals; None without any."""
        best: tuple[float, int] | None = None
        for step in self.steps():
            try:
                value = _read_description(self.directory / str(step))["meta"].get("eval_return")
            except CheckpointError:
                continue  # Damage is reported where it matters: on restore.
            if isinstance(value, (int, float)) and math.isfinite(value):
                best = max(best, (value, step)) if best else (value, step)
        return best[1] if best else None

    def meta(self, step: int) -> dict[str, Any]:
        """Return what was saved beside the state of `step`, unverified; raises CheckpointError if it cannot be read."""
        return dict(_read_description(self.directory / str(step))["meta"])

    def verify(self, step: int) -> None:
        """Check every file of `step` against its manifest.

        Raises:
          CheckpointError: naming the file and what is wrong: missing, cut, flipped, unexpected or unsafe.
        """
        folder = self.directory / str(step)
        try:
            self._verify(step, folder, _read_manifest(folder), _list_files(folder))
        except OSError as error:
            raise _Damaged(f"checkpoint {step} cannot be read: {_summary(error)}.") from error

    def restore(
        self, target: PyTree, step: int | None = None, fallback: bool = True, prefix: str = ""
    ) -> tuple[PyTree, dict[str, Any], int]:
        """Return the newest good state in the form of `target`.

        Args:
          target: pytree of `jax.ShapeDtypeStruct` (with or without shardings) or of arrays, in the structure saved.
            Leaves land on the target's shardings, whatever the number of devices was when they were saved; NumPy
            leaves come back as NumPy.
          step: the newest step to consider; None is the newest there is.
          fallback: on damage, warn and take the next older good step; False raises instead.
          prefix: restore only the part of the saved state under this name, such as "agent" or "agent/params".

        Returns:
          `(state, meta, step)`.

        Raises:
          CheckpointError: no good checkpoint, or `target` differs from what was saved; the leaf is named.
        """
        self.finish()
        candidates = self._candidates(step)
        for index, candidate in enumerate(candidates):
            try:
                self.verify(candidate)
                state, meta = self._load(candidate, target, prefix)
            except _Damaged as error:
                older = candidates[index + 1 :]
                if not fallback:
                    raise
                if not older:
                    raise CheckpointError(
                        f"No good checkpoint in {self.directory}. The last one tried: {error}"
                    ) from None
                warnings.warn(f"{error} Trying the older checkpoint {older[0]} instead.", stacklevel=2)
            else:
                self._restored = candidate
                return state, meta, candidate
        raise AssertionError("unreachable: there is at least one candidate")

    def restore_raw(self, step: int | None = None, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any], int]:
        """Return one verified step as nested dicts of NumPy arrays, without a target; no fallback.

        Tuples come back as dicts with keys "0", "1"; typed keys as their uint32 data; empty nodes are absent.

        Returns:
          `(tree, meta, step)`.

        Raises:
          CheckpointError: there is no such step, it is damaged, or holds nothing under `prefix`.
        """
        self.finish()
        step = self._candidates(step)[0]
        self.verify(step)
        description = _read_description(self.directory / str(step))
        table = _under(description["leaves"], prefix)
        if not table:
            raise CheckpointError(f"checkpoint {step} holds nothing under {prefix!r}.")
        arrays = self._read_arrays(step, table)
        short = {name[len(prefix) :].lstrip("/"): array for name, array in arrays.items()}
        return _nest(short), description["meta"], step

    def _verify(self, step: int, folder: Path, expected: dict[str, dict[str, Any]], found: dict[str, int]) -> None:
        """Compare the files found, by name and size, with the manifest, then hash them."""
        found.pop(MANIFEST, None)
        for name, entry in expected.items():
            if name not in found:
                raise _Damaged(f"checkpoint {step}: {name} is missing.")
            if found[name] != entry["size"]:
                raise _Damaged(f"checkpoint {step}: {name} has {found[name]} bytes, not the {entry['size']} saved.")
            if _sha256(folder / name) != entry["sha256"]:
                raise _Damaged(f"checkpoint {step}: {name} was changed after it was saved (its SHA-256 differs).")
        for name in found:
            if name not in expected:
                raise _Damaged(f"checkpoint {step}: {name} is not in the manifest; podium did not write it.")

    def _folders(self) -> Iterator[tuple[int, Path]]:
        """Yield the step folders, complete or not; other names are none of ours."""
        if not self.directory.is_dir():
            return
        for folder in self.directory.iterdir():
            if folder.name.isascii() and folder.name.isdigit() and folder.name == str(int(folder.name)):
                yield int(folder.name), folder

    def _candidates(self, step: int | None) -> list[int]:
        """Return the steps to try, newest first; say why where there is none."""
        steps = self.steps()
        incomplete = sorted(number for number, _ in self._folders() if number not in steps)
        if step is None and incomplete and (not steps or incomplete[-1] > steps[-1]):
            warnings.warn(
                f"checkpoint {incomplete[-1]} has no {MANIFEST}, so it is not complete; ignored.", stacklevel=3
            )
        if not steps:
            raise CheckpointError(f"No complete checkpoint in {self.directory}.")
        if step is not None and step not in steps:
            raise CheckpointError(f"step={step} is no complete checkpoint in {self.directory}; there are {steps}.")
        return [number for number in reversed(steps) if step is None or number <= step]

    def _write(self, env_steps: int, arrays: dict[str, np.ndarray], description: dict[str, Any]) -> None:
        """Write one step, rename it into place, then thin out; runs in the background thread."""
        partial = self.directory / f"{env_steps}{PARTIAL}"
        folder = self.directory / str(env_steps)
        try:
            self._clean()
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if arrays:
                _checkpointer().save((partial / ARRAYS).absolute(), _nest(arrays))
            write_atomic(partial / DESCRIPTION, json.dumps(description, indent=1, allow_nan=False).encode())
            write_atomic(partial / MANIFEST, _encode_manifest(partial))
            _remove(folder)
            os.rename(partial, folder)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            steps = self.steps()
            newest = f"the newest complete checkpoint is {steps[-1]}" if steps else "there is no older checkpoint"
            raise CheckpointError(
                f"checkpoint {env_steps} could not be written to {self.directory}: {_summary(error)}; {newest}."
            ) from error
        try:
            self._thin(env_steps)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {env_steps} is written, but an older one could not be removed: {_summary(error)}."
            ) from error

    def _clean(self) -> None:
        """Remove what a killed save left. At the first save only: a reader must not touch another process's save."""
        if self._cleaned or not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if (
                path.is_dir()
                and not path.is_symlink()
                and (path.name.endswith(PARTIAL) or ".orbax-checkpoint-tmp" in path.name)
            ):
                shutil.rmtree(path)
        for _, folder in self._folders():
            if not (folder / MANIFEST).exists():
                _remove(folder)
        self._cleaned = True

    def _thin(self, newest: int) -> None:
        """Remove what is neither among the newest nor the best, and the future of an older step restored."""
        if self._restored is not None:
            for step in self.steps():
                if step > self._restored and step != newest:
                    _remove(self.directory / str(step))
            self._restored = None
        steps = self.steps()
        kept = set(steps[-self.keep :])
        best = self.best_step() if self.keep_best else None
        if best is not None:
            kept.add(best)
        for step in steps:
            if step not in kept:
                _remove(self.directory / str(step))

    def _load(self, step: int, target: PyTree, prefix: str) -> tuple[PyTree, dict[str, Any]]:
        """Read a verified step into the form of `target`; shapes are compared before any array is read."""
        description = _read_description(self.directory / str(step))
        names, leaves = _named_leaves(target, prefix)
        treedef = jax.tree.structure(target)
        stored = _under(description["leaves"], prefix)
        upgraded = upgrade(description["schema"], stored, set(names))
        wanted = {name: _dtype_and_shape(leaf)[1] for name, leaf in zip(names, leaves, strict=True)}
        regrouped = regroup(upgraded.table, wanted)
        table = regrouped.table
        _compare(step, dict(zip(names, leaves, strict=True)), table)
        arrays = regrouped.convert(upgraded.convert(self._read_arrays(step, stored)))
        placed = [_place(arrays[name], table[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
        return jax.tree.unflatten(treedef, placed), description["meta"]

    def _read_arrays(self, step: int, table: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
        """Read the leaves of `table` as NumPy; refuse stored shapes that differ from the table before reading."""
        stored = {name: _stored_shape(entry) for name, entry in table.items()}
        sizeless = {
            name: np.zeros(shape, np.dtype(table[name]["dtype"])) for name, shape in stored.items() if 0 in shape
        }
        wanted = {name: shape for name, shape in stored.items() if name not in sizeless}
        path = (self.directory / str(step) / ARRAYS).absolute()
        try:
            # In the background thread, because Orbax runs an event loop and a notebook already has one.
            arrays = self._executor.submit(_read_orbax, path, wanted).result() if wanted else {}
        except _Damaged as error:
            raise _Damaged(f"checkpoint {step}: {error}") from None
        except Exception as error:
            raise _Damaged(f"checkpoint {step}: {ARRAYS} cannot be read: {_summary(error)}.") from error
        return arrays | sizeless


def params_sha256(params: PyTree) -> str:
    """Hash a pytree of arrays: names, dtypes, shapes and bytes, in the order of the names.

    The number of devices and the sharding do not matter; a change of one bit does. Every leaf enters as
    `name NUL dtype NUL shape NUL bytes`.

    >>> params_sha256({"w": np.zeros(2)}) == params_sha256({"w": jnp.zeros(2, float)})
    False
    """
    digest = hashlib.sha256()
    names, leaves = _named_leaves(params)
    for name, leaf in sorted(zip(names, leaves, strict=True), key=lambda pair: pair[0]):
        dtype, shape = _dtype_and_shape(leaf)
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(np.ascontiguousarray(_to_host(leaf)).tobytes())
    return digest.hexdigest()


def _named_leaves(tree: PyTree, prefix: str = "") -> tuple[list[str], list[Any]]:
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


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _dtype_and_shape(leaf: Any) -> tuple[str, tuple[int, ...]]:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return str(leaf.dtype), tuple(leaf.shape)


def _to_host(leaf: Any) -> np.ndarray:
    """Return an array that shares no memory with `leaf`; on a CPU `np.asarray` is a view of the device's memory."""
    if isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError("A state spread over several processes cannot be saved; gather it to one first.")
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        on_cpu = all(device.platform == "cpu" for device in data.devices())
        return np.array(data) if on_cpu else np.asarray(data)
    return np.array(leaf)


def _snapshot(names: Sequence[str], leaves: Sequence[Any]) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Copy the leaves to the host and describe them; Orbax cannot store arrays of size 0, their description can."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not _is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    arrays, table = {}, {}
    for name, leaf in zip(names, leaves, strict=True):
        dtype, shape = _dtype_and_shape(leaf)
        table[name] = {"dtype": dtype, "shape": list(shape)}
        if _is_key(leaf):
            table[name]["key"] = str(jax.random.key_impl(leaf))
            if table[name]["key"] not in _KEY_WIDTHS:
                raise ValueError(f"{name} is a key of type {table[name]['key']}; podium saves {sorted(_KEY_WIDTHS)}.")
        array = _to_host(leaf)
        if array.dtype.kind in "OUSMm":
            raise ValueError(f"{name} is no array of numbers ({type(leaf).__name__}); a state holds arrays only.")
        if array.size:
            arrays[name] = array
    return arrays, table


def _nest(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
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


def _under(table: dict[str, dict[str, Any]], prefix: str) -> dict[str, dict[str, Any]]:
    if not prefix:
        return table
    return {name: entry for name, entry in table.items() if name == prefix or name.startswith(prefix + "/")}


def _compare(step: int, target: dict[str, Any], saved: dict[str, dict[str, Any]]) -> None:
    """Raise one short sentence that names the first differences between a target and what was saved."""
    problems = []
    for name in sorted({*target, *saved}):
        if name not in saved:
            problems.append(f"{name} is expected but was not saved")
        elif name not in target:
            problems.append(f"{name} was saved but is not expected")
        else:
            dtype, shape = _dtype_and_shape(target[name])
            here, there = (dtype, list(shape)), (saved[name]["dtype"], saved[name]["shape"])
            if here != there:
                problems.append(f"{name} is {there[0]}{there[1]} there and {here[0]}{here[1]} here")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"checkpoint {step} does not fit this agent and environment: {'; '.join(problems[:3])}{more}. "
            "Use the configuration it was saved with."
        )


def _place(array: np.ndarray, entry: dict[str, Any], target: Any) -> Any:
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


def _stored_shape(entry: dict[str, Any]) -> tuple[int, ...]:
    shape = tuple(entry["shape"])
    return (*shape, _KEY_WIDTHS[entry["key"]]) if "key" in entry else shape


def _checkpointer() -> Any:
    """Return Orbax's plain checkpointer; imported here because it takes half a second."""
    import orbax.checkpoint as ocp

    # Each process by itself: one writes what `podium.distributed.whole` collected, any may read.
    alone = ocp.options.MultiprocessingOptions(jax.process_index(), {jax.process_index()})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _read_orbax(path: Path, wanted: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read the named leaves, after comparing the shapes that Orbax has on record with those wanted."""
    import orbax.checkpoint as ocp

    checkpointer = _checkpointer()
    record: Any = checkpointer.metadata(path)
    pairs, _ = jax.tree_util.tree_flatten_with_path(record.item_metadata.tree)
    recorded = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf.shape for keys, leaf in pairs}
    for name, shape in wanted.items():
        if recorded.get(name) is None:
            raise _Damaged(f"{name} is described but not stored.")
        if tuple(recorded[name]) != shape:
            raise _Damaged(f"{name} is described as {list(shape)} but stored as {list(recorded[name])}.")
    item = _nest({name: np.empty((), bool) for name in wanted})
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    restored = checkpointer.restore(
        path, ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
    )
    pairs, _ = jax.tree_util.tree_flatten_with_path(restored)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in pairs}


def _read_description(folder: Path) -> dict[str, Any]:
    """Read and check `checkpoint.json`."""
    value = _read_json(folder, DESCRIPTION)
    schema = value.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise CheckpointError(f"checkpoint {folder.name} has schema={schema!r}; this podium reads 1 to {SCHEMA}.")
    leaves, meta = value.get("leaves"), value.get("meta")
    if not isinstance(leaves, dict) or not isinstance(meta, dict) or not all(map(_is_entry, leaves.values())):
        raise _Damaged(f"checkpoint {folder.name}: {DESCRIPTION} is not what podium writes.")
    return value


def _is_entry(entry: Any) -> bool:
    """Return whether a leaf's description has a dtype, a shape and at most a known key type."""
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("dtype"), str)
        or entry.get("key", "rbg") not in _KEY_WIDTHS
    ):
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Read `manifest.json`; every byte of it counts, and every path in it must stay inside the folder."""
    value = _read_json(folder, MANIFEST)
    files = value.get("files")
    if not isinstance(files, dict) or (folder / MANIFEST).read_bytes() != _encode(files):
        raise _Damaged(f"checkpoint {folder.name}: {MANIFEST} was changed after it was saved.")
    for name, entry in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or str(path) != name:
            raise _Damaged(f"checkpoint {folder.name}: {MANIFEST} names the unsafe path {name!r}.")
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise _Damaged(f"checkpoint {folder.name}: {MANIFEST} is not what podium writes.")
    return files


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if folder.is_symlink() or path.is_symlink():
        raise _Damaged(f"checkpoint {folder.name}: {name} is, or lies behind, a symbolic link.")
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise _Damaged(f"checkpoint {folder.name}: {name} is too large to be podium's.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _Damaged(f"checkpoint {folder.name}: {name} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _Damaged(f"checkpoint {folder.name}: {name} cannot be read ({type(error).__name__}).") from None
    if not isinstance(value, dict):
        raise _Damaged(f"checkpoint {folder.name}: {name} is not what podium writes.")
    return value


def _encode_manifest(folder: Path) -> bytes:
    """Hash every file in `folder`."""
    return _encode(
        {name: {"size": size, "sha256": _sha256(folder / name)} for name, size in _list_files(folder).items()}
    )


def _encode(files: Mapping[str, Any]) -> bytes:
    """Write a manifest in its one form, with a hash of its own, so that a flipped bit in it shows as well."""
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"files": files, "sha256": own}, sort_keys=True, indent=1) + "\n").encode()


def _list_files(folder: Path) -> dict[str, int]:
    """Return the size of every file under `folder` by its relative name; refuse links and devices."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found[relative] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise _Damaged(f"checkpoint {folder.name}: {relative} is a link or a device, not a file.")
    return dict(sorted(found.items()))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    """Remove a step: the manifest first, so that a kill half-way leaves an incomplete step and not a damaged one."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _summary(error: BaseException) -> str:
    """Return one line of an error; Orbax's and TensorStore's run to pages."""
    text = " ".join(str(error).split())
    if "No space left" in text or "ENOSPC" in text:
        return "the disk is full"
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
