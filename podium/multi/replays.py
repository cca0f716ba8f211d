"""The replays of several groups as one: all are written by the same rollouts and sampled for the same gradient step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import Replay
from podium.multi.sharing import fold
from podium.types import Array, Key, PyTree


class Replays(NamedTuple):
    """What the replays hold, by group: their states, but for the `priorities` of those that have some."""

    states: dict[str, PyTree]
    priorities: dict[str, PyTree]

    def of(self, name: str) -> PyTree:
        """Return the state of one replay."""
        state = self.states[name]
        return state._replace(priorities=self.priorities[name]) if name in self.priorities else state


class Part(NamedTuple):
    """A replay, and how many of its steps a step of the environment is; None where that is not known."""

    name: str
    replay: Replay
    steps: int | None


def joint(parts: list[Part]) -> Replay:
    """Return one replay of several; its items are dictionaries by group, [K, ...] each.

    Its batch is that of all together, and so are priorities: side by side, in the order of `parts`.

    Raises:
      ValueError: they do not learn equally often, or items of different numbers of steps.
    """
    by_name = {part.name: part.replay for part in parts}
    steps = {name: replay.steps_per_item for name, replay in by_name.items()}
    if len(set(steps.values())) > 1:
        raise ValueError(
            f"{_words(steps, 'steps an item')}: groups with a replay learn from single steps or from windows of one "
            "length; use agents that do."
        )
    ends = np.cumsum([part.replay.batch_size for part in parts])

    def each(function: Any) -> Replays:
        """Return the replays after `function(name, replay)` made the state of each."""
        made = {name: function(name, replay) for name, replay in by_name.items()}
        ranked = {name: made[name].priorities for name, replay in by_name.items() if replay.update_priorities}
        kept = {name: state._replace(priorities=()) if name in ranked else state for name, state in made.items()}
        return Replays(kept, ranked)

    def init(item: PyTree, num_envs: int, num_lanes: int, rollout_length: int) -> Replays:
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)
        return each(lambda name, replay: replay.init(first(item[name]), num_envs, num_lanes, rollout_length))

    def add(state: Replays, items: PyTree) -> Replays:
        return each(lambda name, replay: replay.add(state.of(name), fold(items[name], 1)))

    def can_sample(state: Replays) -> Array:
        return jnp.stack([replay.can_sample(state.of(name)) for name, replay in by_name.items()]).all()

    def sample(key: Key, state: Replays) -> tuple[PyTree, PyTree]:
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(by_name)}
        drawn = {name: replay.sample(keys[name], state.of(name)) for name, replay in by_name.items()}
        return {name: x for name, (x, _) in drawn.items()}, {name: x for name, (_, x) in drawn.items()}

    def update_priorities(state: Replays, indices: PyTree, priorities: Array | None) -> Replays:
        assert priorities is not None
        of = dict(zip(by_name, jnp.split(priorities, ends[:-1]), strict=True))

        def ranked(name: str, replay: Replay) -> PyTree:
            own = state.of(name)
            return replay.update_priorities(own, indices[name], of[name]) if replay.update_priorities else own

        return each(ranked)

    def cut(state: Replays, gap: Array) -> Replays:
        return each(lambda name, replay: replay.cut(state.of(name), gap) if replay.cut else state.of(name))

    some = list(by_name.values())
    num_updates, rate = _how_often(parts)
    return Replay(
        init,
        add,
        can_sample,
        sample,
        batch_size=int(ends[-1]),
        num_updates=num_updates,
        update_priorities=update_priorities if any(replay.update_priorities for replay in some) else None,
        updates_per_step=rate,
        cut=cut if any(replay.cut for replay in some) else None,
        steps_per_item=some[0].steps_per_item,
        parts={name: replay.batch_size for name, replay in by_name.items()},
    )


def _how_often(parts: list[Part]) -> tuple[int, float | None]:
    """Return the minibatches of an iteration, and of a step of the environment where the agents say it so."""
    rates = {part.name: _rate(part) for part in parts}
    if all(rate is None for rate in rates.values()):
        numbers = {part.name: part.replay.num_updates for part in parts}
        if len(set(numbers.values())) > 1:
            raise ValueError(
                f"{_words(numbers, 'minibatches an iteration (num_updates)')}: groups learn minibatch by minibatch "
                "together; use one number."
            )
        return parts[0].replay.num_updates, None
    said = [rate for rate in rates.values() if rate is not None]
    if len(said) < len(parts) or not all(math.isclose(rate, said[0], rel_tol=1e-6) for rate in said):
        words = _words({name: "num_updates" if rate is None else rate for name, rate in rates.items()},
                       "minibatches a step of the environment")  # fmt: skip
        raise ValueError(
            f"{words}: groups learn minibatch by minibatch together; say in all of them num_updates, or "
            "samples_per_insert or updates_per_step by which they learn equally often."
        )
    return parts[0].replay.num_updates, said[0]


def _rate(part: Part) -> float | None:
    """Return the minibatches for a step of the environment; None where `num_updates` says how many there are."""
    replay = part.replay
    if replay.updates_per_step is None and replay.samples_per_insert is None:
        return None
    if part.steps is None:
        raise ValueError(
            f"group {part.name!r} has an agent that acts for several already, and how many of its steps a step of the "
            "environment is, by which samples_per_insert or updates_per_step count, it does not say; use num_updates."
        )
    if replay.updates_per_step is not None:
        return replay.updates_per_step * part.steps
    assert replay.samples_per_insert is not None
    return replay.samples_per_insert * part.steps / replay.steps_per_batch


def _words(numbers: dict[str, Any], of: str) -> str:
    found = ", ".join(f"{x:g} in group {name!r}" if not isinstance(x, str) else f"by {x} in group {name!r}"
                      for name, x in numbers.items())  # fmt: skip
    return f"{of}: {found}"
