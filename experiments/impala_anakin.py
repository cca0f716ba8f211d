"""Train IMPALA under Anakin: rollout and update in one compiled program on every device.

python experiments/impala_anakin.py --devices 8
python experiments/impala_anakin.py --env podium/RepeatFirst --memory lstm

The same as `podium train --agent impala --placement anakin`, which takes the same flags.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("impala", "anakin", presets.IMPALA)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
