"""`podium sweep`: read the flags, try every setting, and say which was best."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence

import podium
from podium import agents, envs, presets
from podium.commands import plugins
from podium.commands.console import find, read_flags
from podium.commands.options import Choice, Subject, TrainFlags, read
from podium.commands.train import prepare
from podium.devices import num_cores
from podium.files import to_jsonable
from podium.runs import new_run_dir
from podium.space import read_space
from podium.sweep_table import words_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags that `podium sweep` has beside those of `podium train --placement anakin`."""

    vary: tuple[str, ...]
    """What varies, each FIELD=VALUES: learning_rate=1e-4..1e-2:log:8 (eight, evenly in the logarithm), gamma=0.9..1:3,
    activation=tanh,relu; without a number (1e-4..1e-2:log) values are drawn, --samples of them."""
    samples: int | None = None
    """Settings to draw; None tries the whole grid."""
    at_once: int | None = None
    """Settings of a program at most; None takes as many as fit in memory."""
    threshold: float | None = None
    """Return whose first reaching is counted."""
    halve_at: tuple[int, ...] = ()
    """Environment steps, rising, at which the worse half of the settings is dropped."""


_ABOUT = (
    "Try settings of an agent side by side: numbers in one compiled program, sizes from program to program. All flags "
    "of podium train --placement anakin are understood too, and say what the settings share; --seeds is 8 by default, "
    "those of each setting. --run-dir gets the runs, table.json, sweep.png and best.txt; --json prints the table."
)
_NOT_HERE = ("eval_steps", "checkpoint_every", "keep_checkpoints", "log_every", "wandb", "num_lanes")


def run(argv: Sequence[str]) -> int:
    """Sweep as the command line says.

    Returns:
      the exit code: 0, or 128 + n for a sweep that signal n stopped.

    Raises:
      ValueError: a flag or its value is wrong, said in a sentence.
    """
    plugins.load(argv)
    flags, rest = read_flags(Flags, argv, description=_ABOUT, prog="podium sweep", return_unknown_args=True)
    name = find(rest, "--agent") or Choice.agent
    entry = agents.get(name)
    if (placement := find(rest, "--placement")) not in (None, "anakin"):
        raise ValueError(f"--placement {placement}: a sweep runs under anakin; leave the flag out.")
    subject = Subject(name, "anakin", presets.of_agent(name), defaults={"seeds": 8}, is_chosen=True)
    options = read(subject, rest)
    train, setup = dict(options.train), options.setup
    for unused in _NOT_HERE:
        if train.pop(unused) != getattr(TrainFlags, unused):
            raise ValueError(f"--{unused.replace('_', '-')} is no flag of podium sweep; leave it out.")
    space = read_space(flags.vary, "--vary")
    if options.number_of_devices() is None:
        # Whole runs wait for no other device, so that on a CPU each core may be one; fewer where they share unevenly.
        podium.request_devices(num_cores())
    prepare(options)
    played = envs.make(setup.env, **(options.env_options or {})) if entry.plans else None
    config = agents.make(name, options.agent, played).config
    run_dir = train.pop("run_dir")
    with contextlib.nullcontext(run_dir) if run_dir else new_run_dir(f"sweep-{name}-{setup.env}") as run_dir:
        found = podium.sweep(
            agents.maker(name, played),
            space,
            setup.env,
            config=config,
            samples=flags.samples,
            at_once=flags.at_once,
            threshold=flags.threshold,
            halve_at=flags.halve_at,
            devices=options.number_of_devices(),
            env_options=options.env_options,
            run_dir=run_dir,
            **train,
        )
    if found.interrupted:
        print(f"Stopped by {found.interrupted}; the same command with --resume resumes it.", file=sys.stderr)
        return 128 + signal.Signals[found.interrupted]
    for row in found.table:
        low, high = row["interval"]
        setting = words_of({field: row[field] for field in found.fields})
        print(f"  {row['eval_return']:10.4g}  [{low:.4g}, {high:.4g}]  {setting}")
    best = (run_dir / "best.txt").read_text().splitlines()[0]
    print(f"  best   {best}\n  files  {run_dir}: table.json, sweep.png, best.txt")
    if setup.json:
        print(json.dumps(to_jsonable(found.table), allow_nan=False), flush=True)
    return 0
