"""Judges of games against what is known: who wins, what is worth what, and sentences for what cannot be judged."""

from __future__ import annotations

import functools
import io
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence

from everywhere import stacked_game
from podium import envs, games, testing
from podium.agent import ActOutput, Agent
from podium.env import auto_reset
from podium.envs.wrappers import scale_reward, time_limit, truncate_nonfinite
from podium.episodes import gained
from podium.evaluate import Policy, evaluate

TIC_TAC_TOE = envs.make("podium/TicTacToe")
CONNECT_FOUR = envs.make("podium/ConnectFour", openings=4)
KUHN = envs.make("podium/Kuhn")
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@functools.cache
def worth(mine, theirs):
    """Return what perfect play of tic-tac-toe gains who is to move, and by which square."""
    if any(set(line) <= theirs for line in LINES):
        return -1, None
    free = [square for square in range(9) if square not in mine | theirs]
    return max(((-worth(theirs, mine | {square})[0], square) for square in free), default=(0, None))


def perfect(keys, carry, obs, first):
    rows = np.asarray(obs.view).reshape(-1, 9, 2)
    stones = [[frozenset(np.flatnonzero(row[:, i]).tolist()) for i in range(2)] for row in rows]
    squares = [worth(*each)[1] if not any(set(line) <= each[1] for line in LINES) else 0 for each in stones]
    return np.array([square or 0 for square in squares]), carry


PERFECT = games.Player(perfect, on_host=True)


def first_legal(obs):
    return jnp.argmax(obs.legal, -1)


def test_perfect_players_of_tic_tac_toe_always_draw():
    assert games.match(TIC_TAC_TOE, PERFECT, PERFECT, games=2) == (0, 2, 0)


def test_perfect_play_loses_no_line_and_poor_play_some():
    lines = games.every_line(TIC_TAC_TOE, PERFECT)
    assert lines.lost == 0 and lines.first.won > 0 and lines.second.won > 0
    assert games.lines_lost(TIC_TAC_TOE, first_legal) > 0


def test_a_game_is_shown_from_its_start_to_its_end():
    """Both take the first free square, so who began wins with the seventh: 0, 2, 4, 6 hold a diagonal."""
    frames = [frame.copy() for frame in ImageSequence.Iterator(Image.open(io.BytesIO(
        games.film(TIC_TAC_TOE, first_legal, first_legal))))]  # fmt: skip
    assert len(frames) == 8 and frames[-1].info["duration"] == 1000
    shown = [np.asarray(frame.convert("RGB")).astype(int) for frame in frames]
    middles = lambda picture: picture.reshape(3, 24, 3, 24, 3)[:, 12, :, 12].reshape(9, 3)
    stones = [[{True: "o", False: "x"}[bool(r > b)] if r < 240 else "." for r, g, b in middles(x)] for x in shown]
    assert "".join(stones[0]) == "." * 9 and "".join(stones[-1]) == "oxoxoxo.."


def test_an_illegal_move_loses_its_line():
    """Who always plays the centre wins nothing: first, all 8 replies lose; second, all 9 first moves."""
    centre = lambda obs: jnp.full(len(obs.player), 4)
    assert games.every_line(TIC_TAC_TOE, centre) == ((0, 0, 8), (0, 0, 1 + 8 * 7))


def test_a_match_is_told_from_the_first_view_and_played_in_both_seats():
    there = games.match(TIC_TAC_TOE, PERFECT, games.uniform, games=40, seed=3)
    assert sum(there) == 40 and there.won > 20 and there.lost == 0
    last_legal = lambda obs: 8 - jnp.argmax(obs.legal[:, ::-1], -1)
    assert games.match(TIC_TAC_TOE, first_legal, first_legal, games=4) == (2, 0, 2), "who begins wins 0, 2, 4, 6"
    one = games.match(TIC_TAC_TOE, first_legal, last_legal, games=2)
    assert one == games.match(TIC_TAC_TOE, last_legal, first_legal, games=2)[::-1]


def test_memory_is_a_players_own():
    """A player that counts its own moves has made 5 or 4 of a full board's 9."""
    counted = []

    def act(keys, carry, obs, first):
        assert np.array_equal(np.asarray(carry) == 0, np.asarray(first))
        counted.append(int(np.asarray(carry).max()))
        return perfect(keys, (), obs, first)[0], carry + 1

    counts = games.Player(act, lambda number: jnp.zeros(number, jnp.int32), on_host=True)
    assert games.match(TIC_TAC_TOE, counts, PERFECT, games=2).drawn == 2
    assert max(counted) == 4


