"""Pictures of environment states: small NumPy drawings, made on the host, uint8 [H, W, 3].

Shapes are drawn from their distance to each pixel (inside, a half-pixel edge, outside), so lines are smooth without
any drawing library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Picture = np.ndarray
Colour = tuple[int, int, int]

PAPER: Colour = (247, 247, 244)
INK: Colour = (38, 42, 51)
GREY: Colour = (186, 190, 196)
BLUE: Colour = (58, 110, 165)
ORANGE: Colour = (214, 123, 54)
RED: Colour = (200, 68, 60)
NIGHT: Colour = (24, 26, 33)
CELL: Colour = (34, 37, 46)

# One colour a channel of a grid, told apart by hue and by lightness.
CHANNELS: tuple[Colour, ...] = (
    (92, 186, 250),
    (250, 240, 130),
    (126, 104, 60),
    (240, 104, 84),
    (112, 206, 128),
    (198, 132, 232),
    (246, 166, 70),
    (236, 126, 180),
    (150, 226, 220),
    (206, 212, 222),
)


def cartpole(x: float, theta: float, x_threshold: float = 2.4) -> Picture:
    """Draw a cart at `x` (metres) whose pole leans by `theta` (radians, to the right of upright)."""
    height, width = 160, 240
    picture = _canvas(height, width, PAPER)
    scale = width / (2 * 1.2 * x_threshold)
    ground = 122.0
    cart = np.array([width / 2 + float(x) * scale, ground - 8.0])
    _line(picture, (0, ground), (width, ground), 0.8, GREY)
    for limit in (-x_threshold, x_threshold):
        mark = width / 2 + limit * scale
        _line(picture, (mark, ground - 5), (mark, ground + 5), 0.8, RED)
    _box(picture, cart, (22, 8), INK)
    axle = cart - (0, 6)
    tip = axle + 78 * np.array([np.sin(theta), -np.cos(theta)])
    _line(picture, axle, tip, 4.0, ORANGE)
    _disc(picture, axle, 4.0, BLUE)
    return _to_uint8(picture)


def pendulum(theta: float, torque: float = 0.0, max_torque: float = 2.0) -> Picture:
    """Draw a pendulum at `theta` (radians from upright, counter-clockwise) and the torque as a bar below it."""
    size = 160
    picture = _canvas(size, size, PAPER)
    centre = np.array([size / 2, size / 2 - 6])
    _ring(picture, centre, 62, 0.6, GREY)
    tip = centre + 60 * np.array([-np.sin(theta), -np.cos(theta)])
    _line(picture, centre, tip, 6.5, RED)
    _disc(picture, centre, 4.0, INK)
    end = size / 2 - 60 * float(np.clip(torque / max_torque, -1, 1))
    _line(picture, (size / 2 - 60, size - 10), (size / 2 + 60, size - 10), 0.6, GREY)
    _line(picture, (size / 2, size - 10), (end, size - 10), 3.0, BLUE)
    return _to_uint8(picture)


def grid(obs: Any, cell: int = 16) -> Picture:
    """Draw a grid of channels: each cell takes the colour of its lowest channel that is set, on a dark ground.

    Args:
      obs: [H, W] or [H, W, C], values in [0, 1]; a channel is as bright as its value.
      cell: pixels a side of one cell.
    """
    obs = np.asarray(obs, np.float64)
    obs = obs[..., None] if obs.ndim == 2 else obs
    rows, columns, channels = obs.shape
    colours = np.array([CHANNELS[c % len(CHANNELS)] for c in range(channels)], np.float64)
    cells = np.broadcast_to(np.array(CELL, np.float64), (rows, columns, 3)).copy()
    for channel in reversed(range(channels)):
        weight = np.clip(obs[..., channel : channel + 1], 0, 1)
        cells = (1 - weight) * cells + weight * colours[channel]
    picture = np.repeat(np.repeat(cells, cell, axis=0), cell, axis=1)
    gap = cell // 12
    lines = np.arange(max(rows, columns) * cell) % cell < gap
    picture[lines[: rows * cell]] = NIGHT
    picture[:, lines[: columns * cell]] = NIGHT
    return _to_uint8(picture)


def catch(ball_row: int, ball_column: int, paddle_column: int, rows: int, columns: int, cell: int = 16) -> Picture:
    """Draw a round ball that falls towards a flat paddle in the last row."""
    picture = _canvas(rows * cell, columns * cell, CELL)
    half = cell / 2
    for column in range(1, columns):
        _line(picture, (column * cell, 0), (column * cell, rows * cell), 0.4, NIGHT)
    for row in range(1, rows):
        _line(picture, (0, row * cell), (columns * cell, row * cell), 0.4, NIGHT)
    paddle = (int(paddle_column) * cell + half, (rows - 1) * cell + 0.7 * cell)
    _box(picture, paddle, (0.42 * cell, 0.16 * cell), CHANNELS[0])
    _disc(picture, (int(ball_column) * cell + half, int(ball_row) * cell + half), 0.34 * cell, CHANNELS[1])
    return _to_uint8(picture)


def board(first: Any, second: Any, cell: int = 24) -> Picture:
    """Draw a board of round stones, those of who began in orange, the other's in blue.

    Args:
      first: [H, W], where the first player has stones.
      second: [H, W], where the second has.
      cell: pixels a side of one square.
    """
    first, second = np.asarray(first), np.asarray(second)
    rows, columns = first.shape
    picture = _canvas(rows * cell, columns * cell, PAPER)
    for column in range(1, columns):
        _line(picture, (column * cell, 0), (column * cell, rows * cell), 0.5, GREY)
    for row in range(1, rows):
        _line(picture, (0, row * cell), (columns * cell, row * cell), 0.5, GREY)
    for stones, colour in ((first, ORANGE), (second, BLUE)):
        for row, column in np.argwhere(stones):
            _disc(picture, ((column + 0.5) * cell, (row + 0.5) * cell), 0.36 * cell, colour)
    return _to_uint8(picture)


def cards(hands: Any, public: int | None, stakes: Any, to_move: int) -> Picture:
    """Draw two players' cards and what each has put in; a frame marks who is to move.

    Args:
      hands: rank of each player's card, as many pips, 1 to 3.
      public: rank of the card that lies open between them, 0 for one not shown yet, None where there is none.
      stakes: chips of each player.
      to_move: 0 (left) or 1 (right).
    """
    picture = _canvas(112, 200, PAPER)
    middles, colours = (40.0, 160.0), (ORANGE, BLUE)
    for player, (x, colour) in enumerate(zip(middles, colours, strict=True)):
        if player == to_move:
            _box(picture, (x, 40), (25, 35), RED)
        _card(picture, x, int(hands[player]), colour)
        for chip in range(int(stakes[player])):
            _disc(picture, (x - 24 + 8 * (chip % 7), 86 + 9 * (chip // 7)), 3.2, INK)
    if public is not None:
        _card(picture, 100.0, int(public), RED)
    return _to_uint8(picture)


def _card(picture: np.ndarray, x: float, rank: int, colour: Colour) -> None:
    """Draw a card with `rank` pips around (x, 40); 0 is its back."""
    _box(picture, (x, 40), (21, 31), GREY)
    _box(picture, (x, 40), (19.5, 29.5), PAPER if rank else NIGHT)
    for pip in range(rank):
        _disc(picture, (x, 40 + 16 * (pip - (rank - 1) / 2)), 5.5, colour)


def crowd(positions: Any, headings: Any, is_tagger: Any, shown: Any, side: float, size: int = 240) -> Picture:
    """Draw many agents as dots with a tail: taggers red, runners blue.

    Args:
      positions: [N, 2], x and y in [0, side], y upwards.
      headings: [N] radians, counter-clockwise from the x axis.
      is_tagger: [N] bool.
      shown: [N] bool, who is still in play.
      side: of the square that they move in.
      size: pixels a side of the picture.
    """
    picture = _canvas(size, size, PAPER)
    positions, headings = np.asarray(positions, np.float64), np.asarray(headings, np.float64)
    radius = float(np.clip(0.16 * size / np.sqrt(len(positions)), 1.5, 5.0))
    for i in np.flatnonzero(np.asarray(shown)):
        centre = np.array([positions[i, 0], side - positions[i, 1]]) / side * size
        tail = centre - 2 * radius * np.array([np.cos(headings[i]), -np.sin(headings[i])])
        low = np.floor(np.minimum(centre, tail) - radius - 1).clip(0, size - 1).astype(int)
        high = np.ceil(np.maximum(centre, tail) + radius + 1).clip(1, size).astype(int)
        patch = picture[low[1] : high[1], low[0] : high[0]]  # A view: a thousand dots on whole canvases take seconds.
        colour = RED if is_tagger[i] else BLUE
        _line(patch, tail - low, centre - low, radius / 3, colour)
        _disc(patch, centre - low, radius, colour)
    return _to_uint8(picture)


def _canvas(height: int, width: int, colour: Colour) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.float64), (height, width, 3)).copy()


def _to_uint8(picture: np.ndarray) -> Picture:
    return np.round(picture).clip(0, 255).astype(np.uint8)


def _pixels(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.mgrid[: picture.shape[0], : picture.shape[1]]
    return columns + 0.5, rows + 0.5


def _paint(picture: np.ndarray, distance: np.ndarray, colour: Colour) -> None:
    """Lay `colour` where `distance` (pixels, negative inside) is below zero, with a soft edge one pixel wide."""
    weight = np.clip(0.5 - distance, 0, 1)[..., None]
    picture[:] = (1 - weight) * picture + weight * np.array(colour, np.float64)


def _line(picture: np.ndarray, start: Any, end: Any, half_width: float, colour: Colour) -> None:
    x, y = _pixels(picture)
    start, direction = np.asarray(start, float), np.subtract(end, start, dtype=float)
    length_squared = max(float(direction @ direction), 1e-9)
    along = np.clip(((x - start[0]) * direction[0] + (y - start[1]) * direction[1]) / length_squared, 0, 1)
    distance = np.hypot(x - start[0] - along * direction[0], y - start[1] - along * direction[1])
    _paint(picture, distance - half_width, colour)


def _disc(picture: np.ndarray, centre: Any, radius: float, colour: Colour) -> None:
    x, y = _pixels(picture)
    _paint(picture, np.hypot(x - centre[0], y - centre[1]) - radius, colour)


def _ring(picture: np.ndarray, centre: Any, radius: float, half_width: float, colour: Colour) -> None:
    x, y = _pixels(picture)
    _paint(picture, np.abs(np.hypot(x - centre[0], y - centre[1]) - radius) - half_width, colour)


def _box(picture: np.ndarray, centre: Any, half_size: Any, colour: Colour) -> None:
    x, y = _pixels(picture)
    outside = np.maximum(np.abs(x - centre[0]) - half_size[0], np.abs(y - centre[1]) - half_size[1])
    _paint(picture, outside, colour)
