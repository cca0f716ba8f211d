"""Where episodes begin: consoles from the power switch to a game's first frame, made once and kept on disk.

A reset of ale-py runs 68 to 500 frames. Here they are run once for some start states of each game, and a reset of the
environment picks one. Start states differ in what the timer held at the reset, in which many games find their
randomness, and in how long nothing happened first ("no-op starts").
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import xla
from podium.envs.atari.controls import ALWAYS, KNOB_CENTRE, controls
from podium.envs.atari.emulator import Emulator
from podium.envs.atari.games import Game
from podium.envs.atari.machine import Machine, power_on, system_reset
from podium.types import Array

TIMERS = 8
"""Start states of a game that differ by the timer; times the lengths of waiting, those that there are."""

MOST_FRAMES = 4000
"""In which every game stands at its first frame; the slowest, NameThisGame, takes 1,008."""

_SEED = 4_753_849
_FORMAT = 3  # Of the files; another number makes them anew.

FIRE = 1


class Starts(NamedTuple):
    """Start states of a game, [states, ...] each.

    Attributes:
      machine: the consoles.
      knob: int32, of the paddle.
      screen: uint8 [states, height, 160], the last picture in colour indices.
      lives: int32, as ale-py counts them; -1: what the rules read from the memory.
      started: int32, whether the game was begun, for the rules that remember it; -1 as for `lives`.
    """

    machine: Machine
    knob: Any
    screen: Any
    lives: Any
    started: Any


class Hold(NamedTuple):
    """A frame that a reset runs: an action of ale-py's 18, and which switches are held."""

    action: int = 0
    reset: bool = False
    select: bool = False
    detects: bool = False


def make(emulator: Emulator, noop_max: int) -> Starts:
    """Return start states of an emulator's games, [games, states, ...] each.

    With `noop_max` 0 there is one state a game: the one after ale-py's `loadROM` and `reset_game`. Else there are
    `TIMERS` times `noop_max`: after 1 to so many frames of waiting, the last of which presses FIRE where the game has
    it, as envpool's do.
    """
    timers = TIMERS if noop_max else 1
    which = np.repeat(np.arange(len(emulator.games), dtype=np.int32), timers)
    lanes = _Lanes(emulator, which)
    lanes.run([_whole_reset(emulator.games[game], number % timers) for number, game in enumerate(which)])
    found = [lanes.snapshot()]
    if noop_max:
        found = []
        for _ in range(noop_max):
            fires = [FIRE if FIRE in emulator.games[game].minimal_actions else 0 for game in which]
            found.append(lanes.peek(fires))
            lanes.frame([Hold()] * len(which))
    stacked = jax.tree.map(lambda *x: np.stack(x, 1), *found)
    return jax.tree.map(lambda x: x.reshape(len(emulator.games), timers * len(found), *x.shape[2:]), stacked)


