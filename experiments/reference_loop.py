"""A PPO loop as the first all-JAX implementations are built, to measure podium beside in one process.

One `scan` in another: environments that reset themselves in gymnax, a shuffle by sorting, minibatches of the whole
batch, an optimiser over a tree of parameters. The structure follows PureJaxRL (Lu et al. 2022); the code is podium's
own, and trains as well as podium does. It knows gymnax, discrete actions and one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF = 0.99, 0.95, 0.2, 0.5, 0.01


class Network(nn.Module):
    """Two MLPs of two layers of 64, tanh."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits [N, A] and values [N]."""
        x = x.reshape(x.shape[0], -1)

        def torso(h: jax.Array) -> jax.Array:
            for _ in range(2):
                h = jnp.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(h))
            return h

        logits = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))(torso(x))
        return logits, jnp.squeeze(nn.Dense(1)(torso(x)), -1)


class Step(NamedTuple):
    """One step of every environment."""

    obs: jax.Array
    action: jax.Array
    value: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    done: jax.Array


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Return the log-probability of each action."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]


def forward(network: Network, params: Any, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits [N, A] and values [N]."""
    output: Any = network.apply(params, obs)
    return output


def loss(params: Any, network: Network, batch: tuple[Step, jax.Array, jax.Array]) -> jax.Array:
    """Return PPO's loss of a minibatch."""
    step, advantage, target = batch
    logits, value = forward(network, params, step.obs)
    clipped_value = step.value + jnp.clip(value - step.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped_value - target)).mean()
    ratio = jnp.exp(log_prob_of(logits, step.action) - step.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    log_probs = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy


def make(
    name: str, num_envs: int, length: int, epochs: int, minibatches: int, updates: int
) -> tuple[Callable[[jax.Array], Any], Callable[[Any], Any]]:
    """Return jitted `init(key) -> state` and `train(state) -> state`, which does `updates` updates in one program."""
    init, train = _functions(name, num_envs, length, epochs, minibatches, updates, 2.5e-4)
    return jax.jit(init), jax.jit(train, donate_argnums=0)


def make_sweep(
    name: str, num_envs: int, length: int, epochs: int, minibatches: int, updates: int
) -> Callable[[jax.Array, jax.Array], Any]:
    """Return a jitted `run(keys, rates) -> state`: whole runs of every key at every rate, under two `vmap`s."""

    def run(key: jax.Array, rate: jax.Array) -> Any:
        init, train = _functions(name, num_envs, length, epochs, minibatches, updates, rate)
        return train(init(key))

    return jax.jit(jax.vmap(jax.vmap(run, (0, None)), (None, 0)))


def _functions(
    name: str, num_envs: int, length: int, epochs: int, minibatches: int, updates: int, rate: Any
) -> tuple[Callable[[jax.Array], Any], Callable[[Any], Any]]:
    env, env_params = gymnax.make(name)
    network = Network(env.action_space(env_params).n)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))

    def init(key: jax.Array) -> Any:
        key, env_key, network_key = jax.random.split(key, 3)
        obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(env_key, num_envs), env_params)
        params = network.init(network_key, obs)
        return TrainState.create(apply_fn=network.apply, params=params, tx=optimizer), env_state, obs, key

    def act(state: Any, _: None) -> tuple[Any, Step]:
        train_state, env_state, obs, key = state
        key, act_key, env_key = jax.random.split(key, 3)
        logits, value = forward(network, train_state.params, obs)
        action = jax.random.categorical(act_key, logits)
        keys = jax.random.split(env_key, num_envs)
        next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            keys, env_state, action, env_params
        )
        step = Step(obs, action, value, log_prob_of(logits, action), reward, terminated | truncated)
        return (train_state, env_state, next_obs, key), step

    def back(later: tuple[jax.Array, jax.Array], step: Step) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        advantage, next_value = later
        error = step.reward + GAMMA * next_value * (1 - step.done) - step.value
        advantage = error + GAMMA * LAMBDA * (1 - step.done) * advantage
        return (advantage, step.value), advantage

    def update(state: Any, _: None) -> tuple[Any, None]:
        (train_state, env_state, obs, key), steps = jax.lax.scan(act, state, None, length)
        last_value = forward(network, train_state.params, obs)[1]
        start = jnp.zeros_like(last_value), last_value
        advantage = jax.lax.scan(back, start, steps, reverse=True, unroll=16)[1]
        data = steps, advantage, advantage + steps.value

        def epoch(state: Any, _: None) -> tuple[Any, None]:
            train_state, key = state
            key, shuffle_key = jax.random.split(key)
            order = jax.random.permutation(shuffle_key, num_envs * length)
            cut = lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(minibatches, -1, *x.shape[2:])
            step = lambda state, batch: (
                state.apply_gradients(grads=jax.grad(loss)(state.params, network, batch)),
                None,
            )
            return (jax.lax.scan(step, train_state, jax.tree.map(cut, data))[0], key), None

        (train_state, key), _ = jax.lax.scan(epoch, (train_state, key), None, epochs)
        return (train_state, env_state, obs, key), None

    return init, lambda state: jax.lax.scan(update, state, None, updates)[0]
