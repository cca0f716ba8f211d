"""The batched core against the scalar one on cartridges made at random, which go where games do not."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atari import probe
from atari.cpu import MNEMONICS
from atari.scalar import Console
from podium.envs.atari import machine, opcodes
from podium.envs.atari.cartridges import Cartridge, Cartridges
from podium.envs.atari.controls import NEVER, Controls

FRAMES = 4


def differences(images: list[tuple[bytes, str]]) -> list[str]:
    """Run images with their schemes in both cores, each in a lane of its own, and return where they differ."""
    consoles = [Console(image, scheme) for image, scheme in images]
    cartridges = Cartridges([Cartridge(image, scheme) for image, scheme in images])
    which = jnp.arange(len(images), dtype=jnp.int32)
    full = lambda value: jnp.full(len(images), value, jnp.int32)
    controls = Controls(full(0xFF), full(0x3F), (full(0x80), full(0x80)), (full(NEVER),) * 4, full(0))
    ram = np.zeros((len(images), cartridges.memory), np.uint8)
    ram[:, :128] = [list(console.ram) for console in consoles]
    for lane, console in enumerate(consoles):
        if hasattr(console.cartridge, "extra_ram"):
            ram[lane, 128:] = list(console.cartridge.extra_ram)
    timers = jnp.asarray([console.timer for console in consoles], jnp.int32)
    state = machine.system_reset(machine.power_on(jnp.asarray(ram)), cartridges, which, timers)
    everywhere = jnp.ones(len(images), bool)

    @jax.jit
    def frame(state: machine.Machine) -> Any:
        return machine.frame(cartridges, state, which, controls, everywhere, jnp.ones((), bool))

    found: list[str] = []
    alive = set(range(len(images)))
    for number in range(FRAMES):
        state, screens = frame(state)
        for lane in sorted(alive):
            console = consoles[lane]
            console.frame()
            if bytes(np.asarray(state.ram[lane][:128]).tobytes()) != bytes(console.ram):
                found.append(f"cartridge {lane}, frame {number}: RAM")
                alive.remove(lane)
            # What a frame leaves undrawn shows older frames in the scalar core, and is black here.
            drawn = console.fill
            ours, theirs = np.asarray(screens[lane]).reshape(-1)[:drawn], console.screen().reshape(-1)[:drawn]
            if not console.partial and not (ours == theirs).all():
                found.append(f"cartridge {lane}, frame {number}: {(ours != theirs).sum()} pixels")
    return found


def image(kind: str, seed: int) -> tuple[bytes, str]:
    """Return a random cartridge that does nothing of what the batched core leaves out."""
    rng = random.Random(seed)
    if kind == "registers":
        body = probe.random_registers(rng)
    else:
        ignored = [MNEMONICS[code] for code in opcodes.IGNORED]
        body = probe.random_instructions(rng, left_out=ignored, wild_pointers=False)
    return probe.cartridge(probe.store(probe.VBLANK, 0), body), "4K"


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_random_cartridges_run_as_in_the_scalar_core(count: int) -> None:
    kinds = "instructions", "registers"
    assert differences([image(kind, seed) for kind in kinds for seed in range(count)]) == []


@pytest.mark.slow
def test_cartridges_of_one_fact_each_run_as_in_the_scalar_core() -> None:
    """Every scheme in one batch, the end of frames by cap and by overflow, timers, ports, resets after HMOVE."""
    left_out = "star", "PAL"
    names = [name for name in probe.SINGLE if name not in left_out]
    assert differences([(make(), scheme) for make, _, scheme in map(probe.SINGLE.__getitem__, names)]) == []
