"""Returns and advantages: pure mathematics over [T, B] arrays, episode boundaries told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.types import Array


def gae(reward: Array, discount: Array, value: Array, next_value: Array, last: Array, lambda_: float) -> Array:
    """Estimate advantages by GAE (Schulman et al. 2016, eq. 16).

        delta_t = r_t + discount_t * V(s'_t) - V(s_t)
        A_t     = delta_t + discount_t * lambda * A_{t+1}        (the second term only inside an episode)

    Args:
      reward: [T, B], received after the action at t.
      discount: [T, B], gamma, or 0 where the episode terminated.
      value: [T, B], estimates at t.
      next_value: [T, B], at the observation reached, before any reset.
      last: [T, B], True where an episode ended, either way; cuts the trace.
      lambda_: in [0, 1]; 0 gives the one-step TD error, 1 the return minus the value.

    Returns:
      [T, B] advantages; gradients are not stopped.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((3, 1))
    >>> gae(one, one, 0 * one, 0 * one, jnp.zeros((3, 1), bool), 1.0)[:, 0].tolist()
    [3.0, 2.0, 1.0]
    """
    return _sum_backward(reward + discount * next_value - value, discount * lambda_ * (1.0 - last))


def lambda_return(reward: Array, discount: Array, next_value: Array, last: Array, lambda_: float) -> Array:
    """Mix the returns of all lengths, each bootstrapped (Sutton and Barto 2018, eq. 12.18).

        G_t = r_t + discount_t * ((1 - lambda) * V(s'_t) + lambda * G_{t+1})    inside an episode
        G_t = r_t + discount_t * V(s'_t)                                        where one ended, and in the last row

    With V(s') = max_a Q(s', a) these are the targets of Peng's Q(lambda) (Peng and Williams 1996), which goes on
    through actions that were not the best; `gae` plus the values acted with is the same number.

    Args:
      reward: [T, B], received after the action at t.
      discount: [T, B], gamma, or 0 where the episode terminated.
      next_value: [T, B], at the observation reached, before any reset.
      last: [T, B], True where an episode ended, either way; cuts the trace.
      lambda_: in [0, 1]; 0 gives the one-step target, 1 the return.

    Returns:
      [T, B] targets; gradients are not stopped.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((3, 1))
    >>> lambda_return(one, one, 4 * one, jnp.zeros((3, 1), bool), 0.5)[:, 0].tolist()
    [5.75, 5.5, 5.0]
    """
    following = jnp.asarray(lambda_ * (1.0 - last)).at[-1].set(0.0)
    return _sum_backward(reward + discount * (1.0 - following) * next_value, discount * following)


class VTrace(NamedTuple):
    """What V-trace gives, [T, B] each: value targets, and advantages that carry their importance weight."""

    target: Array
    advantage: Array


def vtrace(
    log_ratio: Array,
    reward: Array,
    discount: Array,
    value: Array,
    next_value: Array,
    last: Array,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Correct targets and advantages for the policy that acted (Espeholt et al. 2018, arXiv 1802.01561).

        rho_t = min(rho_bar, pi / mu),   c_t = lambda * min(c_bar, pi / mu),   pi / mu = exp(log_ratio_t)
        delta_t = rho_t * (r_t + discount_t * V(s'_t) - V(s_t))
        v_t - V(s_t) = delta_t + discount_t * c_t * (v_{t+1} - V(s_{t+1}))                          (eq. 1, remark 1)
        A_t = rho_t * (r_t + discount_t * (V(s'_t) + lambda * (v_{t+1} - V(s_{t+1}))) - V(s_t))     (section 4.2)

    The terms of t+1 only inside an episode: where one ended, and after the last row, V(s'_t) stands alone. With a
    lambda of 1 all this is the paper's. Deliberate difference below 1: the paper's A_t has no lambda, so that on-policy
    it would mix two estimators; with it, A_t on-policy is GAE and v_t the lambda-return.

    Args:
      log_ratio: [T, B], log-probability of the action under the policy that learns, less that under the one that
        acted; 0 is on-policy.
      reward: [T, B], received after the action at t.
      discount: [T, B], gamma, or 0 where the episode terminated.
      value: [T, B], estimates at t.
      next_value: [T, B], at the observation reached, before any reset.
      last: [T, B], True where an episode ended, either way; cuts the trace.
      lambda_: in [0, 1].
      rho_bar: bound on the weight of a TD error. It decides what is learned: the value of the policy pi without one,
        that of a policy nearer to mu with a smaller one.
      c_bar: bound on what a step passes back, at most rho_bar. It decides how fast: a smaller one varies less.

    Returns:
      `VTrace`; gradients are not stopped.

    >>> import jax.numpy as jnp
    >>> one, half = jnp.ones((3, 1)), jnp.log(jnp.full((3, 1), 0.5))
    >>> vtrace(half, one, one, 0 * one, 0 * one, jnp.zeros((3, 1), bool)).target[:, 0].tolist()
    [0.875, 0.75, 0.5]
    """
    ratio = jnp.exp(log_ratio)
    rho, inside = jnp.minimum(rho_bar, ratio), 1.0 - last
    delta = rho * (reward + discount * next_value - value)
    correction = _sum_backward(delta, discount * lambda_ * jnp.minimum(c_bar, ratio) * inside)
    following = inside * jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    advantage = rho * (reward + discount * (next_value + lambda_ * following) - value)
    return VTrace(value + correction, advantage)


def _sum_backward(term: Array, decay: Array) -> Array:
    """Return S_t = term_t + decay_t * S_{t+1} [T, B], from 0 behind the last row."""

    def step(total: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        term, decay = inputs
        total = term + decay * total
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(term[0]), (term, decay), reverse=True, unroll=8)[1]


def discounted_sum(total: Any, reward: Any, terminated: Any, gamma: float, valid: Any = None) -> Any:
    """Add a step's reward to a discounted sum, as Gymnasium's NormalizeReward does; of JAX, or of NumPy in NumPy.

        G_t = gamma * (1 - terminated_t) * G_{t-1} + r_t

    So the step that terminates an episode is the first of the next sum, and truncation begins none.

    Args:
      total: [B], G_{t-1}.
      reward: [B].
      terminated: [B] bool.
      gamma: in [0, 1].
      valid: [B], False where the sum stays, or None for nowhere.
    """
    following = gamma * total * (1.0 - terminated) + reward
    if valid is None:
        return following
    return (np if isinstance(total, np.ndarray) else jnp).where(valid, following, total)


def discounted_sums(reward: Array, terminated: Array, gamma: float, start: Array, valid: Array | None = None) -> Array:
    """Accumulate rewards forward in time, see `discounted_sum`.

    Args:
      reward: [T, B].
      terminated: [T, B], True where the environment ended an episode.
      gamma: in [0, 1].
      start: scalar or [B], G before the first row.
      valid: [T, B], False for rows that change no sum, or None for none.

    Returns:
      [T, B] sums.
    """

    def step(total: Array, inputs: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        reward, terminated, valid = inputs
        following = discounted_sum(total, reward, terminated, gamma, valid)
        return following, following

    start = jnp.broadcast_to(start, reward.shape[1:]).astype(reward.dtype)
    return jax.lax.scan(step, start, (reward, terminated, valid))[1]


def next_values(
    value: Array,
    truncated: Array,
    evaluate: Callable[[Array | None], Array],
    rounds: Array | None = None,
) -> Array:
    """Return the value of the observation that every step reached, evaluating only where it is not known.

    Inside an episode V(s'_t) is `value[t + 1]`. It must be evaluated at the last row, and where an episode was
    truncated (there `value[t + 1]` belongs to the next episode). Truncations are rare, so they are evaluated one
    per environment at a time, in as many rounds as the environment with the most truncations needs. Where an
    episode terminated the result is arbitrary and finite: multiply by a discount of 0.

    Args:
      value: [T, B], estimates at t.
      truncated: [T, B] bool.
      evaluate: returns the values [B] of what step number `step` [B] of each environment reached; the last for None:
        `podium.types.at_step` and `Trajectory.reached` find that.
      rounds: scalar, `most_truncations` where that is known; on several devices to know it is to ask all of them.

    Returns:
      [T, B] values.
    """
    if rounds is None:
        rounds = most_truncations(truncated)
    shifted = jnp.concatenate([value[1:], evaluate(None)[None]])
    time = jnp.arange(value.shape[0])[:, None]

    def one_round(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        remaining, values = state
        t = jnp.argmax(remaining, axis=0)
        here = remaining & (time == t)
        return remaining & ~here, jnp.where(here, evaluate(t), values)

    remaining = truncated & (time < value.shape[0] - 1)
    return jax.lax.fori_loop(0, rounds, one_round, (remaining, shifted))[1]


def most_truncations(truncated: Array) -> Array:
    """Return the most of `truncated` [T, B] in one environment, but for the last row: the rounds of `next_values`."""
    return jnp.max(jnp.sum(truncated[:-1], axis=0))
