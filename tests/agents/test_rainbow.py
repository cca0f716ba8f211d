"""Rainbow: its heads by hand, against rlax and as the scalar TD target; its noise; what is DQN's is tested there."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import noisy
from podium.agent import Agent, policy_leaves
from podium.agents import dqn, rainbow
from podium.networks import actor_critic, q_network
from podium.ops.categorical import Support
from podium.replay import Batch
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

SPEC = EnvSpec("test", ArraySpec((4,)), DiscreteSpec(3))
SMALL = rainbow.Config(batch_size=16, buffer_capacity=256, min_replay_size=32, hidden_sizes=(8,), num_atoms=11)
N, A, Z = 12, 3, 11


def make(**fields: Any) -> Agent:
    return rainbow.make(dataclasses.replace(SMALL, **fields))


def drawn(seed: int, *shape: int) -> tuple[dqn.Values, Batch]:
    """Return random outputs [N, A, *shape] of three networks, and transitions of which some terminate."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=(N, *shape)).astype(np.float32)
    discount = np.where(rng.random(N) < 0.25, 0.0, 0.9).astype(np.float32)
    batch = Batch(draw(1), rng.integers(A, size=N), 2 * draw(), discount, draw(1))
    return dqn.Values(*(3 * draw(A, *shape) for _ in range(3))), batch


@pytest.mark.filterwarnings("ignore:Rlax:PendingDeprecationWarning")
def test_the_c51_loss_is_that_of_rlax(rlax: Any) -> None:
    config = dataclasses.replace(SMALL, v_min=-4.0, v_max=6.0)
    values, batch = drawn(0, Z)
    atoms = jnp.linspace(-4.0, 6.0, Z)
    means = lambda logits: jax.nn.softmax(logits) @ atoms
    for double in (True, False):
        total, aux = rainbow.c51_loss(dataclasses.replace(config, double=double), values, batch)
        selector = means(values.next_value if double else values.next_target_value)
        expected = jax.vmap(rlax.categorical_double_q_learning, (None, 0, 0, 0, 0, None, 0, 0))(
            atoms, values.value, batch.action, batch.reward, batch.discount, atoms, values.next_target_value, selector
        )
        np.testing.assert_allclose(total, expected.mean(), rtol=1e-5)
        np.testing.assert_allclose(aux.metrics["loss"], total)
        # What no gradient can change of the cross entropy is the entropy of the target: less than it, and not below 0.
        assert (aux.priorities >= 0).all() and (aux.priorities <= expected + 1e-5).all()


def test_the_quantile_loss_is_that_of_rlax(rlax: Any) -> None:
    values, batch = drawn(1, Z)
    tau = (jnp.arange(Z) + 0.5) / Z
    total, aux = rainbow.quantile_loss(SMALL, values, batch)
    # Time comes first there, quantiles before actions, and the selector is a distribution.
    swap = lambda x: jnp.swapaxes(x, -1, -2)
    rows = swap(values.value), tau, batch.action, batch.reward, batch.discount
    expected = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))(
        *rows, swap(values.next_value), swap(values.next_target_value), 1.0
    )
    np.testing.assert_allclose(aux.priorities, expected, rtol=1e-4)
    np.testing.assert_allclose(total, expected.mean(), rtol=1e-5)


def test_a_point_mass_is_the_scalar_td_target() -> None:
    """Nearly all mass on an atom: values and TD errors are those of `dqn.loss` of these atoms' values."""
    config = dataclasses.replace(SMALL, v_min=-5.0, v_max=5.0, huber_delta=1.0)
    support = Support(-5.0, 5.0, Z)
    index = np.random.default_rng(2).integers(2, 9, size=(3, N, A))
    atoms, batch = support.atoms()[index], drawn(2)[1]
    # What moves from atoms -3 to 3 by rewards within 2 stays inside the support: nothing is clipped.
    batch = batch._replace(reward=jnp.clip(batch.reward, -2, 2))
    logits = dqn.Values(*(40.0 * jax.nn.one_hot(index, Z)))
    quantiles = dqn.Values(*jnp.broadcast_to(atoms[..., None], (3, N, A, Z)))
    expected = dqn.loss(config, dqn.Values(*atoms), batch)[1].metrics
    for found in (rainbow.c51_loss(config, logits, batch), rainbow.quantile_loss(config, quantiles, batch)):
        for metric in ("q_mean", "td_error_abs"):
            np.testing.assert_allclose(found[1].metrics[metric], expected[metric], rtol=1e-4)


