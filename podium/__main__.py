"""The command of the library, `podium`; `python -m podium` is the same.

podium train     train an agent: --agent dqn --env Breakout-MinAtar --placement sebulba --num-steps 1000000
podium evaluate  play episodes with the policy of a run folder, and print their mean return
podium replay    print every episode's return, and draw an animated GIF
podium plan      find the fastest placement on this machine
podium list      agents, environments, placements or presets, one a line
podium sweep     try settings side by side: --vary learning_rate=1e-4..1e-2:log:8 --seeds 8
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from podium.commands import evaluate, listing, plan, replay, sweep, train
from podium.commands.console import guard
from podium.envs import near_misses

_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train.run,
    "evaluate": evaluate.run,
    "replay": replay.run,
    "plan": plan.run,
    "list": listing.run,
    "sweep": sweep.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code: 2 where it is refused, in one sentence."""
    given = list(sys.argv[1:] if argv is None else argv)
    return guard(lambda: _run(given))


def _run(argv: Sequence[str]) -> int:
    if not argv:
        raise ValueError(f"No command is named; there are: {', '.join(_COMMANDS)}; podium --help says more.")
    command, *rest = argv
    if command in ("-h", "--help"):
        print(f"{__doc__}\npodium train --help lists every flag; so do the others.")
        return 0
    if command not in _COMMANDS:
        near = near_misses(command, list(_COMMANDS), most=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{command!r} is no command.{hint} There are: {', '.join(_COMMANDS)}; podium --help says more."
        )
    return _COMMANDS[command](rest)


if __name__ == "__main__":
    sys.exit(main())
