"""What a preset is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Preset:
    """Values under the flags of a run.

    Attributes:
      env: name of the environment they are for.
      source: where the values come from; a sentence.
      values: of flags, by field name.
      tuned: what was changed here and by what measure; empty where nothing was.
      usual: whether it lies under the flags wherever its environment is trained in; else only where it is named.
    """

    env: str
    source: str
    values: Mapping[str, Any]
    tuned: str = ""
    usual: bool = True

    @property
    def tuned_words(self) -> str:
        """Say whether the values were tuned here."""
        return f"Tuned here: {self.tuned}" if self.tuned else "Not tuned here."
