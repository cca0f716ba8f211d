"""How fast a placement goes, from how long its stages take: arithmetic alone, nothing is run.

An iteration is made of lines that go on at once; a line is stages one after another. It takes as long as its longest
line, and at least as long as the host's cores need for the work of all lines together: those that share cores add up
where those that wait overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """What a piece of work takes: `seconds` that pass where nothing else runs, and `cores`, seconds of all cores."""

    seconds: float
    cores: float

    def times(self, number: float) -> Cost:
        """Return the cost of doing it `number` times, one after another."""
        return Cost(self.seconds * number, self.cores * number)


class Stage(NamedTuple):
    """A named piece of an iteration."""

    name: str
    cost: Cost


class Line(NamedTuple):
    """Stages one after another, and how many such lines go on at once."""

    name: str
    stages: tuple[Stage, ...]
    copies: int = 1

    @property
    def seconds(self) -> float:
        """Time that passes."""
        return sum(stage.cost.seconds for stage in self.stages)


class Prediction(NamedTuple):
    """What an iteration takes, and what of.

    Attributes:
      seconds: of an iteration.
      bottleneck: the stage that takes most of what decides.
      share: of the iteration, that it takes.
      limit: what decides: the name of a line, or "cores".
    """

    seconds: float
    bottleneck: str
    share: float
    limit: str


def predict(lines: Sequence[Line], cores: float) -> Prediction:
    """Return the time of an iteration: max over lines of their seconds, and over all of them core seconds / cores.

    Of `cores` there are at least as many as any line kept busy while it was measured.

    >>> acting = Line("acting", (Stage("environment", Cost(3.0, 3.0)), Stage("inference", Cost(1.0, 1.0))))
    >>> learning = Line("learning", (Stage("update", Cost(2.0, 2.0)),))
    >>> predict([acting, learning], cores=2)
    Prediction(seconds=4.0, bottleneck='environment', share=0.75, limit='acting')
    >>> predict([acting, learning], cores=1)
    Prediction(seconds=6.0, bottleneck='environment', share=0.5, limit='cores')
    """
    longest = max(lines, key=lambda line: line.seconds)
    cores = max(cores, *(sum(cost.cores for _, cost in line.stages) / line.seconds for line in lines))
    on_cores: dict[str, float] = {}
    for line in lines:
        for name, cost in line.stages:
            on_cores[name] = on_cores.get(name, 0.0) + cost.cores * line.copies / cores
    seconds, work = longest.seconds, sum(on_cores.values())
    if work > seconds:
        bottleneck = max(on_cores, key=lambda name: on_cores[name])
        return Prediction(work, bottleneck, on_cores[bottleneck] / work, "cores")
    slowest = max(longest.stages, key=lambda stage: stage.cost.seconds)
    return Prediction(seconds, slowest.name, slowest.cost.seconds / seconds, longest.name)


class Turn(NamedTuple):
    """How batches of host environments step, each in a thread of its own.

    Attributes:
      cycle: a step of one batch, while all others step likewise.
      latency: in seconds, of one batch alone.
    """

    cycle: Cost
    latency: float


def act_on_host(steps: int, inference: Cost, turn: Turn) -> tuple[Stage, Stage]:
    """Return what the thread of a batch spends on environments and inference in a rollout.

    A step waits for inference and inference for the step. Other batches step meanwhile: where their simulator is full,
    its cycle bounds all of them.

    Args:
      steps: of a rollout.
      inference: of one step.
      turn: of the environments.

    Returns:
      "environment", which is all that inference leaves over, and "inference".
    """
    step = max(turn.latency + inference.seconds, turn.cycle.seconds)
    return (
        Stage("environment", Cost(steps * (step - inference.seconds), steps * turn.cycle.cores)),
        Stage("inference", inference.times(steps)),
    )


def split(names: Sequence[str], cost: Cost, parts: Sequence[Cost]) -> tuple[Stage, ...]:
    """Return stages that together cost `cost`, in the proportion of `parts`, measured each alone."""
    whole = sum(part.seconds for part in parts)
    return tuple(Stage(each, cost.times(part.seconds / whole)) for each, part in zip(names, parts, strict=True))
