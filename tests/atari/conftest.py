"""ale-py as a box that runs code of ours, for measuring what its console does."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium.envs.atari.games import Game


class Ale:
    """One game in ale-py, without sticky actions; through its public interface only."""

    def __init__(self, rom: Path | str, seed: int = 1):
        ale_py = pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._library = ale_py
        self.ale = ale_py.ALEInterface()
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(rom)

    @classmethod
    def of(cls, game: Game, seed: int = 1) -> Ale:
        roms = pytest.importorskip("ale_py.roms", reason='ale-py is in the extra: pip install "podium[atari]"')
        return cls(roms.get_rom_path(game.rom), seed)

    def act(self, action: int = 0) -> int:
        """Play one frame; return the reward."""
        return int(self.ale.act(self._library.Action(action)))

    def ram(self) -> np.ndarray:
        return self.ale.getRAM().copy()

    def knobs(self) -> tuple[int, int]:
        """Return the resistances of the two players' paddles."""
        return struct.unpack_from("<2I", self.ale.cloneState().__getstate__())

    def run_in_ram(self, code: bytes) -> None:
        """Put 6502 code at $80 and let the CPU go on there: the game's own wiring, a program of ours."""
        state = bytearray(self.ale.cloneState().__getstate__())
        at = state.index(b"System") + len("System") + 4
        for _ in range(2):  # The random generator's state and the CPU's name, texts with their lengths.
            at += 4 + struct.unpack_from("<I", state, at)[0]
        struct.pack_into("<I", state, at + 5 * 4, 0x80)  # After A, X, Y, SP and the opcode comes PC.
        cells = state.index(b"M6532") + len("M6532") + 4
        struct.pack_into(f"<{len(code)}I", state, cells, *code)
        self.ale.restoreState(self._library.ALEState(bytes(state)))


@pytest.fixture(scope="session")
def ale() -> Any:
    """`Ale` itself: `ale.of(game)`, `ale(path)`."""
    pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')
    return Ale
