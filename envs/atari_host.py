"""Atari games as podium plays them on the CPU, whichever library emulates them: options, lives and rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from podium.envs.atari import games
from podium.envs.simulators import NextStepHostEnv, environment_seeds
from podium.host import HostEnv, HostEnvFactory
from podium.ranges import is_integer, is_number
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep

GAMES = tuple(game.name for game in games.GAMES)
"""The 57 games that scores are reported for (Atari-57)."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What an Atari environment may be made with; checked here, because the libraries crash on some of what is refused.

    Args:
      frame_skip: frames an action is held for; the last two are merged by their maximum.
      stack: newest pictures in an observation.
      screen: height and width of the pictures; scores are reported for 84.
      repeat_action_probability: of a frame keeping the action before ("sticky actions"; Machado et al. 2018 use 0.25).
      noop_max: an episode begins after 1 to so many frames of waiting, the last of them FIRE where the game has FIRE.
      full_action_space: all 18 actions, not just those that do something in this game.
      life_loss: a lost life sets `terminated`, and the game goes on: only its true end resets the emulator.
      reward_clip: the reward is the sign of the game's.
      max_episode_frames: an episode is truncated after so many.
      num_threads: of one batch; None lets the library choose, one a core.

    Raises:
      ValueError: for a value of the wrong type or out of range.
    """

    frame_skip: int = 4
    stack: int = 4
    screen: int = 84
    repeat_action_probability: float = 0.0
    noop_max: int = 30
    full_action_space: bool = False
    life_loss: bool = False
    reward_clip: bool = True
    max_episode_frames: int = 108_000
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("frame_skip", "stack", "screen", "noop_max", "max_episode_frames"):
            check_count(name, getattr(self, name))
        if self.screen > 210:
            raise ValueError(f"screen={self.screen} is more than the 210 lines of the console; use 84, or up to 210.")
        if self.num_threads is not None:
            check_count("num_threads", self.num_threads)
        for name in ("full_action_space", "life_loss", "reward_clip"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        probability = self.repeat_action_probability
        if not is_number(probability) or not 0 <= probability <= 1:
            raise ValueError(f"repeat_action_probability={probability!r} must be a number from 0 to 1.")

    @property
    def protocol(self) -> str:
        """Say how an episode is played: what one needs to know beside a score."""
        sticky = self.repeat_action_probability
        return ", ".join(
            (
                "an episode a life" if self.life_loss else "whole games, lost lives go on",
                "signs of rewards" if self.reward_clip else "the game's own rewards",
                f"at most {self.max_episode_frames:,} frames",
                f"{self.frame_skip} frames a step",
                f"1 to {self.noop_max} frames of waiting first",
                f"sticky actions ({sticky:g})" if sticky else "no sticky actions",
            )
        )

    @property
    def max_episode_steps(self) -> int:
        """Steps that `max_episode_frames` allow; the last may be cut."""
        return -(-self.max_episode_frames // self.frame_skip)


def check_count(name: str, value: Any) -> None:
    """Raise ValueError for a number of things that is no positive integer of 32 bits."""
    if not is_integer(value, 1, 2**31 - 1):
        raise ValueError(f"{name}={value!r} must be a positive integer below 2**31.")


def option_names() -> list[str]:
    """List the fields of `Options`."""
    return [field.name for field in dataclasses.fields(Options)]


def game_name(rom: str) -> str:
    """Return the name that goes with a ROM.

    >>> game_name("space_invaders")
    'SpaceInvaders'
    """
    return "".join(word.capitalize() for word in rom.split("_"))


class Played(NamedTuple):
    """What emulators return after a step, [B, ...]: pictures, reward and how the games stand.

    Pictures are [B, stack, screen, screen]; `reward` is the game's own, `over` its own end, `cut` the frame limit.
    """

    pictures: np.ndarray
    reward: np.ndarray
    over: np.ndarray
    cut: np.ndarray
    lives: np.ndarray


class Emulators(Protocol):
    """A batch of emulators, which reset in the step after `over` or `cut`, and only then."""

    def reset(self) -> tuple[np.ndarray, np.ndarray]:
        """Start every game; return pictures and lives."""
        ...

    def send(self, action: np.ndarray) -> None:
        """Begin a step."""
        ...

    def recv(self) -> Played:
        """Wait for the step; the arrays are not written to again."""
        ...


def host_envs(
    name: str,
    num_actions: int,
    options: Options,
    make_emulators: Callable[[list[int]], Emulators],
) -> HostEnvFactory:
    """Return the game `name`; `make_emulators` takes one seed an emulator.

    Observations are uint8 [screen, screen, stack], newest picture last. Libraries put the stack first: what is returned
    is a view with the axes moved, so that the one copy is that to the device. `jax.device_put` takes views as they are,
    in less than half the time that `np.ascontiguousarray` needs.

    `info["raw_reward"]` is the game's own reward and `info["episode_end"]` its true end or cut, whatever `life_loss`
    and `reward_clip` make of `reward` and `terminated`. After a lost life the next row is a transition, and its `obs`
    is the first of an episode as far as learning goes; after the true end comes a row with `valid=False`.

    `evaluation` is the protocol that scores are quoted for: whole games, no life loss, unclipped rewards; frame limit,
    sticky actions and all else as they are here.
    """
    obs = ArraySpec((options.screen, options.screen, options.stack), np.uint8, 0, 255, options.stack)
    spec = EnvSpec(name, obs, DiscreteSpec(num_actions), options.max_episode_steps)

    def envs(options: Options, evaluation: HostEnvFactory | None) -> HostEnvFactory:
        def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
            emulators = make_emulators(environment_seeds(seed, first_index, num_envs))
            return _Games(spec, num_envs, emulators, options)

        record = {"name": name, "options": dataclasses.asdict(options)}
        return HostEnvFactory(
            spec,
            make,
            frames_per_step=options.frame_skip,
            evaluation=evaluation,
            protocol=options.protocol,
            record=record,
        )

    return envs(options, envs(dataclasses.replace(options, life_loss=False, reward_clip=False), None))


class _Games(NextStepHostEnv):
    """A batch of games."""

    def __init__(self, spec: EnvSpec, num_envs: int, emulators: Emulators, options: Options):
        super().__init__(spec, num_envs)
        self._emulators: Emulators | None = emulators
        self._options = options
        self._lives = np.zeros(num_envs, np.int32)

    def _reset(self) -> TimeStep:
        assert self._emulators is not None
        pictures, self._lives = self._emulators.reset()
        raw_reward, episode_end = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
        return self._first(np.moveaxis(pictures, 1, -1), raw_reward=raw_reward, episode_end=episode_end)

    def _send(self, action: np.ndarray) -> None:
        assert self._emulators is not None
        self._emulators.send(action)

    def _recv(self) -> TimeStep:
        assert self._emulators is not None
        pictures, reward, over, cut, lives = self._emulators.recv()
        valid = ~self._resetting
        raw_reward = np.where(valid, reward, 0).astype(np.float32)
        terminated = over
        if self._options.life_loss:
            # No lives left is no end: Qbert plays on for some frames, and says itself when it is over.
            terminated = over | ((lives < self._lives) & (lives > 0))
        self._lives = lives
        return self._following(
            np.moveaxis(pictures, 1, -1),
            np.sign(raw_reward) if self._options.reward_clip else raw_reward,
            terminated,
            cut,
            ended=over | cut,
            raw_reward=raw_reward,
            episode_end=valid & (over | cut),
        )

    def _close(self) -> None:
        # The libraries' own close releases nothing; their destructors do, also with a step under way.
        self._emulators = None