def test_versus_is_an_environment_whose_return_is_the_outcome():
    env = games.versus(KUHN, games.uniform)
    testing.check_env(env, num_steps=20)
    always_bet = lambda obs: jnp.ones(len(obs.player), jnp.int32)
    env = games.versus(KUHN, always_bet)

    def play(key):
        state, timestep = env.reset(key)
        seen = timestep.obs
        _, timestep = env.step(key, state, 0)
        return seen, timestep.reward, timestep.terminated, state.seat, state.env.cards

    seen, reward, ended, seat, cards = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 256))
    assert (seen.player == seat).all() and 80 < seat.sum() < 176
    np.testing.assert_array_equal(ended, seat == 1)  # Second, a pass to the bet folds; first, the other bets.
    np.testing.assert_array_equal(reward, np.where(seat == 1, -1.0, 0.0))
    held = np.asarray(cards)[np.arange(256), np.asarray(seat)]
    np.testing.assert_array_equal(np.asarray(seen.view)[:, :3].argmax(-1), held)


def play_versus(env, number=128):
    """Play the last legal move; return the last step of each game, and what was paid and counted in all of it."""

    def play(key):
        state, timestep = env.reset(key)

        def step(before, key):
            state, timestep, paid, counted = before
            after, new = env.step(key, state, 8 - jnp.argmax(timestep.obs.legal[::-1]))
            total = paid + new.reward, counted + gained(new)[0]
            keep = lambda old, new: jnp.where(timestep.last, old, new)
            return jax.tree.map(keep, before, (after, new, *total)), None

        keys = jax.random.split(jax.random.fold_in(key, 1), 9)
        _, reached = env.step(keys[0], state, 8 - jnp.argmax(timestep.obs.legal[::-1]))
        zero = jnp.zeros(())
        start = state, timestep._replace(info=jax.tree.map(jnp.zeros_like, reached.info)), zero, zero
        return jax.lax.scan(step, start, keys)[0]

    return jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), number))


def test_versus_counts_what_was_paid_whatever_the_game_is_wrapped_in():
    _, _, paid, counted = play_versus(games.versus(TIC_TAC_TOE, games.uniform))
    _, _, doubled, counted_inside = play_versus(games.versus(scale_reward(TIC_TAC_TOE, 2.0), games.uniform))
    assert set(np.asarray(paid).tolist()) == {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(counted, paid)
    np.testing.assert_array_equal(counted_inside, paid)
    np.testing.assert_array_equal(doubled, 2 * paid)


def test_a_game_that_versus_cuts_is_seen_by_who_learns():
    """Five plies: cut at one's own or at the other's, what values are bootstrapped from is one's own view."""
    env = games.versus(time_limit(TIC_TAC_TOE, 5), games.uniform)
    testing.check_env(env, num_steps=20)
    state, last, _, _ = play_versus(env)
    cut = np.asarray(last.truncated & ~last.terminated)
    assert cut.sum() > 30 and set(np.asarray(state.seat)[cut].tolist()) == {0, 1}
    np.testing.assert_array_equal(np.asarray(last.next_obs.player)[cut], np.asarray(state.seat)[cut])


def test_versus_ends_where_the_game_stands_still():
    """A simulator that lost its numbers shows the same again and again, and never the player's turn."""

    def step(key, state, action):
        state, timestep = TIC_TAC_TOE.step(key, state, action)
        lost = jnp.sum(timestep.next_obs.view) >= 2
        return state, timestep._replace(reward=jnp.where(lost, jnp.nan, timestep.reward))

    env = games.versus(truncate_nonfinite(TIC_TAC_TOE._replace(step=step)), games.uniform)
    _, last, paid, _ = play_versus(env, 32)
    assert last.truncated.all() and last.info["nonfinite"].all() and not last.terminated.any() and not paid.any()


def test_versus_promises_no_stacks_of_frames():
    """A step is two plies, and brings two frames; rollouts of stacks that are none have rewards of NaN."""
    env = games.versus(stacked_game(8), first_legal)
    assert env.spec.obs.view.num_frames == 1
    testing.check_env(env, num_steps=20)


def test_versus_never_begins_with_a_game_that_is_over():
    env = games.versus(envs.make("podium/TicTacToe", openings=8), games.uniform)
    state, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 512))
    assert not timestep.last.any() and timestep.turn is None
    assert (timestep.obs.player == state.seat).all()
    assert (np.asarray(timestep.obs.view).sum((1, 2, 3)) < 9).all()


