"""Suites of pure environments: what they share, on tiny fakes; and themselves, where their packages are installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs, testing
from podium.agents import ppo
from podium.env import auto_reset
from podium.envs import suites, wrappers
from podium.placement.anakin import Anakin
from podium.placement.sebulba import Sebulba

# Brax reads MJX's data by a name that MJX has moved.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing .* directly from `Data`:DeprecationWarning")

PACKAGES = {
    "brax": "brax",
    "mjx": "mujoco_playground",
    "craftax": "craftax",
    "xminigrid": "xminigrid",
    "jumanji": "jumanji",
    "pgx": "pgx",
}


def need(suite: str) -> Any:
    """Return a suite's module, or skip the test where its package is not installed."""
    pytest.importorskip(PACKAGES[suite], reason=f'it is in the extra: pip install "podium[{suite}]"')
    return importlib.import_module(f"podium.envs.{suite}_envs")


@flax.struct.dataclass
class FakeState:
    obs: jax.Array
    reward: Any
    done: Any
    metrics: dict
    info: dict


class Fake:
    """A point on a line, by Brax's protocol and with its habits.

    A step's types are weak, it writes into the dictionary it is handed, and it knows no limit. The point is lost at 3
    or beyond, and the simulator's numbers at -2.5 or below.
    """

    action_size = 1

    def reset(self, key):
        obs = jnp.array([jax.random.uniform(key, maxval=0.1), 1.0])
        return FakeState(obs, 0.0, 0.0, {"speed": 0}, {"key": key})

    def step(self, state, action):
        place = state.obs[0] + action[0]
        state.metrics["speed"] = action[0]
        obs = jnp.where(place <= -2.5, jnp.nan, jnp.array([place, 1.0]))
        return FakeState(obs, -place, jnp.where(place >= 3, 1.0, 0.0), state.metrics, state.info)


def fake(max_steps: int = 10, **options: Any) -> podium.Env:
    return suites.from_simulator("fake/Point", Fake(), max_steps, **{"fails_only": False, **options})


def walk(env, action, num_steps):
    state, _ = env.reset(jax.random.key(0))
    for number in range(num_steps):
        state, timestep = env.step(jax.random.key(number), state, jnp.full(1, action))
        if timestep.last:
            break
    return number + 1, timestep


def test_a_simulator_keeps_the_contract():
    testing.check_env(auto_reset(fake(), 8), num_steps=40)


def test_ends_are_told_apart_and_the_last_observation_is_the_true_one():
    steps, timestep = walk(fake(), 1.0, 20)
    assert (steps, bool(timestep.terminated), bool(timestep.truncated)) == (3, True, False)
    steps, timestep = walk(auto_reset(fake()), 0.1, 20)
    assert (steps, bool(timestep.terminated), bool(timestep.truncated)) == (10, False, True)
    assert timestep.next_obs[0] > 0.8 > 0.2 > abs(timestep.obs[0])
    steps, timestep = walk(fake(), -1.0, 20)
    assert (steps, bool(timestep.terminated), bool(timestep.truncated)) == (3, False, True)
    assert timestep.info["nonfinite"] and timestep.next_obs[0] == pytest.approx(-2, abs=0.2)


def test_done_of_a_simulator_that_only_fails_is_a_truncation():
    steps, timestep = walk(fake(fails_only=True), 1.0, 20)
    assert (steps, bool(timestep.terminated), bool(timestep.truncated)) == (3, False, True)
    assert timestep.info["nonfinite"] and timestep.reward == 0


def test_actions_are_clipped_and_metrics_are_told():
    env = fake()
    assert (env.spec.action.low, env.spec.action.high) == (-1, 1)
    _, timestep = walk(env, 7.0, 1)
    assert timestep.info["speed"] == 1 and timestep.next_obs[0] == pytest.approx(1, abs=0.2)


