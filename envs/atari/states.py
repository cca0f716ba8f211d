"""States to begin from: recorded from ale-py on the CPU, kept in files, and taken from and put into a batch.

A set of start states is a `Starts`. Recording one needs ale-py's public interface only:

    ale.loadROM(path); ale.reset_game(); ...  # Play to where episodes shall begin.
    states.save("pong.npz", "Pong", states.join([states.from_ale(ale, "Pong"), ...]))
    env = podium.envs.make("atari/Pong", start_states="pong.npz")
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podium.envs.atari import processor
from podium.envs.atari.cartridges import AT_RESET
from podium.envs.atari.controls import KNOB_HIGH, KNOB_LOW
from podium.envs.atari.games import Game, find
from podium.envs.atari.machine import Machine
from podium.envs.atari.processor import Processor
from podium.envs.atari.starts import UNREADABLE, Starts, read_arrays, write_arrays
from podium.envs.atari.video import CLOCKS, WIDTH, Video
from podium.types import Array, PyTree

# The words of ale-py's pickled state in their order, and how each is read: w unsigned, s signed, b a boolean, c a
# colour (one byte four times), t a text after its length, r a count and so many words of a byte. What is in none of
# podium's fields is passed over. The layout was observed from outside, in ale-py 0.12.1.
_LAYOUT = (
    "left_knob:w right_knob:w frame_number:w episode_frame_number:w mode:w difficulty:w block:w md5:t system:t T:s "
    "generator:t cpu:t A:w X:w Y:w SP:w opcode:w PC:w N:b V:b break_flag:b D:b I:b not_Z:b C:b execution:w "
    "riot:t ram:r timer:w shift:w set_at:s expired_at:s expired_read:b direction_a:w direction_b:w "
    "tia:t F:s B:s E:s L:s R:s lines_before:w lines:w Q:s enabled:w vsync:w vblank:w nusiz0:w nusiz1:w "
    "colup0:c colup1:c colupf:c colubk:c ctrlpf:w score_priority:w refp0:b refp1:b playfield:w "
    "grp0:w grp1:w old_grp0:w old_grp1:w enam0:b enam1:b enabl:b old_enabl:b hmp0:w hmp1:w hmm0:w hmm1:w hmbl:w "
    "vdelp0:b vdelp1:b vdelbl:b resmp0:b resmp1:b collisions:w p0:w p1:w m0:w m1:w bl:w "
    "shown_grp0:w shown_grp1:w hmove_clock:s comb:b star:b star_counter:w dump:b dump_end:s "
    "sound:t audc0:w audc1:w audf0:w audf1:w audv0:w audv1:w volume:w cartridge:t"
)
_TRUE, _FALSE = 0xFAB1FAB2, 0xBAD1BAD2
_TEXTS = {"system": "System", "riot": "M6532", "tia": "TIA", "sound": "TIASound"}
_NEVER = 1 << 25  # Clocks; ale-py's own number for it is far above, and falls a little with every frame.


def from_ale(ale: Any, game: str | Game) -> Starts:
    """Return the state of an `ale_py.ALEInterface` between two actions, as a set of one.

    Four things are not in what ale-py says of its state: whether the right half of a line mirrors the left, which it
    takes from CTRLPF only as a line ends (here: what CTRLPF says); whether the first copies of the players are hidden
    for the rest of a line (here: they are not); the last picture but one, of which lines that a frame leaves undrawn
    show what was there (here: black); and in ChopperCommand whether the game was begun (here: if there are lives).
    No game of the 57 was seen to differ by them. Sticky actions begin with action 0.

    Args:
      ale: with the cartridge loaded, and not at the end of a game.
      game: that is in it, as `podium.envs.atari.games` names it.

    Returns:
      [1, ...] each.

    Raises:
      ValueError: it has another cartridge or none, the game is over, a difficulty switch is set, or this version of
        ale-py writes its state in another way.
    """
    game = find(game) if isinstance(game, str) else game
    if ale.game_over():
        raise ValueError(f"The game of {game.name} is over in ale; call ale.reset_game() before its state is taken.")
    console = _parse(ale.cloneState().__getstate__())
    if console["md5"] != game.md5:
        raise ValueError(
            f"ale has the cartridge with md5 {console['md5']}, but {game.name} is {game.md5}; name the game that was "
            "loaded, in the version that ale-py brings."
        )
    if console["difficulty"]:
        raise ValueError(
            f"ale plays with difficulty {console['difficulty']}, and podium's console has its switches at 0; call "
            "ale.setDifficulty(0) and reset_game()."
        )
    screen = np.asarray(ale.getScreen(), np.uint8)
    if screen.shape != (game.height, WIDTH):
        raise ValueError(f"ale's screen is {list(screen.shape)}, but {game.name} has [{game.height}, {WIDTH}].")
    state, view = _processor(console, game), _video(console)
    number: Any = lambda value: np.array([value], np.int32)
    ram: Any = np.frombuffer(console["ram"], np.uint8)[None]
    machine = Machine(ram, Processor(**jax.tree.map(number, state)), Video(**jax.tree.map(number, view)))
    knob = min(max(console["left_knob"], KNOB_LOW), KNOB_HIGH)
    lives, started = int(ale.lives()), _started(console["after"], game, int(ale.lives()))
    return Starts(machine, number(knob), screen[None], number(lives), number(started))


def join(sets: Sequence[Starts]) -> Starts:
    """Return one set of start states from several of the same game.

    Raises:
      ValueError: there are none, or their pictures or memories differ in size.
    """
    if not sets:
        raise ValueError("sets=() is empty; join at least one set of start states.")
    for name in ("screen", "ram"):
        shapes = {np.shape(starts.screen if name == "screen" else starts.machine.ram)[1:] for starts in sets}
        if len(shapes) > 1:
            raise ValueError(f"The {name}s of the sets have shapes {sorted(shapes)}; join states of one game only.")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *sets)


def save(path: str | os.PathLike[str], game: str | Game, starts: Starts) -> None:
    """Write a set of start states to a file, compressed, replacing what is there.

    Raises:
      ValueError: these are no start states of the game.
      OSError: the file cannot be written.
    """
    game = find(game) if isinstance(game, str) else game
    write_arrays(Path(path), checked(starts, game, "starts"), game.md5)


def load(path: str | os.PathLike[str], game: str | Game) -> Starts:
    """Return the start states that `save` wrote.

    Raises:
      ValueError: the file is no such file, is damaged, or holds states of another game.
      FileNotFoundError: there is none.
    """
    game = find(game) if isinstance(game, str) else game
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}; podium.envs.atari.states.save writes start states.")
    try:
        starts, md5 = read_arrays(path)
    except UNREADABLE as error:
        raise ValueError(
            f"{path} holds no start states, or is damaged ({error}); podium.envs.atari.states.save writes them."
        ) from error
    if md5 != game.md5:
        raise ValueError(f"{path} holds start states of the cartridge with md5 {md5}, but {game.name} is {game.md5}.")
    return checked(starts, game, str(path))


def chosen(start_states: Any, games: Sequence[Game]) -> dict[str, Starts]:
    """Return by game what an environment's option `start_states` gives: a set or a file, or several by game's name.

    Raises:
      ValueError: it is none of these, names a game that the environment has not, or is not one of that game.
    """
    if start_states is None:
        return {}
    if not isinstance(start_states, Mapping):
        if len(games) > 1:
            raise ValueError(
                "start_states is one set, but this environment has several games; give {name of the game: set or path}."
            )
        start_states = {games[0].name: start_states}
    known = {game.name: game for game in games}
    found = {}
    for name, given in start_states.items():
        if name not in known:
            raise ValueError(f"start_states names {name!r}; this environment has {', '.join(known)}.")
        if isinstance(given, Starts):
            found[name] = checked(given, known[name], "start_states")
        elif isinstance(given, str | os.PathLike):
            found[name] = load(given, known[name])
        else:
            raise ValueError(
                f"start_states={given!r} must be Starts or the path of a file that podium.envs.atari.states.save wrote."
            )
    return found


def checked(starts: Starts, game: Game, name: str) -> Starts:
    """Return start states as NumPy arrays of the right types and shapes.

    Raises:
      ValueError: they have not those.
    """
    wanted = _zeros(game)
    if _structure(starts) != _structure(wanted):
        raise ValueError(f"{name} is not a Starts of arrays; podium.envs.atari.states.from_ale makes one.")
    starts = jax.tree.map(np.asarray, starts)
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(starts)}
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(f"{name} must have one number of states, above 0, in all its arrays; it has {sorted(counts)}.")
    for (path, leaf), right in zip(jax.tree_util.tree_leaves_with_path(starts), jax.tree.leaves(wanted), strict=True):
        if leaf.shape[1:] != right.shape or leaf.dtype != right.dtype:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape[1:])} a state, but {game.name} "
                f"needs {right.dtype}{list(right.shape)}."
            )
    return starts


def get_state(states: PyTree, index: int | Array) -> PyTree:
    """Return the state of one environment of a batch: of what `jax.vmap` of an environment's functions returns.

    It is all that an environment remembers: stepped with the same keys and actions it plays the same again.

    >>> import jax.numpy as jnp
    >>> get_state({"ram": jnp.array([[1, 2], [3, 4]])}, 1)["ram"].tolist()
    [3, 4]
    """
    return jax.tree.map(lambda leaf: leaf[index], states)


def set_state(states: PyTree, index: int | Array, state: PyTree) -> PyTree:
    """Return a batch with the state of environment `index` replaced.

    Args:
      states: [B, ...] each.
      index: of the environment, or int32 [K] of several.
      state: from `get_state`: [...] each, or [K, ...].

    Raises:
      ValueError: `state` is of another environment.

    >>> import jax.numpy as jnp
    >>> set_state({"ram": jnp.array([[1, 2], [3, 4]])}, 0, {"ram": jnp.array([7, 8])})["ram"].tolist()
    [[7, 8], [3, 4]]
    """
    if _structure(states) != _structure(state):
        raise ValueError("state has another structure than the batch; take it from the same environment by get_state.")
    for old, new in zip(jax.tree.leaves(states), jax.tree.leaves(state), strict=True):
        if old.shape[1:] != np.shape(new)[np.ndim(index) :] or old.dtype != new.dtype:
            raise ValueError(
                f"state has an array {new.dtype}{list(np.shape(new))} where the batch has {old.dtype}"
                f"{list(old.shape)}; take it from the same environment by get_state."
            )
    return jax.tree.map(lambda old, new: old.at[index].set(new), states, state)


def _structure(tree: PyTree) -> Any:
    return jax.tree.structure(tree)


def _zeros(game: Game) -> Starts:
    """Return one state of a game, of zeros."""
    zero: Any = np.zeros((), np.int32)
    ram: Any = np.zeros(128, np.uint8)
    machine = Machine(ram, Processor(*[zero] * len(Processor._fields)), Video(*[zero] * len(Video._fields)))
    return Starts(machine, zero, np.zeros((game.height, WIDTH), np.uint8), zero, zero)


def _parse(data: bytes) -> dict[str, Any]:
    """Return ale-py's fields by name; `after` has the words that follow the cartridge's name.

    Raises:
      ValueError: the state is not as it is in the version of ale-py that the layout was observed in.
    """
    state: dict[str, Any] = {}
    at = 0

    def word(form: str = "<I") -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += 4
        return value

    try:
        for field in _LAYOUT.split():
            name, kind = field.split(":")
            if kind == "t":
                length = word()
                state[name] = data[at : at + length].decode("latin1")
                at += length
            elif kind == "r":
                state[name] = bytes(word() for _ in range(word()))
            elif kind == "b":
                state[name] = {_TRUE: 1, _FALSE: 0}[word()]
            elif kind == "c":
                state[name] = word() & 0xFF
            else:
                state[name] = word("<i" if kind == "s" else "<I")
        wrong = [name for name, text in _TEXTS.items() if state[name] != text] or len(state["ram"]) != 128
    except (struct.error, KeyError, ValueError):
        wrong = True
    if wrong:
        import ale_py

        raise ValueError(
            f"ale-py {getattr(ale_py, '__version__', 'of this version')} writes its state in a way that podium does "
            "not know; ale-py 0.12.1's is known."
        )
    state["after"] = struct.unpack_from(f"<{(len(data) - at) // 4}I", data, at)
    return state


def _started(after: tuple[int, ...], game: Game, lives: int) -> int:
    """Return whether the game was begun, as three games' rules remember; -1 in the others."""
    if "started" not in [variable.name for variable in game.variables]:
        return -1
    # After the cartridge's own words come reward, score, end; then this and the lives; a flag and the knob's two ends.
    mine = after[_bank_words(game.bank) + 3 : -3]
    booleans = [word == _TRUE for word in mine if word in (_TRUE, _FALSE)]
    return int(booleans[0]) if booleans else int(lives > 0)


