"""Consoles of a batch with the games they run: an action held for some frames, with its rewards, lives and pictures.

Functions here take the batch first. `for_one` turns them into functions of one environment that `jax.vmap` turns back:
what vectorises them is the lockstep of `machine`, not a rule for each primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from podium.envs.atari import machine
from podium.envs.atari.cartridges import Cartridge, Cartridges
from podium.envs.atari.controls import KNOB_CENTRE, controls
from podium.envs.atari.games import Game
from podium.envs.atari.machine import Machine
from podium.envs.atari.rules import Rules, RuleState
from podium.envs.atari.video import WIDTH
from podium.types import Array, PyTree

RunFrame = Callable[..., tuple[Machine, Array]]
"""`machine.frame` or a function like it: what a back end is."""


class Consoles(NamedTuple):
    """State of a batch between two steps.

    Attributes:
      machine: the consoles.
      rules: how their games stand.
      knob: int32 [lanes], resistance of the paddle.
      held: int32 [lanes], the action that was done last, of ale-py's 18.
      which: int32 [lanes], which of the games it is.
    """

    machine: Machine
    rules: RuleState
    knob: Array
    held: Array
    which: Array


class Played(NamedTuple):
    """What the frames of a step gave.

    Attributes:
      reward: int32 [lanes], of all frames.
      lives: int32 [lanes], after them, as ale-py counts them.
      over: bool [lanes], whether the game has ended.
      frames: int32 [lanes], emulated: fewer than were asked for where the game ended.
      screens: uint8 [lanes, 2, height, 160], colour indices of the last two frames asked for; of no meaning where not
        `seen`.
      seen: bool [lanes, 2], whether they were emulated.
    """

    reward: Array
    lives: Array
    over: Array
    frames: Array
    screens: Array
    seen: Array


class Emulator:
    """Consoles with one or several games.

    Args:
      games: at least one.
      images: of their cartridges.
      run_frame: the back end.
    """

    def __init__(self, games: tuple[Game, ...], images: tuple[bytes, ...], run_frame: RunFrame = machine.frame):
        self.games, self._images, self.run_frame = games, images, run_frame
        self.rules = Rules(games)
        self.cartridges = Cartridges(
            [
                Cartridge(image, game.bank, game.y_start, game.height, game.hmove_blanks)
                for game, image in zip(games, images, strict=True)
            ]
        )

    def only(self, numbers: Sequence[int]) -> Emulator:
        """Return one with some of the games."""
        images = tuple(self._images[number] for number in numbers)
        return Emulator(tuple(self.games[number] for number in numbers), images, self.run_frame)

    def begin(self, consoles: Machine, which: Array, knob: Array, lives: Array, started: Array) -> Consoles:
        """Return consoles at the start of an episode: the score that they show now is where rewards count from.

        `lives` and `started` are those of `starts.Starts`, int32 [lanes].
        """
        rules = self.rules.init(which, consoles.ram[:, :128].astype(jnp.int32))
        rules = rules._replace(lives=jnp.where(lives < 0, rules.lives, lives))
        rules = self.rules.remember(which, rules, "started", started)
        return Consoles(consoles, rules, knob, jnp.zeros_like(which), which)

    def frame(
        self, consoles: Machine, which: Array, action: Array, knob: Array, active: Array, draws: Array, **switches: Any
    ) -> tuple[Machine, Array, Array]:
        """Run a frame; return the consoles, the knob and the screens. `switches` are those of `controls`."""
        held = controls(self.games, which, action, knob, **switches)
        after, screens = self.run_frame(self.cartridges, consoles, which, held, active, draws)
        return after, jnp.where(active, held.knob, knob), screens

    def play(self, consoles: Consoles, action: Array, sticks: Array, draws: bool) -> tuple[Consoles, Played]:
        """Hold an action for some frames; a game that ends stops there.

        Args:
          consoles: of the lanes.
          action: int32 [lanes], of ale-py's 18.
          sticks: bool [lanes, frames], where the action of the frame before goes on instead ("sticky actions").
          draws: whether the pictures of the last two frames are wanted.
        """
        frames = sticks.shape[1]
        count = action.shape[0]

        def one(number: Array, carry: tuple[Consoles, Played]) -> tuple[Consoles, Played]:
            before, played = carry
            active = ~played.over
            held = jnp.where(lax.dynamic_index_in_dim(sticks, number, 1, keepdims=False), before.held, action)
            slot = number - (frames - 2)
            wanted = (slot >= 0) if draws else jnp.zeros((), bool)
            after, knob, screens = self.frame(before.machine, before.which, held, before.knob, active, wanted)
            ram = after.ram[:, :128].astype(jnp.int32)
            rules, reward, lives, over = self.rules.frame(before.which, before.rules, ram)
            kept, seen = played.screens, played.seen
            if draws:
                at = jnp.maximum(slot, 0)
                kept = lax.dynamic_update_index_in_dim(kept, screens, at, 1)
                seen = lax.dynamic_update_index_in_dim(seen, active & wanted, at, 1)
            return Consoles(after, rules, knob, jnp.where(active, held, before.held), before.which), Played(
                played.reward + reward, lives, over, played.frames + active, kept, seen
            )

        none = jnp.zeros((count,), jnp.int32)
        screens = jnp.zeros((count, 2, self.cartridges.height if draws else 0, WIDTH), jnp.uint8)
        start = Played(
            none,
            self.rules.lives(consoles.which, consoles.rules),
            consoles.rules.terminal != 0,
            none,
            screens,
            jnp.zeros((count, 2), bool),
        )
        return lax.fori_loop(0, frames, one, (consoles, start))


def for_one(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return a function of one environment from one of a batch; under `jax.vmap` it is called with the whole batch.

    Args:
      function: of arrays with the batch first, in pytrees, and returning such.
    """

    @custom_vmap
    def many(*batched: PyTree) -> PyTree:
        return function(*batched)

    @many.def_vmap
    def rule(size: int, mapped: PyTree, *batched: PyTree) -> tuple[PyTree, PyTree]:
        every = jax.tree.map(
            lambda x, is_mapped: x if is_mapped else jnp.broadcast_to(x, (size, *jnp.shape(x))), batched, tuple(mapped)
        )
        flat = jax.tree.map(lambda x: x.reshape(size * x.shape[1], *x.shape[2:]), every)
        out = many(*flat)
        out = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), out)
        return out, jax.tree.map(lambda x: True, out)

    def one(*single: PyTree) -> PyTree:
        out = many(*jax.tree.map(lambda x: jnp.asarray(x)[None], single))
        return jax.tree.map(lambda x: x[0], out)

    return one


def fresh_knob(which: Array) -> Array:
    """Return the paddle's resistance at the start of an episode."""
    return jnp.full_like(which, KNOB_CENTRE)
