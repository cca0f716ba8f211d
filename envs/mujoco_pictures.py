"""Pictures of MuJoCo's models, as MuJoCo itself draws them; for the suites whose bodies are such models."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from podium.envs.simulators import import_simulator

HEIGHT, WIDTH = 240, 320


def choose_opengl() -> None:
    """Let MuJoCo draw without a screen where there is none; has an effect until `mujoco` is imported."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def make_renderer(model: Any, name: str) -> Callable[[Any, Any], np.ndarray]:
    """Return `(positions, velocities) -> uint8 [H, W, 3]` of a MuJoCo model, by its first camera.

    OpenGL is started with the first picture, in the thread that asks for it. It raises ValueError where there is none.
    """
    started: list[tuple[Any, Any]] = []

    def render(positions: Any, velocities: Any) -> np.ndarray:
        mujoco = import_simulator("mujoco", name, "mjx")
        if not started:
            try:
                started.append((mujoco.Renderer(model, HEIGHT, WIDTH), mujoco.MjData(model)))
            except Exception as error:  # Of many types: MuJoCo's, OpenGL's, Python's.
                raise ValueError(
                    f"{name} cannot be drawn, because MuJoCo finds no OpenGL ({error}); install EGL or OSMesa and set "
                    "MUJOCO_GL=egl or MUJOCO_GL=osmesa."
                ) from error
        renderer, data = started[0]
        data.qpos, data.qvel = np.asarray(positions), np.asarray(velocities)
        mujoco.mj_forward(model, data)
        renderer.update_scene(data, camera=0 if model.ncam else -1)
        return np.array(renderer.render())

    return render
