"""The Atari 2600 as pure JAX functions: real cartridges, emulated where the agent learns."""

from __future__ import annotations

import dataclasses
from typing import Any

from podium.env import Env
from podium.envs.atari.games import GAMES

PREFIX = "atari/"


def names() -> list[str]:
    """List the environments: a game each, and all together."""
    return [*(PREFIX + game.name for game in GAMES), PREFIX + "Mixed"]


def option_names(name: str) -> list[str]:
    """List what `make` accepts for an environment."""
    from podium.envs.atari.environment import Options

    fields = [field.name for field in dataclasses.fields(Options)]
    return ["games", *fields] if name == PREFIX + "Mixed" else fields


def make(name: str, **options: Any) -> Env:
    """Make an environment; see `podium.envs.atari.environment.make`."""
    from podium.envs.atari import environment

    return environment.make(name, **options)
