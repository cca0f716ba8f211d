"""R2D2: targets and gradients against a loop over single steps, memory where windows begin, values on paper, probes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import podium
from podium import testing
from podium.agent import Agent, Aux, Plan, fresh_carry
from podium.agents import dqn, r2d2
from podium.learn import num_updates
from podium.networks import Network, q_network
from podium.ops.rescaling import rescale, unrescale
from podium.replay import Windows
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

SPEC = EnvSpec("test", ArraySpec((3,)), DiscreteSpec(3))
SMALL = r2d2.Config(
    sequence_length=7,
    burn_in=2,
    sequence_period=1,
    n_step=3,
    gamma=0.9,
    batch_size=8,
    buffer_capacity=512,
    min_replay_size=32,
    hidden_sizes=(8,),
    memory_size=4,
    num_actors=4,
)


def random_windows(agent: Agent, number: int, masked: bool, seed: int = 0) -> Windows:
    """Return windows of random steps with ends of both kinds."""
    length, rng = SMALL.sequence_length, np.random.default_rng(seed)
    obs = rng.normal(size=(2, number, length, 3)).astype(np.float32)
    terminated, truncated = rng.random((2, number, length)) < 0.15
    terminated[0, 4] = truncated[1, 4] = truncated[2, -1] = True
    terminated[1, 4] = terminated[2, -1] = False
    valid = rng.random((number, length)) < 0.85 if masked else None
    over = terminated | truncated | (np.zeros_like(terminated) if valid is None else ~valid)
    # What is reached is what is acted on next, but behind an end.
    next_obs = np.where(over[..., None], obs[1], np.concatenate([obs[0][:, 1:], obs[1][:, -1:]], 1))
    return Windows(
        obs[0],
        rng.integers(0, 3, (number, length)).astype(np.int32),
        rng.normal(size=(number, length)).astype(np.float32),
        terminated,
        truncated,
        next_obs,
        np.concatenate([np.zeros((number, 1), bool), over[:, :-1]], 1),
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), agent.carry(SPEC, number).memory),
        rng.uniform(0.1, 1.0, number).astype(np.float32),
        valid,
    )


def slow_objective(config: r2d2.Config, network: Network, state: dqn.State, windows: Windows, params: Any) -> Any:
    """Return the loss and the priorities, step by step, window by window; `params` are those that get the gradient."""
    no, yes = jnp.zeros(1, bool), jnp.ones(1, bool)
    total, count, priorities = 0.0, 0, []
    for i in range(windows.weight.shape[0]):
        row = lambda t, field="obs", i=i: jnp.asarray(getattr(windows, field)[i, t])[None]
        is_valid = lambda t, i=i: windows.valid is None or bool(windows.valid[i, t])
        start = jax.tree.map(lambda x, i=i: jnp.asarray(x[i])[None], windows.start)
        if not config.stored_state:
            start = jax.tree.map(jnp.zeros_like, start)
        memories, values = {}, {}
        for name, p in (("online", state.params), ("target", state.target_params), ("learning", params)):
            memory = start
            for t in range(config.sequence_length):
                learns = name == "learning" and t >= config.burn_in
                if name == "learning" and t == config.burn_in:
                    memory = jax.lax.stop_gradient(memories["online", t - 1]) if t else start
                first = yes if windows.first[i, t] else no
                value, memory = network.apply(p if learns else jax.lax.stop_gradient(p), memory, row(t), first)
                memories[name, t], values[name, t] = memory, value[0]
        errors = []
        for t in range(config.burn_in, config.sequence_length):
            if not is_valid(t):
                continue
            sum_, factor = 0.0, 1.0
            for k in range(t, min(t + config.n_step, config.sequence_length)):
                sum_, factor = sum_ + factor * windows.reward[i, k], factor * config.gamma
                following_is_none = k + 1 < config.sequence_length and not is_valid(k + 1)
                if windows.terminated[i, k] or windows.truncated[i, k] or following_is_none:
                    break
            obs = row(k, "next_obs")
            online, _ = network.apply(state.params, memories["online", k], obs, no)
            target, _ = network.apply(state.target_params, memories["target", k], obs, no)
            best = target[0, jnp.argmax((online if config.double else target)[0])]
            factor = 0.0 if windows.terminated[i, k] else factor
            if config.rescale_values:
                wanted = rescale(sum_ + factor * unrescale(best, config.rescale_eps), config.rescale_eps)
            else:
                wanted = sum_ + factor * best
            errors.append(jax.lax.stop_gradient(wanted) - values["learning", t][windows.action[i, t]])
        total += windows.weight[i] * sum(optax.huber_loss(x, delta=config.huber_delta) for x in errors)
        count += len(errors)
        size = np.abs(np.array([jax.lax.stop_gradient(x) for x in errors] or [0.0]))
        priorities.append(config.max_priority_weight * size.max() + (1 - config.max_priority_weight) * size.mean())
    return total / count, np.array(priorities)


@pytest.mark.parametrize(
    ("masked", "changes"),
    [
        (False, {}),
        (True, {"memory": "gru", "double": False, "rescale_values": False}),
        pytest.param(False, {"burn_in": 0, "stored_state": False, "dueling": False}, marks=pytest.mark.slow),
        pytest.param(True, {"burn_in": 6, "n_step": 1}, marks=pytest.mark.slow),
    ],
)
def test_gradients_and_priorities_are_those_of_a_loop_over_steps(masked: bool, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    sizes = config.hidden_sizes, config.activation, config.dueling, "mlp", "float32", config.memory, config.memory_size
    network, agent = q_network(*sizes), r2d2.make(config)
    windows = random_windows(agent, 3, masked)
    state = agent.init(jax.random.key(0), SPEC)
    state = state._replace(target_params=agent.init(jax.random.key(1), SPEC).params)
    slow = lambda params: slow_objective(config, network, state, windows, params)
    (loss, priorities), expected = jax.value_and_grad(slow, has_aux=True)(state.params)
    given = windows if config.stored_state else windows._replace(start=())
    grads, aux = jax.jit(agent.grad)(jax.random.key(0), state, given)
    np.testing.assert_allclose(aux.metrics["loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(aux.priorities, priorities, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), grads, expected)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(grads["memory"])) > 1e-4


def forgetful(network: Network) -> Network:
    """Return a network with a memory that nothing depends on."""

    def apply(params: Any, memory: Any, obs: Any, first: Any) -> Any:
        return network.apply(params, (), obs, first)[0], memory + 1.0

    unroll = lambda params, memory, obs, first: network.unroll(params, (), obs, first)
    return network._replace(carry=lambda n: jnp.zeros((n, 1)), apply=apply, unroll=unroll, recurrent=True)


def test_without_memory_windows_of_n_steps_have_the_targets_of_dqn() -> None:
    """The first step of a window of n reaches what dqn's n-step transition reaches; the same are drawn by one key."""
    n, plain = 3, q_network((8,))
    shared: dict[str, Any] = {"n_step": n, "gamma": 0.9, "batch_size": 64, "buffer_capacity": 512, "dueling": False}
    shared["min_replay_size"] = 1
    targets: dict[str, Any] = {}

    def noted(config: Any, value: Any, batch: Any) -> Any:
        return jnp.sum(value), Aux({}, batch.target[0])

    def dqn_noted(config: Any, values: Any, batch: Any) -> Any:
        best = jnp.argmax(values.next_value, axis=-1)[:, None]
        reached = jnp.take_along_axis(values.next_target_value, best, 1)[:, 0]
        return jnp.sum(values.value), Aux({}, batch.reward + batch.discount * reached)

    config = r2d2.Config(**shared, sequence_length=n, burn_in=0, sequence_period=1, rescale_values=False)
    # One priority for all: every window, and every transition, is as likely.
    ours = r2d2.make(dataclasses.replace(config, priority_exponent=0.0), forgetful(plain), noted)
    buffer = podium.replay.prioritized(512, 64, 1, 1, n, 0.9, priority_exponent=0.0)
    theirs = dqn.make(dqn.Config(**shared), plain, dqn_noted, buffer)
    state = ours.init(jax.random.key(0), SPEC)
    state = state._replace(target_params=theirs.init(jax.random.key(1), SPEC).params)
    for name, agent in (("r2d2", ours), ("dqn", theirs)):
        trajectory = random_trajectory(agent, 16, 8)
        items = agent.plan(jax.random.key(0), state, trajectory).data
        held = agent.replay.init(jax.tree.map(lambda x: x[0, 0], items), 8, 1, 16)
        held = agent.replay.add(agent.replay.add(held, items), items)
        minibatch, indices = agent.replay.sample(jax.random.key(2), held)
        targets[name] = agent.grad(jax.random.key(0), state, minibatch)[1].priorities, indices
    np.testing.assert_array_equal(targets["r2d2"][1], targets["dqn"][1])
    np.testing.assert_allclose(targets["r2d2"][0], targets["dqn"][0], rtol=1e-5, atol=1e-6)


