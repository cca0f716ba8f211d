"""Play whole episodes with a fixed policy: evaluation, apart from training and on keys of its own."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium import xla
from podium.agent import Agent, fresh_carry
from podium.env import Env, traced_once
from podium.episodes import any_agent, gained
from podium.host import HostEnv, HostEnvFactory, check_is_env
from podium.ranges import check_positive, check_seed, check_value
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree

DEFAULT_MAX_STEPS = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """An agent that can act and no longer learns.

    Attributes:
      agent: whose `act` and `carry` are used.
      params: what `agent.actor` gave.
      spec: of the environment it was trained in.
    """

    agent: Agent
    params: PyTree
    spec: EnvSpec

    def carry(self, num_envs: int) -> PyTree:
        """Return fresh recurrent memory [B, ...]; `()` for agents without memory."""
        return fresh_carry(self.agent, self.spec, jnp.arange(num_envs))

    def act(
        self, obs: PyTree, carry: PyTree = None, first: Any = None, key: Key | None = None, greedy: bool = True
    ) -> tuple[Array, PyTree]:
        """Choose actions for a batch.

        Args:
          obs: [B, ...].
          carry: memory, as returned by the last call; None at the start.
          first: [B] bool, where an episode begins; None says nowhere (everywhere if `carry` is None).
          key: of the randomness; None only where `greedy`.
          greedy: take the best action instead of sampling.

        Returns:
          `(action [B, ...], carry)`.

        Raises:
          ValueError: sampling without a key.
        """
        num_envs = jax.tree.leaves(obs)[0].shape[0]
        if key is None and not greedy:
            raise ValueError("key=None with greedy=False: sampling needs a key, such as jax.random.key(0).")
        if first is None:
            first = jnp.full(num_envs, carry is None)
        if carry is None:
            carry = self.carry(num_envs)
        keys = jax.random.split(jax.random.key(0) if key is None else key, num_envs)
        output = self.agent.act(keys, self.params, carry, obs, jnp.asarray(first), greedy)
        return output.action, output.carry

    def __call__(self, obs: PyTree) -> Array:
        """Return the greedy action for one observation (no batch axis, no memory of earlier ones)."""
        action, _ = self.act(jax.tree.map(lambda x: jnp.asarray(x)[None], obs))
        return action[0]


def longest_episode(spec: EnvSpec) -> int:
    """Return the steps after which an episode is cut where nothing else is said: the environment's limit, or 10,000."""
    return spec.max_episode_steps or DEFAULT_MAX_STEPS


def longest_evaluated(env: Env | HostEnvFactory) -> int:
    """Return `longest_episode` of what an evaluation in `env` plays."""
    return longest_episode((env.evaluation or env).spec)


def make_evaluator(
    agent: Agent, env: Env, num_episodes: int, max_steps: int | None = None, greedy: bool = True
) -> Callable[..., dict[str, Array]]:
    """Return a function `(key, params) -> metrics` that plays episodes side by side; compile it with `jax.jit`.

    They are those of `env.evaluation` where there is one. Of agents that act together the return is their mean; where
    two take turns, it is that of who moved first.
    Every episode runs until it ends, or until `max_steps` (the environment's own limit, else 10,000). An episode that
    is cut there counts with what it gathered, and is reported in `eval_unfinished`. A call may give others of
    `max_steps` and `greedy` as a third and a fourth argument; where those are arrays, nothing is compiled anew.

    Raises:
      ValueError: for numbers that are not positive.
    """
    env = env.evaluation or env
    usual = _bound(env.spec, num_episodes, max_steps)
    env = traced_once(env)

    def evaluate(
        key: Key, params: PyTree, max_steps: Array | int = usual, greedy: Array | bool = greedy
    ) -> dict[str, Array]:
        reset_key, play_key = jax.random.split(key)
        env_state, timestep = jax.vmap(env.reset)(jax.random.split(reset_key, num_episodes))
        carry = fresh_carry(agent, env.spec, jnp.arange(num_episodes))
        zeros = jnp.zeros(num_episodes, jnp.float32)

        def step(state: Any) -> Any:
            t, env_state, obs, first, carry, done, total, length, sign = state
            act_key, step_key = jax.random.split(jax.random.fold_in(play_key, t))
            act_keys = jax.random.split(act_key, num_episodes)
            action, carry = _act(agent, act_keys, params, carry, obs, first, greedy)
            step_keys = jax.random.split(step_key, num_episodes)
            env_state, timestep = jax.vmap(env.step)(step_keys, env_state, action)
            reward, sign = gained(timestep, sign)
            total = total + jnp.where(done, 0.0, reward)
            length = length + jnp.where(done, 0.0, 1.0)
            done = done | timestep.info.get("episode_end", timestep.last)
            return t + 1, env_state, timestep.obs, jnp.zeros_like(first), carry, done, total, length, sign

        first = jnp.ones(num_episodes, bool)
        sign = None if timestep.turn is None else jnp.ones(num_episodes)
        begin = (jnp.int32(0), env_state, timestep.obs, first, carry, ~first, zeros, zeros, sign)
        unfinished = lambda state: (state[0] < max_steps) & ~state[5].all()
        _, _, _, _, _, done, total, length, _ = jax.lax.while_loop(unfinished, step, begin)
        return {
            "eval_return": total.mean(),
            "eval_return_std": total.std(),
            "eval_return_min": total.min(),
            "eval_length": length.mean(),
            "eval_unfinished": (~done).mean(),
        }

    return evaluate


