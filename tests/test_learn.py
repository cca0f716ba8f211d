"""The fold over minibatches: what every epoch visits, from which lane, in which order, and when an agent observes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import agents
from podium.agent import Agent, Aux, Plan, fresh_carry
from podium.agents import dqn
from podium.env import auto_reset
from podium.envs import native
from podium.learn import (
    COMPILED,
    PYTHON,
    Loops,
    can_learn,
    choose_lanes,
    gradient,
    learn,
    num_gradients,
    plan_divides,
    prepare,
    python_scan,
    to_lanes,
    why_not_divides,
)
from podium.rollout import begin, rollout
from podium.testing import assert_compiles_once
from podium.testing.probes import probe_continuous
from podium.types import Trajectory

T, B, EPOCHS, PARTS = 6, 16, 3, 2
NUMBERS = np.arange(T * B).reshape(T, B)


def trajectory() -> Trajectory:
    """Return steps [T, B] whose obs is their number, and whose carry is the number of the environment."""
    zeros = jnp.zeros((T, B))
    no = zeros.astype(bool)
    obs, carry = jnp.asarray(NUMBERS), jnp.arange(B)
    return Trajectory(obs, zeros, zeros, no, no, obs, no, (), carry, carry, jnp.int32(0))


def recorder(unit: str) -> Agent:
    """Make an agent whose state lists what the minibatches held, and the calls, in order.

    Rows of the record: the numbers of the steps; the environments of the memory where units are sequences.
    """
    updates, size = EPOCHS * PARTS, T * B // PARTS

    def init(key: Any, spec: Any) -> Any:
        steps = jnp.full((updates, size), -1)
        return {"steps": steps, "envs": jnp.full((updates, B // PARTS), -1), "applied": 0, "observed": 0, "at": -1}

    def plan(key: Any, state: Any, trajectory: Trajectory) -> Plan:
        data = {"number": trajectory.obs, "wide": jnp.stack([trajectory.obs] * 2, -1)}
        per_env = trajectory.carry if unit == "sequence" else ()
        return Plan(data, per_env, EPOCHS, PARTS, unit)

    def grad(key: Any, state: Any, minibatch: Any) -> Any:
        data, envs = minibatch if unit == "sequence" else (minibatch, jnp.full(B // PARTS, -1))
        assert data["number"].shape == ((T, B // PARTS) if unit == "sequence" else (size,))
        intact = jnp.all(data["wide"] == data["number"][..., None])
        return (data["number"].reshape(-1), envs), Aux({"intact": intact, "first": data["number"].reshape(-1)[0]})

    def apply(state: Any, grads: Any) -> Any:
        at = state["applied"]
        steps, envs = state["steps"].at[at].set(grads[0]), state["envs"].at[at].set(grads[1])
        return {**state, "steps": steps, "envs": envs, "applied": at + 1}

    def observe(state: Any, trajectory: Trajectory) -> Any:
        return {**state, "observed": state["observed"] + 1, "at": state["applied"]}

    return Agent(init, lambda s: (), lambda *a: (), None, plan, grad, apply, observe)  # type: ignore[arg-type]


@functools.cache
def learned(unit: str, num_lanes: int, seed: int = 0, loops: Loops = COMPILED) -> Any:
    agent = recorder(unit)

    def run(key: jax.Array, trajectory: Trajectory) -> Any:
        state = jax.tree.map(jnp.asarray, agent.init(key, None))
        return learn(key, agent, state, (), trajectory, num_lanes, loops)

    return jax.device_get(jax.jit(run)(jax.random.key(seed), trajectory()))


@pytest.mark.parametrize("num_lanes", [1, 4, 8])
@pytest.mark.parametrize("unit", ["step", "sequence"])
def test_every_step_is_visited_exactly_once_an_epoch(unit: str, num_lanes: int) -> None:
    state, replay, metrics = learned(unit, num_lanes)
    assert replay == () and metrics["intact"] == 1
    epochs = state["steps"].reshape(EPOCHS, -1)
    np.testing.assert_array_equal(np.sort(epochs), np.broadcast_to(np.arange(T * B), epochs.shape))
    assert len(np.unique(epochs, axis=0)) == EPOCHS
    assert (np.diff(epochs) != 1).any(1).all()


@pytest.mark.parametrize("num_lanes", [1, 4, 8])
@pytest.mark.parametrize("unit", ["step", "sequence"])
def test_a_minibatch_takes_an_equal_share_of_every_lane(unit: str, num_lanes: int) -> None:
    for minibatch in learned(unit, num_lanes).state["steps"]:
        lanes = minibatch % B // (B // num_lanes)
        np.testing.assert_array_equal(np.bincount(lanes), np.full(num_lanes, T * B // PARTS // num_lanes))


def test_lanes_and_epochs_shuffle_independently() -> None:
    state = learned("step", 4).state
    inside = state["steps"].reshape(EPOCHS * PARTS, 4, -1)
    # Where in its lane each step lies: four lanes, four orders.
    time, env = inside // B, inside % B % 4
    assert len(np.unique((time * 4 + env).reshape(-1, inside.shape[-1]), axis=0)) == EPOCHS * PARTS * 4
    assert (learned("step", 4, seed=1).state["steps"] != state["steps"]).any()


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_sequences_are_whole_in_order_and_keep_their_memory(num_lanes: int) -> None:
    state = learned("sequence", num_lanes).state
    for minibatch, envs in zip(state["steps"].reshape(-1, T, B // PARTS), state["envs"], strict=True):
        np.testing.assert_array_equal(minibatch, NUMBERS[:, envs])


@pytest.mark.parametrize("unit", ["step", "sequence"])
def test_python_scan_is_lax_scan(unit: str) -> None:
    jax.tree.map(np.testing.assert_array_equal, learned(unit, 4), learned(unit, 4, loops=PYTHON))


def test_an_agent_observes_once_after_the_last_apply() -> None:
    state = learned("step", 4).state
    assert (state["observed"], state["applied"], state["at"]) == (1, EPOCHS * PARTS, EPOCHS * PARTS)


def test_metrics_are_means_over_minibatches() -> None:
    result = learned("step", 4)
    np.testing.assert_allclose(result.metrics["first"], result.state["steps"][:, 0].mean(), rtol=1e-6)


def test_python_scan_stacks_outputs_of_any_structure() -> None:
    step = lambda carry, x: (carry + x["a"], {"sum": carry + x["a"], "pair": (x["a"], x["b"])})
    inputs = {"a": jnp.arange(4), "b": jnp.ones((4, 2))}
    expected = jax.lax.scan(step, jnp.int32(0), inputs)
    jax.tree.map(np.testing.assert_array_equal, python_scan(step, jnp.int32(0), inputs), expected)


def test_learn_compiles_once() -> None:
    agent = recorder("step")
    function = jax.jit(lambda key, state, trajectory: learn(key, agent, state, (), trajectory, 4))
    with assert_compiles_once(function):
        state = jax.tree.map(jnp.asarray, agent.init(None, None))
        for seed in range(2):
            function(jax.random.key(seed), state, trajectory())


# The halves of `learn`.

SIZES: dict[str, dict[str, Any]] = {
    "ppo": {"num_epochs": 2, "num_minibatches": 2},
    "impala": {"num_minibatches": 2},
    "pqn": {"num_epochs": 2, "num_minibatches": 2},
    "dqn": {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 100, "num_updates": 3},
    "apex": {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 100, "num_updates": 3, "num_actors": 8},
    "r2d2": {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 100, "num_updates": 3, "num_actors": 8}
    | {"sequence_length": 6, "burn_in": 2, "sequence_period": 2, "memory_size": 8},
    "rainbow": {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 100, "num_updates": 3, "num_atoms": 11},
    "reppo": {"num_epochs": 1, "num_minibatches": 2, "num_bins": 11},
    "sac": {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 100, "updates_per_step": 3 / 64},
    "td3": {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 100, "updates_per_step": 3 / 64},
}
CONTINUOUS = ("reppo", "sac", "td3")
# tests/agents/test_alphazero.py, test_muzero.py and test_vdn.py, tests/test_multi.py.
ELSEWHERE = ("alphazero", "ippo", "mappo", "muzero", "vdn")
NAMES = [name for name in agents.names() if name not in ELSEWHERE]
MEMORIES = [("ppo", "gru"), ("a2c", "lstm"), ("impala", "gru"), ("pqn", "gru")]


@functools.cache
def played(agent: Agent) -> tuple[Any, Any, Trajectory]:
    """Return the first state, the replay with nothing in it, and a trajectory of 8 steps in 8 environments."""
    env = auto_reset(probe_continuous() if agent.name in CONTINUOUS else native.catch())

    def run(key: jax.Array) -> Any:
        state, index = agent.init(key, env.spec), jnp.arange(8)
        start = begin(key, env, index, fresh_carry(agent, env.spec, index))
        _, trajectory, _ = rollout(key, agent, env, agent.actor(state), start, 8, jnp.int32(0))
        replay = ()
        if agent.replay is not None:
            item = jax.tree.map(lambda x: x[0, 0], agent.plan(key, state, trajectory).data)
            replay = agent.replay.init(item, 8, 4, 8)
        return state, replay, trajectory

    return jax.jit(run)(jax.random.key(0))


def small(name: str, memory: str) -> Agent:
    return agents.make(name, {"hidden_sizes": (16,)} | ({"memory": memory} if memory else {}) | SIZES.get(name, {}))


@pytest.mark.parametrize(("name", "memory"), [(name, "") for name in NAMES] + MEMORIES)
def test_gradients_that_are_applied_one_by_one_are_what_learn_does(name: str, memory: str) -> None:
    agent = small(name, memory)
    state, replay, trajectory = played(agent)
    prepare_ = jax.jit(lambda *arguments: prepare(*arguments[:1], agent, *arguments[1:], 4))
    take = jax.jit(lambda state, prepared, number: gradient(agent, state, prepared, number))
    apply = jax.jit(agent.apply)
    learn_ = jax.jit(lambda key, state, replay: learn(key, agent, state, replay, trajectory, 4))
    found = expected = state
    found_replay = expected_replay = replay
    ready = []
    # The replays hold too little after the first iteration.
    for iteration in range(3):
        key = jax.random.key(iteration)
        prepared, metrics = prepare_(key, found, found_replay, trajectory), []
        ready.append(bool(can_learn(agent, prepared)))
        for number in range(num_gradients(agent, prepared) if ready[-1] else 0):
            taken = take(found, prepared, jnp.int32(number))
            found, prepared = apply(found, taken.grads), prepared.ranked(taken.priorities)
            metrics.append(taken.metrics)
        found, found_replay = agent.observe(found, trajectory), prepared.replay
        expected, expected_replay, means = learn_(key, expected, expected_replay)
        close(found, expected)
        close(found_replay, expected_replay)
        if ready[-1]:
            close(jax.tree.map(lambda *x: np.mean(x), *metrics), means)
        else:
            assert all(np.isnan(x) for x in means.values())
    assert ready == [agent.replay is None, True, True]
    before, after = (jax.tree.leaves(agent.actor(x)) for x in (state, found))
    assert not all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_will_do_to_know_the_gradients(name: str) -> None:
    agent = small(name, "")
    state, replay, trajectory = played(agent)
    prepare_ = lambda *arguments: prepare(*arguments[:1], agent, *arguments[1:], 4)
    shapes = jax.eval_shape(prepare_, jax.random.key(0), state, replay, trajectory)
    known = {"ppo": 4, "a2c": 1, "impala": 2, "pqn": 4, "reppo": 2}
    assert num_gradients(agent, shapes) == known.get(name, 3)
    grads = jax.eval_shape(lambda *x: gradient(agent, *x), state, shapes, 0).grads
    jax.eval_shape(agent.apply, state, grads)


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("unit", ["step", "sequence"])
def test_a_gradient_is_handed_the_statistics_of_its_own_minibatch(unit: str, parts: int) -> None:
    def number(minibatch: Any) -> Any:
        return (minibatch[0] if unit == "sequence" else minibatch)["number"]

    def plan(key: Any, state: Any, trajectory: Trajectory) -> Plan:
        return Plan({"number": trajectory.obs}, trajectory.carry if unit == "sequence" else (), EPOCHS, parts, unit)

    def grad(key: Any, state: Any, given: Any) -> Any:
        minibatch, (total, nothing) = given
        assert nothing is None
        return (), Aux({"total": total, "off": jnp.abs(total - number(minibatch).sum())})

    agent = recorder(unit)._replace(
        plan=plan,
        grad=grad,
        apply=lambda state, grads: state,
        observe=lambda state, trajectory: state,
        statistics=lambda minibatch: (number(minibatch).sum(), None),
    )
    for loops in (COMPILED, PYTHON):
        metrics = learn(jax.random.key(0), agent, (), (), trajectory(), 4, loops).metrics
        assert metrics["off"] == 0 and metrics["total"] == NUMBERS.sum() / parts
    prepared = prepare(jax.random.key(0), agent, (), (), trajectory(), 4)
    assert prepared.statistics[0].shape == (EPOCHS * parts,)
    assert (len(np.unique(prepared.statistics[0])) > 1) == (parts > 1)


@pytest.mark.parametrize("field", ["statistics", "stops"])
def test_an_agent_with_a_replay_has_no_statistics_and_never_stops(field: str) -> None:
    agent = small("dqn", "")
    with pytest.raises(ValueError, match=f"dqn has a replay and {field}, but"):
        prepare(jax.random.key(0), agent._replace(**{field: lambda given: ()}), *played(agent), 4)


def test_a_replay_without_priorities_to_change_is_refused() -> None:
    agent = small("dqn", "")
    state, replay, trajectory = played(agent)
    broken = agent._replace(replay=agent.replay._replace(update_priorities=lambda state, *_: state))
    with pytest.raises(ValueError, match="dqn's replay has update_priorities, but its state, a ReplayState, no field"):
        prepare(jax.random.key(0), broken, state, replay, trajectory, 4)


def test_to_lanes_cuts_neighbours_in_order_of_time() -> None:
    # Two lanes of two environments: steps 0 and 1, then 4 and 5; 2 and 3, then 6 and 7.
    lanes = to_lanes(jnp.arange(8).reshape(2, 4), 2)
    np.testing.assert_array_equal(lanes, [[0, 1, 4, 5], [2, 3, 6, 7]])
    assert to_lanes(jnp.zeros((2, 4, 3, 1)), 2).shape == (2, 4, 3, 1)


def anything(lanes: int) -> bool:
    return True


def refuse(name: str, number: int) -> str:
    return f"{name}={number} will not do"


@pytest.mark.parametrize(
    ("num_envs", "num_devices", "requested", "divides", "lanes"),
    [
        (64, 1, None, anything, 8),
        (64, 8, None, anything, 8),
        (12, 1, None, anything, 4),
        (12, 3, None, anything, 3),
        (10, 2, None, anything, 2),
        (7, 1, None, anything, 1),
        (64, 16, None, anything, 16),
        (64, 1, None, lambda lanes: lanes <= 2, 2),
        (64, 1, 16, anything, 16),
        (64, 4, 4, anything, 4),
    ],
)
def test_chosen_lanes(num_envs: int, num_devices: int, requested: int | None, divides: Any, lanes: int) -> None:
    assert choose_lanes(num_envs, num_devices, requested, divides, refuse) == lanes


@pytest.mark.parametrize(
    ("num_envs", "num_devices", "requested", "divides", "words"),
    [
        (100, 8, None, anything, "num_envs=100 is not divisible by num_devices=8; use 96 or 104"),
        (3, 8, None, anything, "num_envs=3 is not divisible by num_devices=8; use 8"),
        (64, 1, 3, anything, "num_lanes=3 must divide num_envs=64"),
        (64, 1, 0, anything, "num_lanes=0 must divide"),
        (64, 4, 2, anything, "num_lanes=2 must .* be divisible by num_devices=4"),
        (64, 4, None, lambda lanes: False, "^num_devices=4 will not do$"),
        (64, 4, 8, lambda lanes: lanes != 8, "^num_lanes=8 will not do$"),
    ],
)
def test_lanes_that_cannot_be(num_envs: int, num_devices: int, requested: int | None, divides: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_lanes(num_envs, num_devices, requested, divides, refuse)


@pytest.mark.parametrize(
    ("unit", "parts", "num_lanes", "divides"),
    # A lane of 4 has 4 environments and 24 steps.
    [("step", 4, 4, True), ("step", 24, 4, True), ("step", 5, 4, False), ("step", 48, 4, False)]
    + [("sequence", 4, 4, True), ("sequence", 8, 4, False), ("sequence", 3, 4, False), ("sequence", 1, 16, True)],
)
def test_a_plan_says_which_lanes_divide_it(unit: str, parts: int, num_lanes: int, divides: bool) -> None:
    data = jax.ShapeDtypeStruct((T, B, 2), jnp.float32)
    assert plan_divides(recorder(unit), Plan(data, (), 1, parts, unit), num_lanes) == divides


@pytest.mark.parametrize(
    ("unit", "parts", "name", "num_lanes", "words"),
    # B = 16 environments of T = 6 steps.
    [
        ("step", 7, "num_devices", 1, "96 steps of a rollout (16 x 6); use 6 or 8."),
        ("step", 7, "num_devices", 8, "12 steps of a rollout (2 x 6) on each of 8 devices; use 6 or 12."),
        ("step", 99, "num_lanes", 4, "24 steps of a rollout (4 x 6) in each of num_lanes=4; use 24."),
        ("sequence", 3, "num_devices", 1, "16 environments; use 2 or 4."),
        ("sequence", 3, "num_lanes", 8, "2 environments in each of num_lanes=8; use 2."),
    ],
)
def test_minibatches_that_do_not_divide(unit: str, parts: int, name: str, num_lanes: int, words: str) -> None:
    plan = Plan(jnp.zeros((6, 16)), (), 1, parts, unit)
    refused = f"num_minibatches={parts} does not divide the {words}"
    assert why_not_divides(recorder(unit), plan, name, num_lanes) == refused


def test_a_batch_that_lanes_do_not_divide() -> None:
    agent = dqn.make(dqn.Config(batch_size=7))
    plan = Plan(jnp.zeros((6, 16)))
    words = "batch_size=7 is not divisible by num_devices=2; use 6 or 8."
    assert why_not_divides(agent, plan, "num_devices", 2) == words
    assert why_not_divides(agent, plan, "num_lanes", 16).endswith("num_lanes=16; use 16.")
