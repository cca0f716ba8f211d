"""Observations by name: a policy that sees one part, a critic that sees another, and neither anything else."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.agent import Agent
from podium.agents import a2c, ppo, reppo, sac, td3
from podium.env import Env, restart, transition
from podium.learn import learn
from podium.networks import Network, actor_critic
from podium.placement.anakin import Anakin
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, Seen, Trajectory, is_spec

OBS = {"state": ArraySpec((2,)), "privileged_state": ArraySpec((3,))}
SPEC = EnvSpec("seen in part", OBS, ArraySpec((2,), low=-1.0, high=1.0))
PARTS = {"actor_obs": "state", "critic_obs": "privileged_state"}
REPLAY: dict[str, Any] = {
    "batch_size": 16,
    "buffer_capacity": 256,
    "min_replay_size": 16,
    "warmup_steps": 0,
    "updates_per_step": 1 / 16,
}
AGENTS: dict[str, Any] = {
    "ppo": functools.partial(ppo.Config, num_minibatches=2, num_epochs=1, normalize_obs=True, hidden_sizes=(8,)),
    "a2c": functools.partial(a2c.Config, hidden_sizes=(8,)),
    "sac": functools.partial(sac.Config, normalize_obs=True, hidden_sizes=(8,), **REPLAY),
    "td3": functools.partial(td3.Config, hidden_sizes=(8,), **REPLAY),
    "reppo": functools.partial(reppo.Config, num_minibatches=2, num_epochs=1, num_bins=11, hidden_sizes=(8,)),
}
MAKE: dict[str, Any] = {"ppo": ppo.make, "a2c": a2c.make, "sac": sac.make, "td3": td3.make, "reppo": reppo.make}


def made(name: str, **parts: str) -> Agent:
    return MAKE[name](AGENTS[name](**parts))


def observed(seed: int = 0, *leading: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {key: jnp.asarray(rng.normal(size=(*leading, *spec.shape)), jnp.float32) for key, spec in OBS.items()}


def learnt(agent: Agent, state: Any, shift: float) -> tuple[Any, Array, Array]:
    """Return the State after one iteration on a rollout whose privileged part is shifted, and actions before it."""
    obs, next_obs, no = observed(0, 4, 4), observed(1, 4, 4), jnp.zeros((4, 4), bool)
    moved = lambda obs: {**obs, "privileged_state": obs["privileged_state"] + shift}
    keys = jax.random.split(jax.random.key(0), (4, 4))
    act = lambda keys, obs: agent.act(keys, agent.actor(state), (), obs, no[0], False)
    output = jax.vmap(act)(keys, moved(obs))
    rows = (moved(obs), output.action, obs["state"][..., 0], no, no, moved(next_obs), no)
    trajectory = Trajectory(*rows, output.extras, (), (), jnp.int32(0))
    held: Any = ()
    if agent.replay is not None:
        item = jax.tree.map(lambda x: x[0, 0], agent.plan(jax.random.key(1), state, trajectory).data)
        held = agent.replay.init(item, 4, 1, 4)
    return learn(jax.random.key(2), agent, state, held, trajectory, 1).state, output.action, output.extras


def widths(state: Any) -> set[int]:
    """Return how many numbers first layers take; hidden ones have 8 units."""
    leaves = jax.tree.leaves_with_path(state.params)
    return {x.shape[-2] for path, x in leaves if "kernel" in jax.tree_util.keystr(path) and x.shape[-1] == 8} - {8}


def beside(name: str) -> int:
    """Return how many numbers of an action an agent's critic sees beside observations."""
    return 0 if name in ("ppo", "a2c") else 2


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("a2c", "sac", "td3"))) for x in AGENTS]
)
def test_the_policy_sees_its_part_alone_and_the_critic_its_own(name: str) -> None:
    agent = made(name, **PARTS)
    state = agent.init(jax.random.key(0), SPEC)
    params, keys, first = agent.actor(state), jax.random.split(jax.random.key(1), 5), jnp.zeros(5, bool)

    def action(obs: dict[str, Array]) -> Array:
        return agent.act(keys, params, (), obs, first, False).action.sum()

    slopes = jax.jit(jax.grad(action))(observed(0, 5))
    assert float(jnp.abs(slopes["privileged_state"]).max()) == 0.0 < float(jnp.abs(slopes["state"]).max())
    iteration = jax.jit(functools.partial(learnt, agent))
    (one, before, _), (other, after, _) = (iteration(state, jnp.float32(shift)) for shift in (0.0, 3.0))
    np.testing.assert_array_equal(before, after)
    # Both learn of it through the critic, whose weights are as many as its part is wide.
    assert widths(state) == {2, 3 + beside(name)}
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), one.params, other.params)
    assert max(jax.tree.leaves(moved)) > 1e-6


