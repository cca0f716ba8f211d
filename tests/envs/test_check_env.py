"""check_env finds what is broken, the probes are worth what they say, and assert_compiles_once counts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import testing
from podium.env import auto_reset
from podium.envs import games, native
from podium.testing import ContractError, assert_compiles_once, check_env
from podium.types import ArraySpec, DiscreteSpec

CORRIDOR = native.corridor(length=3, max_steps=8)
CATCH = native.catch(rows=3, columns=3)
LEAKED = []


def after_step(change):
    """Break the TimeStep of CORRIDOR's step by `change(timestep, key, state)`."""

    def step(key, state, action):
        new_state, timestep = CORRIDOR.step(key, state, action)
        return new_state, change(timestep, key, state)

    return CORRIDOR._replace(step=step)


def spec_with(**changes):
    return CORRIDOR._replace(spec=dataclasses.replace(CORRIDOR.spec, **changes))


def weak_state():
    def reset(key):
        state, timestep = CORRIDOR.reset(key)
        return state._replace(time=0), timestep

    def step(key, state, action):
        return CORRIDOR.step(key, state._replace(time=jnp.asarray(state.time, jnp.int32)), action)

    return CORRIDOR._replace(reset=reset, step=step)


def float_state():
    def step(key, state, action):
        state, timestep = CORRIDOR.step(key, state, action)
        return state._replace(time=state.time * 1.0), timestep

    return CORRIDOR._replace(step=step)


def branches_in_python():
    def step(key, state, action):
        return CORRIDOR.step(key, state, 1 if action > 0 else 0)

    return CORRIDOR._replace(step=step)


def leaks():
    def step(key, state, action):
        LEAKED.append(action + 1)
        return CORRIDOR.step(key, state, action)

    return CORRIDOR._replace(step=step)


def self_reset_that_loses_the_end():
    def step(key, state, action):
        state, timestep = auto_reset(CATCH).step(key, state, action)
        return state, timestep._replace(next_obs=timestep.obs)

    return auto_reset(CATCH)._replace(step=step)


TURNS = games.tic_tac_toe()
AGENTS = games.tag(num_taggers=1, num_runners=2, num_seen=1, max_steps=5)


def after(env, change, **spec):
    """Break the TimeSteps of a game by `change(timestep)`, and fields of its spec."""

    def reset(key):
        state, timestep = env.reset(key)
        return state, change(timestep)

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, change(timestep)

    return env._replace(reset=reset, step=step, spec=dataclasses.replace(env.spec, **spec))


def see(**change):
    return lambda timestep: timestep._replace(
        **{name: getattr(timestep, name)._replace(**change) for name in ("obs", "next_obs")}
    )


def same(timestep):
    return timestep


BROKEN_GAMES = {
    "nothing legal": (after(TURNS, see(legal=jnp.zeros(9, bool))), "legal marks no action"),
    "legal of others": (
        after(TURNS, same, obs=TURNS.spec.obs._replace(legal=ArraySpec((8,), np.bool_))),
        r"spec.obs.legal is bool\[8\], but there are \[9\] actions",
    ),
    "turn of 0": (after(TURNS, lambda ts: ts._replace(turn=0 * ts.turn)), "turn is neither -1 nor 1"),
    "turn of another": (
        after(TURNS, lambda ts: ts._replace(turn=jnp.abs(ts.turn))),
        "does not say what obs.player does",
    ),
    "no turn": (after(TURNS, lambda ts: ts._replace(turn=None)), "turn=None, but spec.turns=True"),
    "turns unsaid": (after(TURNS, same, turns=False), "but spec.turns=False"),
    "one reward for all": (
        after(AGENTS, lambda ts: ts._replace(reward=ts.reward.sum())),
        r"reward as float32\[\]. It must be float32, \[3\], one an agent",
    ),
    "agents unsaid": (after(AGENTS, same, num_agents=None), r"reward as float32\[3\]"),
    "actions of others": (
        after(AGENTS, same, action=DiscreteSpec(9, shape=(2,))),
        "step cannot be traced|spec.action has",
    ),
    "ends of each": (
        after(AGENTS, lambda ts: ts._replace(terminated=ts.valid)),
        r"terminated as bool\[3\]. It must be bool, a scalar",
    ),
    "valid of others": (
        after(AGENTS, lambda ts: ts._replace(valid=ts.valid[:2])),
        r"valid as bool\[2\]. It must be bool, a scalar or \[3\], one an agent",
    ),
    "turns of all at once": (after(AGENTS, same, turns=True), "spec.turns is True where agents act together"),
}


@pytest.mark.parametrize("name", list(BROKEN_GAMES))
def test_broken_game_is_named(name):
    env, message = BROKEN_GAMES[name]
    with pytest.raises(ContractError, match=message):
        check_env(env, num_steps=20)


