"""The host loop over compiled chunks; progress, metrics, evaluation, checkpoints and signals live between."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podium import distributed, xla
from podium.checkpoint import CheckpointError, Checkpoints, params_sha256
from podium.env import Env
from podium.evaluate import Policy, make_evaluator, make_host_evaluator
from podium.host import HostEnvs, frames_per_step
from podium.placement.program import Program
from podium.runs import RunFolder, compare_config
from podium.schedule import Pace, Schedule
from podium.sinks import JsonlSink, Sinks, read_metrics
from podium.tally import Tally, to_python
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


class Evaluator:
    """Evaluates the current policy on a key stream of its own: the same at the same iteration, whatever went before."""

    def __init__(self, program: Program, env: Env | HostEnvs, num_episodes: int, seed: int):
        several = program.sizes.seeds > 1
        self.actor = jax.jit(jax.vmap(program.agent.actor) if several else program.agent.actor)
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
        shapes = jax.eval_shape(self.actor, self._program.agent_state(state))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        options = xla.options(self._program.devices[0])
        self._function = self._function.lower(self._key, params).compile(options)

    def __call__(self, state: PyTree, update: int, stop: Callable[[], bool]) -> dict[str, Any]:
        """Return the evaluation of `state`; nothing where `stop` says to leave off, which only the CPU hears."""
        params = self.actor(self._program.agent_state(state))
        params = jax.device_put(params, self._program.devices[0])
        key = jax.random.fold_in(self._key, update)
        metrics = self._function(key, params, stop) if self._on_host else self._function(key, params)
        return {} if metrics is None else to_python(metrics)


class Run:
    """One run: its program, its clock, its rows, and where they are kept."""

    def __init__(self, program: Program, schedule: Schedule, evaluator: Evaluator, longest: int, keeps: bool):
        self.program, self.schedule, self.evaluator = program, schedule, evaluator
        self._keeps = keeps  # Whether there is a folder; process 0 alone has it.
        self.folder: RunFolder | None = None
        self.checkpoints: Checkpoints | None = None
        self.sinks = Sinks()
        self.rows: list[dict[str, Any]] = []
        self._pace = Pace(longest)
        self._tally = Tally()
        self._began = time.perf_counter()
        self._earlier_seconds = 0.0
        self._train_seconds = 0.0
        self._train_steps = 0
        self._evaluation: dict[str, Any] = {}
        self._adopted: tuple[PyTree, int] | None = None
        self.saved = 0
        self.caught: list[str] = []

    def env_steps(self, update: int) -> int:
        """Return the environment steps of `update` iterations, of one seed."""
        return update * self.schedule.steps_per_update

    def keep_in(self, folder: RunFolder, keep: int) -> Checkpoints:
        """Keep the run in `folder` from here on."""
        self.folder, self.checkpoints = folder, Checkpoints(folder.checkpoints, keep)
        return self.checkpoints

    def restore(self, folder: RunFolder, config: dict[str, Any], keep: int) -> PyTree | None:
        """Check that the run in `folder` can go on, and return its newest good state or None; write nothing.

        All processes read, so all must see the folder; process 0 says which checkpoint is good, and keeps the run. Of a
        state that another placement saved, the agent's is kept for `make_ready`, and the rest begins anew.
        """
        _check_checkpoints(folder.checkpoints)
        checkpoints = self.keep_in(folder, keep)
        saved_under = self._saved_under(checkpoints)
        other = saved_under not in (None, _layout(self.program))
        compare_config(folder.config, config, MAY_CHANGE | {"num_lanes"} if other else MAY_CHANGE)
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
        target = self.program.abstract_state()
        target, prefix = (target.agent, "agent") if other else (target, "")
        state, meta, env_steps = _restore_alike(checkpoints, target, prefix)
        done = int(meta["update"])
        if done > self.schedule.total:
            steps = self.schedule.steps_per_update
            raise ValueError(
                f"num_steps allows {self.schedule.total * steps} environment steps, but the run has done "
                f"{done * steps}; give a larger num_steps to go on."
            )
        self.rows = [row for row in rows if row.get("env_steps", 0) <= env_steps]
        self._earlier_seconds = float(meta.get("wall_seconds", 0.0))
        self._evaluation = dict(meta.get("evaluation", {}))
        self.saved = done
        if not other:
            self._tally = Tally(meta.get("tally"))
            return state
        self._adopted = state, done
        if distributed.is_first():
            print(
                f"Resumed under {_layout(self.program)} what {saved_under} saved: the agent's state is exactly as it "
                "was; episodes, and a replay where there is one, begin anew.",
                file=sys.stderr,
            )
        return None

    @staticmethod
    def _saved_under(checkpoints: Checkpoints) -> str | None:
        """Return the placement that saved the newest checkpoint, if that can be read and says so."""
        try:
            return checkpoints.meta(checkpoints.steps()[-1]).get("placement")
        except (CheckpointError, IndexError):
            return None  # What is damaged is told where it is restored.

    def _begin(self, seed: int) -> PyTree:
        """Return the first state, with an adopted agent's where another placement saved it."""
        state = self.program.init(seed)
        return state if self._adopted is None else self.program.adopt(state, *self._adopted)

    def make_ready(self, state: PyTree | None, seed: int) -> PyTree:
        """Return `state`, or the first one; XLA compiles the program meanwhile, and then the evaluation."""
        if self.saved == self.schedule.total or _agree(self.caught):
            return self._begin(seed) if state is None else state
        self.program.lower()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            compiled = thread.submit(self.program.compile)
            state = self._begin(seed) if state is None else state
            if distributed.is_first():
                self.evaluator.compile(state)
            compiled.result()
        return state

    def rewind(self, state: PyTree) -> None:
        """Take the files back to `state`, and make up for an evaluation that a signal kept from happening there."""
        update = self.program.update_count(state)
        sink = JsonlSink(self.folder.metrics) if self.folder else None
        if sink:
            sink.truncate_after(self.env_steps(update))
        row = self.rows[-1] if self.rows else {}
        missing = row.get("updates") == update and "eval_return" not in row
        if missing and self.schedule.due(self.schedule.evaluate, update):
            row.update(self._evaluate(state, update))
            if sink:
                sink.truncate_after(row["env_steps"] - 1)
                sink.write(row)
            self._save(state, update)

    def loop(self, state: PyTree) -> Result:
        """Train from `state` to the end, or until a signal is caught."""
        program, schedule = self.program, self.schedule
        update = program.update_count(state)
        stopped = _agree(self.caught)
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
            stopped = _agree(self.caught)
            if update == stop:
                self._stop(state, update, stopped)
            else:
                self.sinks.show(self._row(update))
            if self.checkpoints:
                self.checkpoints.check()
            stopped = stopped or _agree(self.caught)
        if stopped and self.saved != update:
            self._save(state, update)
        return self._finish(state, update, stopped)

    def _count(self, metrics: dict[str, Any], num_updates: int, seconds: float) -> None:
        self._pace.measure(num_updates, seconds)
        self._tally.add(metrics, num_updates, seconds)
        self._train_seconds += seconds
        self._train_steps += self._taken(metrics, num_updates)

    def _stop(self, state: PyTree, update: int, stopped: str | None) -> None:
        """Write a row, evaluate and save, as the schedule says; after a signal the resumed run evaluates."""
        row, self._tally = self._row(update), Tally()
        if self.schedule.due(self.schedule.evaluate, update) and not stopped:
            row.update(self._evaluate(state, update))
        self._record(row)
        if self.schedule.due(self.schedule.checkpoint, update):
            self._save(state, update)

    def _evaluate(self, state: PyTree, update: int) -> dict[str, Any]:
        """Evaluate in process 0, for all, to stand in the summary too; nothing where a signal cut it short."""
        mine = self.evaluator(state, update, lambda: bool(self.caught)) if distributed.is_first() else None
        evaluation: dict[str, Any] = distributed.from_first(mine)
        self._evaluation = evaluation or self._evaluation
        return evaluation

    def _steps(self, update: int) -> dict[str, int]:
        """Return the environment steps so far, and beside them the simulator's frames where a step has several."""
        steps, frames = self.env_steps(update), frames_per_step(self.program.env)
        return {"env_steps": steps} | ({"frames": steps * frames} if frames > 1 else {})

    def _taken(self, metrics: dict[str, Any], num_updates: int) -> int:
        """Return the steps of all seeds that iterations took: those counted, where not every row of them is a step."""
        nominal = num_updates * self.schedule.steps_per_update * self.program.sizes.seeds
        return int(np.sum(metrics.get("valid_steps", nominal)))

    def _row(self, update: int) -> dict[str, Any]:
        averages = self._tally.averages()
        return {
            **self._steps(update),
            "updates": update,
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": self._taken(averages, self._tally.updates) / self._tally.seconds,
            "compile_seconds": self.program.compile_seconds,
            **averages,
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
            "placement": _layout(self.program),
        }
        self.checkpoints.save(self.env_steps(update), state, meta)

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._began

    def _finish(self, state: PyTree, update: int, stopped: str | None) -> Result:
        if not stopped and not self._evaluation:
            self._evaluate(state, update)
            stopped = _agree(self.caught)
        if self.checkpoints:
            self.checkpoints.finish()
        agent_state = self.program.agent_state(state)
        params = self.evaluator.actor(agent_state)
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


