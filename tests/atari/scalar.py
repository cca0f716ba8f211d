"""A slow, readable Atari 2600 as ale-py emulates it: what the batched core is debugged against.

Section numbers refer to the functional specification. `Console` is the machine, one instruction at a time, with plain
integers for everything; `Environment` adds controllers, resets, rewards and ends by a game's rules.

>>> _player_mask(0b10000001, 0, False) == 1 | 1 << 8 * 7
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from atari.cartridge import WithExtraRam, make_cartridge
from atari.cpu import CYCLES, OPERATIONS

NEVER = 0x7FFFFFFF
MASK32 = 0xFFFFFFFF
CLOCKS, BLANK, WIDTH = 228, 68, 160  # Of a line: all its clocks, those of the blank, and its pixels.
MAX_INSTRUCTIONS = 25_000
BOOT_SEED = 4_753_849

# ---- pictures: a line is 160 bytes, kept as one integer whose byte x says which objects cover pixel x ----------------

P0, P1, M0, M1, BL, PF, RIGHT = (1 << k for k in range(7))  # RIGHT marks pixels 80-159, for the score mode.
LINE_BITS = 8 * WIDTH
LINE_ONES = (1 << LINE_BITS) - 1
RIGHT_HALF = sum(RIGHT << 8 * x for x in range(80, WIDTH))
COPIES = [(0,), (0, 16), (0, 32), (0, 16, 32), (0, 64), (0,), (0, 32, 64), (0,)]
PLAYER_WIDTH = [8, 8, 8, 8, 8, 16, 8, 32]
REVERSED = [int(f"{byte:08b}"[::-1], 2) for byte in range(256)]


def _rotated(mask: int, position: int) -> int:
    """Return a mask drawn at position 0 moved right, wrapping round the line."""
    return (mask << 8 * position | mask >> LINE_BITS - 8 * position) & LINE_ONES


def _mask(pixels: Iterable[int]) -> int:
    return sum(1 << 8 * x for x in set(pixels))


@cache
def _player_mask(pattern: int, number: int, hide_first: bool) -> int:
    """Return the pixels of a player at position 0 (SPEC 7.8)."""
    if number in (5, 7):
        scale = PLAYER_WIDTH[number] // 8
        return 0 if hide_first else _mask(1 + k for k in range(8 * scale) if pattern >> 7 - k // scale & 1)
    copies = COPIES[number][1:] if hide_first else COPIES[number]
    return _mask(offset + k for offset in copies for k in range(8) if pattern >> 7 - k & 1)


@cache
def _missile_mask(width: int, number: int) -> int:
    """Return the pixels of a missile, or the ball with number code 0, at position 0."""
    return _mask(offset + k for offset in COPIES[number] for k in range(width))


@lru_cache(maxsize=4096)
def _playfield_mask(playfield: int, mirrored: bool) -> int:
    """Return the pixels of a playfield: bits 0-3 PF0's upper nibble, 4-11 PF1, 12-19 PF2."""
    half = [*range(4), *range(11, 3, -1), *range(12, 20)]  # PF1 is displayed from its bit 7.
    columns = half + (half[::-1] if mirrored else half)
    return _mask(x for x in range(WIDTH) if playfield >> columns[x // 4] & 1)


@lru_cache(maxsize=4096)
def _colours(colup0: int, colup1: int, colupf: int, colubk: int, score: bool, priority: bool) -> bytes:
    """Return the colour of each set of objects, for `bytes.translate`."""
    table = bytearray(256)
    for objects in range(128):
        field_colour = colupf
        if score and not priority:
            field_colour = colup1 if objects & RIGHT else colup0
        if priority and objects & (PF | BL):
            colour = colupf
        elif objects & (P0 | M0):
            colour = colup0
        elif objects & (P1 | M1) and not (objects & PF and score and not priority and not objects & RIGHT):
            colour = colup1
        elif objects & PF:
            colour = field_colour
        elif objects & BL:
            colour = colupf
        else:
            colour = colubk
        table[objects] = colour
    return bytes(table)


# With just these objects enabled, four pixels that hold none of them are put down at once, even if only the first of
# them were asked for. A later segment draws over the rest, so that this shows only where a frame ends in their middle.
BY_FOURS = {P0, P1, P0 | P1, M0, M1, M0 | M1, BL, P1 | BL, M0 | BL, M1 | BL}
BY_FOURS_WITH_FIELD = {0, P0, P1, BL}  # In the score mode 0 only.

# Collision latches in ale-py's order: two bits for each of CXM0P ... CXM1FB, bit 7 of the register first, then CXBLPF
# (which has one), then CXPPMM.
COLLISION_PAIRS = [
    (M0, P1), (M0, P0), (M1, P0), (M1, P1), (P0, PF), (P0, BL), (P1, PF), (P1, BL),
    (M0, PF), (M0, BL), (M1, PF), (M1, BL), (BL, PF), (P0, P1), (M0, M1),
]  # fmt: skip
COLLISIONS = [
    sum(1 << bit for bit, (one, other) in enumerate(COLLISION_PAIRS) if objects & one and objects & other)
    for objects in range(256)
]


def _collisions(codes: bytes) -> int:
    latches = 0
    for objects in set(codes):
        latches |= COLLISIONS[objects]
    return latches


# ---- the console -----------------------------------------------------------------------------------------------------


class Console:
    """The machine: 6507, RIOT, TIA and a cartridge.

    Attributes are named as in the specification: `T F A X Y SP PC bus was_read L R Q`, and so on. Inputs are constant
    during a frame and are set between frames: `port_a`, `port_b`, `fire` (INPT4 and INPT5, bit 7) and
    `charge_cycles`, the four paddles' cycles of charging (-1 always charged, None a joystick, which reads 0).

    Set `trace` to a list to get `(T, PC, opcode, A, X, Y, SP, P, bus)` after each instruction, `T` and the rest as they
    are then but `PC` that of the instruction itself; set `accesses` to a list to get `(T, "w" or "r", register, value)`
    of every access to the TIA. Both grow until cleared.
    """

    def __init__(
        self, image: bytes, scheme: str = "4K", y_start: int = 34, height: int = 210, hmove_blanks: bool = True
    ):
        self.cartridge = make_cartridge(image, scheme)
        self.y_start, self.height, self.hmove_blanks = y_start, height, hmove_blanks
        self.pal = False
        self.trace: list[tuple[int, ...]] | None = None
        self.accesses: list[tuple[int, str, int, int]] | None = None
        self.port_a, self.port_b = 0xFF, 0x3F
        self.fire = [0x80, 0x80]
        self.charge_cycles: list[int | None] = [None] * 4
        self.power_on()

    # -- starting

    def power_on(self) -> None:
        """Fill RAM and do the first system reset; the cartridge's boot is `Environment`'s (SPEC 10.1)."""
        self.generator = np.random.RandomState(BOOT_SEED)
        self.ram = bytearray(self._draw() & 0xFF for _ in range(128))
        self._draw()
        self.picture_size = WIDTH * 250
        self.partial = self.frame_done = False
        self.system_reset()

    def _draw(self) -> int:
        return int(self.generator.randint(0, 1 << 32, dtype=np.uint32))

    def system_reset(self) -> None:
        """Reset everything but RAM (SPEC 10.2), and whether the last frame was a partial one, which then goes on."""
        self.T = self.F = 0
        self.bus = 0
        self.cartridge.reset()
        # RIOT
        self.timer = 25 + self._draw() % 75
        self.timer_shift = 6
        if isinstance(self.cartridge, WithExtraRam):
            self.cartridge.extra_ram[:] = bytes(self._draw() & 0xFF for _ in range(128))
        self.timer_set = self.timer_expired_at = 0
        self.expired_read = 0
        self.direction_a = 0
        # TIA
        self.place_window()
        self.L = 0
        self.Q = NEVER
        self.lines = 0
        self.vsync = self.vblank = 0
        self.nusiz0 = self.nusiz1 = 0
        self.colup0 = self.colup1 = self.colupf = self.colubk = 0
        self.ctrlpf = self.mirror = 0
        self.refp0 = self.refp1 = 0
        self.playfield = 0
        self.grp0 = self.grp1 = self.old_grp0 = self.old_grp1 = 0
        self.enam0 = self.enam1 = self.enabl = self.old_enabl = 0
        self.hmp0 = self.hmp1 = self.hmm0 = self.hmm1 = self.hmbl = 0
        self.vdelp0 = self.vdelp1 = self.vdelbl = 0
        self.resmp0 = self.resmp1 = 0
        self.collisions = 0
        self.p0 = self.p1 = self.m0 = self.m1 = self.bl = 0
        self.hide_first0 = self.hide_first1 = False
        self.hmove_clock = 0
        self.comb = 0
        self.star = 0
        self.star_counter = 0
        self.star_look = 0  # Missile 0 drawn as at this counter: 1 at least two wide, 2 not at all.
        self.dump = 0
        self.dump_end = 0
        self.line_codes: bytes | None = None  # Which objects cover each pixel; None where registers changed.
        self.by_fours = False
        self.line_collisions = 0
        self.colours: bytes | None = None
        self.picture, self.other_picture = bytearray(self.picture_size), bytearray(self.picture_size)
        # CPU
        self.A = self.X = self.Y = 0
        self.SP = 0xFF
        self.N = self.V = self.D = self.I = self.Z = self.C = 0
        self.was_read = True
        self.jammed = False
        self.PC = self.cartridge.read(0xFFFC) | self.cartridge.read(0xFFFD) << 8

    # -- the CPU's side

    def step(self) -> None:
        """Run one instruction."""
        opcode = self.read(self.PC)
        self.PC = self.PC + 1 & 0xFFFF
        self.T += CYCLES[opcode]
        OPERATIONS[opcode](self)

    def traced_step(self) -> None:
        """Run one instruction and append to `trace`."""
        pc, opcode = self.PC, self.peek(self.PC)
        self.step()
        if self.trace is not None:
            self.trace.append((self.T, pc, opcode, self.A, self.X, self.Y, self.SP, self.status(), self.bus))

    def fetch(self) -> int:
        """Read the byte at PC and advance PC."""
        pc = self.PC
        self.PC = pc + 1 & 0xFFFF
        return self.read(pc)

    def status(self) -> int:
        """Return the status byte as it is pushed."""
        return self.N << 7 | self.V << 6 | 0x30 | self.D << 3 | self.I << 2 | self.Z << 1 | self.C

    def set_status(self, value: int) -> None:
        """Set the six flags from a pulled byte."""
        self.N, self.V, self.D = value >> 7, value >> 6 & 1, value >> 3 & 1
        self.I, self.Z, self.C = value >> 2 & 1, value >> 1 & 1, value & 1

    # -- the bus (SPEC 2)

    def read(self, address: int) -> int:
        """Return the byte a CPU read sees, with all its effects."""
        if address & 0x1000:
            value = self.cartridge.read(address)
        elif not address & 0x80:
            value = self.read_tia(address & 15)
        elif address & 0x200:
            value = self.read_riot(address)
        else:
            value = self.ram[address & 0x7F]
        self.bus = value
        self.was_read = True
        return value

    def write(self, address: int, value: int) -> None:
        """Do a CPU write."""
        if address & 0x1000:
            self.cartridge.write(address, value)
        elif not address & 0x80:
            self.write_tia(address & 0x3F, value)
        elif address & 0x200:
            self.write_riot(address, value)
        else:
            self.ram[address & 0x7F] = value
        self.bus = value
        self.was_read = False

    def peek(self, address: int) -> int:
        """Return an opcode's byte without any effect; 0 where code never is."""
        if address & 0x1000:
            return self.cartridge.peek(address)
        return self.ram[address & 0x7F] if address & 0x280 == 0x80 else 0

    # -- RIOT (SPEC 4)

    def read_riot(self, address: int) -> int:
        """Read a port or the timer; reading an expired timer changes it."""
        register = address & 7
        if register == 0:
            return self.port_a
        if register == 1:
            return self.direction_a
        if register == 2:
            return self.port_b
        if register == 3:
            return 0
        passed = self.T - 1 - self.timer_set & MASK32
        value = self.timer - (passed >> self.timer_shift) - 1
        if register & 1:
            return 0x80 if value < 0 and not self.expired_read else 0
        if value >= 0:
            return value
        length = self.timer << self.timer_shift
        if length - passed - 1 <= -2 and not self.expired_read:
            self.expired_read = 1
            self.timer_expired_at = self.T
        if self.expired_read:
            value = self.timer - (passed >> self.timer_shift) - (self.timer_expired_at - (self.timer_set + length))
        return value & 0xFF

    def write_riot(self, address: int, value: int) -> None:
        """Set the timer or the direction byte."""
        if address & 0x14 == 0x14:
            self.timer = value
            self.timer_shift = (0, 3, 6, 10)[address & 3]
            self.timer_set = self.T
            self.expired_read = 0
        elif address & 7 == 1:
            self.direction_a = value

    # -- TIA: catching up (SPEC 6)

    def catch_up(self, clock: int) -> None:
        """Draw up to a clock, and latch collisions."""
        if clock < self.B or self.L >= self.E or self.L >= clock:
            return
        if clock > self.E:
            clock = self.E
        while clock > self.L:
            start = CLOCKS - self.R
            if clock > self.L + self.R:
                count = self.R
                self.R = CLOCKS
                self.L += count
            else:
                count = clock - self.L
                self.R -= count
                self.L = clock
            dropped = min(count, max(0, BLANK - start))
            start += dropped
            count -= dropped
            if count:
                self.draw(start - BLANK, count)
            if self.comb and start < 76:
                black = min(76 - start, self.picture_size - self.fill)
                self.picture[self.fill : self.fill + black] = bytes(black)
                if count and start + count >= 76:
                    self.comb = 0
            self.fill += count
            if self.R == CLOCKS:
                self.end_line()

    def draw(self, x: int, count: int) -> None:
        """Put pixels x to x + count at the fill position."""
        fill = self.fill
        if self.vblank & 2:
            self.picture[fill : fill + count] = bytes(count)
            return
        codes = self.line_codes or self.make_line()
        if self.line_collisions & ~self.collisions:
            self.collisions |= _collisions(codes[x : x + count])
        if count < WIDTH:
            stop = x + count
            four = stop & ~3
            if stop > four >= x and self.by_fours and not any(code & 31 for code in codes[four : four + 4]):
                count = four + 4 - x
            codes = codes[x : x + count]
        self.picture[fill : fill + count] = codes.translate(self.colours or self.make_colours())

    def make_line(self) -> bytes:
        """Return which objects cover each pixel of a line, by the present registers (SPEC 7.8)."""
        line = RIGHT_HALF
        if self.playfield:
            line |= _playfield_mask(self.playfield, bool(self.mirror)) * PF
        pattern = self.shown_grp0()
        if pattern:
            line |= _rotated(_player_mask(pattern, self.nusiz0 & 7, self.hide_first0), self.p0) * P0
        pattern = self.shown_grp1()
        if pattern:
            line |= _rotated(_player_mask(pattern, self.nusiz1 & 7, self.hide_first1), self.p1) * P1
        if self.enam0 and not self.resmp0 and self.star_look != 2:
            width = 1 << (self.nusiz0 >> 4 & 3 | (self.star_look == 1))
            line |= _rotated(_missile_mask(width, self.nusiz0 & 7), self.m0) * M0
        if self.enam1 and not self.resmp1:
            line |= _rotated(_missile_mask(1 << (self.nusiz1 >> 4 & 3), self.nusiz1 & 7), self.m1) * M1
        if self.shown_enabl():
            line |= _rotated(_missile_mask(1 << (self.ctrlpf >> 4 & 3), 0), self.bl) * BL
        self.line_codes = line.to_bytes(WIDTH, "little")
        objects = self.objects()
        if self.playfield:
            self.by_fours = objects in BY_FOURS_WITH_FIELD and not (objects and self.ctrlpf & 2)
        else:
            self.by_fours = objects in BY_FOURS
        self.line_collisions = _collisions(self.line_codes)
        return self.line_codes

    def make_colours(self) -> bytes:
        """Return the colour of each set of objects, by the present registers."""
        score, priority = bool(self.ctrlpf & 2), bool(self.ctrlpf & 4)
        # Without any other object the score mode wins over the priority bit.
        if priority and score and not self.objects():
            priority = False
        self.colours = _colours(self.colup0, self.colup1, self.colupf, self.colubk, score, priority)
        return self.colours

    def objects(self) -> int:
        """Return which objects but the playfield are enabled, wherever they are."""
        objects = P0 if self.shown_grp0() else 0
        if self.shown_grp1():
            objects |= P1
        if self.enam0 and not self.resmp0:
            objects |= M0
        if self.enam1 and not self.resmp1:
            objects |= M1
        return objects | BL if self.shown_enabl() else objects

    def shown_grp0(self) -> int:
        """Return the displayed pattern of player 0, its leftmost pixel in bit 7."""
        pattern = self.old_grp0 if self.vdelp0 else self.grp0
        return REVERSED[pattern] if self.refp0 else pattern

    def shown_grp1(self) -> int:
        """Return the displayed pattern of player 1, its leftmost pixel in bit 7."""
        pattern = self.old_grp1 if self.vdelp1 else self.grp1
        return REVERSED[pattern] if self.refp1 else pattern

    def shown_enabl(self) -> int:
        """Return whether the ball is displayed."""
        return self.old_enabl if self.vdelbl else self.enabl

    def end_line(self) -> None:
        """Do the work of a finished line."""
        self.line_codes = self.colours = None
        self.mirror = self.ctrlpf & 1
        self.hide_first0 = self.hide_first1 = False
        if self.star:
            self.star_counter = (self.star_counter + 1) % 4
            self.m0 = (self.m0 - (18, 33, 0, 17)[self.star_counter]) % WIDTH
            self.star_look = self.star_counter

    # -- TIA: reads (SPEC 7.9)

    def read_tia(self, register: int) -> int:
        """Read a TIA register; the low six bits are those of the bus."""
        self.catch_up(3 * self.T)
        if register < 8:
            bits = self.read_collisions(register)
        elif register < 12:
            bits = self.read_paddle(register - 8)
        elif register < 14:
            bits = self.fire[register - 12]
        else:
            bits = 0
        value = bits | self.bus & 0x3F
        if self.accesses is not None:
            self.accesses.append((self.T, "r", register, value))
        return value

    def read_collisions(self, register: int) -> int:
        """Return bits 7 and 6 of CXM0P ... CXPPMM."""
        if register == 6:
            return (self.collisions >> 12 & 1) << 7
        pair = self.collisions >> (13 if register == 7 else 2 * register)
        return (pair & 1) << 7 | (pair & 2) << 5

    def read_paddle(self, paddle: int) -> int:
        """Return bit 7 of INPT0-3 (SPEC 5)."""
        cycles = self.charge_cycles[paddle]
        if cycles is None:
            return 0
        if cycles < 0:
            return 0x80
        if self.dump:
            return 0
        return 0x80 if self.T > (self.dump_end + cycles & MASK32) else 0

    # -- TIA: writes (SPEC 7.1)

    def write_tia(self, register: int, value: int) -> None:
        """Write a TIA register: catch up, test for too long a frame, then do its effect."""
        if self.accesses is not None:
            self.accesses.append((self.T, "w", register, value))
        clock = 3 * self.T
        position = (clock - self.F) % CLOCKS
        if 0x0D <= register <= 0x0F:
            clock += 2 + (position // 3 + 2) % 4
        else:
            clock += WRITE_DELAY[register]
        self.catch_up(clock)
        if (3 * self.T - self.F) // CLOCKS > (342 if self.pal else 290):
            self.frame_done = True
        effect = WRITES[register]
        if effect is not None:
            self.line_codes = self.colours = None
            effect(self, value, position)

    def _vsync(self, value: int, position: int) -> None:
        self.vsync = value
        if value & 2:
            self.Q = 3 * self.T + CLOCKS
        elif 3 * self.T >= self.Q:
            self.Q = NEVER
            self.frame_done = True

    def _vblank(self, value: int, position: int) -> None:
        if not self.dump and value & 0x80:
            self.dump = 1
        elif self.dump and not value & 0x80:
            self.dump = 0
            self.dump_end = self.T
        self.vblank = value

    def _wsync(self, value: int, position: int) -> None:
        if self.was_read and position:
            self.T += (CLOCKS - position) // 3

    def _nusiz0(self, value: int, position: int) -> None:
        self.nusiz0 = value
        self.hide_first0 = False
        self.star_look = 0

    def _nusiz1(self, value: int, position: int) -> None:
        self.nusiz1 = value
        self.hide_first1 = False

    def _colour(self, value: int) -> int:
        return value | 1 if self.pal and self.lines & 1 else value & 0xFE

    def _colup0(self, value: int, position: int) -> None:
        self.colup0 = self._colour(value)

    def _colup1(self, value: int, position: int) -> None:
        self.colup1 = self._colour(value)

    def _colupf(self, value: int, position: int) -> None:
        self.colupf = self._colour(value)

    def _colubk(self, value: int, position: int) -> None:
        self.colubk = self._colour(value)

    def _ctrlpf(self, value: int, position: int) -> None:
        self.ctrlpf = value
        if position < 147:
            self.mirror = value & 1

    def _refp0(self, value: int, position: int) -> None:
        self.refp0 = value >> 3 & 1

    def _refp1(self, value: int, position: int) -> None:
        self.refp1 = value >> 3 & 1

    def _pf0(self, value: int, position: int) -> None:
        self.playfield = self.playfield & 0xFFFF0 | value >> 4

    def _pf1(self, value: int, position: int) -> None:
        self.playfield = self.playfield & 0xFF00F | value << 4

    def _pf2(self, value: int, position: int) -> None:
        self.playfield = self.playfield & 0x00FFF | value << 12

    def _resp0(self, value: int, position: int) -> None:
        new, self.hide_first0 = self._reset_player(self.p0, self.nusiz0 & 7, self.hide_first0, position)
        self.p0 = new
        self.line_codes = None

    def _resp1(self, value: int, position: int) -> None:
        new, self.hide_first1 = self._reset_player(self.p1, self.nusiz1 & 7, self.hide_first1, position)
        self.p1 = new
        self.line_codes = None

    def _reset_player(self, old: int, number: int, hide_first: bool, position: int) -> tuple[int, bool]:
        """Return the position and the "first copy hidden" flag after RESPn (SPEC 7.5)."""
        new = 3 if position < BLANK else (position - BLANK + 5) % WIDTH
        distances = [(new - old - offset) % WIDTH for offset in COPIES[number]]
        if any(distance < 4 for distance in distances):
            return new, False
        if any(distance < 4 + PLAYER_WIDTH[number] for distance in distances):
            self.catch_up(3 * self.T + 11)
        return new, True

    def _reset_small(self, position: int) -> int:
        return 2 if position < BLANK else (position - BLANK + 4) % WIDTH

    def _resm0(self, value: int, position: int) -> None:
        since = 3 * self.T - self.hmove_clock
        self.m0 = 8 if (since, position) == (60, 69) else self._reset_small(position)
        self.star_look = 0

    def _resm1(self, value: int, position: int) -> None:
        since = 3 * self.T - self.hmove_clock
        self.m1 = 3 if (since, position) == (9, 18) else self._reset_small(position)

    def _resbl(self, value: int, position: int) -> None:
        since = 3 * self.T - self.hmove_clock
        exceptions = {(54, 60): 10, (54, 69): 10, (9, 18): 3, (21, 30): 6, (18, 27): 5}
        self.bl = exceptions.get((since, position), self._reset_small(position))

    def _grp0(self, value: int, position: int) -> None:
        self.grp0 = value
        self.old_grp1 = self.grp1

    def _grp1(self, value: int, position: int) -> None:
        self.grp1 = value
        self.old_grp0 = self.grp0
        self.old_enabl = self.enabl

    def _enam0(self, value: int, position: int) -> None:
        self.enam0 = value >> 1 & 1

    def _enam1(self, value: int, position: int) -> None:
        self.enam1 = value >> 1 & 1

    def _enabl(self, value: int, position: int) -> None:
        self.enabl = value >> 1 & 1

    def _hmp0(self, value: int, position: int) -> None:
        self.hmp0 = value >> 4

    def _hmp1(self, value: int, position: int) -> None:
        self.hmp1 = value >> 4

    def _hmm0(self, value: int, position: int) -> None:
        if 3 * self.T == self.hmove_clock + 63 and self.hmm0 == 7 and value >> 4 == 6:
            self.star = 1
            self.star_counter = 0
        self.hmm0 = value >> 4

    def _hmm1(self, value: int, position: int) -> None:
        self.hmm1 = value >> 4

    def _hmbl(self, value: int, position: int) -> None:
        self.hmbl = value >> 4

    def _vdelp0(self, value: int, position: int) -> None:
        self.vdelp0 = value & 1

    def _vdelp1(self, value: int, position: int) -> None:
        self.vdelp1 = value & 1

    def _vdelbl(self, value: int, position: int) -> None:
        self.vdelbl = value & 1

    def _resmp0(self, value: int, position: int) -> None:
        if self.resmp0 and not value & 2:
            self.m0 = (self.p0 + PLAYER_WIDTH[self.nusiz0 & 7] // 2) % WIDTH
            self.star_look = 0
        self.resmp0 = value >> 1 & 1

    def _resmp1(self, value: int, position: int) -> None:
        if self.resmp1 and not value & 2:
            self.m1 = (self.p1 + PLAYER_WIDTH[self.nusiz1 & 7] // 2) % WIDTH
        self.resmp1 = value >> 1 & 1

    def _hmove(self, value: int, position: int) -> None:
        cycle = position // 3
        self.p0 = (self.p0 + _motion(cycle, self.hmp0)) % WIDTH
        self.p1 = (self.p1 + _motion(cycle, self.hmp1)) % WIDTH
        self.m0 = (self.m0 + _motion(cycle, self.hmm0)) % WIDTH
        self.m1 = (self.m1 + _motion(cycle, self.hmm1)) % WIDTH
        self.bl = (self.bl + _motion(cycle, self.hmbl)) % WIDTH
        self.hide_first0 = self.hide_first1 = False
        self.star = self.star_look = 0
        self.hmove_clock = 3 * self.T
        if self.hmove_blanks and (cycle <= 20 or cycle == 75):
            self.comb = 1

    def _hmclr(self, value: int, position: int) -> None:
        self.hmp0 = self.hmp1 = self.hmm0 = self.hmm1 = self.hmbl = 0

    def _cxclr(self, value: int, position: int) -> None:
        self.collisions = 0

    # -- frames (SPEC 8)

    def frame(self) -> None:
        """Run one frame: until a vertical sync, too many lines, or too many instructions."""
        if not self.partial:
            self.start_frame()
        self.partial = True
        self.frame_done = False
        step = self.step if self.trace is None else self.traced_step
        for _ in range(MAX_INSTRUCTIONS):
            if self.jammed:
                break
            step()
            if self.frame_done:
                self.partial = False
                self.lines = (3 * self.T - self.F) // CLOCKS
                return
        self.grey_rest()

    def start_frame(self) -> None:
        """Swap the pictures and make now the time zero."""
        self.picture, self.other_picture = self.other_picture, self.picture
        passed = self.T
        self.F = -((3 * passed - self.F) % CLOCKS)
        self.timer_set -= passed
        self.timer_expired_at -= passed
        self.dump_end -= passed
        self.Q -= 3 * passed
        self.hmove_clock -= 3 * passed
        self.T = 0
        self.place_window()
        self.L = self.B
        if self.pal:
            for name in ("colup0", "colup1", "colupf", "colubk"):
                setattr(self, name, self._colour(getattr(self, name)))
            self.colours = None

    def place_window(self) -> None:
        """Set from where to where this frame is drawn, and go to its start."""
        self.B = self.F + CLOCKS * self.y_start
        self.E = self.B + CLOCKS * self.height
        self.R = CLOCKS
        self.fill = 0

    def grey_rest(self) -> None:
        """Make what lies below the beam grey, as a partial frame does."""
        start = WIDTH * max(self.lines_now() - self.y_start, 0)
        stop = WIDTH * self.height
        self.picture[start:stop] = bytes((pixel & 15) >> 1 for pixel in self.picture[start:stop])

    def lines_now(self) -> int:
        """Return the lines of the frame that just ended, or until now of one that goes on."""
        return (3 * self.T - self.F) // CLOCKS if self.partial else self.lines

    def screen(self) -> np.ndarray:
        """Return [H, 160] uint8, the palette indices of the picture."""
        pixels = np.frombuffer(bytes(self.picture[: WIDTH * self.height]), np.uint8)
        return pixels.reshape(self.height, WIDTH)


@cache
def _motion(cycle: int, nibble: int) -> int:
    """Return how far right an HMOVE at this cycle of the line moves an object (SPEC 7.6)."""
    pulses = nibble ^ 8
    if cycle == 75:
        cycle = -1
    if cycle <= 20:
        return max(8 - pulses, (3 * cycle - 35) // 4)
    return -max(0, pulses - (14 - (3 * (cycle - 55) + 2) // 4))


WRITE_NAMES = (
    "vsync vblank wsync rsync nusiz0 nusiz1 colup0 colup1 colupf colubk ctrlpf refp0 refp1 pf0 pf1 pf2 "
    "resp0 resp1 resm0 resm1 resbl audc0 audc1 audf0 audf1 audv0 audv1 grp0 grp1 enam0 enam1 enabl "
    "hmp0 hmp1 hmm0 hmm1 hmbl vdelp0 vdelp1 vdelbl resmp0 resmp1 hmove hmclr cxclr"
).split()
WRITES: list[Callable[..., None] | None] = [getattr(Console, f"_{name}", None) for name in WRITE_NAMES]
WRITES += [None] * (64 - len(WRITES))
WRITE_DELAY = [0] * 64  # PF0-2 depend on the cycle.
for _name in ("vblank", "refp0", "refp1", "grp0", "grp1"):
    WRITE_DELAY[WRITE_NAMES.index(_name)] = 1
for _name in ("nusiz0", "nusiz1", "resm0", "resm1"):
    WRITE_DELAY[WRITE_NAMES.index(_name)] = 8


# ---- the environment: controllers, resets, rules ---------------------------------------------------------------------

UP, DOWN, LEFT_, RIGHT_, FIRE = 1, 2, 4, 8, 16
_DIRECTIONS = [UP, RIGHT_, LEFT_, DOWN, UP | RIGHT_, UP | LEFT_, DOWN | RIGHT_, DOWN | LEFT_]
ACTIONS = [0, FIRE, *_DIRECTIONS, *(direction | FIRE for direction in _DIRECTIONS)]
KNOB_MIN, KNOB_MAX, KNOB_STEP = 27_450, 790_196, 23_000
KNOB_CENTRE = (KNOB_MIN + KNOB_MAX) // 2


def evaluate(expression: Any, ram: bytes, new: dict[str, int], old: dict[str, int]) -> int:
    """Return the value of a rule's expression (games_schema.md)."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return ram[int(expression[1:], 16) & 0x7F] if expression.startswith("@") else new[expression]
    operation, *operands = expression
    if operation == "prev":
        return old[operands[0]]
    if operation == "table":
        index, entries = evaluate(operands[0], ram, new, old), operands[1]
        return entries[index] if 0 <= index < len(entries) else 0
    if operation == "if":
        return evaluate(operands[1 if evaluate(operands[0], ram, new, old) else 2], ram, new, old)
    return int(_EXPRESSIONS[operation](*(evaluate(operand, ram, new, old) for operand in operands)))


def _digits(*nibbles: int) -> int:
    return sum(10**k * (nibble & 15) for k, nibble in enumerate(nibbles) if nibble & 15 != 10)


_EXPRESSIONS: dict[str, Callable[..., int]] = {
    "+": lambda *a: sum(a),
    "*": lambda *a: int(np.prod(a, dtype=np.int64)),
    "and": lambda *a: all(a),
    "or": lambda *a: any(a),
    "not": lambda a: not a,
    "-": lambda a, b: a - b,
    "&": lambda a, b: a & b,
    ">>": lambda a, b: a >> b,
    "min": min,
    "max": max,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "bcd": lambda *a: sum(100**k * (10 * (byte >> 4) + (byte & 15)) for k, byte in enumerate(a)),
    "digits": _digits,
    "s8": lambda a: (a ^ 0x80) - 0x80,
}


class Environment:
    """A game from power-on, as `ALEInterface` after `loadROM`: `act`, `reset_game`, `ram`, `screen`, `lives`, `over`.

    `game` is an entry of games.json, or None for a cartridge of our own with joysticks and no rules.
    """

    def __init__(
        self,
        image: bytes,
        game: dict[str, Any],
        seed: int = 1,
        repeat_action_probability: float = 0.0,
        frame_skip: int = 1,
        difficulty: int = 0,
    ):
        self.game, self.frame_skip, self.repeat_action_probability = game, frame_skip, repeat_action_probability
        self.difficulty = difficulty
        window = game["window"]
        self.console = Console(image, game["bank"], window["y_start"], window["height"], game["hmove_blanks"])
        self.generator = np.random.RandomState(seed)
        self._boot()

    # -- starting (SPEC 10)

    def _boot(self) -> None:
        """Detect the television's format as loading does, then reset the environment."""
        self.knob: int | None = None
        self.remembered = 0
        long_frames = 0
        for count in range(60):
            self._emulate(0)
            long_frames += count >= 30 and self.console.lines_now() > 285
        if long_frames >= 15:
            self.console.pal, self.console.height = True, 250
        self.console.system_reset()
        self.reset_game()

    def reset_game(self) -> None:
        """Start an episode."""
        self.remembered = 0
        self.knob = KNOB_CENTRE
        self.over = False
        self.console.system_reset()
        self._hold(60)
        self._hold(4, reset=True)
        self._select_variation(self.game["variation_select"])
        self._hold(4, reset=True)
        self.remembered = 0
        for action in self.game["start_actions"]:
            self._emulate(action)
        self.values = {variable["name"]: variable["init"] for variable in self.game.get("vars", [])}
        self.values |= {"terminal": 0, "score": 0, "lives": self.game["lives_at_reset"]}
        self._evaluate()

    def _hold(self, num_frames: int, reset: bool = False, select: bool = False) -> None:
        for _ in range(num_frames):
            self._emulate(0, reset, select)

    def _press_select(self, num_frames: int) -> None:
        self._hold(num_frames, select=True)
        self._hold(1)

    def _select_variation(self, how: dict[str, Any] | None) -> None:
        if how is None:
            return
        if how.get("special") == "double_dunk":
            self._select_double_dunk()
            return
        steps = {
            "reset_switch": lambda count: self._hold(count, reset=True),
            "select": self._press_select,
            "noop": lambda count: [self._act(0) for _ in range(count)],
        }
        for name, count in how.get("before", []):
            steps[name](count)
        while not all(self.ram()[int(cell[1:], 16) & 0x7F] in values for cell, values in how["until"]):
            self._press_select(how["select_frames"])
        self._hold(4, reset=True)

    def _select_double_dunk(self) -> None:
        def down() -> None:
            before = self.ram()[0x30]
            while self.ram()[0x30] == before:
                self._act(5)
                self._act(0)

        def off(bit: int) -> None:
            while self.ram()[0] & bit:
                self._act(4)
                self._act(0)

        self._press_select(1)
        down()
        for bit in (0x08, 0x10, 0x04, 0x20):
            down()
            off(bit)
        self._hold(4, reset=True)
        self._act(10)
        self._act(0)

    # -- playing (SPEC 11.1)

    def act(self, action: int) -> int:
        """Do an action for `frame_skip` frames and return the sum of their rewards."""
        reward = 0
        for _ in range(self.frame_skip):
            self._draw_action(action)
            if not self.over:
                self._emulate(self.remembered)
                reward += self._evaluate()
        return reward

    def _act(self, action: int) -> None:
        """Do an action without the rules, as resets do."""
        for _ in range(self.frame_skip):
            self._draw_action(action)
            self._emulate(self.remembered)

    def _draw_action(self, action: int) -> None:
        first, _ = self.generator.randint(0, 1 << 32, size=2, dtype=np.uint32)
        if int(first) / 2**32 >= self.repeat_action_probability:
            self.remembered = action

    def _emulate(self, action: int, reset: bool = False, select: bool = False) -> None:
        if action not in self.game["legal_actions"]:
            action = 0
        console, sticks = self.console, ACTIONS[action]
        console.port_a = 0xFF
        console.fire = [0x80, 0x80]
        console.port_b = 0x3F & ~(reset | select << 1) | (self.difficulty & 1) << 6 | (self.difficulty >> 1) << 7
        if self.game["controller_left"] == "paddles":
            self._turn_paddles(sticks)
        else:
            side = 1 if self.game["swap_ports"] else 0
            console.port_a &= ~(sticks & 15 if side else (sticks & 15) << 4)
            if sticks & FIRE:
                console.fire[side] = 0
            console.charge_cycles = [None] * 4
        if self.game["controller_right"] == "paddles":
            console.charge_cycles[2:] = [-1, -1]
        console.frame()

    def _turn_paddles(self, sticks: int) -> None:
        console, swap = self.console, self.game["swap_paddles"]
        if self.knob is None:  # While the format is detected.
            console.charge_cycles = [-1, -1, None, None]
            return
        if sticks & RIGHT_:
            self.knob = max(KNOB_MIN, self.knob - KNOB_STEP)
        if sticks & LEFT_:
            self.knob = min(KNOB_MAX, self.knob + KNOB_STEP)
        cycles: list[int | None] = [1904 * knob // 100_000 for knob in (self.knob, KNOB_CENTRE)]
        console.charge_cycles = [*(cycles[::-1] if swap else cycles), None, None]
        if sticks & FIRE:
            console.port_a &= ~(0x40 if swap else 0x80)

    def _evaluate(self) -> int:
        """Advance the rules by a frame and return the reward."""
        if self.over:
            return 0
        new: dict[str, int] = {}
        ram, old = self.ram(), self.values
        for variable in self.game.get("vars", []):
            new[variable["name"]] = evaluate(variable["next"], ram, new, old)
        for name in ("terminal", "score", "lives"):
            new[name] = evaluate(self.game[name], ram, new, old)
        new["delta"] = new["score"] - old["score"]
        reward = evaluate(self.game.get("reward", "delta"), ram, new, old)
        self.values = new
        self.over = bool(new["terminal"])
        return reward

    # -- what is seen

    def lives(self) -> int:
        """Return the lives as ale-py reports them."""
        if self.over and not self.game.get("lives_kept_when_over"):
            return 0
        return self.values["lives"]

    def ram(self) -> bytes:
        """Return the 128 bytes of RAM."""
        return bytes(self.console.ram)

    def screen(self) -> np.ndarray:
        """Return [H, 160] uint8, the palette indices of the picture."""
        return self.console.screen()
