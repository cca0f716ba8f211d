"""The scalar core equals ale-py: RAM, screens, rewards and the machine's state, in games and in probes of our own."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')

from atari import compare, cpu, oracle, probe, scalar

GAMES = sorted(oracle.games())


def check_states(rom: str, num_frames: int) -> None:
    """Compare the machines' whole states after loading and after some frames."""
    ale, environment = compare.make_both(rom)
    for action in [None, *random.Random(rom).choices(environment.game["minimal_actions"], k=num_frames)]:
        if action is not None:
            rewards = oracle.act(ale, action), environment.act(action)
            assert not compare.differences(ale, environment, rewards)
        assert not compare.state_differences(ale, environment)


@pytest.mark.parametrize("rom", ["pong", "jamesbond"])
def test_games_from_power_on(rom: str):
    check_states(rom, 20)


@pytest.mark.slow
@pytest.mark.parametrize("rom", GAMES)
def test_every_game(rom: str):
    check_states(rom, 20)
    assert compare.compare(rom, 200, repeat_action_probability=0.25) == (200, [])


@pytest.mark.slow
@pytest.mark.parametrize("rom", ["pong", "berzerk", "double_dunk"])
def test_frame_skip(rom: str):
    assert compare.compare(rom, 40, frame_skip=4, repeat_action_probability=0.25) == (40, [])


@pytest.mark.parametrize("kind", probe.BODIES)
def test_random_probes(kind: str):
    assert not probe.play_both(probe.random_probe(kind, 18))


@pytest.mark.slow
@pytest.mark.parametrize("kind", probe.BODIES)
def test_many_random_probes(kind: str):
    for seed in range(30):
        assert not probe.play_both(probe.random_probe(kind, seed)), seed


FAST_PROBES = ["no sync", "PAL", "jam", "overflow", "F8", "F6"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_PROBES else pytest.mark.slow) for name in probe.SINGLE]
)
def test_probes_of_one_fact(name: str):
    assert not probe.play_single(name)


@pytest.mark.slow
@pytest.mark.parametrize("rom", ["pong", "breakout", "amidar", "surround"])
@pytest.mark.parametrize("dump_first", [True, False])
def test_ports_with_the_games_own_controllers(rom: str, dump_first: bool):
    """Code in RAM reads the ports: the controllers belong to the cartridge, and a probe of our own has joysticks."""
    ale, environment = compare.make_both(rom)
    code = probe.ports_from_ram(dump_first)
    oracle.run_from_ram(ale, code)
    environment.console.ram[: len(code)] = code
    environment.console.PC = 0x80
    for action in [0, 3, 3, 3, 4, 4, 4, 4, 4, 1, 11, 12, 2, 5, 0] + [4] * 20 + [3] * 40:
        oracle.act(ale, action)
        environment.act(action)
        assert oracle.ram(ale) == environment.ram()


def test_trace_follows_the_program():
    """A short program by hand: LDA #$7F, ADC #1 and a store to COLUBK."""
    code = bytes([0xA9, 0x7F, 0x69, 0x01, 0x85, 0x09])
    image = bytearray(code.ljust(4096, b"\xea"))
    image[0xFFC:] = bytes([0x00, 0xF0]) * 2
    console = scalar.Console(bytes(image))
    console.trace, console.accesses = [], []
    for _ in range(3):
        console.traced_step()
    assert console.trace == [
        # T, PC, opcode, A, X, Y, SP, P, bus; adding 1 to $7F sets N and V.
        (2, 0xF000, 0xA9, 0x7F, 0, 0, 0xFF, 0x30, 0x7F),
        (4, 0xF002, 0x69, 0x80, 0, 0, 0xFF, 0xF0, 0x01),
        (7, 0xF004, 0x85, 0x80, 0, 0, 0xFF, 0xF0, 0x80),
    ]
    assert console.accesses == [(7, "w", 0x09, 0x80)]


def test_cycles_of_documented_opcodes():
    """The sum over the 151 documented opcodes, and the one oddity."""
    assert [cpu.CYCLES[opcode] for opcode in (0x00, 0x20, 0x6C, 0x91, 0xB1, 0x1E, 0x36, 0x48, 0x28, 0xA7)] == [
        7, 6, 5, 6, 5, 7, 6, 3, 4, 4,
    ]  # fmt: skip
