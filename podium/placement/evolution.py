"""Evolution: perturb the policy and ask only for returns.

Salimans et al. 2017, "Evolution Strategies as a Scalable Alternative to Reinforcement Learning". In a generation every
member of the population plays with the parameters plus noise of its own; the noise, weighed by how the members ranked,
is the direction of the step. Noise is drawn again from its seed wherever it is needed, on every device, so only the
members' returns cross devices. Of the agent (`Agent.evaluation`, where it has one) `init`, `actor`, `carry`, `act` and
`policy_mask` are used.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, xla
from podium.agent import Agent
from podium.compiling import run_once
from podium.devices import Devices, make_mesh, resolve_devices
from podium.env import Env
from podium.evaluate import Episodes, make_evaluator
from podium.evolve import ADDITIONS, EvolutionState, Play, Strategy, generation
from podium.finite import chunk_finite
from podium.host import HostEnvFactory
from podium.host_rollout import Rows
from podium.placement.actors.host import HostActing
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.contract import Asked, Placement, Program, Sizes
from podium.placement.threads.supervision import Heartbeat, supervise
from podium.ranges import check_fields, largest_divisor, nearest_multiples
from podium.report import NEVER, Move, Report, Role, nbytes, roles_on
from podium.types import Array, EnvSpec, Key, Metrics, PyTree

BLOCK_BYTES = 1 << 22
"""Parameters that a CPU core works on at once: what its cache holds."""


@dataclasses.dataclass(frozen=True)
class Evolution(Placement):
    """Train by evolution: `num_envs` members (times `episodes`) play whole episodes, at most `rollout_length` steps.

    Members come in pairs with opposite noise, and the two of a pair meet the same resets. Returns are those reported
    (before clipping or scaling of rewards), of greedy play, and count by their rank alone, ties by their mean rank.
    A generation counts as `num_envs * rollout_length` environment steps, though no step follows the end of an episode;
    the steps that were played are the metric `valid_steps`.

    Environments on the CPU are made anew for every generation, from its key, so that there too resuming is exact, and
    the two of a pair meet the same resets; every member's parameters are kept while it plays.

    What is perturbed are the parameters of the greedy policy (`Agent.policy_mask`). Normalisers stay as they begin, for
    nothing but acting is used; the critic, where there is one, is not trained.

    Args:
      sigma: deviation of the noise.
      learning_rate: of Adam, which follows the estimated gradient.
      weight_decay: towards zero, of the parameters, beside the estimate.
      episodes: that each member plays in a generation; its return is their mean.
      members_at_once: of a device; None for all on an accelerator, and on a CPU for as many as its cache holds; for all
        over environments on the CPU.
      devices: a number (of each process, where there are several), a sequence of devices, or None for all there are.
      actor_timeout: seconds without a step after which environments on the CPU count as hung, and the run ends.
    """

    whole_episodes: ClassVar[bool] = True
    takes_processes: ClassVar[bool] = True
    may_change: ClassVar[frozenset[str]] = Placement.may_change | {"members_at_once"}

    sigma: float = 0.05
    learning_rate: float = 0.02
    weight_decay: float = 0.0
    episodes: int = 1
    members_at_once: int | None = None
    devices: Devices = None
    actor_timeout: float = 60.0

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`. Nothing is shuffled, in no lanes."""
        num_envs = asked.num_envs
        counts, positive = ("episodes", "members_at_once"), ("sigma", "learning_rate", "actor_timeout")
        check_fields(self, counts=counts, positive=positive, not_negative=("weight_decay",))
        devices = resolve_devices(self.devices)
        unit = 2 * self.episodes * len(devices)
        if num_envs % unit:
            raise ValueError(
                f"num_envs={num_envs} is not divisible by {unit}, two members of a pair times episodes={self.episodes} "
                f"times devices={len(devices)}; use {nearest_multiples(num_envs, unit)}."
            )
        sizes, strategy = Sizes(num_envs, asked.rollout_length, 1, 1), self.strategy(agent, env.spec)
        members, mesh = num_envs // self.episodes, make_mesh(devices, "member")
        share = members // len(devices)
        block = self.pairs_at_once(strategy.size, share, devices[0])
        loop: Any
        if isinstance(env, HostEnvFactory):
            if (processes := distributed.num_processes()) > 1:
                raise ValueError(
                    f"{processes} processes: Evolution over environments on the CPU runs in one; use podium.Sebulba."
                )
            every = dataclasses.replace(self, members_at_once=self.members_at_once or share)
            at_once = every.pairs_at_once(strategy.size, share, devices[0]) * len(devices)
            loop = HostLoop(strategy, env, sizes, mesh, block, at_once, self.actor_timeout)
            layout, moves = "HostEvolution", loop.moves
        else:
            iterate = partial(generation, fused_play(strategy, env, sizes, mesh, block), partial(strategy.learn, block))
            everywhere = partial(jax.tree.map, lambda x: P())
            loop = CompiledLoop(strategy.start, everywhere, iterate, mesh, sizes, asked.max_updates)
            layout, moves = "Evolution", lambda: {"returns": 4 * members if len(devices) > 1 else 0}
        report = partial(self._explain, num_envs)
        return Program(agent, env, sizes, devices, loop, layout, moves, report, ADDITIONS, whole_episodes=True)

    def strategy(self, agent: Agent, spec: EnvSpec) -> Strategy:
        """Return how the parameters of an agent are perturbed and moved."""
        return Strategy(
            agent.evaluated,
            spec,
            sigma=self.sigma,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            episodes=self.episodes,
        )

    def pairs_at_once(self, size: int, members: int, device: jax.Device) -> int:
        """Return how many pairs of `members` with `size` parameters play at once on a device; divides their number."""
        wanted = self.members_at_once
        if wanted is None:
            wanted = members if device.platform != "cpu" else max(2, BLOCK_BYTES // (4 * size))
        return largest_divisor(members // 2, max(1, min(members, wanted) // 2))

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return the settings that use so many devices."""
        return [cls(devices=num_devices)]

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        devices, on_host = resolve_devices(self.devices), "observations" in amounts
        shares = ["its share of the population"] * len(devices)
        if num_envs is not None:
            each = num_envs // self.episodes // len(devices)
            shares = [f"members {i * each} to {(i + 1) * each - 1}" for i in range(len(devices))]
        roles = [Role("environments", "host CPU", "of the whole population")] if on_host else []
        name, way = ("members", "environments to members") if on_host else ("everything", "from all to all")
        roles += roles_on(devices, name, shares)
        ways = {"observations": way, "actions": "members to environments", "returns": way}
        amounts = amounts or {"returns": None}
        moves = [Move(name, ways[name], amount) for name, amount in amounts.items() if on_host or len(devices) > 1]
        head = "Evolution: members with noise in their parameters play; every device draws all noise again, and learns."
        waits = "every generation for the longest episode of the one before it, on every device."
        return Report(head, roles, moves, stale=NEVER, waits=waits)


def fused_play(strategy: Strategy, env: Env, sizes: Sizes, mesh: Mesh, block: int) -> Play:
    """Return how members play in pure environments, compiled: on every device its share, `block` pairs at once."""
    episodes = strategy.episodes
    evaluate = make_evaluator(strategy.agent, env, episodes, sizes.rollout_length)
    share = sizes.num_envs // episodes // 2 // mesh.size

    def play(noise_key: Key, play_key: Key, agent_state: PyTree) -> tuple[Array, Array]:
        def both(pair: Array) -> tuple[Array, Array]:
            key, params = jax.random.fold_in(play_key, pair), strategy.perturb(noise_key, agent_state, pair)
            played = jax.vmap(lambda member: evaluate(key, member))(params)
            return played["eval_return"], played["eval_length"]

        pairs = jax.lax.axis_index("member") * share + jnp.arange(share)
        returns, lengths = jax.lax.map(jax.vmap(both), pairs.reshape(-1, block))
        # All that ever crosses devices: returns [members / 2, 2], and how many steps were played.
        everyones = jax.lax.all_gather(returns.reshape(-1, 2), "member", tiled=True)
        return everyones, jax.lax.psum(jnp.sum(lengths.reshape(-1, 2)), "member") * episodes

    everywhere: Any = P()
    return jax.shard_map(play, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


@dataclasses.dataclass(eq=False)
class HostLoop:
    """A `Loop` in Python over environments on the CPU, which one thread steps; every device acts for its members.

    Args:
      block: pairs whose noise is drawn again at once, to learn.
      at_once: pairs that play at once, on all devices.
      timeout: seconds without a step after which the environments count as hung.
    """

    strategy: Strategy
    envs: HostEnvFactory
    sizes: Sizes
    mesh: Mesh
    block: int
    at_once: int
    timeout: float
    compile_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._episodes = self.strategy.episodes
        self._acting = HostActing(self.strategy.agent, self.envs, self.at_once * self._episodes, 1)
        self._everywhere = NamedSharding(self.mesh, P())
        self._learn: Any = None

    def init(self, seed: int) -> EvolutionState:
        """Return the first state."""
        return run_once(self.strategy.start, self._everywhere)(jax.random.key(seed))

    def abstract_state(self) -> EvolutionState:
        """Return the state's shapes, dtypes and shardings."""
        shapes = jax.eval_shape(self.strategy.start, jax.random.key(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), shapes)

    def lower(self) -> None:
        """Do nothing: tracing takes next to no time here."""

    def compile(self) -> None:
        """Compile the pieces, once."""
        if self._learn is not None:
            return
        began, state, once, apart = time.perf_counter(), self.abstract_state(), P(), P("member")

        def spread(function: Callable[..., Any], specs: tuple[P, ...], *shapes: Any) -> Any:
            mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=apart, check_vma=False)
            where = tuple(NamedSharding(self.mesh, spec) for spec in specs)
            return jax.jit(mapped, in_shardings=where).lower(*shapes).compile(xla.usual(self.mesh.devices.flat[0]))

        pairs, index = np.zeros(self.at_once, np.int32), np.zeros(self._acting.num_envs, np.int32)
        step, carry = self._step, jax.eval_shape(self._acting.carry, 0)
        self._perturb = spread(self.strategy.halves, (once, once, apart), state.key, state.agent, pairs)
        params, _ = jax.eval_shape(self.strategy.halves, state.key, state.agent, pairs)
        acting = params, state.key, index, carry, step.obs, step.first
        self._act = spread(self.strategy.act, (apart, once, apart, apart, apart, apart), *acting)
        returns = np.zeros((self.sizes.num_envs // self._episodes // 2, 2), np.float32)
        learn = jax.jit(partial(self.strategy.learn, self.block), out_shardings=self._everywhere)
        self._learn = learn.lower(state.key, state, returns, np.float32(0)).compile()
        self.compile_seconds += time.perf_counter() - began

    @property
    def _step(self) -> Rows:
        """Shapes of the rows of one step of all environments that play at once."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._acting.rows())

    def moves(self) -> dict[str, int]:
        """Return what moves in a generation, at most: where every episode is as long as it may be."""
        step, times = self._step, self.sizes.rollout_length * self.sizes.num_envs // self._acting.num_envs
        observations, actions = times * nbytes((step.obs, step.first)), times * nbytes(step.action)
        return {"observations": observations, "actions": actions, "returns": 4 * self.sizes.num_envs // self._episodes}

    def chunk(self, state: EvolutionState, num_updates: int) -> tuple[EvolutionState, Metrics]:
        """Do `num_updates` generations; raises ActorError where environments failed or hung."""
        self.compile()
        rows = []
        for _ in range(num_updates):
            state, metrics, finite = generation(self.play, self._learn, state)
            rows.append(jax.device_get({**metrics, "finite": finite}))
        stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
        return state, stacked | {"finite": np.asarray(chunk_finite(state.agent, stacked["finite"]))}

    def play(self, noise_key: Key, play_key: Key, agent_state: PyTree) -> tuple[np.ndarray, np.float32]:
        """Let all members play, as many at once as there is room for."""
        seed, parts = int(jax.random.randint(play_key, (), 0, 2**31 - 1)), []
        for first in range(0, self.sizes.num_envs // self._episodes // 2, self.at_once):
            pairs = np.arange(first, first + self.at_once, dtype=np.int32)
            play = partial(self._play, self._perturb(noise_key, agent_state, pairs), play_key, seed, first)
            parts.append(supervise("podium-evolution", play, self.timeout))
        returns, steps = zip(*parts, strict=True)
        return np.concatenate(returns), np.float32(sum(steps))

    def _play(
        self, both: tuple[PyTree, ...], key: Key, seed: int, first: int, heartbeat: Heartbeat
    ) -> tuple[np.ndarray, int]:
        """Let the pairs from number `first` on play; returns what they gathered, [P, 2], and in how many steps."""
        number, carry = self._acting.num_envs, jax.device_get(self._acting.carry(0))
        carries, played = [carry, carry], list[Episodes]()
        index = first * self._episodes + np.arange(number, dtype=np.int32)
        try:
            # The two halves differ in their parameters only: the second of a pair meets what the first does.
            for _ in both:
                played.append(Episodes(self._acting.env.make(number, seed, first * self._episodes)))
            for t in range(self.sizes.rollout_length):
                halves = [half for half in range(2) if not played[half].done.all()]
                if not halves:
                    break
                step_key = jax.device_put(jax.random.fold_in(key, t), self._everywhere)
                for half in halves:
                    obs, begins = played[half].obs, np.full(number, t == 0)
                    action, carries[half] = self._act(both[half], step_key, index, carries[half], obs, begins)
                    played[half].send(np.asarray(action))  # They step while the others are acted for.
                for half in halves:
                    played[half].receive()
                heartbeat()
        finally:
            for each in played:
                each.env.close()
        returns = [each.total.reshape(-1, self._episodes).mean(1) for each in played]
        return np.stack(returns, 1).astype(np.float32), sum(int(each.length.sum()) for each in played)

    def close(self) -> None:
        """Do nothing: every generation releases its environments."""
