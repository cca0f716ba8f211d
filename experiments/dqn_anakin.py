"""Train DQN under Anakin: rollout, replay and updates in one compiled program on every device.

python experiments/dqn_anakin.py --devices 8
python experiments/dqn_anakin.py --env Catch-bsuite --buffer-capacity 20000 --batch-size 64
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import cli
import presets

from podium.agents import dqn
from podium.placement.program import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(dqn.Config, cli.AnakinFlags):
    """Flags of a DQN run."""

    num_envs: int = 16
    """Environments side by side in each run; the devices must divide it."""
    rollout_length: int = 1
    """Steps of every environment before each learning phase."""


def sizes_in_words(config: dqn.Config, sizes: Sizes) -> Mapping[str, str]:
    """Say what an iteration learns from."""
    inserted = sizes.steps_per_update
    updates = round(config.samples_per_insert * inserted / config.batch_size) or config.num_updates
    learnt = updates * config.batch_size
    rows = config.buffer_capacity // inserted * inserted
    return {
        "learning": f"{updates} gradient steps a rollout, {config.batch_size} transitions each "
        f"({learnt / inserted:.3g} samples per insert), from {config.min_replay_size:,} steps on",
        "replay": f"{rows:,} steps",
        "exploration": f"epsilon {config.epsilon_start:g} to {config.epsilon_end:g} over "
        f"{config.epsilon_decay_steps:,} steps",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, dqn, presets.DQN, sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