@pytest.mark.parametrize(("name", "known"), [("podium/Kuhn", 11 / 24), ("podium/Leduc", 2.373611)])
def test_what_uniform_play_can_be_exploited_for(name, known):
    assert games.exploitability(envs.make(name), games.uniform_probabilities) == pytest.approx(known, abs=1e-6)


def kuhn_equilibrium(obs, alpha=0.2):
    """One of Kuhn's equilibria: bet the king three times as often as the jack; bluff and call a third."""
    view = np.asarray(obs.view)
    card, plies = view[:, :3].argmax(-1), view[:, 3:].reshape(-1, 3, 2)
    begun, bet, again = plies[:, 0].any(-1), plies[:, 0, 1] > 0, plies[:, 1].any(-1)
    first = np.choose(card, [alpha, 0, 3 * alpha])
    second = np.where(bet, np.choose(card, [0, 1 / 3, 1]), np.choose(card, [1 / 3, 0, 1]))
    third = np.choose(card, [0, alpha + 1 / 3, 1])
    p = np.where(again, third, np.where(begun, second, first))
    return np.stack([1 - p, p], -1)


def test_kuhns_equilibria_cannot_be_exploited():
    env = KUHN
    assert games.exploitability(env, kuhn_equilibrium) == pytest.approx(0, abs=1e-12)
    assert games.value(env, kuhn_equilibrium) == pytest.approx(-1 / 18, abs=1e-12)


