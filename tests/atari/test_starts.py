"""Start states: consoles from the power switch against ale-py's reset, and the files that keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from atari import oracle, play
from podium.envs.atari import starts, states
from podium.envs.atari.emulator import Emulator
from podium.envs.atari.games import Game, find
from podium.envs.atari.starts import Starts

PONG, BREAKOUT = find("Pong"), find("Breakout")


def state(found: Starts, game: int, number: int) -> Starts:
    return jax.tree.map(lambda x: x[game, number], found)


@pytest.mark.parametrize("name", ["Pong", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qbert", "Hero"))])
def test_states_after_waiting_are_those_of_ale_py(name: str, monkeypatch: pytest.MonkeyPatch):
    """Two timers, waits of one and two frames; the first timer is that of ale-py's first reset."""
    pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')
    game = find(name)
    monkeypatch.setattr(starts, "TIMERS", 2)
    found = starts.make(Emulator((game,), (oracle.rom_path(game.rom).read_bytes(),)), 2)
    assert found.knob.shape == (1, 2 * starts.TIMERS)
    for wait in (1, 2):
        ale = play.after_reset(game)
        for frame in range(wait):
            oracle.act(ale, starts.FIRE if frame == wait - 1 and starts.FIRE in game.minimal_actions else 0)
        ours, theirs = state(found, 0, wait - 1), states.get_state(states.from_ale(ale, game), 0)
        np.testing.assert_array_equal(ours.machine.ram, theirs.machine.ram)
        if name != "Qbert":  # It draws nothing yet, and ale-py shows what was there before.
            np.testing.assert_array_equal(ours.screen, theirs.screen)
        for part in ("processor", "video"):
            mine, other = (getattr(each.machine, part)._asdict() for each in (ours, theirs))
            of_no_meaning_now = ("instructions", "expired_at", "latch")
            # ale-py does not tell whether a line's right half mirrors its left (`states.from_ale`), which matters here.
            left_out = (*of_no_meaning_now, "mirror") if game.name == "Qbert" else of_no_meaning_now
            differing = [name for name in mine if mine[name] != other[name] and name not in left_out]
            assert not differing, (wait, [(name, int(mine[name]), int(other[name])) for name in differing])
        assert ours.knob == theirs.knob


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "atari"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Let `make` return numbered states at once, and note what was asked of it."""
    asked: list[tuple[str, ...]] = []

    def make(emulator: Emulator, noop_max: int) -> Starts:
        asked.append(tuple(game.name for game in emulator.games))
        return jax.tree.map(lambda *x: np.stack(x), *(numbered(game) for game in emulator.games))

    monkeypatch.setattr(starts, "make", make)
    return asked


def numbered(game: Game) -> Starts:
    leaves, tree = jax.tree.flatten(states._zeros(game))
    lanes = [np.full((3, *leaf.shape), number, leaf.dtype) for number, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, lanes)


def emulator(*games: Game) -> Any:
    return Emulator(games, tuple(bytes(game.rom_bytes) for game in games))


def test_states_are_made_once(folder: Path, made: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]):
    first = starts.load_or_make(emulator(PONG), 0)
    assert "Making start states of Pong, once" in capsys.readouterr().err
    again = starts.load_or_make(emulator(PONG), 0)
    assert capsys.readouterr().err == ""
    jax.tree.map(np.testing.assert_array_equal, first, again)
    both = starts.load_or_make(emulator(BREAKOUT, PONG), 0)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[0]), both, first)
    starts.load_or_make(emulator(PONG), 5)
    assert made == [("Pong",), ("Breakout",), ("Pong",)]
    assert len(list(folder.iterdir())) == 3


def rewrite(path: Path, drop: str = "", **changes: Any) -> None:
    with np.load(path) as file:
        named = {name: file[name] for name in file.files if name != drop}
    with path.open("wb") as file:
        np.savez(file, **(named | changes))


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_bytes(b"These are no states."),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "changed bytes": lambda path: path.write_bytes(path.read_bytes().replace(b"\x00\x00", b"\x01\x00")),
    "changed states": lambda path: rewrite(path, knob=np.full(3, 7, np.int32)),
    "a missing array": lambda path: rewrite(path, drop="knob"),
    "an array of another version": lambda path: rewrite(path, more=np.zeros(3)),
    "another cartridge": lambda path: rewrite(path, md5=np.array("0" * 32)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(damage: str, folder: Path, made: list[tuple[str, ...]]):
    first = starts.load_or_make(emulator(PONG), 0)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    DAMAGES[damage](path)
    jax.tree.map(np.testing.assert_array_equal, starts.load_or_make(emulator(PONG), 0), first)
    assert len(made) == 2
    assert len(path.read_bytes()) == len(whole)
    starts.load_or_make(emulator(PONG), 0)
    assert len(made) == 2


def test_a_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, made: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "file"))
    first, again = (starts.load_or_make(emulator(PONG), 0) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert len(made) == 2 and "Start states are not kept" in capsys.readouterr().err


def test_nothing_is_left_where_writing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, made: Any):
    def full(*args: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    starts.load_or_make(emulator(PONG), 0)
    assert not list(folder.iterdir())
