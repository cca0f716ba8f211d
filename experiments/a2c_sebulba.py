"""Train A2C under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/a2c_sebulba.py --env Pong-v5 --preset atari-a2c
python experiments/a2c_sebulba.py --env envpool/CartPole-v1 --lockstep

It is `podium train --agent a2c --placement sebulba` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script, envs_of_actors

SCRIPT = Script(
    "a2c",
    "sebulba",
    presets.A2C_SEBULBA,
    defaults={"env": "Pong-v5", "num_envs": 8},
    aliases={"envs_per_actor": "envs-per-thread"},
    settle=envs_of_actors,
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
