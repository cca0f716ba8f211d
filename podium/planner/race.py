"""Programs run in turn, a few seconds each: how fast each is, and what its others wait for."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from podium.placement.contract import Program

MOST_UPDATES = 1_000
"""Of a chunk; what raced programs are built with as `max_updates`."""

QUEUED = 4
"""Updates before the clock starts: what plays beside a learner has filled its queues while others ran."""

FILL_SECONDS = 30.0
"""At most, until learning begins."""

HALF, FINAL = 3, 5
"""Turns of the faster half, and of the two fastest; the others have one."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program did.

    Attributes:
      turns: environment steps a second in each of its turns.
      compile_seconds: until its first update was done: tracing, compiling, and that update.
      bottleneck: see the function of this name.
      why_not: why it could not run, or "".
    """

    turns: tuple[float, ...] = ()
    compile_seconds: float = 0.0
    bottleneck: str = ""
    why_not: str = ""

    @property
    def measured(self) -> float:
        """Environment steps a second, the median of the turns; 0 where there is none."""
        return statistics.median(self.turns) if self.turns else 0.0


class Runner:
    """A program under way, which compiles and does its first update here; see `Outcome` for its attributes."""

    def __init__(self, program: Program, seed: int):
        self._program = program
        self._rows: list[Mapping[str, Any]] = []
        self.turns: list[float] = []
        began = time.perf_counter()
        program.compile()
        self._state = program.init(seed)
        self._run(1)
        self._compile_seconds = time.perf_counter() - began

    @property
    def rank(self) -> tuple[bool, float]:
        """What the fastest has most of; steps of whole episodes teach otherwise, and come after all others."""
        return not self._program.whole_episodes, statistics.median(self.turns)

    def begin(self, seconds: float, enough: float) -> str:
        """Run until learning has begun, and take the first turn; return why that cannot be, or "".

        Nothing is faster than updates from full queues that learn nothing: where even those take longer than `seconds`
        and are slower than `enough` steps a second, they are the turn.
        """
        updates, began = 1, time.perf_counter()
        while True:
            learns = self._run(updates)
            if self._seconds > seconds and self._rate < enough:
                self._note()
                return ""
            if learns:
                self.turn(seconds)
                return ""
            if time.perf_counter() - began > FILL_SECONDS:
                return f"learning had not begun after {FILL_SECONDS:g} s; plan with a smaller min_replay_size."
            updates = max(1, min(2 * updates, MOST_UPDATES, int(FILL_SECONDS / 8 / self._seconds)))

    def turn(self, seconds: float) -> None:
        """Run for about `seconds`, and note how fast."""
        self._run(QUEUED)
        self._run(max(1, min(MOST_UPDATES, round(seconds / self._seconds))))
        self._note()

    def outcome(self) -> Outcome:
        """Return what came of it."""
        metrics = {name: np.concatenate([row[name] for row in self._rows]) for name in self._rows[0]}
        return Outcome(tuple(self.turns), self._compile_seconds, bottleneck(metrics))

    def _run(self, updates: int) -> bool:
        """Run, and say whether the agent learns: until its replay holds enough, its metrics are NaN."""
        began = time.perf_counter()
        self._state, metrics = jax.block_until_ready(self._program.chunk(self._state, updates))
        passed = time.perf_counter() - began
        played = np.sum(metrics.get("valid_steps", updates * self._program.sizes.steps_per_update))
        self._metrics, self._seconds, self._rate = metrics, passed / updates, float(played) / passed
        apart = {"finite", *self._program.additions}
        learnt = [np.isfinite(values[-1]).any() for name, values in metrics.items() if name not in apart]
        return self._program.agent.replay is None or any(learnt) or not learnt

    def _note(self) -> None:
        self._rows.append(self._metrics)
        self.turns.append(self._rate)


# SHIM: goes with `Program.additions`.


def bottleneck(metrics: Mapping[str, np.ndarray]) -> str:
    """Name what the others of a program wait for, by the metrics of its updates: what is idle least.

    Of actors, what takes most of their time: the environment, or inference, where the program times both.

    >>> idle = {"learner_idle": np.array([0.7, 0.7]), "actor_idle": np.array([0.0, 0.1])}
    >>> bottleneck(idle)
    'actor (idle: learner 70%, actor 5%)'
    >>> bottleneck({**idle, "env_seconds": np.array([2.0]), "inference_seconds": np.array([1.0])})
    'environment (idle: learner 70%, actor 5%)'
    >>> bottleneck({"learner_idle": np.array([0.7]), "actor_idle": np.array([0.6])})
    'each waits for the other (idle: learner 70%, actor 60%)'
    >>> bottleneck({"loss": np.array([0.1])})
    'acting and learning take turns'
    """
    means = {name: float(np.mean(x[np.isfinite(x)])) for name, x in metrics.items() if np.isfinite(x).any()}
    idle = {name.removesuffix("_idle"): share for name, share in means.items() if name.endswith("_idle")}
    if not idle:
        return "acting and learning take turns"
    busiest = min(idle, key=lambda name: idle[name])
    if idle[busiest] > 0.5:
        busiest = "each waits for the other"
    elif busiest == "actor" and (inference := means.get("inference_seconds")):
        busiest = "environment" if means["env_seconds"] > inference else "inference"
    return f"{busiest} (idle: {', '.join(f'{name} {100 * share:.0f}%' for name, share in idle.items())})"


def race(
    programs: Mapping[str, Program], seconds: float, seed: int = 0, say: Callable[[str], None] = lambda line: None
) -> dict[str, Outcome]:
    """Run programs in turn, so that what else the machine does hits all alike, and end early what falls behind.

    All get one turn, the faster half `HALF`, and the two fastest `FINAL`. Of those that have had theirs, only the
    faster half is kept in memory.

    Args:
      programs: by name, built with `max_updates=MOST_UPDATES`; all are closed.
      seconds: of a turn, about; compiling comes before.
      seed: of all.
      say: called with a line about what is being done.

    Returns:
      what each did, by name.
    """
    outcomes: dict[str, Outcome] = {}
    runners: dict[str, Runner] = {}

    def keep(number: int) -> None:
        for name in sorted(runners, key=lambda name: runners[name].rank)[: max(0, len(runners) - number)]:
            outcomes[name] = runners.pop(name).outcome()
            programs[name].close()

    half = max(2, -(-len(programs) // 2))
    try:
        for name, program in programs.items():
            say(f"compiling {name}")
            ranks = [runner.rank for runner in runners.values()]
            try:
                runner = Runner(program, seed)
                say(f"running {name}")
                why_not = runner.begin(seconds, max((rate for alike, rate in ranks if alike), default=0.0) / 2)
            except jax.errors.JaxRuntimeError as error:  # Such as no memory left on the device.
                why_not = str(error).partition("\n")[0]
            if why_not:
                outcomes[name] = Outcome(why_not=why_not)
                program.close()
            else:
                runners[name] = runner
                keep(half)
        for number, turns in ((half, HALF), (2, FINAL)):
            keep(number)
            for turn in range(turns - min((len(runner.turns) for runner in runners.values()), default=turns)):
                for name, runner in runners.items():
                    say(f"running {name} again ({turn + 1})")
                    runner.turn(seconds)
        keep(0)
    finally:
        for name in programs.keys() - outcomes.keys():
            programs[name].close()
    return outcomes
