"""Train REPPO under Anakin: rollout and updates in one compiled program on every device, and no replay.

python experiments/reppo_anakin.py --env Pendulum-v1
python experiments/reppo_anakin.py --env mjx/CartpoleSwingup --seeds 5

It is `podium train --agent reppo --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("reppo", "anakin", presets.REPPO)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
