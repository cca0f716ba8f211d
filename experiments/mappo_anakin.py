"""Train MAPPO under Anakin: agents that act together, fused with their environments in one compiled program.

python experiments/mappo_anakin.py --env jaxmarl/MPE_simple_spread_v3
python experiments/mappo_anakin.py --env jaxmarl/smax-3m --no-central-critic

It is `podium train --agent mappo --placement anakin` with defaults and presets of its own, which `--help` shows.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("mappo", "anakin", presets.MAPPO, defaults={"env": "jaxmarl/MPE_simple_spread_v3"})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
