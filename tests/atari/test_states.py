"""Recorded states: taken from ale-py, joined, kept in files, and refused with a sentence where they are wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atari import oracle, play
from podium.envs.atari import states
from podium.envs.atari.games import find
from podium.envs.atari.starts import Starts

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')


@pytest.fixture(scope="module")
def pong() -> Starts:
    ale = play.after_reset(find("Pong"))
    found = [states.from_ale(ale, "Pong")]
    for _ in range(2):
        oracle.act(ale, 3)
        found.append(states.from_ale(ale, "Pong"))
    return states.join(found)


def test_what_can_be_read_directly(pong: Starts):
    ale = play.after_reset(find("Pong"))
    for number in range(3):
        np.testing.assert_array_equal(pong.machine.ram[number], ale.getRAM())
        np.testing.assert_array_equal(pong.screen[number], ale.getScreen())
        assert pong.knob[number] == 408_823 - 23_000 * number
        assert (pong.lives[number], pong.started[number]) == (0, -1)
        oracle.act(ale, 3)


def test_what_the_rules_remember():
    _, _, breakout = play.near_end("Breakout", 20)
    assert (int(breakout.lives[0]), int(breakout.started[0])) == (1, 1)
    ale = play.after_reset(find("StarGunner"))
    assert int(states.from_ale(ale, "StarGunner").started[0]) == 0
    for frame in range(300):
        oracle.act(ale, find("StarGunner").minimal_actions[frame % 18])
    assert int(states.from_ale(ale, "StarGunner").started[0]) == 1


def test_a_file_gives_back_what_was_saved(pong: Starts, tmp_path: Path):
    states.save(tmp_path / "pong.npz", "Pong", pong)
    found = states.load(str(tmp_path / "pong.npz"), "Pong")
    jax.tree.map(np.testing.assert_array_equal, found, pong)
    assert jax.tree.structure(found) == jax.tree.structure(pong)
    with pytest.raises(ValueError, match="holds start states of the cartridge with md5 .*, but Breakout is"):
        states.load(tmp_path / "pong.npz", "Breakout")
    (tmp_path / "pong.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no start states, or is damaged .*states.save writes them"):
        states.load(tmp_path / "pong.npz", "Pong")
    with pytest.raises(FileNotFoundError, match="There is no file .*none.npz; .*save writes"):
        states.load(tmp_path / "none.npz", "Pong")


def test_consoles_that_are_not_taken():
    ale = play.after_reset(find("Pong"))
    with pytest.raises(ValueError, match="ale has the cartridge with md5 60e.*, but Breakout is f34"):
        states.from_ale(ale, "Breakout")
    with pytest.raises(ValueError, match=r"No Atari game is named 'pong'.*'Pong'"):
        states.from_ale(ale, "pong")
    ale, actions, _ = play.near_end("Breakout", 5)
    for action in actions:
        oracle.act(ale, action)
    with pytest.raises(ValueError, match=r"The game of Breakout is over in ale; call ale.reset_game\(\)"):
        states.from_ale(ale, "Breakout")
    ale = oracle.make("breakout")
    ale.setDifficulty(1)
    ale.reset_game()
    with pytest.raises(ValueError, match="ale plays with difficulty 1, .*setDifficulty"):
        states.from_ale(ale, "Breakout")


@pytest.mark.parametrize("data", [b"", bytes(4000), b"\xff" * 4000])
def test_states_of_another_version_are_refused(data: bytes):
    state = SimpleNamespace(__getstate__=lambda: data)
    ale = SimpleNamespace(game_over=lambda: False, cloneState=lambda: state)
    with pytest.raises(ValueError, match=r"ale-py .* writes its state in a way that podium does not know"):
        states.from_ale(ale, "Pong")


def test_sets_that_are_refused(pong: Starts, tmp_path: Path):
    with pytest.raises(ValueError, match=r"sets=\(\) is empty"):
        states.join([])
    small = pong._replace(screen=pong.screen[:, :100])
    with pytest.raises(ValueError, match="The screens of the sets have shapes"):
        states.join([pong, small])
    wrong: list[tuple[Any, str]] = [
        (small, r"starts.*screen.* is uint8\[100, 160\] a state, but Pong needs uint8\[210, 160\]"),
        (pong._replace(knob=pong.knob.astype(float)), r"knob is float64\[\] a state, but Pong needs int32"),
        (pong._replace(knob=pong.knob[:1]), "must have one number of states"),
        (jax.tree.map(lambda x: x[:0], pong), "must have one number of states, above 0"),
        (pong._replace(machine=None), "is not a Starts of arrays"),
    ]
    for starts, message in wrong:
        with pytest.raises(ValueError, match=message):
            states.save(tmp_path / "x.npz", "Pong", starts)
    assert not list(tmp_path.iterdir())


def test_the_option_of_environments(pong: Starts, tmp_path: Path):
    one, two = [find("Pong")], [find("Pong"), find("Breakout")]
    states.save(tmp_path / "pong.npz", "Pong", pong)
    assert states.chosen(None, one) == {}
    given: list[Any] = [pong, str(tmp_path / "pong.npz"), tmp_path / "pong.npz", {"Pong": pong}]
    for each in given:
        jax.tree.map(np.testing.assert_array_equal, states.chosen(each, one)["Pong"], pong)
    assert list(states.chosen({"Pong": pong}, two)) == ["Pong"]
    for wrong, games, message in [
        (pong, two, "start_states is one set, but this environment has several games"),
        ({"Qbert": pong}, two, "start_states names 'Qbert'; this environment has Pong, Breakout"),
        (3, one, "start_states=3 must be Starts or the path of a file"),
        (pong._replace(lives=None), one, "start_states is not a Starts of arrays"),
    ]:
        with pytest.raises(ValueError, match=message):
            states.chosen(wrong, games)


def test_states_by_index():
    batch = {"a": jnp.arange(12).reshape(4, 3), "b": jnp.arange(4.0)}
    one = states.get_state(batch, 2)
    assert one["a"].tolist() == [6, 7, 8] and float(one["b"]) == 2
    some = states.get_state(batch, jnp.array([3, 0]))
    put = jax.jit(states.set_state)(batch, jnp.array([0, 1]), some)
    assert put["a"].tolist() == [[9, 10, 11], [0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert states.set_state(batch, 1, one)["b"].tolist() == [0, 2, 2, 3]
    with pytest.raises(ValueError, match="state has another structure than the batch"):
        states.set_state(batch, 0, {"a": one["a"]})
    with pytest.raises(ValueError, match=r"state has an array float32\[3\] where the batch has int32\[4, 3\]"):
        states.set_state(batch, 0, {"a": one["a"].astype(jnp.float32), "b": one["b"]})
    with pytest.raises(ValueError, match="state has an array"):
        states.set_state(batch, 0, some)
