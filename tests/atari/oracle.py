"""ale-py as the oracle: consoles of its making, their whole machine state, and players for both sides.

Only ale-py's public API is used. `cloneState().__getstate__()` is the pickled state; its layout was observed from
outside.
"""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

GAMES_JSON = Path(os.environ.get("PODIUM_ATARI_GAMES", Path(__file__).with_name("games.json")))

TRUE, FALSE = 0xFAB1FAB2, 0xBAD1BAD2


def games() -> dict[str, dict[str, Any]]:
    """Return the table of games by their snake-case names."""
    return {game["rom"]: game for game in json.loads(GAMES_JSON.read_text())["games"]}


def rom_path(rom: str) -> Path:
    """Return where ale-py keeps the cartridge image of a game."""
    from ale_py import roms

    return Path(roms.get_rom_path(rom))


def make(rom: str | Path, seed: int = 1, repeat_action_probability: float = 0.0, frame_skip: int = 1) -> Any:
    """Return an `ALEInterface` with this cartridge loaded: a game's name, or the path of an image."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setInt("frame_skip", frame_skip)
    ale.setFloat("repeat_action_probability", repeat_action_probability)
    ale.loadROM(rom if isinstance(rom, Path) else rom_path(rom))
    return ale


def make_cartridge(image: bytes, name: str = "amidar", **settings: Any) -> Any:
    """Return an `ALEInterface` running an image of our own under the rules of the game `name`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.bin"
        path.write_bytes(image)
        return make(path, **settings)


def act(ale: Any, action: int) -> int:
    """Do one action by its number and return the reward."""
    import ale_py

    return int(ale.act(ale_py.Action(action)))


def held_actions(actions: list[int], seed: int, mean_hold: float = 4.0) -> Iterator[int]:
    """Yield random actions for ever, each held for a geometric number of frames."""
    rng = random.Random(seed)
    action = actions[0]
    while True:
        if rng.random() < 1.0 / mean_hold:
            action = rng.choice(actions)
        yield action


class _Words:
    """Reads little-endian words, texts and booleans one after another."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def word(self) -> int:
        """Return the next unsigned 32-bit word."""
        (value,) = struct.unpack_from("<I", self.data, self.at)
        self.at += 4
        return value

    def signed(self) -> int:
        """Return the next signed 32-bit word."""
        (value,) = struct.unpack_from("<i", self.data, self.at)
        self.at += 4
        return value

    def flag(self) -> bool:
        """Return the next boolean, one of two magic words."""
        value = self.word()
        assert value in (TRUE, FALSE), (hex(value), self.at)
        return value == TRUE

    def text(self) -> str:
        """Return the next text: a length and that many characters."""
        length = self.word()
        value = self.data[self.at : self.at + length].decode("latin1")
        self.at += length
        return value


# The TIA's fields in order, and how each is read: s signed word, w word, b boolean, c colour (a byte four times).
TIA_FIELDS = (
    "F:s B:s E:s L:s R:s lines:s line:s Q:s enabled:w vsync:w vblank:w nusiz0:w nusiz1:w "
    "colup0:c colup1:c colupf:c colubk:c ctrlpf:w score_priority:w refp0:b refp1:b playfield:w "
    "grp0:w grp1:w old_grp0:w old_grp1:w enam0:b enam1:b enabl:b old_enabl:b hmp0:w hmp1:w hmm0:w hmm1:w hmbl:w "
    "vdelp0:b vdelp1:b vdelbl:b resmp0:b resmp1:b collisions:w p0:w p1:w m0:w m1:w bl:w "
    "shown_grp0:w shown_grp1:w hmove_clock:s comb:b star:b star_counter:w dump:b dump_end:s"
)


def machine_state(ale: Any) -> dict[str, Any]:
    """Return every field of `ale.cloneState()` that is understood, by name.

    Names equal the attributes of `scalar.Console` where that has the field. Not contained, in ale-py's state either:
    the "first copy hidden" flags, the mirror latch and the two pictures.
    """
    data = ale.cloneState().__getstate__()
    words = _Words(data)
    state: dict[str, Any] = {}
    for name in ("left_knob", "right_knob", "frame_number", "episode_frame_number", "mode", "difficulty", "block"):
        state[name] = words.word()
    state["md5"] = words.text()
    assert words.text() == "System"
    state["T"] = words.signed()
    state["generator"] = words.text()
    state["cpu"] = words.text()
    for name in ("A", "X", "Y", "SP", "opcode", "PC"):
        state[name] = words.word()
    for name in ("N", "V", "break_flag", "D", "I", "not_Z", "C"):
        state[name] = int(words.flag())
    state["Z"] = 1 - state.pop("not_Z")
    state["execution_status"] = words.word()
    assert words.text() == "M6532"
    state["ram"] = bytes(words.word() for _ in range(words.word()))
    for name in ("timer", "timer_shift"):
        state[name] = words.word()
    for name in ("timer_set", "timer_expired_at"):
        state[name] = words.signed()
    state["expired_read"] = int(words.flag())
    state["direction_a"], state["direction_b"] = words.word(), words.word()
    assert words.text() == "TIA"
    for field in TIA_FIELDS.split():
        name, kind = field.split(":")
        if kind == "s":
            state[name] = words.signed()
        elif kind == "b":
            state[name] = int(words.flag())
        else:
            state[name] = words.word() & (0xFF if kind == "c" else 0xFFFFFFFF)
    return state


def screen(ale: Any) -> np.ndarray:
    """Return [H, 160] uint8, the palette indices of the picture."""
    return ale.getScreen()


def ram(ale: Any) -> bytes:
    """Return the 128 bytes of RAM."""
    return bytes(ale.getRAM())
