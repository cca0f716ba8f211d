"""Train an agent in an environment: every argument is checked here, before anything is compiled or written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from podium import distributed
from podium.agent import Agent
from podium.env import Env
from podium.evaluate import longest_episode
from podium.host import HostEnvs
from podium.loop import Evaluator, Result, Run, catch_signals
from podium.placement.anakin import Anakin
from podium.placement.learner import LearnerProgram
from podium.placement.program import Placement, Program, plays_whole_episodes
from podium.runs import RunFolder, check_new_folder
from podium.schedule import Pace, Schedule, make_schedule
from podium.sinks import CurveSink, JsonlSink, TerminalSink, WandbSink


@distributed.failing_together()
def train(
    agent: Agent,
    env: Env | HostEnvs | str,
    *,
    num_steps: int,
    num_envs: int = 64,
    rollout_length: int | None = None,
    placement: Placement | None = None,
    seed: int = 0,
    seeds: int = 1,
    num_lanes: int | None = None,
    eval_every: int | None = None,
    eval_episodes: int = 128,
    checkpoint_every: int | None = None,
    log_every: int | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    keep_checkpoints: int = 3,
    progress: bool = True,
    wandb: Literal["disabled", "offline", "online"] = "disabled",
    sinks: Sequence[Any] = (),
    env_options: Mapping[str, Any] | None = None,
    announce: Callable[[Program, Schedule], None] | None = None,
) -> Result:
    """Train an agent in an environment.

    With several processes (`podium.distributed.initialize`) all call it alike, and process 0 alone writes and prints.

    Args:
      agent: from `podium.agents`, or your own.
      env: a pure environment, or a name for `podium.envs.make`.
      num_steps: environment steps of each seed; rounded down to whole iterations of `num_envs * rollout_length`.
      num_envs: environments side by side, B.
      rollout_length: steps of each environment an iteration, T; None takes the agent's own (under `Evolution`, which
        plays whole episodes, the environment's limit).
      placement: where everything runs; None is `Anakin()`, every device.
      seed: fixes everything random.
      seeds: independent runs in one program; metrics then are lists, one number a seed.
      num_lanes: groups of environments that shuffle apart; None chooses (8 where that divides). The number of devices
        must divide it; results depend on it, and on the number of devices they do not.
      eval_every: environment steps between evaluations; None for ten over the run, 0 for the end only.
      eval_episodes: of an evaluation.
      checkpoint_every: environment steps between checkpoints; None at every evaluation, 0 for the end only.
      log_every: environment steps between rows of metrics; None for a hundred over the run.
      run_dir: folder for config, metrics, curve and checkpoints; None writes nothing.
      resume: go on with the run in `run_dir`, exactly.
      keep_checkpoints: newest ones to keep; the best is kept besides.
      progress: show a line of progress.
      wandb: "disabled", "offline" or "online".
      sinks: further places for metrics, objects with `write(row)` and `close(summary)`.
      env_options: of `podium.envs.make`, where `env` is a name.
      announce: called once with what is about to run: after every check, before anything is compiled or written.

    Returns:
      a `Result`.

    Raises:
      ValueError: for anything out of range, before anything is compiled or written.
      NonFiniteError: the agent's numbers became NaN or infinite; the last good checkpoint is kept.
      podium.distributed.PeerError: another process of this run failed or is gone.
    """
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir, the folder of the run to go on with.")
    _check_integers(
        1,
        num_steps=num_steps,
        num_envs=num_envs,
        rollout_length=rollout_length,
        seeds=seeds,
        num_lanes=num_lanes,
        eval_episodes=eval_episodes,
        keep_checkpoints=keep_checkpoints,
    )
    _check_integers(0, seed=seed, eval_every=eval_every, checkpoint_every=checkpoint_every, log_every=log_every)
    if wandb not in ("disabled", "offline", "online"):
        raise ValueError(f"wandb={wandb!r} is not a mode; use 'disabled', 'offline' or 'online'.")
    env, env_record = resolve_env(env, env_options)
    placement = Anakin() if placement is None else placement
    if rollout_length is None:
        rollout_length = usual_length(placement, agent, env)
    schedule = make_schedule(num_steps, num_envs * rollout_length, eval_every, checkpoint_every, log_every)
    folder = _find_folder(run_dir, resume)
    # No two stops lie further apart than the beginning and the first.
    longest = min(schedule.next_stop(0), Pace.LONGEST)
    program = placement.build(
        agent,
        env,
        num_envs=num_envs,
        rollout_length=rollout_length,
        seeds=seeds,
        num_lanes=num_lanes,
        max_updates=longest,
    )
    config = {
        "agent": {"name": agent.name, "config": agent.config},
        "env": env_record,
        "num_steps": num_steps,
        "num_envs": num_envs,
        "rollout_length": rollout_length,
        "seed": seed,
        "seeds": seeds,
        "num_lanes": program.sizes.num_lanes,
        "eval_every": eval_every,
        "eval_episodes": eval_episodes,
        "checkpoint_every": checkpoint_every,
        "log_every": log_every,
        "devices": len(program.devices),
    }
    run = Run(program, schedule, Evaluator(program, env, eval_episodes, seed), longest, run_dir is not None)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(program.close)
        state = run.restore(folder, config, keep_checkpoints) if folder else None
        if announce is not None and distributed.is_first():
            announce(program, schedule)
        run.caught = stack.enter_context(catch_signals())
        if run_dir is not None and folder is None and distributed.is_first():
            run.keep_in(RunFolder.create(run_dir, config, placement.explain().words), keep_checkpoints)
        if run.folder:
            run.folder.write_explanation(program.explain())
        state = run.make_ready(state, seed)
        if folder:
            run.rewind(state)
            if run.saved and _episodes_are_lost(program) and distributed.is_first():
                run.say_episodes_restart()
        if distributed.is_first():
            run.sinks.extend(_make_sinks(run.folder, schedule, run.rows, progress, wandb, config, sinks))
        return run.loop(state)


def _episodes_are_lost(program: Program) -> bool:
    """Say whether environments stand outside the state, so that a run that goes on begins new episodes."""
    if plays_whole_episodes(program):
        return False
    return isinstance(program, LearnerProgram) or isinstance(program.env, HostEnvs)


def usual_length(placement: Placement, agent: Agent, env: Env | HostEnvs) -> int:
    """Return the steps of a rollout where the user names none."""
    if plays_whole_episodes(placement):
        return longest_episode(env.spec)
    return agent.rollout_length


def _check_integers(least: int, **values: Any) -> None:
    """Raise ValueError for a value that is no integer of at least `least`; None leaves the choice and passes."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            rule = "a positive integer" if least else "an integer of 0 or more"
            near = isinstance(value, float) and np.isfinite(value) and value >= least
            raise ValueError(f"{name}={value!r} must be {rule}{f'; use {int(value)}' if near else ''}.")


