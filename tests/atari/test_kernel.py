"""The kernel runs frames as the XLA back end does, interpreted here, and can be lowered for GPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.envs.atari import games, kernel, machine
from podium.envs.atari.controls import controls
from podium.envs.atari.emulator import Emulator, fresh_knob
from podium.envs.atari.machine import Machine
from podium.envs.atari.roms import find_rom


class Batch:
    """Consoles just switched on, lanes of several games in turn."""

    def __init__(self, names: tuple[str, ...], lanes: int):
        chosen = tuple(games.find(name) for name in names)
        try:
            images = tuple(find_rom(game, None) for game in chosen)
        except FileNotFoundError as error:
            pytest.skip(str(error))
        self.emulator = Emulator(chosen, images)
        self.which = jnp.arange(lanes, dtype=jnp.int32) % len(names)
        self.random = np.random.RandomState(0)
        cartridges = self.emulator.cartridges
        ram = self.random.randint(0, 256, (lanes, cartridges.memory))
        timer = self.random.randint(25, 100, lanes)
        blank = machine.power_on(jnp.asarray(ram, jnp.uint8))
        self.machine = machine.system_reset(blank, cartridges, self.which, jnp.asarray(timer, jnp.int32))

    def program(self, frame: Callable[..., Any]) -> Callable[..., Any]:
        def run(before: Machine, knob: Any, action: Any, active: Any, draws: Any) -> Any:
            held = controls(self.emulator.games, self.which, action, knob)
            after, screens = frame(self.emulator.cartridges, before, self.which, held, active, draws)
            return after, jnp.where(active, held.knob, knob), screens

        return run

    def inputs(self) -> tuple[Any, ...]:
        """Return what a frame is run with; each time another action in some of the lanes."""
        shape = self.which.shape
        action = self.random.randint(0, 18, shape).astype(np.int32)
        return action, self.random.rand(*shape) < 0.9, np.bool_(self.random.rand() < 0.5)


def compare(names: tuple[str, ...], lanes: int, frames: int) -> Batch:
    """Run frames on both back ends; return the batch after them."""
    batch = Batch(names, lanes)
    carry = batch.machine, fresh_knob(batch.which)
    example = *carry, *batch.inputs()
    compiled = [jax.jit(batch.program(frame)).lower(*example).compile() for frame in (machine.frame, kernel.frame)]
    wants = gots = carry
    for number in range(frames):
        inputs = batch.inputs()
        *wants, want = compiled[0](*wants, *inputs)
        *gots, got = compiled[1](*gots, *inputs)
        same = functools.partial(_assert_same, number)
        jax.tree.map_with_path(same, (*wants, want), (*gots, got))
    batch.machine = gots[0]
    return batch


def _assert_same(number: int, path: Any, want: Any, got: Any) -> None:
    np.testing.assert_array_equal(got, want, f"{jax.tree_util.keystr(path)} after frame {number}")


def test_equals_xla():
    # Montezuma's Revenge switches four banks, and all but Pong read collisions in a frame.
    batch = compare(("Pong", "MontezumaRevenge", "Seaquest"), lanes=5, frames=8)
    assert np.asarray(batch.machine.processor.collisions).any(), "something has met something else"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Pong", "Seaquest", "MsPacman"])
def test_one_game_equals_xla(name):
    compare((name,), lanes=33, frames=40)


@pytest.mark.slow
def test_every_game_equals_xla():
    names = tuple(game.name for game in games.GAMES)
    batch = compare(names, lanes=len(names), frames=12)
    assert set(batch.emulator.cartridges.lanes(batch.which).schemes) == {"2K", "4K", "F8", "F6", "E0", "FE"}


def lower_for_cuda(batch: Batch) -> str:
    """Return the program as it is handed to a GPU's compiler; no GPU is needed."""
    frame = functools.partial(kernel.frame, interpret=False)
    carry = batch.machine, fresh_knob(batch.which)
    with _pretended_device():
        traced = jax.jit(batch.program(frame)).trace(*carry, *batch.inputs())
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _pretended_device() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which newer versions of JAX know what GPU is meant; others take the oldest that will do."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # Since JAX 0.11.
@pytest.mark.parametrize(
    "names", [pytest.param(("Pong",), marks=pytest.mark.slow), ("Pong", "MontezumaRevenge", "Solaris", "Robotank")]
)
def test_lowers_for_cuda(names):
    text = lower_for_cuda(Batch(names, lanes=64))
    assert text.count("__gpu$xla.gpu.triton") == 1, "the whole frame is one kernel"
    for expected in ("num_warps = 1 : i32", "grid_x = 2 : i32", "output_operand_alias"):
        assert expected in text, expected
