"""An iteration of one worker, cut at the gradient into pure functions.

The arithmetic is that of `podium.learn.learn`, which is cut by handing it an agent whose `apply` keeps the gradient
instead of using it: keys, shuffles and minibatches stand there once, for a parameter server as for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import episodes, keys
from podium.agent import Agent, Plan
from podium.env import Env
from podium.host import HostEnvs
from podium.learn import Learned, learn
from podium.placement import learner, program
from podium.placement.acting import Acting, complete
from podium.placement.program import RunState, Sizes
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree, Trajectory


class Played(NamedTuple):
    """What playing gives: where the environments stand, and all that the gradients are to be taken from.

    Attributes:
      rollout: where the environments stand afterwards, or `()` where they are on the host.
      trajectory: [T, E, ...], of this worker's environments.
      plan: of it, by the State that acted.
      replay: with the rollout in it, or `()`.
      ready: bool scalar, whether there is anything to learn from yet.
      episodes: counts and sums of what ended, where environments are pure.
      finite: [E], whether each environment gave finite numbers only.
    """

    rollout: RolloutState | tuple[()]
    trajectory: Trajectory
    plan: Plan
    replay: PyTree
    ready: Array
    episodes: Metrics
    finite: Array


class Taken(NamedTuple):
    """A gradient, whether all of it is finite, its metrics, and the replay where that has new priorities, else `()`."""

    gradient: PyTree
    finite: Array
    metrics: Metrics
    replay: PyTree


class Shapes(NamedTuple):
    """Of what an iteration of one worker is given and makes.

    `play` and `take` are arguments of `Cut`'s functions; `donated` are those of `play` that it uses up.
    """

    state: PyTree
    play: tuple[Any, ...]
    donated: tuple[int, ...]
    take: tuple[Any, ...]
    trajectory: PyTree
    gradient: PyTree
    steps: int
    metrics: Metrics


class _Held(NamedTuple):
    """A State, and beside it the gradient that `apply` was given."""

    state: PyTree
    gradient: PyTree


@dataclasses.dataclass(frozen=True)
class Cut:
    """An iteration of one worker in pure environments, cut at the gradient into pure functions.

    Args:
      agent: that acts and learns.
      env: that it plays in.
      sizes: of one worker.
      num_workers: of the run.
    """

    agent: Agent
    env: Any
    sizes: Sizes
    num_workers: int

    @property
    def new_priorities(self) -> bool:
        """Whether taking a gradient changes the replay."""
        return self.agent.replay is not None and self.agent.replay.update_priorities is not None

    def play(
        self,
        run_key: Key,
        number: Array,
        worker: Array,
        version: Array,
        state: PyTree,
        rollout_state: RolloutState,
        replay: PyTree,
    ) -> Played:
        """Collect iteration `number` of a worker, and plan what it learns from; `version` goes into the trajectory."""
        key, params = keys.iteration(run_key, number).rollout, self.agent.actor(state)
        length = self.sizes.rollout_length
        following, trajectory, ended = rollout(key, self.agent, self.env, params, rollout_state, length, version)
        digested = self.digest(run_key, number, worker, state, trajectory, replay)
        return digested._replace(rollout=following, episodes=episodes.summarize(ended))

    def digest(
        self, run_key: Key, number: Array, worker: Array, state: PyTree, trajectory: Trajectory, replay: PyTree
    ) -> Played:
        """Plan what is learnt from the rollout of iteration `number` of a worker, as it travels."""
        travels, trajectory = trajectory, complete(trajectory)
        plans = []

        def plan(key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
            plans.append(self.agent.plan(key, state, trajectory))
            return plans[0]

        def no_steps(update: Callable[..., Any], carry: PyTree, numbers: Array) -> Any:
            shapes = jax.eval_shape(update, carry, numbers[0])[1]
            return carry, jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), shapes)

        planning = self.agent._replace(plan=plan, observe=lambda state, trajectory: state)
        stored = self._learn(run_key, number, worker, planning, state, replay, trajectory, no_steps).replay
        ready = jnp.ones((), bool) if self.agent.replay is None else self.agent.replay.can_sample(stored)
        finite = program.rollout_finite(self.agent, trajectory)
        return Played((), travels, plans[0], stored, ready, {}, finite)

    def take(
        self, run_key: Key, number: Array, worker: Array, step: Array, state: PyTree, replay: PyTree, plan: Plan
    ) -> Taken:
        """Take gradient `step` of iteration `number` of a worker, at `state`."""
        agent = self.agent

        def grad(key: Key, held: _Held, minibatch: PyTree) -> Any:
            return agent.grad(key, held.state, minibatch)

        def one_step(update: Callable[..., Any], carry: PyTree, numbers: Array) -> Any:
            carry, metrics = update(carry, step)
            return carry, jax.tree.map(lambda x: x[None], metrics)

        apply = lambda held, gradient: _Held(held.state, gradient)  # noqa: E731
        taking = self._planned()._replace(grad=grad, apply=apply)
        shapes, _ = self.gradients(state, replay, plan)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        learned = self._learn(run_key, number, worker, taking, _Held(state, nothing), replay, plan, one_step)
        gradient = learned.state.gradient
        kept = learned.replay if self.new_priorities else ()
        return Taken(gradient, program.all_finite(gradient), learned.metrics, kept)

    def gradients(self, state: PyTree, replay: PyTree, plan: Plan) -> tuple[PyTree, int]:
        """Return the shapes of a gradient and how many an iteration takes; shapes will do for the arguments."""
        stands_for_trajectory: Any = plan
        return program.gradients(self._planned(), self.sizes, state, replay, stands_for_trajectory)

    def _planned(self) -> Agent:
        """Return the agent for which the plan stands where a trajectory did, once that is planned for and stored."""
        stands_for_it: Callable[..., Any] = lambda key, state, plan: plan  # noqa: E731
        return self.agent._replace(
            plan=stands_for_it,
            observe=lambda state, plan: state,
            replay=self.agent.replay and self.agent.replay._replace(add=lambda replay, items: replay),
        )

    def shapes(self) -> Shapes:
        """Trace an iteration for its shapes."""
        start = jax.eval_shape(self.start, jax.random.key(0))
        number = jax.ShapeDtypeStruct((), np.int32)
        mine = start.key, number, number, number
        play, donated = self._play_arguments(mine, start)
        played = jax.eval_shape(self.play, *play)
        take = *mine, start.agent, played.replay, played.plan
        gradient, steps = self.gradients(*take[4:])
        metrics = jax.eval_shape(self.take, *take).metrics
        return Shapes(start.agent, play, donated, take, played.trajectory, gradient, steps, metrics)

    def start(self, key: Key) -> RunState:
        """Return the first state of a run of these sizes."""
        return program.start(key, self.agent, self.env, self.sizes)

    def lanes(self, requested: int | None) -> int:
        """Choose the lanes for these sizes; see `podium.learn.choose_lanes`."""
        sizes = self.sizes
        return program.resolve_lanes(self.agent, self.env, sizes.num_envs, sizes.rollout_length, 1, requested)

    def _play_arguments(self, mine: tuple[Any, ...], start: RunState) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Return shapes of the arguments of `play`, and which of them it uses up."""
        return (*mine, start.agent, start.rollout, start.replay), (5, 6)

    def observe(self, state: PyTree, trajectory: Trajectory) -> PyTree:
        """Return the State after it has observed a rollout."""
        return self.agent.observe(state, complete(trajectory))

    def apply(self, state: PyTree, gradient: PyTree, weight: Array) -> PyTree:
        """Return the State after a gradient, every number of which is multiplied by `weight`; 1 changes no bit."""
        weigh = lambda x: x * weight.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
        return self.agent.apply(state, jax.tree.map(weigh, gradient))

    def _learn(
        self,
        run_key: Key,
        number: Array,
        worker: Array,
        agent: Agent,
        state: PyTree,
        replay: PyTree,
        trajectory: Any,
        fold: Callable[..., Any],
    ) -> Learned:
        key = keys.iteration(run_key, number).learn
        # Workers shuffle and sample apart; one alone draws what Single and Anakin draw.
        key = key if self.num_workers == 1 else jax.random.fold_in(key, worker)
        return learn(key, agent, state, replay, trajectory, self.sizes.num_lanes, fold)


