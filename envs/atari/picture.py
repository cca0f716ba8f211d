"""Pictures from the records that `video` leaves: colour indices of every pixel of a frame."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from podium.envs.atari.video import COPIES_AT_16, COPIES_AT_32, COPIES_AT_64, WIDTH, Settle, as_it_is
from podium.types import Array

WORDS = 5
"""Of a record."""

_NOWHERE = 1 << 20


def draw(records: Array, counts: Array, height: int, ends: Array, settle: Settle = as_it_is) -> Array:
    """Return pictures of colour indices, uint8 [lanes, height, 160]; what was not drawn is 0.

    Args:
      records: int32 [5, lanes, places], as `video.pack` makes them, in the order of their pixels.
      counts: int32 [lanes], how many there are.
      height: lines of the picture.
      ends: int32 [lanes], pixel at which drawing stopped.
      settle: that of `processor.Memory`.
    """
    lanes, places = records.shape[1:]
    # One place more at the end, where no pixel is: the last record goes on for ever.
    starts = jnp.where(jnp.arange(places) < counts[:, None], records[0] & 0xFFFF, _NOWHERE)
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=_NOWHERE)
    rows = jnp.arange(height, dtype=jnp.int32) * WIDTH
    lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]

    def of(words: Array, place: Array) -> Array:
        return words.at[lane, place].get(mode="promise_in_bounds")

    def enter(place: Array) -> tuple[Array, ...]:
        """Return the words of a record, and where the next begins."""
        inside = jnp.maximum(place, 0)
        return (*(of(words, inside) for words in records), of(starts, place + 1))

    def column(carry: tuple[Array, tuple[Array, ...]], x: Array) -> tuple[tuple[Array, tuple[Array, ...]], Array]:
        place, words = carry
        pixel = rows + x
        enters = words[WORDS] <= pixel
        place = settle(place + enters)
        words = settle(enter(place))
        shown = jnp.where((place < 0) | (pixel >= ends[:, None]), 0, colour(words[:WORDS], pixel, x))
        return (place, words), shown.astype(jnp.uint8)

    # The record that each line begins in, and from there on one comparison a pixel.
    before = jax.vmap(lambda line: jnp.searchsorted(line, rows, side="right"))(starts).astype(jnp.int32) - 1
    columns = lax.scan(column, (before, enter(before)), jnp.arange(WIDTH, dtype=jnp.int32))[1]
    return jnp.moveaxis(columns, 0, -1)


def colour(words: tuple[Array, ...], pixel: Array, x: Array) -> Array:
    """Return the colour index of pixels.

    Args:
      words: of the records that they are in.
      pixel: their numbers in the picture.
      x: their columns.
    """
    flags, sizes, players, others, colours = words

    def bits(word: Array, low: int, count: int) -> Array:
        return lax.shift_right_logical(word, jnp.int32(low)) & ((1 << count) - 1)

    hue = [bits(colours, 8 * number, 8) for number in range(4)]
    shapes = bits(players, 0, 8), bits(players, 8, 8)
    codes = bits(sizes, 20, 3), bits(sizes, 23, 3)
    player = [
        _player(shapes[number], codes[number], bits(flags, 21 + number, 1), x - bits(players, 16 + 8 * number, 8))
        for number in range(2)
    ]
    enabled = bits(flags, 27, 1), bits(flags, 28, 1)
    missile = [
        (enabled[number] != 0) & _missile(codes[number], bits(others, 24 + 2 * number, 2), x - position)
        for number, position in enumerate((bits(others, 0, 8), bits(others, 8, 8)))
    ]
    has_ball = bits(flags, 26, 1)
    ball = (has_ball != 0) & (_around(x - bits(others, 16, 8)) < (1 << bits(others, 28, 2)))
    block = x >> 2
    right = block >= 20
    block = jnp.where(right, jnp.where(bits(flags, 23, 1) != 0, 39 - block, block - 20), block)
    field = (bits(sizes, 0, 20) >> block & 1) != 0

    score, priority = bits(flags, 24, 1) != 0, bits(flags, 25, 1) != 0
    half = jnp.where(right, hue[1], hue[0])
    first, second = player[0] | missile[0], player[1] | missile[1]
    alone = (shapes[0] | shapes[1] | enabled[0] | enabled[1] | has_ball) == 0
    scored = score & (alone | ~priority)
    field_hue = jnp.where(scored, half, hue[2])
    # Playfield in front.
    front = jnp.where(field | ball, hue[2], jnp.where(first, hue[0], jnp.where(second, hue[1], hue[3])))
    # Players in front; player 1 stays behind a playfield in player 0's colour.
    over = jnp.where(ball, hue[2], hue[3])
    over = jnp.where(field, field_hue, over)
    over = jnp.where(second & ~(field & score & ~right), hue[1], over)
    over = jnp.where(first, hue[0], over)
    plain = jnp.where(field, field_hue, hue[3])
    shown = jnp.where(alone, plain, jnp.where(priority, front, over))
    start, black = flags & 0xFFFF, bits(flags, 16, 4)
    return jnp.where((bits(flags, 20, 1) != 0) | (pixel < start + black), 0, shown)


def _around(distance: Array) -> Array:
    return jnp.where(distance < 0, distance + WIDTH, distance)


def _copies(code: Array, distance: Array) -> list[tuple[Array, Array]]:
    """Return for each copy whether it exists, and how far to the right of its position a pixel is."""
    exists = lambda codes: (jnp.int32(codes) >> code & 1) != 0
    offsets = ((0, 0xFF), (16, COPIES_AT_16), (32, COPIES_AT_32), (64, COPIES_AT_64))
    return [(exists(codes), distance - offset) for offset, codes in offsets]


def _player(shape: Array, code: Array, hidden: Array, distance: Array) -> Array:
    """Tell whether a pixel is a player's; `distance` is how far to the right of its position."""
    distance = _around(distance)
    lit = jnp.zeros_like(distance)
    for number, (exists, within) in enumerate(_copies(code, distance)):
        in_shape = exists & (within >= 0) & (within < 8)
        if number == 0:
            in_shape = in_shape & (hidden == 0)
        lit = lit | jnp.where(in_shape, shape >> (within & 7) & 1, 0)
    doubled, fourfold = code == 5, code == 7
    delayed = distance - 1
    bit = jnp.where(doubled, delayed >> 1, delayed >> 2)
    wide = jnp.where((delayed >= 0) & (bit < 8) & (hidden == 0), shape >> (bit & 7) & 1, 0)
    return jnp.where(doubled | fourfold, wide, lit) != 0


def _missile(code: Array, width: Array, distance: Array) -> Array:
    """Tell whether a pixel is a missile's that is seen."""
    lit = jnp.zeros_like(distance, bool)
    for exists, within in _copies(code, _around(distance)):
        lit = lit | (exists & (within >= 0) & (within < (1 << width)))
    return lit
