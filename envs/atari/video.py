"""The TIA's picture: registers, positions and collisions, one logged write a step.

A step brings the picture up to a write's time and then lets the write take effect. Up to there every object's scan line
is a mask of 160 bits (five words), so that lines of any number cost one evaluation: nothing changes from one to the
next. What is drawn is not drawn here: a step leaves a record of what it covered, and `picture` makes pixels of those
of a frame that is looked at.

Everything is int32 [lanes], masks uint32. Clocks are counted from the frame's first line, 228 a line, of which the last
160 are pixels.

Sources: S. Wright, Stella Programmer's Guide (1979); A. Towers, TIA Hardware Notes. Where ale-py differs from the
console, it is ale-py that is followed. The "star field" (a missile that moves by itself after a late change of its
motion) is left out: no game of the 57 has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from podium.envs.atari.cartridges import Lanes
from podium.types import Array

CLOCKS, BLANK = 228, 68
"""Of a line, and those of them before its first pixel."""

WIDTH = 160
"""Pixels of a line."""

NOTHING = 0x3F
"""A register that is not there: to bring the picture up to a time and do nothing then."""

VBLANK, NUSIZ0, NUSIZ1, COLUP0, CTRLPF, REFP0, REFP1, PF0, PF1, PF2 = 1, 4, 5, 6, 10, 11, 12, 13, 14, 15
RESP0, RESP1, RESM0, RESM1, RESBL, GRP0, GRP1, ENAM0, HMP0, VDELP0 = 16, 17, 18, 19, 20, 27, 28, 29, 32, 37
RESMP0, HMOVE, HMCLR, CXCLR = 40, 42, 43, 44
"""Registers; those of one kind follow one another: ENAM0, ENAM1, ENABL."""


class Video(NamedTuple):
    """State of a lane between two steps, int32 each.

    Attributes:
      row: line of the picture that is being drawn, 0 the first.
      done: clocks of it that are; 228 of a line whose end has not been dealt with.
      comb: whether the next line begins with black pixels.
      mirror: whether this line's right half mirrors its left.
      hidden: bits 0 and 1: whether the first copy of player 0 or 1 is not shown on this line.
      blank: whether the beam is off.
      size_0: NUSIZ0.
      size_1: NUSIZ1.
      colours: COLUP0, COLUP1, COLUPF, COLUBK, a byte each, lowest first.
      control: CTRLPF.
      reflect: bits 0 and 1: whether player 0 or 1 is reflected.
      field: 20 bits of the playfield, lowest leftmost.
      shapes: GRP0, GRP1 and the copies of them for vertical delay, a byte each, lowest bits leftmost.
      enabled: bits 0 to 3: missile 0, missile 1, ball, the ball's copy for vertical delay.
      motion: five nibbles: of player 0, player 1, missile 0, missile 1, ball.
      delayed: bits 0 to 2: vertical delay of player 0, player 1, ball.
      locked: bits 0 and 1: whether missile 0 or 1 is held by its player.
      player_0: position of its leftmost pixel, 0 to 159.
      player_1: likewise.
      missile_0: likewise.
      missile_1: likewise.
      ball: likewise.
      moved_at: clock of the last HMOVE.
      collisions: 16 bits, two for each of the registers from CXM0P to CXPPMM, bit 6 of it first.
    """

    row: Array
    done: Array
    comb: Array
    mirror: Array
    hidden: Array
    blank: Array
    size_0: Array
    size_1: Array
    colours: Array
    control: Array
    reflect: Array
    field: Array
    shapes: Array
    enabled: Array
    motion: Array
    delayed: Array
    locked: Array
    player_0: Array
    player_1: Array
    missile_0: Array
    missile_1: Array
    ball: Array
    moved_at: Array
    collisions: Array


Settle = Callable[[Any], Any]


def as_it_is(values: Any) -> Any:
    """Return the values: for compilers that need no help."""
    return values


class Record(NamedTuple):
    """What a step drew, for `picture`: from a pixel on, to where the next record begins.

    Attributes:
      words: five int32 [lanes]; see `pack`.
      drew: whether there is anything.
    """

    words: tuple[Array, ...]
    drew: Array


def drawn(video: Video, lanes: Lanes) -> Array:
    """Return the clock up to which the picture is drawn."""
    return lanes.window[0] + video.row * CLOCKS + video.done


def begin_frame(video: Video, lines: Array, where: Array) -> Video:
    """Return the state at the start of a frame, `lines` after the start of the one before, in the lanes `where`."""
    return video._replace(
        row=jnp.where(where, 0, video.row),
        done=jnp.where(where, 0, video.done),
        moved_at=jnp.where(where, video.moved_at - CLOCKS * lines, video.moved_at),
    )


def step(
    video: Video,
    lanes: Lanes,
    clock: Array,
    cycle: Array,
    register: Array,
    value: Array,
    active: Array,
    settle: Settle = as_it_is,
) -> tuple[Video, Record, Array]:
    """Bring the picture up to a write at a clock (and its cycle in the line) and do it, in the lanes `active`.

    `settle` is that of `processor.Memory`.

    Returns:
      the state; the record of what was drawn; whether the write is done (else another step has to go on with it).
    """
    reset = _Reset.of(video, register, 3 * cycle, clock)
    delay = jnp.where(register == PF0, 2 + ((cycle + 2) & 3), 0)
    delay = jnp.where((register == PF1) | (register == PF2), 2 + ((cycle + 2) & 3), delay)
    is_size, is_shape = (register == NUSIZ0) | (register == NUSIZ1), (register == GRP0) | (register == GRP1)
    is_reflect = (register == REFP0) | (register == REFP1)
    delay = jnp.where(is_size | (register == RESM0) | (register == RESM1), 8, delay)
    delay = jnp.where(is_shape | is_reflect | (register == VBLANK), 1, delay)
    delay = jnp.where(reset.late, 11, delay)

    delay, reset = settle((delay, reset))
    video, record, finished = _catch_up(video, lanes, clock + delay, active, settle)
    finished = active & finished
    return _write(video, lanes, register, value, cycle, clock, reset, finished), record, finished


def _catch_up(video: Video, lanes: Lanes, clock: Array, active: Array, settle: Settle) -> tuple[Video, Record, Array]:
    """Draw up to a clock; in two goes where what is drawn changes at the end of a line."""
    begins, ends = lanes.window
    at = begins + video.row * CLOCKS + video.done
    until = jnp.minimum(clock, ends)
    goes = active & (clock >= begins) & (at < until)
    rest = CLOCKS - video.done
    finishes = until > at + rest
    changes = (video.hidden != 0) | (video.mirror != (video.control & 1))
    changes = changes | ((video.comb != 0) & (video.done >= BLANK + 8))
    splits = goes & finishes & changes
    beyond = jnp.maximum(until - at - rest - 1, 0)
    lines = lax.div(beyond, jnp.full_like(beyond, CLOCKS))
    last = beyond - lines * CLOCKS + 1

    # Pixels: from `first` to `end` of this line, and where the line is finished up to `next_end` of those after it.
    first = jnp.maximum(video.done - BLANK, 0)
    stops = jnp.where(finishes, CLOCKS, video.done + until - at)
    end = jnp.maximum(stops - BLANK, 0)
    next_end = jnp.where(lines > 0, WIDTH, jnp.maximum(last - BLANK, 0))
    wraps = finishes & ~splits
    goes, finishes, splits, wraps, lines, last = settle((goes, finishes, splits, wraps, lines, last))
    first, stops, end, next_end = settle((first, stops, end, next_end))
    visible = goes & ((end > first) | (wraps & (next_end > 0)))
    limit = jnp.where(wraps, next_end, end)
    covered = []
    for word in range(5):
        low, high = _below(first - 32 * word), _below(limit - 32 * word)
        covered.append(jnp.where(wraps, high | ~low, high & ~low))

    shown = settle(_shown(video))
    hits = _collisions(video, shown, covered)
    collisions = jnp.where(visible & (video.blank == 0), video.collisions | hits, video.collisions)
    combs = (video.comb != 0) & (first < 8)
    black = jnp.where(combs, 8 - first, 0)
    record = Record(pack(video, shown, video.row * WIDTH + first, black), visible)

    ended = goes & finishes
    return (
        video._replace(
            row=jnp.where(ended, video.row + jnp.where(splits, 1, 1 + lines), video.row),
            done=jnp.where(goes, jnp.where(finishes, jnp.where(splits, 0, last), stops), video.done),
            comb=jnp.where(visible & combs & (end >= 8), 0, video.comb),
            mirror=jnp.where(ended, video.control & 1, video.mirror),
            hidden=jnp.where(ended, 0, video.hidden),
            collisions=collisions,
        ),
        record,
        ~splits,
    )


class _Shown(NamedTuple):
    """Objects as they are shown now: shapes with lowest bits leftmost, and widths."""

    shape_0: Array
    shape_1: Array
    missile_0: Array
    missile_1: Array
    ball: Array


def _shown(video: Video) -> _Shown:
    byte = lambda number: lax.shift_right_logical(video.shapes, jnp.int32(8 * number)) & 0xFF
    shapes = []
    for player in range(2):
        shape = jnp.where(video.delayed >> player & 1, byte(2 + player), byte(player))
        shapes.append(jnp.where(video.reflect >> player & 1, reverse(shape), shape))
    seen = video.enabled & ~video.locked
    ball = jnp.where(video.delayed & 4, video.enabled >> 3, video.enabled >> 2) & 1
    return _Shown(shapes[0], shapes[1], seen & 1, seen >> 1 & 1, ball)


def pack(video: Video, shown: _Shown, start: Array, black: Array) -> tuple[Array, ...]:
    """Return the five words of a record; `picture.unpack` takes them apart."""
    flags = start | black << 16 | video.blank << 20 | video.hidden << 21 | video.mirror << 23
    flags = flags | (video.control & 6) << 23 | shown.ball << 26 | shown.missile_0 << 27 | shown.missile_1 << 28
    sizes = video.field | (video.size_0 & 7) << 20 | (video.size_1 & 7) << 23
    widths = (video.size_0 >> 4 & 3) | (video.size_1 >> 4 & 3) << 2 | (video.control >> 4 & 3) << 4
    players = shown.shape_0 | shown.shape_1 << 8 | video.player_0 << 16 | video.player_1 << 24
    others = video.missile_0 | video.missile_1 << 8 | video.ball << 16 | widths << 24
    return flags, sizes, players, others, video.colours


def reverse(byte: Array) -> Array:
    """Return a byte with its bits in the opposite order."""
    byte = (byte & 0x0F) << 4 | byte >> 4
    byte = (byte & 0x33) << 2 | (byte & 0xCC) >> 2
    return (byte & 0x55) << 1 | (byte & 0xAA) >> 1


def _below(number: Array) -> Array:
    """Return a word with the lowest `number` bits set, which may be negative or above 32."""
    some = (jnp.uint32(1) << jnp.clip(number, 0, 31).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(number >= 32, jnp.uint32(0xFFFFFFFF), some)


def _collisions(video: Video, shown: _Shown, covered: list[Array]) -> Array:
    """Return the latches that `covered` pixels set, five words of them."""
    size_0, size_1 = video.size_0 & 7, video.size_1 & 7
    hidden_0, hidden_1 = (video.hidden & 1) != 0, (video.hidden & 2) != 0
    missiles = [
        _rotate(_line_of_missile(seen, size), position)
        for seen, size, position in (
            (shown.missile_0, video.size_0, video.missile_0),
            (shown.missile_1, video.size_1, video.missile_1),
        )
    ]
    players = [
        _rotate(_line_of(shown.shape_0, size_0, hidden_0), video.player_0),
        _rotate(_line_of(shown.shape_1, size_1, hidden_1), video.player_1),
    ]
    ball = _bar(shown.ball, video.control)
    ball_line = _rotate((ball, jnp.zeros_like(ball), jnp.zeros_like(ball)), video.ball)
    field = _field_line(video)
    p0, p1, m0, m1, bl, pf = ([x & y for x, y in zip(line, covered, strict=True)]
                              for line in (*players, *missiles, ball_line, field))  # fmt: skip
    pairs = ((m0, p0), (m0, p1), (m1, p1), (m1, p0), (p0, bl), (p0, pf), (p1, bl), (p1, pf),
             (m0, bl), (m0, pf), (m1, bl), (m1, pf), None, (bl, pf), (m0, m1), (p0, p1))  # fmt: skip
    latches = jnp.zeros_like(video.row)
    for bit, pair in enumerate(pairs):
        if pair is not None:
            met = [x & y for x, y in zip(*pair, strict=True)]
            some = met[0] | met[1] | met[2] | met[3] | met[4]
            latches = latches | jnp.where(some != 0, 1 << bit, 0)
    return latches


def _bar(seen: Array, size: Array) -> Array:
    """Return a missile's or the ball's pixels: 1, 2, 4 or 8 as bits 4 and 5 of its size say."""
    width = jnp.uint32(1) << (size >> 4 & 3).astype(jnp.uint32)
    return jnp.where(seen != 0, (jnp.uint32(1) << width) - jnp.uint32(1), jnp.uint32(0))


def _line_of_missile(seen: Array, size: Array) -> tuple[Array, Array, Array]:
    """Return the first words of a line that a missile's copies make, at position 0."""
    bar, zero = _bar(seen, size), jnp.uint32(0)
    first = bar | jnp.where(_is(size & 7, COPIES_AT_16), bar << 16, zero)
    second = jnp.where(_is(size & 7, COPIES_AT_32), bar, zero)
    return first, second, jnp.where(_is(size & 7, COPIES_AT_64), bar, zero)


