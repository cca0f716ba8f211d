"""When the host loop has something to do, what an evaluation may cost, and how long the compiled chunks may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

EVALUATIONS = 10
"""Of a run, and checkpoints, where nothing else is said."""
EPISODES = 128
"""Of an evaluation, where the environment's episodes are short."""
SHORT = 5_000
"""Steps: a pure environment that allows no more is played to its limit; compiled, that costs next to nothing."""
SHARE = 0.5
"""Of the training steps, that all evaluations together take at most where episodes are long or played on the host."""
FEW, FEWEST = 16, 8
"""Episodes of such an evaluation: at least, and where the share does not pay `LEAST` steps of each."""
LEAST, LAST_LEAST = 1_000, 2_000
"""Steps that every episode gets whatever the share pays, and in the last evaluation, which is the one reported."""

MOST = 2**31 - 1
"""Environment steps of one iteration, which compiled programs number with int32."""


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """What one evaluation plays.

    Attributes:
      episodes: played side by side.
      max_steps: after which an episode is cut.
      last_max_steps: after which an episode of the run's last evaluation is cut.
      limit: steps after which the environment ends an episode by itself.
    """

    episodes: int = EPISODES
    max_steps: int = LEAST
    last_max_steps: int = LEAST
    limit: int = LEAST


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When to log, evaluate and save, in iterations, when to end, and what an evaluation plays."""

    total: int
    log: int
    evaluate: int
    checkpoint: int
    steps_per_update: int
    evaluation: EvaluationPlan = EvaluationPlan()

    def next_stop(self, update: int) -> int:
        """Return the first iteration after `update` at which the host has something to do."""
        stops = [(update // every + 1) * every for every in (self.log, self.evaluate, self.checkpoint) if every]
        return min(self.total, *stops)

    def due(self, every: int, update: int) -> bool:
        """Tell whether what is done every `every` iterations is due after iteration `update`."""
        return update == self.total or bool(every) and update % every == 0

    def times(self, every: int) -> int:
        """Return how often what is done every `every` iterations is due."""
        return _times(self.total, every)

    @property
    def ends_longer(self) -> bool:
        """Whether the last evaluation's episodes may be longer than those of evaluations before it."""
        return self.evaluation.last_max_steps != self.evaluation.max_steps and self.times(self.evaluate) > 1

    def max_eval_steps(self, update: int) -> int:
        """Return after how many steps the evaluation after iteration `update` cuts an episode."""
        return self.evaluation.last_max_steps if update == self.total else self.evaluation.max_steps

    def evaluations_in_words(self) -> str:
        r"""Say how many evaluations there are, and what they cost at most beside training.

        The last is played greedily and sampled, and once more cut as those before are, where these are shorter.

        >>> schedule = Schedule(100, 1, 10, 10, 10_000, EvaluationPlan(16, 1_000, 2_000, 27_000))
        >>> print(schedule.evaluations_in_words().replace(": ", ":\n"))
        10 of 16 episodes, at most 1,000 steps each (2,000 in the last) of 27,000, the last also sampled:
        up to 224,000 steps beside 1,000,000 of training
        """
        plan, times = self.evaluation, self.times(self.evaluate)
        most = plan.max_steps if times > 1 else plan.last_max_steps
        last = f" ({plan.last_max_steps:,} in the last)" if plan.last_max_steps != most else ""
        allowed = f" of {plan.limit:,}" if most < plan.limit else ""
        cost = plan.episodes * ((times - 1 + self.ends_longer) * plan.max_steps + 2 * plan.last_max_steps)
        sampled = "the last also" if times > 1 else "greedy and"
        return (
            f"{times} of {plan.episodes} episodes, at most {most:,} steps each{last}{allowed}, {sampled} sampled: "
            f"up to {cost:,} steps beside {self.total * self.steps_per_update:,} of training"
        )


def cut_in_words(evaluated: Mapping[str, Any]) -> str:
    """Say which share of an evaluation's episodes was cut, and where; nothing where all ended.

    >>> cut_in_words({"eval_return": 2.0, "eval_unfinished": 0.25, "eval_max_steps": 2000})
    'of which 25% were cut at 2,000 steps'
    """
    share = float(np.mean(evaluated.get("eval_unfinished", 0.0)))
    if not share > 0:
        return ""
    at = evaluated.get("eval_max_steps")
    percent = f"{100 * share:.0f}" if share >= 0.01 else "less than 1"
    return f"of which {percent}% were cut{f' at {at:,} steps' if at else ''}"


