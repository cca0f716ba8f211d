"""Train IMPALA under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/impala_sebulba.py --env Pong-v5 --preset atari-impala
python experiments/impala_sebulba.py --env envpool/CartPole-v1 --actor-threads 2 --num-envs 16
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import cli
import impala_anakin
import presets

from podium.agents import impala


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(impala.Config, cli.SebulbaFlags):
    """Flags of an IMPALA run on host environments."""

    rollout_length: int = 20
    """Steps of every environment before each learning phase."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, impala, presets.IMPALA_SEBULBA, impala_anakin.sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
