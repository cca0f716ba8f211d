"""Train TD3 under Anakin: rollout, replay and updates in one compiled program on every device.

python experiments/td3_anakin.py --env Pendulum-v1 --num-envs 1 --num-steps 10000
python experiments/td3_anakin.py --env Pendulum-v1 --preset none --num-envs 128 --updates-per-step 0.0625

It is `podium train --agent td3 --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("td3", "anakin", presets.TD3, defaults={"num_envs": 1})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