class _Lanes:
    """Consoles that follow scripts, one frame at a time."""

    def __init__(self, emulator: Emulator, which: np.ndarray):
        self._emulator, self._which = emulator, jnp.asarray(which)
        generator = np.random.RandomState(_SEED)
        draw = lambda: int(np.frombuffer(generator.bytes(4), np.uint32)[0])  # noqa: E731
        ram = np.array([draw() & 0xFF for _ in range(128)], np.uint8)
        draw()
        self.timers = [25 + draw() % 75 for _ in range(64)]
        memory = np.zeros((len(which), emulator.cartridges.memory), np.uint8)
        memory[:, :128] = ram
        self._machine = power_on(jnp.asarray(memory))
        self._knob = jnp.full(len(which), KNOB_CENTRE, jnp.int32)
        self._screen = np.zeros((len(which), emulator.cartridges.height, 160), np.uint8)
        options = xla.careful_options(jax.devices()[0])
        self._frame = jax.jit(self._run_frame, compiler_options=options)
        self._reset = jax.jit(self._run_reset, compiler_options=options)

    def _run_frame(
        self, machine: Machine, knob: Array, action: Array, reset: Array, select: Array, detects: Array, active: Array
    ) -> tuple[Machine, Array, Array]:
        held = controls(self._emulator.games, self._which, action, knob, reset=reset, select=select)
        charges = [jnp.where(detects & (each >= 0), ALWAYS, each) for each in held.charge]
        held = held._replace(charge=(charges[0], charges[1], charges[2], charges[3]))
        after, screens = self._emulator.run_frame(
            self._emulator.cartridges, machine, self._which, held, active, jnp.ones((), bool)
        )
        return after, held.knob, screens

    def _run_reset(self, machine: Machine, timer: Array, where: Array) -> Machine:
        fresh = system_reset(machine, self._emulator.cartridges, self._which, timer)
        choose = lambda new, old: jnp.where(where.reshape(-1, *[1] * (new.ndim - 1)), new, old)  # noqa: E731
        return jax.tree.map(choose, fresh, machine)

    def run(self, scripts: Sequence[Generator[Any, np.ndarray, None]]) -> None:
        """Follow scripts to their ends: each yields a `Hold` for a frame, or a timer's number for a system reset.

        Raises:
          RuntimeError: some have not ended after `MOST_FRAMES`.
        """
        wishes: list[Any] = [next(script) for script in scripts]
        left = MOST_FRAMES
        while any(wish is not None for wish in wishes):
            if not left:
                lanes = [number for number, wish in enumerate(wishes) if wish is not None]
                names = sorted({self._emulator.games[int(self._which[number])].name for number in lanes})
                raise RuntimeError(
                    f"{', '.join(names)}: no first frame after {MOST_FRAMES} frames from the power switch; the "
                    "cartridge is not what its table of rules is for, or is not emulated rightly. Please report it."
                )
            left -= 1
            resets = np.array([isinstance(wish, int) for wish in wishes])
            if resets.any():
                timers = [self.timers[wish] if isinstance(wish, int) else 0 for wish in wishes]
                self._machine = self._reset(self._machine, jnp.asarray(timers, jnp.int32), jnp.asarray(resets))
                self._knob = jnp.where(jnp.asarray(resets), KNOB_CENTRE, self._knob)
                self._screen[resets] = 0
            else:
                self.frame(wishes)
            ram = np.asarray(self._machine.ram)
            for number, script in enumerate(scripts):
                if wishes[number] is not None and (resets[number] or not resets.any()):
                    try:
                        wishes[number] = script.send(ram[number])
                    except StopIteration:
                        wishes[number] = None

    def frame(self, holds: Sequence[Hold | None]) -> None:
        """Run a frame in the lanes that hold something."""
        active = np.array([hold is not None for hold in holds])
        fields = [hold or Hold() for hold in holds]
        columns = [np.array(column) for column in zip(*fields, strict=True)]
        self._machine, knob, screen = self._frame(
            self._machine, self._knob, columns[0].astype(np.int32), *columns[1:], active
        )
        self._knob = jnp.where(jnp.asarray(active), knob, self._knob)
        self._screen[active] = np.asarray(screen)[active]

    def snapshot(self) -> Starts:
        """Return how the lanes stand."""
        unknown = np.full(len(self._which), -1, np.int32)
        return jax.tree.map(np.array, Starts(self._machine, self._knob, self._screen, unknown, unknown))

    def peek(self, actions: Sequence[int]) -> Starts:
        """Return how the lanes would stand after a frame with these actions; they stay as they are."""
        before = self._machine, self._knob, self._screen.copy()
        self.frame([Hold(action) for action in actions])
        found = self.snapshot()
        self._machine, self._knob, self._screen = before
        return found


Script = Generator[Any, np.ndarray, None]


def _whole_reset(game: Game, timer: int) -> Script:
    """From power to the second reset of the environment: what `loadROM` and `reset_game` do.

    Draws of the timer come one a system reset; `timer` skips that many before the last.
    """
    yield 0
    yield from _frames(60, Hold(detects=True))
    yield 1
    yield from _reset(game, 2)
    yield from _reset(game, 3 + timer)


def _frames(number: int, hold: Hold) -> Generator[Any, np.ndarray, np.ndarray]:
    ram = np.zeros(128, np.uint8)
    for _ in range(number):
        ram = yield hold
    return ram


def _reset(game: Game, timer: int) -> Script:
    """One reset of the environment."""
    yield timer
    yield from _frames(60, Hold())
    ram = yield from _frames(4, Hold(reset=True))
    select = game.variation_select
    if select is not None and select.special == "double_dunk":
        yield from _double_dunk()
    elif select is not None:
        for step, number in select.before:
            if step == "reset_switch":
                ram = yield from _frames(number, Hold(reset=True))
            elif step == "noop":
                ram = yield from _frames(number, Hold())
            else:
                for _ in range(number):
                    ram = yield from _press(select.select_frames)
        while not all(ram[address - 0x80] in values for address, values in select.until):
            ram = yield from _press(select.select_frames)
        yield from _frames(4, Hold(reset=True))
    yield from _frames(4, Hold(reset=True))
    for action in game.start_actions:
        yield Hold(action)


