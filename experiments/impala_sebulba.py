"""Train IMPALA under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/impala_sebulba.py --env Pong-v5 --preset atari-impala
python experiments/impala_sebulba.py --env envpool/CartPole-v1 --actor-threads 2 --num-envs 16
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import cli
import presets

from podium.agents import impala
from podium.placement.program import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(impala.Config, cli.SebulbaFlags):
    """Flags of an IMPALA run on host environments."""

    env: str = "Pong-v5"
    """Environment, by a name of podium.envs.names()."""
    num_envs: int = 8
    """Environments side by side; the actor threads must divide it."""
    rollout_length: int = 20
    """Steps of every environment before each learning phase."""


def sizes_in_words(config: impala.Config, sizes: Sizes) -> Mapping[str, str]:
    """Say what an update learns from."""
    return {
        "learning rate": f"{config.learning_rate:g}",
        "batch": f"{sizes.num_envs} sequences of {sizes.rollout_length} steps",
        "memory": config.memory if config.memory == "none" else f"{config.memory}, {config.memory_size} units",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, impala, presets.IMPALA_SEBULBA, sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
