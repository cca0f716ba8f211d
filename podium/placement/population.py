"""Population (Jaderberg et al. 2017): members train side by side, and the worst go on from what the best know.

Members are whole runs of one compiled program, over all devices, each with settings of its own. Every so often, inside
the program, members that do badly take over the State and settings of ones that do well, and change the settings a
little. Their environments, and a replay where there is one, stay their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Agent
from podium.devices import Devices, make_mesh, resolve_sharing
from podium.env import Env
from podium.exploit import Rules, Scores, exchange, members_of, no_scores
from podium.host import HostEnvFactory
from podium.lineage import PARENT, SETTING, draw
from podium.placement.actors.actor import make_acting
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.compiled.iteration import resolve_lanes
from podium.placement.compiled.runs import BY_RUN, fused, side_by_side, start_runs
from podium.placement.contract import Acting, Asked, Placement, Program, RunState, Sizes
from podium.ranges import check_fields
from podium.report import NEVER, Move, Report, nbytes, roles_on
from podium.rollout import RolloutState
from podium.space import Space, listed, read_space
from podium.tally import OF_EPISODES, Addition
from podium.types import Array, Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class Population(Placement):
    """Train several members with settings of their own; the worst take over from the best.

    Metrics and evaluations are lists, one number a member; `setting_<field>` are the members' settings, and `parent`
    lists for every exchange the member that each went on from. A member does well by the mean return of the episodes
    that ended since the last exchange.

    Args:
      members: runs side by side, 2 or more.
      exploit_every: environment steps of a member between exchanges; 0 for none, so that members stay apart.
      space: by field of the agent's configuration the numbers that members begin with, evenly spread over them: a
        range (`podium.log_range`), values, or `podium.Draws`. Settings stay between the least and the largest. Or
        texts FIELD=VALUES, as `podium sweep` takes them.
      share: of the members that are taken for the worst, and for the best: above 0, at most 0.5.
      perturb: factor that a setting taken over is multiplied or divided by, above 1.
      anew: probability that it is drawn anew from the space instead.
      devices: a number, a sequence of devices, or None for as many as divide `members`.
    """

    takes_host_envs: ClassVar[bool] = False

    members: int = 8
    exploit_every: int = 20_000
    space: Space | tuple[str, ...] = ()
    share: float = 0.25
    perturb: float = 1.2
    anew: float = 0.0
    devices: Devices = None

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, length = asked.num_envs, asked.rollout_length
        space, devices = self._resolve()
        member, bounds = members_of(agent, space, self.members)
        acting = make_acting(member, env, num_envs, length)
        lanes = resolve_lanes(acting, num_envs, length, requested=asked.num_lanes)
        sizes = Sizes(num_envs, length, self.members, lanes)
        every = -(-self.exploit_every // sizes.steps_per_update)
        rules = Rules(bounds, self.share, self.perturb, self.anew)
        iteration = _Iteration(acting, sizes, make_mesh(devices, "run"), rules, every)
        # Every device counts iterations itself, so that none asks another whether an exchange is due.
        partition = lambda shapes: jax.tree.map(lambda x: BY_RUN, shapes)._replace(update=P())
        loop = CompiledLoop(iteration.start, partition, iteration, iteration.mesh, sizes, asked.max_updates)

        def moves() -> dict[str, int]:
            if len(devices) == 1 or not every:
                return {}
            state = jax.eval_shape(iteration.start, jax.random.key(0))
            return {"what members know": nbytes(state.agent) * (len(devices) - 1) // every}

        additions: dict[str, Addition] = {**OF_EPISODES, PARENT: "each", **{SETTING + name: "last" for name in space}}
        layout, report = f"Population of {self.members} members", lambda moves: self._explain(num_envs, moves)
        return Program(
            member,
            acting.env,
            sizes,
            devices,
            loop,
            layout,
            moves,
            report,
            additions,
            pictures={"population.png": draw},
            merit=np.max,
        )

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> list[Population]:
        """Raise ValueError: what members vary is for the user to say."""
        raise ValueError("a population needs a space, which says what its members vary.")

    def _resolve(self) -> tuple[Space, list[jax.Device]]:
        check_fields(
            self, counts=("members",), naturals=("exploit_every",), fractions=("share", "anew"), positive=("perturb",)
        )
        if self.members < 2:
            raise ValueError(f"members={self.members} has nobody to take over from; use 2 or more.")
        if not 0 < self.share <= 0.5:
            raise ValueError(f"share={self.share} must be above 0 and at most 0.5, half of the members; use 0.25.")
        if not self.perturb > 1:
            raise ValueError(f"perturb={self.perturb} must be greater than 1; use 1.2.")
        if not isinstance(self.space, Mapping | Sequence) or isinstance(self.space, str):
            raise ValueError(f"space={self.space!r} must be a mapping from settings to their values or range.")
        space = listed(self.space) if isinstance(self.space, Mapping) else read_space(self.space)
        if not space:
            raise ValueError(
                'space is empty, so members would be alike; use such as {"learning_rate": podium.log_range(1e-5, 1e-2, '
                f"{self.members})}}, on a command line --space learning_rate=1e-5..1e-2:log."
            )
        return space, resolve_sharing(self.devices, "members", self.members)

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        space, devices = self._resolve()
        each = self.members // len(devices)
        share = f"{each} member{'s' if each > 1 else ''}"
        share += "" if num_envs is None else f", {num_envs} environments each"
        if num_envs is None and len(devices) > 1 and self.exploit_every:
            amounts = {"what members know": None}
        moves = [Move(name, "among the devices", amount) for name, amount in amounts.items()]
        title = f"Population: {self.members} members train alone, and vary {', '.join(space)}; "
        often = f"every {self.exploit_every:,} steps"
        title += f"{often} the worst go on from the best." if self.exploit_every else "none takes over from another."
        waits = f"members for one another {often}." if self.exploit_every else "nobody for another member."
        return Report(title, roles_on(devices, "members", [share] * len(devices)), moves, stale=NEVER, waits=waits)


class PopulationState(NamedTuple):
    """A run of M members, and all that a checkpoint holds; each leaf is [M, ...].

    Attributes:
      key, update, agent, replay, rollout: of every member, as `RunState` has them.
      scores: how they do.
    """

    key: Key
    update: Array
    agent: PyTree
    replay: PyTree
    rollout: RolloutState
    scores: Scores


@dataclasses.dataclass(frozen=True, eq=False)
class _Iteration:
    """One iteration of every member, whole members on every device; then an exchange, where it is time.

    Args:
      rules: of exchanges.
      every: iterations between them; 0 for none.
    """

    acting: Acting
    sizes: Sizes
    mesh: Mesh
    rules: Rules
    every: int

    def start(self, key: Key) -> PopulationState:
        """Return the first state."""
        run = start_runs(key, self.acting, self.sizes, apart=True)
        return PopulationState(**run._asdict(), scores=no_scores(self.sizes.seeds))

    def __call__(self, state: PopulationState) -> tuple[PopulationState, Metrics, Array]:
        """Train every member alone, then let them exchange what they know."""
        alone = side_by_side(partial(fused, self.acting, self.sizes, self.mesh.devices.flat[0]), self.mesh)
        run, metrics, finite = alone(RunState(*state[:-1]))
        scores = state.scores._replace(
            returns=state.scores.returns + metrics["episode_return_sum"],
            episodes=state.scores.episodes + metrics["episodes"],
        )
        update = jax.lax.with_sharding_constraint(state.update + 1, NamedSharding(self.mesh, P()))
        parent = jnp.full(self.sizes.seeds, jnp.nan)
        state = PopulationState(**run._replace(update=update)._asdict(), scores=scores)
        if self.every:  # All members have done as many iterations.
            apart = lambda state: (state, parent)
            state, parent = jax.lax.cond(state.update[0] % self.every == 0, self._exchange, apart, state)
        settings = {SETTING + name: values for name, values in state.agent.numbers.items()}
        return state, {**metrics, **settings, PARENT: parent}, finite

    def _exchange(self, state: PopulationState) -> tuple[PopulationState, Array]:
        """Return the next state, and [M] the members that each went on from."""
        along = NamedSharding(self.mesh, BY_RUN)
        take = lambda x, parent: jax.lax.with_sharding_constraint(x[parent], along)
        key = keys.exchange(state.key[0], state.update[0])
        agent, scores, parent = exchange(key, state.agent, state.scores, self.rules, take)
        return state._replace(agent=agent, scores=scores), parent.astype(jnp.float32)