def _bank_words(bank: str) -> int:
    return {"F8": 1, "F6": 1, "E0": 5}.get(bank.removesuffix("SC"), 0)


def _banks(console: Mapping[str, Any], game: Game) -> int:
    """Return which KiB each KiB shows, a nibble each."""
    after = console["after"]
    if game.bank == "E0":
        return sum(kib << 4 * place for place, kib in enumerate(after[1:5]))
    if game.bank in ("F8", "F6"):
        return 0x3210 + 0x4444 * after[0]
    return AT_RESET[game.bank]


def _origin(console: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return cycles that have passed when the next frame begins, its first cycle, and whether the last was cut.

    ale-py counts on to the end of a frame and takes off what has passed as the next one begins. A frame that was cut
    goes on instead; it is known by its lines, which are only noted when a frame ends.
    """
    passed = console["T"]
    was_cut = console["lines_before"] != (3 * passed - console["F"]) // CLOCKS
    if was_cut:
        return 0, -console["F"] // 3, True
    return passed, (3 * passed - console["F"]) % CLOCKS // 3, False


def _processor(console: Mapping[str, Any], game: Game) -> dict[str, int]:
    passed, first, was_cut = _origin(console)
    ours = lambda time: time - passed + first
    now = ours(console["T"])
    flags = (("N", 7), ("V", 6), ("D", 3), ("I", 2), ("C", 0))
    drawn = console["L"] - console["F"] if was_cut else CLOCKS * game.y_start
    return {
        "a": console["A"],
        "x": console["X"],
        "y": console["Y"],
        "sp": console["SP"],
        "pc": console["PC"],
        "status": sum(console[name] << bit for name, bit in flags) | (1 - console["not_Z"]) << 1 | 0x30,
        "then": 0,
        "latch": 0,
        "line": now // processor.CYCLES,
        "cycle": now % processor.CYCLES,
        "first_cycle": first,
        "banks": _banks(console, game),
        "timer": console["timer"],
        "shift": console["shift"],
        "set_at": ours(console["set_at"]),
        "expired_read": console["expired_read"],
        "expired_at": ours(console["expired_at"]),
        "direction": console["direction_a"],
        "dumped": console["dump"],
        "dump_at": ours(console["dump_end"]),
        "sync_at": processor.NEVER if console["Q"] > _NEVER else ours(console["Q"] // 3),
        "instructions": 0,
        "ended": processor.CUT if was_cut else processor.ENDED,
        "logged": 0,
        "drawn": drawn,
        "collisions": _collisions(console["collisions"]),
        "waits": 0,
    }


def _video(console: Mapping[str, Any]) -> dict[str, int]:
    passed, first, was_cut = _origin(console)
    row = done = 0
    if was_cut:
        drawn = console["L"] - console["B"]
        # A line whose end has not been dealt with counts as the old one still.
        row, done = (drawn - (console["R"] == 0)) // CLOCKS, CLOCKS - console["R"]
    pack = lambda width, *names: sum(console[name] << width * place for place, name in enumerate(names))
    shapes = [_reverse(console[name]) for name in ("grp0", "grp1", "old_grp0", "old_grp1")]
    field = console["playfield"]
    return {
        "row": row,
        "done": done,
        "comb": console["comb"],
        "mirror": console["ctrlpf"] & 1,
        "hidden": 0,
        "blank": console["vblank"] >> 1 & 1,
        "size_0": console["nusiz0"],
        "size_1": console["nusiz1"],
        "colours": _signed(pack(8, "colup0", "colup1", "colupf", "colubk")),
        "control": console["ctrlpf"],
        "reflect": pack(1, "refp0", "refp1"),
        # Of the three registers the middle one is shown highest bit first.
        "field": field & 0xFF00F | _reverse(field >> 4 & 0xFF) << 4,
        "shapes": _signed(sum(shape << 8 * place for place, shape in enumerate(shapes))),
        "enabled": pack(1, "enam0", "enam1", "enabl", "old_enabl"),
        "motion": pack(4, "hmp0", "hmp1", "hmm0", "hmm1", "hmbl"),
        "delayed": pack(1, "vdelp0", "vdelp1", "vdelbl"),
        "locked": pack(1, "resmp0", "resmp1"),
        "player_0": console["p0"],
        "player_1": console["p1"],
        "missile_0": console["m0"],
        "missile_1": console["m1"],
        "ball": console["bl"],
        "moved_at": console["hmove_clock"] - 3 * passed + 3 * first,
        "collisions": _collisions(console["collisions"]),
    }


def _collisions(latches: int) -> int:
    """Return ale-py's latches in podium's order: bit 6 of each register before bit 7; CXBLPF has bit 7 only."""
    apart = latches & 0x1FFF | (latches & 0x6000) << 1
    return (apart & 0x5555) << 1 | (apart & 0xAAAA) >> 1


def _reverse(byte: int) -> int:
    return int(f"{byte:08b}"[::-1], 2)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
