"""Train: the host loop over compiled chunks; progress, metrics, evaluation, checkpoints and signals live between."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from podium import distributed
from podium.agent import Agent
from podium.checkpoint import Checkpoints, params_sha256
from podium.env import Env
from podium.evaluate import Policy, make_evaluator, make_host_evaluator
from podium.host import HostEnvs, frames_per_step
from podium.placement.anakin import Anakin
from podium.placement.program import Placement, Program
from podium.runs import RunFolder, check_new_folder, compare_config
from podium.sinks import CurveSink, JsonlSink, Sinks, TerminalSink, WandbSink, read_metrics
from podium.types import EnvSpec, PyTree

MAY_CHANGE = frozenset({"num_steps", "eval_every", "eval_episodes", "checkpoint_every", "log_every", "devices"})
"""What a resumed run may do otherwise than the run it goes on with."""


class NonFiniteError(RuntimeError):
    """The agent's numbers became NaN or infinite; the last good checkpoint is kept."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What training returns.

    Attributes:
      state: the agent's final State (with a leading axis of seeds where there are several).
      metrics: one dict a logged chunk, as in metrics.jsonl.
      summary: how it ended, as in summary.json.
      policy: acts greedily or samples; a list with one policy a seed where there are several.
      run_dir: the run folder, or None; with several processes process 0 alone has it.
      interrupted: the signal that ended training early, such as "SIGINT", or None.
    """

    state: PyTree
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    policy: Any
    run_dir: Path | None
    interrupted: str | None = None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When to log, evaluate and save, in iterations, and when to end."""

    total: int
    log: int
    evaluate: int
    checkpoint: int
    steps_per_update: int

    def next_stop(self, update: int) -> int:
        """Return the first iteration after `update` at which the host has something to do."""
        stops = [(update // every + 1) * every for every in (self.log, self.evaluate, self.checkpoint) if every]
        return min(self.total, *stops)

    def due(self, every: int, update: int) -> bool:
        """Tell whether something done every so many iterations is due after iteration `update`."""
        return update == self.total or bool(every) and update % every == 0


def make_schedule(
    num_steps: int,
    steps_per_update: int,
    eval_every: int | None = None,
    checkpoint_every: int | None = None,
    log_every: int | None = None,
) -> Schedule:
    """Turn intervals in environment steps into iterations.

    Args:
      num_steps: budget of environment steps (of each seed); never exceeded, so a rest too small for an iteration is
        left.
      steps_per_update: of one iteration.
      eval_every: None for ten times over the run, 0 for the end only.
      checkpoint_every: None for every evaluation, 0 for the end only.
      log_every: None for a hundred times over the run.

    Raises:
      ValueError: for negative intervals, or a budget below one iteration.
    """
    if num_steps < steps_per_update:
        raise ValueError(
            f"num_steps={num_steps} is less than one iteration of num_envs * rollout_length = {steps_per_update} "
            f"environment steps; use {steps_per_update} or more, or smaller rollouts."
        )
    given = {"eval_every": eval_every, "checkpoint_every": checkpoint_every, "log_every": log_every}
    for name, value in given.items():
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is negative; use 0 or a number of environment steps.")
    total = num_steps // steps_per_update

    def iterations(every: int | None, default: int) -> int:
        return default if every is None else -(-every // steps_per_update)

    evaluate = iterations(eval_every, max(1, total // 10))
    checkpoint = iterations(checkpoint_every, evaluate)
    return Schedule(total, iterations(log_every, max(1, total // 100)) or total, evaluate, checkpoint, steps_per_update)


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
      rollout_length: steps of each environment an iteration, T; None takes the agent's own.
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
    rollout_length = agent.rollout_length if rollout_length is None else rollout_length
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
    env, env_record = _resolve_env(env, env_options)
    placement = Anakin() if placement is None else placement
    schedule = make_schedule(num_steps, num_envs * rollout_length, eval_every, checkpoint_every, log_every)
    folder = _find_folder(run_dir, resume)
    # No two stops lie further apart than the beginning and the first.
    longest = min(schedule.next_stop(0), _Pace.LONGEST)
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
    run = _Run(program, schedule, _Evaluator(program, env, eval_episodes, seed), longest, run_dir is not None)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(program.close)
        state = run.restore(folder, config, keep_checkpoints) if folder else None
        if announce is not None and distributed.is_first():
            announce(program, schedule)
        caught = stack.enter_context(_catch_signals())
        if run_dir is not None and folder is None and distributed.is_first():
            run.keep_in(RunFolder.create(run_dir, config, placement.explain()), keep_checkpoints)
        if run.folder:
            run.folder.write_explanation(program.explain())
        state = run.make_ready(state, seed, caught)
        if folder:
            run.rewind(state, caught)
            if run.saved and isinstance(program.env, HostEnvs) and distributed.is_first():
                run.say_episodes_restart()
        if distributed.is_first():
            run.sinks.extend(_make_sinks(run.folder, schedule, run.rows, progress, wandb, config, sinks))
        return run.loop(state, caught)


def _check_integers(least: int, **values: Any) -> None:
    """Raise ValueError for a value that is no integer of at least `least`; None leaves the choice and passes."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            rule = "a positive integer" if least else "an integer of 0 or more"
            near = isinstance(value, float) and np.isfinite(value) and value >= least
            raise ValueError(f"{name}={value!r} must be {rule}{f'; use {int(value)}' if near else ''}.")


def _resolve_env(env: Env | HostEnvs | str, options: Mapping[str, Any] | None) -> tuple[Env | HostEnvs, dict[str, Any]]:
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


def _check_checkpoints(folder: Path) -> None:
    """Raise ValueError where something else is in the place of the checkpoints, or they cannot be listed."""
    try:
        if folder.exists():
            next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read ({error.strerror}); mend it, or remove it to start from the beginning."
        ) from None


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


class _Evaluator:
    """Evaluates the current policy on a key stream of its own: the same at the same iteration, whatever went before."""

    def __init__(self, program: Program, env: Env | HostEnvs, num_episodes: int, seed: int):
        several = program.sizes.seeds > 1
        self._actor = jax.jit(jax.vmap(program.agent.actor) if several else program.agent.actor)
        self._function: Any
        self._on_host = isinstance(env, HostEnvs)
        if isinstance(env, HostEnvs):
            self._function = make_host_evaluator(program.agent, env, num_episodes)
        else:
            function = make_evaluator(program.agent, env, num_episodes)
            # On one device whatever the mesh: the numbers must not depend on the number of devices.
            self._function = jax.jit(jax.vmap(function, in_axes=(None, 0)) if several else function)
        self._key = jax.random.fold_in(jax.random.key(seed), 0x65766C)
        self._program = program

    def compile(self, state: PyTree) -> None:
        """Compile, so that the first call does not; what plays on the CPU compiles as it goes."""
        if self._on_host:
            return
        here = jax.sharding.SingleDeviceSharding(self._program.devices[0])
        shapes = jax.eval_shape(self._actor, self._program.agent_state(state))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        self._function = self._function.lower(self._key, params).compile()

    def __call__(self, state: PyTree, update: int, stop: Callable[[], bool]) -> dict[str, Any]:
        """Return the evaluation of `state`; nothing where `stop` says to leave off, which only the CPU hears."""
        params = self._actor(self._program.agent_state(state))
        params = jax.device_put(params, self._program.devices[0])
        key = jax.random.fold_in(self._key, update)
        metrics = self._function(key, params, stop) if self._on_host else self._function(key, params)
        return {} if metrics is None else _to_python(metrics)


_SUMS = (
    "episodes",
    "episode_return_sum",
    "episode_length_sum",
    "valid_steps",
    "dropped_batches",
    "env_seconds",
    "inference_seconds",
    "learn_seconds",
)
_MAXIMA = ("policy_lag_max",)


class _Tally:
    """The metrics of every iteration since the last row, added up in order: the same bits whatever the chunks were."""

    def __init__(self, record: Mapping[str, Any] | None = None):
        record = record or {}
        self.updates, self.seconds = int(record.get("updates", 0)), float(record.get("seconds", 0.0))
        self._sums = {name: np.asarray(value, float) for name, value in record.get("sums", {}).items()}
        self._counts = {name: np.asarray(value, int) for name, value in record.get("counts", {}).items()}

    def add(self, metrics: Mapping[str, Any], num_updates: int, seconds: float) -> None:
        """Add the metrics of a chunk, [num_updates, ...] each."""
        self.updates += num_updates
        self.seconds += seconds
        for name, values in metrics.items():
            # NaN stands for what did not happen, but in a sum.
            counted = np.ones_like(values, bool) if name in _SUMS else np.isfinite(values)
            before = np.asarray(self._sums.get(name, np.zeros(values.shape[1:])), float)
            if name in _MAXIMA:
                self._sums[name] = np.maximum(before, values.max(0))
                continue
            # A cumulative sum adds one by one; `np.sum` adds in pairs, which would show where chunks began.
            self._sums[name] = np.cumsum(np.concatenate([before[None], np.where(counted, values, 0.0)]), axis=0)[-1]
            self._counts[name] = self._counts.get(name, 0) + counted.sum(0)

    def record(self) -> dict[str, Any]:
        """Return all of it for a checkpoint."""
        return {"updates": self.updates, "seconds": self.seconds, "sums": self._sums, "counts": self._counts}

    def averages(self) -> dict[str, Any]:
        """Return means over episodes and over iterations, NaN where there was none."""
        sums, means = dict(self._sums), {}
        with np.errstate(invalid="ignore", divide="ignore"):
            episodes = sums.pop("episodes")
            means["episode_return"] = _to_python(sums.pop("episode_return_sum") / episodes)
            means["episode_length"] = _to_python(sums.pop("episode_length_sum") / episodes)
            means["episodes"] = _to_python(episodes)
            whole = lambda name: name in _SUMS or name in _MAXIMA  # noqa: E731
            return means | {
                name: _to_python(value if whole(name) else value / self._counts[name]) for name, value in sums.items()
            }


class _Pace:
    """Chooses how many iterations the next chunk may have, so that signals and NaN are noticed soon.

    Attributes:
      SECONDS: that a chunk shall take at most, judged by the last one.
      FIRST: iterations of the first chunk.
      LONGEST: iterations of any: so many rows has the buffer of metrics on the devices.
    """

    SECONDS, FIRST, LONGEST = 2.0, 1, 1024

    def __init__(self, longest: int):
        self._longest = longest
        self.length = min(self.FIRST, longest)

    def measure(self, num_updates: int, seconds: float) -> None:
        """Take note of a chunk."""
        # At most doubled: iterations that only fill a replay say little about those that learn.
        self.length = max(1, int(min(self.SECONDS * num_updates / seconds, 2 * self.length, self._longest)))


class _Run:
    """One run: its program, its clock, its rows, and where they are kept."""

    def __init__(self, program: Program, schedule: Schedule, evaluator: _Evaluator, longest: int, keeps: bool):
        self.program, self.schedule, self.evaluator = program, schedule, evaluator
        self._keeps = keeps  # Whether there is a folder; process 0 alone has it.
        self.folder: RunFolder | None = None
        self.checkpoints: Checkpoints | None = None
        self.sinks = Sinks()
        self.rows: list[dict[str, Any]] = []
        self._pace = _Pace(longest)
        self._tally = _Tally()
        self._began = time.perf_counter()
        self._earlier_seconds = 0.0
        self._train_seconds = 0.0
        self._train_steps = 0
        self._evaluation: dict[str, Any] = {}
        self.saved = 0

    def env_steps(self, update: int) -> int:
        """Return the environment steps of `update` iterations, of one seed."""
        return update * self.schedule.steps_per_update

    def keep_in(self, folder: RunFolder, keep: int) -> Checkpoints:
        """Keep the run in `folder` from here on."""
        self.folder, self.checkpoints = folder, Checkpoints(folder.checkpoints, keep)
        return self.checkpoints

    def restore(self, folder: RunFolder, config: dict[str, Any], keep: int) -> PyTree | None:
        """Check that the run in `folder` can go on, and return its newest good state or None; write nothing.

        All processes read, so all must see the folder; process 0 says which checkpoint is good, and keeps the run.
        """
        compare_config(folder.config, config, MAY_CHANGE)
        _check_checkpoints(folder.checkpoints)
        checkpoints = self.keep_in(folder, keep)
        rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
        seen = distributed.gather(checkpoints.steps())
        if any(steps != seen[0] for steps in seen):
            raise ValueError(f"run_dir={folder.path} differs between processes; put it on a disk that all hosts share.")
        if not distributed.is_first():
            self.folder = self.checkpoints = None
        if not seen[0]:
            # Stopped before the first checkpoint: the beginning is the newest good state.
            warnings.warn(f"{folder.path} holds no checkpoint yet; the run starts from its beginning.", stacklevel=3)
            return None
        state, meta, env_steps = _restore_alike(checkpoints, self.program.abstract_state())
        done = self.program.update_count(state)
        if done > self.schedule.total:
            steps = self.schedule.steps_per_update
            raise ValueError(
                f"num_steps allows {self.schedule.total * steps} environment steps, but the run has done "
                f"{done * steps}; give a larger num_steps to go on."
            )
        self.rows = [row for row in rows if row.get("env_steps", 0) <= env_steps]
        self._earlier_seconds = float(meta.get("wall_seconds", 0.0))
        self._evaluation = dict(meta.get("evaluation", {}))
        self._tally = _Tally(meta.get("tally"))
        self.saved = done
        return state

    def make_ready(self, state: PyTree | None, seed: int, caught: list[str]) -> PyTree:
        """Return `state`, or the first one; XLA compiles the program meanwhile, and then the evaluation."""
        if caught or (state is not None and self.program.update_count(state) == self.schedule.total):
            return self.program.init(seed) if state is None else state
        self.program.lower()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            compiled = thread.submit(self.program.compile)
            state = self.program.init(seed) if state is None else state
            if distributed.is_first():
                self.evaluator.compile(state)
            compiled.result()
        return state

    def rewind(self, state: PyTree, caught: list[str]) -> None:
        """Take the files back to `state`, and make up for an evaluation that a signal kept from happening there."""
        update = self.program.update_count(state)
        sink = JsonlSink(self.folder.metrics) if self.folder else None
        if sink:
            sink.truncate_after(self.env_steps(update))
        row = self.rows[-1] if self.rows else {}
        missing = row.get("updates") == update and "eval_return" not in row
        if missing and self.schedule.due(self.schedule.evaluate, update):
            row.update(self._evaluate(state, update, caught))
            if sink:
                sink.truncate_after(row["env_steps"] - 1)
                sink.write(row)
            self._save(state, update)

    def loop(self, state: PyTree, caught: list[str]) -> Result:
        """Train from `state` to the end, or until a signal is caught."""
        program, schedule = self.program, self.schedule
        update = program.update_count(state)
        stopped = _agree(caught)
        while update < schedule.total and not stopped:
            stop = schedule.next_stop(update)
            length = min(self._pace.length, stop - update)
            began = time.perf_counter()
            state, metrics = program.chunk(state, length)
            seconds = distributed.from_first(time.perf_counter() - began)
            update += length
            finite = metrics.pop("finite")
            self._count(metrics, length, seconds)
            self._require_finite(finite, metrics, update)
            stopped = _agree(caught)
            if update == stop:
                self._stop(state, update, stopped, caught)
            else:
                self.sinks.show(self._row(update))
            if self.checkpoints:
                self.checkpoints.check()
            stopped = stopped or _agree(caught)
        if stopped and self.saved != update:
            self._save(state, update)
        return self._finish(state, update, stopped, caught)

    def _count(self, metrics: dict[str, Any], num_updates: int, seconds: float) -> None:
        self._pace.measure(num_updates, seconds)
        self._tally.add(metrics, num_updates, seconds)
        self._train_seconds += seconds
        self._train_steps += num_updates * self.schedule.steps_per_update * self.program.sizes.seeds

    def _stop(self, state: PyTree, update: int, stopped: str | None, caught: list[str]) -> None:
        """Write a row, evaluate and save, as the schedule says; after a signal the resumed run evaluates."""
        row, self._tally = self._row(update), _Tally()
        if self.schedule.due(self.schedule.evaluate, update) and not stopped:
            row.update(self._evaluate(state, update, caught))
        self._record(row)
        if self.schedule.due(self.schedule.checkpoint, update):
            self._save(state, update)

    def _evaluate(self, state: PyTree, update: int, caught: list[str]) -> dict[str, Any]:
        """Return an evaluation by process 0, to stand in the summary too; nothing where a signal cut it short."""
        own = self.evaluator(state, update, lambda: bool(caught)) if distributed.is_first() else None
        evaluation: dict[str, Any] = distributed.from_first(own)
        self._evaluation = evaluation or self._evaluation
        return evaluation

    def _steps(self, update: int) -> dict[str, int]:
        """Return the environment steps so far, and beside them the simulator's frames where a step has several."""
        steps, frames = self.env_steps(update), frames_per_step(self.program.env)
        return {"env_steps": steps} | ({"frames": steps * frames} if frames > 1 else {})

    def _row(self, update: int) -> dict[str, Any]:
        steps = self._tally.updates * self.schedule.steps_per_update * self.program.sizes.seeds
        return {
            **self._steps(update),
            "updates": update,
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": steps / self._tally.seconds,
            "compile_seconds": self.program.compile_seconds,
            **self._tally.averages(),
        }

    def _require_finite(self, finite: Any, metrics: dict[str, Any], update: int) -> None:
        agent, env = np.all(np.reshape(finite, (-1, 2)), axis=0).tolist()
        if agent and env:
            return
        self._record(self._row(update))
        if self.checkpoints:
            self.checkpoints.finish()
        last = self.checkpoints.steps() if self.checkpoints else []
        kept = f"the last good checkpoint is at {last[-1]} environment steps" if last else "there is no checkpoint"
        kept = kept if distributed.is_first() else "process 0 says which checkpoint is the last good one"
        bad = [name for name, values in metrics.items() if not (agent or np.isfinite(values[-1]).all())]
        who = "" if env else f"A reward or an observation of {self.program.env.spec.name}"
        if not agent:
            who = f"{who} and the agent's parameters" if who else "The agent's parameters"
        remedy = "A smaller learning rate, bounded rewards or gradient clipping are the usual remedies."
        raise NonFiniteError(
            f"{who} became NaN or infinite before env_steps={self.env_steps(update)}"
            f"{' (so did ' + ', '.join(bad) + ')' if bad else ''}; {kept}. "
            f"{'It is the environment that needs mending.' if agent else remedy}"
        )

    def _record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.sinks.write(row)

    def _save(self, state: PyTree, update: int) -> None:
        if not self._keeps:
            return
        self.saved = update
        state = distributed.whole(state)
        if self.checkpoints is None:
            return
        evaluated = self.rows[-1].get("eval_return") if self.rows and self.rows[-1]["updates"] == update else None
        meta = {
            "update": update,
            "wall_seconds": self._wall_seconds(),
            "eval_return": None if evaluated is None else float(np.mean(evaluated)),
            "evaluation": self._evaluation,
            "tally": self._tally.record(),
        }
        self.checkpoints.save(self.env_steps(update), state, meta)

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._began

    def _finish(self, state: PyTree, update: int, stopped: str | None, caught: list[str]) -> Result:
        if not stopped and not self._evaluation:
            self._evaluate(state, update, caught)
        if self.checkpoints:
            self.checkpoints.finish()
        agent_state = self.program.agent_state(state)
        params = self.evaluator._actor(agent_state)
        last = self.rows[-1] if self.rows else {}
        summary = {
            **{k: v for k, v in last.items() if k not in self._evaluation},
            **self._evaluation,
            **self._steps(update),
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": self._train_steps / self._train_seconds if self._train_seconds else None,
            "compile_seconds": self.program.compile_seconds,
            "params_sha256": params_sha256(params),
            "num_devices": len(self.program.devices),
            "platform": self.program.devices[0].platform,
            "num_processes": distributed.num_processes(),
            "interrupted": stopped,
        }
        if self.folder:
            before = self.folder.read_summary() if not self._train_steps else None
            if before and before.get("params_sha256") == summary["params_sha256"] and not before.get("interrupted"):
                summary = before  # The run had ended already: its clock and its speed stand.
            else:
                self.folder.write_summary(summary)
        self.sinks.close(summary)
        if stopped and distributed.is_first():
            self._say_how_to_go_on(stopped)
        distributed.gather(None)  # JAX ends all soon after one has ended, so none may before process 0 has written.
        policy = _policies(self.program, params, self._spec)
        run_dir = self.folder.path if self.folder else None
        return Result(agent_state, self.rows, summary, policy, run_dir, stopped)

    @property
    def _spec(self) -> EnvSpec:
        return self.program.env.spec

    def say_episodes_restart(self) -> None:
        """Say what resuming is not exact in, where environments run on the CPU, outside the state."""
        print(
            f"Resumed at env_steps={self.env_steps(self.saved)}: the learner's state is exactly as saved, episodes "
            "restart (environments on the CPU save no state).",
            file=sys.stderr,
        )

    def _say_how_to_go_on(self, name: str) -> None:
        if self.folder is None:
            how = "nothing was saved: give run_dir to keep checkpoints."
        elif not self.saved:
            how = f"nothing is trained yet; the same command with --resume (resume=True) begins {self.folder.path}."
        else:
            how = f"saved in {self.folder.path}; the same command with --resume (resume=True) goes on from there."
        print(f"Stopped by {name}: {how}", file=sys.stderr)

    def close(self) -> None:
        """Release files and threads after an error; after a good end there is nothing left to do."""
        for sink in list(self.sinks):
            with contextlib.suppress(Exception):
                sink.close({})
        self.sinks.clear()
        if self.checkpoints:
            self.checkpoints.close()


def _restore_alike(checkpoints: Checkpoints, target: PyTree) -> tuple[PyTree, dict[str, Any], int]:
    """Restore the newest good checkpoint; with several processes all take the one that process 0 finds good."""
    if distributed.is_first():
        state, meta, step = checkpoints.restore(target)
        distributed.from_first(step)
        return state, meta, step
    with contextlib.closing(checkpoints):
        return checkpoints.restore(target, distributed.from_first(None), fallback=False)


def _agree(caught: list[str]) -> str | None:
    """Return the name of a signal that any process has caught, the same in all, or None."""
    return next((name for names in distributed.gather(list(caught)) for name in names), None)


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[str]]:
    """Collect the names of SIGINT and SIGTERM instead of dying; a second one acts as usual. Main thread only."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before: dict[int, Any] = {}

    def handler(number: int, frame: Any) -> None:
        caught.append(signal.Signals(number).name)
        signal.signal(number, before[number])
        print(f"{caught[0]}: saving after this chunk or compilation; once more quits at once.", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        # None where a handler was not installed by Python, such as that of jax.distributed.
        before[number] = signal.signal(number, handler) or signal.SIG_DFL
    try:
        yield caught
    finally:
        for caught_number, former in before.items():
            signal.signal(caught_number, former)


def _policies(program: Program, params: PyTree, spec: EnvSpec) -> Any:
    params = jax.device_get(params)
    if program.sizes.seeds == 1:
        return Policy(program.agent, params, spec)
    pick: Callable[[int], PyTree] = lambda i: jax.tree.map(lambda x: x[i], params)  # noqa: E731
    return [Policy(program.agent, pick(i), spec) for i in range(program.sizes.seeds)]


def _to_python(value: Any) -> Any:
    """Return arrays as floats, or lists of floats, one a seed."""
    if isinstance(value, dict):
        return {key: _to_python(item) for key, item in value.items()}
    array = np.asarray(value, float)
    return float(array) if array.ndim == 0 else array.tolist()
