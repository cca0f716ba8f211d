"""The agent contract: an agent is a tuple of pure functions, cut where every placement needs a cut."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from podium import contracts
from podium.ops.bounds import Bounds
from podium.ops.statistics import RunningStats
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory

_HERE = __name__.partition(".")[0]


class ActOutput(NamedTuple):
    """What acting returns: `action` [B, ...], the next `carry` [B, ...], and `extras` [B, ...] for the learner."""

    action: Array
    carry: PyTree
    extras: PyTree = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Say what one iteration learns from; `podium.learn` does the shuffling and gathering.

    Attributes:
      data: pytree of arrays [T, B, ...]: prepared once (advantages, targets) and gathered from in every epoch. For
        an agent with a `replay` it is what the replay stores; for others observations may be what `Trajectory.kept`
        gives.
      per_env: pytree of arrays [B, ...] that go with whole sequences (recurrent memory at the start); only for
        `unit="sequence"`.
      num_epochs: passes over the data.
      num_minibatches: parts of one pass, each an `apply`.
      unit: "step" hands minibatches [N, ...] of shuffled steps to `Agent.grad`; "sequence" hands [T, N, ...] of
        shuffled environments, time intact, as a pair `(data, per_env)`. To an agent with `statistics` either is
        handed within a pair, `(minibatch, statistics)`.
    """

    data: PyTree
    per_env: PyTree = ()
    num_epochs: int = dataclasses.field(default=1, metadata={"static": True})
    num_minibatches: int = dataclasses.field(default=1, metadata={"static": True})
    unit: Literal["step", "sequence"] = dataclasses.field(default="step", metadata={"static": True})


class Aux(NamedTuple):
    """What `Agent.grad` returns beside gradients: scalar `metrics`, and new `priorities` [N] for a replay or None."""

    metrics: Metrics
    priorities: Array | None = None


class Replay(NamedTuple):
    """Where a replay agent's data live between insertion and learning, as pure functions.

    Everything is laid out in lanes, an axis in front, [L, ...]: a fixed group of environments writes and samples in
    a lane of its own, so that a mesh can hold the lanes apart and no transition ever crosses a device.

    Attributes:
      init: `(item, num_envs, num_lanes, rollout_length) -> ReplayState`; `item` is one stored item (no batch axes).
        With `keeps_frames` it takes `stacks` too: of how many frames each array of `item.obs` is a stack
        (`ArraySpec.num_frames`), or None.
      add: `(ReplayState, items [T, B, ...]) -> ReplayState`.
      can_sample: `(ReplayState) -> bool scalar`.
      sample: `(key, ReplayState) -> (minibatch [N, ...], indices)`.
      batch_size: N, items a minibatch.
      num_updates: minibatches learnt per iteration.
      update_priorities: `(ReplayState, indices, priorities [N]) -> ReplayState`, after every minibatch. What it changes
        is the state's field `priorities` and nothing else: that alone is carried from minibatch to minibatch, and
        the items are only ever read. None for a replay that does not change while an iteration learns.
      samples_per_insert: how often a step is learnt from on average, num_updates * N * steps_per_item / (T * B); then
        this decides how many minibatches there are, and `num_updates` does not. None leaves that to `num_updates`.
      updates_per_step: minibatches learnt per step inserted, num_updates / (T * B); then this decides, and neither of
        the other two. None leaves it to them.
      cut: `(ReplayState, gap [B]) -> ReplayState`, before an `add`: what is held of these environments ends here, as if
        cut, for what is added does not follow it in time (`Trajectory.gap`). None where items are never joined.
      steps_per_item: steps that are learnt from in one item of a minibatch: 1, or those of a window.
      keeps_frames: whether `init` takes `stacks`, and what it makes then keeps every frame of them once. It joins
        observations as steps follow one another: False for an agent whose `plan` stores others than those of the
        trajectory, or in another order, of which it would keep no row that counts.
      parts: of several replays as one, N of each by name; lanes must divide every one. None for a replay by itself.
    """

    init: Callable[..., PyTree]
    add: Callable[[PyTree, PyTree], PyTree]
    can_sample: Callable[[PyTree], Array]
    sample: Callable[[Key, PyTree], tuple[PyTree, PyTree]]
    batch_size: int
    num_updates: int
    update_priorities: Callable[[PyTree, PyTree, Array | None], PyTree] | None = None
    samples_per_insert: float | None = None
    updates_per_step: float | None = None
    cut: Callable[[PyTree, Array], PyTree] | None = None
    steps_per_item: int = 1
    keeps_frames: bool = False
    parts: Mapping[str, int] | None = None

    @property
    def steps_per_batch(self) -> int:
        """Steps that are learnt from in a minibatch."""
        return self.batch_size * self.steps_per_item


