"""Train VDN under Anakin: a team that learns from its common reward, in one compiled program on every device.

python experiments/vdn_anakin.py --env jaxmarl/MPE_simple_spread_v3
python experiments/vdn_anakin.py --env podium/Tag --num-steps 200000

It is `podium train --agent vdn --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("vdn", "anakin", presets.VDN, defaults={"env": "jaxmarl/MPE_simple_spread_v3"})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
