"""What an Atari score means: whole games, unclipped rewards, a limit of frames, waiting or stickiness at the start."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.agent import ActOutput
from podium.agents import ppo
from podium.evaluate import make_host_evaluator
from podium.host import HostEnv, HostEnvFactory

pytest.importorskip("envpool", reason='envpool is in the extra: pip install "podium[atari]"')

FIRE = 1
KEY = jax.random.key(0)


def fire(keys: Any, params: Any, carry: Any, obs: Any, first: Any, greedy: bool) -> ActOutput:
    return ActOutput(jnp.full(first.shape, FIRE, jnp.int32), carry)


ALWAYS_FIRES = ppo.make()._replace(act=fire)


def space_invaders(**options: Any) -> HostEnvFactory:
    """Return the game as one trains in it: an episode a life, signs of rewards."""
    made = podium.envs.make("SpaceInvaders-v5", life_loss=True, **options)
    assert isinstance(made, HostEnvFactory)
    return made


def play(envs: HostEnvFactory, num_envs: int = 2) -> dict[str, np.ndarray]:
    """Return what always firing brings in the games that an evaluation with KEY plays, each until its true end."""
    seed = int(jax.random.randint(jax.random.split(KEY)[0], (), 0, 2**31 - 1))
    env = envs.make(num_envs, seed, 0)
    begun = env.reset()
    sums: dict[str, np.ndarray] = {name: np.zeros(num_envs) for name in ("score", "reward", "length", "terminated")}
    over = np.zeros(num_envs, bool)
    while not over.all():
        env.send(np.full(num_envs, FIRE, np.int32))
        step = env.recv()
        values = {"score": step.info["raw_reward"], "reward": step.reward, "length": 1, "terminated": step.terminated}
        for name, value in values.items():
            sums[name] += np.where(over, 0, value)
        over |= step.info["episode_end"]
    env.close()
    return {**sums, "begun": begun.obs}


def test_scores_are_of_whole_games_and_unclipped_on_environments_of_their_own() -> None:
    envs = space_invaders()
    assert envs.evaluation is not None
    made: list[int] = []

    def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
        made.append(num_envs)
        return envs.evaluation.make(num_envs, seed, first_index)

    counted = dataclasses.replace(envs, make=pytest.fail, evaluation=dataclasses.replace(envs.evaluation, make=make))
    evaluate = make_host_evaluator(ALWAYS_FIRES, counted, 2)
    found, trained = evaluate(KEY, ()), play(envs)
    assert found is not None and made == [2]
    assert found["eval_return"] == trained["score"].mean() and found["eval_length"] == trained["length"].mean()
    assert found["eval_unfinished"] == 0
    # In training the same games are three episodes each, and aliens worth 5 to 30 count 1.
    assert (trained["terminated"] == 3).all() and (trained["score"] >= 5 * trained["reward"]).all()
    assert trained["reward"].min() > 0
    assert np.any(trained["begun"][0] != trained["begun"][1]), "the games begin after different waits"


def test_the_frame_limit_ends_a_game() -> None:
    found = make_host_evaluator(ALWAYS_FIRES, space_invaders(max_episode_frames=80), 2)(KEY, ())
    assert found is not None and (found["eval_length"], found["eval_unfinished"]) == (20, 0)


def test_the_protocol_is_said() -> None:
    envs = space_invaders()
    assert envs.evaluation is not None
    assert envs.evaluation.protocol == (
        "whole games, lost lives go on, the game's own rewards, at most 108,000 frames, 4 frames a step, 1 to 30 "
        "frames of waiting first, no sticky actions"
    )
    assert envs.protocol.startswith("an episode a life, signs of rewards, ")
    sticky = space_invaders(repeat_action_probability=0.25).evaluation
    assert sticky is not None and sticky.protocol.endswith("sticky actions (0.25)")
