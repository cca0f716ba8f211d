"""Checkpoints: the whole training state on disk through Orbax, hashed, verified before anything is loaded.

One step is one folder, built under another name and renamed when it is whole:

    checkpoints/<env_steps>/arrays/          Orbax (OCDBT): every array of the state
    checkpoints/<env_steps>/checkpoint.json  names, dtypes and shapes of the arrays, and the caller's `meta`
    checkpoints/<env_steps>/manifest.json    size and SHA-256 of every other file; written last

Orbax restores flipped bytes without a word, hence the manifest. Nothing here unpickles, evaluates or imports by name:
a checkpoint from a stranger can hold wrong numbers, but no code.
"""

from podium.checkpoint.errors import CheckpointError
from podium.checkpoint.files import ARRAYS, DESCRIPTION, MANIFEST
from podium.checkpoint.leaves import params_sha256
from podium.checkpoint.store import Checkpoints

__all__ = ["ARRAYS", "DESCRIPTION", "MANIFEST", "CheckpointError", "Checkpoints", "params_sha256"]
