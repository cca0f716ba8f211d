"""Where episodes begin: consoles from the power switch to a game's first frame, made once and kept on disk.

A reset of ale-py runs 68 to 500 frames. Here they are run once for some start states of each game, and a reset of the
environment picks one. Start states differ in what the timer held at the reset, in which many games find their
randomness, and in how long nothing happened first ("no-op starts").
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.flatten_util import ravel_pytree
from jax.sharding import SingleDeviceSharding

from podium.envs.atari import compiler, machine
from podium.envs.atari.cartridges import LARGEST, Slot
from podium.envs.atari.controls import ALWAYS, KNOB_CENTRE, Wiring, wired, wiring_of
from podium.envs.atari.emulator import Emulator
from podium.envs.atari.games import NUM_ACTIONS, Game
from podium.envs.atari.machine import Machine, power_on, system_reset
from podium.envs.atari.processor import Processor
from podium.envs.atari.video import WIDTH, Video
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
    `TIMERS` times `noop_max`: after 1 to `noop_max` frames of waiting, the last of which presses FIRE where the game
    has it, as envpool's do.
    """
    program = _program(emulator.cartridges.slot(0))
    timers = range(TIMERS if noop_max else 1)

    def boot(number: int) -> _Console:
        return _Console.with_game(emulator, number, program).follow(_boot(emulator.games[number]))

    def begin(console: _Console, timer: int) -> list[Starts]:
        console = console.follow(_reset(console.game, 3 + timer))
        return list(console.wait(noop_max)) if noop_max else [console.snapshot()]

    # A console's frames follow one another; other consoles' are run meanwhile. What runs them lets go of Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        booted = list(pool.map(boot, range(len(emulator.games))))
        every = [(console, timer) for console in booted for timer in timers]
        found = [state for states in pool.map(begin, *zip(*every, strict=True)) for state in states]
    return jax.tree.map(lambda *x: np.stack(x).reshape(len(booted), -1, *x[0].shape), *found)


class _Program(NamedTuple):
    """What consoles run, one at a time; compiled once for all games with the same schemes of bank switching.

    Attributes:
      frame: from slot, wiring, state, `Hold` as int32 [4] and knob to the next state, knob and picture.
      reset: from slot, state and what the timer holds to the state after a system reset.
    """

    frame: Callable[..., tuple[_State, Array, Array]]
    reset: Callable[..., _State]


class _State(NamedTuple):
    """A console's state, in few arrays: each that a program takes or returns costs time.

    Attributes:
      words: int32 [words], its processor and video.
      ram: uint8 [1, bytes].
    """

    words: Any
    ram: Any


def _pack(machine: Machine) -> _State:
    return _State(jnp.concatenate(jax.tree.leaves((machine.processor, machine.video))), machine.ram)


def _unpack(state: _State) -> Machine:
    """Return the state of a batch of one."""
    words, count = list(state.words[:, None]), len(Processor._fields)
    return Machine(state.ram, Processor(*words[:count]), Video(*words[count:]))


def _program(kind: Slot) -> _Program:
    """Return what runs cartridges that fit in slots like this."""
    return _compile(kind.schemes, kind.has_extra, kind.height)


@functools.cache
def _compile(schemes: tuple[str, ...], has_extra: bool, height: int) -> _Program:
    """Compile for slots of a kind."""
    which = np.zeros(1, np.int32)

    def frame(slot: Slot, wiring: Wiring, state: _State, hold: Array, knob: Array) -> tuple[_State, Array, Array]:
        # An argument that is not used would end the process: XLA's compiler takes it for a mistake of its own. So
        # numbers are one argument, whatever becomes of some of them.
        numbers, restore = ravel_pytree((slot.facts, wiring, state.words, hold, knob))

        def run(data: Array, ram: Array, numbers: Array) -> tuple[_State, Array, machine.Drawn]:
            facts, wiring, words, hold, knob = restore(numbers)
            action, reset, select, detects = hold
            held = wired(wiring.words, wiring.pots, action, knob, reset=reset != 0, select=select != 0)
            charges = [jnp.where((detects != 0) & (each >= 0), ALWAYS, each) for each in held.charge]
            held = held._replace(charge=(charges[0], charges[1], charges[2], charges[3]))
            slot, console = Slot(data, facts, schemes, has_extra, height), _unpack(_State(words, ram))
            here, yes = jnp.asarray(which), jnp.ones((), bool)
            after, drawn = machine.run(slot, console, here, held, yes[None], draws=yes, one_kernel=True)
            return _pack(after), held.knob, drawn

        # One kernel: one console's frame is some 5,000 steps of some 3,000 operations on single numbers, and XLA's CPU
        # else spends most of the time between kernels.
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            after, knob, drawn = jax.jit(run)(slot.data, state.ram, numbers)
        return after, knob, machine.draw(drawn, height)[0]

    def reset(slot: Slot, state: _State, timer: Array) -> _State:
        return _pack(system_reset(_unpack(state), slot, jnp.asarray(which), timer))

    device = _device()
    words = np.zeros(len(Processor._fields) + len(Video._fields), np.int32)
    slot = Slot(np.zeros(LARGEST, np.uint8), np.zeros(6, np.int32), schemes, has_extra, height)
    wiring = Wiring(np.zeros(NUM_ACTIONS, np.int32), which)
    state = _State(words, np.zeros((1, 256 if has_extra else 128), np.uint8))

    def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
        on_device = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
        lowered = jax.jit(function).lower(*jax.tree.map(lambda x: on_device(x.shape, x.dtype), arguments))
        return lowered.compile(compiler.careful_options(device))

    hold = np.zeros(len(Hold._fields), np.int32)
    return _Program(compiled(frame, slot, wiring, state, hold, which), compiled(reset, slot, state, which))


