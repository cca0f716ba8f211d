"""JaxMARL's environments: agents in front of every array, true last observations, ends told apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs
from podium.agents import ippo, mappo
from podium.env import auto_reset

pytestmark = pytest.mark.xdist_group("jaxmarl")  # To import it takes seconds: one process does, and not to collect.


@pytest.fixture(autouse=True)
def _jaxmarl() -> None:
    pytest.importorskip("jaxmarl", reason='JaxMARL is an extra: pip install "podium[marl]"')


SPREAD, SMAX = "jaxmarl/MPE_simple_spread_v3", "jaxmarl/smax-3m"
STOP = 4  # Behind four moves, before the enemies that can be shot at.


def play(name: str, steps: int, num_envs: int = 4) -> Any:
    """Return TimeSteps [B, T, ...] of legal random play, and what was acted on."""
    env = auto_reset(envs.make(name))
    number, actions = env.spec.num_agents, env.spec.action.num_values

    def run(key: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            state, obs = carry
            legal = jnp.ones((number, actions), bool) if obs.legal is None else obs.legal
            action = jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))
            state, timestep = env.step(key, state, action)
            return (state, timestep.obs), (timestep, obs)

        state, timestep = env.reset(key)
        return jax.lax.scan(step, (state, timestep.obs), jax.random.split(key, steps))[1]

    return jax.device_get(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), num_envs)))


def test_particles_are_cut_by_time_alone() -> None:
    played, obs = play(SPREAD, 80)
    assert played.reward.shape == (4, 80, 3) and played.valid is None and obs.legal is None
    assert not played.terminated.any()
    np.testing.assert_array_equal(np.flatnonzero(played.truncated[0]), [25, 51, 77])
    # The world is what all see, and the last observation is not the next episode's first.
    np.testing.assert_array_equal(obs.world[:, :, 1], obs.view.reshape(4, 80, -1))
    np.testing.assert_array_equal(played.next_obs.view[:, :25], obs.view[:, 1:26])
    assert not np.array_equal(played.next_obs.view[:, 25], played.obs.view[:, 25])


def test_who_is_dead_has_one_action_and_is_paid_as_its_team_is() -> None:
    played, obs = play(SMAX, 150)
    assert played.terminated.any() and played.valid is None
    dead = ~obs.legal[..., :STOP].any(-1)
    assert dead.any() and not dead.all(-1).any()
    assert (obs.legal[dead].sum(-1) == 1).all() and obs.legal[dead, STOP].all()
    assert (played.reward == played.reward[..., :1]).all() and played.reward[dead].sum() > 0
    # Who is dead stays dead until the battle ends.
    revived = dead[:, :-1] & ~dead[:, 1:]
    assert not revived[~(played.terminated | played.truncated)[:, :-1]].any()


@pytest.mark.parametrize("make", [ippo.make, mappo.make])
def test_it_trains(make: Any) -> None:
    for name in (SPREAD, SMAX):
        result = podium.train(make(), name, num_steps=1024, num_envs=8, rollout_length=64, progress=False)
        assert np.isfinite(result.summary["eval_return"])


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'jaxmarl/smax-3m'"):
        envs.make("jaxmarl/smax-3n")
    with pytest.raises(ValueError, match="has no option 'steps'"):
        envs.make(SPREAD, steps=3)
