"""`podium evaluate`: play episodes with the policy of a run, and print what `podium.evaluate` returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

import podium
from podium import envs
from podium.commands import cache, plugins
from podium.commands.console import read_flags, read_options
from podium.files import to_jsonable
from podium.load import load_env
from podium.ranges import check_seed, check_value, is_integer
from podium.runs import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Play episodes with the policy of a run, and print the mean return."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of the run."""
    episodes: int = 128
    """Episodes to play, side by side."""
    step: str = "newest"
    """Checkpoint to play: newest, best (the highest evaluation), or its number of environment steps."""
    policy: int = 0
    """Which of a run's seeds to play, from 0."""
    seed: int = 0
    """Of resets and actions, 0 or more."""
    greedy: bool = True
    """Take the best action; --no-greedy samples."""
    max_steps: int | None = None
    """Steps after which an episode is cut; None takes the environment's own limit, or 10,000."""
    env: str | None = None
    """Environment to play in, with observations and actions of the same form; None takes the run's own."""
    env_options: tuple[str, ...] = ()
    """Options of the environment that --env names, each NAME=VALUE."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register agents or environments of your own."""
    json: bool = False
    """Print one line of JSON in place of the table."""


def run(argv: Sequence[str]) -> int:
    """Evaluate as the command line says.

    Raises:
      ValueError: a flag or its value is wrong, said in a sentence.
    """
    plugins.load(argv)
    flags = read_flags(Flags, argv, prog="podium evaluate")
    if flags.env_options and flags.env is None:
        raise ValueError("--env-options go with --env; the run's own environment has the options it was trained with.")
    check_seed(flags.seed)
    check_value("--episodes", flags.episodes, "counts", "128 is usual")
    folder = RunFolder.open(flags.run_dir)
    seeds = folder.config.get("seeds", 1)
    if is_integer(seeds, 1) and not is_integer(flags.policy, 0, seeds - 1):
        raise ValueError(f"--policy={flags.policy} is none of the run's {seeds} seeds; use 0 to {seeds - 1}.")
    trained_in = load_env(folder)
    env = trained_in
    if flags.env is not None:
        env = envs.make(flags.env, **read_options(flags.env_options, "--env-options"))
    cache.use_compilation_cache()
    policy = podium.load(flags.run_dir, step=checkpoint(flags.step), env=trained_in, seed=flags.policy)
    scores = podium.evaluate(policy, env, flags.episodes, flags.seed, flags.max_steps, flags.greedy)
    if flags.json:
        print(json.dumps(to_jsonable({"env": env.spec.name, "episodes": flags.episodes, **scores}), allow_nan=False))
    else:
        print(f"{env.spec.name}: {flags.episodes} episodes, {'greedy' if flags.greedy else 'sampled'}")
        print("\n".join(f"  {name:<16}  {value:.6g}" for name, value in scores.items()))
    return 0


def checkpoint(step: str) -> int | str | None:
    """Return what `podium.load` is asked for.

    Raises:
      ValueError: `step` is neither a number nor one of the two words.

    >>> checkpoint("newest"), checkpoint("best"), checkpoint("2048")
    (None, 'best', 2048)
    """
    if step == "newest":
        return None
    if step != "best" and not step.isdecimal():
        raise ValueError(f"--step={step} is no checkpoint; use newest, best, or a number of environment steps.")
    return step if step == "best" else int(step)
