"""Colours, greys and small pictures are ale-py's."""

from __future__ import annotations

from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.envs.atari import pictures
from podium.envs.atari.games import GAMES, Game, find

COLOUR_BARS = (
    bytes([0xA9, 0x00, 0x85, 0x01])  # VBLANK off.
    + bytes([0xA9, 2, 0x85, 0, 0x85, 2, 0x85, 2, 0x85, 2, 0xA9, 0, 0x85, 0])  # At $F004: three lines of VSYNC.
    + bytes([0xA2, 40, 0x85, 2, 0xCA, 0xD0, 0xFB])  # 40 lines.
    + bytes([0x85, 2, 0x86, 9, 0xE8, 0xE8, 0xD0, 0xF8])  # 128 lines, the background two more in each.
    + bytes([0xA2, 80, 0x85, 2, 0xCA, 0xD0, 0xFB])  # 80 lines.
    + bytes([0x4C, 0x04, 0xF0])
)
"""A program that shows every colour of the console."""


def test_palette_is_that_of_the_console(ale, tmp_path):
    cartridge = COLOUR_BARS.ljust(0xFFC, b"\xea") + b"\x00\xf0" * 2
    (tmp_path / "amidar.bin").write_bytes(cartridge)  # ale-py goes by the name.
    box = ale(tmp_path / "amidar.bin")
    for _ in range(3):
        box.act()
    screen = box.ale.getScreen()
    assert set(screen.ravel()) == set(range(0, 256, 2))
    for form in (screen, screen.astype(np.int32)):
        np.testing.assert_array_equal(pictures.rgb(form), box.ale.getScreenRGB())
        np.testing.assert_array_equal(pictures.grey(form), box.ale.getScreenGrayscale())
    assert pictures.rgb(screen).dtype == pictures.grey(screen).dtype == jnp.uint8


def areas(picture: np.ndarray, height: int, width: int) -> tuple[np.ndarray, int]:
    """Return the sums of areas: every pixel split into so many that areas hold whole ones; and how many."""
    for axis, new in ((0, height), (1, width)):
        old = picture.shape[axis]
        picture = np.repeat(picture.astype(np.int64), new // gcd(old, new), axis)
        split = [*picture.shape]
        split[axis : axis + 1] = [new, old // gcd(old, new)]
        picture = picture.reshape(split).sum(axis + 1)
    return picture, 210 * 160 // (gcd(210, height) * gcd(160, width))


@pytest.mark.parametrize("size", [84, 1, (210, 160), (7, 159)])
def test_resize_is_the_mean_of_areas(size):
    height, width = (size, size) if isinstance(size, int) else size
    picture = np.random.default_rng(0).integers(0, 256, (210, 160), dtype=np.uint8)
    total, number = areas(picture, height, width)
    wanted = np.round(total / number)  # Halves to even; the quotients are far apart, or exact halves.
    small = jax.jit(lambda x: pictures.resize(x, size))(picture)
    assert small.dtype == jnp.uint8
    np.testing.assert_array_equal(small, wanted)


def test_resize_rounds_halves_to_even_and_takes_batches():
    # An area is 200 units, 100 of which are half a grey level.
    flat = np.zeros((3, 2, 10, 160), np.uint8)
    flat[0, 0, :, ::2] = 1
    flat[0, 1, :, ::2] = 3
    flat[2, 1] = 255
    small = np.asarray(jax.jit(lambda x: pictures.resize(x, (4, 80)))(flat))
    assert small.shape == (3, 2, 4, 80)
    assert (small[0, 0] == 0).all() and (small[0, 1] == 2).all() and (small[2, 1] == 255).all()
    np.testing.assert_array_equal(pictures.resize(flat[0, 1], (4, 80)), small[0, 1])


def test_preprocess_takes_greys_before_the_brighter():
    before, last = np.full((210, 160), 0x0E, np.uint8), np.full((210, 160), 0x40, np.uint8)
    assert pictures.GREYS[0x0E] > pictures.GREYS[0x40]
    small = np.asarray(pictures.preprocess(before, last))
    assert small.shape == (84, 84) and (small == pictures.GREYS[0x0E]).all()


@pytest.mark.parametrize("size", [0, 161, (211, 84), (84, 84, 1), (84, 0)])
def test_sizes_that_are_refused(size):
    with pytest.raises(ValueError, match=r"size=.* must be from 1 to 210 high and to 160 wide: .* use 84"):
        pictures.resize(np.zeros((210, 160), np.uint8), size)


def differences(game: Game, ale: Any, num_steps: int, size: int = 84) -> tuple[int, int]:
    """Play a game in ale-py's vector environment and beside it; return differing pixels, and all.

    Raises:
      AssertionError: pixels differ by more than one level, or away from means that are exactly halves.
    """
    library = pytest.importorskip("ale_py.vector_env", reason="this ale-py has no vector environment")
    box = ale.of(game)
    box.ale.reset_game()
    size_options = {"img_height": size, "img_width": size}
    vector = library.AtariVectorEnv(
        game.rom, 1, num_threads=1, noop_max=1, repeat_action_probability=0.0, reward_clipping=False, **size_options
    )
    vector.reset(seed=np.array([1]))
    if 1 in game.minimal_actions:  # The vector environment presses FIRE at a reset.
        box.act(1)
    shrink = jax.jit(lambda before, last: pictures.preprocess(before, last, size))
    rng = np.random.default_rng(0)
    different = pixels = 0
    for _ in range(num_steps):
        index = int(rng.integers(len(game.minimal_actions)))
        screens = []
        for _ in range(4):
            box.act(game.minimal_actions[index])
            screens.append(box.ale.getScreen())
            if box.ale.game_over():
                return different, pixels
        theirs = vector.step(np.array([index]))[0][0, -1].astype(int)
        ours = np.asarray(shrink(screens[2], screens[3])).astype(int)
        wrong = ours != theirs
        total, number = areas(np.maximum(*(pictures.GREYS[screen] for screen in screens[2:])), size, size)
        assert (2 * total[wrong] % (2 * number) == number).all() and (np.abs(ours - theirs) <= 1).all()
        different, pixels = different + int(wrong.sum()), pixels + wrong.size
    return different, pixels


@pytest.mark.parametrize("name", ["Breakout", "Seaquest"])
def test_observations_are_ale_pys(name, ale):
    different, pixels = differences(find(name), ale, 60)
    assert pixels == 60 * 84 * 84 and different < pixels / 1e4


@pytest.mark.slow
@pytest.mark.parametrize("size", [84, 64, 100])
def test_observations_of_all_games_are_ale_pys(size, ale):
    different, pixels = map(sum, zip(*(differences(game, ale, 80, size) for game in GAMES), strict=True))
    print(f"{different} of {pixels} pixels differ at size {size}")
    assert pixels > 4_000 * size**2 and different < pixels / (1e3 if size == 84 else 1e2)
