"""LocalSGD: alone between averages, equal after them, and the global gradient where nothing but its sum is averaged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo
from podium.host import on_host
from podium.ops.counts import Count

NUM_ENVS, LENGTH = 16, 8
STATS = {"valid_steps", "env_seconds", "inference_seconds"}
"""What only Single counts."""

# Adam's usual eps would make steps of the rounding that bins far from every value have for a gradient.
REPPO: Any = {"hidden_sizes": (16,), "num_epochs": 2, "num_minibatches": 2, "num_bins": 21, "adam_eps": 1e-5}
AGENTS: dict[str, tuple[Agent, int]] = {
    "ppo": (ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=2, num_minibatches=2)), 3),
    "ppo gru": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 3),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(16,))), 3),
    "impala": (impala.make(impala.Config(hidden_sizes=(16,))), 3),
    "pqn": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=4)), 3),
    "pqn gru": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 3),
    "reppo": (reppo.make(reppo.Config(**REPPO)), 3),
    "dqn": (
        dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, num_updates=2, min_replay_size=256, n_step=3)),
        6,
    ),
    "apex": (apex.make(apex.Config(hidden_sizes=(16,), batch_size=32, num_updates=2, min_replay_size=256)), 6),
    "r2d2": (
        r2d2.make(
            r2d2.Config(
                hidden_sizes=(16,),
                batch_size=32,
                num_updates=2,
                min_replay_size=256,
                sequence_length=6,
                burn_in=2,
                sequence_period=2,
                memory_size=16,
            )
        ),
        6,
    ),
    "rainbow": (
        rainbow.make(rainbow.Config(hidden_sizes=(16,), batch_size=32, num_updates=2, min_replay_size=256)),
        6,
    ),
}


def run(placement: Any, agent: Agent, updates: int, env: Any = "podium/Catch", seed: int = 0) -> tuple[Any, Any, Any]:
    """Return the agent's state after `updates` iterations, metrics, and the program's own state."""
    env = podium.envs.make(env) if isinstance(env, str) else env
    program = placement.build(agent, env, num_envs=NUM_ENVS, rollout_length=LENGTH, max_updates=updates, num_lanes=1)
    try:
        state, metrics = program.chunk(program.init(seed), updates)
        return jax.device_get(program.agent_state(state)), metrics, state
    finally:
        program.close()


def plain(agent: Agent, rate: float = 1e-3) -> Agent:
    """Return `agent` with plain gradient descent."""

    def apply(state: Any, grads: Any) -> Any:
        gradient = getattr(grads, "params", grads)
        return state._replace(params=jax.tree.map(lambda x, g: x - rate * g, state.params, gradient))

    return agent._replace(apply=apply)


QUICK = ("ppo",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in AGENTS]
)
def test_one_worker_is_single(name: str) -> None:
    agent, updates = AGENTS[name]
    env = "Pendulum-v1" if name == "reppo" else "podium/Catch"
    alone, metrics, _ = run(podium.LocalSGD(workers=1, devices=1), agent, updates, env)
    single, expected, _ = run(podium.Single(), agent, updates, env)
    # Rounding, over a memory's whole rollout and as users compile: 1.5e-6 was seen.
    assert_close(alone, single, 1e-5 if name == "pqn gru" else 1e-6)
    for key in expected.keys() - STATS:
        np.testing.assert_allclose(metrics[key], expected[key], 1e-4, 1e-5, err_msg=key)


ONE_STEP: dict[str, Agent] = {
    "a2c": a2c.make(a2c.Config(hidden_sizes=(16,))),
    "ppo normalized": ppo.make(
        ppo.Config(
            hidden_sizes=(16,),
            num_epochs=1,
            num_minibatches=1,
            normalize_advantage=False,
            normalize_obs=True,
            normalize_reward=True,
        )
    ),
}


@pytest.mark.parametrize("name", ONE_STEP)
def test_averaging_every_plain_gradient_step_is_the_global_gradient(name: str) -> None:
    agent, env = plain(ONE_STEP[name]), "CartPole-v1"
    together, _, _ = run(podium.LocalSGD(workers=4, average_every=1), agent, 3, env)
    single, _, _ = run(podium.Single(), agent, 3, env)
    assert_close(together, single, 5e-6)
    before, _, _ = run(podium.Single(), plain(agent, rate=0.0), 1, env)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before.params, single.params)
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_workers_differ_between_averages_and_are_one_after_them() -> None:
    agent, _ = AGENTS["ppo"]
    placement = podium.LocalSGD(workers=4, average_every=3)
    apart = lambda state: max(float(jnp.max(jnp.abs(x - x[:1]))) for x in jax.tree.leaves(state.workers.params))
    _, _, state = run(placement, agent, 2)
    assert apart(state) > 1e-4
    _, metrics, state = run(placement, agent, 3)
    assert apart(state) == 0
    distance = metrics["worker_distance"]
    assert np.isnan(distance[:2]).all()
    assert distance[2] > 1e-4


def test_the_mean_stands_for_the_workers_between_averages() -> None:
    agent, _ = AGENTS["ppo"]
    mean, _, state = run(podium.LocalSGD(workers=4, average_every=3), agent, 2)
    assert_close(mean.params, jax.tree.map(lambda x: np.asarray(x).mean(0), state.workers.params), 1e-6)


def test_the_first_rollout_is_that_of_every_other_placement() -> None:
    agent, _ = AGENTS["ppo"]
    ours = run(podium.LocalSGD(workers=4), agent, 1)[2].rollout
    anakin = run(podium.Anakin(1), agent, 1)[2].rollout
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(anakin), strict=True):
        assert np.asarray(x).reshape(y.shape).tobytes() == np.asarray(y).tobytes()


def test_counters_count_the_steps_of_all_workers() -> None:
    """To the last one, from where float32 counts by hundreds on; a mean leaves the count as it is."""
    agent, updates = AGENTS["a2c"]
    begin = lambda key, spec: agent.init(key, spec)._replace(env_steps=Count.zero().add(2**32 - 1))
    state, _, _ = run(podium.LocalSGD(workers=4, average_every=5), agent._replace(init=begin), updates)
    assert int(state.env_steps) == 2**32 - 1 + updates * NUM_ENVS * LENGTH


@pytest.mark.parametrize("name", ["ppo", pytest.param("dqn", marks=pytest.mark.slow)])
def test_the_number_of_devices_changes_nothing(name: str) -> None:
    agent, updates = AGENTS[name]
    one, _, _ = run(podium.LocalSGD(workers=4, average_every=2, devices=1), agent, updates)
    for devices in (2, 4):
        several, _, _ = run(podium.LocalSGD(workers=4, average_every=2, devices=devices), agent, updates)
        assert_close(one, several, 1e-6)


def largest_sums(text: str, within_conditional: bool) -> int:
    """Return the elements of the largest all-reduce in a compiled loop, in conditionals of it or elsewhere in it."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if header and not line.startswith(" "):
            name = header.group(1)
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    largest = 0
    entry = next(re.findall(r"%?([\w.\-]+)", line)[1] for line in text.splitlines() if line.startswith("ENTRY"))

    def visit(name: str, in_loop: bool, in_conditional: bool) -> None:
        nonlocal largest
        for line in bodies[name]:
            sums = re.search(r"= (.*?) all-reduce(?:-start)?\(", line)
            if sums and in_loop and in_conditional == within_conditional:
                shapes = [axes.split(",") for axes in re.findall(r"\w\[([\d,]*)\]", sums.group(1))]
                largest = max(largest, *(int(np.prod([int(n) for n in axes if n], initial=1)) for axes in shapes))
            branches = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", line)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                branches += [branch.strip().lstrip("%") for branch in group.split(",")]
            for branch in branches:
                visit(branch, in_loop, True)
            for body in re.findall(r" body=%?([\w.\-]+)", line):
                visit(body, True, in_conditional)
            for function in re.findall(r" (?:to_apply|calls)=%?([\w.\-]+)", line):
                visit(function, in_loop, in_conditional)

    visit(entry, False, False)
    return largest


