"""A plan: what every placement does on this machine, side by side, and which to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from podium import placement as registry
from podium.agent import Agent, check_is_agent
from podium.devices import resolve_devices
from podium.env import Env
from podium.host import HostEnvFactory
from podium.placement.contract import Placement, Program
from podium.planner.race import FINAL, HALF, MOST_UPDATES, Outcome, race
from podium.ranges import check_positive, check_seed
from podium.train import resolve_env, usual_length


def call(placement: Placement) -> str:
    """Return the call that makes a placement, to be pasted.

    >>> import podium
    >>> call(podium.Sebulba(actor_threads=4))
    'podium.Sebulba(actor_threads=4)'
    """
    module = type(placement).__module__
    home = "podium" if module.startswith("podium.") else module
    fields = dataclasses.fields(placement)  # type: ignore[arg-type]
    given = [f"{x.name}={getattr(placement, x.name)!r}" for x in fields if getattr(placement, x.name) != x.default]
    return f"{home}.{type(placement).__qualname__}({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class Row:
    """What a plan says of one setting of a placement.

    Attributes:
      name: of the placement, in the registry.
      placement: the value; None where there is none for this number of devices.
      outcome: what it did, or why it could not run.
    """

    name: str
    placement: Placement | None
    outcome: Outcome

    @property
    def call(self) -> str:
        """What makes the placement, to be pasted."""
        return self.name if self.placement is None else call(self.placement)

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        outcome = dataclasses.asdict(self.outcome)
        return {"name": self.name, "call": self.call, "measured": self.outcome.measured or None, **outcome}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `plan` found for one agent in one environment; printed, a table and a recommendation.

    Attributes:
      agent: its name.
      env: its name.
      num_envs: environments side by side.
      rollout_length: steps of each an iteration; of whole episodes, their limit is taken instead.
      devices: their names.
      rows: of all placements, in the order of the registry.
      best: the row that is recommended; None where nothing could run.
    """

    agent: str
    env: str
    num_envs: int
    rollout_length: int
    devices: tuple[str, ...]
    rows: tuple[Row, ...]
    best: Row | None

    @property
    def placement(self) -> Placement:
        """The placement that is recommended.

        Raises:
          ValueError: none can run.
        """
        if self.best is None or self.best.placement is None:
            why_not = self.rows[0].outcome.why_not
            raise ValueError(f"No placement can run {self.agent} in {self.env}: {why_not}")
        return self.best.placement

    @property
    def recommendation(self) -> str:
        """A sentence, and a call to be pasted."""
        if self.best is None:
            return f"No placement that was asked for can run {self.agent} in {self.env}."
        sizes = f"num_envs={self.num_envs}"
        if not self.placement.whole_episodes:
            sizes += f", rollout_length={self.rollout_length}"
        return (
            f"Fastest: {self.best.call}, {self.best.outcome.measured:,.0f} steps/s; {self.best.outcome.bottleneck}.\n"
            f"  podium.train(agent, env, num_steps=..., {sizes}, placement={self.best.call})"
        )

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it, for other tools."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "rows": [row.record() for row in self.rows],
            "best": None if self.best is None else self.best.record(),
            "recommendation": self.recommendation,
        }

    def __str__(self) -> str:
        """Return the table, fastest first, why the others cannot run, and the recommendation."""
        where = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)} ({self.devices[0].split(':')[0]})"
        sizes = f"{self.num_envs} environments x {self.rollout_length} steps an update"
        ran = sorted((row for row in self.rows if row.outcome.turns), key=lambda row: -row.outcome.measured)
        refused = [f"  {row.call}: {row.outcome.why_not}" for row in self.rows if not row.outcome.turns]
        note = f"All have one turn, the faster half {HALF}, the two fastest {FINAL}; steps/s are the median."
        parts = [
            [f"{self.agent} in {self.env}: {sizes}, on {where}."],
            [*_table(ran), f"  {note}"] if ran else [],
            ["Not run:", *refused] if refused else [],
            [self.recommendation],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)


