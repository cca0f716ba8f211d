"""Train PPO under Anakin: rollout and update in one compiled program on every device.

python experiments/ppo_anakin.py --devices 8
python experiments/ppo_anakin.py --env Breakout-MinAtar --seeds 4

It is `podium train --agent ppo --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("ppo", "anakin", presets.PPO, aliases={"num_epochs": "epochs", "num_minibatches": "minibatches"})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
