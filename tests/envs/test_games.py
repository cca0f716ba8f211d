"""Games of turns against slow obvious copies of their rules, by thousands of random plies."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import envs, testing
from podium.env import auto_reset

GAMES = ["podium/TicTacToe", "podium/ConnectFour", "podium/Kuhn", "podium/Leduc"]


class Board:
    """Stones on a board, checked square by square."""

    def __init__(self, rows, columns, length, falls):
        self.rows, self.columns, self.length, self.falls = rows, columns, length, falls
        self.stones, self.player = {}, 0

    def square(self, action):
        if not self.falls:
            return divmod(action, self.columns)
        free = [row for row in range(self.rows) if (row, action) not in self.stones]
        return (max(free), action) if free else None

    def legal(self):
        actions = range(self.columns if self.falls else self.rows * self.columns)
        squares = [self.square(a) for a in actions]
        return [square is not None and square not in self.stones for square in squares]

    def play(self, action):
        row, column = self.square(action)
        self.stones[row, column] = self.player
        won = any(
            all(self.stones.get((row + (i - k) * dy, column + (i - k) * dx)) == self.player for i in range(self.length))
            for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1))
            for k in range(self.length)
        )
        self.player = 1 - self.player
        return float(won), won or len(self.stones) == self.rows * self.columns

    def view(self):
        seen = np.zeros((self.rows, self.columns, 2))
        for (row, column), player in self.stones.items():
            seen[row, column, int(player != self.player)] = 1
        return seen


class Kuhn:
    """Kuhn poker by a table of how games end."""

    ENDS = {
        "pp": (1, None),
        "bb": (2, None),
        "pbb": (2, None),
        "bp": (1, 0),
        "pbp": (1, 1),
    }  # Stake; who wins by a fold.

    def __init__(self, state):
        self.cards, self.history, self.player = np.asarray(state.cards), "", 0

    def legal(self):
        return [True, True]

    def play(self, action):
        mover, self.history = self.player, self.history + "pb"[action]
        self.player = 1 - self.player
        if self.history not in self.ENDS:
            return 0.0, False
        stake, winner = self.ENDS[self.history]
        winner = int(self.cards[1] > self.cards[0]) if winner is None else winner
        return float(stake if winner == mover else -stake), True

    def view(self):
        seen = [float(self.cards[self.player] == card) for card in range(3)]
        for ply in range(3):
            done = self.history[ply : ply + 1]
            seen += [float(done == "p"), float(done == "b")]
        return np.array(seen)


class Leduc:
    """Leduc hold'em with a list of plies a round."""

    def __init__(self, state):
        self.cards, self.rounds, self.pot, self.player = np.asarray(state.cards) // 2, [[]], [1, 1], 0

    def legal(self):
        return [self.pot[self.player] < self.pot[1 - self.player], True, self.rounds[-1].count("raise") < 2]

    def play(self, action):
        mover, other = self.player, 1 - self.player
        self.rounds[-1].append(["fold", "call", "raise"][action])
        self.player = other
        if action == 0:
            return -float(self.pot[mover]), True
        self.pot[mover] = self.pot[other] + (action == 2) * (2 if len(self.rounds) == 1 else 4)
        if action == 2 or self.rounds[-1] == ["call"]:
            return 0.0, False
        if len(self.rounds) == 1:
            self.rounds.append([])
            self.player = 0
            return 0.0, False
        mine, theirs = (int(card) + 10 * (card == self.cards[2]) for card in (self.cards[mover], self.cards[other]))
        return float(self.pot[mover] * (int(mine > theirs) - int(mine < theirs))), True

    def view(self):
        seen = np.zeros(30)
        seen[self.cards[self.player]] = 1
        if len(self.rounds) == 2:
            seen[3 + self.cards[2]] = 1
        for number, plies in enumerate(self.rounds):
            for ply, done in enumerate(plies):
                seen[6 + 12 * number + 3 * ply + ["fold", "call", "raise"].index(done)] = 1
        return seen


SLOW = {
    "podium/TicTacToe": lambda state: Board(3, 3, 3, falls=False),
    "podium/ConnectFour": lambda state: Board(6, 7, 4, falls=True),
    "podium/Kuhn": Kuhn,
    "podium/Leduc": Leduc,
}


def play_randomly(env, num_envs, num_steps, seed=0):
    """Return states before, actions and TimeSteps [T, B, ...] of random legal play; ended games are played on."""

    def step(before, key):
        state, timestep = before
        keys = jax.random.split(key, num_envs)
        action = jax.random.categorical(key, jnp.where(timestep.obs.legal, 0.0, -jnp.inf))
        after = jax.vmap(env.step)(keys, state, action)
        return after, (state, action, after[1])

    @jax.jit
    def play(key):
        start_key, play_key = jax.random.split(key)
        start = jax.vmap(env.reset)(jax.random.split(start_key, num_envs))
        return start, jax.lax.scan(step, start, jax.random.split(play_key, num_steps))[1]

    return jax.tree.map(np.asarray, play(jax.random.key(seed)))


