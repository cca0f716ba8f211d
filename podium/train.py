"""Train: the host loop over compiled chunks; progress, metrics, evaluation, checkpoints and signals live between."""

from __future__ import annotations

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

from podium.agent import Agent
from podium.checkpoint import Checkpoints, params_sha256
from podium.env import Env
from podium.evaluate import Policy, make_evaluator
from podium.placement.anakin import Anakin
from podium.placement.program import Placement, Program
from podium.runs import RunFolder, compare_config
from podium.sinks import CurveSink, JsonlSink, Sinks, TerminalSink, WandbSink, read_metrics
from podium.types import PyTree

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
      run_dir: the run folder, or None.
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


def train(
    agent: Agent,
    env: Env | str,
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
) -> Result:
    """Train an agent in an environment.

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

    Returns:
      a `Result`.

    Raises:
      ValueError: for anything out of range, before anything is compiled or written.
      NonFiniteError: the agent's numbers became NaN or infinite; the last good checkpoint is kept.
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
    longest = max(schedule.next_stop(update) - update for update in _stops(schedule))
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
    evaluator = _Evaluator(program, env, eval_episodes, seed)
    folder = _open_folder(run_dir, resume, config, placement)
    run = _Run(program, schedule, evaluator, folder, keep_checkpoints)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        state = run.restore(seed) if resume else program.init(seed)
        earlier = run.rows
        run.sinks.extend(_make_sinks(folder, schedule, earlier, progress, wandb, config, sinks))
        return run.loop(state)


def _check_integers(least: int, **values: Any) -> None:
    """Raise ValueError for a value that is no integer of at least `least`; None leaves the choice and passes."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            rule = "a positive integer" if least else "an integer of 0 or more"
            near = isinstance(value, float) and np.isfinite(value) and value >= least
            raise ValueError(f"{name}={value!r} must be {rule}{f'; use {int(value)}' if near else ''}.")


def _resolve_env(env: Env | str, options: Mapping[str, Any] | None) -> tuple[Env, dict[str, Any]]:
    if isinstance(env, str):
        from podium import envs

        return envs.make(env, **(options or {})), {"name": env, "options": dict(options or {})}
    if options:
        raise ValueError("env_options go with the name of an environment; this one is made already.")
    return env, {"name": env.spec.name, "options": None}


def _stops(schedule: Schedule) -> Iterator[int]:
    update = 0
    while update < schedule.total:
        yield update
        update = schedule.next_stop(update)


def _open_folder(
    run_dir: Path | str | None, resume: bool, config: dict[str, Any], placement: Placement
) -> RunFolder | None:
    if run_dir is None:
        return None
    if not resume:
        return RunFolder.create(run_dir, config, placement.explain())
    folder = RunFolder.open(run_dir)
    compare_config(folder.config, config, MAY_CHANGE)
    return folder


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

    def __init__(self, program: Program, env: Env, num_episodes: int, seed: int):
        function = make_evaluator(program.agent, env, num_episodes)
        self._several = program.sizes.seeds > 1
        self._actor = jax.jit(jax.vmap(program.agent.actor) if self._several else program.agent.actor)
        # On one device whatever the mesh: the numbers must not depend on the number of devices.
        self._function = jax.jit(jax.vmap(function, in_axes=(None, 0)) if self._several else function)
        self._key = jax.random.fold_in(jax.random.key(seed), 0x65766C)
        self._program = program

    def __call__(self, state: PyTree, update: int) -> dict[str, Any]:
        params = self._actor(self._program.agent_state(state))
        params = jax.device_put(params, self._program.devices[0])
        return _to_python(self._function(jax.random.fold_in(self._key, update), params))