def make_schedule(
    num_steps: int,
    steps_per_update: int,
    eval_every: int | None = None,
    checkpoint_every: int | None = None,
    log_every: int | None = None,
    *,
    eval_episodes: int | None = None,
    eval_steps: int | None = None,
    longest_episode: int = LEAST,
    on_host: bool = False,
) -> Schedule:
    """Turn intervals in environment steps into iterations, and choose what was left open.

    Evaluation is to cost less than training. In a pure environment of short episodes (`SHORT`) it does: 128 episodes
    to the environment's limit, ten times. Elsewhere all evaluations together take about half of `num_steps` at most:
    each episode is cut at its part of that, though never before `LEAST` steps, nor before `LAST_LEAST` in the last
    evaluation; there are 8, or 16, or as many episodes as that pays to their limit, up to 128; and fewer than ten
    evaluations where their least would take more.

    Args:
      num_steps: budget of environment steps (of each seed); never exceeded, so a rest too small for an iteration is
        left.
      steps_per_update: of one iteration.
      eval_every: None for ten times over the run, or less often, as above; 0 for the end only.
      checkpoint_every: None for every `eval_every`, and ten times over the run where that is None; 0 for the end only.
      log_every: None for a hundred times over the run.
      eval_episodes: of an evaluation; None chooses.
      eval_steps: that an evaluation may take in all its episodes, which are cut at their equal parts; None chooses, 0
        sets no bound but the environment's own.
      longest_episode: steps after which the environment ends an episode.
      on_host: whether evaluation plays outside compiled programs.

    Raises:
      ValueError: for negative intervals, a budget below one iteration, one below a step of each episode, or an
        iteration of more than `MOST` steps.
    """
    if steps_per_update > MOST:
        raise ValueError(
            f"num_envs * rollout_length = {steps_per_update} is more than one iteration can count, {MOST}; use fewer "
            "environments or shorter rollouts."
        )
    if num_steps < steps_per_update:
        raise ValueError(
            f"num_steps={num_steps} is less than one iteration of num_envs * rollout_length = {steps_per_update} "
            f"environment steps; use {steps_per_update} or more, or smaller rollouts."
        )
    given = {
        "eval_every": eval_every,
        "checkpoint_every": checkpoint_every,
        "log_every": log_every,
        "eval_steps": eval_steps,
    }
    for name, value in given.items():
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is negative; use 0 or a number of environment steps.")
    if eval_steps and eval_episodes and eval_steps < eval_episodes:
        raise ValueError(
            f"eval_steps={eval_steps} is less than a step of each of eval_episodes={eval_episodes}; use "
            f"{eval_episodes} or more, or 0 for no bound."
        )
    total = num_steps // steps_per_update

    def iterations(every: int | None, default: int) -> int:
        return default if every is None else -(-every // steps_per_update)

    budget = int(SHARE * num_steps)
    bounded = bool(eval_steps) if eval_steps is not None else on_host or longest_episode > SHORT
    least = min(longest_episode, LEAST)
    episodes = eval_episodes or _choose_episodes(budget, eval_steps, longest_episode, bounded)
    tenth = max(1, total // EVALUATIONS)
    usual = tenth
    if bounded:
        affordable = max(1, min(EVALUATIONS, budget // (eval_steps or episodes * least)))
        while _times(total, usual) > affordable:
            usual += tenth  # A whole number of checkpoints, so that what is evaluated is saved.
    evaluate = iterations(eval_every, usual)
    checkpoint = iterations(checkpoint_every, tenth if eval_every is None else evaluate)
    if not bounded:
        evaluation = EvaluationPlan(episodes, longest_episode, longest_episode, longest_episode)
    elif eval_steps:
        most = min(longest_episode, eval_steps // episodes)
        evaluation = EvaluationPlan(episodes, most, most, longest_episode)
    else:
        most = min(longest_episode, max(least, budget // _times(total, evaluate) // episodes))
        last = max(most, min(longest_episode, LAST_LEAST))
        evaluation = EvaluationPlan(episodes, most, last, longest_episode)
    log = iterations(log_every, max(1, total // 100)) or total
    return Schedule(total, log, evaluate, checkpoint, steps_per_update, evaluation)


def _choose_episodes(budget: int, eval_steps: int | None, longest_episode: int, bounded: bool) -> int:
    """Return the episodes of an evaluation where the user names none; `budget` is what all evaluations may take."""
    least = min(longest_episode, LEAST)
    if eval_steps:
        return max(1, min(EPISODES, eval_steps // least))
    if not bounded:
        return EPISODES if longest_episode <= SHORT else FEW
    share = budget // EVALUATIONS
    if share < FEW * least:
        return FEWEST
    whole = max(1, share // longest_episode)
    return max(FEW, min(EPISODES, 1 << (whole.bit_length() - 1)))


def _times(total: int, every: int) -> int:
    """Return how many of `total` iterations are the last or a multiple of `every`."""
    return -(-total // every) if every else 1


class Pace:
    """Chooses how many iterations the next chunk may have, so that signals and NaN are noticed soon.

    Attributes:
      SECONDS: that a chunk shall take at most, judged by the last one.
      FIRST: iterations of the first chunk.
      LONGEST: iterations of any: the rows that the buffer of metrics on the devices may have.
    """

    SECONDS, FIRST, LONGEST = 2.0, 1, 1024

    def __init__(self, longest: int):
        self._longest = longest
        self.length = min(self.FIRST, longest)

    def measure(self, num_updates: int, seconds: float) -> None:
        """Take note of a chunk."""
        # At most doubled: iterations that only fill a replay say little about those that learn.
        self.length = max(1, int(min(self.SECONDS * num_updates / seconds, 2 * self.length, self._longest)))
