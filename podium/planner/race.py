"""Programs run briefly, in turn: what is measured beside what was predicted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from podium.placement.fused import FusedProgram
from podium.placement.program import Program, plays_whole_episodes
from podium.placement.single import SingleProgram

MOST_UPDATES = 1_000
"""Of a chunk; what raced programs are built with as `max_updates`."""

QUEUED = 4
"""Updates before the clock starts where threads go on between chunks, so that queues are as full as they will be."""


class Runner:
    """A program under way; compiled, and past its first updates.

    Args:
      program: built with `max_updates=MOST_UPDATES`.
      fill: updates until there is something to learn from, of one worker.
      seed: of the run.
    """

    def __init__(self, program: Program, fill: int, seed: int):
        self._program = program
        program.compile()
        self._state = program.init(seed)
        self._run(1)  # What is compiled when it is first used, is now.
        left = fill * getattr(program, "workers", 1)
        while left > 0:
            self._run(min(left, MOST_UPDATES))
            left -= MOST_UPDATES
        self._seconds = self._run(1)[1]
        self._queued = 0 if isinstance(program, FusedProgram | SingleProgram) else QUEUED

    def _run(self, updates: int) -> tuple[Any, float]:
        began = time.perf_counter()
        self._state, metrics = jax.block_until_ready(self._program.chunk(self._state, updates))
        return metrics, time.perf_counter() - began

    def turn(self, seconds: float) -> float:
        """Return environment steps a second of a chunk of about `seconds`; of whole episodes those that were played."""
        if self._queued:
            self._seconds = self._run(self._queued)[1] / self._queued
        number = max(1, min(MOST_UPDATES, round(seconds / self._seconds)))
        metrics, passed = self._run(number)
        self._seconds = passed / number
        if plays_whole_episodes(self._program):
            return float(metrics["valid_steps"].sum()) / passed
        return number * self._program.sizes.steps_per_update / passed


def race(
    programs: Mapping[str, Program],
    seconds: float,
    turns: int,
    fill: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[float]]:
    """Return environment steps a second of every program in each of its turns, and close them.

    They take turns, so that what else the machine does hits all alike.

    Args:
      programs: by name, built with `max_updates=MOST_UPDATES`.
      seconds: of a turn, about; compiling comes before.
      turns: of each.
      fill: updates until there is something to learn from, of one worker.
      seed: of all.
      say: called with a line about what is being done.
    """
    with contextlib.ExitStack() as stack:
        runners = {}
        for name, program in programs.items():
            say(f"compiling {name}")
            stack.callback(program.close)
            runners[name] = Runner(program, fill, seed)
        rates: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(turns):
            for name, runner in runners.items():
                say(f"running {name}")
                rates[name].append(runner.turn(seconds))
        return rates