def test_options_of_all_suites_wrap_the_environment():
    env = suites.Options().wrap(fake(), 16)
    assert env.pool_size == 16 and not env.random_first_length
    env = suites.Options(0, 2, True, True).wrap(fake(), 16)
    assert env.pool_size == 0 and env.random_first_length and env.spec.max_episode_steps == 5
    assert set(env.spec.obs) == {"obs", "last_action", "last_reward"}
    testing.check_env(auto_reset(env), num_steps=20)
    state, _ = env.reset(jax.random.key(0))
    assert isinstance(suites.innermost(state), FakeState)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": -1}, "pool_size=-1 must be an integer of 0 or more"),
        ({"pool_size": 1.5}, "pool_size=1.5"),
        ({"action_repeat": 0}, "action_repeat=0 must be an integer of 1 or more"),
        ({"random_first_length": 1}, "random_first_length=1 must be True or False"),
        ({"show_last_action": "yes"}, "show_last_action='yes'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        suites.Options(**options)


def test_names_need_no_package(monkeypatch):
    for module in [*sys.modules, *PACKAGES.values()]:
        if module.split(".")[0] in PACKAGES.values():
            monkeypatch.setitem(sys.modules, module, None)
    known = envs.names()
    assert {"mjx/CartpoleSwingup", "brax/inverted_pendulum", "craftax/Classic-Symbolic"} < set(known)
    assert {"xminigrid/MiniGrid-Empty-8x8", "jumanji/Game2048-v1", "pgx/minatar-breakout"} < set(known)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mjx/cartpoleswingup", "mjx/CartpoleSwingup"),
        ("brax/inverted-pendulum", "brax/inverted_pendulum"),
        ("craftax/Classic-Symbolik", "craftax/Classic-Symbolic"),
        ("xminigrid/Empty-8x8", "xminigrid/MiniGrid-Empty-8x8"),
        ("jumanji/Game2048", "jumanji/Game2048-v1"),
        ("pgx/breakout", "pgx/minatar-breakout"),
        ("CartpoleSwingup", "mjx/CartpoleSwingup"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"Did you mean .*'{near}'"):
        envs.make(name)


@pytest.mark.parametrize("name", ["mjx/CartpoleSwingup", "brax/ant", "craftax/Symbolic", "pgx/minatar-asterix"])
def test_a_package_that_is_missing_is_a_sentence(name, monkeypatch):
    suite = name.split("/")[0]
    for module in [*sys.modules, PACKAGES[suite]]:
        if module.split(".")[0] == PACKAGES[suite]:
            monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf'{name} needs {PACKAGES[suite]}.*pip install "podium\[{suite}\]"'):
        envs.make(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mjx/CartpoleSwingup", {"episode_lenght": 3}, "no option 'episode_lenght'. Did you mean 'episode_length'"),
        ("mjx/CartpoleSwingup", {"episode_length": 0}, "episode_length=0"),
        ("mjx/CartpoleSwingup", {"impl": "cuda"}, "impl='cuda' is none of jax, warp"),
        ("mjx/CartpoleSwingup", {"sim_dt": -1.0}, "sim_dt=-1.0"),
        ("mjx/CartpoleSwingup", {"ctrl_dt": float("inf")}, "ctrl_dt=inf must be a finite number"),
        ("xminigrid/MiniGrid-Empty-8x8", {"max_steps": 2**40}, "max_steps=1099511627776 must be at most"),
        ("xminigrid/MiniGrid-Empty-8x8", {"height": 2}, "height=2 leaves no room between walls; use 3 or more"),
        ("xminigrid/MiniGrid-Empty-8x8", {"view_size": 4}, "view_size=4 is even"),
        ("xminigrid/MiniGrid-Empty-8x8", {"max_steps": True}, "max_steps=True"),
        ("pgx/minatar-breakout", {"sticky_action_prob": 1}, r"sticky_action_prob=1 must be a number in \[0, 1\)"),
    ],
)
def test_bad_options_are_refused_before_anything_is_imported(name, options, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("brax/ant", {"ctrl_cost_weight": "x"}, "ctrl_cost_weight='x' must be of type float, as 0.5 is"),
        ("brax/ant", {"healthy_z_range": "a"}, "healthy_z_range='a' must be 2 numbers"),
        ("brax/ant", {"healthy_z_range": (0.2, None)}, "healthy_z_range=None must be of type float"),
        ("brax/ant", {"reset_noise_scale": float("nan")}, "reset_noise_scale=nan must be finite"),
        ("brax/ant", {"terminate_when_unhealthy": 3}, "terminate_when_unhealthy=3 must be True or False"),
        ("craftax/Classic-Symbolic", {"day_length": 0}, "day_length=0 must be an integer of 1 or more; 300 is usual"),
        ("craftax/Classic-Symbolic", {"always_diamond": 1}, "always_diamond=1 must be True or False"),
    ],
)
def test_options_of_a_package_are_of_its_defaults_types(name, options, message):
    need(name.split("/")[0])
    with pytest.raises(ValueError, match=message):
        envs.make(name, **options)


def test_warp_needs_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, and JAX runs on cpu here; use 'jax'"):
        envs.make("mjx/CartpoleSwingup", impl="warp")


# What follows needs the packages.

CONTRACT = (
    "brax/fast",
    "brax/inverted_pendulum",
    "mjx/CartpoleSwingup",
    "mjx/PendulumSwingup",
    "craftax/Classic-Symbolic",
    "xminigrid/MiniGrid-DoorKey-5x5",
    *(f"jumanji/{name}" for name in ("Game2048-v1", "Maze-v0", "Snake-v1", "SlidingTilePuzzle-v0", "TSP-v1")),
    "pgx/minatar-breakout",
)


