"""`podium train`: read the flags, say what is about to happen, train, and say how it ended."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import podium
from podium import distributed, envs
from podium import placement as placements
from podium.commands import cache, plugins, words
from podium.commands.options import Options, Subject, choose, list_presets, read
from podium.files import to_jsonable
from podium.placement.contract import Program
from podium.runs import default_run_dir, new_run_dir
from podium.schedule import Schedule


def run(argv: Sequence[str], subject: Subject | None = None) -> int:
    """Train as the command line says.

    Args:
      argv: flags.
      subject: the agent and the placement; None lets the flags choose them.

    Returns:
      the exit code: 0, or 128 + n for a run that signal n stopped.

    Raises:
      ValueError: a flag or its value is wrong, said in a sentence.
    """
    plugins.load(argv)
    subject = choose(argv) if subject is None else subject
    if "--list-presets" in argv:
        print(list_presets(subject.presets))
        return 0
    return _train(subject.settle(read(subject, argv)))


def prepare(options: Options) -> None:
    """Check what is known before JAX starts, then start it as the flags say.

    Raises:
      ValueError: there is nothing to resume from, or the seed is out of range.
    """
    setup, train = options.setup, options.train
    if train["resume"] and train["run_dir"] is None:
        raise ValueError("--resume needs --run-dir, the folder of the run to resume.")
    if not 0 <= train["seed"] < 2**32:
        raise ValueError(f"seed={train['seed']} must lie between 0 and 2**32 - 1.")
    if setup.cpu_threads is not None and (late := podium.request_cpu_threads(setup.cpu_threads)):
        print(late)
    if setup.distributed:
        distributed.initialize()
    devices = options.number_of_devices()
    if devices is not None and (sentence := podium.request_devices(devices)) and distributed.is_first():
        print(sentence)
    if setup.compilation_cache:
        cache.use_compilation_cache()


def _train(options: Options) -> int:
    setup, train = options.setup, options.train
    prepare(options)
    # Who plans is handed the rules of what it plays.
    plans = podium.agents.get(options.subject.agent).plans
    played = envs.make(setup.env, **(options.env_options or {})) if plans else None
    agent = podium.agents.make(options.subject.agent, options.agent, played)
    _check_takes(options)
    placement = options.make_placement()
    with contextlib.ExitStack() as stack:
        run_dir = train["run_dir"]
        if run_dir is None:  # By process 0, because the name holds the time.
            name = f"{agent.name}-{setup.env}"
            made = stack.enter_context(new_run_dir(name)) if distributed.is_first() else default_run_dir(name)
            run_dir = Path(distributed.from_first(str(made)))

        def announce(program: Program, schedule: Schedule) -> None:
            print(words.plan(options, program, schedule, run_dir), flush=True)

        result = podium.train(
            agent,
            setup.env,
            placement=placement,
            env_options=options.env_options,
            announce=announce,
            **{**train, "run_dir": run_dir},
        )
    if distributed.is_first():
        if not result.interrupted:
            print(words.closing(result))
        if setup.json:
            print(json.dumps(to_jsonable(result.summary), allow_nan=False), flush=True)
    return 128 + signal.Signals[result.interrupted] if result.interrupted else 0


def _check_takes(options: Options) -> None:
    """Raise ValueError where the placement cannot take the environment, naming those that can."""
    name, env = options.subject.placement, options.setup.env
    on_host = envs.runs_on_host(env, options.env_options)
    takes = {
        each: (placements.get(each).takes_host_envs if on_host else placements.get(each).takes_pure_envs)
        for each in placements.names()
    }
    if not takes[name]:
        kind = "on the CPU, outside compiled programs" if on_host else "as a part of compiled programs"
        others = ", ".join(each for each in takes if takes[each])
        raise ValueError(f"{env} runs {kind}, which --placement {name} does not take; these do: {others}.")