def test_only_averages_cross_devices_and_only_when_due() -> None:
    agent, _ = AGENTS["ppo"]
    placement = podium.LocalSGD(workers=4, average_every=2, devices=4)
    program = placement.build(
        agent, podium.envs.make("podium/Catch"), num_envs=NUM_ENVS, rollout_length=LENGTH, max_updates=4
    )
    text = program.loop.compiled_text()
    pattern = r"= .*?\s(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    assert set(re.findall(pattern, text)) == {"all-reduce"}
    # Within the loop over iterations only scalars are summed (metrics, the check for NaN), but in its conditional.
    assert largest_sums(text, within_conditional=False) <= 64
    assert largest_sums(text, within_conditional=True) >= 16


def test_two_on_a_ring_take_the_mean_of_all() -> None:
    agent, updates = AGENTS["ppo"]
    ring, metrics, _ = run(podium.LocalSGD(workers=2, average_every=1, mix="ring"), agent, updates)
    mean, _, _ = run(podium.LocalSGD(workers=2, average_every=1), agent, updates)
    assert_close(ring, mean, 1e-6)
    assert metrics["worker_distance"][-1] == 0


@pytest.mark.parametrize("mix", [pytest.param("ring", marks=pytest.mark.slow), "exponential"])
def test_among_neighbours_the_number_of_devices_changes_nothing(mix: Any) -> None:
    agent, updates = AGENTS["ppo"]
    one, metrics, state = run(podium.LocalSGD(workers=4, average_every=1, mix=mix, devices=1), agent, updates)
    # The agent is the workers' mean, and a chunk's last row says how far they stand from it.
    numbers = [x for x in jax.tree.leaves(state.workers) if jnp.issubdtype(x.dtype, jnp.floating)]
    apart = [np.asarray(x) - np.asarray(x).mean(0) for x in numbers]
    expected = np.sqrt(sum(np.square(x).sum() for x in apart) / sum(x.size for x in apart))
    assert np.isnan(metrics["worker_distance"][:-1]).all()
    np.testing.assert_allclose(metrics["worker_distance"][-1], expected, 1e-4)
    assert expected > 1e-5
    assert_close(one.params, jax.tree.map(lambda x: np.asarray(x).mean(0), state.workers.params), 1e-6)
    several, _, _ = run(podium.LocalSGD(workers=4, average_every=1, mix=mix, devices=4), agent, updates)
    assert_close(one, several, 1e-6)


