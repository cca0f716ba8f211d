"""Anakin (Hessel et al. 2021, Podracer): rollout and update in one compiled program over a mesh of devices.

The rollout runs inside `shard_map`: each device loops over its own environments and never waits for another. The
update is written for the one global batch, and the partitioner inserts the sums of gradients: the only communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
from jax.sharding import PartitionSpec as P

from podium import distributed
from podium.agent import Agent
from podium.devices import Devices, make_mesh, resolve_devices
from podium.env import Env
from podium.episodes import Ended
from podium.host import HostEnvFactory
from podium.placement.actors.actor import make_acting
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.compiled.iteration import gradient_bytes, resolve_lanes, start
from podium.placement.compiled.runs import BY_RUN, fused, side_by_side, start_runs
from podium.placement.contract import (
    NEVER,
    Acting,
    Asked,
    Move,
    Placement,
    Program,
    Report,
    RunState,
    Sizes,
    roles_on,
    shares,
)
from podium.ranges import nearest_multiples
from podium.rollout import RolloutState, rollout, specs_of
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
        if agent.settings and seeds % len(agent.settings.values):
            raise ValueError(
                f"seeds={seeds} is not divisible by the {len(agent.settings.values)} settings of {agent.name}; use "
                f"{nearest_multiples(seeds, len(agent.settings.values))}."
            )
        acting = make_acting(agent, env, num_envs, rollout_length)
        by_seed = seeds > 1 and seeds % len(devices) == 0
        lanes = resolve_lanes(acting, num_envs, rollout_length, 1 if by_seed else len(devices), asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, seeds, lanes)
        iteration = _Iteration(acting, sizes, devices, by_seed)
        loop = CompiledLoop(
            iteration.start,
            iteration.partition,
            iteration.of_all,
            iteration.mesh,
            sizes,
            asked.max_updates,
            shares_batch=not by_seed,
        )

        def moves() -> dict[str, int]:
            if by_seed or len(devices) == 1:
                return {"gradient sums": 0}
            state = jax.eval_shape(lambda key: start(key, acting, sizes), jax.random.key(0))
            return {"gradient sums": gradient_bytes(acting, sizes, state.agent, state.replay) * seeds}

        report = lambda moves: self._explain(num_envs, moves, seeds)
        return Program(agent, acting.env, sizes, devices, loop, "Anakin", moves, report)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return every device."""
        return [cls(num_devices)]

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None], seeds: int = 1) -> Report:
        devices = resolve_devices(self.devices)
        gradients, each = amounts.get("gradient sums", None if len(devices) > 1 else 0), seeds // len(devices)
        has = [share + (f", of each of {seeds} seeds" if seeds > 1 else "") for share in shares(num_envs, len(devices))]
        if seeds > 1 and seeds % len(devices) == 0:
            has = [f"{each} whole run{'s' if each > 1 else ''}"] * len(devices)
        roles = roles_on(devices, "everything", has)
        moves = [Move("gradient sums", "among the devices", gradients)] if gradients != 0 else []
        title = "Anakin: one compiled program; each device steps environments, acts and learns."
        waits = "devices for one another, at every sum of gradients" if moves else "nobody for another device"
        return Report(title, roles, moves, stale=NEVER, waits=f"learning for the rollout, then that for it; {waits}.")


@dataclasses.dataclass(frozen=True, eq=False)
class _Iteration:
    """One iteration: every device plays its own environments, then all learn from the one batch.

    Args:
      by_seed: whether each device has whole seeds of its own, and not its share of every batch.
    """

    acting: Acting
    sizes: Sizes
    devices: list[jax.Device]
    by_seed: bool

    def of_all(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        """Do one iteration of every seed."""
        if self.sizes.seeds == 1:
            return self._of_one(state)
        return side_by_side(self._of_one, self.mesh if self.by_seed else None)(state)

    def _of_one(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        return fused(self.acting, self.sizes, state, self._collect)

    def _collect(self, key: Key, agent: Agent, params: PyTree, state: RolloutState, version: Array) -> Any:
        def local(key: Key, params: PyTree, state: RolloutState, version: Array) -> Any:
            return rollout(key, agent, self.acting.env, params, state, self.sizes.rollout_length, version)

        rows: Any = P(None, "env")
        specs, out_specs = (P(), P(), P("env"), P()), (P("env"), specs_of("env"), Ended(rows, rows, rows))
        if not self.by_seed and len(self.devices) > 1:
            local = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return local(key, params, state, version)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh, along which environments lie, or seeds."""
        return make_mesh(self.devices, "run" if self.by_seed else "env")

    def start(self, key: Key) -> RunState:
        """Return the first state of all seeds."""
        return start_runs(key, self.acting, self.sizes)

    def partition(self, shapes: RunState) -> RunState:
        """Return a PartitionSpec for every leaf of the state."""
        if self.by_seed:
            return jax.tree.map(lambda x: BY_RUN, shapes)
        axes = () if self.sizes.seeds == 1 else (None,)
        everywhere = lambda tree: jax.tree.map(lambda x: P(), tree)
        # Environments and replay lanes lie along the mesh; scalars of the replay are the same everywhere.
        split = lambda tree: jax.tree.map(lambda x: P(*axes, "env") if x.ndim > len(axes) else P(), tree)
        once: Any = P()
        return RunState(once, once, everywhere(shapes.agent), split(shapes.replay), split(shapes.rollout))
