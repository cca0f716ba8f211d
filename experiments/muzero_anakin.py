"""Train MuZero under Anakin: search in a learnt model, replay of windows and updates in one program on every device.

python experiments/muzero_anakin.py --env CartPole-v1
python experiments/muzero_anakin.py --env podium/TicTacToe --num-simulations 32

It is `podium train --agent muzero --placement anakin` with defaults and presets of its own, which `--help` shows.
Evaluations search too, without noise; of the network alone they are with `--num-simulations 0`.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("muzero", "anakin", presets.MUZERO, defaults={"num_envs": 32})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
