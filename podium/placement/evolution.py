"""Evolution: perturb the policy and ask only for returns.

Salimans et al. 2017, "Evolution Strategies as a Scalable Alternative to Reinforcement Learning". In a generation every
member of the population plays with the parameters plus noise of its own; the noise, weighed by how the members ranked,
is the direction of the step. Noise is drawn again from its seed wherever it is needed, on every device, so only the
members' returns cross devices. Of the agent `init`, `actor`, `carry` and `act` are used.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Agent, fresh_carry, nearest_multiples
from podium.env import Env
from podium.evaluate import Episodes, make_evaluator
from podium.host import HostEnvs
from podium.placement import program
from podium.placement.acting import Acting
from podium.placement.actors import look_after
from podium.placement.devices import Devices, make_mesh, resolve_devices
from podium.placement.explanation import NEVER, Explanation
from podium.placement.fused import FusedProgram
from podium.placement.inference import Inference
from podium.placement.program import Sizes
from podium.placement.strategy import EvolutionState, Strategy
from podium.placement.table import Move, Role, device_name, nbytes
from podium.types import Array, EnvSpec, Key, Metrics, PyTree

BLOCK_BYTES = 1 << 22
"""Parameters that a CPU core works on at once: what its cache holds."""


@dataclasses.dataclass(frozen=True)
class Evolution:
    """Train by evolution: `num_envs` members (times `episodes`) play whole episodes, at most `rollout_length` steps.

    Members come in pairs with opposite noise, and the two of a pair meet the same resets. Returns are those reported
    (before clipping or scaling of rewards), of greedy play, and count by their rank alone, ties by their mean rank.
    A generation counts as `num_envs * rollout_length` environment steps, though episodes that end early are not played
    on; the steps that were are the metric `valid_steps`.

    Environments on the CPU are made anew for every generation, from its key, so that there too a run that goes on is
    exact, and the two of a pair meet the same resets; every member's parameters are kept while it plays.

    What is perturbed is every parameter that the action depends on. Normalisers stay as they begin, for nothing but
    acting is used; the critic, where there is one, is not trained.

    Args:
      sigma: deviation of the noise.
      learning_rate: of Adam, which follows the estimated gradient.
      weight_decay: towards zero, of the parameters, beside the estimate.
      episodes: that each member plays in a generation; its return is their mean.
      members_at_once: of a device; None for all on an accelerator, and on a CPU for as many as its cache holds; for all
        over environments on the CPU.
      devices: a number (of each process, where there are several), a sequence of devices, or None for all there are.
      worker_timeout: seconds without a step after which environments on the CPU count as hung, and the run ends.
    """

    whole_episodes: ClassVar[bool] = True
    """See `program.plays_whole_episodes`; what is usual for `rollout_length` is the environment's own limit."""

    sigma: float = 0.05
    learning_rate: float = 0.02
    weight_decay: float = 0.0
    episodes: int = 1
    members_at_once: int | None = None
    devices: Devices = None
    worker_timeout: float = 60.0

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
    ) -> EvolutionProgram | HostEvolutionProgram:
        """Check every size and return the program; see `Placement.build`. Nothing is shuffled, in no lanes."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        self._check()
        program.check_one_seed("Evolution", seeds)
        devices = resolve_devices(self.devices)
        unit = 2 * self.episodes * len(devices)
        if num_envs % unit:
            raise ValueError(
                f"num_envs={num_envs} is not divisible by {unit}, two members of a pair times episodes={self.episodes} "
                f"times devices={len(devices)}; use {nearest_multiples(num_envs, unit)}."
            )
        sizes = Sizes(num_envs, rollout_length, 1, 1)
        if isinstance(env, HostEnvs):
            program.check_one_process("Evolution over environments on the CPU")
            return HostEvolutionProgram(self, agent, env, sizes, devices)
        return EvolutionProgram(self, agent, env, sizes, devices, max_updates)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `EvolutionProgram.explain` knows the numbers."""
        devices = resolve_devices(self.devices)
        return _explain(devices, ["its share of the population"] * len(devices), {"returns": "4 * members"})

    def strategy(self, agent: Agent, spec: EnvSpec) -> Strategy:
        """Return how the parameters of an agent are perturbed and moved."""
        return Strategy(agent, spec, self.sigma, self.learning_rate, self.weight_decay, self.episodes)

    def _check(self) -> None:
        for name in ("sigma", "learning_rate"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name}={value!r} must be finite and greater than 0; {getattr(Evolution, name)} is usual."
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay!r} must be finite and 0 or more; use 0 for none.")
        program.check_positive(episodes=self.episodes)
        program.check_seconds(worker_timeout=self.worker_timeout)
        if self.members_at_once is not None:
            program.check_positive(members_at_once=self.members_at_once)


