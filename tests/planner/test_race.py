"""The race, on a clock that only programs move: who runs how often, what is counted, and who is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.planner import race as racing
from podium.planner.race import MOST_UPDATES, QUEUED, race

SIZES = SimpleNamespace(steps_per_update=10)
PPO, DQN = podium.agents.make("ppo"), podium.agents.make("dqn")


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Program:
    """A program whose updates take `seconds` each, and that learns after `learns_after` of them."""

    sizes, agent, whole_episodes = SIZES, PPO, False
    additions = {"valid_steps": "sum", "learner_idle": "mean", "actor_idle": "mean", "env_seconds": "sum"}
    open: set[Program] = set()

    def __init__(self, clock: Clock, seconds: float, **own: Any):
        self.clock, self.seconds, self.learns_after, self.metrics, self.error = clock, seconds, 0, {}, None
        self.chunks: list[int] = []
        self.ended = 0
        for name, value in own.items():
            setattr(self, name, value)

    def compile(self) -> None:
        self.open.add(self)
        self.clock.now += 7.0

    def init(self, seed: int) -> int:
        return 0

    def chunk(self, done: int, updates: int) -> tuple[int, dict[str, Any]]:
        assert 1 <= updates <= MOST_UPDATES
        if self.error is not None:
            raise self.error
        self.chunks.append(updates)
        self.clock.now += updates * self.seconds
        loss = np.where(np.arange(done, done + updates) < self.learns_after, np.nan, 1.0)
        rows = {name: np.full(updates, value) for name, value in self.metrics.items()}
        return done + updates, {"loss": loss, "finite": np.ones(2, bool), **rows}

    def close(self) -> None:
        self.open.discard(self)
        self.ended += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(racing, "time", clock)
    monkeypatch.setattr(Program, "open", set())
    return clock


def test_the_faster_half_runs_on_and_the_two_fastest_longest(clock: Clock) -> None:
    programs = {f"{n} ms": Program(clock, n / 1000) for n in (50, 10, 40, 20, 30)}
    most = 0

    def say(line: str) -> None:
        nonlocal most
        most = max(most, len(Program.open))

    outcomes = race(programs, seconds=1.0, say=say)
    assert {name: len(outcome.turns) for name, outcome in outcomes.items()} == {
        "50 ms": 1,
        "40 ms": 1,
        "30 ms": 3,
        "20 ms": 5,
        "10 ms": 5,
    }
    assert outcomes["20 ms"].turns == pytest.approx([500.0] * 5) and outcomes["20 ms"].measured == pytest.approx(500)
    assert outcomes["20 ms"].compile_seconds == pytest.approx(7.02)
    # One that compiles, one after which learning is seen to go on, and each turn's, before its clock and within.
    assert programs["20 ms"].chunks == [1, 1] + [QUEUED, 50] * 5
    assert all(program.ended == 1 for program in programs.values()) and not Program.open
    assert most == 4  # At the line before the fifth runs: three are kept, and one is new.


def test_a_turn_is_at_least_an_update_and_at_most_a_chunk(clock: Clock) -> None:
    programs = {"slow": Program(clock, 9.0), "quick": Program(clock, 1e-6)}
    race(programs, seconds=1.0)
    assert programs["slow"].chunks[-1] == 1 and programs["quick"].chunks[-1] == MOST_UPDATES


def test_what_was_played_counts_where_the_program_says_it(clock: Clock) -> None:
    programs = {"host": Program(clock, 0.1, metrics={"valid_steps": 8.0})}
    assert race(programs, seconds=1.0)["host"].turns == pytest.approx([80.0] * 5)


def test_the_clock_starts_once_the_agent_learns(clock: Clock) -> None:
    program = Program(clock, 0.01, agent=DQN, learns_after=100, metrics={"learner_idle": 0.0})
    assert len(race({"dqn": program}, seconds=0.1)["dqn"].turns) == 5
    assert program.chunks == [1, 1, 2, 4, 8, 16, 32, 64] + [QUEUED, 10] * 5
    # An agent without a replay learns at once, whatever its metrics are.
    ppo = Program(clock, 0.01, learns_after=100)
    race({"ppo": ppo}, seconds=0.1)
    assert ppo.chunks[:4] == [1, 1, QUEUED, 10]


def test_an_agent_that_never_learns_is_left_out_in_bounded_time(clock: Clock) -> None:
    never = Program(clock, 0.01, agent=DQN, learns_after=10**9)
    outcomes = race({"never": never, "other": Program(clock, 0.01)}, seconds=0.1)
    assert (
        outcomes["never"].why_not == ("learning had not begun after 30 s; plan with a smaller min_replay_size.")
        and not outcomes["never"].turns
    )
    assert sum(never.chunks) * 0.01 < racing.FILL_SECONDS * 1.5 and never.ended == 1
    assert len(outcomes["other"].turns) == 5


def test_what_is_slow_beyond_hope_takes_two_updates(clock: Clock) -> None:
    programs = {"fast": Program(clock, 0.01), "next": Program(clock, 0.01), "slow": Program(clock, 60.0)}
    outcomes = race(programs, seconds=1.0)
    assert programs["slow"].chunks == [1, 1]
    assert outcomes["slow"].turns == pytest.approx([1 / 6]) and not outcomes["slow"].why_not
    # Slow, but not beside the others.
    programs = {"fast": Program(clock, 45.0), "slow": Program(clock, 60.0)}
    race(programs, seconds=1.0)
    assert programs["slow"].chunks == [1, 1] + [QUEUED, 1] * 5


def test_a_device_without_memory_leaves_the_others_to_run(clock: Clock) -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nAllocator: ...")
    programs = {"large": Program(clock, 0.01, error=error), "small": Program(clock, 0.01)}
    outcomes = race(programs, seconds=0.1)
    assert outcomes["large"].why_not == "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."
    assert len(outcomes["small"].turns) == 5 and [program.ended for program in programs.values()] == [1, 1]


def test_other_errors_are_raised_and_close_all(clock: Clock) -> None:
    programs = {name: Program(clock, 0.01) for name in "abc"}
    programs["b"].error = RuntimeError("the environment broke")
    with pytest.raises(RuntimeError, match="the environment broke"):
        race(programs, seconds=0.1)
    assert [program.ended for program in programs.values()] == [1, 1, 1]


def test_whole_episodes_come_after_all_others(clock: Clock) -> None:
    programs = {f"{n}": Program(clock, n) for n in (0.01, 0.02, 0.03)}
    programs["episodes"] = Program(clock, 0.001, whole_episodes=True)
    outcomes = race(programs, seconds=0.1)
    assert [len(outcomes[name].turns) for name in ("0.01", "0.02", "0.03", "episodes")] == [5, 5, 1, 1]


def test_no_programs_no_outcomes() -> None:
    assert race({}, seconds=1.0) == {}
