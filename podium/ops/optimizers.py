"""Optimisers as optax transformations that give directions, and the step along them at a rate that may fall."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podium.ranges import as_float, is_on
from podium.types import Array, PyTree

OPTIMIZERS = ("adam", "rmsprop", "radam")
_JOINED = 2**18
"""Numbers up to which parameters are joined to one vector."""


def make(name: str, eps: float, max_grad_norm: float = 0.0, decay: float = 0.99) -> optax.GradientTransformation:
    """Make an optimiser whose updates are directions to be scaled by a rate; see `descend`.

        adam:     m / (sqrt(n) + eps), bias-corrected moments of decay 0.9 and 0.999 (Kingma and Ba 2015, alg. 1)
        rmsprop:  g / sqrt(n + eps),   n <- decay * n + (1 - decay) * g^2, from 0 (Mnih et al. 2016, eq. 8 and 9)
        radam:    r * m / (sqrt(n) + eps), adam's with a rectifier r; m alone in the first five steps, in which the
                  variance of 1 / sqrt(n) is not finite                    (Liu et al. 2020, arXiv 1908.03265, alg. 2)

    Args:
      name: one of `OPTIMIZERS`.
      eps: above 0. For rmsprop it stands under the root: 0.01 there damps as much as 0.1 beside it.
      max_grad_norm: bound on the global norm of the gradient, before anything else; 0 leaves it unbounded.
      decay: of rmsprop's mean square, 0 to 1.

    Raises:
      ValueError: for an unknown name.

    >>> import jax.numpy as jnp
    >>> optimizer = make("rmsprop", eps=0.0, decay=0.75)
    >>> optimizer.update(jnp.array([3.0]), optimizer.init(jnp.zeros(1)))[0].tolist()
    [2.0]
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r} is unknown; use one of {', '.join(OPTIMIZERS)}.")
    clip = optax.clip_by_global_norm(max_grad_norm) if is_on(max_grad_norm) else optax.identity()
    if name == "rmsprop":
        return flatten(optax.chain(clip, optax.scale_by_rms(decay, eps)))
    scale = optax.scale_by_adam if name == "adam" else optax.scale_by_radam
    return flatten(optax.chain(clip, scale(eps=eps)))


def adamw(weight_decay: Any, max_grad_norm: Any) -> optax.GradientTransformation:
    """Make AdamW (Loshchilov and Hutter 2019), whose updates are directions to be scaled by a rate; see `descend`.

    Args:
      weight_decay: decay of weights per step, as a share of the rate.
      max_grad_norm: bound on the global norm of the gradient, before anything else; 0 leaves it unbounded.
    """
    clip = optax.clip_by_global_norm(max_grad_norm) if is_on(max_grad_norm) else optax.identity()
    return flatten(optax.chain(clip, optax.scale_by_adam(), optax.add_decayed_weights(weight_decay)))


_by_array: contextvars.ContextVar[bool] = contextvars.ContextVar("by_array", default=False)


@contextlib.contextmanager
def by_array() -> Iterator[None]:
    """Where a State is made, let `flatten` keep what it keeps as arrays like the parameters, each by itself."""
    token = _by_array.set(True)
    try:
        yield
    finally:
        _by_array.reset(token)


def flatten(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` on one vector of all parameters: a few long kernels instead of many short ones.

    Parameters of more than 2^18 numbers stay arrays: their kernels are long as it is, and joining them takes time
    (PPO with `NatureCNN`, of 1.7 million: 1.11 times as fast as joined, on two cores). So do all within `by_array`,
    whose state a mesh can hold split as it does the parameters; joined to a vector they would cross it. The state says
    which of the two it is, so nothing else need: the mathematics is the same, and `podium.checkpoint` reads either
    where the other is wanted.

    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    >>> flatten(optax.scale_by_rms()).init(params).nu.shape
    (9,)
    >>> with by_array():
    ...     {name: x.shape for name, x in flatten(optax.scale_by_rms()).init(params).nu.items()}
    {'b': (3,), 'w': (2, 3)}
    """
    inner = optax.with_extra_args_support(inner)
    flat = optax.flatten(inner)

    def init(params: PyTree) -> optax.OptState:
        apart = _is_by_array() or sum(jnp.size(leaf) for leaf in jax.tree.leaves(params)) > _JOINED
        return (inner if apart else flat).init(params)

    def update(grads: PyTree, state: optax.OptState, params: PyTree = None, **extra: Any) -> Any:
        joined = _shapes(jax.eval_shape(flat.init, grads)) == _shapes(state)
        return (flat if joined else inner).update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_by_array() -> bool:
    """At the level of the module: what refers to a ContextVar cannot be sent to another process."""
    return _by_array.get()


def _shapes(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves]


def annealed(learning_rate: float, anneal_steps: int, env_steps: Array) -> Any:
    """Return a rate that falls linearly to 0 over `anneal_steps` environment steps; 0 of them keep it constant."""
    if not is_on(anneal_steps):
        return learning_rate
    return learning_rate * jnp.maximum(0.0, 1.0 - env_steps / as_float(anneal_steps))


def descend(
    optimizer: optax.GradientTransformation, rate: Any, params: PyTree, opt_state: optax.OptState, grads: PyTree
) -> tuple[PyTree, optax.OptState]:
    """Return parameters one step of length `rate` further down, and the optimiser's next state."""
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), opt_state