def plan(
    agent: Agent,
    env: Env | HostEnvFactory | str,
    *,
    num_envs: int | None = None,
    rollout_length: int | None = None,
    devices: int | None = None,
    seconds: float = 1.0,
    placements: Sequence[str] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Find the fastest placement for an agent in an environment, on this machine: run all, and the faster ones longer.

    Args:
      agent: from `podium.agents`, or your own.
      env: a pure environment, one on the host, or a name for `podium.envs.make`.
      num_envs: environments side by side; None for 64.
      rollout_length: steps of each an iteration; None takes the agent's own.
      devices: a number, or None for all there are.
      seconds: of a turn, about; what is before its clock comes on top: compiling, and at most half a minute each until
        learning begins.
      placements: names to compare, such as ("anakin", "sebulba"); None for all but those that play whole episodes.
        `evolution` does: its steps teach otherwise, so that it is run only where it is named, and recommended only
        where nothing else ran.
      seed: of everything random.
      say: called with a line about what is being done.

    Returns:
      a `Comparison`; print it.

    Raises:
      ValueError: an argument is out of range.
    """
    check_is_agent(agent)
    num_envs = 64 if num_envs is None else num_envs
    length = agent.rollout_length if rollout_length is None else rollout_length
    check_positive(num_envs=num_envs, rollout_length=length)
    check_seed(seed)
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} must be finite and greater than 0; 1 is usual.")
    if placements is not None and not placements:
        raise ValueError(f"placements={placements!r} names none; use some of {', '.join(registry.names())}, or None.")
    named = registry.names() if placements is None else [registry.find(name) for name in placements]
    env, _ = resolve_env(env, None)
    available = resolve_devices(devices)
    rows: list[Row] = []
    programs: dict[str, Program] = {}
    for name in (name for name in registry.PLACEMENTS if name in named):
        try:
            if placements is None and registry.PLACEMENTS[name].whole_episodes:
                raise ValueError("its steps are of whole episodes and teach otherwise; name it to have it run.")
            settings = registry.PLACEMENTS[name].candidates(len(available), num_envs)
        except ValueError as error:
            rows.append(Row(name, None, Outcome(why_not=str(error))))
            continue
        for placement in settings:
            outcome = Outcome()
            try:
                programs[call(placement)] = _build(placement, agent, env, num_envs, length)
            except ValueError as error:
                outcome = Outcome(why_not=str(error))
            rows.append(Row(name, placement, outcome))
    # The last first: what is readable is slow, and ends sooner where it is seen beside what is fast.
    outcomes = race(dict(reversed(programs.items())), seconds, seed, say)
    rows = [dataclasses.replace(row, outcome=outcomes.get(row.call, row.outcome)) for row in rows]
    names = tuple(f"{device.platform}:{device.id}" for device in available)
    return Comparison(agent.name, env.spec.name, num_envs, length, names, tuple(rows), _best(rows))


def _build(placement: Placement, agent: Agent, env: Env | HostEnvFactory, num_envs: int, length: int) -> Program:
    if placement.whole_episodes:
        length = usual_length(placement, agent, env)
    return placement.build(agent, env, num_envs=num_envs, rollout_length=length, max_updates=MOST_UPDATES)


def _best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest of those that ran to the end; whole episodes come after all others."""
    ran = [row for row in rows if row.outcome.turns]
    rank = lambda row: (not row.placement.whole_episodes, len(row.outcome.turns), row.outcome.measured)
    return max(ran, key=rank, default=None)


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [("placement", "steps/s", "turns", "least to most", "compiling", "what bounds it")]
    for row in rows:
        turns, seconds = row.outcome.turns, row.outcome.compile_seconds
        spread = f"{min(turns):,.0f} to {max(turns):,.0f}" if len(turns) > 1 else ""
        numbers = f"{row.outcome.measured:,.0f}", str(len(turns)), spread, f"{seconds:.1f} s"
        cells.append((row.call, *numbers, row.outcome.bottleneck))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]) for row in cells
    ]