@pytest.mark.parametrize("name", AGENTS)
def test_of_a_seen_the_policy_sees_the_view_and_the_critic_the_world(name: str) -> None:
    view, world = {"state": ArraySpec((2,)), "rest": ArraySpec((5,))}, {"privileged_state": ArraySpec((3,))}
    both = dataclasses.replace(SPEC, obs=Seen(view, None, {**world, "more": ArraySpec((9,))}))
    key, first = jax.random.key(0), jnp.zeros(5, bool)

    def begun(spec: EnvSpec, **parts: str) -> Any:
        agent = made(name, **parts)
        state = jax.eval_shape(lambda key: agent.init(key, spec), key)
        obs = jax.tree.map(lambda leaf: leaf.zeros(5), spec.obs, is_leaf=is_spec)
        act = lambda state: agent.act(jax.random.split(key, 5), agent.actor(state), (), obs, first, False)
        assert jax.eval_shape(act, state).action.shape == (5, 2)
        return widths(state)

    assert begun(both) == {7, 12 + beside(name)}
    assert begun(both, **PARTS) == {2, 3 + beside(name)}
    alone = dataclasses.replace(SPEC, obs=Seen(view))
    assert begun(alone) == {7, 7 + beside(name)}
    assert begun(alone, actor_obs="state", critic_obs="rest") == {2, 5 + beside(name)}


@pytest.mark.parametrize("name", AGENTS)
def test_a_discrete_part_is_one_hot_where_others_are_normalised(name: str) -> None:
    spec = dataclasses.replace(SPEC, obs={"place": DiscreteSpec(5), **OBS})
    agent, key = made(name, **{**PARTS, "actor_obs": "place"}), jax.random.key(0)

    def act(key: Key) -> Any:
        state, obs = agent.init(key, spec), {"place": jnp.arange(5), **observed(0, 5)}
        params, keys = agent.actor(state), jax.random.split(key, 5)
        return state, agent.act(keys, params, (), obs, jnp.ones(5, bool), False).action

    state, action = jax.eval_shape(act, key)
    assert widths(state) == {5, 3 + beside(name)} and action.shape == (5, 2)


@pytest.mark.parametrize("name", AGENTS)
def test_what_is_no_part_is_refused_before_any_compile(name: str) -> None:
    key = jax.random.key(0)
    words = "critic_obs='privileged_stat' is no part of the observations of seen in part. Did you mean "
    with pytest.raises(ValueError, match=re.escape(f"{words}'privileged_state'? They have: privileged_state, state.")):
        made(name, actor_obs="state", critic_obs="privileged_stat").init(key, SPEC)
    with pytest.raises(
        ValueError, match=re.escape("actor_obs='x' is no part of the observations of seen in part. They")
    ):
        made(name, actor_obs="x").init(key, SPEC)
    with pytest.raises(ValueError, match="actor_obs='state': the observations of .* have no parts by name; leave"):
        Anakin(1).build(made(name, actor_obs="state"), podium.envs.make("Pendulum-v1"), num_envs=4, rollout_length=4)


