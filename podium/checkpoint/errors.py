"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message says which file or leaf, and what to do."""


class Damaged(CheckpointError):
    """The files are not those that were saved; an older checkpoint may serve."""


def summary(error: BaseException) -> str:
    """Return one line of an error; Orbax's and TensorStore's run to pages."""
    text = " ".join(str(error).split())
    if "No space left" in text or "ENOSPC" in text:
        return "the disk is full"
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
