"""Modules of the user's own, imported before a command is read, so that what they register has names and flags."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

FLAG = "--plugins"

_loaded: list[str] = []


def load(argv: Sequence[str]) -> None:
    """Import the modules that a command line names after --plugins; those of the folder it is typed in are found too.

    Raises:
      ValueError: there is no such module.
    """
    for name in _named(argv):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # As `python -m podium` has it, and the console script has not.
        if name.endswith(".py") or "/" in name:
            raise ValueError(f"{FLAG} {name} is a file; give the name of a module that can be imported, such as mine.")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # The module is there, and one that it wants is not.
            raise ValueError(f"{FLAG} {name}: there is no module of that name, here or on $PYTHONPATH.") from None
        if name not in _loaded:
            _loaded.append(name)


def files() -> Iterable[Path]:
    """Return the files of the modules that were imported; packages by their folder."""
    for name in _loaded:
        if file := sys.modules[name].__file__:
            yield Path(file).resolve().parent if Path(file).stem == "__init__" else Path(file).resolve()


def _named(argv: Sequence[str]) -> list[str]:
    names, open_flag = [], False
    for here in argv:
        if here == FLAG:
            open_flag = True
        elif here.startswith(f"{FLAG}="):
            names.append(here.removeprefix(f"{FLAG}="))
            open_flag = False
        elif here.startswith("-"):
            open_flag = False
        elif open_flag:
            names.append(here)
    return names
