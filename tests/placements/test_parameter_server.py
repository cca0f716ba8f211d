"""ParameterServer: Single with one worker; with several, late gradients that are counted, and faults that are borne."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from podium import keys, replay
from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo
from podium.env import Env
from podium.finite import all_finite
from podium.placement.actors.actor import make_acting
from podium.placement.actors.gradients import GradientFunctions
from podium.placement.contract import Sizes
from podium.placement.parameter_server import Applied, Newest, Server
from podium.placement.threads.supervision import ActorError
from podium.rollout import zeros
from podium.sinks import read_metrics

NUM_ENVS = 8
UNTRACED: Any = Agent(*[None] * 8)  # type: ignore[arg-type]
"""An agent that cannot be traced: what is refused of it is refused before."""

# Adam's usual eps would make steps of the rounding that bins far from every value have for a gradient.
REPPO: Any = {"hidden_sizes": (16,), "num_epochs": 2, "num_minibatches": 2, "num_bins": 21, "adam_eps": 1e-5}
AGENTS: dict[str, tuple[Agent, int, int]] = {
    "ppo": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, learning_rate=1e-3)), 8, 3),
    "ppo gru": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(16,))), 8, 3),
    "impala": (impala.make(impala.Config(hidden_sizes=(16,))), 8, 3),
    "pqn": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=4)), 8, 3),
    "pqn gru": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "reppo": (reppo.make(reppo.Config(**REPPO)), 8, 3),
    "r2d2": (
        r2d2.make(
            r2d2.Config(
                hidden_sizes=(16,),
                batch_size=32,
                min_replay_size=64,
                buffer_capacity=1024,
                sequence_length=6,
                burn_in=2,
                sequence_period=2,
                memory_size=16,
            )
        ),
        4,
        5,
    ),
    "rainbow": (
        rainbow.make(
            rainbow.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024, num_atoms=11)
        ),
        1,
        14,
    ),
    "dqn": (dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024)), 1, 14),
}


def ranked_dqn() -> Agent:
    """Return DQN with a replay that every gradient changes: by the priorities that the next minibatch is drawn by."""
    return AGENTS["dqn"][0]._replace(replay=replay.prioritized(1024, 32, num_updates=2, min_replay_size=64))


AGENTS["dqn, ranked"] = (ranked_dqn(), 1, 14)
AGENTS["apex"] = (
    apex.make(
        apex.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024, num_actors=NUM_ENVS)
    ),
    1,
    14,
)


def catch() -> Env:
    env = podium.envs.make("podium/Catch")
    assert isinstance(env, Env)
    return env


def run(placement: Any, agent: Agent, length: int, updates: int, env: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return the program's state after `updates` updates, and the metrics."""
    env = catch() if env is None else env
    program = placement.build(agent, env, num_envs=NUM_ENVS, rollout_length=length, max_updates=updates)
    try:
        return program.chunk(program.init(0), updates)
    finally:
        program.close()


def server(workers: int, **settings: Any) -> podium.ParameterServer:
    return podium.ParameterServer(workers, **{"devices": 1, **settings})


def orphans() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-worker")]


QUICK = ("ppo",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in AGENTS]
)
def test_with_one_worker_it_is_single(name: str) -> None:
    agent, length, updates = AGENTS[name]
    env = podium.envs.make("Pendulum-v1") if name == "reppo" else None
    ours, metrics = run(server(1), agent, length, updates, env)
    single, single_metrics = run(podium.Single(), agent, length, updates, env)
    assert_close(ours.agent, single.agent, 1e-6)
    # Pendulum makes more of what rounding did to a policy.
    assert_close(ours.rollout[0], single.rollout, 1e-5 if name == "reppo" else 1e-6)
    for key in single_metrics.keys() - {"env_seconds", "inference_seconds"}:
        np.testing.assert_allclose(metrics[key], single_metrics[key], 1e-5, 1e-6, err_msg=key)
    assert (metrics["policy_lag_max"] == 0).all()
    assert ((metrics["server_idle"] >= 0) & (metrics["server_idle"] <= 1)).all()
    if name.startswith("dqn"):
        assert_close(ours.replay[0], single.replay, 1e-6)
        assert np.isfinite(metrics["loss"]).sum() == 7


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_first_rollout_of_all_workers_is_that_of_single(devices: int) -> None:
    """And where each stands is on its own device, the server's state on the first."""
    agent, length, _ = AGENTS["a2c"]
    ours, metrics = run(server(4, devices=devices), agent, length, 1)
    single, single_metrics = run(podium.Single(), agent, length, 1)
    joined = jax.tree.map(lambda *x: np.concatenate([np.asarray(part) for part in x]), *ours.rollout)
    assert_close(joined, single.rollout, 0.0)
    for key in ("episodes", "episode_return_sum", "episode_length_sum"):
        assert metrics[key] == single_metrics[key]
    on = lambda tree: {device.id for x in jax.tree.leaves(tree) for device in x.devices()}
    assert [on(own) for own in ours.rollout] == [{worker % devices} for worker in range(4)]
    assert on(ours.agent) == {0}
    assert float(ours.agent.env_steps) == NUM_ENVS * length