def drawable(env):
    """Return the environment without its renderer where this machine cannot draw."""
    try:
        env.render and env.render(env.reset(jax.random.key(0))[0])
    except ValueError as error:
        assert "OpenGL" in str(error)
        return env._replace(render=None)
    return env


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name):
    need(name.split("/")[0])
    testing.check_env(drawable(envs.make(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mjx/CartpoleSwingup", "pgx/minatar-breakout"])
def test_contract_with_every_option(name):
    need(name.split("/")[0])
    env = envs.make(name, pool_size=4, action_repeat=2, random_first_length=True, show_last_action=True)
    testing.check_env(auto_reset(env)._replace(render=None), num_steps=50)


PGX_GAMES = ("tic_tac_toe", "connect_four", "othello", "go_9x9", "hex", "animal_shogi", "gardner_chess")


@pytest.mark.slow
def test_names_are_those_of_the_packages():
    brax, mjx, xminigrid = need("brax"), need("mjx"), need("xminigrid")
    tasks = lambda module: {name.removeprefix(module.PREFIX) for name in module.names()}
    assert tasks(brax) == set(importlib.import_module("brax.envs")._envs) - {"swimmer"}
    assert tasks(mjx) == set(importlib.import_module("mujoco_playground").dm_control_suite.ALL_ENVS)
    grids = importlib.import_module("xminigrid").registered_environments()
    assert tasks(xminigrid) == {name for name in grids if name.startswith("MiniGrid")}
    names = importlib.import_module("pgx").available_envs() if need("pgx") else ()
    assert tasks(need("pgx")) == {name for name in names if name.startswith("minatar")} | {*PGX_GAMES}
    assert tasks(need("jumanji")) < set(importlib.import_module("jumanji").registered_environments())


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Anakin(1), Sebulba(1, 1, groups=1)])
def test_cartpole_swingup_is_learnt_from(placement):
    need("mjx")
    env, agent = envs.make("mjx/CartpoleSwingup", episode_length=20), ppo.make(ppo.Config(hidden_sizes=(8,)))
    program = placement.build(agent, env, num_envs=8, rollout_length=40)
    try:
        _, metrics = program.chunk(program.init(0), 1)
        assert np.asarray(metrics["finite"]).all()
        assert float(np.sum(metrics["episodes"])) == 2 * 8
        assert float(np.sum(metrics["nonfinite_steps"])) == 0
        testing.check_metrics(program, metrics)
    finally:
        program.close()


@pytest.mark.slow
def test_a_state_of_nan_truncates_a_control_task():
    """As the physics of Humanoid and Walker returns it now and then; Playground itself would hand the NaN on."""
    need("mjx")
    env = envs.make("mjx/CartpoleSwingup")
    state, first = env.reset(jax.random.key(0))
    lost = jax.tree_util.tree_map_with_path(
        lambda path, x: x * jnp.nan if jax.tree_util.keystr(path).endswith(("qpos", "qvel")) else x, state
    )
    _, timestep = env.step(jax.random.key(1), lost, jnp.zeros(1))
    assert timestep.info["nonfinite"] and timestep.truncated and not timestep.terminated and timestep.reward == 0
    assert np.array_equal(timestep.next_obs, first.obs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("craftax/Classic-Symbolic", {"max_timesteps": 4}),
        ("jumanji/Snake-v1", {"time_limit": 1}),
        ("jumanji/SlidingTilePuzzle-v0", {"time_limit": 4}),
        ("xminigrid/MiniGrid-Empty-8x8", {"max_steps": 4}),
        ("pgx/minatar-breakout", {"max_steps": 4}),
        ("brax/fast", {"episode_length": 4}),
    ],
)
def test_time_limits_are_truncations(name, options):
    need(name.split("/")[0])
    env = envs.make(name, **options)
    (limit,) = options.values()
    assert env.spec.max_episode_steps == limit
    state, _ = env.reset(jax.random.key(3))
    for number in range(limit):
        state, timestep = env.step(jax.random.key(number), state, env.spec.action.zeros())
        assert bool(timestep.last) == (number == limit - 1), number
    assert timestep.truncated and not timestep.terminated


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [{"ctrl_dt": 0.001, "sim_dt": 0.01}, {"ctrl_dt": 0.015}])
def test_a_step_of_mjx_is_whole_steps_of_the_physics(seconds):
    """Playground rounds their number: to none, so that nothing moved, or to another time than was asked for."""
    need("mjx")
    with pytest.raises(ValueError, match="is no multiple of sim_dt=0.01"):
        envs.make("mjx/CartpoleSwingup", **seconds)


@pytest.mark.slow
def test_craftax_refuses_values_of_another_kind():
    need("craftax")
    with pytest.raises(ValueError, match="day_length='long' must be an integer of 1 or more; 300 is usual"):
        envs.make("craftax/Classic-Symbolic", day_length="long")


@pytest.mark.slow
def test_brax_refuses_what_it_has_not():
    need("brax")
    for options, message in (
        ({"backend": "bullet"}, "backend='bullet' is none of spring"),
        ({"healthy_rewards": 1.0}, "Did you mean 'healthy_reward'"),
    ):
        with pytest.raises(ValueError, match=message):
            envs.make("brax/ant", **options)
    with pytest.raises(ValueError, match="Brax refused"):
        envs.make("brax/fast", obs_mode="pictures")


@pytest.mark.slow
def test_an_episode_of_brax_is_a_page():
    brax = need("brax")
    env = envs.make("brax/inverted_pendulum", pool_size=0)
    states = [env.reset(jax.random.key(seed))[0] for seed in range(2)]
    page = brax.html("brax/inverted_pendulum", states)
    assert page.lstrip().startswith("<") and "brax" in page.lower()


def test_random_first_length_is_asked_for_by_an_option():
    assert wrappers.random_first_length(fake()).random_first_length
