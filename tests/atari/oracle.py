"""ale-py as the oracle: consoles of its making, their whole machine state, and players for both sides.

Only ale-py's public API is used. `cloneState().__getstate__()` is the pickled state; its layout was observed from
outside.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import podium.envs.atari
from podium.envs.atari.games import Game

TRUE, FALSE = 0xFAB1FAB2, 0xBAD1BAD2


def games() -> dict[str, dict[str, Any]]:
    """Return the table of games by their snake-case names, with what podium's leaves out where it is as usual."""
    text = importlib.resources.files(podium.envs.atari).joinpath("games.json").read_text(encoding="utf-8")
    usual = {
        field.name: field.default for field in dataclasses.fields(Game) if field.default is not dataclasses.MISSING
    }
    rows = [{**usual, **row} for row in json.loads(text)["games"]]
    return {
        row["rom"]: {**row, "window": {"y_start": row["y_start"], "height": row["height"]}, "vars": row["variables"]}
        for row in rows
    }


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


# The words of a pickled state in their order, and how each is read: w unsigned, s signed, b boolean, c colour (a byte
# four times), t text, r RAM (a count, then a word a byte). After the cartridge come its banks and the rules' variables.
LAYOUT = (
    "left_knob:w right_knob:w frame_number:w episode_frame_number:w mode:w difficulty:w block:w md5:t system:t T:s "
    "generator:t cpu:t A:w X:w Y:w SP:w opcode:w PC:w N:b V:b break_flag:b D:b I:b not_Z:b C:b execution_status:w "
    "riot:t ram:r timer:w timer_shift:w timer_set:s timer_expired_at:s expired_read:b direction_a:w direction_b:w "
    "tia:t F:s B:s E:s L:s R:s lines:s line:s Q:s enabled:w vsync:w vblank:w nusiz0:w nusiz1:w "
    "colup0:c colup1:c colupf:c colubk:c ctrlpf:w score_priority:w refp0:b refp1:b playfield:w "
    "grp0:w grp1:w old_grp0:w old_grp1:w enam0:b enam1:b enabl:b old_enabl:b hmp0:w hmp1:w hmm0:w hmm1:w hmbl:w "
    "vdelp0:b vdelp1:b vdelbl:b resmp0:b resmp1:b collisions:w p0:w p1:w m0:w m1:w bl:w "
    "shown_grp0:w shown_grp1:w hmove_clock:s comb:b star:b star_counter:w dump:b dump_end:s "
    "sound:t audc0:w audc1:w audf0:w audf1:w audv0:w audv1:w volume:w cartridge:t bank:w"
)


def parse(data: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the fields of a pickled state by name, and where in the bytes each begins."""
    state: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    at = 0

    def word(form: str = "<I") -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += 4
        return value

    for field in LAYOUT.split():
        name, kind = field.split(":")
        offsets[name] = at
        if kind == "t":
            length = word()
            state[name] = data[at : at + length].decode("latin1")
            at += length
        elif kind == "r":
            state[name] = bytes(word() for _ in range(word()))
        elif kind == "b":
            value = word()
            assert value in (TRUE, FALSE), (name, hex(value))
            state[name] = int(value == TRUE)
        elif kind == "c":
            state[name] = word() & 0xFF
        else:
            state[name] = word("<i" if kind == "s" else "<I")
    assert (state["system"], state["riot"], state["tia"], state["sound"]) == ("System", "M6532", "TIA", "TIASound")
    state["Z"] = 1 - state.pop("not_Z")
    return state, offsets


def machine_state(ale: Any) -> dict[str, Any]:
    """Return every field of `ale.cloneState()` that is understood, by name.

    Names equal the attributes of `scalar.Console` where that has the field. `bank` is the bank of F8 and F6 only. Not
    contained, in ale-py's state either: the "first copy hidden" flags, the mirror latch, the flag of a partial frame,
    the last byte on the bus and the two pictures.
    """
    return parse(ale.cloneState().__getstate__())[0]


def run_from_ram(ale: Any, code: bytes) -> None:
    """Make ale-py go on with this code at $80, instead of where it was."""
    import ale_py

    data = bytearray(ale.cloneState().__getstate__())
    _, offsets = parse(bytes(data))
    for k, value in enumerate(code):
        struct.pack_into("<I", data, offsets["ram"] + 4 + 4 * k, value)
    struct.pack_into("<I", data, offsets["PC"], 0x80)
    ale.restoreState(ale_py.ALEState(bytes(data)))


def screen(ale: Any) -> np.ndarray:
    """Return [H, 160] uint8, the palette indices of the picture."""
    return ale.getScreen()


def ram(ale: Any) -> bytes:
    """Return the 128 bytes of RAM."""
    return bytes(ale.getRAM())
