"""Evaluation: whole episodes, once each, bounded, on keys of its own; policies act alone and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs
from podium.agent import ActOutput
from podium.agents import ppo
from podium.checkpoint import Checkpoints
from podium.commands import replay
from podium.env import Env, restart, transition
from podium.envs.wrappers import random_first_length
from podium.evaluate import Policy, make_evaluator, make_host_evaluator
from podium.host import on_host
from podium.schedule import EvaluationPlan, Schedule, cut_in_words, make_schedule
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

AGENT = ppo.make(ppo.Config(hidden_sizes=(8,)))


def always(action: int) -> Any:
    """Return an agent that does one thing, whatever it sees."""

    def act(keys: Any, params: Any, carry: Any, obs: Any, first: Any, greedy: bool) -> ActOutput:
        return ActOutput(jnp.full(first.shape, action, jnp.int32), carry)

    return AGENT._replace(act=act)


def play(agent: Any, env: Env, episodes: int = 16, **options: Any) -> dict[str, float]:
    function = jax.jit(make_evaluator(agent, env, episodes, **options))
    return {name: float(value) for name, value in function(jax.random.key(0), ()).items()}


def test_the_return_of_a_known_policy() -> None:
    """To the right through 6 cells: 5 steps and a reward of 1; to the left for ever: 30 steps and nothing."""
    env = envs.make("podium/Corridor", length=6, max_steps=30)
    right, left = play(always(1), env), play(always(0), env)
    assert (right["eval_return"], right["eval_length"], right["eval_unfinished"]) == (1, 5, 0)
    assert (left["eval_return"], left["eval_length"], left["eval_unfinished"]) == (0, 30, 0)


def test_evaluations_play_whole_episodes_where_training_cuts_the_first() -> None:
    """On the host as in a compiled program."""
    env = random_first_length(envs.make("podium/Corridor", length=6, max_steps=30))
    policy = podium.Policy(always(0), (), env.spec)
    for where in (env, on_host(env)):
        assert podium.evaluate(policy, where, 8)["eval_length"] == 30


def test_replayed_returns_are_those_of_an_evaluation() -> None:
    """Of two who take turns that of who moved first, who wins where the other's move is illegal; of a team the mean."""
    game = envs.make("podium/TicTacToe")
    (episode,) = replay.play(podium.Policy(always(0), (), game.spec), game, 1)
    assert (episode.episode_return, episode.length, episode.ending) == (1.0, 2, "terminated")

    spec = EnvSpec("team", ArraySpec((2, 1)), DiscreteSpec(2, shape=(2,)), 3, num_agents=2)
    step = lambda key, t, action: (t + 1, transition(jnp.zeros((2, 1)), [1.0, 2.0], t == 2))
    team = Env(spec, lambda key: (jnp.int32(0), restart(jnp.zeros((2, 1)))), step)
    (episode,) = replay.play(podium.Policy(always(0), (), spec), team, 1)
    assert (episode.episode_return, episode.length) == (4.5, 3)


