"""Train R2D2 under Anakin: rollout, replay of windows and updates in one compiled program on every device.

python experiments/r2d2_anakin.py --env podium/RepeatFirst
python experiments/r2d2_anakin.py --env MemoryChain-bsuite --burn-in 0 --no-stored-state
python experiments/r2d2_anakin.py --env Breakout-MinAtar --preset breakout-minatar-flicker

It is `podium train --agent r2d2 --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("r2d2", "anakin", presets.R2D2, defaults={"num_envs": 16})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
