"""A plan: every placement with what is predicted of it, and the best with what was measured."""

from __future__ import annotations

import dataclasses
import difflib
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.placement.devices import resolve_devices
from podium.placement.program import Placement, check_positive, plays_whole_episodes
from podium.planner.candidates import CANDIDATES, Candidate, Made, call
from podium.planner.models import Cost, predict
from podium.planner.race import MOST_UPDATES, race
from podium.planner.stages import Bench, cores_got, num_cores
from podium.train import resolve_env, usual_length

TURNS = 5
"""Chunks that a measured placement is timed for; the median counts."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What a plan says of one placement.

    Attributes:
      name: of the placement.
      placement: the value, or None where there is none for this number of devices.
      predicted: environment steps a second, or None where it cannot run.
      bottleneck: the stage that takes most of what decides.
      share: of an iteration, that it takes.
      limit: what decides: a line of the placement's, or "cores".
      why_not: why it cannot run, or "".
      alike: whether its steps teach as much as those of the others.
      measured: environment steps a second of a brief run, or None where there was none.
      turns: of that run, each a chunk.
    """

    name: str
    placement: Placement | None
    predicted: float | None = None
    bottleneck: str = ""
    share: float = 0.0
    limit: str = ""
    why_not: str = ""
    alike: bool = True
    measured: float | None = None
    turns: tuple[float, ...] = ()

    @property
    def call(self) -> str:
        """What makes the placement, to be pasted."""
        return self.name if self.placement is None else call(self.placement)

    @property
    def error(self) -> float | None:
        """By how much the prediction is above what was measured, as a fraction of that."""
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A plan for one agent in one environment; printed, a table and a recommendation.

    Attributes:
      agent: name of it.
      env: name of it.
      num_envs: environments side by side.
      rollout_length: steps of each an iteration.
      devices: names of them.
      cores: of the host, that this process got while others used the machine too.
      stages: what each measured stage costs.
      rows: of every placement, as `podium.planner.candidates` has them.
      best: the row that is recommended: the fastest measured; None where nothing can run.
    """

    agent: str
    env: str
    num_envs: int
    rollout_length: int
    devices: tuple[str, ...]
    cores: float
    stages: dict[str, Cost]
    rows: tuple[Row, ...]
    best: Row | None

    @property
    def placement(self) -> Placement:
        """The placement that is recommended.

        Raises:
          ValueError: none can run.
        """
        if self.best is None or self.best.placement is None:
            raise ValueError(f"No placement can run {self.agent} in {self.env}: {self.rows[0].why_not}")
        return self.best.placement

    @property
    def recommendation(self) -> str:
        """A sentence, and a call to be pasted."""
        if self.best is None:
            return f"No placement that was asked for can run {self.agent} in {self.env}."
        best, how = self.best, "predicted" if self.best.measured is None else "measured"
        rate, sizes = best.measured or best.predicted or 0.0, f"num_envs={self.num_envs}"
        if best.alike:
            sizes += f", rollout_length={self.rollout_length}"
        return (
            f"Fastest {how}: {best.call}, {rate:,.0f} steps/s, bound by {_bound(best)}.\n"
            f"  podium.train(agent, env, num_steps=..., {sizes}, placement={best.call})"
        )

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it, for other tools."""
        names = [field.name for field in dataclasses.fields(Row) if field.name != "placement"]
        row = lambda row: {**{name: getattr(row, name) for name in names}, "call": row.call, "error": row.error}  # noqa: E731
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "stages": {name: cost._asdict() for name, cost in self.stages.items()},
            "rows": [row(each) for each in self.rows],
            "best": None if self.best is None else row(self.best),
            "recommendation": self.recommendation,
        }

    def __str__(self) -> str:
        """Return the stages, the table and the recommendation."""
        where = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)} ({self.devices[0].split(':')[0]})"
        cores = f"{self.cores:.1f} of {num_cores()} cores, which is what this process got"
        head = (
            f"{self.agent} in {self.env}: {self.num_envs} environments x {self.rollout_length} steps an update, on "
            f"{where}, with {cores}."
        )
        width = max(map(len, self.stages), default=0)
        stages = [f"  {name:<{width}}  {_in_time(cost.seconds):>8}" for name, cost in self.stages.items()]
        table = _table([row for row in self.rows if row.predicted is not None])
        refused = [f"  {row.call}: {row.why_not}" for row in self.rows if row.predicted is None]
        apart = [row.name for row in self.rows if not row.alike and row.predicted is not None]
        notes = [f"  * {name} learns otherwise: its steps a second do not compare." for name in apart]
        parts = [
            [head, "", "Stages, each alone:", *stages],
            ["Steps a second:", *table, *notes],
            ["Cannot run:", *refused] if refused else [],
            [self.recommendation],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)


