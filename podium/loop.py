"""The host loop over compiled chunks; progress, metrics, evaluation, checkpoints and signals live between."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from podium import distributed
from podium.checkpoint import params_sha256
from podium.evaluate import Policy
from podium.evaluator import Evaluator
from podium.film import stacks_of
from podium.placement.contract import Program
from podium.recorder import Recorder
from podium.saved import Saved
from podium.schedule import Pace, Schedule
from podium.signals import agree
from podium.types import PyTree


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


@dataclasses.dataclass
class Run:
    """A program, compiled, and where it stands; `new` and `resume` make one that is ready for `train`.

    Attributes:
      program: compiled.
      schedule: of what happens between chunks.
      evaluator: of the current policy.
      recorder: of what the run leaves behind.
      caught: names of the signals caught so far.
      state: of the program.
      update: iterations behind `state`.
    """

    program: Program
    schedule: Schedule
    evaluator: Evaluator
    recorder: Recorder
    caught: list[str]
    state: PyTree
    update: int

    @classmethod
    def new(
        cls,
        program: Program,
        schedule: Schedule,
        evaluator: Evaluator,
        recorder: Recorder,
        caught: list[str],
        seed: int,
    ) -> Self:
        """Return a run at its beginning."""
        begin = lambda: program.init(seed)
        state = begin() if agree(caught) else _compile_beside(program, evaluator, begin)
        return cls(program, schedule, evaluator, recorder, caught, state, 0)

    @classmethod
    def resume(
        cls,
        saved: Saved,
        program: Program,
        schedule: Schedule,
        evaluator: Evaluator,
        recorder: Recorder,
        caught: list[str],
        seed: int,
    ) -> Self:
        """Return a run where it was saved, after the evaluation there, if a signal kept it from happening."""

        def begin() -> PyTree:
            if saved.state is not None:
                return saved.state
            first = program.init(seed)
            return first if saved.agent is None else program.adopt(first, saved.agent, saved.update)

        ended = saved.update == schedule.total or agree(caught)
        state = begin() if ended else _compile_beside(program, evaluator, begin)
        run = cls(program, schedule, evaluator, recorder, caught, state, saved.update)
        if recorder.lacks_evaluation(run.update) and (evaluation := run.evaluate()):
            recorder.add_evaluation(evaluation)
            recorder.save(run.state, run.update)
        loses = program.resume_loses
        if saved.update and loses and distributed.is_first():
            steps = recorder.env_steps(run.update)
            print(f"Resumed at env_steps={steps}: the learner's state is exactly as saved, {loses}.", file=sys.stderr)
        return run

    def train(self, longest_chunk: int) -> Result:
        """Train to the end, or until a signal is caught; a chunk has at most `longest_chunk` iterations."""
        program, schedule, recorder = self.program, self.schedule, self.recorder
        pace, stopped = Pace(longest_chunk), agree(self.caught)
        while self.update < schedule.total and not stopped:
            stop = schedule.next_stop(self.update)
            length = min(pace.length, stop - self.update)
            began = time.perf_counter()
            self.state, metrics = program.chunk(self.state, length)
            seconds = distributed.from_first(time.perf_counter() - began)
            self.update += length
            pace.measure(length, seconds)
            finite = metrics.pop("finite")
            recorder.count(metrics, length, seconds)
            if not np.all(finite):
                recorder.record(self.update)
                raise NonFiniteError(self._what_is_not_finite(finite, metrics))
            stopped = agree(self.caught)
            if self.update < stop:
                recorder.show(self.update)
            else:
                # After a signal the resumed run evaluates.
                evaluates = schedule.due(schedule.evaluate, self.update) and not stopped
                recorder.record(self.update, self.evaluate() if evaluates else None)
                if schedule.due(schedule.checkpoint, self.update):
                    recorder.save(self.state, self.update)
            recorder.check()
            stopped = stopped or agree(self.caught)
        if stopped and recorder.saved_update != self.update:
            recorder.save(self.state, self.update)
        if not stopped and not recorder.evaluation:
            recorder.evaluation = self.evaluate()
            stopped = agree(self.caught)
        return self._finish(stopped)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the current policy in process 0, for all; nothing where a signal ended it."""
        first = distributed.is_first()
        mine = self.evaluator(self.state, self.update, lambda: bool(self.caught)) if first else None
        evaluation: dict[str, Any] = distributed.from_first(mine)
        return evaluation

    def _finish(self, stopped: str | None) -> Result:
        agent_state = self.program.agent_state(self.state)
        params = self.evaluator.actor(agent_state)
        summary = self.recorder.finish(self.update, params_sha256(params), stopped)
        distributed.gather(None)  # JAX ends all soon after one has ended, so none may before process 0 has written.
        policy = _policies(self.program, params)
        return Result(agent_state, self.recorder.rows, summary, policy, self.recorder.run_dir, stopped)

    def _what_is_not_finite(self, finite: Any, metrics: Mapping[str, Any]) -> str:
        """Say what became NaN or infinite, what is left, and what usually helps."""
        agent, env = np.all(np.reshape(finite, (-1, 2)), axis=0).tolist()
        bad = [name for name, values in metrics.items() if not (agent or np.isfinite(values[-1]).all())]
        who = "" if env else f"A reward or an observation of {self.program.env.spec.name}"
        if not agent:
            who = f"{who} and the agent's parameters" if who else "The agent's parameters"
        remedy = "A smaller learning rate, bounded rewards or gradient clipping are the usual remedies."
        mend = "It is the environment that needs mending."
        if not env and stacks_of(self.program.env.spec.obs) is not None:
            mend = remedy = (
                "It is the environment that needs mending; rewards become NaN, too, where its observations are not the "
                "stacks that num_frames of its spec promises (podium.testing.check_env tells)."
            )
        return (
            f"{who} became NaN or infinite before env_steps={self.recorder.env_steps(self.update)}"
            f"{' (so did ' + ', '.join(bad) + ')' if bad else ''}; {self.recorder.last_good()}. "
            f"{mend if agent else remedy}"
        )


def _compile_beside(program: Program, evaluator: Evaluator, begin: Callable[[], PyTree]) -> PyTree:
    """Return the state that `begin` makes; XLA compiles the program meanwhile, and then the evaluation."""
    program.lower()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(program.compile)
        state = begin()
        if distributed.is_first():
            evaluator.compile(state)
        compiled.result()
    return state


def _policies(program: Program, params: PyTree) -> Any:
    params, spec, agent = jax.device_get(params), program.env.spec, program.agent.evaluated
    if program.sizes.seeds == 1:
        return Policy(agent, params, spec)
    pick: Callable[[int], PyTree] = lambda i: jax.tree.map(lambda x: x[i], params)
    return [Policy(agent, pick(i), spec) for i in range(program.sizes.seeds)]
