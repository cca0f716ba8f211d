"""Train REPPO under Anakin: rollout and updates in one compiled program on every device, and no replay.

python experiments/reppo_anakin.py --env Pendulum-v1
python experiments/reppo_anakin.py --env mjx/CartpoleSwingup --seeds 5

The same as `podium train --agent reppo --placement anakin`, which takes the same flags.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("reppo", "anakin", presets.REPPO)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
