"""Every environment keeps the contract of podium.env.Env, also when its batch lies on several devices."""

from __future__ import annotations

import gymnax
import jax
import numpy as np
import pytest
from gymnax.utils import load_mnist
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from podium import envs, testing
from podium.env import Env, auto_reset
from podium.envs import wrappers
from podium.envs.atari import states
from podium.envs.atari.games import find

PURE = [name for name in envs.names() if name in gymnax.registered_envs or name.startswith("podium/")]

# One of each kind of state, observation and action: every environment through this would double the time.
SHARDED = ["podium/Catch", "CartPole-v1", "Pendulum-v1", "FrozenLake-misc"]


@pytest.fixture
def make(monkeypatch):
    """Make environments as podium does, with eight random digits in place of MNIST, which would be downloaded."""
    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28)).astype(np.int8)  # int8 as gymnax reads them.
    monkeypatch.setattr(load_mnist, "load_mnist", lambda: ((images, np.arange(8, dtype=np.uint8)), None))
    return envs.make


@pytest.mark.parametrize("name", PURE)
def test_contract(make, name):
    testing.check_env(make(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("atari/Pong", {"observation": "ram"}),
        pytest.param("atari/SpaceInvaders", {"observation": "ram", "sticky_actions": 0.25}, marks=pytest.mark.slow),
        pytest.param("atari/Breakout", {"life_loss": True}, marks=pytest.mark.slow),
    ],
)
def test_atari_contract(make, name, options):
    """Frames are dear without a GPU: short episodes, of which several end."""
    roms = pytest.importorskip("ale_py.roms", reason='ale-py is in the extra: pip install "podium[atari]"')
    ale_py = pytest.importorskip("ale_py")
    game = find(name.removeprefix("atari/"))
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(game.rom))
    begin = states.from_ale(ale, game)
    env = make(name, frame_skip=2, max_episode_frames=10, start_states=begin, **options)
    testing.check_env(env, num_steps=12)


@pytest.mark.parametrize("name", list(testing.probe_environments()))
def test_probes_keep_the_contract(name):
    testing.check_env(testing.probe_environments()[name], num_steps=20)


@pytest.mark.parametrize("probe", [testing.probe_truncation, testing.probe_termination])
def test_probes_for_continuous_agents_keep_the_contract(probe):
    env = probe(continuous=True)
    assert env.spec.action.shape == (1,)
    testing.check_env(env, num_steps=20)


@pytest.mark.parametrize(("name", "pool_size"), [("CartPole-v1", 0), ("podium/Catch", 4)])
def test_contract_after_auto_reset(name, pool_size):
    testing.check_env(auto_reset(envs.make(name), pool_size))


def all_wrappers(env: Env) -> Env:
    env = wrappers.sticky_actions(wrappers.clip_reward(wrappers.scale_reward(env, 0.5)))
    return wrappers.frame_stack(wrappers.episode_statistics(env), 2)


@pytest.mark.parametrize(
    "compose", [lambda env: auto_reset(all_wrappers(env)), lambda env: all_wrappers(auto_reset(env))]
)
def test_wrappers_keep_the_contract(compose):
    testing.check_env(compose(wrappers.time_limit(envs.make("podium/Corridor"), 7)), num_steps=40)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_rollout_equals_single_device(name):
    num_devices = min(2, len(jax.devices()))
    if num_devices == 1:
        pytest.skip("one device only; set jax_num_cpu_devices")
    env = auto_reset(envs.make(name))

    def rollout(key):
        reset_key, steps_key = jax.random.split(key)

        def step(state, key):
            act_key, step_key = jax.random.split(key)
            return env.step(step_key, state, env.spec.action.sample(act_key))

        return jax.lax.scan(step, env.reset(reset_key)[0], jax.random.split(steps_key, 12))

    mesh = jax.make_mesh((num_devices,), ("env",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 2 * num_devices)
    run = jax.jit(jax.vmap(rollout))
    single = run(keys)
    sharded = run(jax.device_put(keys, NamedSharding(mesh, PartitionSpec("env"))))
    assert len(sharded[1].reward.devices()) == num_devices
    jax.tree.map(np.testing.assert_array_equal, single, sharded)
