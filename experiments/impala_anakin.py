"""Train IMPALA under Anakin: rollout and update in one compiled program on every device.

python experiments/impala_anakin.py --devices 8
python experiments/impala_anakin.py --env podium/RepeatFirst --memory lstm

It is `podium train --agent impala --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("impala", "anakin", presets.IMPALA)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
