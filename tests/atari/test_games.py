"""The table of games: names, actions and sizes are ale-py's; a wrong name gets a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podium.envs import atari_host
from podium.envs.atari import games


def test_57_games_by_name():
    names = [game.name for game in games.GAMES]
    assert len(set(names)) == 57 and names == sorted(names) and tuple(names) == atari_host.GAMES
    assert all(games.find(game.name) is game and atari_host.game_name(game.rom) == game.name for game in games.GAMES)
    assert len(set(games.GAMES)) == 57, "games are hashable"
    assert sum(game.atari100k for game in games.GAMES) == 26
    assert set(json.loads((Path(__file__).parent / "drives.json").read_text())) < set(names)


def test_names_are_gymnasiums():
    gymnasium, ale_py = pytest.importorskip("gymnasium"), pytest.importorskip("ale_py")
    gymnasium.register_envs(ale_py)
    assert {f"ALE/{game.name}-v5" for game in games.GAMES} <= set(gymnasium.registry)


def test_actions_are_ale_pys():
    ale_py, roms = pytest.importorskip("ale_py"), pytest.importorskip("ale_py.roms")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    for game in [games.find(name) for name in ("Pong", "Skiing", "Seaquest", "Asteroids", "Surround")]:
        ale = ale_py.ALEInterface()
        ale.loadROM(roms.get_rom_path(game.rom))
        assert tuple(int(action.value) for action in ale.getMinimalActionSet()) == game.minimal_actions
        assert tuple(int(action.value) for action in ale.getLegalActionSet()) == game.legal_actions
        assert ale.getScreen().shape == (game.height, 160)


def test_fields_hold_what_they_may():
    for game in games.GAMES:
        assert game.bank in ("2K", "4K", "F8", "F6", "E0", "FE") and len(game.md5) == 32
        assert {game.controller_left, game.controller_right} <= {"joystick", "paddles"}
        assert set(game.minimal_actions) <= set(game.legal_actions) <= set(range(games.NUM_ACTIONS))
        select = game.variation_select
        if select is not None:
            assert (select.special == "double_dunk") if select.special else select.until and select.select_frames > 0
            assert all(0x80 <= address <= 0xFF for address, _ in select.until)
            assert all(step in ("reset_switch", "select", "noop") and n > 0 for step, n in select.before)
    assert games.find("Berzerk").variation_select == games.VariationSelect(((0x80, (1,)),), 2, (("noop", 20),))
    assert games.find("Gravitar").start_actions == (1,) * 16
    assert games.find("Boxing").variables[0] == games.Variable(
        "mine", 0, ("if", ("==", "@92", 192), 100, ("bcd", "@92"))
    )


@pytest.mark.parametrize(
    ("asked", "meant"), [("mspacman", "MsPacman"), ("atari/pong", "Pong"), ("up_n_down", "UpNDown")]
)
def test_unknown_name_suggests_what_was_meant(asked, meant):
    with pytest.raises(ValueError, match=f"No Atari game is named '{asked}'. Did you mean '{meant}'"):
        games.find(asked)


def test_name_like_no_other_gets_no_suggestion():
    with pytest.raises(ValueError, match=r"named 'Catch'\. podium\.envs\.atari\.games\.GAMES lists the 57\."):
        games.find("Catch")