def _device() -> jax.Device:
    """Return a CPU: frames of one console are nothing for a GPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out.
        return jax.local_devices()[0]


@functools.cache
def _at_power_on() -> tuple[np.ndarray, tuple[int, ...]]:
    """Return what the console's memory holds, uint8 [128], and what its timer holds at the system resets from there."""
    generator = np.random.RandomState(_SEED)
    draws = [int(np.frombuffer(generator.bytes(4), np.uint32)[0]) for _ in range(128 + 1 + 64)]
    return np.array([draw & 0xFF for draw in draws[:128]], np.uint8), tuple(25 + draw % 75 for draw in draws[129:])


@dataclasses.dataclass(frozen=True)
class _Console:
    """A console with a game, between two frames.

    Attributes:
      game: its own.
      program: that runs it.
      slot: with its cartridge.
      wiring: of its ports.
      state: of the console.
      knob: int32 [1], of the paddle.
      screen: uint8 [height, 160], the last picture.
    """

    game: Game
    program: _Program
    slot: Slot
    wiring: Wiring
    state: _State
    knob: Any
    screen: Any

    @classmethod
    def with_game(cls, emulator: Emulator, number: int, program: _Program) -> _Console:
        """Return one with a game of an emulator, before its first system reset."""
        game, cartridges = emulator.games[number], emulator.cartridges
        ram = np.zeros((1, cartridges.memory), np.uint8)
        ram[0, :128], _ = _at_power_on()
        words = np.zeros(len(Processor._fields) + len(Video._fields), np.int32)
        screen = np.zeros((cartridges.height, WIDTH), np.uint8)
        knob = np.full(1, KNOB_CENTRE, np.int32)
        return cls(game, program, cartridges.slot(number), wiring_of((game,)), _State(words, ram), knob, screen)

    def reset(self, number: int) -> _Console:
        """Return it after a system reset, the one of this number since the power switch."""
        timer = np.full(1, _at_power_on()[1][number], np.int32)
        state = self.program.reset(self.slot, self.state, timer)
        return dataclasses.replace(
            self, state=state, knob=np.full_like(self.knob, KNOB_CENTRE), screen=np.zeros_like(self.screen)
        )

    def frame(self, hold: Hold) -> _Console:
        """Return it after a frame."""
        held = np.array(hold, np.int32)
        state, knob, screen = self.program.frame(self.slot, self.wiring, self.state, held, self.knob)
        return dataclasses.replace(self, state=state, knob=knob, screen=screen)

    def follow(self, script: Script) -> _Console:
        """Return it after a script.

        Raises:
          RuntimeError: it has not ended after `MOST_FRAMES`.
        """
        console, wish = self, next(script)
        for _ in range(MOST_FRAMES):
            console = console.reset(wish) if isinstance(wish, int) else console.frame(wish)
            try:
                wish = script.send(np.asarray(console.state.ram)[0])
            except StopIteration:
                return console
        raise RuntimeError(
            f"{self.game.name}: no first frame after {MOST_FRAMES} frames from the power switch; the cartridge is not "
            "what its table of rules is for, or is not emulated rightly. Please report it."
        )

    def wait(self, frames: int) -> Iterator[Starts]:
        """Yield its states after 1 to `frames` frames of waiting, the last with FIRE where the game has it."""
        fires, console = FIRE in self.game.minimal_actions, self
        for _ in range(frames):
            after = console.frame(Hold())
            yield (console.frame(Hold(FIRE)) if fires else after).snapshot()
            console = after

    def snapshot(self) -> Starts:
        """Return how it stands."""
        state = jax.tree.map(np.asarray, self.state)
        console, knob = jax.tree.map(lambda x: np.array(x[0]), (_unpack(state), np.asarray(self.knob)))
        return Starts(console, knob, np.array(self.screen), lives=np.int32(-1), started=np.int32(-1))


Script = Generator[Hold | int, np.ndarray, None]
"""What a console is to do: a `Hold` for each frame, and for a system reset its number."""


def _boot(game: Game) -> Script:
    """From the power switch to the environment's first reset, which is what `loadROM` does."""
    yield 0
    yield from _frames(60, Hold(detects=True))
    yield 1
    yield from _reset(game, 2)


def _frames(number: int, hold: Hold) -> Generator[Any, np.ndarray, np.ndarray]:
    ram = np.zeros(128, np.uint8)
    for _ in range(number):
        ram = yield hold
    return ram


def _reset(game: Game, number: int) -> Script:
    """One reset of the environment, what `reset_game` does; `number` is that of its system reset."""
    yield number
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
