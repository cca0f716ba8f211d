"""Play a trained policy: print the return of every episode, and draw an animated GIF where the environment can.

python experiments/replay.py runs/ppo-CartPole-v1-20260101-120000
python experiments/replay.py RUN_DIR --best --episodes 3 --gif best.gif

The same as `podium replay`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from podium import __main__ as podium_command


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, and return the exit code."""
    return podium_command.main(["replay", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
