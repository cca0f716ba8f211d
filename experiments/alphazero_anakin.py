"""Train AlphaZero under Anakin: games, search and updates in one compiled program on every device.

python experiments/alphazero_anakin.py --env podium/TicTacToe
python experiments/alphazero_anakin.py --env podium/ConnectFour --num-simulations 32

It is `podium train --agent alphazero --placement anakin` with defaults and presets of its own, which `--help` shows. Of
tic-tac-toe the run's `summary.json` says at last how many lines the network loses alone, in either seat: `lines_lost`,
of all that an opponent can play.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from judges import every_line

import podium
from podium import presets
from podium.commands.scripts import Script
from podium.files import write_json

TIC_TAC_TOE = "podium/TicTacToe"
SCRIPT = Script("alphazero", "anakin", presets.ALPHAZERO, defaults={"env": TIC_TAC_TOE})


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and judge; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    code = SCRIPT.main(argv)
    if code or {"--help", "-h", "--list-presets"} & set(argv):
        return code
    read = SCRIPT.read(argv)
    folder = read.train["run_dir"]
    if read.setup.env == TIC_TAC_TOE and folder is not None:
        judge(Path(folder))
    return code


def judge(folder: Path) -> None:
    """Write into a run's summary how many lines of tic-tac-toe its network loses, and say it."""
    found = every_line(podium.load(folder))
    path, lost = folder / "summary.json", found.pop("lines_lost")
    write_json(path, {**json.loads(path.read_text()), "lines_lost": lost, "lines": found})
    print(f"  lines lost   {lost}, by the network alone: {found['first']} moving first, {found['second']} second")


if __name__ == "__main__":
    sys.exit(main())