def _field_line(video: Video) -> list[Array]:
    """Return the playfield's five words."""
    left = video.field
    right = jnp.where(video.mirror != 0, _reverse_20(left), left)
    eights = (left, left >> 8, left >> 16 & 15 | right << 4, right >> 4, right >> 12)
    return [_fourfold((eight & 0xFF).astype(jnp.uint32)) for eight in eights]


def _reverse_20(field: Array) -> Array:
    """Return 20 bits in the opposite order."""
    return reverse(field & 0xFF) << 12 | reverse(field >> 8 & 0xFF) << 4 | reverse(field >> 12 & 0xF0)


def _is(code: Array, codes: int) -> Array:
    """Tell whether `code` (0 to 7) is among `codes`, a bit each."""
    return (jnp.int32(codes) >> code & 1) != 0


COPIES_AT_16, COPIES_AT_32, COPIES_AT_64, DOUBLE, QUADRUPLE = 0x0A, 0x4C, 0x50, 0x20, 0x80
"""Bits by code of NUSIZ: which have a copy so many pixels to the right, and which are wide."""


def _line_of(shape: Array, code: Array, hidden: Array) -> tuple[Array, Array, Array]:
    """Return the first words of a line that a player's copies make, at position 0."""
    word = shape.astype(jnp.uint32)
    zero = jnp.uint32(0)
    first = jnp.where(hidden, zero, word) | jnp.where(_is(code, COPIES_AT_16), word << 16, zero)
    twice = (word | word << 4) & 0x0F0F
    twice = (twice | twice << 2) & 0x3333
    twice = (twice | twice << 1) & 0x5555
    twice = (twice | twice << 1) << 1
    fourfold = _fourfold(word)
    first = jnp.where(_is(code, DOUBLE), twice, first)
    first = jnp.where(_is(code, QUADRUPLE), fourfold << 1, first)
    second = jnp.where(_is(code, COPIES_AT_32), word, zero)
    second = jnp.where(_is(code, QUADRUPLE), fourfold >> 31, second)
    wide_and_hidden = hidden & _is(code, DOUBLE | QUADRUPLE)
    keep = lambda x: jnp.where(wide_and_hidden, zero, x)
    return keep(first), keep(second), jnp.where(_is(code, COPIES_AT_64), word, zero)


