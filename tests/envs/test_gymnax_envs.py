"""The gymnax adapter, against gymnax's own stepping and against gymnasium."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.utils import load_mnist

from podium import envs
from podium.env import auto_reset, reset_key


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {"max_steps_in_episode": 12}),
        ("MountainCar-v0", {"max_steps_in_episode": 5}),
        ("Breakout-MinAtar", {"max_steps_in_episode": 9}),
        ("FourRooms-misc", {"max_steps_in_episode": 6, "resample_init_pos": True}),
        ("FrozenLake-misc", {"max_steps_in_episode": 7}),
        ("DeepSea-bsuite", {}),
        ("PointRobot-misc", {"max_steps_in_episode": 4}),
    ],
)
def test_auto_reset_goes_through_the_same_states_as_gymnax(name, options):
    env = auto_reset(envs.make(name, **options))
    theirs, params = gymnax.make(name)
    params = params.replace(**options)
    first_key, *keys = jax.random.split(jax.random.key(1), 41)
    keys = jnp.stack(keys)
    actions = jax.vmap(env.spec.action.sample)(keys)

    def our_step(state, inputs):
        return env.step(inputs[0], state, inputs[1])

    def their_step(state, inputs):
        # As gymnax's own `step`, which splits its key where podium derives a second one.
        key, action = inputs
        last_obs, state, reward, terminated, _ = theirs.step_env(key, state, action, params)
        truncated = theirs.is_truncated(state, params)
        new_obs, new_state = theirs.reset_env(reset_key(key), params)
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(terminated | truncated, n, o), new, old)
        return choose(new_state, state), (choose(new_obs, last_obs), reward, terminated, truncated, last_obs)

    @jax.jit
    def both():
        state, first = env.reset(first_key)
        their_obs, their_state = theirs.reset(first_key, params)
        ours = jax.lax.scan(our_step, state, (keys, actions))[1]
        return first.obs, their_obs, ours, jax.lax.scan(their_step, their_state, (keys, actions))[1]

    first_obs, their_first_obs, ours, (obs, reward, terminated, truncated, last_obs) = both()
    np.testing.assert_allclose(first_obs, their_first_obs)
    np.testing.assert_allclose(ours.obs, obs, atol=1e-5)
    np.testing.assert_allclose(ours.next_obs, last_obs, atol=1e-5)
    np.testing.assert_allclose(ours.reward, reward, atol=1e-6)
    np.testing.assert_array_equal(ours.terminated, terminated)
    np.testing.assert_array_equal(ours.truncated, truncated)
    assert ours.last.sum() >= 2, "the test must cross boundaries"
    assert not np.allclose(ours.obs[ours.last], ours.next_obs[ours.last])


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_dynamics_equal_gymnasium(name):
    """Step by step from the same states: gymnasium computes in float64, so whole episodes drift apart."""
    env = envs.make(name)
    step = jax.jit(env.step)
    theirs = gymnasium.make(name).unwrapped
    theirs.reset(seed=0)
    state, timestep = env.reset(jax.random.key(2))
    rng = np.random.default_rng(0)
    for t in range(60):
        obs = np.asarray(timestep.obs, np.float64)
        theirs.state = obs if name == "CartPole-v1" else np.array([np.arctan2(obs[1], obs[0]), obs[2]])
        action = int(rng.integers(2)) if name == "CartPole-v1" else rng.uniform(-3, 3, 1).astype(np.float32)
        state, timestep = step(jax.random.key(t), state, action)
        their_obs, reward, terminated, _, _ = theirs.step(action)
        np.testing.assert_allclose(timestep.obs, their_obs, atol=1e-5)
        np.testing.assert_allclose(timestep.reward, reward, atol=1e-4)
        assert bool(timestep.terminated) == terminated
        if terminated:
            break
    assert bool(timestep.terminated) == (name == "CartPole-v1")
    theirs.close()


def test_cartpole_time_limit_truncates_and_does_not_terminate():
    env = envs.make("CartPole-v1", max_steps_in_episode=3)
    state, timestep = env.reset(jax.random.key(0))
    for action in (0, 1, 0):
        assert not timestep.last
        state, timestep = env.step(jax.random.key(1), state, action)
    assert timestep.truncated and not timestep.terminated
    assert env.spec.max_episode_steps == 3


def test_continuous_actions_are_clipped_before_they_are_paid_for():
    env = envs.make("MountainCarContinuous-v0")
    state, _ = env.reset(jax.random.key(0))
    rewards = [float(env.step(jax.random.key(0), state, jnp.array([a]))[1].reward) for a in (1.0, 50.0)]
    assert rewards[0] == rewards[1] == pytest.approx(-0.1)


def test_observations_of_a_box_are_float32_and_discrete_ones_an_index():
    for name, dtype in [("Catch-bsuite", np.float32), ("FourRooms-misc", np.float32), ("FrozenLake-misc", np.int32)]:
        env = envs.make(name)
        assert env.reset(jax.random.key(0))[1].obs.dtype == dtype == env.spec.obs.dtype


def test_options_reach_constructor_and_parameters():
    env = envs.make("DeepSea-bsuite", size=5, unscaled_move_cost=0.5)
    assert env.spec.obs.shape == (5, 5) and env.spec.max_episode_steps == 5
    env = envs.make("Breakout-MinAtar", use_minimal_action_set=False)
    assert env.spec.action.num_values == 6


def test_cartpole_derived_parameters_follow_the_masses():
    heavy, told = (
        envs.make("CartPole-v1", masspole=0.5, **more) for more in ({}, {"total_mass": 1.5, "polemass_length": 0.25})
    )
    state, _ = heavy.reset(jax.random.key(0))
    outcomes = [env.step(jax.random.key(0), state, 1)[1].obs for env in (heavy, told)]
    np.testing.assert_array_equal(*outcomes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps_in_episode": 0}, "max_steps_in_episode=0 is below 1"),
        ({"max_steps_in_episode": 2.5}, "must be of type int"),
        ({"gravity": "strong"}, "gravity='strong' must be of type float"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("CartPole-v1", **options)


@pytest.mark.parametrize(("name", "options"), [("Catch-bsuite", {"rows": 0}), ("MemoryChain-bsuite", {"num_bits": 0})])
def test_sizes_that_gymnax_cannot_play_are_named(name, options):
    with pytest.raises(ValueError, match=f"gymnax cannot play {name} with {options}"):
        envs.make(name, **options)


def test_array_parameters_keep_their_shape():
    with pytest.raises(ValueError, match=r"available_torque has shape \(2,\)"):
        envs.make("Acrobot-v1", available_torque=[1.0, 2.0])


def test_missing_mnist_is_explained(monkeypatch):
    def fail():
        raise OSError("no network")

    monkeypatch.setattr(load_mnist, "load_mnist", fail)
    with pytest.raises(RuntimeError, match=r"train-images-idx3-ubyte.gz .* failed here \(no network\)"):
        envs.make("MNISTBandit-bsuite")


def test_mnist_pixels_are_read_as_unsigned(monkeypatch):
    images = np.full((1, 28, 28), 255, np.uint8).astype(np.int8)
    monkeypatch.setattr(load_mnist, "load_mnist", lambda: ((images, np.zeros(1, np.uint8)), None))
    env = envs.make("MNISTBandit-bsuite")
    assert env.reset(jax.random.key(0))[1].obs.min() == 1.0


@pytest.mark.parametrize("name", [name for name in envs.names() if name.endswith("-MinAtar")])
def test_minatar_loses_nothing_as_bool(name):
    env, (theirs, _) = envs.make(name), gymnax.make(name)
    assert np.dtype(env.spec.obs.dtype) == bool

    def step(state, key):
        state, timestep = env.step(key, state, env.spec.action.sample(key))
        return state, (timestep.obs, theirs.get_obs(state))

    @jax.jit
    def play(key):
        return jax.lax.scan(step, env.reset(key)[0], jax.random.split(key, 300))[1]

    ours, obs = play(jax.random.key(0))
    np.testing.assert_array_equal(ours.astype(float), obs)
    assert ours.any() and not ours.all()


def test_samples_of_a_bool_spec_are_both():
    sample = jax.vmap(envs.make("Breakout-MinAtar").spec.obs.sample)(jax.random.split(jax.random.key(0), 4))
    assert sample.dtype == bool and 0.45 < sample.mean() < 0.55


def test_every_state_has_strong_types():
    for name in ["CartPole-v1", "Seaquest-MinAtar", "BernoulliBandit-misc", "MetaMaze-misc"]:
        env = envs.make(name)
        state, timestep = jax.eval_shape(env.reset, jax.random.key(0))
        assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, timestep)))


def test_what_gymnax_draws_with_is_loaded_when_it_is_used():
    """Importing it takes seconds, which nobody who trains should wait for."""
    program = (
        "import sys; from podium import envs; envs.make('CartPole-v1'); assert 'scipy.stats' not in sys.modules; "
        "import seaborn, matplotlib.pyplot as plt; print(len(seaborn.color_palette('cubehelix', 3)), plt.figure)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("3 <function figure"), done.stderr
