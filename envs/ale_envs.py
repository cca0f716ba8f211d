"""The Atari games of `podium.envs.envpool_envs` through ale-py's own `AtariVectorEnv` (Farama), named `ale/Pong-v5`.

Options, observations and rewards are those of `podium.envs.atari_host`. With the same actions, Pong and Breakout give
the same bits as in envpool; ale-py's own stacks begin with zeros before the first picture, here with copies of it. The
default of `repeat_action_probability` is podium's 0, where ale-py's own `ALE/Pong-v5` has 0.25.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from podium.envs import atari_host, near_misses
from podium.envs.simulators import import_simulator
from podium.host import HostEnvFactory

PREFIX = "ale/"


def names() -> list[str]:
    """List Atari-57; `make` knows the other games of ale-py too."""
    return [f"{PREFIX}{game}-v5" for game in atari_host.GAMES]


def option_names(name: str) -> list[str]:
    """List what `make(name, ...)` accepts."""
    return atari_host.option_names()


def make(name: str, **options: Any) -> HostEnvFactory:
    """Make a game.

    Args:
      name: `ale/GAME-v5`.
      **options: of `podium.envs.atari_host.Options`.

    Raises:
      ValueError: ale-py is missing or has no such game, or an option is out of range.
    """
    checked = atari_host.Options(**options)
    library = import_simulator("ale_py.vector_env", name, "atari")
    rom = _rom(name)

    def pool(num_envs: int, num_threads: int) -> Any:
        return library.AtariVectorEnv(
            rom,
            num_envs,
            num_threads=num_threads,
            frameskip=checked.frame_skip,
            stack_num=checked.stack,
            img_height=checked.screen,
            img_width=checked.screen,
            repeat_action_probability=checked.repeat_action_probability,
            noop_max=checked.noop_max,
            full_action_space=checked.full_action_space,
            max_num_frames_per_episode=checked.max_episode_frames,
            reward_clipping=False,
        )

    num_actions = int(pool(1, 1).single_action_space.n)
    return atari_host.host_envs(
        name, num_actions, checked, lambda seeds: _Emulators(pool(len(seeds), checked.num_threads or 0), seeds)
    )


def _rom(name: str) -> str:
    roms = import_simulator("ale_py.roms", name, "atari").get_all_rom_ids()
    by_name = {f"{PREFIX}{atari_host.game_name(rom)}-v5": rom for rom in roms}
    if name not in by_name:
        near = near_misses(name, list(by_name))
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"ale-py has no game {name!r}.{hint}")
    return by_name[name]


class _Emulators:
    """An `AtariVectorEnv`; `podium.envs.atari_host.Emulators`."""

    def __init__(self, pool: Any, seeds: list[int]):
        self._pool = pool
        self._seeds: np.ndarray | None = np.asarray(seeds)
        self._over, self._age = np.zeros(len(seeds), bool), np.zeros(len(seeds), int)

    def reset(self) -> tuple[np.ndarray, np.ndarray]:
        pictures, info = self._pool.reset(seed=self._seeds)
        self._seeds = None  # A second reset goes on with other games.
        self._age[:] = 0
        self._over[:] = False
        return self._filled(pictures), info["lives"]

    def send(self, action: np.ndarray) -> None:
        self._pool.send(action)

    def recv(self) -> atari_host.Played:
        pictures, reward, over, cut, info = self._pool.recv()
        self._age = np.where(self._over, 0, self._age + 1)
        self._over = over | cut
        return atari_host.Played(self._filled(pictures), reward, over, cut, info["lives"])

    def _filled(self, pictures: np.ndarray) -> np.ndarray:
        """Return stacks [B, stack, ...] with an episode's first picture in the place of zeros before it."""
        first = pictures.shape[1] - 1 - self._age
        if not (first > 0).any():
            return pictures
        filled = pictures.copy()
        for env in np.flatnonzero(first > 0):
            filled[env, : first[env]] = pictures[env, first[env]]
        return filled