def plan(
    agent: Agent,
    env: Env | HostEnvs | str,
    *,
    num_envs: int | None = None,
    rollout_length: int | None = None,
    devices: int | None = None,
    seconds: float = 1.0,
    top: int = 2,
    placements: Sequence[str] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Forecast:
    """Find the fastest placement for an agent in an environment, on this machine.

    Every stage is timed alone: stepping, inference and the two fused, update, gradients, transfer. From those each
    placement's steps a second are predicted (see `podium.planner.models`), and the best are run.

    Args:
      agent: from `podium.agents`, or your own.
      env: a pure environment, one on the host, or a name for `podium.envs.make`.
      num_envs: environments side by side; None for 64.
      rollout_length: steps of each an iteration; None takes the agent's own.
      devices: a number, or None for all there are.
      seconds: that each stage, and each turn of a run, is timed for, about; compiling comes on top.
      top: how many of the best are run, one value of each placement; 0 for none.
      placements: names to compare, such as ("Anakin", "Sebulba"); None for all. `Evolution` learns otherwise, so that
        its steps a second do not compare: it is run and recommended only where it is named here, and over environments
        on the CPU timed at all.
      seed: of everything random.
      say: called with a line about what is being done.

    Returns:
      a `Forecast`; print it.

    Raises:
      ValueError: an argument is out of range.
    """
    num_envs = 64 if num_envs is None else num_envs
    check_positive(num_envs=num_envs)
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise ValueError(f"top={top!r} must be an integer of 0 or more; 2 is usual.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} must be finite and greater than 0; 1 is usual.")
    candidates = _choose(placements)
    env, _ = resolve_env(env, None)
    available = resolve_devices(devices)
    length = agent.rollout_length if rollout_length is None else rollout_length
    check_positive(rollout_length=length)
    bench = Bench(agent, env, num_envs, length, seconds, seed, say)
    bench.dispatch()
    made: list[tuple[Row, Made | None]] = []
    got = []
    for candidate in candidates:
        got.append(cores_got(seconds / 4))  # Now and then: what others do changes.
        if placements is None and not candidate.alike and isinstance(env, HostEnvs):
            why_not = "whole episodes take long on the CPU; name it in `placements` to have it timed."
            made.append((Row(candidate.name, None, alike=False, why_not=why_not), None))
        else:
            made += _make(candidate, bench, agent, env, len(available))
    cores = statistics.median(got)
    rows = [row if parts is None else _predicted(row, parts, cores) for row, parts in made]
    asked = placements is not None
    running = [row for row in rows if row.predicted is not None and (row.alike or asked)]
    running.sort(key=lambda row: -(row.predicted or 0.0))
    # Of each placement its best value: what differs little would else leave no room for what differs.
    leaders = list({row.name: row for row in reversed(running)}.values())
    leaders.sort(key=lambda row: -(row.predicted or 0.0))
    programs = {row.call: _build(row.placement, agent, env, num_envs, length) for row in leaders[:top]}
    turns = race(programs, seconds, TURNS, bench.fill, seed, say)
    rows = [
        dataclasses.replace(row, measured=statistics.median(turns[row.call]), turns=tuple(turns[row.call]))
        if row.call in turns
        else row
        for row in rows
    ]
    timed = [row for row in rows if row.measured is not None]
    best = max(timed, key=lambda row: row.measured or 0.0) if timed else next(iter(running), None)
    names = tuple(f"{device.platform}:{device.id}" for device in available)
    return Forecast(agent.name, env.spec.name, num_envs, length, names, cores, dict(bench.measured), tuple(rows), best)


def _choose(names: Sequence[str] | None) -> list[Candidate]:
    known = [candidate.name for candidate in CANDIDATES]
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"placements: none is named {name!r}.{hint} There are: {', '.join(known)}.")
    return [candidate for candidate in CANDIDATES if names is None or candidate.name in names]


def _build(placement: Any, agent: Agent, env: Env | HostEnvs, num_envs: int, length: int) -> Any:
    if plays_whole_episodes(placement):
        length = usual_length(placement, agent, env)
    return placement.build(agent, env, num_envs=num_envs, rollout_length=length, max_updates=MOST_UPDATES)


def _make(
    candidate: Candidate, bench: Bench, agent: Agent, env: Env | HostEnvs, devices: int
) -> list[tuple[Row, Made | None]]:
    """Return a row and what an iteration is made of, for each value of a placement; or the sentence that refuses it."""
    blank = Row(candidate.name, None, alike=candidate.alike)
    try:
        values = candidate.values(devices, bench.num_envs)
    except ValueError as error:
        return [(dataclasses.replace(blank, why_not=str(error)), None)]
    made: list[tuple[Row, Made | None]] = []
    for placement in values:
        row = dataclasses.replace(blank, placement=placement)
        try:
            program = _build(placement, agent, env, bench.num_envs, bench.length)
        except ValueError as error:
            made.append((dataclasses.replace(row, why_not=str(error)), None))
        else:
            made.append((row, candidate.iteration(bench, placement, program)))
    return made


def _predicted(row: Row, made: Made, cores: float) -> Row:
    seconds, bottleneck, share, limit = predict(made.lines, cores)
    return dataclasses.replace(row, predicted=made.steps / seconds, bottleneck=bottleneck, share=share, limit=limit)


def _bound(row: Row) -> str:
    return f"{row.bottleneck} ({100 * row.share:.0f}% of {'the cores' if row.limit == 'cores' else row.limit})"


def _cells(row: Row) -> tuple[str, ...]:
    measured = "" if row.measured is None else f"{row.measured:,.0f}"
    error = "" if row.error is None else f"{100 * row.error:+.0f}%"
    return row.call + "*" * (not row.alike), f"{row.predicted:,.0f}", measured, error, _bound(row)


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [("placement", "predicted", "measured", "error", "bound by"), *map(_cells, rows)]
    first, *numbers, last = ([row[column] for row in cells] for column in range(5))
    columns = [_pad(first, str.ljust), *(_pad(column, str.rjust) for column in numbers), last]
    return [f"  {'  '.join(row)}" for row in zip(*columns, strict=True)]


def _pad(cells: Sequence[str], align: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, cells))
    return [align(cell, width) for cell in cells]


def _in_time(seconds: float) -> str:
    """Write a time.

    >>> _in_time(0.0000321), _in_time(0.0123), _in_time(2.5)
    ('32.1 us', '12.3 ms', '2.5 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