class _Run:
    """One run: its program, its clock, its rows, and where they are kept."""

    def __init__(
        self, program: Program, schedule: Schedule, evaluator: _Evaluator, folder: RunFolder | None, keep: int
    ):
        self.program, self.schedule, self.evaluator, self.folder = program, schedule, evaluator, folder
        self.checkpoints = Checkpoints(folder.checkpoints, keep) if folder else None
        self.sinks = Sinks()
        self.rows: list[dict[str, Any]] = []
        self._began = time.perf_counter()
        self._earlier_seconds = 0.0
        self._train_seconds = 0.0
        self._train_steps = 0
        self._evaluation: dict[str, Any] = {}
        self._saved = 0

    def restore(self, seed: int) -> PyTree:
        """Return the newest good state, and take the run's rows back to it."""
        assert self.folder is not None and self.checkpoints is not None
        if not self.checkpoints.steps():
            # Killed before the first checkpoint: the beginning is the newest good state.
            warnings.warn(
                f"{self.folder.path} holds no checkpoint yet; the run starts from its beginning.", stacklevel=3
            )
            JsonlSink(self.folder.metrics).truncate_after(0)
            return self.program.init(seed)
        state, meta, env_steps = self.checkpoints.restore(self.program.abstract_state())
        done = self.program.update_count(state)
        if done > self.schedule.total:
            steps = self.schedule.steps_per_update
            raise ValueError(
                f"num_steps allows {self.schedule.total * steps} environment steps, but the run has done "
                f"{done * steps}; give a larger num_steps to go on."
            )
        JsonlSink(self.folder.metrics).truncate_after(env_steps)
        if self.folder.metrics.exists():
            self.rows = read_metrics(self.folder.metrics)
        self._earlier_seconds = float(meta.get("wall_seconds", 0.0))
        self._evaluation = dict(meta.get("evaluation", {}))
        self._saved = done
        if self.schedule.due(self.schedule.evaluate, done):
            self._evaluate_late(state, done)
        return state

    def _evaluate_late(self, state: PyTree, update: int) -> None:
        """Make up for the evaluation that a signal kept from happening, so that no row lacks one."""
        assert self.folder is not None
        if not self.rows or self.rows[-1]["updates"] != update or "eval_return" in self.rows[-1]:
            return
        row = self.rows.pop()
        self._evaluation = self.evaluator(state, update)
        row.update(self._evaluation)
        sink = JsonlSink(self.folder.metrics)
        sink.truncate_after(row["env_steps"] - 1)
        self.rows.append(row)
        sink.write(row)
        self._save(state, row)

    def loop(self, state: PyTree) -> Result:
        """Train from `state` to the end, or to a signal."""
        program, schedule = self.program, self.schedule
        update = program.update_count(state)
        if update < schedule.total:
            program.compile()
        row: dict[str, Any] = {}
        with _catch_signals() as caught:
            while update < schedule.total and not caught:
                stop = schedule.next_stop(update)
                began = time.perf_counter()
                state, metrics = program.chunk(state, stop - update)
                seconds = time.perf_counter() - began
                row = self._row(metrics, stop, stop - update, seconds)
                update = stop
                self._require_finite(metrics, row)
                if schedule.due(schedule.evaluate, update) and not caught:
                    self._evaluation = self.evaluator(state, update)
                    row.update(self._evaluation)
                self._record(row)
                if caught or schedule.due(schedule.checkpoint, update):
                    self._save(state, row)
                elif self.checkpoints:
                    self.checkpoints.check()
            if row and self._saved != update:
                self._save(state, row)  # The signal came after the chunk.
            return self._finish(state, update, caught)

    def _row(self, metrics: dict[str, Any], update: int, num_updates: int, seconds: float) -> dict[str, Any]:
        steps = num_updates * self.schedule.steps_per_update * self.program.sizes.seeds
        self._train_seconds += seconds
        self._train_steps += steps
        row = {
            "env_steps": update * self.schedule.steps_per_update,
            "updates": update,
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": steps / seconds,
            "compile_seconds": self.program.compile_seconds,
        }
        sums = {name: np.sum(values, axis=0) for name, values in metrics.items() if _is_sum(name)}
        with np.errstate(invalid="ignore", divide="ignore"):
            row["episode_return"] = _to_python(sums["episode_return_sum"] / sums["episodes"])
            row["episode_length"] = _to_python(sums["episode_length_sum"] / sums["episodes"])
        row["episodes"] = _to_python(sums["episodes"])
        for name, values in metrics.items():
            if not _is_sum(name) and name != "finite":
                row[name] = _to_python(_mean_of_numbers(values))
        return row

    def _require_finite(self, metrics: dict[str, Any], row: dict[str, Any]) -> None:
        if np.all(metrics["finite"]):
            return
        self._record(row)
        if self.checkpoints:
            self.checkpoints.finish()
        last = self.checkpoints.steps() if self.checkpoints else []
        kept = f"the last good checkpoint is at {last[-1]} environment steps" if last else "there is no checkpoint"
        bad = [name for name, values in metrics.items() if name != "finite" and not np.isfinite(values[-1]).all()]
        raise NonFiniteError(
            f"The agent's parameters became NaN or infinite before env_steps={row['env_steps']}"
            f"{' (so did ' + ', '.join(bad) + ')' if bad else ''}; {kept}. A smaller learning rate, bounded rewards or "
            "gradient clipping are the usual remedies."
        )

    def _record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.sinks.write(row)

    def _save(self, state: PyTree, row: dict[str, Any]) -> None:
        if self.checkpoints is None:
            return
        evaluated = row.get("eval_return")
        meta = {
            "update": row["updates"],
            "wall_seconds": self._wall_seconds(),
            "eval_return": None if evaluated is None else float(np.mean(evaluated)),
            "evaluation": self._evaluation,
        }
        self.checkpoints.save(row["env_steps"], state, meta)
        self._saved = row["updates"]

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._began

    def _finish(self, state: PyTree, update: int, caught: list[str]) -> Result:
        if not caught and not self._evaluation:
            self._evaluation = self.evaluator(state, update)
        if self.checkpoints:
            self.checkpoints.finish()
        agent_state = self.program.agent_state(state)
        params = self.evaluator._actor(agent_state)
        last = self.rows[-1] if self.rows else {}
        summary = {
            **{k: v for k, v in last.items() if k not in self._evaluation},
            **self._evaluation,
            "env_steps": update * self.schedule.steps_per_update,
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": self._train_steps / self._train_seconds if self._train_seconds else None,
            "compile_seconds": self.program.compile_seconds,
            "params_sha256": params_sha256(params),
            "num_devices": len(self.program.devices),
            "platform": self.program.devices[0].platform,
            "interrupted": caught[0] if caught else None,
        }
        if self.folder:
            before = self.folder.read_summary() if not self._train_steps else None
            if before and before.get("params_sha256") == summary["params_sha256"] and not before.get("interrupted"):
                summary = before  # The run had ended already: its clock and its speed stand.
            else:
                self.folder.write_summary(summary)
        self.sinks.close(summary)
        if caught:
            self._say_how_to_go_on(caught[0])
        policy = _policies(self.program, params, self._spec)
        run_dir = self.folder.path if self.folder else None
        return Result(agent_state, self.rows, summary, policy, run_dir, caught[0] if caught else None)

    @property
    def _spec(self) -> Any:
        return self.program.env.spec  # type: ignore[attr-defined]

    def _say_how_to_go_on(self, name: str) -> None:
        if self.folder is None:
            how = "nothing was saved: give run_dir to keep checkpoints."
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
        print(f"{caught[0]}: saving after this chunk; once more quits at once.", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handler)
    try:
        yield caught
    finally:
        for caught_number, former in before.items():
            signal.signal(caught_number, former)


def _policies(program: Program, params: PyTree, spec: Any) -> Any:
    params = jax.device_get(params)
    if program.sizes.seeds == 1:
        return Policy(program.agent, params, spec)
    pick: Callable[[int], PyTree] = lambda i: jax.tree.map(lambda x: x[i], params)  # noqa: E731
    return [Policy(program.agent, pick(i), spec) for i in range(program.sizes.seeds)]


def _is_sum(name: str) -> bool:
    return name in ("episodes", "episode_return_sum", "episode_length_sum")


def _mean_of_numbers(values: np.ndarray) -> np.ndarray:
    """Return the mean over updates, leaving out those that did not happen (NaN), or NaN where none did."""
    counted = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counted, values, 0.0).sum(0) / counted.sum(0)


def _to_python(value: Any) -> Any:
    """Return arrays as floats, or lists of floats, one a seed."""
    if isinstance(value, dict):
        return {key: _to_python(item) for key, item in value.items()}
    array = np.asarray(value, float)
    return float(array) if array.ndim == 0 else array.tolist()