@pytest.mark.parametrize("name", GAMES)
def test_random_games_are_those_of_a_slow_copy(name):
    env = envs.make(name)
    num_envs = {"podium/TicTacToe": 256, "podium/ConnectFour": 128}.get(name, 512)
    (starts, first), (_, actions, timesteps) = play_randomly(env, num_envs, env.spec.max_episode_steps)
    plies = 0
    for i in range(num_envs):
        slow = SLOW[name](jax.tree.map(lambda x: x[i], starts))  # noqa: B023
        np.testing.assert_array_equal(first.obs.view[i], slow.view())
        np.testing.assert_array_equal(first.obs.legal[i], slow.legal())
        for t in range(env.spec.max_episode_steps):
            mover = slow.player
            reward, ended = slow.play(int(actions[t, i]))
            assert (timesteps.reward[t, i], timesteps.terminated[t, i]) == (reward, ended)
            assert not timesteps.truncated[t, i]
            plies += 1
            if ended:
                assert timesteps.obs.legal[t, i].all(), "at an end all are marked"
                break
            np.testing.assert_array_equal(timesteps.obs.view[t, i], slow.view())
            np.testing.assert_array_equal(timesteps.obs.legal[t, i], slow.legal())
            assert timesteps.obs.player[t, i] == slow.player
            assert timesteps.turn[t, i] == (1 if slow.player == mover else -1)
        else:
            raise AssertionError("a game did not end in its longest time")
    assert plies > 1000


@pytest.mark.parametrize(("name", "pgx_name"), [("TicTacToe", "tic_tac_toe"), ("ConnectFour", "connect_four")])
@pytest.mark.filterwarnings("ignore")
def test_random_games_are_those_of_pgx(name, pgx_name):
    pgx = pytest.importorskip("pgx", reason='pgx is in the extra: pip install "podium[pgx]"')
    env, other = envs.make(f"podium/{name}"), pgx.make(pgx_name)
    _, (_, actions, timesteps) = play_randomly(env, 64, env.spec.max_episode_steps, seed=1)
    state = jax.vmap(other.init)(jax.random.split(jax.random.key(0), 64))
    step, going = jax.jit(jax.vmap(other.step)), np.ones(64, bool)
    for t in range(env.spec.max_episode_steps):
        mover = np.asarray(state.current_player)
        state = step(state, actions[t])
        rewards = np.asarray(state.rewards)[np.arange(64), mover]
        np.testing.assert_array_equal(timesteps.reward[t][going], rewards[going])
        np.testing.assert_array_equal(timesteps.terminated[t][going], np.asarray(state.terminated)[going])
        going &= ~timesteps.terminated[t]
        np.testing.assert_array_equal(timesteps.obs.view[t][going], np.asarray(state.observation, float)[going])
        np.testing.assert_array_equal(timesteps.obs.legal[t][going], np.asarray(state.legal_action_mask)[going])


@pytest.mark.parametrize(
    ("name", "plies", "loss"),
    [
        ("podium/TicTacToe", [4, 4], -1),
        ("podium/ConnectFour", [3] * 7, -1),
        ("podium/Leduc", [0], -1),
        ("podium/Leduc", [2, 2, 2], -3),
    ],
)
def test_who_plays_what_is_illegal_loses_at_once(name, plies, loss):
    env = envs.make(name)
    state, timestep = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    for action in plies:
        assert not timestep.last
        before, (state, timestep) = state, step(jax.random.key(0), state, action)
    assert timestep.terminated and timestep.reward == loss
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, state)), "the position stays"


@pytest.mark.parametrize("name", GAMES)
def test_openings_are_random_numbers_of_legal_plies(name):
    most = {"podium/Kuhn": 1, "podium/Leduc": 3}.get(name, 5)
    env, plain = envs.make(name, openings=most), envs.make(name)
    starts, timesteps = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 512))
    assert not timesteps.last.any() and timesteps.obs.legal.any(-1).all()
    if name == "podium/ConnectFour" or name == "podium/TicTacToe":
        played = np.asarray(timesteps.obs.view).sum((1, 2, 3))
    else:
        played = np.asarray(starts.actions >= 0).reshape(512, -1).sum(1)
    counts = np.bincount(played.astype(int), minlength=most + 1)
    assert len(counts) == most + 1 and counts.min() > 0.6 * 512 / (most + 1)
    distinct = {tuple(x[i].tobytes() for x in map(np.asarray, jax.tree.leaves(starts))) for i in range(512)}
    assert len(distinct) > len(counts)
    state, timestep = jax.tree.map(lambda x: x[0], (starts, timesteps))
    assert env.spec.sha256() == plain.spec.sha256()
    again = plain.step(jax.random.key(0), state, int(np.argmax(timestep.obs.legal)))
    assert again[1].turn in (-1, 1)


