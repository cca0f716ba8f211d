"""`check_agent`: run an agent against the whole contract, and say in one sentence what is broken and how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium import contracts
from podium.agent import ActOutput, Agent, Aux, Plan, fresh_carry, fresh_past, policy_leaves
from podium.contracts import ContractError
from podium.env import Env, auto_reset
from podium.learn import draw, learn, plan_divides, prepare
from podium.placement.anakin import Anakin
from podium.placement.contract import Program
from podium.ranges import check_positive
from podium.rollout import begin, rollout
from podium.testing.probes import probe_continuous, probe_termination, probe_truncation
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, Seen, Trajectory, is_spec

_TOLERANCE = 1e-4
_MOST_ADDS = 10_000

_DRAWS = 8  # Of a replay: one may have no row of those that are asked about.

# These programs run once, so compiling them is the cost: this takes a third off it.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


def check_agent(
    agent: Agent, env: Env | None = None, *, num_envs: int = 8, rollout_length: int = 8, key: Key | None = None
) -> None:
    """Check that `agent` keeps the contract of `podium.agent.Agent`.

    The rules: every function can be traced; `act` returns actions that fit the spec, one a key, each from its own row
    only; greedy actions need no randomness; memory is zeroed where `first`, but numbers of environments stay; `plan`
    returns data [T, B, ...]; metrics are scalars; `apply` and `observe` return a state of the same structure, so that
    training is one loop; a `policy_mask` fits the state and marks something; gradients are finite, do not see what came
    after a termination, and see what a truncation cut off, if they bootstrap at all; several seeds under `jax.vmap`,
    and several devices, change nothing.

    Args:
      agent: to check.
      env: to check it in; None takes three probe environments: one truncates and one terminates, with continuous
        actions where the agent refuses discrete ones, and one wants a certain continuous action, if it accepts these.
      num_envs: side by side; more for agents with many minibatches.
      rollout_length: of the rollout that it learns from.
      key: of the play.

    Raises:
      ContractError: for the first rule found broken.
    """
    if not isinstance(agent, Agent):
        raise ContractError(f"{agent!r} is no podium.agent.Agent; make one with Agent(init=..., actor=..., ...).")
    check_positive(num_envs=num_envs, rollout_length=rollout_length)
    key = jax.random.key(0) if key is None else key
    for number, probe in enumerate([env] if env is not None else _accepted_probes(agent, key)):
        check = _Check(agent, auto_reset(probe), num_envs, rollout_length, key)
        check.run()
        if number == 0:
            check.run_on_devices()


def _accepted_probes(agent: Agent, key: Key) -> list[Env]:
    """Return the probe environments to check an agent in; raises ContractError where it accepts none."""

    def refusal(probe: Env) -> str | None:
        try:
            jax.eval_shape(lambda key: agent.init(key, probe.spec), key)
        except ValueError as error:
            return str(error)
        return None

    continuous = refusal(probe_truncation()) is not None
    probes = [probe_truncation(continuous=continuous), probe_termination(continuous=continuous), probe_continuous()]
    refusals = [refusal(probe) for probe in probes]
    if all(refusals):
        raise ContractError(f"{agent.name}: init accepts no probe environment; the last refusal: {refusals[-1]}")
    return [probe for probe, refused in zip(probes, refusals, strict=True) if refused is None]


def _is_same(before: PyTree, after: PyTree) -> bool:
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all(np.array_equal(bits(x), bits(y), equal_nan=False) for x, y in pairs)


def _disturbed(spec: EnvSpec, obs: PyTree, where: Array) -> PyTree:
    """Return observations [T, B, ...] of which those `where` [T, B] show something else, as the spec has it."""

    def other(spec: ArraySpec | DiscreteSpec, x: Array) -> Array:
        if isinstance(spec, DiscreteSpec):
            return (x + 1) % spec.num_values
        if x.dtype == bool:
            return ~x
        return jnp.where(x + 1 > spec.high, x - jnp.ones((), x.dtype), x + jnp.ones((), x.dtype))

    def disturb(spec: ArraySpec | DiscreteSpec, x: Array) -> Array:
        return jnp.where(where.reshape(*where.shape, *[1] * (x.ndim - 2)), other(spec, x).astype(x.dtype), x)

    change = lambda spec, obs: jax.tree.map(disturb, spec, obs, is_leaf=is_spec)
    if isinstance(obs, Seen):  # What is legal, and whose turn it is, stays.
        return obs._replace(view=change(spec.obs.view, obs.view))
    return change(spec.obs, obs)


class _Check:
    """One agent in one environment."""

    def __init__(self, agent: Agent, env: Env, num_envs: int, rollout_length: int, key: Key):
        self.agent, self.env, self.num_envs, self.rollout_length, self.key = agent, env, num_envs, rollout_length, key

    def run(self) -> None:
        state = self._traced("init", lambda key: self.agent.init(key, self.env.spec), self.key)
        self._check_arrays("init", state)
        params = self._traced("actor", self.agent.actor, state)
        self._check_act(params)
        self._check_policy_mask(state)
        trajectory = self._rollout(params)
        plan = self._check_plan(state, trajectory)
        self._check_learning(state, trajectory, plan)
        self._check_ends(state, trajectory)

    @property
    def _who(self) -> str:
        return f"{self.agent.name} in {self.env.spec.name}"

    def _broken(self, rule: str, remedy: str) -> ContractError:
        return ContractError(f"{self._who}: {rule} {remedy}")

    def _traced(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        return self._traced_plainly(name, jax.jit(function, compiler_options=_COMPILER_OPTIONS), *args)

    def _traced_plainly(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except ContractError:
            raise
        except Exception as error:
            first_line = str(error).strip().split("\n")[0]
            if name == "init" and isinstance(error, ValueError):
                raise self._broken(f"init refuses it: {first_line}", "Check the agent in another.") from error
            raise self._broken(
                f"{name} cannot be compiled ({type(error).__name__}: {first_line}).",
                "Use jax.numpy and jax.lax.cond instead of Python branches on array values.",
            ) from error

    def _check_arrays(self, name: str, tree: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not hasattr(leaf, "dtype"):
                where = jax.tree_util.keystr(path)
                raise self._broken(f"{name} returns {leaf!r} at {where}.", "Every leaf must be an array.")

    def _check_same(self, a: PyTree, b: PyTree, rule: str, remedy: str, tolerance: float = _TOLERANCE) -> None:
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            x, y = (jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z for z in (x, y))
            if not np.allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance, equal_nan=True):
                raise self._broken(rule, f"{remedy} (Seen in {jax.tree_util.keystr(path) or 'the result'}.)")

    def _check_act(self, params: PyTree) -> None:
        spec, count = self.env.spec, self.num_envs
        memory, carry = self.agent.carry(spec, count), fresh_carry(self.agent, spec, jnp.arange(count))
        contracts.check_rows(self._who, "carry", memory, count)
        contracts.check_kept(self._who, "number", memory, carry)
        _, timestep = jax.vmap(self.env.reset)(jax.random.split(self.key, count))
        keys, first = jax.random.split(jax.random.fold_in(self.key, 1), count), jnp.ones(count, bool)
        act = jax.jit(self.agent.act, static_argnums=5, compiler_options=_COMPILER_OPTIONS)

        def call(keys: Key, carry: PyTree, obs: PyTree, first: Any, greedy: bool) -> ActOutput:
            try:
                return act(keys, params, carry, obs, first, greedy)
            except Exception as error:
                line = str(error).strip().split("\n")[0]
                raise self._broken(
                    f"act cannot be compiled ({type(error).__name__}: {line}).",
                    "Its arguments: keys [B], params, carry, obs [B, ...], first [B], greedy (a Python bool).",
                ) from error

        output = call(keys, carry, timestep.obs, first, False)
        contracts.check_returned(self._who, "act", output, ActOutput)
        contracts.check_actions(f"{self._who}: act returns", spec, output.action, count)
        if isinstance(spec.action, DiscreteSpec):
            if bool(((output.action < 0) | (output.action >= spec.action.num_values)).any()):
                raise self._broken("act returns actions out of range.", f"Use 0 to {spec.action.num_values - 1}.")
        contracts.check_kept(self._who, "act (its carry)", carry, output.carry)
        contracts.check_rows(self._who, "extras", output.extras, count)
        self._check_act_meaning(call, keys, carry, timestep.obs, first, output)

    def _check_act_meaning(
        self, call: Callable[..., ActOutput], keys: Key, carry: PyTree, obs: PyTree, first: Any, output: ActOutput
    ) -> None:
        half = self.num_envs // 2
        take = lambda tree: jax.tree.map(lambda x: x[:half], tree)
        part = call(keys[:half], take(carry), take(obs), first[:half], False)
        self._check_same(
            take(output),
            part,
            "act on half a batch differs from half of act on the batch.",
            "Each row must depend on its own key, memory and observation only, or results change with the placement.",
        )
        greedy = call(keys, carry, obs, first, True)
        other = call(jax.random.split(jax.random.fold_in(self.key, 2), self.num_envs), carry, obs, first, True)
        self._check_same(
            greedy.action,
            other.action,
            "greedy actions depend on the key.",
            "With greedy=True return the mode of the policy.",
        )
        index = jnp.arange(self.num_envs)
        number = self.agent.number or (lambda carry, index: carry)
        self._check_same(
            number(output.carry, index),
            output.carry,
            "act changes the numbers of its environments.",
            "Hand them on in the memory as they came, also where `first`.",
        )
        used = jax.tree.map(lambda x: (x + 1).astype(x.dtype) if x.dtype != bool else ~x, carry)
        used = number(used, index)
        if jax.tree.leaves(carry):
            self._check_same(
                output.action,
                call(keys, used, obs, first, False).action,
                "act at the first step of an episode depends on memory of the one before.",
                "Zero the memory where `first` before using it.",
            )

    def _check_policy_mask(self, state: PyTree) -> None:
        if self.agent.policy_mask is None:
            return
        try:
            marks = policy_leaves(self.agent, state)
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise self._broken(
                f"policy_mask does not fit the State ({type(error).__name__}: {line}).",
                "Return Python bools in a tree that is a prefix of State.",
            ) from error
        if not any(marks):
            raise self._broken(
                "policy_mask marks no floating-point array of the State.",
                "Mark the parameters that greedy actions depend on, or leave it out.",
            )

    def _rollout(self, params: PyTree) -> Trajectory:
        def play(key: Key) -> Trajectory:
            index = jnp.arange(self.num_envs)
            start = begin(
                key,
                self.env,
                index,
                fresh_carry(self.agent, self.env.spec, index),
                fresh_past(self.agent, self.num_envs),
            )
            version = jnp.zeros((), jnp.int32)
            return rollout(key, self.agent, self.env, params, start, self.rollout_length, version)[1]

        return self._traced("a rollout", play, self.key)

    def _check_plan(self, state: PyTree, trajectory: Trajectory) -> Plan:
        plan = self._traced("plan", self.agent.plan, self.key, state, trajectory)
        contracts.check_returned(self._who, "plan", plan, Plan)
        if plan.unit not in ("step", "sequence"):
            raise self._broken(f"plan says unit={plan.unit!r}.", 'It must be "step" or "sequence".')
        if not jax.tree.leaves(plan.data):
            raise self._broken("plan returns no data.", "Put what grad needs in Plan.data, [T, B, ...].")
        contracts.check_rows(self._who, "Plan.data", plan.data, self.rollout_length, self.num_envs)
        contracts.check_rows(self._who, "Plan.per_env", plan.per_env, self.num_envs)
        if not plan_divides(self.agent, plan, 1):
            raise ValueError(
                f"num_envs={self.num_envs} and rollout_length={self.rollout_length} do not divide into "
                f"{plan.num_minibatches} minibatches of {self.agent.name}; give check_agent other sizes."
            )
        return plan

    def _minibatch(self, state: PyTree, trajectory: Trajectory, draws: Array | int = 0) -> PyTree:
        """Return a minibatch that depends on the data only through its rows; `draws` numbers those of a replay."""
        replay = self.agent.replay
        if replay is None:
            return draw(self.agent, prepare(self.key, self.agent, state, (), trajectory, 1), 0).data
        plan = self.agent.plan(self.key, state, trajectory)
        item = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), plan.data)
        stored = replay.init(item, self.num_envs, 1, self.rollout_length)
        stored = jax.lax.while_loop(
            lambda carry: ~replay.can_sample(carry[0]) & (carry[1] < _MOST_ADDS),
            lambda carry: (replay.add(carry[0], plan.data), carry[1] + 1),
            (stored, 0),
        )[0]
        return replay.sample(jax.random.fold_in(self.key, draws), stored)[0]

    def _gradient(self, state: PyTree, trajectory: Trajectory, draws: Array | int = 0) -> tuple[PyTree, Aux]:
        return self.agent.grad(self.key, state, self._minibatch(state, trajectory, draws))

    def _check_learning(self, state: PyTree, trajectory: Trajectory, plan: Plan) -> None:
        result = self._traced("grad", self._gradient, state, trajectory)
        grads, aux = contracts.check_pair(self._who, "grad", result, Aux)
        for name, value in aux.metrics.items():
            if jnp.shape(value) != ():
                raise self._broken(f"the metric {name!r} has shape {jnp.shape(value)}.", "Metrics must be scalars.")
        stop = True if self.agent.stops is None else self._traced("stops", self.agent.stops, aux.metrics)
        if jnp.shape(stop) != () or not jnp.issubdtype(jnp.result_type(stop), jnp.bool_):
            raise self._broken(f"stops returns {stop!r}.", "Return a bool scalar.")
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
                raise self._broken(
                    f"the gradient at {jax.tree_util.keystr(path)} is not finite.",
                    "Look for a log or a division of zero.",
                )
        following = self._traced("apply", self.agent.apply, state, grads)
        contracts.check_kept(self._who, "apply", state, following)
        if any(bool(jnp.any(x != 0)) for x in jax.tree.leaves(grads)) and _is_same(state, following):
            raise self._broken("apply leaves the State as it was, after gradients that are not 0.", "Take a step.")
        contracts.check_kept(
            self._who, "observe", state, self._traced("observe", self.agent.observe, state, trajectory)
        )
        if self.agent.replay is None:
            self._traced("learning", lambda key: learn(key, self.agent, state, (), trajectory, 1).metrics, self.key)

    def _check_ends(self, state: PyTree, trajectory: Trajectory) -> None:
        """Compare the gradient with that of other observations reached by some steps.

        What lies behind a termination is worth nothing, so the gradient must not change with it. Behind a truncation
        all went on, so it must change with that as it does with what other steps reach, if ever it does.
        """
        terminated = trajectory.terminated
        truncated = trajectory.truncated & ~terminated
        gradient = jax.jit(
            lambda state, trajectory, draws: self._gradient(state, trajectory, draws)[0],
            compiler_options=_COMPILER_OPTIONS,
        )

        def beside(where: Array, draws: int) -> tuple[PyTree, PyTree]:
            other = trajectory._replace(next_obs=_disturbed(self.env.spec, trajectory.next_obs, where))
            return gradient(state, trajectory, draws), gradient(state, other, draws)

        self._check_same(
            *beside(terminated, 0),
            "the gradient depends on the observation reached by a terminating step.",
            "Multiply what is bootstrapped from next_obs by Trajectory.discount, which is 0 there.",
        )
        if not bool(truncated.any()):
            return
        sees = lambda where: any(not _is_same(*beside(where, draws)) for draws in range(_DRAWS))
        as_terminated = trajectory._replace(terminated=trajectory.last, truncated=jnp.zeros_like(truncated))
        same = (_is_same(gradient(state, trajectory, i), gradient(state, as_terminated, i)) for i in range(_DRAWS))
        if sees(~trajectory.last) and not sees(truncated) and all(same):
            raise self._broken(
                "the gradient depends on the observations that other steps reach, and not on that of a truncated one.",
                "Truncation is not termination: bootstrap from the true last observation, Trajectory.next_obs.",
            )

    def run_on_devices(self) -> None:
        """Check several seeds, and several devices where there are."""

        def build(devices: list[jax.Device], seeds: int = 1) -> Program:
            sizes = {"num_envs": self.num_envs, "rollout_length": self.rollout_length, "seeds": seeds}
            return Anakin(devices).build(self.agent, self.env, **sizes)

        def learnt(program: Program) -> PyTree:
            loop: Any = program.loop  # Compiled as one; it takes options.
            loop.compile(_COMPILER_OPTIONS)
            state, _ = program.chunk(program.init(0), 1)
            return jax.device_get(self.agent.actor(state.agent))

        self._traced_plainly("training under jax.vmap over seeds", build(jax.devices()[:1], seeds=2).lower)
        one = build(jax.devices()[:1])
        if len(jax.devices()) > 1 and one.sizes.num_lanes % 2 == 0:
            self._check_same(
                learnt(one),
                learnt(build(jax.devices()[:2])),
                "one iteration on two devices differs from one on one.",
                "Let nothing depend on the order of the batch or on its share on a device.",
            )