def _fourfold(byte: Array) -> Array:
    """Return the word in which every bit of a byte stands four times."""
    word = (byte | byte << 12) & 0x000F000F
    word = (word | word << 6) & 0x03030303
    word = (word | word << 3) & 0x11111111
    return word * jnp.uint32(15)


def _rotate(words: tuple[Array, Array, Array], position: Array) -> list[Array]:
    """Return the five words of a line whose first three are given, moved to the right by 0 to 159 pixels, around."""
    shift = (position & 31).astype(jnp.uint32)
    back = jnp.uint32(31) - shift
    over = [(word >> 1) >> back for word in words]
    left = [word << shift for word in words]
    line = [left[0], left[1] | over[0], left[2] | over[1], over[2], jnp.zeros_like(over[0])]
    for bit in (0, 1, 2):
        turns = (position >> (5 + bit) & 1) != 0
        line = [jnp.where(turns, line[(word - (1 << bit)) % 5], line[word]) for word in range(5)]
    return line


class _Reset(NamedTuple):
    """What a write to RESP0 to RESBL does.

    Attributes:
      player: new position of a player.
      other: new position of a missile or the ball.
      late: whether the picture goes on for 11 clocks first.
      hides: whether the player's first copy is not shown on this line.
    """

    player: Array
    other: Array
    late: Array
    hides: Array

    @staticmethod
    def of(video: Video, register: Array, position: Array, clock: Array) -> _Reset:
        """Return it for a write at a position of the line."""
        visible = position >= BLANK
        player = jnp.where(visible, _wrap(position - BLANK + 5), 3)
        other = jnp.where(visible, _wrap(position - BLANK + 4), 2)
        # Shortly after HMOVE the counters still get its extra pulses.
        since = clock - video.moved_at
        exceptions = (
            (RESM0, 60, 69, 8),
            (RESM1, 9, 18, 3),
            (RESBL, 54, 60, 10),
            (RESBL, 54, 69, 10),
            (RESBL, 9, 18, 3),
            (RESBL, 21, 30, 6),
            (RESBL, 18, 27, 5),
        )
        for number, gap, at, new in exceptions:
            other = jnp.where((register == number) & (since == gap) & (position == at), new, other)

        is_first = register == RESP0
        code = jnp.where(is_first, video.size_0, video.size_1) & 7
        distance = player - jnp.where(is_first, video.player_0, video.player_1)
        width = jnp.where(code == 5, 16, jnp.where(code == 7, 32, 8))
        early = jnp.zeros_like(visible)
        late = jnp.zeros_like(visible)
        for offset, codes in ((0, 0xFF), (16, COPIES_AT_16), (32, COPIES_AT_32), (64, COPIES_AT_64)):
            passed = distance - offset
            passed = jnp.where(passed < 0, passed + WIDTH, passed)
            passed = jnp.where(passed < 0, passed + WIDTH, passed)
            exists = _is(code, codes)
            early = early | (exists & (passed < 4))
            late = late | (exists & (passed >= 4) & (passed < 4 + width))
        is_player = is_first | (register == RESP1)
        return _Reset(player, other, is_player & late & ~early, ~early)


