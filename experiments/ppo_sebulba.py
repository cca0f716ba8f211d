"""Train PPO under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/ppo_sebulba.py --env Pong-v5 --preset atari-ppo
python experiments/ppo_sebulba.py --env envpool/CartPole-v1 --actor-threads 2 --num-envs 16
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import cli
import ppo_anakin
import presets

from podium.agents import ppo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ppo_anakin.PPOFlags, cli.SebulbaFlags):
    """Flags of a PPO run on host environments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, ppo, presets.PPO_SEBULBA, ppo_anakin.sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
