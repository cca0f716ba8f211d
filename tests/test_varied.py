"""An agent with several settings: each run of a program is what its setting is alone, and one that diverges stops."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, rainbow, sac
from podium.varied import varied

REPLAY: dict[str, Any] = {"batch_size": 16, "min_replay_size": 32, "buffer_capacity": 256, "num_updates": 2}
CASES: dict[str, tuple[Any, dict[str, Any], list[dict[str, float]]]] = {
    "ppo": (
        ppo,
        {"num_epochs": 1, "num_minibatches": 2, "normalize_reward": True},
        [
            {"learning_rate": 1e-3, "gamma": 0.9, "target_kl": 1.0},
            {"learning_rate": 3e-2, "gamma": 0.99, "target_kl": 1e-6},
        ],
    ),
    "a2c": (a2c, {}, [{"learning_rate": 1e-3, "max_grad_norm": 0.1}, {"learning_rate": 1e-2, "max_grad_norm": 1.0}]),
    "impala": (impala, {}, [{"learning_rate": 1e-3, "c_bar": 0.8}, {"learning_rate": 1e-2, "c_bar": 1.0}]),
    "pqn": (
        pqn,
        {"num_epochs": 1, "num_minibatches": 2},
        [
            {"learning_rate": 1e-3, "q_lambda": 0.5, "epsilon_end": 0.5},
            {"learning_rate": 1e-2, "q_lambda": 1.0, "epsilon_end": 0.0},
        ],
    ),
    "dqn": (
        dqn,
        {**REPLAY, "n_step": 2},
        [
            {"learning_rate": 1e-3, "gamma": 0.9, "epsilon_end": 0.5},
            {"learning_rate": 1e-2, "gamma": 0.99, "epsilon_end": 0.0},
        ],
    ),
    "apex": (
        apex,
        REPLAY,
        [{"learning_rate": 1e-3, "priority_exponent": 0.3}, {"learning_rate": 1e-2, "priority_exponent": 0.9}],
    ),
    "rainbow": (
        rainbow,
        {**REPLAY, "num_atoms": 11},
        [
            {"learning_rate": 1e-3, "noisy_std": 0.1, "v_max": 2.0},
            {"learning_rate": 1e-2, "noisy_std": 0.5, "v_max": 5.0},
        ],
    ),
}


def run(agent: Any, seeds: int, updates: int = 4, devices: int = 1) -> tuple[Any, Any]:
    program = podium.Anakin(devices).build(
        agent, podium.envs.make("podium/Catch"), num_envs=8, rollout_length=8, seeds=seeds, max_updates=updates
    )
    state, metrics = program.chunk(program.init(0), updates)
    return jax.device_get(program.agent_state(state)), metrics


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ppo")) for name in CASES])
def test_each_setting_is_what_it_is_alone(name: str) -> None:
    module, sizes, settings = CASES[name]
    config = module.Config(hidden_sizes=(8,), **sizes)
    state, metrics = run(varied(module.make, config, settings), 4)
    for index, setting in enumerate(settings):
        alone, expected = run(module.make(module.Config(hidden_sizes=(8,), **sizes, **setting)), 2)
        mine = slice(2 * index, 2 * index + 2)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(state.state), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[mine], y, 2e-4, 1e-5, err_msg=f"{index} {jax.tree_util.keystr(path)}")
        np.testing.assert_allclose(metrics["episode_return_sum"][:, mine], expected["episode_return_sum"])
        for field, value in setting.items():
            np.testing.assert_allclose(state.numbers[field][mine], value, 1e-6)
    assert not state.diverged.any()


def test_numbers_that_only_the_first_state_has_vary_too() -> None:
    config = sac.Config(hidden_sizes=(4,), buffer_capacity=64, batch_size=4, min_replay_size=8)
    settings = [{"initial_temperature": 0.5}, {"initial_temperature": 2.0}]
    agent, env = varied(sac.make, config, settings), podium.envs.make("Pendulum-v1")
    program = podium.Anakin(1).build(agent, env, num_envs=2, rollout_length=4, seeds=4)
    begun = jax.device_get(program.agent_state(program.init(0)).state.params)
    temperatures = [np.exp(x) for path, x in jax.tree_util.tree_leaves_with_path(begun) if "temperature" in str(path)]
    assert temperatures, "SAC's parameters hold the temperature's logarithm"
    np.testing.assert_allclose(temperatures[0], [0.5, 0.5, 2.0, 2.0], rtol=1e-6)


def test_a_setting_of_one_run_has_the_first_seed_of_those_with_several() -> None:
    """What programs of one setting and of two learn with the same seed compares."""
    module, sizes, settings = CASES["a2c"]

    def begun(settings: Any, seeds: int) -> Any:
        agent = varied(module.make, module.Config(hidden_sizes=(4,), **sizes), settings)
        program = podium.Anakin(1).build(
            agent, podium.envs.make("podium/Catch"), num_envs=4, rollout_length=4, seeds=seeds
        )
        return jax.device_get(program.agent_state(program.init(0)).state.params)

    one, two, four = begun(settings[:1], 1), begun(settings, 2), begun(settings, 4)
    for x, y, z in zip(*map(jax.tree.leaves, (one, two, four)), strict=True):
        np.testing.assert_array_equal(y, [x, x])
        np.testing.assert_array_equal(z[[0, 2]], y)
        assert not z.any() or (z[0] != z[1]).any()


def test_devices_hold_whole_runs() -> None:
    module, sizes, settings = CASES["ppo"]
    agent = varied(module.make, module.Config(hidden_sizes=(8,), **sizes), settings)
    one, _ = run(agent, 4)
    several, _ = run(agent, 4, devices=4)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        np.testing.assert_allclose(x, y, 1e-5, 1e-6)


def test_a_setting_that_diverges_is_kept_at_zeros_and_the_others_go_on() -> None:
    config = a2c.Config(hidden_sizes=(8,), max_grad_norm=0.0, optimizer="adam")
    agent = varied(a2c.make, config, [{"learning_rate": 1e-3}, {"learning_rate": 3e38}])
    state, metrics = run(agent, 2)
    assert state.diverged.tolist() == [False, True]
    assert metrics["finite"].all()
    alone, _ = run(a2c.make(a2c.Config(hidden_sizes=(8,), max_grad_norm=0.0, optimizer="adam", learning_rate=1e-3)), 2)
    for x, y in zip(jax.tree.leaves(state.state.params), jax.tree.leaves(alone.params), strict=True):
        assert not x[1].any()
        np.testing.assert_allclose(x[0], y[0], 2e-4, 1e-5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one or more, all of the same fields"):
        varied(ppo.make, ppo.Config(), [{"gamma": 0.9}, {"learning_rate": 1e-3}])
    with pytest.raises(ValueError, match="gamma=1.5 must be between 0 and 1"):
        varied(ppo.make, ppo.Config(), [{"gamma": 0.9}, {"gamma": 1.5}])
    agent, env = varied(ppo.make, ppo.Config(), [{"gamma": 0.9}, {"gamma": 0.99}]), podium.envs.make("podium/Catch")
    with pytest.raises(ValueError, match="seeds=3 is not divisible by the 2 settings of ppo; use 2 or 4"):
        podium.Anakin(1).build(agent, env, num_envs=8, rollout_length=8, seeds=3)
    with pytest.raises(ValueError, match="ppo has 2 settings: Single runs one; use podium.Anakin"):
        podium.Single().build(agent, env, num_envs=8, rollout_length=8)
