"""What can be wrong with a checkpoint."""

from __future__ import annotations

from podium.files import one_line


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message says which file or leaf, and what to do."""


class Damaged(CheckpointError):
    """The files are not those that were saved; an older checkpoint may serve."""


def summary(error: BaseException) -> str:
    """Return one line of an error; Orbax's and TensorStore's run to pages."""
    return "the disk is full" if any(said in str(error) for said in ("No space left", "ENOSPC")) else one_line(error)
