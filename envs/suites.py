"""What the suites of pure environments share: names, options, the cast to fixed types, and the wrappers at the end.

A suite is a package of environments in JAX, which podium steps without the package's own training loops and wrappers:
an adapter (one file a suite) takes the bare environment, and what is here makes of it an `Env` whose last observations
are the true ones and whose time limit is a truncation. No fork of a package is needed for that.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, traced_once, transition
from podium.envs import wrappers
from podium.ranges import check_value, did_you_mean, is_integer
from podium.types import Array, ArraySpec, EnvSpec, Key, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class Options:
    """What every environment of a suite may be made with.

    Args:
      pool_size: start states that are drawn once, of which every later episode takes one, 0 or more; 0 draws a new one
        for every episode, which where a reset is dear takes most of the time. None takes the suite's own number.
        Evaluation always draws new ones.
      action_repeat: steps of the environment that an action is taken for, at least 1; rewards are summed.
      random_first_length: cut the first episode of each environment of a run after a random number of steps, so that
        not all time out in the same step.
      show_last_action: observe the last action and its reward too.

    Raises:
      ValueError: for a value of the wrong type or out of range.
    """

    pool_size: int | None = None
    action_repeat: int = 1
    random_first_length: bool = False
    show_last_action: bool = False

    def __post_init__(self) -> None:
        if self.pool_size is not None and not is_integer(self.pool_size, 0):
            raise ValueError(f"pool_size={self.pool_size!r} must be an integer of 0 or more; 0 draws fresh resets.")
        if not is_integer(self.action_repeat, 1):
            raise ValueError(f"action_repeat={self.action_repeat!r} must be an integer of 1 or more.")
        for name in ("random_first_length", "show_last_action"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")

    def wrap(self, env: Env, pool_size: int) -> Env:
        """Return the environment with what was asked for; `pool_size` is the suite's own number.

        Its functions are compiled as a whole also where they are called outside of `jax.jit`: operation by operation a
        step of a simulator takes a minute.
        """
        env = wrappers.action_repeat(env, self.action_repeat)
        if self.show_last_action:
            env = wrappers.show_last_action(env)
        if self.random_first_length:
            env = wrappers.random_first_length(env)
        return traced_once(env)._replace(pool_size=pool_size if self.pool_size is None else self.pool_size)


OPTIONS = tuple(field.name for field in dataclasses.fields(Options))


def check_name(name: str, known: Sequence[str], what: str) -> None:
    """Raise ValueError for a name that a suite has not, with the nearest ones that it has.

    Args:
      name: with the prefix.
      known: with the prefix.
      what: the suite, for people.
    """
    if name in known:
        return
    plain = {other.casefold(): other for other in known}
    near = [plain[match] for match in difflib.get_close_matches(name.casefold(), plain, n=3, cutoff=0.6)]
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"{what} has no environment {name!r}.{hint} `podium list environments` lists them.")


def split_options(name: str, options: Mapping[str, Any], own: Sequence[str]) -> tuple[Options, dict[str, Any]]:
    """Split what an environment is made with into the options of all suites and its own.

    Raises:
      ValueError: for an option that it has not, with the nearest one that it has, or a bad value of a shared one.
    """
    known = [*own, *OPTIONS]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known, 0.5)
            raise ValueError(f"{name} has no option {option!r}.{hint} It has: {', '.join(known)}.")
    shared = Options(**{option: value for option, value in options.items() if option in OPTIONS})
    return shared, {option: value for option, value in options.items() if option not in OPTIONS}


def check_limit(option: str, value: Any) -> int:
    """Return a time limit; raises ValueError unless it is an integer of at least 1, and an int32."""
    check_value(option, value, "counts", "an episode has at least one step")
    return int(value)


def like(shapes: PyTree, values: PyTree) -> PyTree:
    """Cast every array to the dtype of `shapes`, a tree of the same structure; none stays weak."""

    def cast(shape: Any, value: Any) -> Array:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return value
        return jnp.asarray(value, shape.dtype)

    return jax.tree.map(cast, shapes, values)


def from_simulator(
    name: str,
    simulator: Any,
    max_steps: int,
    *,
    fails_only: bool,
    render: Callable[[PyTree], np.ndarray] | None = None,
) -> Env:
    """Return a simulator that speaks Brax's protocol (Brax and MuJoCo Playground do) as an `Env`.

    `reset(key) -> state` and `step(state, action) -> state`, where the state has `obs`, `reward`, `done`, `metrics` and
    `info`. Actions lie in [-1, 1], and are clipped to it. The metrics of a step are its `info`.

    Args:
      name: of the environment.
      simulator: the bare one, in no wrapper of its own library.
      max_steps: steps after which an episode is truncated; the simulator knows none.
      fails_only: whether `done` means that the simulator lost its numbers, and nothing else.
      render: `(state of the simulator) -> picture`, or None.
    """
    size = int(simulator.action_size)
    action_spec = ArraySpec((size,), np.float32, -1, 1)
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    advance = lambda state, action: simulator.step(_copied(state), jnp.clip(action, -1, 1))
    # A step may return other types than a reset, and weak ones: those of the second step are those of all.
    shapes = jax.eval_shape(lambda key, action: advance(simulator.reset(key), action), key_shape, action_spec.zeros())
    precise = lambda: jax.default_matmul_precision("high")  # A GPU's default loses digits that contacts need.

    def info(state: Any) -> dict[str, Array]:
        lost = {"nonfinite": state.done > 0} if fails_only else {}
        return {name: jnp.asarray(value, jnp.float32) for name, value in state.metrics.items()} | lost

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        with precise():
            state = like(shapes, simulator.reset(key))
        return state, restart(state.obs, info(state))

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        del key  # Simulators keep their own.
        with precise():
            state = like(shapes, advance(state, jnp.asarray(action, jnp.float32)))
        return state, transition(state.obs, state.reward, (state.done > 0) & (not fails_only), info=info(state))

    obs_spec = jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), shapes.obs)
    env = Env(EnvSpec(name, obs_spec, action_spec), reset, step, render)
    return wrappers.time_limit(wrappers.truncate_nonfinite(env), max_steps)


def innermost(state: PyTree) -> PyTree:
    """Return the package's own state, inside those of podium's wrappers."""
    while isinstance(state, wrappers.WrappedState):
        state = state.env
    return state


def _copied(state: PyTree) -> PyTree:
    """Return the state with dictionaries of its own: simulators write into those they are handed."""
    return jax.tree.map(lambda x: x, state)
