"""The checkpoints of one run: saved in the background, verified before anything is loaded, thinned out."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podium.checkpoint.arrays import read_arrays, write_arrays
from podium.checkpoint.errors import CheckpointError, Damaged, summary
from podium.checkpoint.files import DESCRIPTION, MANIFEST, encode_manifest, read_description, remove, verify
from podium.checkpoint.leaves import compare, dtype_and_shape, named_leaves, nest, place, snapshot, under
from podium.files import to_jsonable, write_atomic
from podium.types import PyTree
from podium.upgrades import SCHEMA, regroup, upgrade

PARTIAL = ".partial"
REPLACED = ".replaced" + PARTIAL


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
        names, leaves = named_leaves(state)
        arrays, table = snapshot(names, leaves)
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
        return sorted(step for step, folder in self._folders().items() if (folder / MANIFEST).is_file())

    def best_step(self) -> int | None:
        """Return the step with the highest finite `meta["eval_return"]`, the newest of equals; None without any."""
        best: tuple[float, int] | None = None
        for step in self.steps():
            try:
                value = read_description(self._folder(step))["meta"].get("eval_return")
            except CheckpointError:
                continue  # Damage is reported where it matters: on restore.
            if isinstance(value, (int, float)) and math.isfinite(value):
                best = max(best, (value, step)) if best else (value, step)
        return best[1] if best else None

    def meta(self, step: int) -> dict[str, Any]:
        """Return what was saved beside the state of `step`, unverified; raises CheckpointError if it cannot be read."""
        return dict(read_description(self._folder(step))["meta"])

    def verify(self, step: int) -> None:
        """Check every file of `step` against its manifest.

        Raises:
          CheckpointError: naming the file and what is wrong: missing, cut, flipped, unexpected or unsafe.
        """
        verify(self._folder(step))

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
            except Damaged as error:
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
        description = read_description(self._folder(step))
        table = under(description["leaves"], prefix)
        if not table:
            raise CheckpointError(f"checkpoint {step} holds nothing under {prefix!r}.")
        arrays = self._read_arrays(step, table)
        short = {name[len(prefix) :].lstrip("/"): array for name, array in arrays.items()}
        return nest(short), description["meta"], step

    def _folders(self) -> dict[int, Path]:
        """Return the step folders, complete or not; other names are none of ours.

        A step that was set aside to be replaced stands for itself where a kill came before its successor was in place.
        """
        found: dict[int, Path] = {}
        for folder in self.directory.iterdir() if self.directory.is_dir() else ():
            name = folder.name.removesuffix(REPLACED)
            if name.isascii() and name.isdigit() and name == str(int(name)):
                step = int(name)
                if folder.name == name or step not in found:
                    found[step] = folder
        return found

    def _folder(self, step: int) -> Path:
        return self._folders().get(step, self.directory / str(step))

    def _candidates(self, step: int | None) -> list[int]:
        """Return the steps to try, newest first; say why where there is none."""
        steps = self.steps()
        incomplete = sorted(number for number in self._folders() if number not in steps)
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
            write_arrays(partial, arrays)
            write_atomic(partial / DESCRIPTION, json.dumps(description, indent=1, allow_nan=False).encode())
            write_atomic(partial / MANIFEST, encode_manifest(partial))
            replaced = self.directory / f"{env_steps}{REPLACED}"
            # Set aside rather than removed: `_folders` finds it there until its successor is in place.
            if os.path.lexists(folder):
                os.rename(folder, replaced)
            os.rename(partial, folder)
            remove(replaced)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            steps = self.steps()
            newest = f"the newest complete checkpoint is {steps[-1]}" if steps else "there is no older checkpoint"
            raise CheckpointError(
                f"checkpoint {env_steps} could not be written to {self.directory}: {summary(error)}; {newest}."
            ) from error
        try:
            self._thin(env_steps)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {env_steps} is written, but an older one could not be removed: {summary(error)}."
            ) from error

    def _clean(self) -> None:
        """Remove what a killed save left. At the first save only: a reader must not touch another process's save."""
        if self._cleaned or not self.directory.is_dir():
            return
        for step, folder in self._folders().items():
            if folder.name.endswith(REPLACED) and (folder / MANIFEST).exists():
                os.rename(folder, self.directory / str(step))
        for path in self.directory.iterdir():
            if (
                path.is_dir()
                and not path.is_symlink()
                and (path.name.endswith(PARTIAL) or ".orbax-checkpoint-tmp" in path.name)
            ):
                shutil.rmtree(path)
        for folder in self._folders().values():
            if not (folder / MANIFEST).exists():
                remove(folder)
        self._cleaned = True

    def _thin(self, newest: int) -> None:
        """Remove what is neither among the newest nor the best, and the future of an older step restored."""
        if self._restored is not None:
            for step in self.steps():
                if step > self._restored and step != newest:
                    remove(self.directory / str(step))
            self._restored = None
        steps = self.steps()
        kept = set(steps[-self.keep :])
        best = self.best_step() if self.keep_best else None
        if best is not None:
            kept.add(best)
        for step in steps:
            if step not in kept:
                remove(self.directory / str(step))

    def _load(self, step: int, target: PyTree, prefix: str) -> tuple[PyTree, dict[str, Any]]:
        """Read a verified step into the form of `target`; shapes are compared before any array is read."""
        description = read_description(self._folder(step))
        names, leaves = named_leaves(target, prefix)
        treedef = jax.tree.structure(target)
        stored = under(description["leaves"], prefix)
        upgraded = upgrade(description["schema"], stored, set(names))
        wanted = {name: dtype_and_shape(leaf)[1] for name, leaf in zip(names, leaves, strict=True)}
        regrouped = regroup(upgraded.table, wanted)
        table = regrouped.table
        compare(step, dict(zip(names, leaves, strict=True)), table)
        arrays = regrouped.convert(upgraded.convert(self._read_arrays(step, stored)))
        placed = [place(arrays[name], table[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
        return jax.tree.unflatten(treedef, placed), description["meta"]

    def _read_arrays(self, step: int, table: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
        # In the background thread, because Orbax runs an event loop and a notebook already has one.
        return self._executor.submit(read_arrays, self._folder(step), table).result()
