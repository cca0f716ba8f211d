"""The environments of Brax (Freeman et al. 2021), named `brax/ant`, as `podium.env.Env`.

The physics is Brax's "spring" by default, which is fast and compiles in seconds; "positional" and "generalized" are
options (the last is Brax's own default: 40 s to compile a pendulum, and slow). The option "mjx" is MuJoCo's physics in
Brax's tasks; `mjx/NAME` are the tasks of MuJoCo Playground. Of Brax only its trainers are maintained still, which
cannot run on JAX 0.10: podium uses the environments alone. Neither can its swimmer, whose water calls jax.numpy.clip
by an argument's old name; `mjx/SwimmerSwimmer6` is one that can.

Brax's own episode and reset wrappers are not used: they begin every episode of an environment in the same state, and
lose the last observation. Here a time limit is a truncation, and what Brax calls done a termination.

Options of `make`: `episode_length` (1,000 steps, as Brax has it), `backend`, the arguments of the task's constructor,
such as `terminate_when_unhealthy`, and those of `podium.envs.suites.Options`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podium.env import Env
from podium.envs import mujoco_pictures, suites
from podium.envs.simulators import import_simulator
from podium.ranges import check_type
from podium.types import PyTree

PREFIX = "brax/"
BACKENDS = ("spring", "positional", "generalized", "mjx")
POOL_SIZE = 1024

_TASKS = (
    "ant",
    "fast",
    "halfcheetah",
    "hopper",
    "humanoid",
    "humanoidstandup",
    "inverted_double_pendulum",
    "inverted_pendulum",
    "pusher",
    "reacher",
    "walker2d",
)


def names() -> list[str]:
    """List the environments."""
    return [PREFIX + task for task in _TASKS]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: `episode_length`, `backend`, further arguments of Brax's constructor, and `podium.envs.suites.Options`.

    Returns:
      An `Env` with actions in [-1, 1] that does not reset itself.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where Brax is not installed.
    """
    suites.check_name(name, names(), "Brax")
    library = _import(name)
    task = library._envs[name.removeprefix(PREFIX)]
    constructor = _constructor_options(task)
    shared, own = suites.split_options(name, options, ["episode_length", "backend", *constructor])
    length = suites.check_limit("episode_length", own.pop("episode_length", 1000))
    backend = own.pop("backend", "spring")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}; use 'spring'.")
    _check_options(name, own, constructor)
    simulator = _construct(name, task, {**own, **({} if name == PREFIX + "fast" else {"backend": backend})})
    env = suites.from_simulator(name, simulator, length, fails_only=False, render=_renderer(name, simulator))
    return shared.wrap(env, POOL_SIZE)


def html(env: str, states: Sequence[PyTree], **options: Any) -> str:
    """Return a page that shows an episode in three dimensions, in any browser.

    Args:
      env: name of the environment.
      states: of it, one a step, as `podium.commands.replay.play` keeps them.
      **options: that the environment was made with.

    Raises:
      ValueError: as `make` does, and for `brax/fast`, which has no body.
    """
    suites.check_name(env, names(), "Brax")
    library = _import(env)
    task = library._envs[env.removeprefix(PREFIX)]
    if env == PREFIX + "fast":
        raise ValueError(f"{env} has no body to show; use another.")
    constructor = _constructor_options(task)
    own = suites.split_options(env, options, ["episode_length", "backend", *constructor])[1]
    own.pop("episode_length", None)
    backend = own.pop("backend", "spring")
    _check_options(env, own, constructor)
    simulator = _construct(env, task, {**own, "backend": backend})
    render = import_simulator("brax.io.html", env, "brax").render
    return str(render(simulator.sys, [suites.innermost(state).pipeline_state for state in states]))


def _import(name: str) -> Any:
    mujoco_pictures.choose_opengl()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax tells at import that it is no longer maintained; so does this file.
        return import_simulator("brax.envs", name, "brax")


def _constructor_options(task: Any) -> dict[str, Any]:
    """Return what Brax's constructor takes, by name, and the defaults."""
    parameters = inspect.signature(task).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {each.name: each.default for each in parameters if each.kind not in kinds and each.name != "backend"}


def _check_options(name: str, options: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise ValueError for an option of another type than its default, which Brax would find out when it runs."""
    for option, value in options.items():
        default = defaults[option]
        if not isinstance(default, tuple):
            check_type(f"{name}: {option}", value, default)
            continue
        if not isinstance(value, tuple | list) or len(value) != len(default):
            raise ValueError(f"{name}: {option}={value!r} must be {len(default)} numbers, as {default!r} is.")
        for each, usual in zip(value, default, strict=True):
            check_type(f"{name}: {option}", each, usual)


def _construct(name: str, task: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return task(**options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"Brax refused {options} for {name}: {error}") from error


def _renderer(name: str, simulator: Any) -> Callable[[PyTree], np.ndarray] | None:
    if name == PREFIX + "fast":  # It has no body.
        return None
    render = mujoco_pictures.make_renderer(simulator.sys.mj_model, name)
    return lambda state: render(state.pipeline_state.q, state.pipeline_state.qd)
