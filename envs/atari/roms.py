"""Where cartridges come from: podium ships none, and takes those of packages that do, or a folder of yours."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from podium.envs.atari.games import Game

VARIABLE = "PODIUM_ROMS"
"""The environment variable that may name a folder of cartridges."""

_PACKAGES = (("ale_py", "roms"), ("envpool_assets", "atari/roms"))
_SUFFIXES = (".bin", ".a26")


def find_rom(game: Game, directory: str | os.PathLike[str] | None = None) -> bytes:
    """Return the cartridge of a game, the one version of it that the emulator's rules were measured for.

    It is looked for in `directory`; without one in the folder that PODIUM_ROMS names; without that too in the packages
    ale_py and envpool_assets, of which podium's extra `atari` brings both. A folder that was named is the only one
    looked in. The file is called as ale-py calls it, with .bin or .a26; any other name will do where the md5 is right.

    Args:
      game: of `podium.envs.atari.games`.
      directory: with cartridges in it (not in folders below it), or None.

    Raises:
      ValueError: `directory` or PODIUM_ROMS is no folder, or a file of the right name is another version.
      FileNotFoundError: there is no such cartridge.
    """
    named = directory if directory is not None else os.environ.get(VARIABLE) or None
    folders = list(_installed()) if named is None else [_folder(named, directory is None)]
    others = []
    for folder in folders:
        for path in _candidates(folder, game):
            data = path.read_bytes()
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if md5 == game.md5:
                return data
            if path.stem == game.rom:
                others.append(f"{path} has md5 {md5}")
    remedy = (
        f'Put it there as {game.rom}.bin, or install the extra that brings it: pip install "podium[atari]", with no '
        f"directory named and {VARIABLE} unset."
        if named is not None
        else f'pip install "podium[atari]" brings it; or name a folder that has {game.rom}.bin, as directory or in '
        f"the environment variable {VARIABLE}."
    )
    if others:
        raise ValueError(
            f"{game.name} needs the cartridge with md5 {game.md5}, but {' and '.join(others)}: another version of the "
            f"game, or a damaged file. {remedy}"
        )
    looked = ", ".join(map(str, folders)) or "no folder: neither ale_py nor envpool_assets is installed"
    raise FileNotFoundError(
        f"{game.name} needs the cartridge {game.rom}.bin with md5 {game.md5}; looked in {looked}. {remedy}"
    )


def _folder(named: str | os.PathLike[str], by_variable: bool) -> Path:
    folder = Path(named).expanduser()
    if not folder.is_dir():
        what = f"{VARIABLE}={os.fspath(named)!r}" if by_variable else f"directory={os.fspath(named)!r}"
        raise ValueError(f"{what} is no folder; name one with cartridges, or none to take those of ale-py.")
    return folder


def _installed() -> Iterator[Path]:
    """Yield the packages' folders, without importing what loads an emulator."""
    for package, below in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec else None) or ():
            folder = Path(location) / below
            if folder.is_dir():
                yield folder


def _candidates(folder: Path, game: Game) -> Iterator[Path]:
    """Yield files that may be the cartridge, those of its name first."""
    named = [folder / f"{game.rom}{suffix}" for suffix in _SUFFIXES]
    yield from (path for path in named if path.is_file())
    for path in sorted(folder.iterdir()):
        if path not in named and path.is_file() and path.stat().st_size == game.rom_bytes:
            yield path
