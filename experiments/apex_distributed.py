"""Train Ape-X (Horgan et al. 2018): workers that each explore in their own way, a prioritised replay apart, a learner.

python experiments/apex_distributed.py --env podium/Catch
python experiments/apex_distributed.py --env Pong-v5 --preset atari-apex --workers 8
python experiments/apex_distributed.py --env podium/Catch --engine ray --replay-engine ray
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import cli
import dqn_anakin
import presets

from podium.agents import apex
from podium.placement.program import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(apex.Config, cli.DistributedActorsFlags):
    """Flags of an Ape-X run."""

    rollout_length: int = 4
    """Steps of every environment that a worker sends at once."""


def sizes_in_words(config: apex.Config, sizes: Sizes) -> Mapping[str, str]:
    """Say what an iteration learns from, and how actors explore."""
    words = dict(dqn_anakin.sizes_in_words(config, sizes))
    least = config.epsilon_start ** (1 + config.epsilon_spread)
    words["exploration"] = f"epsilon {config.epsilon_start:g} to {least:.2g} over {config.num_actors} actors"
    words["replay"] += f", drawn by |TD error| to the power of {config.priority_exponent:g}"
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, apex, presets.APEX, sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
