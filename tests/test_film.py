"""Stacks of frames travel frame by frame, and are put together again to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs
from podium.agents import dqn, impala, ppo
from podium.film import Film, unroll
from podium.host import HostEnvFactory
from podium.ops import stacks

FRAMES = 4


class Flicks:
    """A batch of environments that reset in the next step, and show random stacks of frames [3, 2, k]."""

    def __init__(self, spec: Any, num_envs: int, seed: int, first_index: int):
        self.spec, self.num_envs = spec, num_envs
        self.rngs = [np.random.default_rng((seed, first_index + i)) for i in range(num_envs)]
        self.over = np.zeros(num_envs, bool)

    def _frame(self, rng: Any) -> np.ndarray:
        return rng.integers(0, 3, (3, 2, 1), np.uint8)

    def _timestep(self, reward: Any, terminated: Any, truncated: Any, valid: Any) -> Any:
        return podium.TimeStep(self.obs, np.float32(reward), terminated, truncated, self.obs, {}, valid)

    def reset(self) -> Any:
        self.obs = np.stack([np.repeat(self._frame(rng), FRAMES, -1) for rng in self.rngs])
        no = np.zeros(self.num_envs, bool)
        return self._timestep(np.zeros(self.num_envs), no, no, ~no)

    def send(self, action: np.ndarray) -> None:
        self.action = np.asarray(action)

    def recv(self) -> Any:
        valid, obs, ends = ~self.over, [], []
        for i, rng in enumerate(self.rngs):
            frame = self._frame(rng)
            stack = np.repeat(frame, FRAMES, -1) if self.over[i] else np.concatenate([self.obs[i][..., 1:], frame], -1)
            obs.append(stack)
            ends.append(valid[i] and rng.random() < 0.2)
        self.obs, self.over = np.stack(obs), np.array(ends)
        reward = valid * (self.action == self.obs[:, 0, 0, -1])
        return self._timestep(reward, self.over, np.zeros(self.num_envs, bool), valid)

    def close(self) -> None:
        pass


def flicks(says_so: bool = True) -> HostEnvFactory:
    spec = podium.EnvSpec(
        "flicks",
        podium.ArraySpec((3, 2, FRAMES), np.uint8, 0, 255, FRAMES if says_so else 1),
        podium.DiscreteSpec(3),
        max_episode_steps=100,
    )
    return HostEnvFactory(spec, lambda num_envs, seed, index: Flicks(spec, num_envs, seed, index), record={"name": "f"})


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("number", [2, 4])
def test_a_film_is_what_was_seen(number: int, width: int) -> None:
    rng = np.random.default_rng(0)
    for rows in (1, 2, 5, 40):
        seen, anew = [rng.integers(0, 3, (2, 3, 2, number * width), np.uint8)], [np.zeros(2, bool)]
        for _ in range(rows - 1):
            begins = rng.random(2) < 0.3
            frame = rng.integers(0, 3, (2, 3, 2, width), np.uint8)
            shifted = np.concatenate([seen[-1][..., width:], frame], -1)
            fresh = np.concatenate([frame] * number, -1)
            seen.append(np.where(begins[:, None, None, None], fresh, shifted))
            anew.append(begins)
        first = np.moveaxis(seen[0].reshape(2, 3, 2, number, width), -2, 0)
        frames = np.concatenate([first, *(stack[None, ..., -width:] for stack in seen[1:])])
        np.testing.assert_array_equal(unroll(Film(jnp.asarray(frames), jnp.asarray(np.stack(anew)))), np.stack(seen))


@pytest.mark.parametrize(("width", "number"), [(1, 4), (3, 2), (1, 2)])
def test_frames_of_a_stack_in_numpy_and_jax(width: int, number: int) -> None:
    stack = np.random.default_rng(0).integers(0, 256, (3, 4, 5, number * width), np.uint8)
    stack[1] = np.concatenate([stack[1, ..., :width]] * number, -1)
    for place in range(number):
        frame = stack[..., place * width : (place + 1) * width]
        for same in (stack, jnp.asarray(stack), np.asfortranarray(stack)):
            np.testing.assert_array_equal(stacks.frame_of(same, place, width), frame)
            np.testing.assert_array_equal(stacks.is_one_frame(same, width), [False, True, False])


PLACEMENTS = {
    "sebulba": podium.Sebulba(actor_devices=1, learner_devices=1, lockstep=True),
    "in groups": podium.Sebulba(actor_devices=1, learner_devices=1, lockstep=True, groups=2),
    "two learners": podium.Sebulba(actor_devices=1, learner_devices=2, lockstep=True),
    "central inference": podium.CentralInference(devices=2, lockstep=True),
    "distributed actors": podium.DistributedActors(workers=1, lockstep=True),
    "parameter server": podium.ParameterServer(workers=1),
    "single": podium.Single(),
    "two workers": podium.LocalSGD(devices=1, workers=2),
}
SIZES: dict[str, Any] = {"hidden_sizes": (8,)}
AGENTS: dict[str, Any] = {
    "ppo": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=2)),
    "impala": lambda: impala.make(impala.Config(**SIZES, num_minibatches=2)),
    "dqn": lambda: dqn.make(dqn.Config(**SIZES, buffer_capacity=512, min_replay_size=64, batch_size=32)),
}


EACH = [(placement, name) for placement in PLACEMENTS for name in AGENTS]
AT_ONCE = [("sebulba", "ppo"), ("two learners", "impala"), ("central inference", "dqn"), ("two workers", "ppo")]
"""Of these, a few that have each placement's ways, and each agent, in them; the others nightly."""


@pytest.mark.parametrize(
    ("placement", "name"), [pytest.param(*each, marks=[pytest.mark.slow] * (each not in AT_ONCE)) for each in EACH]
)
def test_every_placement_learns_from_films_what_it_does_from_stacks(placement: str, name: str) -> None:
    params, sizes = [], []
    for says_so in (True, False):
        program = PLACEMENTS[placement].build(AGENTS[name](), flicks(says_so), num_envs=8, rollout_length=5)
        try:
            state = program.init(0)
            for _ in range(6):
                state, metrics = program.chunk(state, 1)
            assert metrics["finite"].all()
            params.append(jax.device_get(program.agent_state(state).params))
            sizes.append(program.bytes_per_update().get("trajectories", 0))
        finally:
            program.close()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), *params)
    assert sizes[0] <= sizes[1]


def test_pong_travels_in_a_quarter_of_its_bytes() -> None:
    pytest.importorskip("envpool", reason='envpool is in the extra: pip install "podium[atari]"')
    env = envs.make("Pong-v5")
    plain = dataclasses.replace(env.spec, obs=dataclasses.replace(env.spec.obs, num_frames=1))
    placement = podium.Sebulba(actor_devices=1, learner_devices=1)
    size = lambda env: placement.build(
        ppo.make(ppo.Config(torso="small_cnn")), env, num_envs=8, rollout_length=128
    ).bytes_per_update()["trajectories"]
    assert size(env) < 0.26 * size(dataclasses.replace(env, spec=plain))