class HostCut(Cut):
    """An iteration of one worker in host environments, which step outside of it: `play` is given what they brought."""

    def play(  # type: ignore[override]
        self, run_key: Key, number: Array, worker: Array, state: PyTree, trajectory: Trajectory, replay: PyTree
    ) -> Played:
        """Plan what is learnt from a rollout; see `Cut.digest`."""
        return self.digest(run_key, number, worker, state, trajectory, replay)

    def start(self, key: Key) -> RunState:
        """Return the first state of a run of these sizes."""
        return learner.start(key, self.agent, self.env.spec, self.sizes, self._shapes_of_rollouts())

    def lanes(self, requested: int | None) -> int:
        """Choose the lanes for these sizes; see `podium.learn.choose_lanes`."""
        spec, shapes, sizes = self.env.spec, self._shapes_of_rollouts(), self.sizes
        return learner.choose_lanes(self.agent, spec, shapes, sizes.num_envs, sizes.rollout_length, 1, requested)

    def acting(self) -> Acting:
        """Return the functions of acting in its environments."""
        sizes, next_step = self.sizes, self.env.resets_in_next_step
        return Acting(self.agent, self.env.spec, sizes.num_envs, sizes.rollout_length, next_step)

    def _shapes_of_rollouts(self) -> learner.Shapes:
        return learner.host_shapes(self.agent, self.env.spec, self.env.resets_in_next_step)

    def _play_arguments(self, mine: tuple[Any, ...], start: RunState) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        run_key, number, worker, _ = mine
        trajectory = self._shapes_of_rollouts()(self.sizes.rollout_length, self.sizes.num_envs)
        return (run_key, number, worker, start.agent, trajectory, start.replay), (5,)


def cut(agent: Agent, env: Env | HostEnvs, sizes: Sizes, num_workers: int) -> Cut:
    """Return an iteration of one worker, wherever its environments step; pure ones reset themselves."""
    kind = HostCut if isinstance(env, HostEnvs) else Cut
    return kind(agent, env, sizes, num_workers)