def test_what_is_no_policy_and_where_it_cannot_act_are_refused() -> None:
    env = envs.make("podium/Corridor", length=6, max_steps=30)
    policy = podium.Policy(always(0), (), env.spec)
    no_policy: Any
    for no_policy in (always(0), None):
        with pytest.raises(ValueError, match=r"policy=.* is no Policy; give what podium\.load returns"):
            podium.evaluate(no_policy, env, 4)
    elsewhere: Any
    for elsewhere, words in (
        ("podium/Corridor", r"make one by podium\.envs\.make\('podium/Corridor'\)"),
        (
            envs.make("podium/Corridor", length=7),
            r"observations of another form: float32\[7\] in place of float32\[6\]",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            podium.evaluate(policy, elsewhere, 4)
    changes: Any
    for changes, words in (
        ({"seed": -1}, r"seed=-1 must be an integer from 0 to 2\*\*32 - 1"),
        ({"seed": 2**32}, "seed=4294967296 must be an integer"),  # JAX would take it for 0.
        ({"max_steps": 0}, "max_steps=0 must be a positive integer"),
        ({"max_steps": 2**31}, r"max_steps=2147483648 is more than can be counted; use at most 2\*\*31 - 1"),
        ({"num_episodes": 2**31}, "num_episodes=2147483648 is more than can be counted"),
        ({"greedy": "no"}, "greedy='no' must be True or False"),
    ):
        with pytest.raises(ValueError, match=words):
            podium.evaluate(policy, env, **{"num_episodes": 4, **changes})
    assert podium.evaluate(policy, envs.make("podium/Corridor", length=6, max_steps=9), 4)["eval_length"] == 9


@pytest.mark.parametrize("episodes", [10, 49])
def test_of_any_number_of_episodes_that_ended_none_is_unfinished(episodes: int) -> None:
    """No rounding either: ten times a tenth, in 32 bits, is more than one."""
    env = envs.make("podium/Corridor", length=6, max_steps=30)
    assert play(always(1), env, episodes)["eval_unfinished"] == 0


def test_episodes_that_the_bound_cuts_are_reported() -> None:
    result = play(always(0), envs.make("podium/Corridor", length=6, max_steps=30), max_steps=7)
    assert (result["eval_length"], result["eval_unfinished"]) == (7, 1)


def test_a_call_may_have_another_bound_without_compiling_anew() -> None:
    """To the left for ever in a corridor of at most 30 steps, in a compiled program and on the host."""
    env = envs.make("podium/Corridor", length=6, max_steps=30)
    compiled = jax.jit(make_evaluator(always(0), env, 4))
    with podium.testing.assert_compiles_once(compiled):
        found = [compiled(jax.random.key(0), (), np.int32(most)) for most in (7, 12, 30)]
    stepped = make_host_evaluator(always(0), on_host(env), 4)
    for most, unfinished, in_one in zip((7, 12, 30), (1, 1, 0), found, strict=True):
        on_the_host = stepped(jax.random.key(0), (), most)
        assert on_the_host is not None
        for result in (in_one, on_the_host):
            assert (float(result["eval_length"]), float(result["eval_unfinished"])) == (most, unfinished)


def test_an_episode_counts_once_though_others_are_longer() -> None:
    """CartPole pushed one way falls after 8 to 10 steps, not at once everywhere; reward is 1 a step."""
    result = play(always(0), envs.make("CartPole-v1"), 32)
    assert 8 <= result["eval_length"] <= 11 and result["eval_return"] == result["eval_length"]
    assert result["eval_return_min"] <= result["eval_return"] and result["eval_return_std"] > 0


def test_a_lost_life_is_no_end() -> None:
    """Where the environment says which ends are whole episodes' (`info["episode_end"]`), only those count."""
    plain = envs.make("podium/Corridor", length=6, max_steps=30)

    def mark(pair: Any, ended: Any) -> Any:
        return pair[0], pair[1]._replace(info=pair[1].info | {"episode_end": ended(pair[1])})

    def step(key: Any, state: Any, action: Any) -> Any:
        pair = mark(plain.step(key, state, action), lambda timestep: timestep.last)
        return pair[0], pair[1]._replace(terminated=jnp.ones((), bool))

    env = plain._replace(reset=lambda key: mark(plain.reset(key), lambda timestep: timestep.last), step=step)
    result = play(always(1), env)
    assert (result["eval_return"], result["eval_length"], result["eval_unfinished"]) == (1, 5, 0)


def test_the_raw_reward_is_reported() -> None:
    plain = envs.make("podium/Corridor", length=4)
    scaled = envs.wrappers.scale_reward(plain, 10.0)
    assert play(always(1), scaled)["eval_return"] == play(always(1), plain)["eval_return"] == 1


@pytest.mark.parametrize(("name", "value"), [("num_episodes", 0), ("num_episodes", -1), ("max_steps", -1)])
def test_bad_numbers_are_refused(name: str, value: int) -> None:
    options = {"num_episodes": 4} | {name: value}
    with pytest.raises(ValueError, match=f"{name}={value} must be a positive integer"):
        make_evaluator(AGENT, envs.make("podium/Corridor"), **options)


def test_policies_act_alone_in_batches_and_with_memory() -> None:
    env = envs.make("podium/RepeatFirst")
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), memory="gru", memory_size=4))
    policy = Policy(agent, agent.actor(agent.init(jax.random.key(0), env.spec)), env.spec)
    obs = np.eye(4, dtype=np.float32)
    action, carry = policy.act(obs)
    assert action.shape == (4,) and carry.shape == (4, 4)
    assert int(policy(obs[2])) == int(action[2])
    _, later = policy.act(obs, carry)
    assert not np.allclose(later, carry)
    _, begun_again = policy.act(obs, carry, first=np.ones(4, bool))
    np.testing.assert_allclose(begun_again, carry, rtol=1e-6)
    with pytest.raises(ValueError, match="sampling needs a key"):
        policy.act(obs, greedy=False)
    assert policy.act(obs, key=jax.random.key(1), greedy=False)[0].shape == (4,)


def test_evaluate_takes_a_policy_and_gives_numbers() -> None:
    env = envs.make("podium/Corridor")
    policy = Policy(AGENT, AGENT.actor(AGENT.init(jax.random.key(0), env.spec)), env.spec)
    first, again = (podium.evaluate(policy, env, num_episodes=4, seed=3, greedy=False) for _ in range(2))
    assert first == again and set(first) >= {"eval_return", "eval_length", "eval_unfinished"}


