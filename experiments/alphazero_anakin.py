"""Train AlphaZero under Anakin: games, search and updates in one compiled program on every device.

python experiments/alphazero_anakin.py --env podium/TicTacToe
python experiments/alphazero_anakin.py --env podium/ConnectFour --num-simulations 32

The same as `podium train --agent alphazero --placement anakin`, which takes the same flags. Of tic-tac-toe the run's
`summary.json` says at last how many lines the network loses alone, in either seat: `lines_lost`, of all that an
opponent can play.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import podium
from podium import games, presets
from podium.agents import alphazero
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
    policy, model = podium.load(folder), podium.envs.make_pure(TIC_TAC_TOE, rules=True)
    config = dataclasses.replace(policy.agent.config, num_simulations=0)
    alone = dataclasses.replace(policy, agent=alphazero.make(config, model=model))
    lines = games.every_line(model, alone)
    path = folder / "summary.json"
    scores = {"first": lines.first._asdict(), "second": lines.second._asdict()}
    write_json(path, {**json.loads(path.read_text()), "lines_lost": lines.lost, "lines": scores})
    print(f"  lines lost   {lines.lost}, by the network alone: {lines.first} moving first, {lines.second} second")


if __name__ == "__main__":
    sys.exit(main())