class Settings(NamedTuple):
    """How an agent is several: the same algorithm with other numbers, each run of a program with those of one setting.

    Attributes:
      values: of each of the M settings the numbers that vary, by name of their field. The independent runs of a program
        are M times so many seeds, a setting's seeds side by side.
      init: `(key, EnvSpec, index) -> State`: as `Agent.init`, of setting `index`, 0 to M - 1.
      bind: `(State) -> Agent`: the agent with the numbers that are in its State; of the same State, without `settings`.
    """

    values: tuple[dict[str, float], ...]
    init: Callable[[Key, EnvSpec, Array], PyTree]
    bind: Callable[[PyTree], Any]


class Transform(NamedTuple):
    """How an agent was made of another, or of several, for the record: run folders make it again by this.

    Attributes:
      name: of the function that did, such as "league".
      options: its arguments, but for agents: what JSON can hold.
      agents: where it took several, each by its name; else None.
    """

    name: str
    options: Mapping[str, Any]
    agents: Mapping[str, Any] | None = None  # Of Agents, which are not known here yet.


class Agent(NamedTuple):
    """A reinforcement learning agent as pure functions over pytrees.

    No function names a device, mesh axis, thread or environment: a placement decides where each runs.

    Attributes:
      init: `(key, EnvSpec) -> State`: parameters, optimiser, targets, normalisers, counters.
      actor: `(State) -> Params`: the slice that acting needs; all that ever travels to an actor.
      carry: `(EnvSpec, num_envs) -> Carry`: recurrent memory [B, ...] at the start; `()` where there is none.
      act: `(keys [B], Params, Carry, obs [B, ...], first [B], greedy) -> ActOutput`; one key an environment, memory
        zeroed where `first`; `greedy` is a Python bool.
      plan: `(key, State, Trajectory [T, B, ...]) -> Plan`: targets, epochs and minibatches. What it stores in a replay
        with `keeps_frames` has the trajectory's observations, in their order.
      grad: `(key, State, minibatch) -> (Grads, Aux)`: any pytree that can be averaged over workers.
      apply: `(State, Grads) -> State`: one optimiser step.
      observe: `(State, Trajectory) -> State`: once after an iteration's last `apply`: counters, normalisers.
      replay: a `Replay` for agents that learn from one, else None.
      rollout_length: T where the user names none.
      name: for run folders and messages.
      config: the dataclass the agent was made from, for the record; None if there is none.
      number: `(Carry, index [B]) -> Carry`: tells fresh memory the global numbers of its environments, which are the
        same under every placement; None where they do not matter. `act` must hand them on, also where `first`.
      statistics: `(minibatch) -> PyTree`: what a gradient needs to know of its whole minibatch and no parameter
        changes, such as the mean of advantages. It is computed of every minibatch before an iteration's first
        gradient, and `grad` is handed `(minibatch, statistics)` where it else is handed the minibatch; on several
        devices a gradient step then waits for others once, for the sum of gradients. None where nothing need be
        known; not for agents with a replay.
      policy_mask: `(State) -> bools`, a tree that is a prefix of State (shapes will do): True for the parameters that
        greedy actions are computed from; None leaves that to `policy_leaves`.
      stops: `(metrics of a gradient) -> bool scalar`: whether an iteration ends before this gradient: it is not
        applied, nor is what remains of the iteration's. None where all are; not for agents with a replay.
      reward_discount: gamma of the discounted sums of rewards that the agent's rollouts are to carry
        (`Trajectory.past`), 0 to 1; None for none.
      make: `(config) -> Agent`: makes it of another configuration, such as `config` with other numbers, which may be
        traced (`podium.Population`), and with all that `_replace` put in; None where it cannot be.
      settings: where it is one algorithm with several settings (`podium.varied`), else None.
      multi_agent: whether it acts for all agents of an environment at once (`podium.multi`), and not for one.
      evaluation: who plays in its place where it is evaluated, loaded or evolved: an agent of the same State, with an
        `actor` of its own. For agents that act for more than themselves while they learn, such as for opponents; None
        for itself.
      check: `(EnvSpec, num_envs) -> None`: raises ValueError, a sentence, for an environment or a number of them that
        it cannot learn from; asked before anything is traced. None where all will do.
      transforms: what was made of the agent that `name` and `config` tell, in order; none for that agent itself.
      brought: names of the parts that a user brought to it, which `config` does not tell; see `brought_to`, `parts_of`.
    """

    init: Callable[[Key, EnvSpec], PyTree]
    actor: Callable[[PyTree], PyTree]
    carry: Callable[[EnvSpec, int], PyTree]
    act: Callable[[Array, PyTree, PyTree, PyTree, Array, bool], ActOutput]
    plan: Callable[[Key, PyTree, Trajectory], Plan]
    grad: Callable[[Key, PyTree, PyTree], tuple[PyTree, Aux]]
    apply: Callable[[PyTree, PyTree], PyTree]
    observe: Callable[[PyTree, Trajectory], PyTree]
    replay: Replay | None = None
    rollout_length: int = 128
    name: str = "agent"
    config: Any = None
    number: Callable[[PyTree, Array], PyTree] | None = None
    statistics: Callable[[PyTree], PyTree] | None = None
    policy_mask: Callable[[PyTree], PyTree] | None = None
    stops: Callable[[Metrics], Array] | None = None
    reward_discount: float | None = None
    make: Callable[[Any], Agent] | None = None
    settings: Settings | None = None
    multi_agent: bool = False
    evaluation: Any = None  # An Agent, which the type of a field cannot name here.
    check: Callable[[EnvSpec, int], None] | None = None
    transforms: tuple[Transform, ...] = ()
    brought: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the agent in a line: its functions would be a page."""
        return f"Agent(name={self.name!r}, config={self.config!r})"

    @property
    def evaluated(self) -> Agent:
        """Return who plays where it is evaluated, loaded or evolved; itself where it has no `evaluation`."""
        return self if self.evaluation is None else self.evaluation

    def bound(self, state: PyTree) -> Agent:
        """Return the agent with the numbers that are in its State; itself where it has no `settings`."""
        return self if self.settings is None else self.settings.bind(state)


def check_is_agent(agent: Any) -> None:
    """Raise ValueError for what is no `Agent`, such as the name of one, a Config or a module."""
    if not isinstance(agent, Agent):
        made = f"make({agent!r})" if isinstance(agent, str) else "ppo.make()"
        raise ValueError(f"agent={reprlib.repr(agent)} is no Agent; make one, such as podium.agents.{made}.")


def brought_to(make: functools.partial[Agent]) -> tuple[str, ...]:
    """Return the names of a user's parts, for `Agent.brought`: what `make` is given that is not its function's default.

    >>> from podium.agents import ppo
    >>> brought_to(functools.partial(ppo.make, network=ppo.Config().network(), loss=ppo.loss))
    ('network',)
    """
    defaults = inspect.signature(make.func).parameters
    return tuple(name for name, part in make.keywords.items() if part is not defaults[name].default)


def parts_of(agent: Agent) -> tuple[str, ...]:
    """Return the names of an agent's parts that are not podium's: `Agent.brought`, and functions defined elsewhere.

    Neither `make` nor `check` counts: without them the agent learns and plays as it did.
    """
    others = {name for name, part in agent._asdict().items() if name not in ("make", "check") and not _is_ours(part)}
    return tuple(sorted(others.union(agent.brought)))


def lost_by_make(agent: Agent) -> tuple[str, ...]:
    """Return the names of what `_replace` put into an agent, or took out of it, that its `make` does not make again.

    But for `name` and `rollout_length`, by which nothing is learnt. A function of podium's in another's place is not
    noticed.
    """
    assert agent.make is not None
    made = agent.make(agent.config)
    lost = set(parts_of(agent)).difference(parts_of(made))
    for name in set(Agent._fields).difference(("name", "config", "make", "check", "rollout_length")):
        pair = getattr(agent, name), getattr(made, name)
        if any(part is None or isinstance(part, bool | int | float) for part in pair) and pair[0] != pair[1]:
            lost.add(name)
    return tuple(sorted(lost))


def _is_ours(part: Any) -> bool:
    """Say whether a part of an agent is podium's: a function by where it is defined, a Replay by its functions."""
    while isinstance(part, functools.partial):
        part = part.func
    if isinstance(part, Replay):
        return all(map(_is_ours, part))
    return not callable(part) or (getattr(part, "__module__", None) or "").partition(".")[0] == _HERE