def _press(frames: int) -> Generator[Any, np.ndarray, np.ndarray]:
    yield from _frames(frames, Hold(select=True))
    return (yield Hold())


def _double_dunk() -> Script:
    """Choose what the other games' tables say in words: options of its menu, one after the other."""
    down, left, start = 5, 4, 10
    ram = yield from _frames(1, Hold(select=True))
    ram = yield Hold()

    def go_down(ram: np.ndarray) -> Generator[Any, np.ndarray, np.ndarray]:
        place = ram[0x30]
        while ram[0x30] == place:
            yield Hold(down)
            ram = yield Hold()
        return ram

    for moves, bit in ((2, 0x08), (1, 0x10), (1, 0x04), (1, 0x20)):
        for _ in range(moves):
            ram = yield from go_down(ram)
        while ram[0] & bit:
            yield Hold(left)
            ram = yield Hold()
    yield from _frames(4, Hold(reset=True))
    yield Hold(start)
    yield Hold()


def load_or_make(emulator: Emulator, noop_max: int) -> Starts:
    """Return `make`'s states, from disk where they were made before.

    They are kept a file a game in `$PODIUM_CACHE/atari`, else in that folder of `$XDG_CACHE_HOME/podium` or
    `~/.cache/podium`; a folder that cannot be written to is done without.
    """
    folder = _folder()
    paths = [folder / _name(game, noop_max) for game in emulator.games]
    read = [_read(path, game) for path, game in zip(paths, emulator.games, strict=True)]
    missing = [number for number, starts in enumerate(read) if starts is None]
    if missing:
        names = ", ".join(emulator.games[number].name for number in missing)
        print(f"Making start states of {names}, once: {folder} keeps them.", file=sys.stderr)
        made = make(emulator.only(missing), noop_max)
        for row, number in enumerate(missing):
            mine = jax.tree.map(lambda x, row=row: x[row], made)
            _write(paths[number], mine, emulator.games[number])
            read[number] = mine
    return jax.tree.map(lambda *x: np.stack(x), *read)


def _folder() -> Path:
    named = os.environ.get("PODIUM_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podium"
    return base / "atari"


def _name(game: Game, noop_max: int) -> str:
    return f"{game.rom}-{game.md5[:8]}-noop{noop_max}-v{_FORMAT}.npz"


def _read(path: Path, game: Game) -> Starts | None:
    try:
        starts, md5 = read_arrays(path)
    except UNREADABLE:
        return None
    return starts if md5 == game.md5 else None


def _write(path: Path, starts: Starts, game: Game) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, starts, game.md5)
    except OSError as error:
        print(f"Start states are not kept: {error}", file=sys.stderr)


UNREADABLE = (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
"""What `read_arrays` raises where there is no such file, or a damaged one."""


def write_arrays(path: Path, starts: Starts, md5: str) -> None:
    """Write start states of the cartridge with this md5, all or nothing."""
    named = _named(starts)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.savez_compressed(file, digest=np.array(_digest(named)), md5=np.array(md5), **named)
        os.replace(file.name, path)
    except BaseException:
        if "file" in locals():
            Path(file.name).unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> tuple[Starts, str]:
    """Return the start states in a file, and the md5 of their cartridge; see `UNREADABLE`."""
    # What there is by name: a console whose state has come to consist of other things does not take the old ones.
    zero = np.zeros((1, 128), np.uint8)
    empty = Starts(jax.eval_shape(power_on, zero), *[zero] * 4)
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        named = {name: file[name] for name in _named(empty)}
        if set(file.files) != {*named, "digest", "md5"}:
            raise ValueError("it is of another version of podium")
        if str(file["digest"]) != _digest(named):
            raise ValueError("its digest is wrong")
        return jax.tree.unflatten(jax.tree.structure(empty), list(named.values())), str(file["md5"])


def _named(starts: Starts) -> dict[str, Any]:
    """Return the leaves of start states by name, in the order of the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(starts)
    return {jax.tree_util.keystr(path, simple=True, separator="-"): leaf for path, leaf in leaves}


def _digest(named: dict[str, Any]) -> str:
    sha = hashlib.sha256()
    for name, leaf in named.items():
        array = np.ascontiguousarray(leaf)
        sha.update(f"{name} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()