def resolve_env(env: Env | HostEnvs | str, options: Mapping[str, Any] | None) -> tuple[Env | HostEnvs, dict[str, Any]]:
    """Return the environment, made if it is a name, and what is recorded of it."""
    if isinstance(env, str):
        from podium import envs

        try:
            return envs.make(env, **(options or {})), {"name": env, "options": dict(options or {})}
        except RuntimeError as error:  # Data that the environment needs are missing.
            raise ValueError(str(error)) from error
    if options:
        raise ValueError("env_options go with the name of an environment; this one is made already.")
    return env, {"name": env.spec.name, "options": None, "object": {"spec_sha256": env.spec.sha256()}}


def _find_folder(run_dir: Path | str | None, resume: bool) -> RunFolder | None:
    """Return the folder of the run to go on with; None for a new run, whose folder can be made but is not yet."""
    if run_dir is None:
        return None
    if resume:
        return RunFolder.open(run_dir)
    if distributed.is_first():
        check_new_folder(run_dir)
    return None


def _make_sinks(
    folder: RunFolder | None,
    schedule: Schedule,
    earlier: list[dict[str, Any]],
    progress: bool,
    wandb: Literal["disabled", "offline", "online"],
    config: dict[str, Any],
    further: Sequence[Any],
) -> list[Any]:
    sinks: list[Any] = [TerminalSink(schedule.total * schedule.steps_per_update, progress)]
    if folder is not None:
        sinks += [JsonlSink(folder.metrics), CurveSink(folder.curve, earlier)]
    if wandb != "disabled":
        sinks.append(WandbSink(wandb, "podium", config, folder.path if folder else Path(".")))
    return sinks + list(further)
