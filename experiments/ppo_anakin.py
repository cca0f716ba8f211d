"""Train PPO under Anakin: rollout and update in one compiled program on every device.

python experiments/ppo_anakin.py --devices 8
python experiments/ppo_anakin.py --env Breakout-MinAtar --seeds 4
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import cli
import presets
import tyro

from podium.agents import ppo
from podium.placement.program import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOFlags(ppo.Config):
    """Hyperparameters of PPO, the usual names beside podium's."""

    num_epochs: Annotated[int, tyro.conf.arg(aliases=("--epochs",))] = ppo.Config.num_epochs
    """Passes over each rollout."""
    num_minibatches: Annotated[int, tyro.conf.arg(aliases=("--minibatches",))] = ppo.Config.num_minibatches
    """Parts of one pass, a gradient step each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(PPOFlags, cli.AnakinFlags):
    """Flags of a PPO run."""


def sizes_in_words(config: ppo.Config, sizes: Sizes) -> Mapping[str, str]:
    """Say what an update learns from."""
    if config.memory == "none":
        minibatch = f"{sizes.steps_per_update // config.num_minibatches:,} steps"
    else:
        minibatch = f"{sizes.num_envs // config.num_minibatches} sequences of {sizes.rollout_length} steps"
    return {
        "batch": f"{sizes.steps_per_update:,} steps",
        "minibatch": f"{minibatch}, {config.num_minibatches} a pass, {config.num_epochs} passes",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, ppo, presets.PPO, sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