def test_an_opening_never_ends_a_game():
    env = envs.make("podium/TicTacToe", openings=8)
    _, timesteps = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), 2048))
    view = np.asarray(timesteps.obs.view).reshape(2048, 9, 2)
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
    assert not any(view[:, line, player].all(1).any() for line, player in itertools.product(lines, range(2)))
    np.testing.assert_array_equal(np.asarray(timesteps.obs.legal), view.sum(-1) == 0)
    assert timesteps.obs.legal.any(-1).all()


@pytest.mark.parametrize("name", GAMES)
def test_a_planner_goes_on_from_the_rules_that_it_sees(name):
    env, plain = envs.make(name, rules=True), envs.make(name)
    assert plain.reset(jax.random.key(0))[1].obs.rules == ()
    state, timestep = env.reset(jax.random.key(3))
    seen, going = jax.jit(plain.step)(jax.random.key(0), timestep.obs.rules, 1), env.step(jax.random.key(1), state, 1)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), seen[0], going[0]))
    assert seen[1].reward == going[1].reward and env.spec.sha256() != plain.spec.sha256()


@pytest.mark.parametrize("name", ["podium/ConnectFour", "podium/Leduc"])
def test_the_contract_with_openings_and_rules(name):
    testing.check_env(auto_reset(envs.make(name, openings=2, rules=True)), num_steps=60)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "podium/TicTacToe",
            {"openings": 9},
            "openings=9 must be an integer, 0 to 8: .* 9 plies; 2 is usual",
        ),
        ("podium/ConnectFour", {"openings": -1}, "openings=-1 must be an integer, 0 to 41"),
        ("podium/Kuhn", {"openings": True}, "openings=True must be"),
        ("podium/Leduc", {"rules": 1}, "rules=1 must be True or False"),
        ("podium/Leduc", {"opening": 1}, "Did you mean 'openings'"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name, **options)


@pytest.mark.parametrize("name", GAMES)
def test_pictures_follow_the_game(name):
    env = envs.make(name)
    state, timestep = env.reset(jax.random.key(0))
    before = env.render(state)
    state, _ = env.step(jax.random.key(0), state, 2 if name == "podium/Leduc" else 1)
    after = env.render(state)
    assert before.dtype == np.uint8 and before.shape == after.shape and (before != after).any()


@pytest.mark.parametrize(("name", "rules"), [("TicTacToe", False), ("ConnectFour", True)])
@pytest.mark.filterwarnings("ignore")
def test_games_of_pgx_are_the_native_ones(name, rules):
    """The same plies from the same start, whoever Pgx lets begin; also on from the rules that are seen."""
    pytest.importorskip("pgx", reason='pgx is in the extra: pip install "podium[pgx]"')
    short = {"TicTacToe": "tic_tac_toe", "ConnectFour": "connect_four"}[name]
    env, other = envs.make(f"podium/{name}"), envs.make(f"pgx/{short}", rules=rules)
    _, (_, actions, timesteps) = play_randomly(env, 64, env.spec.max_episode_steps, seed=1)
    state, timestep = jax.jit(jax.vmap(other.reset))(jax.random.split(jax.random.key(0), 64))
    began = state.first
    assert 10 < int(began.sum()) < 54 and not timestep.obs.player.any()
    step, going = jax.jit(jax.vmap(other.step)), np.ones(64, bool)
    for t in range(env.spec.max_episode_steps):
        if rules:
            state = timestep.obs.rules
        state, timestep = step(jax.random.split(jax.random.key(0), 64), state, actions[t])
        for field in ("reward", "terminated", "turn"):
            found, expected = np.asarray(getattr(timestep, field)), np.asarray(getattr(timesteps, field))[t]
            np.testing.assert_array_equal(found[going], expected[going])
        going &= ~timesteps.terminated[t]
        for field in ("view", "legal", "player"):
            expected = np.asarray(getattr(timesteps.obs, field))[t]
            np.testing.assert_array_equal(np.asarray(getattr(timestep.obs, field))[going], expected[going])
    assert state.game.observation.size == 0  # The state is small: what is seen is made of it.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tic_tac_toe", "connect_four", "othello", "go_9x9", "hex", "animal_shogi", "gardner_chess"]
)
@pytest.mark.filterwarnings("ignore")
def test_games_of_pgx_keep_the_contract_and_end_in_time(name):
    pytest.importorskip("pgx", reason='pgx is in the extra: pip install "podium[pgx]"')
    env = envs.make(f"pgx/{name}", openings=4, rules=True)
    testing.check_env(env)
    _, (_, _, timesteps) = play_randomly(env, 8, env.spec.max_episode_steps + 4, seed=0)
    assert timesteps.terminated[: env.spec.max_episode_steps].any(0).all()
    assert np.isin(timesteps.reward, (-1, 0, 1)).all()


def test_a_game_of_pgx_takes_no_options_of_one_player():
    pytest.importorskip("pgx", reason='pgx is in the extra: pip install "podium[pgx]"')
    with pytest.raises(ValueError, match="openings and rules alone"):
        envs.make("pgx/othello", action_repeat=2)
