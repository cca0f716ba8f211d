"""Cartridges of our own, made at random, for the corners that the games do not reach.

From the folder of tests: `python -m atari.probe instructions 0 50` compares the probes of seeds 0 to 49.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

import numpy as np

from atari import compare, oracle
from atari.cpu import MNEMONICS, addressing_mode
from atari.scalar import WRITE_NAMES, Environment

ORIGIN = 0xF000
VSYNC, VBLANK, WSYNC = 0x00, 0x01, 0x02
LDA_IMMEDIATE, STA_ZERO_PAGE = 0xA9, 0x85


def store(register: int, value: int) -> bytes:
    """Return the code of five cycles that writes a register of the TIA."""
    return bytes([LDA_IMMEDIATE, value & 0xFF, STA_ZERO_PAGE, register])


def wait_lines(count: int) -> bytes:
    """Return code that waits for the end of this many lines."""
    return bytes([STA_ZERO_PAGE, WSYNC]) * count


def cartridge(setup: bytes, body: bytes, size: int = 4096, origin: int = ORIGIN) -> bytes:
    """Return an image that runs `setup` once, then for ever a vertical sync of three lines and `body`."""
    start = b"\x78\xd8\xa2\xff\x9a" + setup
    frame = store(VSYNC, 2) + wait_lines(3) + store(VSYNC, 0) + body
    loop = origin + len(start)
    code = start + frame + bytes([0x4C, loop & 0xFF, loop >> 8])
    assert origin - ORIGIN + len(code) <= 0xFE0, len(code)
    image = bytearray(bytes(origin - ORIGIN) + code).ljust(4096, b"\xea")
    image[0xFFA:] = bytes([origin & 0xFF, origin >> 8]) * 3
    return bytes(image) * (size // 4096)


# ---- random bodies ---------------------------------------------------------------------------------------------------

LEFT_OUT = ("JAM", "BRK", "JSR", "RTI", "RTS", "JMP")  # They would leave the path.


def random_instructions(
    rng: random.Random, size: int = 3700, left_out: Sequence[str] = (), wild_pointers: bool = True
) -> bytes:
    """Return a straight line of random instructions, undocumented ones too, working on RAM, ROM, TIA and RIOT.

    Args:
      rng: of chances.
      size: bytes, about.
      left_out: mnemonics that there shall be none of.
      wild_pointers: whether pointers may lie in the TIA.
    """
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
        if MNEMONICS[opcode] in (*LEFT_OUT, *left_out):
            continue
        if mode.startswith("(") and not wild_pointers:
            if mode == "(zero page),Y":
                code += bytes([opcode, rng.randrange(0x80, 0xFF)])
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


# ---- cartridges for single facts -------------------------------------------------------------------------------------


def without_sync(body: bytes, setup: bytes = b"") -> bytes:
    """Return an image that repeats `body` and never ends a frame by itself."""
    start = b"\x78\xd8\xa2\xff\x9a" + store(VBLANK, 0) + store(0x09, 0x5A) + setup
    loop = ORIGIN + len(start)
    image = bytearray((start + body + bytes([0x4C, loop & 0xFF, loop >> 8])).ljust(4096, b"\xea"))
    image[0xFFA:] = bytes([ORIGIN & 0xFF, ORIGIN >> 8]) * 3
    return bytes(image)


def many_lines(count: int) -> bytes:
    """Return code that waits for up to 256 lines."""
    return bytes([0xA0, count & 0xFF]) + wait_lines(1) + b"\x88\xd0\xfb"


def wait(cycles: int) -> bytes:
    """Return code that takes 0 or at least 2 cycles and changes nothing that matters."""
    return (b"\x24\x80" if cycles % 2 else b"") + b"\xea" * (cycles // 2 - cycles % 2)


def star(hmm0_at: int = 24) -> bytes:
    """Return an image with the star effect: HMM0 written, 63 clocks after HMOVE if at cycle 24, from 7 to 6."""
    body = store(0x1D, 2) + store(0x2B, 0) + wait_lines(60) + wait(57) + bytes([0x85, 0x12]) + store(0x22, 0x70)
    body += wait_lines(1) + bytes([0x85, 0x2A]) + wait(hmm0_at - 8) + store(0x22, 0x60) + wait_lines(40)
    body += store(0x04, 0x20) + wait_lines(9) + bytes([0x85, 0x2A]) + wait_lines(50)
    return cartridge(store(0x06, 0x0E) + store(0x09, 0x40), body)


def resets_after_hmove() -> bytes:
    """Return an image that resets missiles and ball at several cycles soon after an HMOVE."""
    body = store(0x1D, 2) + store(0x1E, 2) + store(0x1F, 2) + wait_lines(40)
    for hmove_at in (3, 5):
        for distance in range(3, 22):
            if distance != 4:
                for register in (0x12, 0x13, 0x14):
                    body += wait_lines(1) + wait(hmove_at - 3) + bytes([0x85, 0x2A]) + wait(distance - 3)
                    body += bytes([0x85, register])
    colours = store(0x06, 0x0E) + store(0x07, 0x2E) + store(0x08, 0x4E) + store(0x09, 0x60)
    return cartridge(colours + store(0x04, 0x10), body)


def ports() -> bytes:
    """Return an image that counts, for each of INPT0-3, the lines until it is charged, and notes all ports."""
    clear = b"".join(bytes([0x84, cell]) for cell in range(0x84, 0x88))
    body = store(VBLANK, 0x80) + b"\xa0\x00" + clear + bytes([0xA5, 0x08, 0x85, 0x88, 0xA5, 0x0A, 0x85, 0x89])
    body += wait_lines(3) + store(VBLANK, 0) + b"\xa2\xf0"
    line = b"".join(bytes([0xA5, 0x08 + k, 0x10, 0x02, 0xE6, 0x84 + k]) for k in range(4)) + wait_lines(1) + b"\xca"
    body += line + bytes([0xD0, 256 - len(line) - 2]) + b"\xad\x80\x02\x85\x8a\xad\x82\x02\x85\x8b"
    for register in (0x0C, 0x0D, 0x0E, 0x0F):
        body += bytes([0xA5, register, 0x85, 0x80 + register])

    return cartridge(b"", b"\xa0\x00" + body)


def ports_from_ram(dump_first: bool) -> bytes:
    """Return code for $80 that reads INPT0-3 while dumping or not, counts the lines until each is charged, and so on.

    It never synchronises: frames end by their number of lines.
    """
    code = store(VBLANK, 0x80 if dump_first else 0) + b"\xa2\x00"
    code += b"".join(bytes([0xA5, 0x08 + k, 0x85, 0xE0 + k, 0x86, 0xE4 + k]) for k in range(4)) + store(VBLANK, 0)
    start = len(code)
    code += b"".join(bytes([0xA5, 0x08 + k, 0x30, 0x02, 0xE6, 0xE4 + k]) for k in range(4)) + wait_lines(1) + b"\xca"
    code += bytes([0xD0, start - len(code) - 2 & 0xFF])
    code += b"\xad\x80\x02\x85\xe8\xa5\x0c\x85\xe9\xa5\x0d\x85\xea\x4c\x80\x00"
    assert len(code) <= 0x60, len(code)
    return code


def pal() -> bytes:
    """Return an image of 313 and 312 lines in turn, with colours written once and in every frame."""
    colours = store(0x09, 0x43) + store(0x06, 0x20)
    lines = store(0x08, 0x0E) + many_lines(200) + store(0x08, 0x31) + many_lines(105)
    odd = b"\xe6\x84\xa5\x84\x29\x01\xf0\x02" + wait_lines(1)
    return cartridge(colours + store(0x0E, 0xFF) + store(0x1B, 0x5A), odd + lines)


NOW_AND_THEN = b"\xe6\x84\xa5\x84\x29\x03\xd0\x07"  # Skips the next seven bytes three times of four.
LITTLE_TIA = b"\xe6\x84" * 3 + wait_lines(3) + b"\xe6\x85" * 999


def jam() -> bytes:
    """Return an image whose processor stops in the second frame after each reset."""
    test = b"\xe6\x84\xa5\x84\xc9\x62\x90\x01\x02"
    return cartridge(store(0x09, 0x5A), many_lines(100) + test + many_lines(100))


def expired_timer(interval: int) -> bytes:
    """Return an image that reads the timer and its flag often while it expires, and goes on for several frames."""
    body = b"\xad\x84\x02\x85\x84\xad\x85\x02\x85\x85\xa5\x90\xd0\x05\xa9\x09\x8d" + bytes([0x94 + interval, 0x02])
    body += b"\xe6\x90"
    for cell in range(0xA0, 0xF0, 2):
        body += b"\xad\x85\x02" + bytes([0x85, cell]) + b"\xad\x84\x02" + bytes([0x85, cell + 1]) + wait_lines(cell % 5)
    return cartridge(b"\xa9\x00\x85\x90", body)


def banks(hot_spots: list[int], size: int) -> bytes:
    """Return an image of several 4K banks, equal but for a byte each, that reads its hot spots in many ways."""
    body = b""
    cell = 0x84
    for access in (0xAD, 0x8D, 0x2C, 0x0C, 0xEE):  # LDA, STA, BIT, an undocumented NOP, INC.
        for spot in hot_spots:
            body += bytes([access, spot & 0xFF, spot >> 8, 0xAD, 0x00, 0xFE, 0x85, cell])
            cell += 1
    image = bytearray(cartridge(b"", body + many_lines(200), size))
    for bank in range(size // 4096):
        image[4096 * bank + 0xE00] = 0x30 + bank
    return bytes(image)


def extra_ram(hot_spots: list[int], size: int) -> bytes:
    """Return an image of several 4K banks with extra RAM, used in bounds and out of them."""
    body = b""
    for k, spot in enumerate(hot_spots):
        body += bytes([0xAD, spot & 0xFF, spot >> 8, 0xA9, 0x11 * (k + 1), 0x8D, 0x05 + k, 0x10])  # A write,
        body += bytes([0xAD, 0x85 + k, 0x10, 0x85, 0x84 + k, 0xAD, 0xA0 + k, 0x10, 0x85, 0x90 + k])  # reads,
        body += bytes([0xEE, 0x85 + k, 0x10, 0xAD, 0x85 + k, 0x10, 0x85, 0xA0 + k])  # a write where one reads,
        body += bytes([0xAD, 0x05 + k, 0x10, 0x85, 0xB0 + k])  # and a read where one writes.
    code = cartridge(b"", body + many_lines(200), origin=0xF100)
    # Banks that begin with equal bytes make ale-py recognise the scheme.
    return (bytes(256) + code[256:]) * (size // 4096)


SINGLE: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "instruction cap": (lambda: without_sync(b"\xe6\x84"), "amidar", "4K"),
    "instruction cap after some lines": (lambda: without_sync(LITTLE_TIA, wait_lines(99)), "amidar", "4K"),
    "no sync": (lambda: without_sync(wait_lines(1) + b"\xe6\x84"), "amidar", "4K"),
    "overflow": (lambda: cartridge(store(0x09, 0x5A), NOW_AND_THEN + many_lines(0) + many_lines(200)), "amidar", "4K"),
    "star": (star, "amidar", "4K"),
    "no star": (lambda: star(27), "amidar", "4K"),
    "resets after HMOVE": (resets_after_hmove, "amidar", "4K"),
    "joysticks": (ports, "amidar", "4K"),
    "PAL": (pal, "amidar", "4K"),
    "jam": (jam, "amidar", "4K"),
    **{f"timer by {n}": (lambda k=k: expired_timer(k), "amidar", "4K") for k, n in enumerate((1, 8, 64, 1024))},
    "F8": (lambda: banks([0x1FF8, 0xFFF9], 8192), "amidar", "F8"),
    "F8SC": (lambda: extra_ram([0x1FF8, 0xFFF9], 8192), "amidar", "F8SC"),
    "F6SC": (lambda: extra_ram([0x1FF6, 0x1FF7, 0xFFF8, 0x3FF9], 16384), "amidar", "F6SC"),
    "F6": (lambda: banks([0x1FF6, 0x1FF7, 0xFFF8, 0x3FF9], 16384), "amidar", "F6"),
}  # fmt: skip


# ---- comparing -------------------------------------------------------------------------------------------------------


def play_both(image: bytes, actions: Sequence[int] = (0, 0, 0), name: str = "amidar", scheme: str = "4K") -> list[str]:
    """Run an image of our own in ale-py and the scalar core; return the differences after the first frame with any."""
    game = oracle.games()[name] | {"bank": scheme}
    ale, environment = oracle.make_cartridge(image, name), Environment(image, game)
    if oracle.machine_state(ale)["cartridge"] != f"Cartridge{scheme}":
        return []  # ale-py guesses the scheme of an unknown image; about one random one in a hundred misleads it.
    for count, action in enumerate(actions):
        oracle.act(ale, action)
        environment.act(action)
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


def play_single(name: str) -> list[str]:
    """Compare the cartridge of this name in `SINGLE`."""
    make, game, scheme = SINGLE[name]
    return play_both(make(), [0, 0, 0, 0, 3, 3, 3, 1, 2, 4, 5, 11, 12, 0, 0], game, scheme)


def main() -> int:
    """Compare the random probes asked for, or with `single` those of one fact each."""
    if sys.argv[1] == "single":
        for name in sys.argv[2:] or SINGLE:
            print(name, *play_single(name)[:6], sep="\n    ", flush=True)
        return 0
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
