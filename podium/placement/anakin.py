"""Anakin (Hessel et al. 2021, Podracer): rollout and update in one compiled program over a mesh of devices.

The rollout runs inside `shard_map`: each device loops over its own environments and never waits for another. The
update is written for the one global batch, and the partitioner inserts the sums of gradients: the only communication.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from podium import distributed
from podium.agent import Agent
from podium.env import Env
from podium.episodes import Ended
from podium.host import HostEnvs
from podium.placement import program
from podium.placement.devices import Devices, resolve_devices
from podium.placement.explanation import NEVER, Explanation
from podium.placement.fused import FusedProgram, trajectory_specs
from podium.placement.program import RunState, Sizes
from podium.placement.table import Move, Role, device_name, numbers
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Anakin:
    """Fuse environments, inference and learning on every device.

    Args:
      devices: a number (of each process, where there are several), a sequence of devices, or None for all there are.
    """

    devices: Devices = None

    def build(
        self,
        agent: Agent,
        env: Env | HostEnvs,
        *,
        num_envs: int,
        rollout_length: int,
        seeds: int = 1,
        num_lanes: int | None = None,
        max_updates: int = 1,
    ) -> AnakinProgram:
        """Check every size and return the program; see `Placement.build`."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        if seeds > 1 and distributed.num_processes() > 1:
            raise ValueError(f"seeds={seeds}: several processes run one seed together; start a run for each seed.")
        devices = resolve_devices(self.devices)
        env = program.prepare(env)
        by_seed = seeds > 1 and seeds % len(devices) == 0
        shards = 1 if by_seed else len(devices)
        lanes = program.resolve_lanes(agent, env, num_envs, rollout_length, shards, num_lanes)
        sizes = Sizes(num_envs, rollout_length, seeds, lanes)
        return AnakinProgram(agent, env, sizes, devices, by_seed, max_updates)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `AnakinProgram.explain` knows the numbers."""
        devices = resolve_devices(self.devices)
        formula = "gradient steps * parameters; 0 where seeds run whole on a device each" if len(devices) > 1 else 0
        return _explain(devices, ["its share of the environments"] * len(devices), formula)


def _explain(devices: list[jax.Device], shares: list[str], gradients: int | str) -> Explanation:
    roles = [Role("everything", device_name(device), share) for device, share in zip(devices, shares, strict=True)]
    moves = [Move("gradient sums", "among the devices", gradients)] if gradients else []
    title = "Anakin: one compiled program; each device steps environments, acts and learns."
    waits = "devices for one another, at every sum of gradients." if gradients else "nobody for another device."
    return Explanation(title, roles, moves, stale=NEVER, waits=f"learning for the rollout, then that for it; {waits}")


class AnakinProgram(FusedProgram):
    """The fused program for one agent, one environment and one set of sizes; a `Program`."""

    def __init__(
        self, agent: Agent, env: Env, sizes: Sizes, devices: list[jax.Device], by_seed: bool, max_updates: int
    ):
        self._by_seed = by_seed
        axis, groups = ("seed", 1) if by_seed else ("env", len(devices))
        super().__init__(agent, env, sizes, devices, axis, max_updates, groups)

    def _start(self, key: Key) -> RunState:
        start = lambda key: program.start(key, self.agent, self.env, self.sizes)  # noqa: E731
        if self.sizes.seeds == 1:
            return start(key)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(self.sizes.seeds))
        # One after another: batched QR (orthogonal weights) on several CPU threads deadlocks XLA's pool, 3 times in 4.
        return jax.lax.map(start, keys)

    def _partition(self) -> RunState:
        """Return a PartitionSpec for every leaf of the state."""
        shapes = jax.eval_shape(self._start, jax.random.key(0))
        if self._by_seed:
            return jax.tree.map(lambda x: P("seed"), shapes)
        axes = () if self.sizes.seeds == 1 else (None,)
        everywhere = lambda tree: jax.tree.map(lambda x: P(), tree)  # noqa: E731
        # Environments and replay lanes lie along the mesh; scalars of the replay are the same everywhere.
        split = lambda tree: jax.tree.map(lambda x: P(*axes, "env") if x.ndim > len(axes) else P(), tree)  # noqa: E731
        once: Any = P()
        return RunState(once, once, everywhere(shapes.agent), split(shapes.replay), split(shapes.rollout))

    def _iterate(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        return program.iterate(state, self.agent, self._collect, program.make_learn(self.agent, self.sizes))

    def _collect(self, key: Key, params: PyTree, state: RolloutState, version: Array) -> Any:
        def local(key: Key, params: PyTree, state: RolloutState, version: Array) -> Any:
            return rollout(key, self.agent, self.env, params, state, self.sizes.rollout_length, version)

        if self._by_seed or len(self.devices) == 1:
            return local(key, params, state, version)
        rows: Any = P(None, "env")
        return jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(P(), P(), P("env"), P()),
            out_specs=(P("env"), trajectory_specs("env"), Ended(rows, rows, rows)),
            check_vma=False,
        )(key, params, state, version)

    def _whole(self, state: RunState, num_updates: Array) -> tuple[RunState, Metrics]:
        if self.sizes.seeds == 1:
            return self._chunk(state, num_updates)
        several = jax.vmap(self._chunk, in_axes=(0, None))
        if not self._by_seed:
            return several(state, num_updates)
        seed = P("seed")
        return jax.shard_map(several, mesh=self._mesh, in_specs=(seed, P()), out_specs=(seed, seed), check_vma=False)(
            state, num_updates
        )

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        number, sizes = len(self.devices), self.sizes
        if self._by_seed:
            share = sizes.seeds // number
            return _explain(self.devices, [f"{share} whole run{'s' if share > 1 else ''}"] * number, 0)
        share, of_seeds = sizes.num_envs // number, f", of each of {sizes.seeds} seeds" if sizes.seeds > 1 else ""
        shares = [numbers(i * share, share) + of_seeds for i in range(number)]
        return _explain(self.devices, shares, self.bytes_per_update()["gradient sums"])

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update: the gradients that devices sum."""
        if self._by_seed or len(self.devices) == 1:
            return {"gradient sums": 0}

        def start(key: Key) -> tuple[RunState, Trajectory]:
            state = program.start(key, self.agent, self.env, self.sizes)
            params, version = self.agent.actor(state.agent), state.update
            length = self.sizes.rollout_length
            return state, rollout(key, self.agent, self.env, params, state.rollout, length, version)[1]

        state, trajectory = jax.eval_shape(start, jax.random.key(0))
        of_seed = program.gradient_bytes(self.agent, self.sizes, state.agent, state.replay, trajectory)
        return {"gradient sums": of_seed * self.sizes.seeds}
