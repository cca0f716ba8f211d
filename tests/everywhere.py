"""One agent under every placement whose arithmetic is that of one device, and what it becomes under each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from alike import assert_close

import podium
from podium.agent import Agent
from podium.env import Env, restart, transition
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Seen

PLACEMENTS: dict[str, Any] = {
    "single": podium.Single(),
    "two devices": podium.Anakin(devices=2),
    "eight devices": podium.Anakin(devices=8),
    "sebulba": podium.Sebulba(actor_devices=1, learner_devices=1, lockstep=True),
    "central inference": podium.CentralInference(lockstep=True),
    "distributed actors": podium.DistributedActors(workers=1, lockstep=True),
    "parameter server": podium.ParameterServer(workers=1),
    "local sgd": podium.LocalSGD(devices=1),
}
ONE_DEVICE = podium.Anakin(devices=1)
PLAY_ON_HOST = ("sebulba", "central inference", "distributed actors")
"""Those that take environments on the host too, and train by them as by pure ones."""


def all_but(*names: str) -> list[str]:
    """Return the names of all placements but these."""
    assert set(names) <= set(PLACEMENTS), names
    return [name for name in PLACEMENTS if name not in names]


def state_under(
    placement: Any, agent: Agent, env: Any, updates: int = 6, num_envs: int = 8, rollout_length: int = 8, **sizes: Any
) -> Any:
    """Return the agent's State after some updates of seed 0, in the last of which it learnt."""
    program = placement.build(agent, env, num_envs=num_envs, rollout_length=rollout_length, **sizes)
    try:
        state = program.init(0)
        for _ in range(updates):
            state, metrics = program.chunk(state, 1)
        assert metrics["finite"].all()
        # A replay that is not full yet learns nothing, and its loss is nan; Evolution has none.
        assert np.isfinite(metrics.get("loss", 0.0)).all()
        return jax.device_get(program.agent_state(state))
    finally:
        program.close()


def assert_eight_devices_learn_the_same(agent: Agent, env: Any, num_envs: int = 16, **sizes: Any) -> Any:
    """Assert that eight devices make of an agent what one does, each with a lane of environments; return its State."""
    sizes |= {"num_envs": num_envs, "num_lanes": 8}
    one = state_under(ONE_DEVICE, agent, env, **sizes)
    assert_close(state_under(PLACEMENTS["eight devices"], agent, env, **sizes), one, relative=0)
    return one


def stacked_game(num_plies: int) -> Env:
    """Return a game of two of so many plies that shows four random frames, of which each ply brings one."""
    shape = (16, 16, 4)  # Large enough for frames to be kept once.

    def frame(key: Any) -> Any:
        return jax.random.randint(key, (*shape[:-1], 1), 0, 200).astype(jnp.uint8)

    def see(state: Any) -> Seen:
        return Seen(state[0], jnp.ones(3, bool), player=state[1] % 2)

    def reset(key: Any) -> Any:
        state = jnp.concatenate([frame(key)] * shape[-1], -1), jnp.zeros((), jnp.int32)
        return state, restart(see(state), turn=1.0)

    def step(key: Any, state: Any, action: Any) -> Any:
        state = jnp.concatenate([state[0][..., 1:], frame(key)], -1), state[1] + 1
        return state, transition(see(state), action == 1, state[1] >= num_plies, turn=-1.0)

    obs = Seen(ArraySpec(shape, np.uint8, 0, 255, shape[-1]), ArraySpec((3,), np.bool_, 0, 1), player=DiscreteSpec(2))
    return Env(EnvSpec("stacked game", obs, DiscreteSpec(3), num_plies, turns=True), reset, step)