def _layout(program: Program) -> str:
    """Name the placement of a program, and what its state's form depends on: equal names, equal forms."""
    name, workers = type(program).__name__.removesuffix("Program"), getattr(program, "workers", None)
    return f"{name} of {workers} workers" if workers else name


def _restore_alike(checkpoints: Checkpoints, target: PyTree, prefix: str) -> tuple[PyTree, dict[str, Any], int]:
    """Restore the newest good checkpoint; with several processes all take the one that process 0 finds good."""
    if distributed.is_first():
        state, meta, step = checkpoints.restore(target, prefix=prefix)
        distributed.from_first(step)
        return state, meta, step
    with contextlib.closing(checkpoints):
        return checkpoints.restore(target, distributed.from_first(None), fallback=False, prefix=prefix)


def _agree(caught: list[str]) -> str | None:
    """Return the name of a signal that any process has caught, the same in all, or None."""
    return next((name for names in distributed.gather(list(caught)) for name in names), None)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[str]]:
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


def _check_checkpoints(folder: Path) -> None:
    """Raise ValueError where something else is in the place of the checkpoints, or they cannot be listed."""
    try:
        if folder.exists():
            next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read ({error.strerror}); mend it, or remove it to start from the beginning."
        ) from None


def _policies(program: Program, params: PyTree, spec: EnvSpec) -> Any:
    params = jax.device_get(params)
    if program.sizes.seeds == 1:
        return Policy(program.agent, params, spec)
    pick: Callable[[int], PyTree] = lambda i: jax.tree.map(lambda x: x[i], params)  # noqa: E731
    return [Policy(program.agent, pick(i), spec) for i in range(program.sizes.seeds)]
