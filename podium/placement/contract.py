"""The contract of placements: a `Placement` turns agent and environment into a `Program`, which says what it is.

A program has one `Loop`, which trains: one compiled function (`compiled.chunk`), or a loop in Python over actors and a
learner. Everything that differs between programs and that others ask for is a value here: nobody looks at classes.
"""

from __future__ import annotations

import abc
import dataclasses
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from podium import distributed
from podium.agent import Agent, check_is_agent
from podium.env import Env, check_shapes
from podium.film import stacks_of
from podium.host import HostEnvFactory, check_is_env
from podium.ranges import check_positive, plain
from podium.report import Report
from podium.rollout import Rollout, RolloutState
from podium.tally import OF_EPISODES, Addition
from podium.types import Array, EnvSpec, Key, Metrics, PyTree

ACTING: Mapping[str, Addition] = {**OF_EPISODES, "valid_steps": "sum", "env_seconds": "sum", "inference_seconds": "sum"}
"""What is counted where actors play apart from the learner."""

STATS = tuple(ACTING)
"""What an actor counts in a rollout."""

EPISODES_RESTART = "episodes restart (environments on the CPU save no state)"
"""What resuming loses where environments stand outside the state of a run."""


class RunState(NamedTuple):
    """Everything a run is, and all that a checkpoint holds.

    Attributes:
      key: of the run; every iteration's keys are folded from it and `update`.
      update: int32, iterations done.
      agent: the agent's State.
      replay: the replay's state, or `()`.
      rollout: where the environments stand; `()` where they run outside the state.
    """

    key: Key
    update: Array
    agent: PyTree
    replay: PyTree
    rollout: RolloutState | Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much runs at once: environments, steps an iteration, independent seeds, lanes."""

    num_envs: int
    rollout_length: int
    seeds: int
    num_lanes: int

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one iteration of one seed."""
        return self.num_envs * self.rollout_length


class Asked(NamedTuple):
    """What a program is asked for; the arguments of `Placement.build`."""

    num_envs: int
    rollout_length: int
    seeds: int
    num_lanes: int | None
    max_updates: int


class Experience(NamedTuple):
    """A rollout [T, E, ...] of one actor.

    Attributes:
      rollout: on the actor's device, or where it was delivered; None where only its statistics have come.
      version: updates behind the parameters that acted.
      stats: counts and seconds, to be added up.
      maxima: numbers of which the largest counts.
      reuse: called with the rollout by who reads it no more, for a later one to be played in its memory; or None.
    """

    rollout: Rollout | None
    version: int
    stats: dict[str, float]
    maxima: dict[str, float] = {}
    reuse: Callable[[Rollout], None] | None = None


Heartbeat = Callable[[], None]
"""Called as something goes on; may raise."""

Following = Callable[[], PyTree | None]
"""Returns the parameters that the next rollout will be played with, or None where they are not known yet."""


def nothing_yet() -> None:
    """Return None: a `Following` that lets no rollout begin before the one before it has ended."""


class Actor(Protocol):
    """Some environments, and the compiled functions that act in them.

    Attributes:
      standing: where the environments stand, a `RolloutState` that may be replaced; `()` for those on the host.
    """

    standing: Any

    def play(
        self, params: PyTree, version: int, iteration: int, heartbeat: Heartbeat, following: Following = nothing_yet
    ) -> Experience:
        """Play one rollout.

        Args:
          params: to act with.
          version: updates behind `params`.
          iteration: number of this rollout, from which its keys derive.
          heartbeat: called after every step, or once where all steps are one; may raise, and the rollout is lost.
          following: asked towards the end, by an actor that can let the next rollout begin while this one ends.
        """

    def close(self) -> None:
        """Release the environments; may be called twice."""


MakeActor = Callable[..., Actor]
"""`(run_key, seed, first_index, standing=None) -> Actor`: of the environments numbered from `first_index` on.

They start from `seed`, or stand where `standing` says.
"""


@dataclasses.dataclass(frozen=True)
class Acting(abc.ABC):
    """How an actor acts in environments of one kind, fused with them or on the host: functions, and what compiles them.

    Attributes:
      num_envs: environments of one actor, E.
      length: steps of a rollout, T.
      on_host: whether the environments run on the CPU, outside the state of a run.
    """

    agent: Agent
    env: Any
    num_envs: int
    length: int
    on_host: ClassVar[bool]

    @property
    def spec(self) -> EnvSpec:
        """What describes an environment."""
        spec: EnvSpec = self.env.spec
        return spec

    def params_shapes(self) -> PyTree:
        """Return the shapes of the parameters that act."""
        return jax.eval_shape(lambda key: self.agent.actor(self.agent.init(key, self.spec)), jax.random.key(0))

    @abc.abstractmethod
    def begin(self, key: Key, index: Array) -> RolloutState | tuple[()]:
        """Return where environments numbered `index` [B] stand at the start; `()` where they are outside the state."""

    @abc.abstractmethod
    def shapes(self, length: int, num_envs: int) -> Rollout:
        """Return the shapes of a rollout of so many steps and environments."""

    @abc.abstractmethod
    def compile(self, params: PyTree, device: jax.Device, keeps: bool = False) -> MakeActor:
        """Compile for a device, and return what makes actors there.

        Args:
          params: shapes of the parameters that act.
          device: that acts.
          keeps: whether playing leaves where the environments stood as it was, because it may be repeated.
        """

    @abc.abstractmethod
    def in_python(self, params: PyTree, device: jax.Device) -> MakeActor:
        """Return what makes actors whose loops are Python's, to be read along."""

    @abc.abstractmethod
    def bytes_moved(self, num_envs: int) -> dict[str, int]:
        """Return what goes up to the device and comes down from it in a rollout of so many environments."""