def _bound(spec: EnvSpec, num_episodes: int, max_steps: int | None) -> int:
    """Return after how many steps an episode is cut, after checking both numbers, which programs count with int32."""
    usual = longest_episode(spec) if max_steps is None else max_steps
    check_positive(num_episodes=num_episodes, max_steps=usual)
    for name, value in (("num_episodes", num_episodes), ("max_steps", usual)):
        if value >= 2**31:
            raise ValueError(f"{name}={value} is more than can be counted; use at most 2**31 - 1.")
    return usual


def _act(
    agent: Agent, keys: Key, params: PyTree, carry: PyTree, obs: PyTree, first: Array, greedy: Array | bool
) -> tuple[Array, PyTree]:
    """Return actions and memory, where `greedy` may be an array; an agent is handed a Python bool."""

    def act(greedy: bool) -> tuple[Array, PyTree]:
        output = agent.act(keys, params, carry, obs, first, greedy)
        return output.action, output.carry

    if isinstance(greedy, bool):
        return act(greedy)
    return jax.lax.cond(greedy, lambda: act(True), lambda: act(False))


class Episodes:
    """One episode of each of some environments on the CPU, whose further steps count no more.

    Attributes:
      env: the batch.
      obs: newest observations.
      total: rewards so far, before clipping or scaling, [B].
      length: steps so far, [B].
      done: whose episode has ended, [B].
    """

    def __init__(self, env: HostEnv):
        self.env, self.obs, number = env, env.reset().obs, env.num_envs
        self.total, self.length, self.done = np.zeros(number), np.zeros(number), np.zeros(number, bool)
        self._sign = np.ones(number)  # Where two take turns, of who moved first.

    def send(self, action: np.ndarray) -> None:
        """Begin a step."""
        self.env.send(action)

    def receive(self) -> None:
        """Wait for the step, and count."""
        timestep = self.env.recv()
        self.obs = timestep.obs
        reward, self._sign = gained(timestep, self._sign)
        self.total += np.where(self.done, 0.0, reward)
        valid = True if timestep.valid is None else any_agent(np.asarray(timestep.valid), timestep)
        self.length += ~self.done & valid
        self.done |= np.asarray(timestep.info.get("episode_end", timestep.last))


