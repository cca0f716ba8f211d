"""The part of a worker that computes: environments, a replay, and compiled functions, here or in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.placement import acting
from podium.placement.actors import seed_after
from podium.placement.cores import OneCore
from podium.placement.cut import Cut, HostCut, Played, Shapes, Taken
from podium.placement.devices import at, jit
from podium.placement.players import HostPlayer
from podium.rollout import RolloutState
from podium.types import Array, Key, Metrics, PyTree, Trajectory


class Compiled(NamedTuple):
    """`Cut.play` and `Cut.take` compiled for a device."""

    cut: Cut
    device: jax.Device
    play: Callable[..., Played]
    take: Callable[..., Taken]


def lower(cut: Cut, shapes: Shapes, device: jax.Device, keeps: bool) -> dict[str, Any]:
    """Trace `Cut.play` and `Cut.take` for a device; `keeps` what an iteration began with, for repeating it."""
    play = jit(cut.play, device, () if keeps else shapes.donated)
    take = jit(cut.take, device, (5,) if cut.new_priorities and not keeps else ())
    return {"play": play.lower(*at(shapes.play, device)), "take": take.lower(*at(shapes.take, device))}


class Rolled(NamedTuple):
    """What a rollout gives to others than its own worker; see `Played`."""

    trajectory: Trajectory
    ready: bool
    episodes: Metrics
    finite: Array


class Fragment:
    """The part of a worker that computes: environments, a replay, and the functions of its device.

    A State of None stands for the one given last, so that none is brought twice.

    Args:
      compiled: functions of its device.
      worker: number of this worker.
    """

    def __init__(self, compiled: Compiled, worker: int):
        self._compiled, self._worker = compiled, np.int32(worker)
        self._state: PyTree = None

    def ready(self) -> None:
        """Say that it is made."""

    def begin(self, run_key: Key, rollout_state: RolloutState, replay: PyTree, seed: int) -> None:
        """Let the environments and the replay stand so; `seed` is for environments on the host, which begin anew."""
        self._run_key, self._rollout, self._replay = self._put((run_key, rollout_state, replay))

    def play(self, number: int, version: int, state: PyTree | None) -> Rolled:
        """Collect iteration `number`; nothing stands otherwise than before until `settle`."""
        self._bring(state)
        self._mine = self._run_key, np.int32(number), self._worker
        played = self._compiled.play(*self._mine, np.int32(version), self._state, self._rollout, self._replay)
        self._played, self._learnt = played, played.replay
        return Rolled(played.trajectory, bool(played.ready), played.episodes, played.finite)

    def take(self, step: int, state: PyTree | None) -> tuple[PyTree, bool, Metrics]:
        """Take a gradient from what was played; returns it, whether all of it is finite, and its metrics."""
        self._bring(state)
        taken = self._compiled.take(*self._mine, np.int32(step), self._state, self._learnt, self._played.plan)
        if self._compiled.cut.new_priorities:
            self._learnt = taken.replay
        return taken.gradient, bool(taken.finite), taken.metrics

    def close(self) -> None:
        """Release the environments."""

    def settle(self) -> None:
        """Let everything stand as after what was played."""
        self._rollout, self._replay = self._played.rollout, self._learnt

    def standing(self) -> tuple[RolloutState, PyTree]:
        """Return where the environments stand, and the replay."""
        return self._rollout, self._replay

    def _bring(self, state: PyTree | None) -> None:
        if state is not None:
            self._state = self._put(state)

    def _put(self, tree: PyTree) -> PyTree:
        # What comes from another process is copied: it would be used in place, and cannot be donated then.
        travelled = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree))
        return jax.device_put(tree, self._compiled.device, may_alias=False if travelled else None)


class HostFragment(Fragment):
    """A `Fragment` whose environments are on the host.

    They stand nowhere but where they are: what is played is not played again, and a rollout that fails leaves none, so
    that the next begins with fresh episodes.

    Args:
      compiled: functions of its device.
      worker: number of this worker.
      acting: likewise, of a rollout.
      cores: that it shares with the other workers of this process, if there are any.
    """

    def __init__(self, compiled: Compiled, worker: int, acting: acting.Compiled, cores: OneCore | None):
        super().__init__(compiled, worker)
        self._acting, self._cores, self._failures = acting, cores, 0
        self._actor = jit(compiled.cut.agent.actor, compiled.device)
        self._player: HostPlayer | None = None

    def begin(self, run_key: Key, rollout_state: RolloutState, replay: PyTree, seed: int) -> None:
        """Let the replay stand so, and the environments begin anew; see `Fragment.begin`."""
        self.close()
        super().begin(run_key, rollout_state, replay, seed)
        self._seed = seed

    def play(self, number: int, version: int, state: PyTree | None) -> Rolled:
        """Collect iteration `number`; see `Fragment.play`."""
        self._bring(state)
        trajectory, counts = self._roll(number, version)
        self._mine = self._run_key, np.int32(number), self._worker
        self._played = played = self._compiled.play(*self._mine, self._state, trajectory, self._replay)
        self._learnt = played.replay
        return Rolled(played.trajectory, bool(played.ready), counts, played.finite)

    def _roll(self, number: int, version: int) -> tuple[Trajectory, Metrics]:
        player, self._player = self._player or self._make_player(), None
        try:
            played = player.play(self._actor(self._state), version, number, lambda: None)
        except BaseException:
            self._failures += 1
            player.close()
            raise
        self._player = player
        return played.trajectory, {name: jnp.float32(count) for name, count in played.sums.items()}

    def _make_player(self) -> HostPlayer:
        cut, seed = self._compiled.cut, seed_after(self._seed, self._failures)
        first_index = int(self._worker) * cut.sizes.num_envs
        return HostPlayer(cut.env, seed, first_index, self._acting, self._run_key, self._cores)

    def close(self) -> None:
        """Release the environments."""
        if self._player is not None:
            self._player.close()
            self._player = None


def compile_acting(cut: Cut, device: jax.Device) -> acting.Compiled | None:
    """Compile how a worker acts on the host, for a device; None where its environments are pure."""
    if not isinstance(cut, HostCut):
        return None
    params = jax.eval_shape(lambda key: cut.agent.actor(cut.agent.init(key, cut.env.spec)), jax.random.key(0))
    return acting.Compiled(cut.acting(), params, device)


def fragment(compiled: Compiled, worker: int, acting: acting.Compiled | None, cores: OneCore | None = None) -> Fragment:
    """Return a worker's fragment."""
    return Fragment(compiled, worker) if acting is None else HostFragment(compiled, worker, acting, cores)


def make_fragment(cut: Cut, worker: int, keeps: bool) -> Fragment:
    """Return a fragment with functions of its own, on the first device of this process."""
    device = jax.devices()[0]
    lowered = lower(cut, cut.shapes(), device, keeps)
    compiled = Compiled(cut, device, **{name: piece.compile() for name, piece in lowered.items()})
    return fragment(compiled, worker, compile_acting(cut, device))
