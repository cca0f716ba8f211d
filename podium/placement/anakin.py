"""Anakin (Hessel et al. 2021, Podracer): rollout and update in one compiled program over a mesh of devices.

The rollout runs inside `shard_map`: each device loops over its own environments and never waits for another. The
update is written for the one global batch, and the partitioner inserts the sums of gradients: the only communication.

With a model axis the devices are a grid: those of a row share a network that is too wide for one, and act and learn
together where one did; `podium.layout` says which arrays are split. With fully sharded parameters each device holds its
part of them and of the optimiser's moments (Rajbhandari et al. 2020, ZeRO, stage 3), and gathers what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import jax
from jax.sharding import PartitionSpec as P

from podium import distributed
from podium.agent import Agent
from podium.devices import Devices, make_mesh, resolve_devices
from podium.env import Env
from podium.host import HostEnvFactory
from podium.layout import Layout, asked_words, check_asked, check_groups, split, who_shares
from podium.learn import gradient, num_gradients
from podium.placement.actors.actor import make_acting
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.compiled.iteration import gradient_bytes, prepared_shapes, resolve_lanes, start
from podium.placement.compiled.runs import BY_RUN, fused, side_by_side, start_runs
from podium.placement.contract import Acting, Asked, Placement, Program, RunState, Sizes
from podium.ranges import nearest_multiples
from podium.report import NEVER, Move, Report, in_bytes, roles_on, shares
from podium.rollout import specs_of
from podium.types import Array, EnvSpec, Key, Metrics, PyTree

GATHERED = "parameters gathered"
"""What moves for fully sharded parameters."""


@dataclasses.dataclass(frozen=True)
class Anakin(Placement):
    """Fuse environments, inference and learning on every device.

    Args:
      devices: a number (of each process, where there are several), a sequence of devices, or None for all there are.
      model: neighbouring devices that share one network; devices / model such groups share the environments. Layers of
        128 units or more (`podium.layout.WIDE`) are split among them evenly.
      shard: "parameters" splits the parameters of such layers, and what the optimiser keeps of them, among all devices,
        which gather them for use.
    """

    takes_host_envs: ClassVar[bool] = False
    takes_seeds: ClassVar[bool] = True
    takes_processes: ClassVar[bool] = True
    may_change: ClassVar[frozenset[str]] = Placement.may_change | {"model", "shard"}

    devices: Devices = None
    model: int = 1
    shard: Literal["parameters"] | None = None

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, rollout_length, seeds = asked.num_envs, asked.rollout_length, asked.seeds
        if seeds > 1 and distributed.num_processes() > 1:
            raise ValueError(f"seeds={seeds}: several processes run one seed together; start a run for each seed.")
        devices = self._devices(seeds)
        if agent.settings and seeds % len(agent.settings.values):
            raise ValueError(
                f"seeds={seeds} is not divisible by the {len(agent.settings.values)} settings of {agent.name}; use "
                f"{nearest_multiples(seeds, len(agent.settings.values))}."
            )
        by_seed = seeds > 1 and seeds % len(devices) == 0
        mesh = make_mesh(devices, "run" if by_seed else "env", self.model)
        layout = self._layout(mesh, agent, env.spec)
        acting = make_acting(layout.agent(agent), env, num_envs, rollout_length)
        groups = 1 if by_seed else mesh.shape["env"]
        lanes = resolve_lanes(acting, num_envs, rollout_length, groups, asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, seeds, lanes)
        iteration = _Iteration(acting, sizes, layout, by_seed)
        loop = CompiledLoop(
            iteration.start,
            iteration.partition,
            iteration.of_all,
            mesh,
            sizes,
            asked.max_updates,
            shares_batch=not by_seed,
            splits_state=layout.parts > 1,
        )

        def moves() -> dict[str, int]:
            if groups == 1:
                return {"gradient sums": 0}
            state = jax.eval_shape(lambda key: start(key, acting, sizes), jax.random.key(0))
            sums = gradient_bytes(acting, sizes, state.agent, state.replay) * seeds
            return {"gradient sums": sums, **_gathered(agent, acting, sizes, layout, state)}

        held = layout.device_bytes(loop.state_shapes.agent) if layout.parts > 1 else None
        report = lambda moves: self._explain(num_envs, moves, seeds, held)
        return Program(agent, acting.env, sizes, devices, loop, "Anakin", moves, report)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return every device."""
        return [cls(num_devices)]

    def _devices(self, seeds: int = 1) -> list[jax.Device]:
        """Return all devices, after checking that what is asked of them goes together."""
        check_asked(self.model, self.shard, seeds)
        devices = resolve_devices(self.devices)
        check_groups(self.model, len(devices))
        return devices

    def _layout(self, mesh: jax.sharding.Mesh, agent: Agent, spec: EnvSpec) -> Layout:
        words = asked_words(self.model, self.shard)
        return split(mesh, words, agent, spec, over_env=self.shard is not None) if words else Layout(mesh)

    def _explain(
        self, num_envs: int | None, amounts: Mapping[str, int | None], seeds: int = 1, held: int | None = None
    ) -> Report:
        devices = self._devices()
        gradients, each = amounts.get("gradient sums", None if len(devices) > self.model else 0), seeds // len(devices)
        has = [share for share in shares(num_envs, len(devices) // self.model) for _ in range(self.model)]
        has = [share + (f", of each of {seeds} seeds" if seeds > 1 else "") for share in has]
        if seeds > 1 and seeds % len(devices) == 0:
            has = [f"{each} whole run{'s' if each > 1 else ''}"] * len(devices)
        title = "Anakin: one compiled program; each device steps environments, acts and learns."
        moves = [Move("gradient sums", "among the devices", gradients)] if gradients != 0 else []
        waits = "devices for one another, at every sum of gradients" if moves else "nobody for another device"
        if self.model > 1 or self.shard:
            title += " " + who_shares(self.model, self.shard, len(devices))
        if held is not None:
            title += f" A device holds {in_bytes(held)} of the agent's State."
        if self.shard and len(devices) > self.model:
            moves.append(Move(GATHERED, "among the devices", amounts.get(GATHERED)))
        if self.model > 1:
            has = [f"{share}; part {i % self.model + 1} of {self.model} of the network" for i, share in enumerate(has)]
            moves.append(Move("activations", f"within each group of {self.model} devices, as compiled", None))
            waits = "devices of a group for one another, in every layer" + (f"; {waits}" if gradients != 0 else "")
        roles = roles_on(devices, "everything", has)
        return Report(title, roles, moves, stale=NEVER, waits=f"learning for the rollout, then that for it; {waits}.")


def _gathered(agent: Agent, acting: Acting, sizes: Sizes, layout: Layout, state: RunState) -> dict[str, int]:
    """Return the bytes of parameters that each device gathers in an update: once to play and plan, and per gradient."""
    if layout.at_rest == layout.in_use:
        return {}

    def prepare(state: PyTree, trajectory: PyTree) -> Any:
        return agent.actor(state), agent.plan(jax.random.key(0), state, trajectory)

    trajectory = acting.shapes(sizes.rollout_length, sizes.num_envs).trajectory()
    prepared = prepared_shapes(acting, sizes, state.agent, state.replay)
    each = layout.gathered_bytes(lambda state, x: gradient(agent, state, x, 0).grads, state.agent, prepared)
    once = layout.gathered_bytes(prepare, state.agent, trajectory)
    return {GATHERED: once + each * num_gradients(agent, prepared)}


@dataclasses.dataclass(frozen=True, eq=False)
class _Iteration:
    """One iteration: every device plays its own environments, then all learn from the one batch.

    Args:
      layout: how the agent's State lies.
      by_seed: whether each device has whole seeds of its own, and not its share of every batch.
    """

    acting: Acting
    sizes: Sizes
    layout: Layout
    by_seed: bool

    def of_all(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        """Do one iteration of every seed."""
        if self.sizes.seeds == 1:
            return self._of_one(state)
        return side_by_side(self._of_one, self.layout.mesh if self.by_seed else None)(state)

    def _of_one(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        return fused(self.acting, self.sizes, self.layout.mesh.devices.flat[0], state, self._spread)

    def _spread(self, play: Callable) -> Callable:
        """Return what lets each device play its own environments."""
        mesh, rows = self.layout.mesh, P(None, "env")
        if self.by_seed or mesh.shape["env"] == 1:
            return play
        specs, out_specs = (P(), P(), P("env"), P()), (P("env"), specs_of("env"), rows)
        return jax.shard_map(play, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names={"env"}, check_vma=False)

    def start(self, key: Key) -> RunState:
        """Return the first state of all seeds."""
        return start_runs(key, self.acting, self.sizes)

    def partition(self, shapes: RunState) -> RunState:
        """Return a PartitionSpec for every leaf of the state."""
        if self.by_seed:
            return jax.tree.map(lambda x: BY_RUN, shapes)
        axes = () if self.sizes.seeds == 1 else (None,)
        # Environments and replay lanes lie along the mesh; scalars of the replay are the same everywhere.
        along = lambda tree: jax.tree.map(lambda x: P(*axes, "env") if x.ndim > len(axes) else P(), tree)
        once: Any = P()
        return RunState(once, once, self.layout.specs(shapes.agent), along(shapes.replay), along(shapes.rollout))
