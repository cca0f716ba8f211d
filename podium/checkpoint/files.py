"""The files of one step, and whether they are those that were saved: a description, and a manifest that hashes all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from podium.checkpoint.errors import CheckpointError, Damaged, summary
from podium.checkpoint.leaves import is_entry
from podium.upgrades import SCHEMA

MANIFEST = "manifest.json"
DESCRIPTION = "checkpoint.json"
ARRAYS = "arrays"
_MAX_JSON_BYTES = 64 * 2**20


def verify(folder: Path) -> None:
    """Check every file of a step against its manifest: its name, its size, then its hash.

    Raises:
      CheckpointError: naming the file and what is wrong: missing, cut, flipped, unexpected or unsafe.
    """
    step = folder.name
    try:
        expected, found = _read_manifest(folder), _list_files(folder)
        found.pop(MANIFEST, None)
        for name, entry in expected.items():
            if name not in found:
                raise Damaged(f"checkpoint {step}: {name} is missing.")
            if found[name] != entry["size"]:
                raise Damaged(f"checkpoint {step}: {name} has {found[name]} bytes, not the {entry['size']} saved.")
            if _sha256(folder / name) != entry["sha256"]:
                raise Damaged(f"checkpoint {step}: {name} was changed after it was saved (its SHA-256 differs).")
    except OSError as error:
        raise Damaged(f"checkpoint {step} cannot be read: {summary(error)}.") from error
    for name in found:
        if name not in expected:
            raise Damaged(f"checkpoint {step}: {name} is not in the manifest; podium did not write it.")


def read_description(folder: Path) -> dict[str, Any]:
    """Read and check `checkpoint.json`."""
    value = _read_json(folder, DESCRIPTION)
    schema = value.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise CheckpointError(f"checkpoint {folder.name} has schema={schema!r}; this podium reads 1 to {SCHEMA}.")
    leaves, meta = value.get("leaves"), value.get("meta")
    if not isinstance(leaves, dict) or not isinstance(meta, dict) or not all(map(is_entry, leaves.values())):
        raise Damaged(f"checkpoint {folder.name}: {DESCRIPTION} is not what podium writes.")
    return value


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Read `manifest.json`; every byte of it counts, and every path in it must stay inside the folder."""
    value = _read_json(folder, MANIFEST)
    files = value.get("files")
    if not isinstance(files, dict) or (folder / MANIFEST).read_bytes() != encode(files):
        raise Damaged(f"checkpoint {folder.name}: {MANIFEST} was changed after it was saved.")
    for name, entry in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or str(path) != name:
            raise Damaged(f"checkpoint {folder.name}: {MANIFEST} names the unsafe path {name!r}.")
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise Damaged(f"checkpoint {folder.name}: {MANIFEST} is not what podium writes.")
    return files


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if folder.is_symlink() or path.is_symlink():
        raise Damaged(f"checkpoint {folder.name}: {name} is, or lies behind, a symbolic link.")
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise Damaged(f"checkpoint {folder.name}: {name} is too large to be podium's.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"checkpoint {folder.name}: {name} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise Damaged(f"checkpoint {folder.name}: {name} cannot be read ({type(error).__name__}).") from None
    if not isinstance(value, dict):
        raise Damaged(f"checkpoint {folder.name}: {name} is not what podium writes.")
    return value


def encode_manifest(folder: Path) -> bytes:
    """Hash every file in `folder`."""
    return encode(
        {name: {"size": size, "sha256": _sha256(folder / name)} for name, size in _list_files(folder).items()}
    )


def encode(files: Mapping[str, Any]) -> bytes:
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
                raise Damaged(f"checkpoint {folder.name}: {relative} is a link or a device, not a file.")
    return dict(sorted(found.items()))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(folder: Path) -> None:
    """Remove a step: the manifest first, so that a kill half-way leaves an incomplete step and not a damaged one."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