def _explain(devices: list[jax.Device], shares: list[str], amounts: Mapping[str, int | str]) -> Explanation:
    on_host = "observations" in amounts
    roles = [Role("environments", "host CPU", "of the whole population")] if on_host else []
    name = "members" if on_host else "everything"
    roles += [Role(name, device_name(device), share) for device, share in zip(devices, shares, strict=True)]
    ways = {
        "observations": "environments to members",
        "actions": "members to environments",
        "returns": "environments to members" if on_host else "from all to all",
    }
    moves = [Move(name, ways[name], amount) for name, amount in amounts.items() if on_host or len(devices) > 1]
    title = "Evolution: members with noise in their parameters play; every device draws all noise again, and learns."
    waits = "every generation for the longest episode of the one before it, on every device."
    return Explanation(title, roles, moves, stale=NEVER, waits=waits)


class EvolutionProgram(FusedProgram):
    """The program for one agent, one environment and one set of sizes; a `Program`.

    Attributes:
      members: of the population.
      pairs_at_once: that a device plays at once.
    """

    whole_episodes: ClassVar[bool] = True

    def __init__(
        self,
        placement: Evolution,
        agent: Agent,
        env: Env,
        sizes: Sizes,
        devices: list[jax.Device],
        max_updates: int,
    ):
        self.placement, self.members = placement, sizes.num_envs // placement.episodes
        self._strategy = placement.strategy(agent, env.spec)
        self.pairs_at_once = _block(placement, self._strategy.size, self.members // len(devices), devices[0])
        self._play = make_evaluator(agent, env, placement.episodes, sizes.rollout_length)
        super().__init__(agent, env, sizes, devices, "member", max_updates)

    def _start(self, key: Key) -> EvolutionState:
        return self._strategy.start(key)

    def _partition(self) -> EvolutionState:
        return jax.tree.map(lambda x: P(), jax.eval_shape(self._start, jax.random.key(0)))

    def _returns(self, noise_key: Key, play_key: Key, agent_state: PyTree, pairs: Array) -> tuple[Array, Array]:
        """Return what the pairs [N] gathered, [N, 2], and in how many steps."""

        def play(pair: Array) -> tuple[Array, Array]:
            key, params = jax.random.fold_in(play_key, pair), self._strategy.pair(noise_key, agent_state, pair)
            played = jax.vmap(lambda member: self._play(key, member))(params)
            return played["eval_return"], played["eval_length"]

        blocks = pairs.reshape(-1, self.pairs_at_once)
        returns, lengths = jax.lax.map(jax.vmap(play), blocks)
        return returns.reshape(-1, 2), lengths.reshape(-1, 2)

    def _iterate(self, state: EvolutionState) -> tuple[EvolutionState, Metrics, Array]:
        noise_key, play_key = keys.iteration(state.key, state.update)
        number = self.members // 2 // len(self.devices)

        def generation(state: EvolutionState) -> tuple[EvolutionState, Metrics, Array]:
            pairs = jax.lax.axis_index("member") * number + jnp.arange(number)
            own, lengths = self._returns(noise_key, play_key, state.agent, pairs)
            # All that ever crosses devices: returns [members / 2, 2], and how many steps were played.
            returns = jax.lax.all_gather(own, "member", tiled=True)
            steps = jax.lax.psum(jnp.sum(lengths), "member") * self.placement.episodes
            return self._strategy.learn(noise_key, state, returns, steps, self.pairs_at_once)

        everywhere: Any = P()
        return jax.shard_map(generation, mesh=self._mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)(
            state
        )

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in a generation."""
        return _explain(self.devices, _shares(self.members, self.devices), self.bytes_per_update())

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in a generation: every member's return."""
        return {"returns": 4 * self.members if len(self.devices) > 1 else 0}


class HostEvolutionProgram:
    """The program over environments on the CPU, stepped by one thread; a `Program`."""

    whole_episodes: ClassVar[bool] = True

    def __init__(self, placement: Evolution, agent: Agent, envs: HostEnvs, sizes: Sizes, devices: list[jax.Device]):
        self.agent, self.env, self.sizes, self.devices = agent, envs, sizes, devices
        self.placement, self.members = placement, sizes.num_envs // placement.episodes
        self.compile_seconds = 0.0
        self._strategy = placement.strategy(agent, envs.spec)
        share = self.members // len(devices)
        self._block = _block(placement, self._strategy.size, share, devices[0])
        every = dataclasses.replace(placement, members_at_once=placement.members_at_once or share)
        self._at_once = _block(every, self._strategy.size, share, devices[0]) * len(devices)
        self._num_envs = self._at_once * placement.episodes
        self._mesh = make_mesh(devices, "member")
        self._everywhere = NamedSharding(self._mesh, P())
        self._is_compiled = False

    def _perturbed(self, key: Key, agent_state: PyTree, pairs: Array) -> tuple[PyTree, PyTree]:
        """Return the parameters of the first of every pair [P], and of the second."""
        both = jax.vmap(self._strategy.pair, (None, None, 0))(key, agent_state, pairs)
        return tuple(jax.tree.map(lambda x, i=i: x[:, i], both) for i in range(2))

    def _acted(
        self, params: PyTree, step_key: Key, index: Array, carry: PyTree, obs: PyTree, first: Array
    ) -> tuple[Array, PyTree]:
        """Act for members [P], each in E environments of its own, [P * E] numbered `index`; returns actions, memory."""
        apart = lambda x: x.reshape(-1, self.placement.episodes, *x.shape[1:])  # noqa: E731
        joined = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731

        def act(params: PyTree, index: Array, carry: PyTree, obs: PyTree, first: Array) -> tuple[Array, PyTree]:
            act_keys = jax.vmap(partial(jax.random.fold_in, step_key))(index)
            output = self.agent.act(act_keys, params, carry, obs, first, True)
            return output.action, output.carry

        return jax.tree.map(joined, jax.vmap(act)(params, *jax.tree.map(apart, (index, carry, obs, first))))

    def init(self, seed: int) -> EvolutionState:
        """Return the first state."""
        return program.run_once(self._strategy.start, self._everywhere)(jax.random.key(seed))

    def abstract_state(self) -> EvolutionState:
        """Return the state's shapes, dtypes and shardings."""
        shapes = jax.eval_shape(self._strategy.start, jax.random.key(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), shapes)

    def lower(self) -> None:
        """Do nothing: tracing takes next to no time here."""

    def compile(self) -> None:
        """Compile the pieces, once."""
        if self._is_compiled:
            return
        began, state = time.perf_counter(), self.abstract_state()
        once, apart, at_once = P(), P("member"), self._at_once

        def spread(function: Callable[..., Any], specs: tuple[P, ...], *shapes: Any) -> Any:
            mapped = jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=apart, check_vma=False)
            where = tuple(NamedSharding(self._mesh, spec) for spec in specs)
            return jax.jit(mapped, in_shardings=where).lower(*shapes).compile()

        pairs, asked = np.zeros(at_once, np.int32), Inference(self.agent, self.env.spec).question(self._num_envs)
        self._perturb = spread(self._perturbed, (once, once, apart), state.key, state.agent, pairs)
        params, _ = jax.eval_shape(self._perturbed, state.key, state.agent, pairs)
        acting = params, state.key, np.zeros(self._num_envs, np.int32), asked.memory, asked.obs, asked.first
        self._act = spread(self._acted, (apart, once, apart, apart, apart, apart), *acting)
        returns, steps = np.zeros((self.members // 2, 2), np.float32), np.float32(0)
        learn = jax.jit(self._strategy.learn, static_argnums=4, out_shardings=self._everywhere)
        self._learn = learn.lower(state.key, state, returns, steps, self._block).compile()
        self._is_compiled = True
        self.compile_seconds += time.perf_counter() - began

    def chunk(self, state: EvolutionState, num_updates: int) -> tuple[EvolutionState, Metrics]:
        """Do `num_updates` generations.

        Raises:
          ActorError: environments failed or hung.
        """
        self.compile()
        return program.in_turn(self._iterate, state, num_updates, self.sizes.num_envs)

    def _iterate(self, state: EvolutionState) -> tuple[EvolutionState, Metrics, Array]:
        noise_key, play_key = keys.iteration(state.key, state.update)
        seed, size = int(jax.random.randint(play_key, (), 0, 2**31 - 1)), self._at_once
        returns, steps = [], 0
        for first in range(0, self.members // 2, size):
            pairs = np.arange(first, first + size, dtype=np.int32)
            play = partial(self._play, self._perturb(noise_key, state.agent, pairs), play_key, seed, first)
            gathered, played = look_after("podium-evolution", play, self.placement.worker_timeout)
            returns.append(gathered)
            steps += played
        return self._learn(noise_key, state, np.concatenate(returns), np.float32(steps))

    def _play(
        self, both: tuple[PyTree, PyTree], key: Key, seed: int, first: int, tick: Callable[[], None]
    ) -> tuple[np.ndarray, int]:
        """Let the pairs from number `first` on play; returns what they gathered, [P, 2], and in how many steps."""
        episodes, number = self.placement.episodes, self._num_envs
        carry = jax.device_get(fresh_carry(self.agent, self.env.spec, jnp.arange(number)))
        carries, played = [carry, carry], list[Episodes]()
        index = first * episodes + np.arange(number, dtype=np.int32)
        try:
            # The two halves differ in their parameters only: the second of a pair meets what the first does.
            for _ in both:
                played.append(Episodes(self.env.make(number, seed, first * episodes)))
            for t in range(self.sizes.rollout_length):
                going = [half for half in range(2) if not played[half].done.all()]
                if not going:
                    break
                step_key = jax.device_put(jax.random.fold_in(key, t), self._everywhere)
                for half in going:
                    obs, begins = played[half].obs, np.full(number, t == 0)
                    action, carries[half] = self._act(both[half], step_key, index, carries[half], obs, begins)
                    played[half].send(np.asarray(action))  # They step while the others are acted for.
                for half in going:
                    played[half].receive()
                tick()
        finally:
            for each in played:
                each.env.close()
        returns = [each.total.reshape(-1, episodes).mean(1) for each in played]
        return np.stack(returns, 1).astype(np.float32), sum(int(each.length.sum()) for each in played)

    def agent_state(self, state: EvolutionState) -> PyTree:
        """Return the agent's State within `state`."""
        return state.agent

    def update_count(self, state: EvolutionState) -> int:
        """Return the number of generations behind `state`."""
        return int(np.asarray(state.update))

    def adopt(self, state: EvolutionState, agent: PyTree, update: int) -> EvolutionState:
        """Return the first state with the agent's State of another run; see `Program.adopt`."""
        return program.adopt(state, agent, update)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in a generation."""
        return _explain(self.devices, _shares(self.members, self.devices), self.bytes_per_update())

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in a generation, at most: where every episode is as long as it may be."""
        sizes = self.sizes
        acting = Acting(self.agent, self.env.spec, sizes.num_envs, sizes.rollout_length, self.env.resets_in_next_step)
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(acting.blank, params))
        return {
            "observations": sizes.rollout_length * nbytes((obs.obs, obs.first)),
            "actions": sizes.rollout_length * nbytes(obs.action),
            "returns": 4 * self.members,
        }

    def close(self) -> None:
        """Do nothing: every generation releases its environments."""


def _shares(members: int, devices: list[jax.Device]) -> list[str]:
    share = members // len(devices)
    return [f"members {i * share} to {(i + 1) * share - 1}" for i in range(len(devices))]


def _block(placement: Evolution, size: int, members: int, device: jax.Device) -> int:
    """Return how many pairs play at once: a divisor of those of a device, `members` / 2."""
    wanted = placement.members_at_once
    if wanted is None:
        wanted = members if device.platform != "cpu" else max(2, BLOCK_BYTES // (4 * size))
    return max(n for n in range(1, members // 2 + 1) if members // 2 % n == 0 and (2 * n <= wanted or n == 1))
