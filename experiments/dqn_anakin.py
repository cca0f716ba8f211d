"""Train DQN under Anakin: rollout, replay and updates in one compiled program on every device.

python experiments/dqn_anakin.py --devices 8
python experiments/dqn_anakin.py --env Catch-bsuite --buffer-capacity 20000 --batch-size 64

It is `podium train --agent dqn --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("dqn", "anakin", presets.DQN, defaults={"num_envs": 16})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
