"""Arrays on disk, by Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podium.checkpoint.errors import Damaged, summary
from podium.checkpoint.files import ARRAYS
from podium.checkpoint.leaves import nest, stored_shape


def checkpointer() -> Any:
    """Return Orbax's plain checkpointer; imported here because it takes half a second."""
    import orbax.checkpoint as ocp

    # Each process by itself: one writes what `podium.distributed.whole` collected, any may read.
    alone = ocp.options.MultiprocessingOptions(jax.process_index(), {jax.process_index()})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a step; they have names, and none is empty."""
    if arrays:
        checkpointer().save((folder / ARRAYS).absolute(), nest(arrays))


def read_arrays(folder: Path, table: Mapping[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Read the leaves of `table`; refuse stored shapes that differ from the table before reading.

    To be called where no event loop runs, for Orbax runs one.

    Raises:
      CheckpointError: they cannot be read, or are not as described.
    """
    stored = {name: stored_shape(entry) for name, entry in table.items()}
    empty = {name: np.zeros(shape, np.dtype(table[name]["dtype"])) for name, shape in stored.items() if 0 in shape}
    wanted = {name: shape for name, shape in stored.items() if name not in empty}
    try:
        return _restored((folder / ARRAYS).absolute(), wanted) | empty if wanted else empty
    except Damaged as error:
        raise Damaged(f"checkpoint {folder.name}: {error}") from None
    except Exception as error:
        raise Damaged(f"checkpoint {folder.name}: {ARRAYS} cannot be read: {summary(error)}.") from error


def _restored(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read the named leaves, after comparing the shapes that Orbax has on record with those wanted."""
    import orbax.checkpoint as ocp

    orbax = checkpointer()
    record: Any = orbax.metadata(path)
    recorded = {name: leaf.shape for name, leaf in _flat(record.item_metadata.tree).items()}
    for name, shape in wanted.items():
        if recorded.get(name) is None:
            raise Damaged(f"{name} is described but not stored.")
        if tuple(recorded[name]) != shape:
            raise Damaged(f"{name} is described as {list(shape)} but stored as {list(recorded[name])}.")
    item = nest({name: np.empty((), bool) for name in wanted})
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    return _flat(orbax.restore(path, ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)))


def _flat(tree: Any) -> dict[str, Any]:
    """Undo `nest`."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in pairs}
