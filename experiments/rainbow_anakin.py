"""Train Rainbow under Anakin: rollout, prioritised replay and updates in one compiled program on every device.

python experiments/rainbow_anakin.py --seeds 8
python experiments/rainbow_anakin.py --env Breakout-MinAtar --head qr --seeds 5

It is `podium train --agent rainbow --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("rainbow", "anakin", presets.RAINBOW, defaults={"num_envs": 16})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
