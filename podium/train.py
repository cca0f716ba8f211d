"""Train an agent in an environment: every argument is checked here, before anything is compiled or written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from podium import distributed
from podium.agent import Agent, Transform, check_is_agent, parts_of
from podium.checkpoint import CheckpointError
from podium.env import Env
from podium.evaluate import longest_episode, longest_evaluated
from podium.evaluator import Evaluator
from podium.host import HostEnvFactory, check_is_env
from podium.loop import NonFiniteError, Result, Run
from podium.placement import record_of
from podium.placement.anakin import Anakin
from podium.placement.contract import Placement, Program, check_is_placement
from podium.placement.remote.engine import check_engines
from podium.ranges import check_type, is_integer, plain
from podium.recorder import Recorder, check_sinks, make_sinks
from podium.runs import RunFolder, check_new_folder
from podium.saved import OF_PLACEMENT, read_saved
from podium.schedule import Pace, Schedule, make_schedule
from podium.signals import catch_signals


@distributed.failing_together()
def train(
    agent: Agent,
    env: Env | HostEnvFactory | str,
    *,
    num_steps: int,
    num_envs: int = 64,
    rollout_length: int | None = None,
    placement: Placement | None = None,
    seed: int = 0,
    seeds: int = 1,
    num_lanes: int | None = None,
    eval_every: int | None = None,
    eval_episodes: int | None = None,
    eval_steps: int | None = None,
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
      num_steps: environment steps of each seed; rounded down to whole iterations of `num_envs * rollout_length`. This
        budget, and `env_steps` in metrics, count the rows of rollouts. Where environments reset in the NEXT step
        (`HostEnv`), the row after an episode's end is no transition: `valid_steps` and `steps_per_second` leave it out,
        as do the agent's own schedules (`anneal_steps`, `epsilon_decay_steps`).
      num_envs: environments side by side, B.
      rollout_length: steps of each environment an iteration, T; None takes the agent's own (under `Evolution`, which
        plays whole episodes, the environment's limit).
      placement: where everything runs; None is `Anakin()`, every device.
      seed: fixes everything random; below 2^32.
      seeds: independent runs in one program; metrics then are lists, one number a seed.
      num_lanes: groups of environments that shuffle apart; None chooses (8 where that divides). The number of devices
        must divide it; results depend on it, and on the number of devices they do not.
      eval_every: environment steps between evaluations; None for ten over the run, or fewer where they would take more
        than half of its steps; 0 for the end only.
      eval_episodes: of an evaluation; None for 128, and for 8 to 128 where episodes are long or played on the host.
      eval_steps: environment steps that an evaluation may take in all its episodes, each of which is cut at its equal
        part, with what it gathered; 0 sets no bound but the environment's own. None bounds where episodes are long
        or played on the host: all evaluations to half of the run's steps, but no episode below 1,000 steps, and in
        the last evaluation 2,000. `podium.schedule.make_schedule` has the rule.
      checkpoint_every: environment steps between checkpoints; None at every `eval_every`, and for ten over the run
        where that is None; 0 for the end only.
      log_every: environment steps between rows of metrics; None for a hundred over the run.
      run_dir: folder for config, metrics, curve and checkpoints; None writes nothing.
      resume: resume the run in `run_dir`, exactly.
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
    check_type("resume", resume, False)
    check_type("progress", progress, True)
    if not (announce is None or callable(announce)):
        raise ValueError(f"announce={announce!r} must be a function of the program and the schedule, or None.")
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir, the folder of the run to resume.")
    num_steps, num_envs, rollout_length, seeds, num_lanes, eval_episodes, keep_checkpoints = integers(
        1,
        num_steps=num_steps,
        num_envs=num_envs,
        rollout_length=rollout_length,
        seeds=seeds,
        num_lanes=num_lanes,
        eval_episodes=eval_episodes,
        keep_checkpoints=keep_checkpoints,
    )
    seed, eval_every, eval_steps, checkpoint_every, log_every = integers(
        0,
        seed=seed,
        eval_every=eval_every,
        eval_steps=eval_steps,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
    )
    if wandb not in ("disabled", "offline", "online"):
        raise ValueError(f"wandb={wandb!r} is not a mode; use 'disabled', 'offline' or 'online'.")
    env, env_record = resolve_env(env, env_options)
    check_is_agent(agent)
    placement = Anakin() if placement is None else placement
    check_is_placement(placement)
    check_engines(placement)
    check_sinks(sinks)
    if rollout_length is None:
        rollout_length = usual_length(placement, agent, env)
    schedule = make_schedule(
        num_steps,
        num_envs * rollout_length,
        eval_every,
        checkpoint_every,
        log_every,
        eval_episodes=eval_episodes,
        eval_steps=eval_steps,
        longest_episode=longest_evaluated(env),
        on_host=isinstance(env, HostEnvFactory),
    )
    _check_learns(agent, env, placement, schedule)
    resumed = _find_folder(run_dir, resume)
    # No two stops lie further apart than the beginning and the first.
    longest_chunk = min(schedule.next_stop(0), Pace.LONGEST)
    program = placement.build(
        agent,
        env,
        num_envs=num_envs,
        rollout_length=rollout_length,
        seeds=seeds,
        num_lanes=num_lanes,
        max_updates=longest_chunk,
    )
    config: dict[str, Any] = {
        "agent": agent_record(program.agent),
        "env": env_record,
        "num_steps": num_steps,
        "num_envs": num_envs,
        "rollout_length": rollout_length,
        "seed": seed,
        "seeds": program.sizes.seeds,
        "num_lanes": program.sizes.num_lanes,
        "eval_every": eval_every,
        "eval_episodes": eval_episodes,
        "eval_steps": eval_steps,
        "checkpoint_every": checkpoint_every,
        "log_every": log_every,
        "devices": len(program.devices),
        "placement": record_of(placement),
    }
    first = distributed.is_first()
    with contextlib.ExitStack() as stack:
        stack.callback(program.close)
        saved = None
        if resumed:
            may_change = {name for name in placement.may_change if hasattr(placement, name)}
            saved = read_saved(resumed, config, program, schedule, keep_checkpoints, may_change)
        if announce is not None and first:
            announce(program, schedule)
        # Only from here on is anything compiled or written.
        caught = stack.enter_context(catch_signals())
        folder = resumed if first else None
        if run_dir is not None and not resumed and first:
            folder = RunFolder.create(run_dir, config, placement.explain().words)
            stack.enter_context(_discarding(folder))
        if folder and (saved is None or saved.update < schedule.total):  # What ended already runs nowhere.
            folder.write_report(program.explain())
        path = folder.path if folder else None
        evaluator = Evaluator(program, env, schedule, seed)
        recorder = Recorder(
            program,
            schedule,
            folder=folder,
            keeps=run_dir is not None,
            keep_checkpoints=keep_checkpoints,
            sinks=make_sinks(schedule, progress, wandb, config, path, sinks) if first else (),
            config={name: config[name] for name in OF_PLACEMENT},
            saved=saved,
        )
        stack.enter_context(recorder)
        if saved:
            run = Run.resume(saved, program, schedule, evaluator, recorder, caught, seed)
        else:
            run = Run.new(program, schedule, evaluator, recorder, caught, seed)
        return run.train(longest_chunk)


@contextlib.contextmanager
def _discarding(folder: RunFolder) -> Iterator[None]:
    """Leave no folder of a run whose program could not be made: what is wrong with it, a resume would meet again."""
    try:
        yield
    except (NonFiniteError, CheckpointError, distributed.PeerError, OSError):
        raise  # The run began; the folder tells how.
    except Exception:
        folder.discard_unused()
        raise


def _check_learns(agent: Agent, env: Env | HostEnvFactory, placement: Placement, schedule: Schedule) -> None:
    """Raise ValueError for a run whose steps end before a replay holds what it must before anything is learnt."""
    if agent.replay is None or placement.whole_episodes:  # What evolves learns nothing else.
        return
    least, steps = getattr(agent.config, "min_replay_size", 0), schedule.total * schedule.steps_per_update
    replays = placement.num_replays()
    if least > steps // replays * (env.spec.num_agents or 1):
        each = f" and {steps // replays} for each of {replays} replays" if replays > 1 else ""
        raise ValueError(
            f"num_steps, {steps} in whole iterations{each}, end before learning begins, at min_replay_size={least}; "
            "use more, or a smaller min_replay_size."
        )


def agent_record(agent: Agent) -> dict[str, Any]:
    """Return what is recorded of an agent."""
    more = {"settings": agent.settings.values if agent.settings else (), "brought": parts_of(agent)}
    transforms = [_transform_record(transform) for transform in agent.transforms]
    return {"name": agent.name, "config": agent.config, "transforms": transforms} | {
        name: value for name, value in more.items() if value
    }


def _transform_record(transform: Transform) -> dict[str, Any]:
    record: dict[str, Any] = {"name": transform.name, "options": transform.options}
    if transform.agents is not None:
        record["agents"] = {name: agent_record(agent) for name, agent in transform.agents.items()}
    return record


def usual_length(placement: Placement, agent: Agent, env: Env | HostEnvFactory) -> int:
    """Return the steps of a rollout where the user names none."""
    if placement.whole_episodes:
        return longest_episode(env.spec)
    (length,) = integers(1, **{f"{agent.name}'s rollout_length": agent.rollout_length})
    return length


def integers(least: int, **values: Any) -> Iterable[Any]:
    """Return the values, as Python's integers; raise ValueError for one that is no integer of at least `least`.

    None leaves the choice, and passes. Steps are counted below 2^63, and what an array may have below 2^31. A seed has
    32 bits: JAX would take a larger one for another.
    """
    for name, value in values.items():
        bits = 32 if name == "seed" else 63 if "step" in name or "every" in name else 31
        if is_integer(value, 2**bits):
            raise ValueError(
                f"{name}={value!r} is more than can be counted; use at most 2**{bits} - 1 = {2**bits - 1}."
            )
        if value is not None and not is_integer(value, least):
            rule = "a positive integer" if least else "an integer of 0 or more"
            near = isinstance(value, float) and np.isfinite(value) and value >= least
            raise ValueError(f"{name}={value!r} must be {rule}{f'; use {int(value)}' if near else ''}.")
    return map(plain, values.values())


def resolve_env(
    env: Env | HostEnvFactory | str, options: Mapping[str, Any] | None
) -> tuple[Env | HostEnvFactory, dict[str, Any]]:
    """Return the environment, made if it is a name, and what is recorded of it."""
    if not isinstance(options, Mapping | None):
        raise ValueError(f"env_options={options!r} must be a mapping from the names of options to their values.")
    if isinstance(env, str):
        from podium import envs

        try:
            return envs.make(env, **(options or {})), {"name": env, "options": dict(options or {})}
        except RuntimeError as error:  # Data that the environment needs are missing.
            raise ValueError(str(error)) from error
    check_is_env(env)
    if options:
        raise ValueError("env_options go with the name of an environment; this one is made already.")
    return env, {"name": env.spec.name, "options": None, "object": {"spec_sha256": env.spec.sha256()}}


def _find_folder(run_dir: Path | str | None, resume: bool) -> RunFolder | None:
    """Return the folder of the run to resume; None for a new run, whose folder can be made but is not yet."""
    if run_dir is None:
        return None
    if resume:
        return RunFolder.open(run_dir)
    if distributed.is_first():
        check_new_folder(run_dir)
    return None
