"""Train PPO on Atari games that are emulated on the device: console, rollout and update are one compiled program.

python experiments/ppo_atari_anakin.py --env atari/Pong --num-envs 4096
python experiments/ppo_atari_anakin.py --env atari/Mixed --env-options "games=['Pong','Breakout']" --backend pallas
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Literal

import cli
import ppo_anakin
import presets

from podium.agents import ppo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ppo_anakin.Flags):
    """Flags of a PPO run on emulated Atari."""

    env: str = "atari/Pong"
    """Environment, atari/ and a game as ALE writes it; atari/Mixed is several at once."""
    backend: Literal["xla", "pallas"] = "xla"
    """What runs the console: compiled by XLA, anywhere, or one kernel, on a GPU."""

    def options_of_env(self) -> dict[str, Any]:
        """Return --env-options and --backend."""
        return {"backend": self.backend, **super().options_of_env()}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    return cli.main(Flags, ppo, presets.PPO_ATARI, ppo_anakin.sizes_in_words, argv)


if __name__ == "__main__":
    sys.exit(main())
