"""Train IMPALA under Anakin: rollout and update in one compiled program on every device.

python experiments/impala_anakin.py --devices 8
python experiments/impala_anakin.py --env podium/RepeatFirst --memory lstm
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
class Flags(impala.Config, cli.AnakinFlags):
    """Flags of an IMPALA run."""

    rollout_length: int = 20
    """Steps of every environment before each learning phase."""


def sizes_in_words(config: impala.Config, sizes: Sizes) -> Mapping[str, str]:
    """Say what an update learns from."""
    parts = "" if config.num_minibatches == 1 else f", in {config.num_minibatches} parts"
    return {"batch": f"{sizes.num_envs} sequences of {sizes.rollout_length} steps{parts}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, impala, presets.IMPALA, sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
