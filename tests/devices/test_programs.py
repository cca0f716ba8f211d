"""The compiled program on several devices: what it communicates, what it copies, how often it is compiled."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import podium
from podium import envs
from podium.agents import apex, dqn, impala, ppo, pqn, r2d2, rainbow
from podium.env import auto_reset
from podium.envs import native
from podium.learn import learn
from podium.placement.actors.actor import FusedActing
from podium.placement.compiled.iteration import start
from podium.rollout import begin, rollout

FORBIDDEN = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
NUM_ENVS = 16


def small_ppo(**changes: Any) -> Any:
    return ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=2, num_minibatches=2, learning_rate=1e-3, **changes))


def small_pqn(**changes: Any) -> Any:
    return pqn.make(pqn.Config(hidden_sizes=(16,), num_epochs=2, num_minibatches=2, learning_rate=1e-3, **changes))


def small_dqn(algorithm: Any = dqn, **changes: Any) -> Any:
    settings = {"buffer_capacity": 2048, "min_replay_size": 512, "num_updates": 2} | changes
    return algorithm.make(algorithm.Config(hidden_sizes=(16,), batch_size=32, learning_rate=1e-3, **settings))


def small_r2d2(**changes: Any) -> Any:
    windows = {"sequence_length": 11, "burn_in": 2, "sequence_period": 2, "memory_size": 16}
    return small_dqn(r2d2, **windows | changes)


# Agent, environment, rollout length (an odd one, to know its loops by), and the most all-reduces there may be.
CASES: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    "ppo": (small_ppo, "podium/Catch", 7, 8),
    "ppo-gru": (lambda: small_ppo(memory="gru", memory_size=16), "podium/RepeatFirst", 7, 8),
    "ppo-continuous": (small_ppo, "Pendulum-v1", 7, 8),
    "ppo-normalized": (lambda: small_ppo(normalize_obs=True, normalize_reward=True), "CartPole-v1", 7, 14),
    "impala-gru": (lambda: impala.make(impala.Config(hidden_sizes=(16,), memory="gru")), "podium/RepeatFirst", 7, 8),
    "pqn": (lambda: small_pqn(), "podium/Catch", 7, 8),
    "pqn-gru": (lambda: small_pqn(memory="gru", memory_size=16), "podium/RepeatFirst", 7, 8),
    "dqn": (lambda: small_dqn(n_step=3, dueling=True), "podium/Catch", 4, 5),
    "apex": (lambda: small_dqn(apex), "podium/Catch", 4, 6),
    "r2d2": (lambda: small_r2d2(), "podium/Corridor", 4, 7),
    "rainbow": (lambda: small_dqn(rainbow), "podium/Catch", 4, 6),
}

NIGHTLY = ("apex", "pqn", "pqn-gru", "r2d2", "rainbow")

_programs: dict[str, Any] = {}


def build(name: str) -> Any:
    """Build the case on 8 devices, once a session."""
    if name not in _programs:
        make, env, length, _ = CASES[name]
        _programs[name] = podium.Anakin(8).build(
            make(), envs.make(env), num_envs=NUM_ENVS, rollout_length=length, max_updates=4
        )
    return _programs[name]


# Reading the compiled text.


def computations(text: str) -> dict[str, list[str]]:
    """Return the instructions of every computation by its name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if header and not line.startswith(" "):
            name = header.group(1)
            found[name] = []
        elif name and line.startswith(" "):
            found[name].append(line)
    return found


def collectives(lines: list[str]) -> list[str]:
    """Return the kinds of collectives among instructions; a start and its done are one."""
    pattern = (
        r"= .*?\s(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
    )
    return [match.group(1) for line in lines if (match := re.search(pattern, line))]


