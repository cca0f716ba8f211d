"""Files that train one agent under one placement, as those in `experiments/`: the command `podium train`, fixed.

script = Script("ppo", "anakin", presets.PPO)
if __name__ == "__main__":
sys.exit(script.main())
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium import distributed
from podium.commands import train
from podium.commands.console import guard
from podium.commands.options import Options, Subject, read
from podium.presets import Preset


class Script:
    """The command line of an agent under a placement.

    Args:
      agent: name in `podium.agents`.
      placement: name in `podium.placement`.
      presets: by name.
      defaults: of flags, by field, under those of a preset.
      aliases: further flags, without dashes before them, by field.
      env_flags: dataclass of options of the environment that get flags of their own.
      settle: what a command line means where flags depend on one another: `(Options) -> Options`.
    """

    def __init__(
        self,
        agent: str,
        placement: str,
        presets: Mapping[str, Preset],
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        env_flags: type | None = None,
        settle: Callable[[Options], Options] = lambda options: options,
    ):
        self.subject = Subject(agent, placement, presets, defaults or {}, aliases or {}, env_flags, settle=settle)

    def read(self, argv: Sequence[str]) -> Options:
        """Read flags; raises ValueError, a sentence, for one that is wrong."""
        return self.subject.settle(read(self.subject, argv))

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Train as flags (None takes those of the process) say, and return the exit code.

        It is 0, 1 for a run that failed, 2 for one that was refused, 128 + n for one that signal n stopped.
        """
        given = list(sys.argv[1:] if argv is None else argv)
        return guard(lambda: train.run(given, self.subject))


def envs_of_actors(options: Options) -> Options:
    """Let `envs_per_actor` of Sebulba, where it is given, say how many environments there are in all."""
    each = options.placement["envs_per_actor"]
    if each is None:
        return options
    actors = options.placement["actor_devices"] or 1
    num_envs = each * options.placement["actor_threads"] * actors * distributed.num_processes()
    return dataclasses.replace(options, train={**options.train, "num_envs": num_envs})