@pytest.mark.slow
def test_states_are_as_abstract_state_says() -> None:
    """Or a checkpoint would come back elsewhere, and in another form."""
    agent, length, _ = AGENTS["dqn"]
    program = server(4, devices=2).build(agent, catch(), num_envs=NUM_ENVS, rollout_length=length)
    first = program.init(0)
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert described(first) == described(program.abstract_state())
    following, _ = program.chunk(first, 1)
    assert described(following) == described(program.abstract_state())


@pytest.mark.slow
def test_a_trajectory_knows_the_updates_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    observe, versions = Server.observe, []

    def noted(self: Server, trajectory: Any, *rest: Any) -> float:
        versions.append(int(trajectory.policy_version))
        return observe(self, trajectory, *rest)

    monkeypatch.setattr(Server, "observe", noted)
    agent, length, updates = AGENTS["a2c"]
    run(server(1), agent, length, updates)
    assert versions == list(range(updates))


def test_workers_shuffle_apart() -> None:
    """Their number alone tells apart those of several; one alone shuffles as Single does, whatever its number."""
    agent, length, _ = AGENTS["ppo"]
    acting, sizes = make_acting(agent, catch(), NUM_ENVS, length), Sizes(NUM_ENVS, length, 1, 4)
    rollout = zeros(acting.shapes(length, NUM_ENVS))
    state = agent.init(jax.random.key(0), acting.spec)

    @functools.partial(jax.jit, static_argnums=0)
    def order(num_workers: int, worker: int) -> Any:
        functions = GradientFunctions(acting, sizes, num_workers)
        return functions.prepare(jax.random.key(0), jnp.int32(0), jnp.int32(worker), state, rollout, ())[0].order

    np.testing.assert_array_equal(order(1, 0), order(1, 1))
    assert (order(2, 0) != order(2, 1)).any()