def test_among_neighbours_environments_on_the_host_are_the_same() -> None:
    agent, updates = AGENTS["a2c"]
    placement = podium.LocalSGD(workers=4, average_every=1, mix="ring", devices=2)
    pure, expected, _ = run(placement, agent, updates)
    host, metrics, _ = run(placement, agent, updates, on_host(podium.envs.make("podium/Catch")))  # type: ignore[arg-type]
    assert_close(host.params, pure.params, 1e-5)
    np.testing.assert_allclose(metrics["worker_distance"], expected["worker_distance"], 1e-3)


def test_among_neighbours_only_permutes_carry_what_workers_know() -> None:
    agent, _ = AGENTS["ppo"]
    program = podium.LocalSGD(workers=4, average_every=2, mix="ring", devices=4).build(
        agent, podium.envs.make("podium/Catch"), num_envs=NUM_ENVS, rollout_length=LENGTH, max_updates=4
    )
    text = program.loop.compiled_text()
    pattern = r"= .*?\s(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    found = re.findall(pattern, text)
    assert set(found) == {"all-reduce", "collective-permute"}
    assert found.count("collective-permute") == 2
    assert largest_sums(text, within_conditional=False) <= 64
    assert largest_sums(text, within_conditional=True) == 0
    size = sum(4 * x.size for x in jax.tree.leaves(program.agent_state(program.init(0))) if x.dtype == np.float32)
    assert re.search(rf"what workers know +between neighbours \(ring\) +{size / 1000:.3g} kB", str(program.explain()))


