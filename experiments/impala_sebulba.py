"""Train IMPALA under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/impala_sebulba.py --env Pong-v5 --preset atari-impala
python experiments/impala_sebulba.py --env envpool/CartPole-v1 --actor-threads 2 --num-envs 16

It is `podium train --agent impala --placement sebulba` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script, envs_of_actors

SCRIPT = Script(
    "impala",
    "sebulba",
    presets.IMPALA_SEBULBA,
    defaults={"env": "Pong-v5", "num_envs": 8},
    aliases={"envs_per_actor": "envs-per-thread"},
    settle=envs_of_actors,
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
