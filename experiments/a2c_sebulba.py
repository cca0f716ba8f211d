"""Train A2C under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/a2c_sebulba.py --env Pong-v5 --preset atari-a2c
python experiments/a2c_sebulba.py --env envpool/CartPole-v1 --lockstep
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import a2c_anakin
import cli
import presets

from podium.agents import a2c


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(a2c.Config, cli.SebulbaFlags):
    """Flags of an A2C run on host environments."""

    rollout_length: int = 5
    """Steps of every environment before each learning phase."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, a2c, presets.A2C_SEBULBA, a2c_anakin.sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
