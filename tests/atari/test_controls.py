"""The console's ports hold what ale-py puts there, read by a program of ours that runs inside the real games."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.envs.atari import controls
from podium.envs.atari.controls import ALWAYS, KNOB_CENTRE, KNOB_HIGH, KNOB_LOW, NEVER
from podium.envs.atari.games import GAMES, find

NAMES = ["Amidar", "Breakout", "Pong", "Skiing", "Surround", "WizardOfWor"]
"""Every kind of wiring and of legal actions."""


def ports(game, action, knob=KNOB_CENTRE, **switches):
    """Return what the console's program reads of INPT0-5, port A and port B, the paddles' capacitors being full."""
    read = controls.controls(game, jnp.int32(0), jnp.int32(action), jnp.int32(knob), **switches)
    pots = [128 if charge >= 0 else charge & 128 for charge in map(int, read.charge)]
    return [*pots, *map(int, read.fire), int(read.port_a), int(read.port_b)]


def ports_program() -> bytes:
    """Leave the ports at $F0-$F7, once a frame, more than the longest charging time after the dump ended."""
    wait = bytes([0xA0, 210, 0x85, 2, 0x88, 0xD0, 0xFB])  # 210 lines are 15,960 cycles.
    lines = bytes([0xA2, 5, 0xB5, 0x38, 0x29, 0x80, 0x95, 0xF0, 0xCA, 0x10, 0xF7])
    bytes_ = bytes([0xAD, 0x80, 2, 0x85, 0xF6, 0xAD, 0x82, 2, 0x85, 0xF7])
    frame = bytes([0xA9, 2, 0x85, 0, 0x85, 2, 0x85, 2, 0x85, 2, 0xA9, 0, 0x85, 0])
    dump = bytes([0xA9, 0x80, 0x85, 1, 0x85, 2, 0xA9, 0, 0x85, 1])
    return frame + dump + wait + lines + bytes_ + bytes([0x4C, 0x80, 0])


@pytest.mark.parametrize("name", NAMES)
def test_ports(name, ale):
    game = find(name)
    box = ale.of(game)
    box.run_in_ram(ports_program())
    box.act()
    for action in [*range(18), *reversed(range(18))]:
        box.act(action)
        assert list(box.ram()[0x70:0x78]) == ports(game, action), action
        assert not box.ale.game_over()


def test_difficulty_and_switches(ale):
    game = find("Amidar")
    box = ale.of(game)
    for difficulty in box.ale.getAvailableDifficulties():
        box.ale.setDifficulty(difficulty)
        box.ale.reset_game()
        box.run_in_ram(ports_program())
        box.act()
        box.act()
        assert box.ram()[0x77] == ports(game, 0, difficulty=difficulty)[-1]
    assert [ports(game, 0, **held)[-1] for held in ({}, {"reset": True}, {"select": True})] == [0x3F, 0x3E, 0x3D]
    assert ports(game, 0, difficulty=3, reset=True, select=True)[-1] == 0xFC


def charging_program(pin: int) -> bytes:
    """Count at $F8 (low) and $F9 the turns of ten cycles until a paddle's pin is charged, once a frame."""
    frame = bytes([0xA9, 2, 0x85, 0, 0x85, 2, 0x85, 2, 0x85, 2, 0xA9, 0, 0x85, 0])
    dump = bytes([0xA2, 0, 0xA0, 0, 0xA9, 0x80, 0x85, 1, 0x85, 2, 0xA9, 0, 0x85, 1])
    poll = bytes([0x24, 0x38 + pin, 0x30, 6, 0xE8, 0xD0, 0xF9, 0xC8, 0xD0, 0xF6])  # BIT BMI INX BNE INY BNE
    store = bytes([0x86, 0xF8, 0x84, 0xF9])
    lines = bytes([0xA2, 30, 0x85, 2, 0xCA, 0xD0, 0xFB])
    return frame + dump + poll + store + lines + bytes([0x4C, 0x80, 0])


def turns(cycles: int) -> int:
    """Return what the program above counts: turns take 10 cycles, the 256th of each round 4 more (INY, BNE)."""
    count, at = 0, 3  # The first BIT reads 3 cycles after the dump ended.
    while not at > cycles:
        count += 1
        at += 10 if count % 256 else 14
    return count


@pytest.mark.parametrize(("name", "pin"), [("Breakout", 0), ("Pong", 1)])
def test_charging_follows_the_knob_in_the_same_frame(name, pin, ale):
    game = find(name)
    rng = np.random.default_rng(0)
    held = np.concatenate([np.repeat(rng.integers(0, 18, 12), 4), np.repeat([4, 3, 12, 4], 36)])
    step = jax.jit(lambda action, knob: controls.controls(game, jnp.int32(0), action, knob))
    box = ale.of(game)
    box.run_in_ram(charging_program(pin))
    box.act()
    knob, counts = jnp.int32(KNOB_CENTRE), set()
    for action in map(int, held):
        box.act(action)
        read = step(jnp.int32(action), knob)
        knob = read.knob
        assert int(knob) == box.knobs()[0]
        ram = box.ram()
        count = int(ram[0x78]) + 256 * int(ram[0x79])
        assert count == turns(int(read.charge[pin])), (action, int(knob))
        assert int(read.charge[1 - pin]) == 7783
        counts.add(count)
        assert not box.ale.game_over()
    assert len(counts) > 60 and KNOB_LOW <= int(knob) <= KNOB_HIGH


def test_partners_paddle_stands_in_the_middle(ale):
    for name, pin in (("Breakout", 1), ("Pong", 0)):
        box = ale.of(find(name))
        box.run_in_ram(charging_program(pin))
        for action in (0, 4, 4, 4):
            box.act(action)
        assert int(box.ram()[0x78]) + 256 * int(box.ram()[0x79]) == turns(7783)


def test_charging_time_is_exact_in_32_bits():
    knob = np.arange(0, 1_000_001, dtype=np.int32)
    np.testing.assert_array_equal(jax.jit(controls.charge_cycles)(knob), 1904 * knob.astype(np.int64) // 100_000)


def test_pins_without_a_paddle():
    read = {name: controls.controls(find(name), 0, jnp.int32(3), jnp.int32(KNOB_CENTRE)) for name in NAMES}
    assert tuple(map(int, read["Amidar"].charge)) == (NEVER,) * 4
    assert tuple(map(int, read["Breakout"].charge[2:])) == (NEVER,) * 2
    assert tuple(map(int, read["Pong"].charge[2:])) == (ALWAYS,) * 2
    assert int(read["Amidar"].knob) == KNOB_CENTRE
    assert int(read["Pong"].knob) == int(read["Breakout"].knob) == KNOB_CENTRE - 23_000


def test_batch_of_several_games_is_each_game_alone():
    rng = np.random.default_rng(0)
    which, action = (rng.integers(0, high, (7, 300)).astype(np.int32) for high in (len(GAMES), 18))
    knob = rng.integers(KNOB_LOW, KNOB_HIGH + 1, which.shape).astype(np.int32)
    reset, select = rng.integers(0, 2, (2, *which.shape)).astype(bool)
    mixed = jax.jit(lambda *x: controls.controls(GAMES, *x[:3], reset=x[3], select=x[4]))(
        which, action, knob, reset, select
    )
    assert all(leaf.shape == which.shape and leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(mixed))
    for name in NAMES:
        rows = which == GAMES.index(find(name))
        alone = controls.controls(find(name), None, action, knob, reset=reset, select=select)
        jax.tree.map(lambda x, y, r=rows: np.testing.assert_array_equal(x[r], y[r]), mixed, alone)
