"""Numbers of a configuration may be traced: one program has settings as its data, and each does what it would alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import rollout
from podium.agent import fresh_carry, fresh_past
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.learn import learn

B, T, UPDATES = 8, 4, 3

REPLAY: dict[str, Any] = {"batch_size": 16, "min_replay_size": 8, "buffer_capacity": 64, "num_updates": 2}
CONTINUOUS: dict[str, Any] = {
    "batch_size": 16,
    "min_replay_size": 8,
    "buffer_capacity": 64,
    "updates_per_step": 2 / 32,
    "warmup_steps": 0,
    "n_step": 2,
}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[float, float]]]] = {
    "ppo": (
        ppo,
        {"num_epochs": 1, "num_minibatches": 2, "normalize_reward": True},
        {
            "learning_rate": (1e-3, 1e-2),
            "anneal_steps": (1e3, 1e4),
            "gamma": (0.9, 0.99),
            "gae_lambda": (0.5, 1.0),
            "clip_epsilon": (0.1, 0.3),
            "value_clip": (0.1, 0.2),
            "value_coef": (0.5, 1.0),
            "entropy_coef": (0.0, 0.05),
            "max_grad_norm": (0.1, 1.0),
            "adam_eps": (1e-5, 1e-3),
            "target_kl": (1e-6, 1.0),
            "normalized_reward_bound": (1.0, 10.0),
        },
    ),
    "a2c": (
        a2c,
        {},
        {
            "learning_rate": (1e-3, 1e-2),
            "anneal_steps": (1e3, 1e4),
            "gamma": (0.9, 0.99),
            "gae_lambda": (0.5, 1.0),
            "value_coef": (0.5, 1.0),
            "entropy_coef": (0.0, 0.05),
            "max_grad_norm": (0.1, 1.0),
            "optimizer_eps": (1e-5, 1e-3),
            "rmsprop_decay": (0.9, 0.99),
        },
    ),
    "impala": (
        impala,
        {},
        {
            "learning_rate": (1e-3, 1e-2),
            "anneal_steps": (1e3, 1e4),
            "gamma": (0.9, 0.99),
            "vtrace_lambda": (0.5, 1.0),
            "rho_bar": (0.9, 2.0),
            "c_bar": (0.8, 1.0),
            "value_coef": (0.5, 1.0),
            "entropy_coef": (0.0, 0.05),
            "max_grad_norm": (0.1, 1.0),
            "optimizer_eps": (1e-5, 1e-3),
            "rmsprop_decay": (0.9, 0.99),
        },
    ),
    "pqn": (
        pqn,
        {"num_epochs": 1, "num_minibatches": 2},
        {
            "learning_rate": (1e-3, 1e-2),
            "anneal_steps": (1e3, 1e4),
            "gamma": (0.9, 0.99),
            "q_lambda": (0.5, 1.0),
            "epsilon_start": (0.9, 1.0),
            "epsilon_end": (0.01, 0.1),
            "reward_scale": (0.1, 1.0),
            "max_grad_norm": (0.1, 1.0),
            "optimizer_eps": (1e-8, 1e-3),
        },
    ),
    "dqn": (
        dqn,
        {**REPLAY, "n_step": 2},
        {
            "learning_rate": (1e-3, 1e-2),
            "anneal_steps": (1e3, 1e4),
            "gamma": (0.9, 0.99),
            "tau": (0.1, 1.0),
            "epsilon_start": (0.9, 1.0),
            "epsilon_end": (0.01, 0.1),
            "huber_delta": (0.1, 10.0),
            "max_grad_norm": (0.1, 1.0),
            "adam_eps": (1e-5, 1e-3),
        },
    ),
    "apex": (
        apex,
        REPLAY,
        {
            "learning_rate": (1e-3, 1e-2),
            "gamma": (0.9, 0.99),
            "priority_exponent": (0.3, 0.6),
            "importance_exponent": (0.4, 0.9),
            "smallest_priority": (1e-6, 1e-3),
            "epsilon_spread": (1.0, 7.0),
        },
    ),
    "r2d2": (
        r2d2,
        {**REPLAY, "sequence_length": 4, "burn_in": 1, "sequence_period": 2, "memory_size": 4},
        {
            "learning_rate": (1e-3, 1e-2),
            "gamma": (0.9, 0.99),
            "priority_exponent": (0.3, 0.6),
            "importance_exponent": (0.4, 0.9),
            "max_priority_weight": (0.5, 0.9),
            "rescale_eps": (1e-3, 1e-1),
        },
    ),
    "rainbow": (
        rainbow,
        {**REPLAY, "num_atoms": 11},
        {
            "learning_rate": (1e-3, 1e-2),
            "gamma": (0.9, 0.99),
            "priority_exponent": (0.3, 0.6),
            "importance_exponent": (0.4, 0.9),
            "smallest_priority": (1e-6, 1e-3),
            "epsilon_start": (0.1, 0.2),
            "epsilon_end": (0.0, 0.1),
            "v_min": (-3.0, -1.0),
            "v_max": (1.0, 2.0),
            "noisy_std": (0.1, 0.5),
        },
    ),
    "reppo": (
        reppo,
        {"num_epochs": 1, "num_minibatches": 2, "num_bins": 21},
        {
            "learning_rate": (1e-3, 1e-2),
            "gamma": (0.9, 0.99),
            "anneal_steps": (1e3, 1e4),
            "td_lambda": (0.5, 1.0),
            "kl_bound": (0.05, 0.5),
            "initial_kl_multiplier": (0.01, 1.0),
            "initial_temperature": (0.01, 1.0),
            "target_entropy_scale": (0.5, 1.0),
            "value_min": (-50.0, -30.0),
            "value_max": (0.0, 10.0),
            "prediction_coef": (0.5, 1.0),
            "max_grad_norm": (0.1, 1.0),
            "adam_eps": (1e-5, 1e-3),
        },
    ),
    "sac": (
        sac,
        CONTINUOUS,
        {
            "learning_rate": (1e-3, 1e-2),
            "critic_learning_rate": (1e-3, 1e-2),
            "temperature_learning_rate": (1e-3, 1e-2),
            "initial_temperature": (0.5, 1.0),
            "target_entropy_scale": (0.5, 1.0),
            "gamma": (0.9, 0.99),
            "tau": (0.1, 1.0),
            "max_grad_norm": (0.1, 1.0),
            "adam_eps": (1e-5, 1e-3),
        },
    ),
    "td3": (
        td3,
        CONTINUOUS,
        {
            "learning_rate": (1e-3, 1e-2),
            "critic_learning_rate": (1e-3, 1e-2),
            "gamma": (0.9, 0.99),
            "tau": (0.1, 1.0),
            "exploration_noise": (0.1, 0.3),
            "target_noise": (0.0, 0.2),
            "target_noise_bound": (0.3, 0.5),
            "max_grad_norm": (0.1, 1.0),
            "adam_eps": (1e-5, 1e-3),
        },
    ),
}


ENVS = {module: podium.envs.make_pure("Pendulum-v1") for module in (reppo, sac, td3)}


def train(module: Any, sizes: dict[str, Any], numbers: dict[str, Any]) -> Any:
    """Return the agent's State after some iterations, by the pure functions alone."""
    agent = module.make(module.Config(hidden_sizes=(8,), **sizes, **numbers))
    env, key = ENVS.get(module) or podium.envs.make_pure("podium/Catch"), jax.random.key(0)
    state = agent.init(key, env.spec)
    standing = rollout.begin(key, env, jnp.arange(B), fresh_carry(agent, env.spec, jnp.arange(B)), fresh_past(agent, B))
    held: Any = ()
    for update in range(UPDATES):
        keys = jax.random.split(jax.random.fold_in(key, update))
        params, version = agent.actor(state), jnp.int32(update)
        standing, trajectory, _ = rollout.rollout(keys[0], agent, env, params, standing, T, version)
        if agent.replay is not None and update == 0:
            plan = agent.plan(keys[1], state, trajectory)
            held = agent.replay.init(jax.tree.map(lambda x: x[0, 0], plan.data), B, 1, T)
        state, held, _ = learn(keys[1], agent, state, held, trajectory, 1)
    return state


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ppo")) for name in CASES])
def test_settings_side_by_side_are_each_alone(name: str) -> None:
    module, sizes, ranges = CASES[name]
    together = jax.jit(jax.vmap(lambda numbers: train(module, sizes, numbers)))
    both = together({field: jnp.array(pair, jnp.float32) for field, pair in ranges.items()})
    states = []
    for i in range(2):
        alone = jax.jit(lambda i=i: train(module, sizes, {field: pair[i] for field, pair in ranges.items()}))()
        states.append(alone)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(both), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[i], y, 2e-4, 1e-5, err_msg=f"{i} {jax.tree_util.keystr(path)}")
    apart = jax.tree.map(lambda x, y: np.abs(x - y).max(), states[0].params, states[1].params)
    assert max(jax.tree.leaves(apart)) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_every_number_with_a_fraction_is_among_them(name: str) -> None:
    module, _, ranges = CASES[name]
    shared = {"gamma", "samples_per_insert", "updates_per_step"}
    base = {"apex": dqn, "rainbow": dqn, "r2d2": apex}.get(name)
    inherited = {field.name for field in dataclasses.fields(base.Config)} if base else set()
    fields = {field.name for field in dataclasses.fields(module.Config) if isinstance(field.default, float)}
    assert fields - inherited <= ranges.keys() | shared


@pytest.mark.parametrize(
    ("module", "field"),
    [
        (ppo, "num_epochs"),
        (impala, "num_minibatches"),
        (pqn, "num_minibatches"),
        (pqn, "layer_norm"),
        (dqn, "n_step"),
        (dqn, "samples_per_insert"),
        (apex, "num_actors"),
        (r2d2, "burn_in"),
        (r2d2, "stored_state"),
        (rainbow, "num_atoms"),
        (rainbow, "noisy"),
        (sac, "updates_per_step"),
        (sac, "num_critics"),
        (td3, "policy_delay"),
        (td3, "warmup_steps"),
    ],
)
def test_a_size_cannot_be_traced(module: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is traced, but must be .* it cannot vary within"):
        jax.eval_shape(lambda x: module.make(module.Config(**{field: x})).init(jax.random.key(0), None), 1.0)


def test_what_is_not_traced_is_checked() -> None:
    with pytest.raises(ValueError, match="tau=0.0 must be greater than 0 and at most 1; 1.0 is usual"):
        dqn.make(dqn.Config(tau=0.0))
    with pytest.raises(ValueError, match="double=1 must be True or False; True is usual"):
        dqn.make(dqn.Config(double=1))  # type: ignore[arg-type]
