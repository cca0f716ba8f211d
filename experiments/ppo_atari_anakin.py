"""Train PPO on Atari games that are emulated on the device: console, rollout and update are one compiled program.

python experiments/ppo_atari_anakin.py --env atari/Pong --num-envs 4096
python experiments/ppo_atari_anakin.py --env atari/Mixed --env-options "games=['Pong','Breakout']" --backend pallas
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

from podium import presets
from podium.commands.scripts import Script


@dataclasses.dataclass(frozen=True, kw_only=True)
class Console:
    """Options of the environment that have flags of their own here."""

    backend: Literal["xla", "pallas"] | None = None
    """What runs the console: compiled by XLA, anywhere, or one kernel, on a GPU; None: that on a GPU."""


SCRIPT = Script(
    "ppo",
    "anakin",
    presets.PPO_ATARI,
    defaults={"env": "atari/Pong"},
    aliases={"num_epochs": "epochs", "num_minibatches": "minibatches"},
    env_flags=Console,
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