def test_c51_by_hand() -> None:
    """Atoms -1, 0, 1. Termination with reward 0.5: half of the mass at 0, half at 1, wherever the next state leads.

    Of uniform predictions the cross entropy is log 3, and the divergence log 3 - log 2. The second transition leads to
    all of the mass at 1 (probabilities e^40 to 1), discounted by 0.5 and with reward -0.5, so to 0: log 3 both.
    """
    config = dataclasses.replace(SMALL, num_atoms=3, v_min=-1.0, v_max=1.0)
    following = jnp.zeros((2, 2, 3)).at[:, 1, 2].set(40.0)
    batch = Batch(jnp.zeros(2), jnp.array([0, 1]), jnp.array([0.5, -0.5]), jnp.array([0.0, 0.5]), jnp.zeros(2))
    values = dqn.Values(jnp.zeros((2, 2, 3)), following, following)
    total, aux = rainbow.c51_loss(config, values, batch)
    np.testing.assert_allclose(total, np.log(3), rtol=1e-6)
    np.testing.assert_allclose(aux.priorities, [np.log(3) - np.log(2), np.log(3)], rtol=1e-5)
    np.testing.assert_allclose(aux.metrics["target_outside"], 0.0, atol=1e-6)
    np.testing.assert_allclose(aux.metrics["td_error_abs"], 0.5 / 2, atol=1e-6)
    total, aux = rainbow.c51_loss(config, values, batch._replace(weight=jnp.array([0.0, 0.5])))
    np.testing.assert_allclose(total, 0.5 * np.log(3), rtol=1e-6)
    _, aux = rainbow.c51_loss(config, values, batch._replace(reward=jnp.array([1.5, 0.0])))
    np.testing.assert_allclose(aux.metrics["target_outside"], 0.5, rtol=1e-6)


@pytest.mark.parametrize("head", ["c51", "qr"])
def test_no_gradient_passes_the_target(head: str) -> None:
    values, batch = drawn(3, Z)
    loss = rainbow.HEADS[head](SMALL).loss
    gradient = jax.grad(lambda values: loss(SMALL, values, batch)[0])(values)
    assert (gradient.next_value == 0).all() and (gradient.next_target_value == 0).all()
    moved = np.abs(gradient.value).max(-1) > 0
    np.testing.assert_array_equal(moved, np.arange(A) == batch.action[:, None])