# What evaluation costs beside training.

ATARI = 27_000


def plan(num_steps: int, longest_episode: int, on_host: bool = False, **given: Any) -> Schedule:
    return make_schedule(num_steps, 100, longest_episode=longest_episode, on_host=on_host, **given)


def cost(schedule: Schedule) -> int:
    """Return the steps of all evaluations, if no episode ends before its bound; 100 steps an update."""
    updates = range(1, schedule.total + 1)
    due = [update for update in updates if schedule.due(schedule.evaluate, update)]
    assert len(due) == schedule.times(schedule.evaluate)
    return sum(schedule.evaluation.episodes * schedule.max_eval_steps(update) for update in due)


@pytest.mark.parametrize("limit", [9, 500, 1000, 2500])
@pytest.mark.parametrize("num_steps", [100, 4_000, 1_000_000])
def test_short_episodes_of_pure_environments_are_played_to_their_limit(limit: int, num_steps: int) -> None:
    schedule = plan(num_steps, limit)
    assert schedule.evaluation == EvaluationPlan(128, limit, limit, limit)
    assert schedule.evaluate == max(1, schedule.total // 10)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("num_steps", [100, 4_000, 100_000, 1_000_000, 10_000_000, 200_000_000])
def test_whole_games_take_half_of_the_training_steps_or_what_is_worth_reporting(num_steps: int, on_host: bool) -> None:
    schedule = plan(num_steps, ATARI, on_host)
    evaluation, times = schedule.evaluation, schedule.times(schedule.evaluate)
    assert 1 <= times <= 10 and 8 <= evaluation.episodes <= 128
    assert 1_000 <= evaluation.max_steps <= evaluation.last_max_steps <= ATARI and evaluation.last_max_steps >= 2_000
    assert cost(schedule) <= num_steps / 2 + evaluation.episodes * 2_000
    assert schedule.evaluate % schedule.checkpoint == 0 or times == 1


def test_the_defaults_for_whole_games_by_hand() -> None:
    """Half of the steps, over ten evaluations, over the episodes."""
    found = {steps: plan(steps, ATARI, True) for steps in (4_000, 100_000, 1_000_000, 10_000_000, 50_000_000)}
    plans = {steps: schedule.evaluation for steps, schedule in found.items()}
    assert plans[4_000] == EvaluationPlan(8, 1_000, 2_000, ATARI)
    assert plans[100_000] == EvaluationPlan(8, 50_000 // 5 // 8, 2_000, ATARI)
    assert plans[1_000_000] == EvaluationPlan(16, 3_125, 3_125, ATARI)
    assert plans[10_000_000] == EvaluationPlan(16, ATARI, ATARI, ATARI)
    assert plans[50_000_000] == EvaluationPlan(64, ATARI, ATARI, ATARI)
    times = [schedule.times(schedule.evaluate) for schedule in found.values()]
    assert times == [1, 5, 10, 10, 10]
    # Checkpoints are as many as ever.
    assert [schedule.times(schedule.checkpoint) for schedule in found.values()] == [10] * 5


def test_short_episodes_on_the_host_are_whole_but_fewer() -> None:
    short, long = plan(4_000, 500, True), plan(5_000_000, 500, True)
    assert (short.evaluation, short.times(short.evaluate)) == (EvaluationPlan(8, 500, 500, 500), 1)
    assert (long.evaluation, long.times(long.evaluate)) == (EvaluationPlan(128, 500, 500, 500), 10)


def test_what_is_asked_for_is_done() -> None:
    assert plan(4_000, ATARI, True, eval_episodes=30).evaluation == EvaluationPlan(30, 1_000, 2_000, ATARI)
    assert plan(4_000, ATARI, True, eval_steps=0).evaluation == EvaluationPlan(16, ATARI, ATARI, ATARI)
    assert plan(4_000, 500, True, eval_steps=0).evaluation == EvaluationPlan(128, 500, 500, 500)
    asked = plan(4_000, ATARI, True, eval_steps=600, eval_episodes=3, eval_every=1_000)
    assert asked.evaluation == EvaluationPlan(3, 200, 200, ATARI) and asked.times(asked.evaluate) == 4
    assert plan(4_000, ATARI, eval_steps=5_000).evaluation == EvaluationPlan(5, 1_000, 1_000, ATARI)
    assert plan(4_000, 500, eval_steps=5_000).evaluation == EvaluationPlan(10, 500, 500, 500)
    assert plan(1_000_000, ATARI, True, eval_every=500_000).evaluation.max_steps == 500_000 // 2 // 16
    words = "eval_steps=3 is less than a step of each of eval_episodes=4; use 4 or more, or 0 for no bound"
    with pytest.raises(ValueError, match=words):
        plan(4_000, ATARI, eval_steps=3, eval_episodes=4)
    with pytest.raises(ValueError, match="eval_steps=-1 is negative"):
        plan(4_000, ATARI, eval_steps=-1)


def test_plans_and_cuts_in_words() -> None:
    one = (
        "1 of 8 episodes, at most 2,000 steps each of 27,000, greedy and sampled: "
        "up to 32,000 steps beside 4,000 of training"
    )
    assert plan(4_000, ATARI, True).evaluations_in_words() == one
    whole = (
        "10 of 128 episodes, at most 500 steps each, the last also sampled: "
        "up to 704,000 steps beside 500,000 of training"
    )
    assert plan(500_000, 500).evaluations_in_words() == whole
    assert cut_in_words({"eval_unfinished": 0.0, "eval_max_steps": 500}) == cut_in_words({}) == ""
    several = {"eval_unfinished": [0.5, 1.0], "eval_max_steps": 2_000}
    assert cut_in_words(several) == "of which 75% were cut at 2,000 steps"
    assert cut_in_words({"eval_unfinished": 0.001}) == "of which less than 1% were cut"


def test_a_run_reports_what_it_cut() -> None:
    """Three steps of each episode, none of which ends before nine."""
    sizes: dict[str, Any] = {"num_envs": 8, "rollout_length": 4, "num_steps": 64, "placement": podium.Anakin(1)}
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
    result = podium.train(agent, "podium/Catch", eval_episodes=4, eval_steps=13, eval_every=32, progress=False, **sizes)
    for row in (*result.metrics, result.summary):
        assert (row["eval_unfinished"], row["eval_length"], row["eval_max_steps"], row["eval_episodes"]) == (1, 3, 3, 4)
    assert cut_in_words(result.summary) == "of which 100% were cut at 3 steps"


def test_checkpoints_are_compared_by_evaluations_that_were_cut_alike(tmp_path: Path) -> None:
    """An endless game pays 1 a step, so a longer evaluation pays more: the last, as whose state is no better."""
    obs = jnp.zeros(1)
    game = Env(
        EnvSpec("endless", ArraySpec((1,)), DiscreteSpec(2), ATARI),
        lambda key: (jnp.zeros(()), restart(obs)),
        lambda key, state, action: (state, transition(obs, 1.0, False)),
    )
    sizes: dict[str, Any] = {"num_envs": 100, "rollout_length": 10, "num_steps": 100_000, "placement": podium.Anakin(1)}
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
    result = podium.train(agent, game, run_dir=tmp_path / "run", keep_checkpoints=100, progress=False, **sizes)
    evaluated = [row["eval_return"] for row in result.metrics if "eval_return" in row]
    assert evaluated == [1_250] * 4 + [2_000] and result.summary["eval_return_cut"] == 1_250
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    merits = [checkpoints.meta(step)["eval_return"] for step in checkpoints.steps()]
    assert [merit for merit in merits if merit is not None] == [1_250] * 5
    assert "(2,000 in the last) of 27,000" in plan(100_000, ATARI).evaluations_in_words()


def test_a_run_ends_with_greedy_and_with_sampled_play() -> None:
    """Of a policy that mostly goes right and is never sure: greedy play is the best there is, sampled play is not."""
    sizes: dict[str, Any] = {"num_envs": 8, "rollout_length": 4, "num_steps": 96, "eval_every": 32, "eval_episodes": 64}
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
    corridor = envs.make("podium/Corridor")
    for env in (corridor, on_host(corridor)):
        result = podium.train(agent, env, placement=podium.Single(), progress=False, **sizes)
        assert ["eval_return_sampled" in row for row in result.metrics] == [False, False, True]
        assert result.summary["eval_return_sampled"] == result.metrics[-1]["eval_return_sampled"]
    assert result.summary["eval_return_sampled"] != result.summary["eval_return"]
    seeds = podium.train(agent, corridor, placement=podium.Anakin(1), seeds=2, progress=False, **sizes)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0x65766C), 3)
    for policy, greedy, sampled in zip(
        seeds.policy, seeds.summary["eval_return"], seeds.summary["eval_return_sampled"], strict=True
    ):
        played = [make_evaluator(agent, corridor, 64, greedy=choice)(key, policy.params) for choice in (True, False)]
        assert [greedy, sampled] == pytest.approx([float(metrics["eval_return"]) for metrics in played])
