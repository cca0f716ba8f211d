"""Reward, lives and the end of a game, read from the console's RAM after each frame.

The rules are expressions in `games.json`. A number is itself; "@XX" is the RAM byte at hexadecimal address XX (80 to
FF); another string is a variable of this frame; a tuple is an operation on what follows its name:

`+` `*`, of any number; `-` `&` `>>` `min` `max`; `==` `!=` `<` `<=` `>` `>=`, 1 or 0; `and` `or` `not`, 1 or 0
("if", c, a, b): a where c is not 0, else b
("prev", name): a variable, one frame earlier
("bcd", a, b, ...): two decimal digits a byte, least significant byte first
("digits", a, b, ...): one digit a byte in its low nibble, least significant first; 10 is a blank and counts 0
("table", i, (...)): entry i, 0 where i is out of range
("s8", a): the byte in two's complement
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.envs.atari.games import Expression, Game
from podium.types import Array


class RuleState(NamedTuple):
    """What the rules remember from frame to frame; int32 [...] each.

    Attributes:
      terminal: 1 once the game is over, else 0.
      score: of the game; its change is the reward of most games.
      lives: of the rule, also when the game is over.
      variables: of the games that have some, in their order; as many as the game with the most has.
    """

    terminal: Array
    score: Array
    lives: Array
    variables: tuple[Array, ...]


class Rules:
    """The rules of some games, as functions of a batch of consoles.

    Every game's rule is computed for every console, and one of them chosen: a rule is a few dozen integer operations,
    against thousands in a frame of the console.

    Args:
      games: at least one.

    Raises:
      ValueError: there is none.
    """

    def __init__(self, games: Sequence[Game]):
        if not games:
            raise ValueError("games=() is empty; name at least one game.")
        self.games = tuple(games)
        self._num_variables = max(len(game.variables) for game in self.games)

    def init(self, which: Array | None, ram: Array) -> RuleState:
        """Return the state at the start of an episode: the baseline that the first frame's reward counts from.

        Args:
          which: int32 [...], the number in `games` of each console's; ignored (and may be None) where there is but one.
          ram: int32 [..., 128], right after the reset.
        """
        return self.frame(which, self._blank(which, ram.shape[:-1]), ram)[0]

    def frame(self, which: Array | None, state: RuleState, ram: Array) -> tuple[RuleState, Array, Array, Array]:
        """Judge one emulated frame. Once a game is over nothing changes, and the reward is 0.

        Args:
          which: int32 [...], as for `init`.
          state: of `init` or of the frame before.
          ram: int32 [..., 128], after the frame.

        Returns:
          The new state; the reward of this frame, int32 [...]; lives as ale-py reports them, int32 [...]; and whether
          the game is over, bool [...].
        """
        over = state.terminal != 0
        new, reward = _choose(which, [self._next(game, state, ram) for game in self.games])
        new = jax.tree.map(lambda old, new: jnp.where(over, old, new), state, new)
        return new, jnp.where(over, 0, reward), self.lives(which, new), new.terminal != 0

    def remember(self, which: Array | None, state: RuleState, name: str, value: Array) -> RuleState:
        """Return the state with a variable set, in the games that have it and where `value`, int32 [...], is not -1."""
        variables = list(state.variables)
        for i, game in enumerate(self.games):
            for place, variable in enumerate(game.variables):
                if variable.name == name:
                    here = (value >= 0) & (len(self.games) == 1 or which == i)
                    variables[place] = jnp.where(here, value, variables[place])
        return state._replace(variables=tuple(variables))

    def lives(self, which: Array | None, state: RuleState) -> Array:
        """Return lives as ale-py reports them, int32 [...]: 0 when the game is over, but for two games."""
        kept: Any = functools.reduce(
            operator.or_,
            [len(self.games) == 1 or which == i for i, game in enumerate(self.games) if game.lives_kept_when_over],
            False,
        )
        return jnp.where((state.terminal == 0) | kept, state.lives, 0)

    def _blank(self, which: Array | None, shape: tuple[int, ...]) -> RuleState:
        """Return the state before any frame."""
        states = []
        for game in self.games:
            variables = [variable.init for variable in game.variables]
            states.append(self._state(shape, 0, 0, game.lives_at_reset, variables))
        return _choose(which, states)

    def _next(self, game: Game, state: RuleState, ram: Array) -> tuple[RuleState, Array]:
        """Return a game's state after a frame and its reward, as if it were not over."""
        names = ("terminal", "score", "lives", *(variable.name for variable in game.variables))
        before = dict(zip(names, (*state[:3], *state.variables), strict=False))
        now: dict[str, Any] = {}
        steps = [(variable.name, variable.next) for variable in game.variables]
        for name, expression in (*steps, ("terminal", game.terminal), ("score", game.score), ("lives", game.lives)):
            now[name] = _value(expression, ram, now, before)
        now["delta"] = now["score"] - before["score"]
        reward = _value(game.reward, ram, now, before)
        shape = ram.shape[:-1]
        new = self._state(shape, _truth(now["terminal"]), now["score"], now["lives"], [now[name] for name, _ in steps])
        return new, _full(shape, reward)

    def _state(
        self, shape: tuple[int, ...], terminal: Any, score: Any, lives: Any, variables: Sequence[Any]
    ) -> RuleState:
        padded = (*variables, *(0,) * (self._num_variables - len(variables)))
        return jax.tree.map(functools.partial(_full, shape), RuleState(terminal, score, lives, padded))