def test_dueling_is_of_each_atom() -> None:
    network = q_network((8,), dueling=True, num_atoms=Z)
    params = network.init(jax.random.key(0), SPEC)
    obs = jax.random.normal(jax.random.key(1), (5, 4))
    logits = network.unroll(params, (), obs, jnp.zeros(5, bool))
    assert logits.shape == (5, 3, Z)
    hidden = jax.nn.relu(obs @ params["torso"]["params"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(logits.mean(1), hidden @ params["value"]["kernel"], rtol=1e-5, atol=1e-6)


def test_a_scalar_head_and_no_noise_are_dqn_with_its_replay() -> None:
    ours = make(head="scalar", noisy=False, epsilon_start=1.0, priority_exponent=0.0, importance_exponent=0.0)
    theirs = dqn.make(ours.config, buffer=ours.replay)
    state = ours.init(jax.random.key(0), SPEC)
    jax.tree.map(np.testing.assert_array_equal, state, theirs.init(jax.random.key(0), SPEC))
    obs = jax.random.normal(jax.random.key(1), (64, 4))
    keys, params = jax.random.split(jax.random.key(2), 64), ours.actor(state)
    np.testing.assert_array_equal(acted(ours, params, obs, keys), acted(theirs, params, obs, keys))
    batch = Batch(obs, jnp.arange(64) % 3, jnp.ones(64), jnp.full(64, 0.9), obs[::-1])
    found, expected = (agent.grad(jax.random.key(3), state, batch) for agent in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def acted(agent: Agent, params: Any, obs: Any, keys: Any, greedy: bool = False) -> np.ndarray:
    act = jax.jit(agent.act, static_argnums=5)
    return np.asarray(act(keys, params, (), obs, jnp.ones(len(obs), bool), greedy).action)


def test_noise_is_each_environments_own_and_greedy_play_has_none() -> None:
    agent = make(noisy_std=3.0)
    params = agent.actor(agent.init(jax.random.key(0), SPEC))
    obs = jnp.broadcast_to(jnp.array([1.0, -2.0, 3.0, 0.5]), (300, 4))
    keys = jax.random.split(jax.random.key(1), 300)
    action = acted(agent, params, obs, keys)
    assert len(np.unique(action)) == 3 and float(params.epsilon) == 0.0
    np.testing.assert_array_equal(acted(agent, params, obs[:100], keys[:100]), action[:100])
    best = acted(agent, params, obs, keys, greedy=True)
    plain = make(noisy=False, epsilon_start=1.0)
    without = plain.actor(plain.init(jax.random.key(0), SPEC))
    np.testing.assert_array_equal(best, acted(plain, without, obs, keys, greedy=True))
    assert len(np.unique(best)) == 1


def test_a_gradient_step_draws_one_noise_for_each_network() -> None:
    agent = make()
    network = q_network((8,), dueling=True, num_atoms=Z, noisy_std=0.5)
    state = agent.init(jax.random.key(0), SPEC)
    obs = jax.random.normal(jax.random.key(1), (N, 4))
    batch = drawn(4)[1]._replace(obs=obs, next_obs=obs[::-1])
    key, first = jax.random.key(2), jnp.zeros(N, bool)
    found, aux = jax.jit(agent.grad)(key, state, batch)
    online, target = (noisy.sample(key, state.params) for key in jax.random.split(key))

    def loss(params: Any) -> Any:
        see = lambda params, noise, obs: network.unroll(noisy.perturb(params, noise), (), obs, first)
        following = see(state.params, online, batch.next_obs), see(state.target_params, target, batch.next_obs)
        return rainbow.c51_loss(SMALL, dqn.Values(see(params, online, batch.obs), *following), batch)[0]

    total, expected = jax.jit(jax.value_and_grad(loss))(state.params)
    np.testing.assert_allclose(aux.metrics["loss"], total, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected)
    other = jax.jit(agent.grad)(jax.random.key(3), state, batch)[0]
    assert np.abs(other["value"]["kernel"] - found["value"]["kernel"]).max() > 1e-4


def test_deviations_are_no_part_of_the_greedy_policy() -> None:
    agent = make()
    shapes = jax.eval_shape(lambda: agent.init(jax.random.key(0), SPEC))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for path, marked in zip(paths, policy_leaves(agent, shapes), strict=True):
        assert marked == (path.startswith(".params") and "_std" not in path), path


# One state, with a reward of 1 for action 1 only, in episodes of two steps that terminate or are cut; see test_dqn.
@pytest.mark.slow
@pytest.mark.parametrize("head", ["c51", "qr"])
@pytest.mark.parametrize(("end", "value"), [("truncated", 2.0), ("terminated", 4 / 3)])
def test_learns_the_value_that_the_kind_of_end_implies(
    head: str, end: str, value: float, learnt_in_one_state: Any
) -> None:
    config = rainbow.Config(
        learning_rate=3e-3,
        gamma=0.5,
        n_step=1,
        head=head,
        num_atoms=21,
        v_min=-1.0,
        v_max=3.0,
        batch_size=128,
        num_updates=16,
        buffer_capacity=512,
        min_replay_size=64,
        target_update_period=20,
        hidden_sizes=(16,),
    )
    state = learnt_in_one_state(rainbow.make(config), end)
    network = q_network((16,), dueling=True, num_atoms=21)
    outputs = network.unroll(state.params, (), jnp.ones((1, 1)), jnp.zeros(1, bool))
    np.testing.assert_allclose(rainbow.HEADS[head](config).mean(outputs)[0], [value - 1, value], atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["scalar", "qr"])
def test_other_heads_train_and_on_eight_devices_the_same(head: str) -> None:
    agent = make(head=head, num_updates=2, min_replay_size=64)
    runs = []
    for placement in (podium.Anakin(1), podium.Anakin(8)):
        sizes = {"num_envs": 8, "rollout_length": 4, "num_lanes": 8, "max_updates": 3}
        program = placement.build(agent, podium.envs.make("podium/Catch"), **sizes)
        state, metrics = program.chunk(program.init(0), 3)
        np.testing.assert_array_equal(np.isfinite(metrics["loss"]), [False, True, True])
        runs.append(jax.device_get((agent.actor(state.agent), state.replay)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), *runs)


def test_another_loss_is_used() -> None:
    def tripled(config: Any, values: Any, batch: Any) -> Any:
        total, aux = rainbow.c51_loss(config, values, batch)
        return 3 * total, aux

    state = make().init(jax.random.key(0), SPEC)
    obs = jnp.ones((N, 4))
    batch = drawn(5)[1]._replace(obs=obs, next_obs=obs)
    agents = make(), rainbow.make(SMALL, loss=tripled)
    found = [jax.jit(agent.grad)(jax.random.key(0), state, batch)[0]["value"]["bias"] for agent in agents]
    np.testing.assert_allclose(3 * found[0], found[1], rtol=1e-5)


def test_a_network_of_ones_own_without_noisy_layers_draws_nothing() -> None:
    table = q_network((8,), num_atoms=Z)._replace(
        init=lambda key, spec: jnp.zeros((3, Z)).at[1, -1].set(9.0),
        apply=lambda params, memory, obs, first: (jnp.broadcast_to(params, (*first.shape, 3, Z)), memory),
        unroll=lambda params, memory, obs, first: jnp.broadcast_to(params, (*first.shape, 3, Z)),
    )
    with pytest.raises(
        ValueError, match="has no noisy layer, and with epsilon_start=0 nothing would explore; use nois"
    ):
        rainbow.make(SMALL, network=table).init(jax.random.key(0), SPEC)
    agent = rainbow.make(dataclasses.replace(SMALL, epsilon_start=1e-6, epsilon_end=0.0), network=table)
    state = agent.init(jax.random.key(0), SPEC)
    obs = jnp.zeros((N, 4))
    action = acted(agent, agent.actor(state), obs, jax.random.split(jax.random.key(1), N))
    np.testing.assert_array_equal(action, 1)
    batch = drawn(6)[1]
    found, _ = agent.grad(jax.random.key(0), state, batch)
    values = lambda params: jnp.broadcast_to(params, (N, 3, Z))
    fixed = values(state.params)
    total = lambda params: rainbow.c51_loss(SMALL, dqn.Values(values(params), fixed, fixed), batch)[0]
    np.testing.assert_allclose(found, jax.grad(total)(state.params), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_step", 0),
        ("dueling", 1),
        ("epsilon_start", 1.5),
        ("epsilon_end", 0.5),
        ("huber_delta", 0.0),
        ("adam_eps", 0.0),
        ("priority_exponent", 1.1),
        ("head", "iqn"),
        ("num_atoms", 1),
        ("num_atoms", 2.0),
        ("num_atoms", True),
        ("v_min", 10.0),
        ("v_min", float("nan")),
        ("v_min", -float("inf")),
        ("v_max", -10.5),
        ("noisy", 1),
        ("noisy_std", 0.0),
    ],
)
def test_bad_fields_are_refused_by_name_and_value(field: str, value: object) -> None:
    shown = repr(value) if isinstance(value, str) else str(value)
    with pytest.raises(ValueError, match=re.escape(f"{field}={shown}")):
        rainbow.make(dataclasses.replace(rainbow.Config(), **{field: value}))


def test_every_field_that_is_its_own_is_checked_above() -> None:
    marks = test_bad_fields_are_refused_by_name_and_value.pytestmark
    assert {field for field, _ in marks[0].args[1]} == set(vars(rainbow.Config)["__annotations__"])


def test_what_would_never_explore_has_memory_or_is_continuous_is_refused() -> None:
    with pytest.raises(ValueError, match="noisy=False and epsilon_start=0 would never explore; use noisy=True, or"):
        make(noisy=False)
    for v_min in (1.0, "0", True, math.nan, np.zeros(1)):
        with pytest.raises(ValueError, match=r"^v_min=.* and v_max=1.0 must be finite numbers, v_min below v_max; use"):
            make(v_min=v_min, v_max=1.0)
    for v_min, v_max in ((1e6, 1e6 + 1e-3), (0.0, 1e39), (-3e38, 3e38)):
        with pytest.raises(ValueError, match="are too near, or too large, for num_atoms=51 values .* in float32; use"):
            make(v_min=v_min, v_max=v_max, num_atoms=51)
    with pytest.raises(ValueError, match="network has memory"):
        rainbow.make(SMALL, network=actor_critic(memory="gru"))
    with pytest.raises(ValueError, match="the actions of pendulum are continuous"):
        make().init(jax.random.key(0), EnvSpec("pendulum", ArraySpec((3,)), ArraySpec((1,), low=-2, high=2)))