def test_it_says_who_runs_where_and_what_moves() -> None:
    agent, _ = AGENTS["ppo"]
    placement = podium.LocalSGD(workers=4, average_every=2, devices=2)
    assert re.search(r"worker 3 +cpu:1 .*", placement.explain())
    program = placement.build(agent, podium.envs.make("podium/Catch"), num_envs=NUM_ENVS, rollout_length=LENGTH)
    text = program.explain()
    assert "environments 12 to 15" in text
    size = sum(4 * x.size for x in jax.tree.leaves(program.agent_state(program.init(0))) if x.dtype == np.float32)
    assert f"{size / 2 / 1000:.3g} kB" in text
    assert "nothing moves" in podium.LocalSGD(workers=4, devices=1).explain()


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"workers": 0}, {}, "workers=0 must be an integer of 1 or more"),
        ({"average_every": 0.5}, {}, "average_every=0.5 must be an integer of 1 or more"),
        ({"workers": 3, "devices": 2}, {}, "workers=3 is not divisible by devices=2; use workers=4"),
        ({"workers": 1, "mix": "ring"}, {}, 'mix="ring": workers=1 has no neighbour'),
        ({"workers": 4, "mix": "star"}, {}, "mix='star' is unknown; use one of mean, ring, exponential"),
        ({"workers": 5}, {}, "num_envs=16 is not divisible by workers=5; use 15 or 20"),
        ({"workers": 4}, {"seeds": 2}, "LocalSGD runs one seed"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    env, untraced = podium.envs.make("podium/Catch"), Agent(*[None] * 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        podium.LocalSGD(**{"devices": 1, **changes}).build(untraced, env, num_envs=16, rollout_length=8, **sizes)


def test_lanes_are_those_of_each_worker() -> None:
    agent, env, placement = AGENTS["ppo"][0], podium.envs.make("podium/Catch"), podium.LocalSGD(workers=4, devices=1)
    with pytest.raises(ValueError, match="num_lanes=3 must divide num_envs=4"):
        placement.build(agent, env, num_envs=16, rollout_length=8, num_lanes=3)


def test_a_run_that_resumes_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    agent, _ = AGENTS["ppo"]
    settings: dict[str, Any] = {
        "num_envs": NUM_ENVS,
        "rollout_length": LENGTH,
        "placement": podium.LocalSGD(workers=4, average_every=3, devices=2),
        "eval_every": 0,
        "log_every": 128,
        "progress": False,
    }
    whole = podium.train(agent, "podium/Catch", num_steps=128 * 8, **settings)
    podium.train(agent, "podium/Catch", num_steps=128 * 5, run_dir=tmp_path / "run", **settings)
    resumed = podium.train(agent, "podium/Catch", num_steps=128 * 8, run_dir=tmp_path / "run", resume=True, **settings)
    assert resumed.summary["params_sha256"] == whole.summary["params_sha256"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "ppo")) for n in ("ppo", "dqn")])
def test_it_learns(name: str) -> None:
    agents = {
        "ppo": ppo.make(ppo.Config(learning_rate=1e-3)),
        "dqn": dqn.make(dqn.Config(learning_rate=1e-3, batch_size=64, buffer_capacity=20_000)),
    }
    result = podium.train(
        agents[name],
        "podium/Catch",
        num_steps=200_000,
        num_envs=64 if name == "ppo" else 16,
        rollout_length=32 if name == "ppo" else 1,
        placement=podium.LocalSGD(workers=4, devices=1),
        progress=False,
    )
    assert result.summary["eval_return"] >= 0.9


@pytest.mark.learning
@pytest.mark.parametrize("mix", ["ring", "exponential"])
def test_it_learns_among_neighbours(mix: Any) -> None:
    result = podium.train(
        ppo.make(ppo.Config(learning_rate=1e-3)),
        "podium/Catch",
        num_steps=200_000,
        num_envs=64,
        rollout_length=32,
        placement=podium.LocalSGD(workers=8, mix=mix, devices=8),
        progress=False,
    )
    assert result.summary["eval_return"] >= 0.95
