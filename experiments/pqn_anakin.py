"""Train PQN under Anakin: rollout, lambda-returns and updates in one compiled program on every device.

python experiments/pqn_anakin.py --seeds 8
python experiments/pqn_anakin.py --env Breakout-MinAtar --seeds 5
python experiments/pqn_anakin.py --env podium/RepeatFirst --memory gru --num-minibatches 8

It is `podium train --agent pqn --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("pqn", "anakin", presets.PQN, defaults={"num_envs": 32})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