def called(line: str) -> list[str]:
    names = re.findall(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    return names + ([name.strip().lstrip("%") for name in branches.group(1).split(",")] if branches else [])


def depth_of_collectives(text: str) -> list[int]:
    """Return for every collective the number of `while` loops that it stands in; see `collectives_by_depth`."""
    return [depth for depth, _ in collectives_by_depth(text)]


def collectives_by_depth(text: str) -> list[tuple[int, str]]:
    """Return every collective behind the number of `while` loops that it stands in.

    The chunk is a loop over updates (1), learning a loop over minibatches in it (2); a loop over time inside the
    gradient would be the third.
    """
    bodies = computations(text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None
    found: list[tuple[int, str]] = []

    def walk(name: str, depth: int) -> None:
        for line in bodies[name]:
            found.extend([(depth, line)] * len(collectives([line])))
            inside = depth + (" while(" in line)
            for callee in called(line):
                if callee in bodies:
                    walk(callee, inside)

    walk(entry.group(1), 0)
    return found


def collectives_in_loops_of(text: str, rounds: int) -> list[str]:
    """Return the kinds of the collectives in the loops of so many rounds, and in all that those call."""
    bodies = computations(text)
    known = f'"known_trip_count":{{"n":"{rounds}"}}'
    loops = [line for lines in bodies.values() for line in lines if " while(" in line and known in line]
    assert loops, f"no loop of {rounds} rounds"

    def walk(line: str) -> list[str]:
        inside = [found for callee in called(line) for each in bodies.get(callee, []) for found in walk(each)]
        return collectives([line]) + inside

    return [found for line in loops for found in walk(line)]


def test_the_reader_finds_collectives_in_loops() -> None:
    """Held against a program of which it is known: a sum over devices in a loop in a loop, and one outside."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x: Any, n: Any) -> Any:
        inner = lambda i, y: y * 0.5 + jax.lax.psum(y, "x")
        y = jax.lax.fori_loop(0, n, lambda i, y: jax.lax.fori_loop(0, n + i, inner, y), x)
        return jax.lax.psum(y, "x")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=False)
    text = jax.jit(mapped).lower(np.ones(8, np.float32), np.int32(3)).compile().as_text()
    assert sorted(depth_of_collectives(text)) == [0, 2]

    def fixed(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, y: jax.lax.psum(jnp.sin(jax.lax.psum(y, "x")), "x"), x)

    mapped = jax.shard_map(fixed, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    text = jax.jit(mapped).lower(np.ones(8, np.float32)).compile().as_text()
    assert collectives_in_loops_of(text, 3) == ["all-reduce", "all-reduce"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in NIGHTLY)) for name in CASES],
)
def test_gradient_sums_are_all_that_crosses(name: str) -> None:
    text = build(name).loop.compiled_text()
    for kind in FORBIDDEN:
        assert not re.search(rf"\s{kind}(-start)?\(", text), kind
    depths = depth_of_collectives(text)
    assert 1 <= len(depths) <= CASES[name][3], depths
    assert len(depths) == len(collectives(text.splitlines())), "the reader missed some"
    # In the loop over updates and the loop over minibatches (with priorities, in a loop of one round between them), and
    # never in one over time.
    assert max(depths) <= (3 if name in ("apex", "r2d2", "rainbow") else 2), depths


STEPS = 4  # Gradient steps of the cases' PPO and PQN: 2 epochs of 2 minibatches.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith("pqn"))
        for name in CASES
        if name.startswith(("ppo", "pqn"))
    ],
)
def test_a_gradient_step_waits_for_other_devices_once(name: str) -> None:
    assert collectives_in_loops_of(build(name).loop.compiled_text(), STEPS) == ["all-reduce"]


def text_of_learning(agent: Any) -> str:
    """Return the compiled text of learning on 8 devices from rows of which some are none."""
    env, length = native.catch(), 7

    def play(key: Any) -> Any:
        state, index = agent.init(key, env.spec), jnp.arange(NUM_ENVS)
        begun = begin(key, auto_reset(env), index, agent.carry(env.spec, NUM_ENVS))
        trajectory = rollout(key, agent, auto_reset(env), agent.actor(state), begun, length, jnp.int32(0))[1]
        return state, trajectory._replace(valid=trajectory.terminated)

    mesh = jax.make_mesh((8,), ("env",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(x: Any) -> Any:
        # What has environments has them second, as nothing else of these shapes does.
        split = x.shape[:2] == (length, NUM_ENVS)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(None, "env") if split else P()))

    arguments = jax.tree.map(put, jax.eval_shape(play, jax.random.key(0)))
    return (
        jax.jit(lambda key, *x: learn(key, agent, x[0], (), x[1], 8))
        .lower(jax.random.key(0), *arguments)
        .compile()
        .as_text()
    )


@pytest.mark.parametrize("name", ["ppo", pytest.param("pqn", marks=pytest.mark.slow), "impala"])
def test_rows_that_are_none_add_no_wait(name: str) -> None:
    """How many rows of a minibatch count is known before its gradient, and so is how far IMPALA's bootstraps reach."""
    small_impala = impala.make(impala.Config(hidden_sizes=(16,), num_minibatches=2))
    text = text_of_learning({"ppo": small_ppo(), "pqn": small_pqn(), "impala": small_impala}[name])
    rounds = 2 if name == "impala" else STEPS
    assert collectives_in_loops_of(text, rounds) == ["all-reduce"]
    assert not any(re.search(rf"\s{kind}(-start)?\(", text) for kind in FORBIDDEN)


def test_statistics_in_the_gradient_would_add_waits() -> None:
    """The tests above can fail: with the statistics of PPO taken where the gradient is, there are four sums."""
    agent = small_ppo()
    grad = lambda key, state, minibatch: agent.grad(key, state, (minibatch, agent.statistics(minibatch)))
    text = text_of_learning(agent._replace(statistics=None, grad=grad))
    assert collectives_in_loops_of(text, STEPS) == ["all-reduce"] * 4


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dqn")) for name in CASES])
def test_a_gradient_step_sums_its_gradient_as_one_array(name: str) -> None:
    """CPU devices meet once for each array of a sum; PPO's 18 were two thirds of eight devices' time on two cores."""
    text = build(name).loop.compiled_text()
    sums = [re.findall(r"\w+\[([\d,]*)\]", line.split(" all-reduce")[0]) for _, line in collectives_by_depth(text)]
    sizes = [[int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes] for shapes in sums]
    arrays = [size for of_one in sizes for size in of_one]
    assert len([size for size in arrays if size > 16]) == 1, sizes
    # Beside it the metrics of the step, what the algorithm needs of the whole batch, and the episodes that ended.
    assert len(arrays) <= CASES[name][3] + 2, sizes


@pytest.mark.slow
def test_left_to_the_partitioner_the_gru_would_sum_in_every_step_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: not told of the mesh, sums stand in the backward loop over time, array by array."""
    import contextlib

    monkeypatch.setattr("podium.placement.compiled.chunk.batch_over", lambda mesh: contextlib.nullcontext())
    make, env, length, _ = CASES["ppo-gru"]
    program = podium.Anakin(8).build(make(), envs.make(env), num_envs=NUM_ENVS, rollout_length=length, max_updates=4)
    assert max(depth_of_collectives(program.loop.compiled_text())) == 3


def total_bytes(tree: Any) -> int:
    """Return the bytes of a device's share of abstract arrays with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = 8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        total += int(np.prod(shape)) * size
    return total


@pytest.mark.parametrize(
    ("devices", "algorithm"),
    [(1, dqn), (1, apex), pytest.param(8, dqn, marks=pytest.mark.slow), pytest.param(8, apex, marks=pytest.mark.slow)],
)
def test_the_state_is_donated_and_the_buffer_never_copied(devices: int, algorithm: Any) -> None:
    agent = small_dqn(algorithm, buffer_capacity=200_000)
    program = podium.Anakin(devices).build(
        agent, envs.make("podium/Catch"), num_envs=NUM_ENVS, rollout_length=4, max_updates=4
    )
    memory = program.loop.memory_analysis()
    state = program.abstract_state()
    buffer = total_bytes(state.replay)
    assert buffer > 200_000 * 400 / devices  # One observation of Catch is 100 numbers of four bytes.
    assert memory.alias_size_in_bytes >= total_bytes(state)
    assert memory.temp_size_in_bytes < 0.1 * buffer


@pytest.mark.parametrize("num_updates", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_priorities_are_never_copied(devices: int, num_updates: int) -> None:
    """They change with every minibatch, so that a copy would cost more the more the buffer holds."""
    agent = small_dqn(apex, buffer_capacity=1_000_000, num_updates=num_updates)
    program = podium.Anakin(devices).build(
        agent, envs.make("CartPole-v1"), num_envs=NUM_ENVS, rollout_length=1, max_updates=4
    )
    priorities = total_bytes(program.abstract_state().replay.priorities)
    assert program.loop.memory_analysis().temp_size_in_bytes < 0.5 * priorities


def test_the_old_state_is_consumed() -> None:
    program = build("dqn")
    before = program.init(0)
    program.chunk(before, 1)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.replay))


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_no_chunk_of_any_length_compiles_again(name: str, caplog: pytest.LogCaptureFixture) -> None:
    program = build(name)
    state, _ = program.chunk(program.init(0), 4)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        for length in (1, 4, 3, 2, 4):
            state, metrics = program.chunk(state, length)
            assert len(metrics["loss"]) == length
    compiled = [record.getMessage() for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
    # On the host `jnp.int32(n)` and its like are programs too, each of one instruction.
    assert not [message for message in compiled if "chunk" in message or "seeds" in message], compiled
    assert program.update_count(state) == 18


@pytest.mark.parametrize("length", [0, 5, -1])
def test_a_chunk_of_a_length_it_was_not_built_for_is_refused(length: int) -> None:
    program = build("ppo")
    with pytest.raises(ValueError, match=f"num_updates={length} must lie between 1 and max_updates=4"):
        program.chunk(program.init(0), length)


# Independent seeds.


def start_one(program: Any, key: Any) -> Any:
    """Return the first state of a program of one seed, from a key."""
    acting = FusedActing(program.agent, program.env, NUM_ENVS, program.sizes.rollout_length)
    return jax.jit(lambda key: start(key, acting, program.sizes), out_shardings=program.loop.shardings)(key)


@pytest.mark.parametrize(
    ("name", "seeds", "devices"),
    [
        ("ppo", 8, 8),
        pytest.param("dqn", 8, 8, marks=pytest.mark.slow),
        pytest.param("ppo", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_seeds_are_runs_of_their_own(name: str, seeds: int, devices: int) -> None:
    make, env_name, _, _ = CASES[name]
    agent, env, updates = make(), envs.make(env_name), 4
    sizes: dict[str, Any] = {"num_envs": NUM_ENVS, "rollout_length": 8, "num_lanes": 8, "max_updates": updates}
    together = podium.Anakin(devices).build(agent, env, seeds=seeds, **sizes)
    if seeds % devices == 0:
        assert not collectives(together.loop.compiled_text().splitlines())
    state, metrics = together.chunk(together.init(5), updates)
    params = jax.device_get(agent.actor(state.agent))
    assert metrics["loss"].shape == (updates, seeds)
    alone = podium.Anakin(1).build(agent, env, **sizes)
    for seed in {0, 1, seeds - 1}:
        one, row = alone.chunk(start_one(alone, jax.random.fold_in(jax.random.key(5), seed)), updates)
        expected = jax.device_get(agent.actor(one.agent))
        for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(x)[seed], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(metrics["loss"][:, seed], row["loss"], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(metrics["episodes"][:, seed], row["episodes"])


def test_several_seeds_start_one_after_another() -> None:
    """A batched QR decomposition can deadlock the threads of XLA on CPU, so no seed may be started by `vmap`."""
    env = envs.make("podium/Catch")
    program = podium.Anakin(devices=1).build(small_ppo(), env, num_envs=8, rollout_length=4, seeds=3)
    text = jax.jit(program.loop.start).lower(jax.random.key(0)).as_text()
    batch_dims = re.findall(r'@lapack_s(?:geqrf|orgqr)_ffi.*num_batch_dims = "(\d+)"', text)
    assert batch_dims, "the test must see the decompositions"
    assert set(batch_dims) == {"0"}