class Loop(Protocol):
    """What trains: states in, states out."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in tracing and compiling so far."""

    def init(self, seed: int) -> Any:
        """Return the first state."""

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings, to restore a checkpoint into."""

    def lower(self) -> None:
        """Trace, once, so that `compile` need not, and may run in another thread."""

    def compile(self) -> None:
        """Compile, once, so that the first chunk does not."""

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` iterations, at most the `max_updates` that the program was built for; consumes `state`.

        Returns:
          the next state, and metrics as NumPy: [num_updates, ...] each, but for "finite", [..., 2]: whether the agent's
          State is finite at the end, and whether every reward and observation of the chunk was.

        Raises:
          ActorError: a thread of the run died or hung.
        """

    def close(self) -> None:
        """End what runs beside the caller's thread; the loop is not used afterwards."""


def adopt(state: Any, agent: PyTree, update: int) -> Any:
    """Return a first state with another run's State of the agent, and as if it had come to `update`."""
    put = lambda new, old: distributed.put(jnp.asarray(new), old.sharding)
    done = put(np.asarray(update, np.int32), state.update)
    return state._replace(update=done, agent=jax.tree.map(put, agent, state.agent))


@dataclasses.dataclass(eq=False)
class Program:
    """A training program: what a placement makes of one agent, one environment and one set of sizes.

    Attributes:
      devices: that learn.
      layout: names the placement and the form of its state, for checkpoints: equal names, equal forms.
      moves: returns the bytes that move in an update, by the name of what moves.
      report: `(moves) -> Report`.
      additions: how every metric that the program itself makes adds up over the updates of a row; the agent's own
        metrics are means.
      whole_episodes: whether an iteration is whole episodes, which `rollout_length` bounds.
      resume_loses: what a resumed run does not get back, a clause for people; "" where resuming is exact.
      adopt: `(first state, agent's State of another run, its update) -> state` to train on from there.
      pictures: `(rows of metrics, path)` by file name: drawn into the run folder when the run ends.
      merit: what counts of an evaluation's returns, one number a seed, where checkpoints are compared.
    """

    agent: Agent
    env: Env | HostEnvFactory
    sizes: Sizes
    devices: Sequence[jax.Device]
    loop: Loop
    layout: str
    moves: Callable[[], dict[str, int]]
    report: Callable[[Mapping[str, int]], Report]
    additions: Mapping[str, Addition] = dataclasses.field(default_factory=lambda: OF_EPISODES)
    whole_episodes: bool = False
    resume_loses: str = ""
    adopt: Callable[[Any, PyTree, int], Any] = adopt
    pictures: Mapping[str, Callable[[Sequence[Mapping[str, Any]], Path], None]] = dataclasses.field(
        default_factory=dict
    )
    merit: Callable[[Any], Any] = np.mean

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in tracing and compiling so far."""
        return self.loop.compile_seconds

    def init(self, seed: int) -> Any:
        """Return the first state."""
        return self.loop.init(seed)

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings; see `Loop.abstract_state`."""
        return self.loop.abstract_state()

    def lower(self) -> None:
        """Trace; see `Loop.lower`."""
        self.loop.lower()

    def compile(self) -> None:
        """Compile; see `Loop.compile`."""
        self.loop.compile()

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` iterations; see `Loop.chunk`."""
        return self.loop.chunk(state, num_updates)

    def close(self) -> None:
        """End what runs beside the caller's thread."""
        self.loop.close()

    def agent_state(self, state: Any) -> PyTree:
        """Return the agent's State within `state`; with a leading axis of seeds where there are several."""
        return distributed.local(state.agent)

    def update_count(self, state: Any) -> int:
        """Return the number of iterations behind `state`."""
        return update_count(state)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update and how many bytes of it, from the shapes that are compiled for."""
        return self.moves()

    def explain(self) -> Report:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        return self.report(self.moves())


def update_count(state: Any) -> int:
    """Return the number of iterations behind `state`."""
    return int(np.asarray(state.update).reshape(-1)[0])


class Placement:
    """Where an agent's functions run: a frozen dataclass that turns agent and environment into a `Program`.

    Subclass it, write `program` and `explain`, and `podium.placement.register` the class.
    """

    whole_episodes: ClassVar[bool] = False
    """Whether an iteration is whole episodes, which `rollout_length` bounds."""
    takes_host_envs: ClassVar[bool] = True
    """Whether it runs environments on the CPU."""
    takes_pure_envs: ClassVar[bool] = True
    """Whether it runs environments that are pure functions."""
    takes_seeds: ClassVar[bool] = False
    """Whether it runs several seeds in one program."""
    takes_processes: ClassVar[bool] = False
    """Whether it runs over several processes."""
    may_change: ClassVar[frozenset[str]] = frozenset(
        {"actor_devices", "actor_timeout", "devices", "engine", "learner_devices", "queue_depth", "restarts"}
    )
    """Settings that a resumed run may have otherwise: where and how fast it runs, and not by what rules it learns."""

    def num_replays(self) -> int:
        """Return how many replays share the steps of a run: one, or one a worker where each learns from its own."""
        return 1

    def build(
        self,
        agent: Agent,
        env: Env | HostEnvFactory,
        *,
        num_envs: int,
        rollout_length: int,
        seeds: int = 1,
        num_lanes: int | None = None,
        max_updates: int = 1,
    ) -> Program:
        """Check every size and return the program.

        Args:
          agent: to train.
          env: to train it in.
          num_envs: environments side by side, B.
          rollout_length: steps of each environment in an iteration, T.
          seeds: independent runs in one program.
          num_lanes: groups of environments that shuffle apart; None chooses.
          max_updates: iterations that a chunk may have.

        Raises:
          ValueError: for a size that does not fit, before anything is compiled.
        """
        check_is_agent(agent)
        check_is_env(env)
        asked = Asked(*map(plain, (num_envs, rollout_length, seeds, num_lanes, max_updates)))
        self._check_asked(agent, env, asked)
        if isinstance(env, Env):
            check_shapes(env)
            if env.pool_size and not env.resets_itself:  # To draw a pool takes a compile: what is wrong is said before.
                self.program(agent, env._replace(pool_size=0), asked)
        program = self.program(agent, env, asked)
        if agent.replay is not None and agent.replay.keeps_frames and stacks_of(env.spec.obs) is not None:
            program.layout += ", frames kept once"  # Another form of the replay's state than of whole stacks.
        return program

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program for what was asked, which `build` has checked as far as it goes for every placement."""
        raise NotImplementedError(f"{type(self).__name__} has no method program.")

    def explain(self) -> Report:
        """Say in a table and a drawing who runs where and what moves; `Program.explain` knows the numbers."""
        return self._explain(None, {})

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        """Return what `explain` says; environments and bytes are those of a program, where there is one."""
        raise NotImplementedError(f"{type(self).__name__} has no method explain.")

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return the settings that are worth a try on so many devices; `podium.plan` runs each for a moment.

        Raises:
          ValueError: there is none for these numbers, with the reason.
        """
        return [cls()]

    def _check_asked(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> None:
        given = asked._asdict()
        if asked.num_lanes is None:
            del given["num_lanes"]
        check_positive(**given)
        name, processes, on_host = type(self).__name__, distributed.num_processes(), isinstance(env, HostEnvFactory)
        if asked.seeds > 1 and not self.takes_seeds:
            raise ValueError(
                f"seeds={asked.seeds}: {name} runs one seed; use podium.Anakin for several in one program."
            )
        if agent.settings and not self.takes_seeds:
            raise ValueError(
                f"{agent.name} has {len(agent.settings.values)} settings: {name} runs one; use podium.Anakin."
            )
        if processes > 1 and not self.takes_processes:
            raise ValueError(f"{processes} processes: {name} runs in one; use podium.Anakin or podium.Sebulba.")
        if on_host and not self.takes_host_envs:
            raise ValueError(
                f"{env.spec.name} runs on the CPU, outside compiled programs, and {name} takes pure environments only; "
                "use placement=podium.Sebulba(...), or any other placement but Anakin."
            )
        if not on_host and not self.takes_pure_envs:
            raise ValueError(f"{env.spec.name} is pure, and {name} takes environments on the CPU only; use Anakin.")
        if agent.check is not None:
            agent.check(env.spec, asked.num_envs)


def check_is_placement(placement: Any) -> None:
    """Raise ValueError for what is no `Placement`, such as the name or the class of one."""
    if not isinstance(placement, Placement):
        is_class = isinstance(placement, type) and issubclass(placement, Placement)
        made = f"{placement.__name__}()" if is_class else "podium.Anakin()"
        raise ValueError(f"placement={reprlib.repr(placement)} is no Placement; give an object, such as {made}.")
