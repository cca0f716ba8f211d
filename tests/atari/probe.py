"""Cartridges of our own, made at random, for the corners that the games do not reach.

From the folder of tests: `python -m atari.probe instructions 0 50` compares the probes of seeds 0 to 49.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np

from . import compare, oracle
from .cpu import MNEMONICS, addressing_mode
from .scalar import WRITE_NAMES, Environment

ORIGIN = 0xF000
VSYNC, VBLANK, WSYNC = 0x00, 0x01, 0x02
LDA_IMMEDIATE, STA_ZERO_PAGE = 0xA9, 0x85


def store(register: int, value: int) -> bytes:
    """Return the code of five cycles that writes a register of the TIA."""
    return bytes([LDA_IMMEDIATE, value & 0xFF, STA_ZERO_PAGE, register])


def wait_lines(count: int) -> bytes:
    """Return code that waits for the end of this many lines."""
    return bytes([STA_ZERO_PAGE, WSYNC]) * count


def cartridge(setup: bytes, body: bytes, size: int = 4096) -> bytes:
    """Return an image that runs `setup` once, then for ever a vertical sync of three lines and `body`."""
    start = b"\x78\xd8\xa2\xff\x9a" + setup
    frame = store(VSYNC, 2) + wait_lines(3) + store(VSYNC, 0) + body
    loop = ORIGIN + len(start)
    code = start + frame + bytes([0x4C, loop & 0xFF, loop >> 8])
    assert len(code) <= 0xFE0, len(code)
    image = bytearray(code.ljust(4096, b"\xea"))
    image[0xFFA:] = bytes([ORIGIN & 0xFF, ORIGIN >> 8]) * 3
    return bytes(image) * (size // 4096)


# ---- random bodies ---------------------------------------------------------------------------------------------------

LEFT_OUT = ("JAM", "BRK", "JSR", "RTI", "RTS", "JMP")  # They would leave the path.


def random_instructions(rng: random.Random, size: int = 3700) -> bytes:
    """Return a straight line of random instructions, undocumented ones too, working on RAM, ROM, TIA and RIOT."""
    code = b""
    while len(code) < size:
        kind = rng.random()
        if kind < 0.1:  # Registers and flags from known bytes, or they soon are all 0.
            code += bytes([rng.choice((0xA9, 0xA2, 0xA0)), rng.randrange(256)])
            continue
        if kind < 0.14:
            code += bytes([LDA_IMMEDIATE, rng.randrange(256), 0x48, 0x28])  # To the status by the stack.
            continue
        if kind < 0.17:
            code += bytes([0xA2, rng.choice((0xFF, 0xF0, 0xC0, 0x90)), 0x9A])
            continue
        opcode = rng.randrange(256)
        mode = addressing_mode(opcode)
        if MNEMONICS[opcode] in LEFT_OUT:
            continue
        if mode in ("implied", "accumulator"):
            code += bytes([opcode])
        elif mode == "immediate":
            code += bytes([opcode, rng.randrange(256)])
        elif mode == "relative":
            code += bytes([opcode, 1, 0xE8])  # Over an INX.
        elif mode.startswith("absolute"):
            ram = 0x80 + rng.randrange(128)
            riot = rng.choice((0x280, 0x281, 0x282, 0x283, 0x284, 0x285, 0x294, 0x295, 0x296, 0x297))
            rom = ORIGIN + rng.randrange(0x1000)
            address = rng.choice((ram, ram, rom, rom, riot, riot, rng.randrange(3, 0x40)))
            code += bytes([opcode, address & 0xFF, address >> 8])
        else:
            code += bytes([opcode, rng.randrange(0x80, 0x100) if rng.random() < 0.9 else rng.randrange(3, 0x40)])
    return code


def random_registers(rng: random.Random, size: int = 3700) -> bytes:
    """Return random writes and reads of TIA registers at random cycles, over most of a frame's lines."""
    favourites = [k for k, name in enumerate(WRITE_NAMES) if not name.startswith(("aud", "vsync", "rsync", "wsync"))]
    values = (0, 0xFF, 0x10, 0x80, 0x55)
    code = wait_lines(10)
    while len(code) < size:
        kind = rng.random()
        if kind < 0.12:
            code += wait_lines(rng.choice((1, 1, 2)))
        elif kind < 0.3:
            code += rng.choice((b"\xea", b"\x24\x80", b"\x48\x68", b"\xea\xea\xea")) * rng.randrange(1, 3)
        elif kind < 0.4:
            code += bytes([0xA5, rng.randrange(0x10), STA_ZERO_PAGE, rng.randrange(0x84, 0xD0)])
        elif kind < 0.43:
            code += store(0x01, rng.choice((0, 0, 0, 0x02, 0x80, 0x40)))
        else:
            register = rng.choice(favourites)
            if register != 0x01:
                code += store(register, rng.choice(values) if rng.random() < 0.3 else rng.randrange(256))
            if register == 0x2A and rng.random() < 0.5:
                code += wait_lines(1)
            if register == 0x2C and rng.random() < 0.8:
                code = code[:-4]  # Collisions are more interesting uncleared.
    return code


def random_games(rng: random.Random, size: int = 3700) -> bytes:
    """Return random instructions and random registers, mixed; frames may end anywhere."""
    code = b""
    while len(code) < size:
        make = rng.choice((random_instructions, random_registers))
        code += make(rng, rng.randrange(20, 400))
        if rng.random() < 0.05:
            code += store(VSYNC, 2) + wait_lines(1) + b"\xea" * rng.randrange(30) + store(VSYNC, 0)
    return code


BODIES: dict[str, Callable[[random.Random], bytes]] = {
    "instructions": random_instructions,
    "registers": random_registers,
    "games": lambda rng: random_games(rng, 3300),
}


# ---- comparing -------------------------------------------------------------------------------------------------------


def play_both(image: bytes, num_frames: int = 3, name: str = "amidar", scheme: str = "4K") -> list[str]:
    """Run an image of our own in ale-py and the scalar core; return the differences after the first frame with any."""
    game = oracle.games()[name] | {"bank": scheme}
    ale, environment = oracle.make_cartridge(image, name), Environment(image, game)
    for count in range(num_frames):
        oracle.act(ale, 0)
        environment.act(0)
        found = []
        state = compare.state_differences(ale, environment)
        if state:
            found.append(f"state {state}")
        ram, ours = oracle.ram(ale), environment.ram()
        found += [f"${k + 128:02X}: {a:02X} {b:02X}" for k, (a, b) in enumerate(zip(ram, ours, strict=True)) if a != b]
        theirs, picture = oracle.screen(ale), environment.screen()
        if theirs.shape != picture.shape:
            found.append(f"screens of {theirs.shape} and {picture.shape}")
        elif len(wrong := np.argwhere(theirs != picture)):
            pixels = [(*map(int, at), int(theirs[*at]), int(picture[*at])) for at in wrong[:5]]
            found.append(f"screen in {len(wrong)} pixels: row, column, theirs, ours {pixels}")
        if found:
            return [f"frame {count}", *found]
    return []


def random_probe(kind: str, seed: int) -> bytes:
    """Return a random cartridge of a kind in `BODIES`."""
    rng = random.Random(f"{kind} {seed}")
    return cartridge(b"", BODIES[kind](rng))


def main() -> int:
    """Compare the random probes asked for."""
    kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    failed = 0
    for seed in range(first, last):
        if found := play_both(random_probe(kind, seed)):
            failed += 1
            print(seed, *found[:6], sep="\n    ", flush=True)
    print(f"{failed} of {last - first} probes differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