def _full(shape: tuple[int, ...], value: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray(value, jnp.int32), shape)


def _choose(which: Array | None, each: Sequence[Any]) -> Any:
    """Return `each[which]`, one console at a time."""
    if len(each) == 1:
        return each[0]

    def choose(*leaves: Array) -> Array:
        return jax.lax.select_n(jnp.broadcast_to(jnp.asarray(which, jnp.int32), leaves[0].shape), *leaves)

    return jax.tree.map(choose, *each)


def _value(expression: Expression, ram: Array, now: dict[str, Any], before: dict[str, Any]) -> Any:
    """Return an expression's value, an integer or int32 [...]."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return ram[..., int(expression[1:], 16) - 0x80] if expression.startswith("@") else now[expression]
    name, *operands = expression
    if name == "prev":
        return before[operands[0]]
    if name == "table":
        return _table(_value(operands[0], ram, now, before), operands[1])
    return _OPERATIONS[name](*(_value(operand, ram, now, before) for operand in operands))


def _truth(value: Any) -> Any:
    return _one_or_zero(value != 0)


def _one_or_zero(condition: Any) -> Any:
    return int(condition) if isinstance(condition, bool) else condition.astype(jnp.int32)


def _table(index: Any, entries: tuple[int, ...]) -> Any:
    """Return an entry without a gather: tables are short, and 0 is what is left where none was met."""
    return sum(_one_or_zero(index == i) * entry for i, entry in enumerate(entries) if entry)


def _bcd(*each: Any) -> Any:
    return sum(100**i * (10 * (byte >> 4) + (byte & 15)) for i, byte in enumerate(each))


def _digits(*each: Any) -> Any:
    return sum(10**i * jnp.where(byte & 15 == 10, 0, byte & 15) for i, byte in enumerate(each))


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: _one_or_zero(compare(a, b))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": lambda *each: functools.reduce(operator.add, each),
    "*": lambda *each: functools.reduce(operator.mul, each),
    "and": lambda *each: functools.reduce(operator.and_, map(_truth, each)),
    "or": lambda *each: functools.reduce(operator.or_, map(_truth, each)),
    "not": lambda a: _one_or_zero(a == 0),
    "-": operator.sub,
    "&": operator.and_,
    ">>": operator.rshift,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "==": _comparison(operator.eq),
    "!=": _comparison(operator.ne),
    "<": _comparison(operator.lt),
    "<=": _comparison(operator.le),
    ">": _comparison(operator.gt),
    ">=": _comparison(operator.ge),
    "if": lambda condition, a, b: jnp.where(condition != 0, a, b),
    "bcd": _bcd,
    "digits": _digits,
    "s8": lambda a: a - ((a >> 7) << 8),
}
