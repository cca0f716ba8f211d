"""Train A2C under Anakin: rollout and update in one compiled program on every device.

python experiments/a2c_anakin.py --devices 8
python experiments/a2c_anakin.py --env podium/Catch --seeds 4

It is `podium train --agent a2c --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("a2c", "anakin", presets.A2C)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