def acted(agent: Agent, spec: EnvSpec, keys: Key, *given: Any) -> ActOutput:
    """Return what `Agent.act` gives for the keys [B] and the rest of its arguments.

    This and the next four are what placements call; where they are traced, shapes tell of broken rules.

    Raises:
      ContractError: it is no ActOutput, or its actions are of another shape or kind than the environment's.
    """
    output = agent.act(keys, *given)
    contracts.check_returned(agent.name, "act", output, ActOutput)
    contracts.check_actions(f"{agent.name}: act returns", spec, output.action, len(keys))
    return output


def planned(agent: Agent, key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
    """Return what `Agent.plan` gives; raises ContractError where that is no Plan."""
    plan = agent.plan(key, state, trajectory)
    contracts.check_returned(agent.name, "plan", plan, Plan)
    return plan


def graded(agent: Agent, key: Key, state: PyTree, minibatch: PyTree) -> tuple[PyTree, Aux]:
    """Return what `Agent.grad` gives; raises ContractError where that is no pair of gradients and an Aux."""
    return contracts.check_pair(agent.name, "grad", agent.grad(key, state, minibatch), Aux)


def applied(agent: Agent, state: PyTree, grads: PyTree) -> PyTree:
    """Return what `Agent.apply` gives; raises ContractError where that is of another form than the State."""
    following = agent.apply(state, grads)
    contracts.check_kept(agent.name, "apply", state, following)
    return following


def observed(agent: Agent, state: PyTree, trajectory: Trajectory) -> PyTree:
    """Return what `Agent.observe` gives; raises ContractError where that is of another form than the State."""
    following = agent.observe(state, trajectory)
    contracts.check_kept(agent.name, "observe", state, following)
    return following


def fresh_carry(agent: Agent, spec: EnvSpec, index: Array) -> PyTree:
    """Return the agent's memory at the start of a run, for the environments numbered `index` [B]."""
    carry = agent.carry(spec, index.shape[0])
    return carry if agent.number is None else agent.number(carry, index)


def fresh_past(agent: Agent, num_envs: int) -> Array | None:
    """Return the environments' discounted sums of rewards at the start of a run, [B]; None where none are asked for."""
    return None if agent.reward_discount is None else jnp.zeros(num_envs, jnp.float32)


def policy_leaves(agent: Agent, state: PyTree) -> list[bool]:
    """Say for each leaf of the agent's State (shapes will do) whether it is a parameter of the greedy policy.

    Those are the floating-point arrays that `Agent.policy_mask` marks; without a mask, those (but for scalars,
    running statistics and bounds of actions) that `Agent.actor` hands on as they are.
    """
    marks: list[bool] = []

    def mark(state: PyTree) -> None:
        if agent.policy_mask is not None:
            marks.extend(map(bool, jax.tree.leaves(jax.tree.broadcast(agent.policy_mask(state), state))))
            return
        params = jax.tree.leaves(agent.actor(state), is_leaf=lambda node: isinstance(node, RunningStats | Bounds))
        marks.extend(x.ndim > 0 and any(x is param for param in params) for x in jax.tree.leaves(state))

    jax.eval_shape(mark, state)
    leaves = zip(jax.tree.leaves(state), marks, strict=True)
    return [mark and jnp.issubdtype(x.dtype, jnp.floating) for x, mark in leaves]
