"""Train A2C under Anakin: rollout and update in one compiled program on every device.

python experiments/a2c_anakin.py --devices 8
python experiments/a2c_anakin.py --env podium/Catch --seeds 4
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import cli
import presets

from podium.agents import a2c
from podium.placement.program import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(a2c.Config, cli.AnakinFlags):
    """Flags of an A2C run."""

    rollout_length: int = 5
    """Steps of every environment before each learning phase."""


def sizes_in_words(config: a2c.Config, sizes: Sizes) -> Mapping[str, str]:
    """Say what an update learns from."""
    return {"batch": f"{sizes.steps_per_update:,} steps, one gradient step"}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, a2c, presets.A2C, sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