@pytest.mark.parametrize(("name", "known_as"), [("podium/Kuhn", "kuhn_poker"), ("podium/Leduc", "leduc_poker")])
@pytest.mark.filterwarnings("ignore")
def test_exploitability_is_that_of_open_spiel(name, known_as):
    """Of a policy that depends on all that is seen: its digits, as weights of the actions."""
    pyspiel = pytest.importorskip("pyspiel", reason="open_spiel is an oracle for tests: pip install open_spiel")

    def weights(card, plies, shown):
        """Return weights of a hash of what is seen, the same for both libraries."""
        digits = [card + 1, shown + 1, *(7 * (3 * r + a + 1) * (i + 1) for i, (r, a) in enumerate(plies))]
        base = sum(d * (5 * i + 3) for i, d in enumerate(digits))
        return np.array([1 + (base * k) % 7 for k in (1, 3, 5)], float)

    def ours(obs):
        view, legal = np.asarray(obs.view), np.asarray(obs.legal)
        out = np.zeros(legal.shape)
        for i, row in enumerate(view):
            card = int(row[:3].argmax())
            if name == "podium/Kuhn":
                shown, rounds = -1, row[3:].reshape(1, 3, 2)
            else:
                shown, rounds = (int(row[3:6].argmax()) if row[3:6].any() else -1), row[6:].reshape(2, 4, 3)
            plies = [(r, int(ply.argmax())) for r, each in enumerate(rounds) for ply in each if ply.any()]
            out[i] = weights(card, plies, shown)[: legal.shape[1]] * legal[i]
        return out / out.sum(-1, keepdims=True)

    game = pyspiel.load_game(known_as)
    policy = {}

    def walk(state, cards, plies):
        if state.is_terminal():
            return
        if state.is_chance_node():
            for card, _ in state.chance_outcomes():
                child = state.clone()
                child.apply_action(card)
                walk(child, [*cards, card], plies)
            return
        ranks = [card if name == "podium/Kuhn" else card // 2 for card in cards]
        shown = ranks[2] if len(ranks) > 2 else -1
        legal = state.legal_actions()
        found = weights(ranks[state.current_player()], plies, shown)[legal]
        policy[state.information_state_string()] = list(zip(legal, found / found.sum(), strict=True))
        for action in legal:
            child = state.clone()
            child.apply_action(action)
            walk(child, cards, [*plies, (max(len(cards) - 2, 0), action)])

    walk(game.new_initial_state(), [], [])
    oracle = pyspiel.exploitability(game, policy)
    assert games.exploitability(envs.make(name), ours) == pytest.approx(oracle, abs=1e-9)


def network(game, logits_of):
    """Return a `podium.Policy` of a game that acts by the logits of what it sees, as trained ones do."""

    def act(keys, params, carry, obs, first, greedy):
        logits = jnp.where(obs.legal, logits_of(obs.view), -1e9)
        action = logits.argmax(-1) if greedy else jax.vmap(jax.random.categorical)(keys, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        return ActOutput(action.astype(jnp.int32), carry, Extras(log_prob))

    nothing = lambda *_: None
    agent = Agent(nothing, nothing, lambda spec, number: (), act, nothing, nothing, nothing, nothing)
    return Policy(agent, (), game.spec)


class Extras(NamedTuple):
    """What acting leaves behind."""

    log_prob: jax.Array


def test_trained_policies_are_taken_as_they_are():
    logits_of = lambda view: jnp.stack([view[:, 0] - view[:, 4], 1.5 * view[:, 2]], -1)
    policy = network(KUHN, logits_of)

    def exact(obs):
        return jax.nn.softmax(logits_of(obs.view))

    assert games.exploitability(KUHN, policy) == pytest.approx(games.exploitability(KUHN, exact), abs=1e-5)
    centre_first = network(TIC_TAC_TOE, lambda view: -jnp.abs(jnp.arange(9.0) - 4)[None] + 0 * view[:, :1, 0, 0])
    assert games.every_line(TIC_TAC_TOE, centre_first).first.won > 0
    assert sum(games.match(TIC_TAC_TOE, centre_first, games.uniform, games=10)) == 10
    against = games.versus(TIC_TAC_TOE, centre_first)
    outcome = evaluate(centre_first, against, num_episodes=32)
    assert -1 <= outcome["eval_return"] <= 1 and outcome["eval_unfinished"] == 0


def test_elo_finds_the_ratings_that_made_the_table():
    truth = np.array([0.0, 150.0, 400.0])
    expected = 1 / (1 + 10 ** ((truth - truth[:, None]) / 400))
    table = np.zeros((3, 3, 3))
    table[..., 0], table[..., 2] = 1e6 * expected, 1e6 * expected.T
    table[np.arange(3), np.arange(3)] = 0
    np.testing.assert_allclose(games.elo(table, anchor=0), truth, atol=0.1)
    np.testing.assert_allclose(games.elo(table), truth - truth.mean(), atol=0.1)


def test_a_round_robin_rates_who_looks_ahead_above_who_does_not():
    table = games.round_robin(TIC_TAC_TOE, [games.uniform, PERFECT], games=20)
    assert table.shape == (2, 2, 3) and (table[0, 1] == table[1, 0][::-1]).all() and table.sum() == 40
    ratings = games.elo(table, anchor=0)
    assert ratings[0] == 0 and ratings[1] > 100


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda: games.match(envs.make("podium/Catch"), first_legal, first_legal), "env=podium/Catch is none"),
        (lambda: games.match(TIC_TAC_TOE, first_legal, first_legal, games=3), "games=3 is odd.*; use 4"),
        (lambda: games.match(TIC_TAC_TOE, first_legal, first_legal, seed=2**32), "seed=4294967296 must"),
        (lambda: games.match(TIC_TAC_TOE, first_legal, 5), "policy=5 cannot play"),
        (lambda: games.match(TIC_TAC_TOE, lambda a, b, c: a, first_legal), "takes 3 arguments"),
        (lambda: games.match(auto_reset(TIC_TAC_TOE), first_legal, first_legal), "leave out auto_reset"),
        (
            lambda: games.match(TIC_TAC_TOE, games.alpha_beta(2), first_legal),
            r"alpha_beta\(2\) plays Connect Four only",
        ),
        (lambda: games.alpha_beta(0), "depth=0 must be a positive integer"),
        (lambda: games.versus(CONNECT_FOUR, games.alpha_beta(2)), "plays on the host; use match"),
        (lambda: games.every_line(KUHN, first_legal), "begins in 6; make it without openings"),
        (
            lambda: games.exploitability(envs.make("podium/Kuhn", openings=1), kuhn_equilibrium),
            "make it without openings",
        ),
        (lambda: games.exploitability(KUHN, first_legal), "needs probabilities"),
        (
            lambda: games.exploitability(KUHN, lambda obs: jnp.ones((len(obs.view), 2))),
            "add up to 1",
        ),
        (lambda: games.positions(CONNECT_FOUR, 2, stones=3), "stones=3 must be an integer, 14 to 36"),
        (lambda: games.positions(CONNECT_FOUR, 2), "make it with openings=0"),
        (lambda: games.round_robin(TIC_TAC_TOE, [first_legal]), "got 1 policies"),
        (lambda: games.elo(np.zeros((2, 3, 3))), "must be"),
        (lambda: games.elo(np.zeros((2, 2, 3))), "met nobody"),
        (lambda: games.elo(np.ones((2, 2, 3)), prior=0), "prior=0"),
        (lambda: games.elo(np.ones((2, 2, 3)), anchor=2), "anchor=2 is none of 2"),
    ],
)
def test_what_cannot_be_judged_is_refused(judge, message):
    with pytest.raises(ValueError, match=message):
        judge()