def _wrap(position: Array) -> Array:
    """Return a position between -160 and 319 as one between 0 and 159."""
    position = jnp.where(position >= WIDTH, position - WIDTH, position)
    return jnp.where(position < 0, position + WIDTH, position)


def _write(
    video: Video,
    lanes: Lanes,
    register: Array,
    value: Array,
    cycle: Array,
    clock: Array,
    reset: _Reset,
    active: Array,
) -> Video:
    """Let a write take effect."""
    is_ = lambda number: active & (register == number)

    def on(number: int, new: Array | int, old: Array) -> Array:
        return jnp.where(is_(number), new, old)

    def bit(word: Array, number: int, to: Array, where: Array) -> Array:
        return jnp.where(where, (word & ~(1 << number)) | to << number, word)

    hidden = video.hidden
    for player in range(2):
        hidden = bit(hidden, player, jnp.zeros_like(hidden), is_(NUSIZ0 + player))
        hidden = bit(hidden, player, reset.hides.astype(jnp.int32), is_(RESP0 + player))

    colours = video.colours
    for number in range(4):
        shift = 8 * number
        others = 0x00FFFFFF if number == 3 else ~(0xFF << shift)
        colours = on(COLUP0 + number, (colours & others) | (value & 0xFE) << shift, colours)

    reflect = video.reflect
    enabled = video.enabled
    delayed, locked, motion = video.delayed, video.locked, video.motion
    for number in range(2):
        reflect = bit(reflect, number, value >> 3 & 1, is_(REFP0 + number))
        locked = bit(locked, number, value >> 1 & 1, is_(RESMP0 + number))
    for number in range(3):
        enabled = bit(enabled, number, value >> 1 & 1, is_(ENAM0 + number))
        delayed = bit(delayed, number, value & 1, is_(VDELP0 + number))
    enabled = bit(enabled, 3, enabled >> 2 & 1, is_(GRP1))
    for number in range(5):
        motion = on(HMP0 + number, (motion & ~(0xF << 4 * number)) | (value >> 4) << 4 * number, motion)
    motion = on(HMCLR, 0, motion)

    backwards = reverse(value)
    field = on(PF0, (video.field & ~0x0000F) | value >> 4, video.field)
    field = on(PF1, (field & ~0x00FF0) | backwards << 4, field)
    field = on(PF2, (field & ~0xFF000) | value << 12, field)

    # New GRP0, GRP1 in the lower half, the old ones in the upper; writing one copies the other.
    shapes = video.shapes
    from_first = (shapes & 0x00FF00) << 16 | shapes & 0x00FF00 | (shapes & 0x00FF0000) | backwards
    from_second = shapes & ~0x00FFFF00 | (shapes & 0xFF) << 16 | backwards << 8
    shapes = on(GRP0, from_first, on(GRP1, from_second, shapes))

    objects = []
    is_move = is_(HMOVE)
    olds = (video.player_0, video.player_1, video.missile_0, video.missile_1, video.ball)
    for number, old in enumerate(olds):
        nibble = lax.shift_right_logical(video.motion, jnp.int32(4 * number)) & 15
        moved = _wrap(old + _motion(nibble, cycle))
        new = jnp.where(is_move, moved, old)
        objects.append(on(RESP0 + number, reset.player if number < 2 else reset.other, new))
    for number, size in ((0, video.size_0), (1, video.size_1)):
        code = size & 7
        middle = jnp.where(code == 5, 8, jnp.where(code == 7, 16, 4))
        freed = is_(RESMP0 + number) & ((video.locked >> number & 1) != 0) & ((value & 2) == 0)
        objects[2 + number] = jnp.where(freed, _wrap(olds[number] + middle), objects[2 + number])

    early = (cycle <= 20) | (cycle == 75)
    control = on(CTRLPF, value, video.control)
    mirrors = is_(CTRLPF) & (3 * cycle < 147)
    return video._replace(
        comb=jnp.where(is_move & early & (lanes.comb != 0), 1, video.comb),
        mirror=jnp.where(mirrors, value & 1, video.mirror),
        hidden=jnp.where(is_move, 0, hidden),
        blank=on(VBLANK, value >> 1 & 1, video.blank),
        size_0=on(NUSIZ0, value, video.size_0),
        size_1=on(NUSIZ1, value, video.size_1),
        colours=colours,
        control=control,
        reflect=reflect,
        field=field,
        shapes=shapes,
        enabled=enabled,
        motion=motion,
        delayed=delayed,
        locked=locked,
        player_0=objects[0],
        player_1=objects[1],
        missile_0=objects[2],
        missile_1=objects[3],
        ball=objects[4],
        moved_at=jnp.where(is_move, clock, video.moved_at),
        collisions=on(CXCLR, 0, video.collisions),
    )


def _motion(nibble: Array, cycle: Array) -> Array:
    """Return by how much HMOVE at a cycle of the line changes a position; `nibble` is the object's motion."""
    pulses = nibble ^ 8
    cycle = jnp.where(cycle == 75, -1, cycle)
    early = jnp.maximum(8 - pulses, (3 * cycle - 35) >> 2)
    late = -jnp.maximum(pulses - (14 - ((3 * (cycle - 55) + 2) >> 2)), 0)
    return jnp.where(cycle <= 20, early, late)
