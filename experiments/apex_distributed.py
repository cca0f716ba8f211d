"""Train Ape-X (Horgan et al. 2018): workers that each explore in their own way, a prioritised replay apart, a learner.

python experiments/apex_distributed.py --env podium/Catch
python experiments/apex_distributed.py --env Pong-v5 --preset atari-apex --workers 8
python experiments/apex_distributed.py --env podium/Catch --engine ray --replay-engine ray

It is `podium train --agent apex --placement distributed_actors --replay-apart` with defaults of its own, which `--help`
shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script(
    "apex",
    "distributed_actors",
    presets.APEX,
    defaults={"num_envs": 16, "rollout_length": 4, "replay_apart": True},
    aliases={"actor_devices": "worker-devices", "actor_timeout": "worker-timeout"},
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
