"""The DeepMind Control tasks of MuJoCo Playground (Zakka et al. 2025) on MJX, named `mjx/CartpoleSwingup`.

The simulator is Playground's, its training wrappers are not: they lose the last observation of an episode (their issue
305), so that others train on forks of Playground. podium steps the bare tasks and resets them itself, and needs none.
The tasks end by their time limit alone, which is a truncation. Playground also ends an episode where the physics
returns NaN, as it does in Humanoid and Walker now and then: here such a step is truncated, at the last finite
observation, and counted in the metric `nonfinite_steps`.

Playground's locomotion and manipulation tasks are left out: they fetch their models from the network when first made.

Options of `make`: `episode_length` (1,000 steps); `impl`, which computes the physics; `ctrl_dt` and `sim_dt`, seconds
of a step and of a step of the physics; and those of `podium.envs.suites.Options`.

Playground's own `impl`, "warp", runs on NVIDIA GPUs only and is never taken unasked: its states hold arrays of all
environments together, which batches that are apart cannot share. "jax" runs everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podium.env import Env
from podium.envs import mujoco_pictures, suites
from podium.envs.simulators import import_simulator
from podium.types import PyTree

PREFIX = "mjx/"
IMPLS = ("jax", "warp")
POOL_SIZE = 1024

_TASKS = (
    "AcrobotSwingup",
    "AcrobotSwingupSparse",
    "BallInCup",
    "CartpoleBalance",
    "CartpoleBalanceSparse",
    "CartpoleSwingup",
    "CartpoleSwingupSparse",
    "CheetahRun",
    "FingerSpin",
    "FingerTurnEasy",
    "FingerTurnHard",
    "FishSwim",
    "HopperHop",
    "HopperStand",
    "HumanoidRun",
    "HumanoidStand",
    "HumanoidWalk",
    "PendulumSwingup",
    "PointMass",
    "ReacherEasy",
    "ReacherHard",
    "SwimmerSwimmer6",
    "WalkerRun",
    "WalkerStand",
    "WalkerWalk",
)


def names() -> list[str]:
    """List the environments."""
    return [PREFIX + task for task in _TASKS]


def option_names(name: str) -> list[str]:
    """List what `make(name, ...)` accepts."""
    return ["episode_length", "impl", "ctrl_dt", "sim_dt", *suites.OPTIONS]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: see `option_names`.

    Returns:
      An `Env` with actions in [-1, 1] that does not reset itself.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where MuJoCo Playground is not installed.
    """
    suites.check_name(name, names(), "MuJoCo Playground's DeepMind Control suite")
    shared, own = suites.split_options(name, options, ["episode_length", "impl", "ctrl_dt", "sim_dt"])
    own["impl"] = _check_impl(own.get("impl", "jax"))
    length = suites.check_limit("episode_length", own.pop("episode_length", 1000))
    for option in ("ctrl_dt", "sim_dt"):
        if option in own and not (isinstance(own[option], float) and 0 < own[option] < math.inf):
            raise ValueError(f"{option}={own[option]!r} must be a finite number of seconds above 0.")
    mujoco_pictures.choose_opengl()
    library = import_simulator("mujoco_playground", name, "mjx")
    simulator = library.dm_control_suite.load(name.removeprefix(PREFIX), config_overrides=own)
    _check_times(float(simulator.dt), float(simulator.sim_dt))
    env = suites.from_simulator(name, simulator, length, fails_only=True, render=_renderer(name, simulator))
    return shared.wrap(env, POOL_SIZE)


def _check_times(step: float, physics: float) -> None:
    """Raise ValueError unless a step is whole steps of the physics: Playground rounds, to none for a short one."""
    if step < physics or abs(step / physics - round(step / physics)) > 1e-6:
        raise ValueError(
            f"ctrl_dt={step:g} is no multiple of sim_dt={physics:g}, the seconds of a step of the physics; use "
            f"ctrl_dt={max(1, round(step / physics)) * physics:g}, or give sim_dt too."
        )


def _check_impl(impl: str) -> str:
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is none of {', '.join(IMPLS)}; use 'jax'.")
    if impl == "warp" and jax.default_backend() != "gpu":
        raise ValueError(f"impl='warp' needs an NVIDIA GPU, and JAX runs on {jax.default_backend()} here; use 'jax'.")
    return impl


def _renderer(name: str, simulator: Any) -> Callable[[PyTree], np.ndarray]:
    render = mujoco_pictures.make_renderer(simulator.mj_model, name)
    return lambda state: render(state.data.qpos, state.data.qvel)
