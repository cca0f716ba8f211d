"""When the host loop has something to do, and how long the compiled chunks between may be."""

from __future__ import annotations

import dataclasses


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


class Pace:
    """Chooses how many iterations the next chunk may have, so that signals and NaN are noticed soon.

    Attributes:
      SECONDS: that a chunk shall take at most, judged by the last one.
      FIRST: iterations of the first chunk.
      LONGEST: iterations of any: so many rows has the buffer of metrics on the devices.
    """

    SECONDS, FIRST, LONGEST = 2.0, 1, 1024

    def __init__(self, longest: int):
        self._longest = longest
        self.length = min(self.FIRST, longest)

    def measure(self, num_updates: int, seconds: float) -> None:
        """Take note of a chunk."""
        # At most doubled: iterations that only fill a replay say little about those that learn.
        self.length = max(1, int(min(self.SECONDS * num_updates / seconds, 2 * self.length, self._longest)))