def test_a_worker_that_stops_goes_on_with_its_next_iteration_whatever_others_observe() -> None:
    """What stops depends on keys alone, so on no order: as many gradients are applied as come before the first."""
    base = ppo.make(ppo.Config(hidden_sizes=(4,), num_epochs=4, num_minibatches=2))
    stops = lambda metrics: metrics["drawn"] > 0.7

    def grad(key: Any, state: Any, given: Any) -> Any:
        grads, aux = base.grad(key, state, given)
        return grads, aux._replace(metrics={**aux.metrics, "drawn": jax.random.uniform(key)})

    agent, workers, updates = base._replace(grad=grad, stops=stops), 2, 6
    program = server(workers).build(agent, catch(), num_envs=NUM_ENVS, rollout_length=8, max_updates=updates)
    try:
        first, lanes = program.init(0), program.sizes.num_lanes // workers
        state, metrics = program.chunk(first, updates)
    finally:
        program.close()

    def before(worker: int, number: int) -> int:
        learn_key = jax.random.fold_in(keys.iteration(first.key, number).learn, worker)
        fold_key = jax.random.split(learn_key)[1]
        each = [jax.random.fold_in(jax.random.fold_in(fold_key, i // 2), lanes + i % 2) for i in range(8)]
        return [*(bool(stops({"drawn": jax.random.uniform(key)})) for key in each), True].index(True)

    expected = [[before(worker, number) for worker in range(workers)] for number in range(updates)]
    assert len({count for row in expected for count in row}) > 3
    assert int(state.agent.opt_state[1].count) == np.sum(expected)
    assert float(state.agent.env_steps) == NUM_ENVS * 8 * updates


def test_the_server_applies_drops_and_weighs_by_lag() -> None:
    """The state is a number, to which gradients are added: 8, then late by 1, 2 and 3, each of 8."""

    def states(max_lag: int | None, weigh: bool) -> tuple[list[float], list[Applied]]:
        add = lambda state, gradient, weight: jnp.asarray(state + gradient * weight)
        steps = lambda state, trajectory: state
        settings = podium.ParameterServer(max_gradient_lag=max_lag, late="weigh" if weigh else "drop")
        ours = Server(Newest(jnp.zeros(()), 0, 0), add, steps, jax.devices()[0], settings)
        seen, given = [], []
        for _ in range(4):
            given.append(ours.apply(jnp.full((), 8.0), 0, True, lambda: None))
            seen.append(float(ours.newest.state))
        return seen, given

    assert states(None, False)[0] == [8, 16, 24, 32]
    seen, given = states(0, False)
    assert seen == [8, 8, 8, 8]
    assert [(each.lag, each.late, each.applied) for each in given] == [(0, False, True)] + 3 * [(1, True, False)]
    assert states(1, False)[0] == [8, 16, 16, 16]
    seen, given = states(0, True)
    np.testing.assert_allclose(seen, [8, 16, 20, 20 + 8 / 3], rtol=1e-6)
    assert [(each.lag, each.late, each.applied) for each in given] == [(0, False, True)] + [
        (lag, True, True) for lag in (1, 2, 3)
    ]
    np.testing.assert_allclose(states(1, True)[0], [8, 16, 20, 20 + 8 / 3], rtol=1e-6)


def take_turns(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let workers give their gradients in this order, again and again, once each of them has one."""
    apply, given, begun, ready = Server.apply, [], set(), threading.Barrier(len(names))

    def in_turn(self: Server, *gradient: Any) -> Applied:
        mine, deadline = names.index(threading.current_thread().name), time.monotonic() + 60
        if mine not in begun:
            begun.add(mine)
            ready.wait(60)
        while len(given) % len(names) != mine and time.monotonic() < deadline:
            time.sleep(0.001)
        given.append(apply(self, *gradient))
        return given[-1]

    monkeypatch.setattr(Server, "apply", in_turn)


@pytest.mark.parametrize("late", ["drop", "weigh"])
def test_late_gradients_are_counted(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch, "podium-worker-0", "podium-worker-1")
    agent, length, updates = AGENTS["a2c"]
    state, metrics = run(server(2, max_gradient_lag=0, late=late), agent, length, updates)
    assert metrics["late_gradients"][0] >= 1
    assert metrics["late_gradients"].sum() < 2 * updates
    if late == "drop":
        assert (metrics["dropped_gradients"] == metrics["late_gradients"]).all()
        assert (metrics["policy_lag_max"] == 0).all()
    else:
        assert (metrics["dropped_gradients"] == 0).all()
        assert metrics["policy_lag_max"].max() == 1
    assert float(state.agent.env_steps) == NUM_ENVS * length * updates
    assert metrics["finite"].all()


def poisoned(agent: Agent) -> Agent:
    """Return the agent with NaN in about every third gradient."""

    def grad(key: Any, state: Any, minibatch: Any) -> Any:
        gradient, aux = agent.grad(key, state, minibatch)
        bad = jnp.where(jax.random.uniform(key) < 1 / 3, jnp.nan, 1.0)
        # In one leaf of many, and there in one number.
        params = jax.tree.leaves(gradient)
        leaves = [params[0].at[(0,) * params[0].ndim].multiply(bad), *params[1:]]
        return jax.tree.unflatten(jax.tree.structure(gradient), leaves), aux

    return agent._replace(grad=grad)


def test_a_gradient_that_is_not_finite_is_as_if_it_had_never_been() -> None:
    agent, length, updates = AGENTS["ppo"]
    bad = poisoned(agent)

    def apply(state: Any, gradient: Any) -> Any:
        good = all_finite(gradient)
        return jax.tree.map(lambda old, new: jnp.where(good, new, old), state, agent.apply(state, gradient))

    ours, metrics = run(server(1), bad, length, updates)
    oracle, _ = run(podium.Single(), bad._replace(apply=apply), length, updates)
    lost, all_of_them = metrics["nonfinite_gradients"].sum(), 4 * 2 * updates
    assert 0 < lost < all_of_them
    assert metrics["finite"].all() and (metrics["dropped_gradients"] == 0).all()
    assert_close(ours.agent, oracle.agent, 1e-6)


def test_gradients_that_are_not_finite_reach_nobody_beside_good_ones() -> None:
    agent, length, updates = AGENTS["ppo"]
    _, metrics = run(server(4, max_gradient_lag=0), poisoned(agent), length, updates)
    assert metrics["nonfinite_gradients"].sum() > 0
    assert metrics["finite"].all()
    assert np.isfinite(metrics["loss"]).all()


def hooked(what: Callable[[int], Any]) -> Env:
    """Return Catch, whose steps call `what` with their number; the environments of a worker step together."""
    env, calls, lock = catch(), itertools.count(1), threading.Lock()

    def hook(reward: Any) -> Any:
        with lock:
            number = next(calls)
        what(number)
        return np.zeros_like(reward)

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = env.step(key, state, action)
        shape = jax.ShapeDtypeStruct(timestep.reward.shape, timestep.reward.dtype)
        nothing = jax.pure_callback(hook, shape, timestep.reward, vmap_method="broadcast_all")
        return state, timestep._replace(reward=timestep.reward + nothing)

    return env._replace(step=step)


def faulty(at: int, what: Callable[[], Any]) -> Env:
    return hooked(lambda number: what() if number == at else None)


def fail() -> None:
    raise ZeroDivisionError("the simulator broke")


def test_a_worker_that_raises_ends_the_run_with_its_traceback() -> None:
    agent, length, _ = AGENTS["a2c"]
    with pytest.raises(ActorError, match=r"(?s)podium-worker-\d died of .*Traceback.*the simulator broke"):
        run(server(2), agent, length, 10, faulty(30, fail))
    assert not orphans()


@pytest.mark.parametrize("name", ["dqn", pytest.param("a2c", marks=pytest.mark.slow)])
def test_an_iteration_that_failed_is_repeated_as_if_it_had_not_begun(name: str) -> None:
    """In one worker, in the midst of a rollout: bit for bit the run without the fault, the replay too."""
    agent, length, updates = AGENTS[name]
    at = length * (updates - 1) + (length + 1) // 2
    ours, metrics = run(server(1, restarts=1), agent, length, updates, faulty(at, fail))
    whole, _ = run(server(1), agent, length, updates, faulty(0, fail))
    assert metrics["dropped_rollouts"].tolist() == [0] * (updates - 1) + [1]
    assert_close(ours._replace(key=()), whole._replace(key=()), 0.0)


def test_no_more_iterations_are_repeated_than_restarts_allows() -> None:
    agent, length, _ = AGENTS["a2c"]
    env = hooked(lambda number: fail() if number in (20, 40) else None)
    with pytest.raises(ActorError, match="the simulator broke"):
        run(server(2, restarts=1), agent, length, 10, env)
    assert not orphans()


def test_a_worker_that_hangs_ends_the_run_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.placement.threads.supervision.STOP_SECONDS", 0.5)
    release = threading.Event()
    agent, length, _ = AGENTS["a2c"]
    try:
        with pytest.raises(ActorError, match=r"(?s)not come a step further for 5 s; it is at.*_iterate"):
            run(server(1, actor_timeout=5.0), agent, length, 10, faulty(20, lambda: release.wait(120)))
    finally:
        release.set()
    deadline = time.monotonic() + 20
    while orphans() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not orphans()


@pytest.mark.parametrize("name", ["a2c", pytest.param("dqn", marks=pytest.mark.slow)])
def test_a_run_that_resumes_is_the_run_that_was_not_stopped(name: str, tmp_path: Path) -> None:
    agent, length, _ = AGENTS[name]
    steps = NUM_ENVS * length

    def train(run_dir: str, updates: int, resume: bool = False) -> podium.Result:
        return podium.train(
            agent,
            "podium/Catch",
            num_steps=updates * steps,
            num_envs=NUM_ENVS,
            rollout_length=length,
            placement=server(1),
            eval_every=4 * steps,
            eval_episodes=8,
            log_every=2 * steps,
            run_dir=tmp_path / run_dir,
            resume=resume,
            progress=False,
        )

    whole = train("whole", 20)
    train("parts", 12)
    parts = train("parts", 20, resume=True)
    assert parts.summary["params_sha256"] == whole.summary["params_sha256"]
    assert_close(parts.state, whole.state, 0.0)
    busy = {"env_seconds", "inference_seconds", "worker_idle", "server_idle"}
    # A run that ends is evaluated with sampled play too, and the first part did end.
    left_out = busy | {"wall_seconds", "steps_per_second", "compile_seconds", "eval_return_sampled"}
    rows = [
        [{k: v for k, v in row.items() if k not in left_out} for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("parts", "whole")
    ]
    assert len(rows[1]) == 10
    np.testing.assert_equal(*rows)
    assert re.search("worker +cpu:0 +environments 0 to 7", (tmp_path / "whole" / "placement.txt").read_text())


def test_the_bytes_explained_are_those_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four workers two are on the other device; A2C takes one gradient a rollout."""
    agent, length, _ = AGENTS["a2c"]
    moved: dict[str, list[int]] = {"gradients": [], "trajectories": []}
    apply, observe = Server.apply, Server.observe
    first = jax.devices()[0]
    away = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if x.devices() != {first})

    def counted_apply(self: Server, gradient: Any, *rest: Any) -> Applied:
        moved["gradients"].append(away(gradient))
        return apply(self, gradient, *rest)

    def counted_observe(self: Server, trajectory: Any, *rest: Any) -> float:
        moved["trajectories"].append(away(trajectory))
        return observe(self, trajectory, *rest)

    monkeypatch.setattr(Server, "apply", counted_apply)
    monkeypatch.setattr(Server, "observe", counted_observe)
    program = server(4, devices=2).build(agent, catch(), num_envs=NUM_ENVS, rollout_length=length)
    state, _ = program.chunk(program.init(0), 1)
    explained = program.bytes_per_update()
    assert {name: sum(amounts) for name, amounts in moved.items()} == {name: explained[name] for name in moved}
    assert explained["states"] == 2 * 2 * sum(x.nbytes for x in jax.tree.leaves(state.agent))
    assert re.search("worker +cpu:1 +environments 2 to 3", program.explain())
    assert "nothing moves" in server(4).build(agent, catch(), num_envs=NUM_ENVS, rollout_length=length).explain()
    assert "dropped if more than 2" in server(4, max_gradient_lag=2).explain()
    assert re.search("gradients +workers to server", server(4, devices=2).explain())


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"workers": 0}, {}, "workers=0 must be an integer of 1 or more"),
        ({"workers": 3}, {}, "num_envs=8 is not divisible by workers=3; use 6 or 9"),
        ({"workers": 16}, {}, "num_envs=8 is not divisible by workers=16; use 16"),
        ({"max_gradient_lag": -1}, {}, "max_gradient_lag=-1 must be an integer of 0 or more"),
        ({"restarts": -1}, {}, "restarts=-1 must be an integer of 0 or more"),
        ({"restarts": None}, {}, "restarts=None must be"),
        ({"late": "keep"}, {}, "late='keep' is not known; use 'drop' or 'weigh'"),
        ({"late": "weigh"}, {}, "use max_gradient_lag=0"),
        ({"actor_timeout": 0.0}, {}, "actor_timeout=0.0 must be finite and greater than 0"),
        ({"devices": 9}, {}, "devices=9, but JAX has started with 8"),
        ({}, {"seeds": 2}, "seeds=2: ParameterServer runs one seed"),
        ({}, {"num_lanes": 2}, "num_lanes=2 is not divisible by workers=4"),
        ({}, {"rollout_length": 0}, "rollout_length=0 must be"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(changes: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"num_envs": NUM_ENVS, "rollout_length": 8, **sizes}
    with pytest.raises(ValueError, match=words):
        podium.ParameterServer(**changes).build(UNTRACED, catch(), **settings)


def test_lanes_that_no_worker_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="In each of workers=4: num_lanes=4 must divide num_envs=2"):
        server(4).build(AGENTS["a2c"][0], catch(), num_envs=NUM_ENVS, rollout_length=8, num_lanes=16)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.distributed.num_processes", lambda: 2)
    with pytest.raises(ValueError, match="2 processes: ParameterServer runs in one"):
        server(4).build(UNTRACED, catch(), num_envs=NUM_ENVS, rollout_length=8)


@pytest.mark.learning
def test_four_workers_learn_catch() -> None:
    """The best is 1 in every episode; seen: 1.0 after 300,000 steps."""
    agent = a2c.make(a2c.Config(learning_rate=1e-3))
    result = podium.train(
        agent,
        "podium/Catch",
        num_steps=300_000,
        num_envs=32,
        rollout_length=16,
        placement=server(4),
        eval_every=0,
        progress=False,
    )
    assert result.interrupted is None, "stopped from outside, which says nothing about learning"
    print(result.summary)
    assert result.summary["eval_return"] >= 0.9
    assert max(row["policy_lag_max"] for row in result.metrics) >= 1
