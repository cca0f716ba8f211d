"""Cartridges are found where the reader of the documentation looks, and only the right version of them."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from podium.envs.atari import games, roms

DATA = bytes(range(256)) * 16
OURS = dataclasses.replace(games.find("Amidar"), md5=hashlib.md5(DATA).hexdigest())
"""A game whose cartridge we may write ourselves."""


@pytest.fixture(autouse=True)
def _no_folder_of_this_machine(monkeypatch):
    monkeypatch.delenv(roms.VARIABLE, raising=False)


@pytest.mark.parametrize("file", ["amidar.bin", "amidar.a26", "Amidar (1982) (Parker Bros).rom"])
def test_any_file_with_the_right_md5(file, tmp_path):
    (tmp_path / "amidar.txt").write_text("no cartridge")
    (tmp_path / "other.bin").write_bytes(DATA[::-1])
    (tmp_path / file).write_bytes(DATA)
    assert roms.find_rom(OURS, tmp_path) == DATA
    assert roms.find_rom(OURS, str(tmp_path)) == DATA


@pytest.mark.extras
def test_argument_before_variable_before_packages(tmp_path, monkeypatch):
    named, by_variable = tmp_path / "named", tmp_path / "variable"
    for folder in (named, by_variable):
        folder.mkdir()
    monkeypatch.setenv(roms.VARIABLE, str(by_variable))
    (by_variable / "amidar.bin").write_bytes(DATA)
    assert roms.find_rom(OURS) == DATA
    with pytest.raises(FileNotFoundError, match="Amidar needs the cartridge amidar.bin with md5") as error:
        roms.find_rom(OURS, named)
    sentence = str(error.value)
    assert OURS.md5 in sentence and str(named) in sentence and str(by_variable) not in sentence
    assert 'pip install "podium[atari]"' in sentence and roms.VARIABLE in sentence


def test_no_folder_and_other_versions_are_refused(tmp_path, monkeypatch):
    (tmp_path / "amidar.bin").write_bytes(DATA[1:])
    with pytest.raises(ValueError, match=f"md5 {OURS.md5}, but .*amidar.bin has md5 .*another version") as error:
        roms.find_rom(OURS, tmp_path)
    assert hashlib.md5(DATA[1:]).hexdigest() in str(error.value)
    (tmp_path / "right.bin").write_bytes(DATA)
    assert roms.find_rom(OURS, tmp_path) == DATA
    with pytest.raises(ValueError, match="directory='.*nowhere' is no folder"):
        roms.find_rom(OURS, tmp_path / "nowhere")
    monkeypatch.setenv(roms.VARIABLE, str(tmp_path / "amidar.bin"))
    with pytest.raises(ValueError, match="PODIUM_ROMS='.*amidar.bin' is no folder"):
        roms.find_rom(OURS)


def test_without_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(roms, "_PACKAGES", (("no_such_package", "roms"),))
    with pytest.raises(FileNotFoundError, match="neither ale_py nor envpool_assets is installed. pip install"):
        roms.find_rom(OURS)


@pytest.mark.parametrize("package", ["ale_py", "envpool_assets"])
def test_packages_have_all_57(package, monkeypatch):
    pytest.importorskip(package, reason=f'{package} is in the extra: pip install "podium[atari]"')
    monkeypatch.setattr(roms, "_PACKAGES", [pair for pair in roms._PACKAGES if pair[0] == package])
    for game in games.GAMES:
        assert len(roms.find_rom(game)) == game.rom_bytes
