"""Atari games as pure environments: console, rules, pictures and resets are one function of JAX.

Rewards, observations and ends mean what they do in podium's environments on the CPU (`podium.envs.atari_host`), so that
a policy trained in one can be evaluated in the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, reset_key, restart, transition
from podium.envs.atari import compiler, pictures, starts, states
from podium.envs.atari.emulator import Consoles, Emulator, Played, for_one
from podium.envs.atari.games import GAMES, NUM_ACTIONS, find
from podium.envs.atari.roms import find_rom
from podium.ranges import is_integer, is_number
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, TimeStep

OBSERVATIONS = ("pixels", "ram")

BACKENDS = ("xla", "pallas")


@dataclasses.dataclass(frozen=True)
class Options:
    """What an environment may be made with.

    Args:
      observation: "pixels", uint8 [screen, screen, stack], grey, newest last; or "ram", uint8 [128], the console's
        memory.
      frame_skip: frames an action is held for; pictures of the last two are merged by their maximum.
      sticky_actions: probability of a frame keeping the action before it (Machado et al. 2018 use 0.25).
      noop_max: an episode begins after 1 to so many frames of waiting, the last of them FIRE where the game has FIRE.
        0: it begins where ale-py's `reset_game` does, always in the same state.
      life_loss: a lost life sets `terminated`, and the game goes on: only its true end resets the console.
      full_action_space: all 18 actions, not just those that do something in this game.
      reward_clip: the reward is the sign of the game's, which `info["raw_reward"]` has. None: with pixels it is, as in
        podium's other Atari environments; with RAM it is the game's own.
      stack: newest pictures in an observation.
      screen: height and width of the pictures; scores are reported for 84.
      max_episode_frames: an episode is truncated after so many.
      backend: what runs the console: "xla" anywhere, or "pallas", a kernel for GPUs; None: the kernel where JAX's
        default device is a GPU.
      roms: folder with cartridge images; None looks where `podium.envs.atari.roms` says.
      start_states: where episodes begin, each drawn uniformly, in place of the states after a reset (`noop_max` then
        has no part): the path of a file that `podium.envs.atari.states.save` wrote, or the states themselves. With
        several games a dict of such by the games' names; the others begin as ever.

    Raises:
      ValueError: for a value of the wrong type or out of range.
    """

    observation: str = "pixels"
    frame_skip: int = 4
    sticky_actions: float = 0.0
    noop_max: int = 30
    life_loss: bool = False
    full_action_space: bool = False
    reward_clip: bool | None = None
    stack: int = 4
    screen: int = 84
    max_episode_frames: int = 108_000
    backend: str | None = None
    roms: str | None = None
    start_states: Any = None

    def __post_init__(self) -> None:
        for name, allowed in (("observation", OBSERVATIONS), ("backend", (None, *BACKENDS))):
            if getattr(self, name) not in allowed:
                named = ", ".join(repr(x) for x in allowed if x)
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {named}.")
        for name, least, most in (
            ("frame_skip", 1, 1000),
            ("noop_max", 0, 1000),
            ("stack", 1, 1000),
            ("screen", 1, 160),
            ("max_episode_frames", 1, 2**30),
        ):
            value = getattr(self, name)
            if not is_integer(value, least, most):
                raise ValueError(f"{name}={value!r} must be an integer from {least} to {most}.")
        for name in ("life_loss", "full_action_space"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        if self.reward_clip not in (None, True, False):
            raise ValueError(f"reward_clip={self.reward_clip!r} must be True, False or None.")
        sticky = self.sticky_actions
        if not is_number(sticky) or not 0 <= sticky <= 1:
            raise ValueError(f"sticky_actions={sticky!r} must be a probability, from 0 to 1.")

    @property
    def clips(self) -> bool:
        """Whether rewards are signs."""
        return self.observation == "pixels" if self.reward_clip is None else self.reward_clip


class State(NamedTuple):
    """State of one environment.

    Attributes:
      consoles: one console with its game, without a batch axis.
      stack: uint8 [screen, screen, stack], the newest pictures; empty with RAM observations.
      screen: uint8 [height, 160], colour indices of the last frame, for `render`; empty with RAM observations.
      lives: int32, after the last step.
      frames: int32, of the episode so far.
    """

    consoles: Consoles
    stack: Array
    screen: Array
    lives: Array
    frames: Array


def make(name: str, games: Sequence[str] | None = None, **options: Any) -> Env:
    """Return the environment of a game, or of several.

    Args:
      name: "atari/" and a game as ALE writes it, without its version: "atari/MsPacman"; or "atari/Mixed", where every
        episode is of a game drawn uniformly, each environment of a batch with its own cartridge.
      games: of "atari/Mixed"; None takes all 57.
      **options: see `Options`.

    Raises:
      ValueError: for an unknown game or an option out of range.
      FileNotFoundError: there is no cartridge of the game.
    """
    compiler.avoid_avx512()
    checked = Options(**options)
    title = name.removeprefix("atari/")
    if title == "Mixed":
        chosen = tuple(find(game) for game in games) if games is not None else GAMES
        if not chosen:
            raise ValueError("games=() is empty; name at least one game, or None for all.")
        # Games have different actions; those without a meaning in one do nothing.
        checked = dataclasses.replace(checked, full_action_space=True)
    elif games is not None:
        raise ValueError(f"games={games!r} goes with 'atari/Mixed' only; {name!r} is one game.")
    else:
        chosen = (find(title),)
    images = tuple(find_rom(game, checked.roms) for game in chosen)
    return _Environment(f"atari/{title}", Emulator(chosen, images, _backend(checked.backend)), checked).env()


def _backend(name: str | None) -> Any:
    from podium.envs.atari import machine

    if name == "pallas" or (name is None and jax.default_backend() == "gpu"):
        from podium.envs.atari import kernel

        return kernel.frame
    return machine.frame


class _Environment:
    """One game, or several, with its options."""

    def __init__(self, name: str, emulator: Emulator, options: Options):
        self._emulator, self._options = emulator, options
        self._draws = options.observation == "pixels"
        found = self._find_starts()
        self._counts = np.array([len(each.knob) for each in found], np.int32)
        which = np.repeat(np.arange(len(found), dtype=np.int32), self._counts)
        self._starts = jax.jit(self._prepare)(states.join(found), which)
        every = [list(range(NUM_ACTIONS)) if options.full_action_space else list(game.minimal_actions)
                 for game in emulator.games]  # fmt: skip
        self._actions = np.array(every, np.int32)
        size = options.screen
        shape = (size, size, options.stack) if self._draws else (128,)
        steps = -(-options.max_episode_frames // options.frame_skip)
        obs = ArraySpec(shape, np.uint8, 0, 255, options.stack if self._draws else 1)
        self._spec = EnvSpec(name, obs, DiscreteSpec(self._actions.shape[1]), steps)
        self._play = for_one(self._play_all)

    def env(self) -> Env:
        """Return it as functions."""
        return Env(self._spec, self._reset, self._step, self._render, resets_itself=True)

    def _find_starts(self) -> list[starts.Starts]:
        """Return the start states of each game."""
        games = self._emulator.games
        given = states.chosen(self._options.start_states, games)
        missing = [number for number, game in enumerate(games) if game.name not in given]
        if missing:
            made = starts.load_or_make(self._emulator.only(missing), self._options.noop_max)
            for row, number in enumerate(missing):
                given[games[number].name] = jax.tree.map(lambda x, row=row: x[row], made)
        return [given[game.name] for game in games]

    def _prepare(self, found: starts.Starts, which: Array) -> State:
        """Return states from start states; their pictures are made once."""
        consoles = self._emulator.begin(found.machine, which, found.knob, found.lives, found.started)
        if self._draws:
            screen, picture = found.screen, pictures.resize(pictures.grey(found.screen), self._options.screen)
        else:
            screen = picture = jnp.zeros((len(which), 0, 0), jnp.uint8)
        zero = jnp.zeros(len(which), jnp.int32)
        return State(consoles, picture, screen, self._emulator.rules.lives(which, consoles.rules), zero)

    def _reset(self, key: Key) -> tuple[State, TimeStep]:
        index = self._draw_start(key)
        state = jax.tree.map(lambda x: x[index], self._starts)
        # All pictures of the first observation are the first.
        state = state._replace(stack=jnp.repeat(state.stack[..., None], self._options.stack, -1))
        return state, restart(self._observe(state), self._info(state, jnp.zeros((), jnp.int32), jnp.zeros((), bool)))

    def _draw_start(self, key: Key) -> Array:
        """Return the number of a start state: a game uniformly, then one of its states."""
        if (self._counts == self._counts[0]).all():
            return jax.random.randint(key, (), 0, int(self._counts.sum()))
        game_key, state_key = jax.random.split(key)
        game = jax.random.randint(game_key, (), 0, len(self._counts))
        first = np.cumsum(self._counts) - self._counts
        return jnp.asarray(first)[game] + jax.random.randint(state_key, (), 0, jnp.asarray(self._counts)[game])

    def _step(self, key: Key, state: State, action: Array) -> tuple[State, TimeStep]:
        options = self._options
        actions = jnp.asarray(self._actions)
        row = actions[state.consoles.which] if len(self._emulator.games) > 1 else actions[0]
        sticks = jnp.zeros(options.frame_skip, bool)
        if options.sticky_actions:
            sticks = jax.random.uniform(key, (options.frame_skip,)) < options.sticky_actions
        consoles, played = self._play(state.consoles, row[action], sticks)
        frames = state.frames + played.frames
        truncated = ~played.over & (frames >= options.max_episode_frames)
        ended = played.over | truncated
        terminated = played.over
        if options.life_loss:
            # No lives left is no end: Qbert plays on for some frames, and says itself when it is over.
            terminated = terminated | ((played.lives < state.lives) & (played.lives > 0))
        after = self._see(State(consoles, state.stack, state.screen, played.lives, frames), played)
        reward = jnp.sign(played.reward) if options.clips else played.reward
        info = self._info(after, played.reward, ended)
        reached = transition(self._observe(after), reward, terminated, truncated, info)

        new, first = self._reset(reset_key(key))
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(ended, n, o), new, old)
        return choose(new, after), reached._replace(obs=choose(first.obs, reached.obs))

    def _play_all(self, consoles: Consoles, action: Array, sticks: Array) -> tuple[Consoles, Played]:
        return self._emulator.play(consoles, action, sticks, self._draws)

    def _see(self, state: State, played: Played) -> State:
        """Put the new picture on the stack; where the game ended before one was taken, the last stays the newest."""
        if not self._draws:
            return state
        before, last = played.screens
        before = jnp.where(played.seen[0], before, last)
        last = jnp.where(played.seen[1], last, before)
        picture = pictures.preprocess(before, last, self._options.screen)
        seen = played.seen.any()
        picture = jnp.where(seen, picture, state.stack[..., -1])
        stack = jnp.concatenate([state.stack[..., 1:], picture[..., None]], -1)
        return state._replace(stack=stack, screen=jnp.where(seen, last, state.screen))

    def _observe(self, state: State) -> Array:
        return state.stack if self._draws else state.consoles.machine.ram[:128]

    def _info(self, state: State, reward: Array, ended: Array) -> dict[str, Array]:
        info = {
            "raw_reward": reward.astype(jnp.float32),
            "episode_end": ended,
            "lives": state.lives,
        }
        if len(self._emulator.games) > 1:
            info["game"] = state.consoles.which
        return info

    def _render(self, state: State) -> np.ndarray:
        """Return the last frame; with RAM observations, which no picture is drawn for, the one that would follow."""
        screen = np.asarray(state.screen if self._draws else self._look(state.consoles))
        return np.asarray(pictures.PALETTE[screen])

    @functools.cached_property
    def _look(self) -> Callable[[Consoles], Array]:
        """A compiled function that draws the next frame, with the action held."""

        def look(console: Consoles) -> Array:
            consoles = jax.tree.map(lambda x: x[None], console)
            _, played = self._emulator.play(consoles, consoles.held, jnp.ones((1, 1), bool), True)
            return played.screens[0, 1]

        return jax.jit(look)
