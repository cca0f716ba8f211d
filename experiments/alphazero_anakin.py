"""Train AlphaZero under Anakin: games, search and updates in one compiled program on every device.

python experiments/alphazero_anakin.py --env podium/TicTacToe
python experiments/alphazero_anakin.py --env podium/ConnectFour --num-simulations 32

The same as `podium train --agent alphazero --placement anakin`, which takes the same flags.
"""

from __future__ import annotations

import sys

from podium import presets
from podium.commands.scripts import Script

SCRIPT = Script("alphazero", "anakin", presets.ALPHAZERO, defaults={"env": "podium/TicTacToe"})
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
