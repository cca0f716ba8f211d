"""Anakin (Hessel et al. 2021, Podracer): rollout and update in one compiled program over a mesh of devices.

The rollout runs inside `shard_map`: each device loops over its own environments and never waits for another. The
update is written for the one global batch, and the partitioner inserts the sums of gradients: the only communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from podium import distributed, episodes, keys
from podium.agent import Agent
from podium.devices import Devices, make_mesh, resolve_devices
from podium.env import Env
from podium.episodes import Ended
from podium.host import HostEnvFactory
from podium.learn import learn
from podium.placement.actors.actor import make_acting
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.compiled.iteration import gradient_bytes, resolve_lanes, rollout_finite, specs_of, start
from podium.placement.contract import (
    NEVER,
    Asked,
    Move,
    Placement,
    Program,
    Report,
    Role,
    RunState,
    Sizes,
    device_name,
    numbers,
)
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class Anakin(Placement):
    """Fuse environments, inference and learning on every device.

    Args:
      devices: a number (of each process, where there are several), a sequence of devices, or None for all there are.
    """

    takes_host_envs: ClassVar[bool] = False
    takes_seeds: ClassVar[bool] = True
    takes_processes: ClassVar[bool] = True

    devices: Devices = None

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, rollout_length, seeds = asked.num_envs, asked.rollout_length, asked.seeds
        if seeds > 1 and distributed.num_processes() > 1:
            raise ValueError(f"seeds={seeds}: several processes run one seed together; start a run for each seed.")
        devices = resolve_devices(self.devices)
        acting = make_acting(agent, env, num_envs, rollout_length)
        by_seed = seeds > 1 and seeds % len(devices) == 0
        lanes = resolve_lanes(acting, num_envs, rollout_length, 1 if by_seed else len(devices), asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, seeds, lanes)
        iteration = _Iteration(agent, acting.env, sizes, devices, by_seed)
        loop = CompiledLoop(
            partial(iteration.start, acting),
            iteration.partition,
            iteration,
            iteration.mesh,
            sizes,
            asked.max_updates,
            spread=iteration.spread,
            shares_batch=not by_seed,
        )

        def moves() -> dict[str, int]:
            if by_seed or len(devices) == 1:
                return {"gradient sums": 0}
            state = jax.eval_shape(lambda key: start(key, acting, sizes), jax.random.key(0))
            return {"gradient sums": gradient_bytes(acting, sizes, state.agent, state.replay) * seeds}

        report = lambda moves: _report(devices, iteration.shares(), moves["gradient sums"])
        return Program(agent, acting.env, sizes, devices, loop, "Anakin", moves, report)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return every device."""
        return [cls(num_devices)]

    def explain(self) -> Report:
        """Say in a table and a drawing who runs where and what moves; `Program.explain` knows the numbers."""
        devices = resolve_devices(self.devices)
        return _report(devices, ["its share of the environments"] * len(devices), None if len(devices) > 1 else 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Iteration:
    """One iteration: every device plays its own environments, then all learn from the one batch.

    Args:
      agent: that is trained.
      env: that resets itself.
      sizes: of the run.
      devices: of the mesh.
      by_seed: whether each device has whole seeds of its own, and not its share of every batch.
    """

    agent: Agent
    env: Env
    sizes: Sizes
    devices: list[jax.Device]
    by_seed: bool

    def __call__(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        """Collect a rollout with the current policy, and learn from it."""
        rollout_key, learn_key = keys.iteration(state.key, state.update)
        collected = self._collect(rollout_key, self.agent.actor(state.agent), state.rollout, state.update)
        following, trajectory, ended = collected
        learned = learn(learn_key, self.agent, state.agent, state.replay, trajectory, self.sizes.num_lanes)
        metrics = {**learned.metrics, **episodes.summarize(ended)}
        state = RunState(state.key, state.update + 1, learned.state, learned.replay, following)
        return state, metrics, rollout_finite(self.agent, trajectory)

    def _collect(self, key: Key, params: PyTree, state: RolloutState, version: Array) -> Any:
        def local(key: Key, params: PyTree, state: RolloutState, version: Array) -> Any:
            return rollout(key, self.agent, self.env, params, state, self.sizes.rollout_length, version)

        if self.by_seed or len(self.devices) == 1:
            return local(key, params, state, version)
        rows: Any = P(None, "env")
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(), P(), P("env"), P()),
            out_specs=(P("env"), specs_of("env"), Ended(rows, rows, rows)),
            check_vma=False,
        )(key, params, state, version)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh, along which environments lie, or seeds."""
        return make_mesh(self.devices, "seed" if self.by_seed else "env")

    def start(self, acting: Any, key: Key) -> RunState:
        """Return the first state of all seeds."""
        first = lambda key: start(key, acting, self.sizes)
        if self.sizes.seeds == 1:
            return first(key)
        seed_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(self.sizes.seeds))
        # One after another: batched QR (orthogonal weights) on several CPU threads deadlocks XLA's pool, 3 times in 4.
        return jax.lax.map(first, seed_keys)

    def partition(self, shapes: RunState) -> RunState:
        """Return a PartitionSpec for every leaf of the state."""
        if self.by_seed:
            return jax.tree.map(lambda x: P("seed"), shapes)
        axes = () if self.sizes.seeds == 1 else (None,)
        everywhere = lambda tree: jax.tree.map(lambda x: P(), tree)
        # Environments and replay lanes lie along the mesh; scalars of the replay are the same everywhere.
        split = lambda tree: jax.tree.map(lambda x: P(*axes, "env") if x.ndim > len(axes) else P(), tree)
        once: Any = P()
        return RunState(once, once, everywhere(shapes.agent), split(shapes.replay), split(shapes.rollout))

    def spread(self, chunk: Callable[..., Any]) -> Callable[..., Any]:
        """Return the chunk of one seed as that of all seeds."""
        if self.sizes.seeds == 1:
            return chunk
        several = jax.vmap(chunk, in_axes=(0, None))
        if not self.by_seed:
            return several
        seed = P("seed")
        return jax.shard_map(several, mesh=self.mesh, in_specs=(seed, P()), out_specs=(seed, seed), check_vma=False)

    def shares(self) -> list[str]:
        """Name what each device has."""
        number, sizes = len(self.devices), self.sizes
        if self.by_seed:
            share = sizes.seeds // number
            return [f"{share} whole run{'s' if share > 1 else ''}"] * number
        share, of_seeds = sizes.num_envs // number, f", of each of {sizes.seeds} seeds" if sizes.seeds > 1 else ""
        return [numbers(i * share, share) + of_seeds for i in range(number)]


def _report(devices: list[jax.Device], shares: list[str], gradients: int | None) -> Report:
    roles = [Role("everything", device_name(device), share) for device, share in zip(devices, shares, strict=True)]
    moves = [Move("gradient sums", "among the devices", gradients)] if gradients != 0 else []
    title = "Anakin: one compiled program; each device steps environments, acts and learns."
    waits = "devices for one another, at every sum of gradients." if gradients != 0 else "nobody for another device."
    return Report(title, roles, moves, stale=NEVER, waits=f"learning for the rollout, then that for it; {waits}")