def random_trajectory(agent: Agent, time: int, num_envs: int) -> Trajectory:
    """Return random steps, with what `agent` leaves beside them."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(size=(time, num_envs, *shape)).astype(np.float32)
    flag = lambda: rng.random((time, num_envs)) < 0.15
    action = rng.integers(3, size=(time, num_envs)).astype(np.int32)
    extras = jnp.zeros((time, num_envs, 1)) if agent.name == "r2d2" else ()
    return Trajectory(draw(3), action, draw(), flag(), flag(), draw(3), flag(), extras, (), (), np.int32(0))


def acted(agent: Agent, number: int, first: Any, carry: Any = None) -> Any:
    params = agent.actor(agent.init(jax.random.key(0), SPEC))
    obs = jnp.broadcast_to(jnp.array([1.0, -2.0, 0.5]), (number, 3))
    carry = fresh_carry(agent, SPEC, jnp.arange(number)) if carry is None else carry
    return agent.act(jax.random.split(jax.random.key(1), number), params, carry, obs, first, False), carry


def test_the_memory_before_each_step_is_stored_and_zero_where_an_episode_begins() -> None:
    agent = r2d2.make(SMALL)
    carry = fresh_carry(agent, SPEC, jnp.arange(4))
    carry = carry._replace(memory=jax.tree.map(lambda x: x + 0.7, carry.memory))
    first = jnp.array([False, True, False, True])
    output, carry = acted(agent, 4, first, carry)
    expected = jax.tree.map(lambda x: jnp.where(first[:, None], 0.0, x), carry.memory)
    jax.tree.map(np.testing.assert_array_equal, output.extras, expected)
    np.testing.assert_array_equal(output.carry.number, np.arange(4))
    without = acted(r2d2.make(dataclasses.replace(SMALL, stored_state=False)), 4, first, carry)[0]
    assert without.extras == ()
    jax.tree.map(np.testing.assert_array_equal, without.carry, output.carry)


def test_each_actor_explores_at_its_own_rate() -> None:
    """Epsilon 0.9 and spread 7 over four actors: as apex."""
    agent = r2d2.make(dataclasses.replace(SMALL, epsilon_start=0.9, epsilon_end=0.9))
    number = 40_000
    (output, carry), params = acted(agent, number, jnp.ones(number, bool)), None
    params = agent.actor(agent.init(jax.random.key(0), SPEC))
    obs = jnp.broadcast_to(jnp.array([1.0, -2.0, 0.5]), (1, 3))
    one = jax.tree.map(lambda x: x[:1], carry)
    best = agent.act(jax.random.split(jax.random.key(1), 1), params, one, obs, jnp.ones(1, bool), True).action[0]
    different = np.asarray(output.action != best).reshape(-1, 4).mean(0)
    expected = 2 / 3 * 0.9 ** (1 + 7 * np.arange(4) / 3)
    np.testing.assert_allclose(different, expected, atol=4 * np.sqrt(0.25 / 10_000))


@pytest.mark.parametrize(
    ("probe", "expected"),
    # Truncation keeps the future: 1 / (1 - 0.9) = 10. Termination ends it: 1 + 0.9 + 0.81, 1 + 0.9, 1.
    [("probe_truncation", [10.0]), pytest.param("probe_termination", [2.71, 1.9, 1.0], marks=pytest.mark.slow)],
)
def test_values_on_paper(probe: str, expected: list[float]) -> None:
    config = dataclasses.replace(
        SMALL, learning_rate=3e-3, num_updates=8, target_update_period=20, epsilon_start=1.0, epsilon_end=1.0
    )
    agent, env = r2d2.make(config), getattr(testing, probe)()
    program = podium.Anakin(1).build(agent, env, num_envs=8, rollout_length=4, num_lanes=1, max_updates=150)
    state, metrics = program.chunk(program.init(0), 150)
    assert metrics["finite"].all()
    params, length = program.agent_state(state).params, 10
    sizes = config.hidden_sizes, config.activation, config.dueling, "mlp", "float32", config.memory, config.memory_size
    network = q_network(*sizes)
    obs = np.resize(np.eye(len(expected), dtype=np.float32), (length, 1, len(expected)))
    first = (np.arange(length) % (5 if probe == "probe_truncation" else 3) == 0)[:, None]
    values = network.unroll(params, network.carry(1), jnp.asarray(obs), jnp.asarray(first))
    values = unrescale(values, config.rescale_eps).max(-1)[:, 0]
    np.testing.assert_allclose(values, np.resize(expected, length), rtol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("stored_state", [True, False])
def test_memory_is_used(stored_state: bool) -> None:
    config = dataclasses.replace(
        SMALL,
        sequence_length=8,
        sequence_period=4,
        burn_in=2,
        learning_rate=3e-3,
        memory="gru",
        memory_size=16,
        target_update_period=50,
        buffer_capacity=20_000,
        num_updates=2,
        batch_size=32,
        stored_state=stored_state,
    )
    env = testing.probe_memory()
    result = podium.train(
        r2d2.make(config), env, num_steps=60_000, num_envs=16, rollout_length=4, eval_every=0, progress=False
    )
    assert result.summary["eval_return"] >= 0.95


def test_samples_per_insert_count_steps() -> None:
    """5 learnt steps a window, 8 windows: 40 steps a minibatch; 8 x 10 inserted and each learnt from once make two."""
    agent, plan = r2d2.make(dataclasses.replace(SMALL, samples_per_insert=1.0)), Plan(jnp.zeros((10, 8)))
    assert agent.replay is not None and agent.replay.steps_per_batch == 40
    assert num_updates(agent.replay, plan) == 2
    uneven = r2d2.make(dataclasses.replace(SMALL, samples_per_insert=0.7)).replay
    with pytest.raises(ValueError, match=r"1.4 minibatches of batch_size=8 x 5 steps after each 10 x 8 .*use 0.5 or 1"):
        num_updates(uneven, plan)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("gamma", 1.1),
        ("n_step", 0),
        ("batch_size", 0),
        ("sequence_length", 0),
        ("burn_in", -1),
        ("sequence_period", 0),
        ("stored_state", 1),
        ("priority_exponent", 1.1),
        ("importance_exponent", float("nan")),
        ("max_priority_weight", 1.1),
        ("rescale_values", 0),
        ("rescale_eps", -1e-3),
        ("memory", "transformer"),
        ("memory_size", 0),
        ("num_actors", 0),
        ("epsilon_spread", -1.0),
    ],
)
def test_bad_fields_are_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}" if field != "memory_size" else "memory_size")):
        r2d2.make(dataclasses.replace(r2d2.Config(), **{field: value}))


def test_every_field_of_its_own_is_checked_above() -> None:
    marks = test_bad_fields_are_refused_by_name_and_value.pytestmark
    assert set(vars(r2d2.Config)["__annotations__"]) <= {field for field, _ in marks[0].args[1]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: r2d2.make(r2d2.Config(memory="none")), "memory='none', but r2d2 .*; use gru or lstm, or dqn"),
        (
            lambda: r2d2.make(network=q_network()),
            "network has no memory, but r2d2 .*; pass one with memory, or use dqn",
        ),
        (lambda: r2d2.make(r2d2.Config(burn_in=120)), "burn_in=120 .*sequence_length=120; use 119 or less"),
        (lambda: r2d2.make(r2d2.Config(n_step=2.0)), "n_step=2.0 must be an integer of 1 or more"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Agent], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"rollout_length": 30}, "sequence_period=40 and rollout_length=30: one must divide the other"),
        (
            {"rollout_length": 40, "num_envs": 1024},
            "buffer_capacity=50000 holds 40 steps .*window of sequence_length=120",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_tracing(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        podium.Anakin(1).build(r2d2.make(), podium.envs.make("podium/Catch"), **{"num_envs": 16, **sizes})
