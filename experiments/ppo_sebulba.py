"""Train PPO under Sebulba: environments on the CPU, acting and learning on devices.

python experiments/ppo_sebulba.py --env Pong-v5 --preset atari-ppo
python experiments/ppo_sebulba.py --env envpool/CartPole-v1 --actor-threads 2 --num-envs 16

It is `podium train --agent ppo --placement sebulba` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script, envs_of_actors

SCRIPT = Script(
    "ppo",
    "sebulba",
    presets.PPO_SEBULBA,
    defaults={"env": "Pong-v5", "num_envs": 8},
    aliases={"num_epochs": "epochs", "num_minibatches": "minibatches", "envs_per_actor": "envs-per-thread"},
    settle=envs_of_actors,
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