def make_host_evaluator(
    agent: Agent, envs: HostEnvFactory, num_episodes: int, max_steps: int | None = None, greedy: bool = True
) -> Callable[..., dict[str, Array] | None]:
    """Return what `make_evaluator` returns, for environments on the CPU: a function that is not to be compiled.

    It plays in environments of its own, by the protocol of `envs.evaluation` where there is one. They are made at every
    call, so that equal keys give equal episodes. A call may give others of `max_steps` and `greedy`, as there, and
    since games last, a fifth argument `() -> bool`: once that is true it stops and returns None.

    Raises:
      ValueError: for numbers that are not positive.
    """
    task = envs.evaluation or envs
    usual = _bound(task.spec, num_episodes, max_steps)

    @functools.partial(jax.jit, static_argnames="greedy")
    def act(play_key: Key, t: Array, params: PyTree, carry: PyTree, obs: PyTree, greedy: bool) -> tuple[Array, PyTree]:
        keys = jax.random.split(jax.random.fold_in(play_key, t), num_episodes)
        return _act(agent, keys, params, carry, obs, jnp.full(num_episodes, t == 0), greedy)

    def evaluate(
        key: Key,
        params: PyTree,
        max_steps: int = usual,
        greedy: bool = greedy,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Array] | None:
        seed_key, play_key = jax.random.split(key)
        env = task.make(num_episodes, int(jax.random.randint(seed_key, (), 0, 2**31 - 1)), 0)
        try:
            played, carry = Episodes(env), fresh_carry(agent, task.spec, jnp.arange(num_episodes))
            for t in range(max_steps):
                if stop():
                    return None
                action, carry = act(play_key, np.int32(t), params, carry, played.obs, greedy=greedy)
                played.send(np.asarray(action))
                played.receive()
                if played.done.all():
                    break
        finally:
            env.close()
        return {
            "eval_return": played.total.mean(),
            "eval_return_std": played.total.std(),
            "eval_return_min": played.total.min(),
            "eval_length": played.length.mean(),
            "eval_unfinished": (~played.done).mean(),
        }

    return evaluate


def evaluate(
    policy: Policy,
    env: Env | HostEnvFactory,
    num_episodes: int = 128,
    seed: int = 0,
    max_steps: int | None = None,
    greedy: bool = True,
) -> dict[str, float]:
    """Play episodes with a policy.

    Args:
      policy: from `podium.train` or `podium.load`.
      env: to play in; need not be the one trained in.
      num_episodes: played side by side.
      seed: of resets and actions.
      max_steps: after which an episode is cut; None takes the environment's own limit, or 10,000.
      greedy: take the best action instead of sampling.

    Returns:
      `eval_return` (mean over episodes), `eval_return_std`, `eval_return_min`, `eval_length`, and `eval_unfinished`
      (the fraction of episodes that the bound cut).

    Raises:
      ValueError: for numbers out of range, for what is no policy or no environment, or where observations or actions
        have another form than where the policy was trained.
    """
    if not isinstance(policy, Policy):
        got = reprlib.repr(policy)
        raise ValueError(f"policy={got} is no Policy; give what podium.load returns, or podium.train(...).policy.")
    check_is_env(env)
    check_seed(seed)
    check_value("greedy", greedy, "flags", "True is usual")
    _check_fits(policy.spec, env.spec)
    function: Callable[..., dict[str, Array] | None]
    if isinstance(env, HostEnvFactory):
        function = make_host_evaluator(policy.agent, env, num_episodes, max_steps, greedy)
    else:
        play = make_evaluator(policy.agent, env, num_episodes, max_steps, greedy)
        function = jax.jit(play, compiler_options=xla.usual(jax.devices()[0]))
    metrics = function(jax.random.key(seed), policy.params)
    assert metrics is not None
    return {name: float(np.asarray(value)) for name, value in metrics.items()}


def _check_fits(trained: EnvSpec, played: EnvSpec) -> None:
    """Raise ValueError where a policy trained in one environment cannot act in the other."""
    for name, one, other in (("observations", trained.obs, played.obs), ("actions", trained.action, played.action)):
        if _form(one) != _form(other):
            raise ValueError(
                f"The policy was trained in {trained.name}, and {played.name} has {name} of another form: "
                f"{_form(other)} in place of {_form(one)}."
            )


def _form(spec: Any) -> Any:
    def say(leaf: ArraySpec | DiscreteSpec) -> str:
        if isinstance(leaf, DiscreteSpec):
            return f"{leaf.num_values} values{list(leaf.shape) or ''}"
        return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"

    return jax.tree.map(say, spec, is_leaf=lambda leaf: isinstance(leaf, ArraySpec | DiscreteSpec))
