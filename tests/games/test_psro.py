"""Mixtures of policies, and best responses to them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from podium import envs, games
from podium.agents import ppo
from podium.games import exploitability, value

KUHN = envs.make("podium/Kuhn")


def infosets() -> list[tuple[int, int, tuple[int, ...]]]:
    """All (player, card, plies so far) of Kuhn poker."""
    return [
        (player, card, plies) for player, all_plies in ((0, ((), (0, 1))), (1, ((0,), (1,))))
        for card in range(3) for plies in all_plies
    ]  # fmt: skip


def key_of(player: int, view: np.ndarray) -> tuple[int, int, tuple[int, ...]]:
    plies = view[3:].reshape(3, 2)
    return int(player), int(view[:3].argmax()), tuple(int(ply.argmax()) for ply in plies if ply.any())


def by_table(table: dict[Any, float]) -> Any:
    """A policy that bets with the probability of its infoset; one half where the table says nothing."""

    def of(obs: Any) -> np.ndarray:
        pairs = zip(np.asarray(obs.player), np.asarray(obs.view), strict=True)
        bets = np.array([table.get(key_of(*pair), 0.5) for pair in pairs])
        return np.stack([1 - bets, bets], -1)

    return of


def random_policy(seed: int, pure: bool = False) -> dict[Any, float]:
    rng = np.random.default_rng(seed)
    return {key: float(rng.integers(2) if pure else rng.random()) for key in infosets()}


def worth(first: dict[Any, float], second: dict[Any, float]) -> float:
    """Return what player 0 gains, by walking every deal and line."""

    def walk(cards: tuple[int, int], plies: tuple[int, ...]) -> float:
        if plies in ((0, 0), (1, 1), (0, 1, 1)):
            return (1 if cards[0] > cards[1] else -1) * (1 if plies == (0, 0) else 2)
        if plies in ((1, 0), (0, 1, 0)):
            return 1 if plies == (1, 0) else -1
        player = len(plies) % 2
        bet = (first, second)[player][(player, cards[player], plies)]
        return (1 - bet) * walk(cards, (*plies, 0)) + bet * walk(cards, (*plies, 1))

    return float(np.mean([walk(cards, ()) for cards in itertools.permutations(range(3), 2)]))


@pytest.mark.parametrize("pure", [False, True])
def test_an_average_is_worth_what_the_mixture_is(pure: bool) -> None:
    """Against any opponent the one policy gains what is gained on average by drawing one of them a game."""
    tables = [random_policy(seed, pure) for seed in range(4)]
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.25, 0.25]])
    average = games.average(KUHN, [by_table(table) for table in tables], weights)

    class Asked(dict):
        def __missing__(self, key: Any) -> float:
            player, card, plies = key
            view = np.zeros((1, 9), np.float32)
            view[0, card] = 1
            for i, ply in enumerate(plies):
                view[0, 3 + 2 * i + ply] = 1
            obs = KUHN.spec.obs._replace(view=view, legal=np.ones((1, 2), bool), player=np.array([player]), rules=())
            return float(average(obs)[0, 1])

    for seed in range(10, 14):
        other = random_policy(seed)
        expected = weights[0] @ [worth(table, other) for table in tables]
        assert worth(Asked(), other) == pytest.approx(expected, abs=1e-6)
        expected = weights[1] @ [worth(other, table) for table in tables]
        assert worth(other, Asked()) == pytest.approx(expected, abs=1e-6)
    together = weights[0] @ [[worth(a, b) for b in tables] for a in tables] @ weights[1]
    assert value(KUHN, average) == pytest.approx(together, abs=1e-6)


def test_one_policy_is_its_own_average() -> None:
    policy = by_table(random_policy(0))
    found = exploitability(KUHN, games.average(KUHN, [policy, policy], [0.3, 0.7]))
    assert found == pytest.approx(exploitability(KUHN, policy), abs=1e-6)


def test_nash_of_a_matrix_is_an_equilibrium() -> None:
    payoffs = np.random.default_rng(0).normal(size=(5, 5))
    first, second = games.nash(payoffs)
    worth_of = first @ payoffs @ second
    assert (first @ payoffs).min() == pytest.approx(worth_of) and (payoffs @ second).max() == pytest.approx(worth_of)
    np.testing.assert_allclose(games.nash(np.array([[2.0, -1.0], [-1.0, 1.0]])), [[0.4, 0.6]] * 2, atol=1e-9)


def agent(**more: Any) -> Any:
    config = {"learning_rate": 3e-3, "hidden_sizes": (64,), "entropy_coef": 0.1, "gamma": 1.0, **more}
    return ppo.make(ppo.Config(**config))


def test_it_runs_in_small_and_counts_right() -> None:
    sizes: dict[str, Any] = {"num_envs": 16, "rollout_length": 16, "groups": 4}
    seen: list[float] = []
    found = games.psro(KUHN, agent(), 2, 512, **sizes, progress=lambda number, gain: seen.append(gain))
    assert len(found.policies) == 3 and found.payoffs.shape == (3, 3) and found.exploitability == seen
    assert found.policy is not None
    assert exploitability(KUHN, found.policy) == pytest.approx(found.exploitability[-1])
    np.testing.assert_allclose(found.weights.sum(-1), 1)
    again = games.psro(KUHN, agent(), 2, 512, **sizes)
    np.testing.assert_array_equal(found.payoffs, again.payoffs)


class Killed(Exception):
    """Ends a run where a kill would."""


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Kuhn", "ConnectFour"])
def test_a_resumed_run_is_the_same(game: str, tmp_path: Path) -> None:
    env = KUHN if game == "Kuhn" else envs.make("podium/ConnectFour", openings=8)
    sizes: dict[str, Any] = {"num_envs": 16, "rollout_length": 64, "groups": 4, "games": 20}
    whole = games.psro(env, agent(), 3, 1024, **sizes)

    def killing(number: int, gain: float) -> None:
        if number == 2:
            raise Killed

    run_dir = tmp_path / "run"
    with pytest.raises(Killed):
        games.psro(env, agent(), 3, 1024, **sizes, run_dir=run_dir, progress=killing)
    with pytest.raises(ValueError, match="run_dir"):
        games.psro(env, agent(), 3, 1024, **sizes, run_dir=run_dir)
    with pytest.raises(ValueError, match="agent.config.learning_rate was 0.003 and is 0.01"):
        games.psro(env, agent(learning_rate=1e-2), 3, 1024, **sizes, run_dir=run_dir, resume=True)
    with pytest.raises(ValueError, match="num_steps was 1024 and is 2048; seed was 0 and is 1"):
        games.psro(env, agent(), 3, 2048, **sizes, seed=1, run_dir=run_dir, resume=True)
    resumed = games.psro(env, agent(), 3, 1024, **sizes, run_dir=run_dir, resume=True)
    np.testing.assert_array_equal(resumed.payoffs, whole.payoffs)
    np.testing.assert_array_equal(resumed.exploitability, whole.exploitability)
    for one, other in zip(resumed.policies, whole.policies, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    finished = games.psro(env, agent(), 3, 1024, **sizes, run_dir=run_dir, resume=True)
    np.testing.assert_array_equal(finished.payoffs, whole.payoffs)


@pytest.mark.slow
def test_a_larger_game_is_paid_by_matches() -> None:
    env = envs.make("podium/ConnectFour", openings=8)
    found = games.psro(env, agent(), 1, 2048, num_envs=16, rollout_length=64, groups=4, games=20)
    assert found.policy is None and np.isnan(found.exploitability).all()
    np.testing.assert_allclose(found.payoffs, -found.payoffs.T)


@pytest.mark.slow
def test_it_solves_kuhn_poker() -> None:
    found = games.psro(KUHN, agent(anneal_steps=100_000), iterations=12, num_steps=200_000)
    assert found.exploitability[0] > 0.2 and found.exploitability[-1] <= 0.01


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: games.psro(envs.make("podium/Catch"), agent()), "psro needs a game of two players in turn"),
        (lambda: games.psro(KUHN, agent(), iterations=0), "iterations=0"),
        (lambda: games.psro(KUHN, agent(), resume=True), "resume=True needs run_dir"),
        (lambda: games.psro(KUHN, agent(), resume="x"), "resume='x' must be True or False"),
        (lambda: games.psro(KUHN, agent(), num_envs=48), "num_envs=48 is not divisible by 2 . groups=32"),
        (lambda: games.psro(KUHN, agent(), rollout_length=3), "rollout_length=3: .* use 6 or more"),
        (lambda: games.psro(KUHN, agent(), games=201), "games=201 is odd.*; use 202"),
        (lambda: games.psro(KUHN, agent(), seed=-1), "seed=-1 must be an integer from 0"),
        (lambda: games.psro(KUHN, agent(memory="gru")), "has one; use memory='none'"),
        (lambda: games.average(KUHN, [by_table({})], [0.5]), "adding up to 1"),
        (lambda: games.average(KUHN, [by_table({})], [0.5, 0.5]), r"weights must be \[1\]"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
