"""Reward, lives and the end of a game are those of ale-py, also in frames that random play does not reach."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.envs.atari.games import GAMES, Expression, Game, find
from podium.envs.atari.rules import Rules

DRIVES = json.loads((Path(__file__).parent / "drives.json").read_text())
"""How random play is led where it would not score: weights of actions, frames an action is held, an opening."""


def plain(expression: Expression, ram: np.ndarray, now: dict[str, int], before: dict[str, int]) -> int:
    """Evaluate an expression as the documentation says it, one number at a time."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return int(ram[int(expression[1:], 16) - 128]) if expression[0] == "@" else now[expression]
    name, *rest = expression
    if name == "prev":
        return before[rest[0]]
    first = plain(rest[0], ram, now, before)
    if name == "if":
        return plain(rest[1] if first else rest[2], ram, now, before)
    if name == "table":
        return rest[1][first] if 0 <= first < len(rest[1]) else 0
    values = [first, *(plain(operand, ram, now, before) for operand in rest[1:])]
    second = values[-1]
    match name:
        case "+":
            return sum(values)
        case "*":
            return int(np.prod(values))
        case "and":
            return int(all(values))
        case "or":
            return int(any(values))
        case "not":
            return int(not first)
        case "s8":
            return first - 256 if first > 127 else first
        case "bcd":
            return sum((value // 16 * 10 + value % 16) * 100**i for i, value in enumerate(values))
        case "digits":
            return sum((0 if value % 16 == 10 else value % 16) * 10**i for i, value in enumerate(values))
        case "-":
            return first - second
        case "&":
            return first & second
        case ">>":
            return first >> second
        case "min" | "max":
            return min(values) if name == "min" else max(values)
        case "==" | "!=":
            return int((first == second) == (name == "=="))
        case "<" | ">=":
            return int((first < second) == (name == "<"))
        case ">" | "<=":
            return int((first > second) == (name == ">"))
    raise AssertionError(name)


class Plain:
    """One game's rule, one console, one frame after another."""

    def __init__(self, game: Game, ram: np.ndarray):
        self.game = game
        self.before = {variable.name: variable.init for variable in game.variables}
        self.before |= {"terminal": 0, "score": 0, "lives": game.lives_at_reset}
        self.over = False
        self.frame(ram)

    def frame(self, ram: np.ndarray) -> tuple[int, int, bool]:
        reward = 0
        if not self.over:
            now: dict[str, int] = {}
            for variable in self.game.variables:
                now[variable.name] = plain(variable.next, ram, now, self.before)
            for name in ("terminal", "score", "lives"):
                now[name] = plain(getattr(self.game, name), ram, now, self.before)
            now["delta"] = now["score"] - self.before["score"]
            reward = plain(self.game.reward, ram, now, self.before)
            self.before, self.over = now, bool(now["terminal"])
        lost = self.over and not self.game.lives_kept_when_over
        return reward, 0 if lost else self.before["lives"], self.over


def leaves(expression: Any) -> list[Any]:
    return [leaf for part in expression for leaf in leaves(part)] if isinstance(expression, tuple) else [expression]


def likely_ram(game: Game, rng: np.random.Generator, num_frames: int) -> np.ndarray:
    """Return RAM that meets the rules' conditions now and then: [num_frames, 128], few bytes changing at a time."""
    rules = (game.terminal, game.score, game.lives, *(variable.next for variable in game.variables))
    numbers = np.array([leaf for leaf in leaves(rules) if isinstance(leaf, int) and 0 <= leaf < 256] or [0])
    fresh = np.where(rng.random((num_frames, 128)) < 0.5, rng.choice(numbers, (num_frames, 128)), 0)
    fresh = np.where(rng.random(fresh.shape) < 0.5, rng.integers(0, 256, fresh.shape), fresh)
    ram = [fresh[0]]
    for row in fresh[1:]:
        ram.append(np.where(rng.random(128) < 0.2, row, ram[-1]))
    return np.stack(ram).astype(np.int32)


def test_all_games_in_one_program_by_the_documentation():
    num_frames, per_game = 10, 4
    rng = np.random.default_rng(0)
    which = np.repeat(np.arange(len(GAMES), dtype=np.int32), per_game)
    ram = np.stack([likely_ram(GAMES[index], rng, 1 + num_frames) for index in which], 1)
    rules = Rules(GAMES)
    step = jax.jit(rules.frame)
    state = step(which, rules._blank(which, which.shape), ram[0])[0]  # `init`, without compiling it too.
    slow = [Plain(GAMES[index], first) for index, first in zip(which, ram[0], strict=True)]
    np.testing.assert_array_equal(state.score, [each.before["score"] for each in slow])
    ends = rewards = 0
    for frame in ram[1:]:
        state, reward, lives, over = step(which, state, frame)
        assert (reward.dtype, lives.dtype, over.dtype) == (jnp.int32, jnp.int32, bool)
        wanted = [each.frame(bytes_) for each, bytes_ in zip(slow, frame, strict=True)]
        np.testing.assert_array_equal(np.stack([reward, lives, over], 1), np.array(wanted), str(frame))
        ends, rewards = ends + int(over.sum()), rewards + int((reward != 0).sum())
    assert ends > 100 and rewards > 500


def test_one_game_is_that_game_among_many_and_takes_any_shape():
    game = find("Qbert")
    ram = likely_ram(game, np.random.default_rng(1), 24)
    alone, many = Rules([game]), Rules([find("Pong"), game, find("Boxing")])
    which = jnp.ones((2, 4), jnp.int32)
    blocks = jnp.asarray(ram.reshape(3, 2, 4, 128))
    ours, theirs = alone.init(None, blocks[0]), many.init(which, blocks[0])
    slow = [Plain(game, row).before for row in ram[:8]]
    np.testing.assert_array_equal(ours.lives.ravel(), [each["lives"] for each in slow])
    np.testing.assert_array_equal(ours.variables[0].ravel(), [each["byte"] for each in slow])
    for block in blocks[1:]:
        ours, *results = alone.frame(None, ours, block)
        theirs, *others = many.frame(which, theirs, block)
        jax.tree.map(np.testing.assert_array_equal, (results, ours[:3]), (others, theirs[:3]))
        assert results[0].shape == (2, 4) and len(ours.variables) == 1 and len(theirs.variables) == 2
    single = alone.init(None, blocks[0, 0, 0])
    assert all(leaf.shape == () and leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(single))


def test_nothing_changes_once_a_game_is_over():
    ram = np.zeros((3, 128), np.int32)
    ram[:, 0x8D - 128], ram[:, 0x8E - 128] = (20, 21, 0), (3, 3, 9)
    rules = Rules([find("Pong")])
    state = rules.init(None, ram[0])
    state, reward, _, over = rules.frame(None, state, ram[1])
    assert (int(reward), bool(over)) == (-1, True)
    again, reward, _, over = rules.frame(None, state, ram[2])
    assert (int(reward), bool(over)) == (0, True) and again == state


def test_lives_at_the_end_are_kept_in_two_games():
    kept = {game.name for game in GAMES if game.lives_kept_when_over}
    assert kept == {"Alien", "ChopperCommand"}
    rules = Rules([find("Alien"), find("Breakout")])
    state = rules.init(jnp.arange(2), jnp.zeros((2, 128), jnp.int32))
    state = state._replace(terminal=jnp.ones(2, jnp.int32), lives=jnp.full(2, 3))
    np.testing.assert_array_equal(rules.lives(jnp.arange(2), state), [3, 0])
    np.testing.assert_array_equal(rules.lives(jnp.arange(2), state._replace(terminal=jnp.zeros(2, jnp.int32))), 3)


def test_no_games_are_refused():
    with pytest.raises(ValueError, match=r"games=\(\) is empty; name at least one game"):
        Rules([])


class Tape(NamedTuple):
    """What ale-py did, a row a frame or a reset, [T, ...]; a poked frame leaves from the state that is kept.

    `begin`: the row is the RAM right after a reset. `keep`: remember the state before this row. `back`: go back to the
    state that was kept before judging this row.
    """

    ram: np.ndarray
    begin: np.ndarray
    keep: np.ndarray
    back: np.ndarray
    reward: np.ndarray
    lives: np.ndarray
    over: np.ndarray


def record(game: Game, ale: Any, num_rows: int, poke_every: int, seed: int) -> Tape:
    """Play held random actions, and now and then random bytes in the cells that the rule reads."""
    rng = random.Random(f"{game.name} {seed}")
    box = ale.of(game)
    drive = DRIVES.get(game.name, {})
    weights = [drive.get("weights", {}).get(str(action), 1) for action in game.minimal_actions]
    rules = (game.terminal, game.score, game.lives, game.reward, *(variable.next for variable in game.variables))
    cells = sorted({int(leaf[1:], 16) - 128 for leaf in leaves(rules) if isinstance(leaf, str) and leaf[0] == "@"})
    numbers = [leaf for leaf in leaves(rules) if isinstance(leaf, int) and 0 <= leaf < 256] or [0]
    rows: list[tuple[Any, ...]] = []

    def note(reward: int, **what: bool) -> None:
        flags = [what.get(name, False) for name in ("begin", "keep", "back")]
        rows.append((box.ram(), *flags, reward, box.ale.lives(), box.ale.game_over()))

    back, frame, action, opening = False, 0, 0, []
    while len(rows) < num_rows:
        if not rows or box.ale.game_over():
            box.ale.reset_game()
            note(0, begin=True)
            frame, opening = 0, [action for action, held in drive.get("opening", []) for _ in range(held)]
        if poke_every and frame % poke_every == poke_every - 1 and not back:
            saved = box.ale.cloneState()
            for poke in range(rng.choice((1, 2))):
                for cell in rng.sample(cells, min(len(cells), rng.choice((1, 2, 6)))):
                    box.ale.setRAM(cell, rng.choice(numbers) if rng.random() < 0.5 else rng.randrange(256))
                note(box.act(rng.choice(game.minimal_actions)), keep=poke == 0)
                if box.ale.game_over():
                    break
            box.ale.restoreState(saved)
            back = True
            continue
        if frame < len(opening):
            action = opening[frame]
        elif rng.random() < 1 / drive.get("hold", 4):
            (action,) = rng.choices(game.minimal_actions, weights)
        note(box.act(action), back=back)
        back, frame = False, frame + 1
    return Tape(*(np.array(column) for column in zip(*rows[:num_rows], strict=True)))


def judge(games: list[Game], tapes: list[Tape]) -> dict[str, int]:
    """Follow all tapes in one program; fail at any difference. Count what the tapes hold."""
    tape = Tape(*(np.stack(each, 1) for each in zip(*tapes, strict=True)))
    rules, which = Rules(games), jnp.arange(len(games), dtype=jnp.int32)
    blank = rules._blank(which, which.shape)
    choose = lambda mask, a, b: jax.tree.map(lambda x, y: jnp.where(mask, x, y), a, b)

    def step(carry: Any, row: Tape) -> Any:
        state, kept = carry
        state = choose(row.begin, blank, choose(row.back, kept, state))  # `init` is a frame from there.
        kept = choose(row.keep, state, kept)
        new, reward, lives, over = rules.frame(which, state, row.ram.astype(jnp.int32))
        return (new, kept), (jnp.where(row.begin, 0, reward), lives, over)

    @jax.jit
    def follow(tape: Tape) -> Any:
        return jax.lax.scan(step, (blank, blank), tape)[1]

    for name, ours, theirs in zip(("reward", "lives", "over"), follow(tape), tape[4:], strict=True):
        wrong = np.argwhere(np.asarray(ours) != theirs)
        said = [f"{games[g].name} row {t}: {name} {ours[t, g]}, ale-py {theirs[t, g]}" for t, g in wrong[:5]]
        assert not said, said
    return {"rewards": int((tape.reward != 0).sum()), "ends": int(tape.over.sum()), "pokes": int(tape.keep.sum())}


def test_against_ale_py(ale):
    names = "Alien Asteroids BeamRider Gopher Qbert Riverraid SpaceInvaders Surround Tennis WizardOfWor"
    games = [find(name) for name in names.split()]
    seen = judge(games, [record(game, ale, 250, 3, 0) for game in games])
    assert seen["rewards"] > 200 and seen["ends"] > 50 and seen["pokes"] > 400


@pytest.mark.slow
def test_all_games_against_ale_py(ale):
    seen = judge(list(GAMES), [record(game, ale, 4000, 8, 1) for game in GAMES])
    assert seen["rewards"] > 10_000 and seen["ends"] > 1_000 and seen["pokes"] > 20_000