def numpy_noise(timestep, key, state):
    return timestep._replace(reward=timestep.reward + np.float32(np.random.default_rng().normal()))


def infinite_behind(timestep):
    obs = timestep.obs / timestep.obs[:1]  # Only the first cell is not infinite.
    return timestep._replace(obs=obs, next_obs=obs)


BROKEN = {
    "pair": (CORRIDOR._replace(reset=lambda key: CORRIDOR.reset(key)[1]), "reset does not return a pair"),
    "obs shape": (spec_with(obs=ArraySpec((4,))), r"float32\[3\], but spec.obs says float32\[4\]"),
    "obs dtype": (spec_with(obs=ArraySpec((3,), np.uint8)), r"but spec.obs says uint8\[3\]"),
    "obs bounds": (spec_with(obs=ArraySpec((3,), np.float32, 0, 0.5)), "leaves the bounds of spec.obs"),
    "shape of bounds": (
        spec_with(obs=ArraySpec((3,), np.float32, [0, 0], 1)),
        r"of shape \[3\] has a low of shape \[2\]",
    ),
    "obs structure": (spec_with(obs={"cell": ArraySpec((3,))}), "of structure"),
    "spec": (spec_with(max_episode_steps=0), "max_episode_steps=0"),
    "reward dtype": (after_step(lambda ts, *_: ts._replace(reward=ts.reward.astype(int))), "reward as int32"),
    "reward shape": (after_step(lambda ts, *_: ts._replace(reward=ts.reward[None])), r"reward as float32\[1\]"),
    "flag": (after_step(lambda ts, *_: ts._replace(terminated=ts.reward)), "terminated as float32"),
    "info": (
        after_step(lambda ts, *_: ts._replace(info={"lives": ts.reward})),
        r"TimeStep has another structure .*lives",
    ),
    "end": (
        after(
            CORRIDOR,
            lambda ts: ts._replace(info={"episode_end": jnp.any(ts.obs[1:] > 0)}),
        ),
        'info."episode_end". is set where no flag is',
    ),
    "nan": (after_step(lambda ts, *_: ts._replace(reward=jnp.nan * ts.reward)), "reward is not finite"),
    "next_obs": (after_step(lambda ts, *_: ts._replace(next_obs=0 * ts.obs)), "without resets_itself"),
    "weak": (weak_state(), r"state.time is weakly typed only after reset"),
    "dtype": (float_state(), r"state.time is int32\[\] after reset and float32\[\] after step"),
    "branch": (branches_in_python(), "step cannot be traced by jax. .*jnp.where"),
    "leak": (leaks(), "leaked tracer"),
    "impure": (after_step(numpy_noise), "two results for one key"),
    "limit": (spec_with(max_episode_steps=3), "an episode went on for [0-9]+ steps"),
    "lost end": (self_reset_that_loses_the_end(), "is the first observation of the next one"),
    "infinite": (after(CORRIDOR, lambda ts: infinite_behind(ts)), "obs is not finite. .*truncate_nonfinite"),
    "no bound": (spec_with(obs=ArraySpec((3,), np.float32, np.nan, 1)), "an ArraySpec has NaN for a bound"),
    "render raises": (CORRIDOR._replace(render=lambda state: state.nothing), "render raises AttributeError"),
    "render": (CORRIDOR._replace(render=lambda state: np.zeros((4, 4))), r"render returns float64\[4, 4\]"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_environment_is_named(name):
    env, message = BROKEN[name]
    with pytest.raises(ContractError, match=message) as error:
        check_env(env, num_steps=30)
    assert isinstance(error.value, ValueError)
    if "(" not in message:
        assert str(error.value).count(".") >= 1, "the message says how to mend it"


def test_rounding_at_a_lower_bound_is_no_break():
    """float32 has no -1000.7: what is nearest lies below."""
    shown = lambda ts: ts._replace(obs=ts.obs - 1000.7, next_obs=ts.next_obs - 1000.7)
    check_env(after(CORRIDOR, shown, obs=ArraySpec((3,), np.float32, -1000.7, 0)), num_steps=5)


def test_check_env_refuses_no_steps():
    with pytest.raises(ValueError, match="num_steps=0"):
        check_env(CORRIDOR, num_steps=0)


@jax.tree_util.register_pytree_node_class
class Labelled:
    """An array with a label that is equal to others of its kind and prints as its address, as MJX's arrays do."""

    class Label:
        """Equal to every other."""

        def __eq__(self, other):
            return isinstance(other, Labelled.Label)

        def __hash__(self):
            return 0

    def __init__(self, value, label=None):
        self.value, self.label = value, label

    def tree_flatten(self):
        return (self.value,), Labelled.Label()

    @classmethod
    def tree_unflatten(cls, label, values):
        return cls(*values, label)


def test_structures_are_compared_and_not_what_they_print():
    def reset(key):
        state, timestep = CORRIDOR.reset(key)
        return Labelled(state), timestep

    def step(key, state, action):
        state, timestep = CORRIDOR.step(key, state.value, action)
        return Labelled(state), timestep

    check_env(CORRIDOR._replace(reset=reset, step=step, render=None), num_steps=30)


def test_what_only_jax_caches_keep_is_no_leak():
    """As jaxopt's line search does: a jitted function's static argument closes over a traced value."""

    @functools.partial(jax.jit, static_argnums=0)
    def apply(function, x):
        return jax.jit(lambda f, x: f(x), static_argnums=0)(function, x)

    def step(key, state, action):
        position = state.position.astype(jnp.float32)
        zero = apply(lambda x: x * position, jnp.float32(0))
        state, timestep = CORRIDOR.step(key, state, action)
        return state, timestep._replace(reward=timestep.reward + zero)

    check_env(CORRIDOR._replace(step=step), num_steps=30)


def test_a_leak_from_inside_a_loop_is_found():
    def step(key, state, action):
        def body(i, x):
            LEAKED.append(x + 1)
            return x

        jax.lax.fori_loop(0, 2, body, jnp.float32(0))
        return CORRIDOR.step(key, state, action)

    with pytest.raises(ContractError, match="leaked tracer"):
        check_env(CORRIDOR._replace(step=step), num_steps=30)


def discounted_values(env, gamma, policy, num_steps):
    """Return the value of every step of one endless run by backing up; truncation bootstraps from the same run."""
    env = auto_reset(env)
    state, timestep = env.reset(jax.random.key(0))
    step, rewards, discounts = jax.jit(env.step), [], []
    for t in range(num_steps):
        state, timestep = step(jax.random.key(t), state, policy(timestep.obs))
        rewards.append(float(timestep.reward))
        discounts.append(0.0 if timestep.terminated else gamma)
    value, values = 0.0, []
    for reward, discount in zip(reversed(rewards), reversed(discounts), strict=True):
        value = reward + discount * value
        values.append(value)
    return values[::-1]


def test_probe_values_are_those_documented():
    gamma = 0.5
    value = lambda env, n=40: discounted_values(env, gamma, lambda obs: 0, n)
    assert value(testing.probe_value(3.0))[0] == 3
    assert value(testing.probe_truncation(3.0, 5))[0] == pytest.approx(3 / (1 - gamma))
    expected = [3 * (1 - gamma ** (3 - t)) / (1 - gamma) for t in range(3)]
    assert value(testing.probe_termination(3.0, 3), 6)[:3] == pytest.approx(expected)
    assert value(testing.probe_discount(3.0), 2) == [gamma * 3, 3]


def test_probe_truncation_only_truncates_and_termination_only_terminates():
    for probe, terminates in [(testing.probe_truncation(), False), (testing.probe_termination(), True)]:
        state, timestep = probe.reset(jax.random.key(0))
        while not timestep.last:
            state, timestep = probe.step(jax.random.key(0), state, 0)
        assert bool(timestep.terminated) == terminates == (not bool(timestep.truncated))


def test_probe_policy_pays_for_the_action_shown():
    env = testing.probe_policy(3)
    state, timestep = env.reset(jax.random.key(0))
    rewards = [float(env.step(jax.random.key(0), state, action)[1].reward) for action in range(3)]
    assert np.argmax(rewards) == timestep.obs.argmax() and sorted(rewards) == [-1, -1, 1]


def test_probe_continuous_has_its_best_action_at_the_target():
    env = testing.probe_continuous(0.25)
    state, _ = env.reset(jax.random.key(0))
    rewards = [float(env.step(jax.random.key(0), state, jnp.array([a]))[1].reward) for a in (-1.0, 0.25, 1.0)]
    assert rewards == pytest.approx([-1.5625, 0, -0.5625])


def test_probe_environments_are_all_of_them():
    of_one = {name for name in testing.__all__ if name.startswith("probe_")} - {"probe_environments", "probe_team"}
    assert set(testing.probe_environments()) == of_one


def test_assert_compiles_once_passes_one_compilation():
    double = jax.jit(lambda x: 2 * x)
    with assert_compiles_once(double):
        for value in (jnp.zeros(3), jnp.ones(3)):
            double(value)
    with assert_compiles_once(double):
        double(jnp.ones(3))


def test_assert_compiles_once_catches_a_weak_type():
    double = jax.jit(lambda x: 2 * x)
    with pytest.raises(ContractError, match="compiled 2 times"), assert_compiles_once(double):
        double(1.0)
        double(jnp.float32(1.0))


def test_assert_compiles_once_wants_a_call_of_a_jitted_function():
    with pytest.raises(ContractError, match="never called"), assert_compiles_once(jax.jit(lambda x: x)):
        pass
    with pytest.raises(ValueError, match="not jitted"), assert_compiles_once(lambda x: x):
        pass