@pytest.mark.parametrize("memory", ["gru", "lstm"])
def test_with_a_memory_each_sees_and_remembers_its_own_part(memory: str) -> None:
    network: Network = actor_critic((8,), memory=memory, memory_size=4, **PARTS)
    params, obs = network.init(jax.random.key(0), SPEC), observed(0, 6, 5)
    first = jnp.zeros((6, 5), bool).at[3, 1].set(True)
    moved = {**obs, "privileged_state": obs["privileged_state"].at[0].add(1)}
    one, other = (network.unroll(params, network.carry(5), x, first) for x in (obs, moved))
    np.testing.assert_array_equal(one.policy.mode(), other.policy.mode())
    # What the critic saw at first it remembers to the end, but where an episode began.
    last = np.abs(np.asarray(one.value - other.value))[-1]
    assert last[1] == 0 < np.delete(last, 1).min()
    held = network.carry(5)
    for t in range(6):
        step, held = network.apply(params, held, jax.tree.map(lambda x: x[t], obs), first[t])  # noqa: B023
        np.testing.assert_allclose(step.value, one.value[t], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(step.policy.mode(), one.policy.mode()[t], rtol=1e-5, atol=1e-6)


def test_one_torso_for_both_sees_one_part() -> None:
    with pytest.raises(ValueError, match="actor_obs='state' and critic_obs='privileged_state' differ, but in agents"):
        actor_critic(shared=True, **PARTS)
    network: Network = actor_critic((8,), memory="gru", memory_size=4, actor_obs="state", critic_obs="state")
    params, obs, first = network.init(jax.random.key(0), SPEC), observed(0, 5), jnp.zeros(5, bool)
    one, _ = network.apply(params, network.carry(5), obs, first)
    other, _ = network.apply(params, network.carry(5), {**obs, "privileged_state": obs["privileged_state"] + 1}, first)
    np.testing.assert_array_equal(one.value, other.value)


def hidden_reward() -> Env:
    """Make an environment of one step that pays for what the critic alone sees, and a little for an action of 0.5."""
    obs = {"state": ArraySpec((1,)), "privileged_state": ArraySpec((1,))}

    def reset(key: Key) -> Any:
        hidden = jax.random.choice(key, jnp.array([-5.0, 5.0]), (1,))
        return hidden, restart({"state": jnp.ones(1), "privileged_state": hidden})

    def step(key: Key, state: Any, action: Array) -> Any:
        reward = state[0] - jnp.sum(jnp.square(action - 0.5))
        return state, transition({"state": jnp.ones(1), "privileged_state": state}, reward, jnp.ones((), bool))

    return Env(EnvSpec("hidden", obs, ArraySpec((1,), low=-1.0, high=1.0), 1), reset, step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sac", "td3", "reppo"])
def test_the_critic_learns_what_is_hidden_from_the_policy(name: str) -> None:
    """Half of the time the reward is 5 higher: a critic that does not see of which errs by 5."""
    rates = {"learning_rate": 3e-3, "gamma": 0.9, "hidden_sizes": (32,)}
    if name in ("sac", "td3"):
        own: dict[str, Any] = {"critic_learning_rate": 3e-3, "updates_per_step": 1 / 4, "buffer_capacity": 4096}
    elif name == "reppo":
        own = {"value_min": -10.0, "value_max": 10.0, "num_bins": 81, "num_epochs": 4, "num_minibatches": 4}
    else:
        own = {"num_minibatches": 4, "squash": True, "entropy_coef": 0.0}
    config = type(AGENTS[name]())(**{**AGENTS[name].keywords, **rates, **own, **PARTS})
    agent = MAKE[name](config)
    program = Anakin(devices=1).build(
        agent, hidden_reward(), num_envs=8, rollout_length=8, num_lanes=1, max_updates=150
    )
    state, metrics = program.chunk(program.init(0), 150)
    params, obs = agent.actor(program.agent_state(state)), observed(0, 1)
    obs = {"state": jnp.ones((1, 1)), "privileged_state": obs["privileged_state"][:, :1]}
    keys, first = jax.random.split(jax.random.key(0), 1), jnp.ones(1, bool)
    np.testing.assert_allclose(agent.act(keys, params, (), obs, first, True).action, 0.5, atol=0.25)
    error = {"ppo": "value_loss", "reppo": "value_error"}.get(name, "loss")
    assert float(np.mean(metrics[error][-10:])) < 1.0, "blind to it: 12.5, 5 and 25"
