"""Anakin's model axis and fully sharded parameters: one device's mathematics, a part of its memory, and what moves."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from alike import assert_close
from jax.sharding import PartitionSpec as P

import podium
from podium import layout
from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, rainbow
from podium.checkpoint import Checkpoints
from podium.devices import make_mesh
from podium.types import DiscreteSpec

TOLERANCE = 1e-6
UPDATES, GRADIENTS = 5, 4
HIDDEN = (256, 256)
FORBIDDEN = ("all-to-all", "collective-permute", "collective-broadcast")
SIZES: dict[str, Any] = {"num_envs": 16, "rollout_length": 8, "num_lanes": 8}


def wide_ppo(**changes: Any) -> Agent:
    config = {"hidden_sizes": HIDDEN, "num_epochs": 2, "num_minibatches": 2, "learning_rate": 1e-3} | changes
    return ppo.make(ppo.Config(**config))


def recurrent(memory: str) -> Agent:
    return wide_ppo(hidden_sizes=(128,), memory=memory, memory_size=128)


def wide_dqn(algorithm: Any = dqn, **changes: Any) -> Agent:
    return algorithm.make(
        algorithm.Config(
            hidden_sizes=HIDDEN, batch_size=32, num_updates=2, buffer_capacity=2048, min_replay_size=128,
            learning_rate=1e-3, target_update_period=3, **changes,
        )
    )  # fmt: skip


AGENTS: dict[str, tuple[Callable[[], Agent], str]] = {
    "ppo": (wide_ppo, "podium/Catch"),
    "ppo-gru": (lambda: recurrent("gru"), "podium/RepeatFirst"),
    "ppo-lstm": (lambda: recurrent("lstm"), "podium/RepeatFirst"),
    "ppo-continuous": (lambda: wide_ppo(normalize_obs=True, normalize_reward=True), "Pendulum-v1"),
    "a2c": (lambda: a2c.make(a2c.Config(hidden_sizes=HIDDEN)), "podium/Catch"),
    "impala": (lambda: impala.make(impala.Config(hidden_sizes=HIDDEN, num_minibatches=2)), "podium/Catch"),
    "impala-gru": (
        lambda: impala.make(impala.Config(hidden_sizes=(128,), memory="gru", memory_size=128)),
        "podium/RepeatFirst",
    ),
    "pqn": (lambda: pqn.make(pqn.Config(hidden_sizes=HIDDEN, num_minibatches=2)), "podium/Catch"),
    "dqn": (wide_dqn, "podium/Catch"),
    "apex": (lambda: wide_dqn(apex), "podium/Catch"),
    "rainbow": (lambda: wide_dqn(rainbow, num_atoms=11), "podium/Catch"),
}
ONE = podium.Anakin(1)
LAYOUTS = {
    "1x2": podium.Anakin(2, model=2),
    "2x2": podium.Anakin(4, model=2),
    "4x2": podium.Anakin(8, model=2),
    "sharded": podium.Anakin(4, shard="parameters"),
    "2x2 sharded": podium.Anakin(4, model=2, shard="parameters"),
}
QUICK = {("ppo", "1x2"), ("ppo", "sharded")}


def cases(*names: str, without: str = "") -> list[Any]:
    """Return every agent but one beside every layout, those that no change need wait for marked slow.

    One process has all of an agent, so that each of its programs is compiled and run once.
    """
    slow, together = pytest.mark.slow, pytest.mark.xdist_group
    return [
        pytest.param(name, where, marks=[together(f"model axis {name}"), *[slow] * ((name, where) not in QUICK)])
        for name in AGENTS
        for where in names
        if name != without
    ]


class Run(NamedTuple):
    """A program, its state at the start and after `UPDATES`, on the host, and the bytes its first device then held."""

    program: Any
    first: Any
    last: Any
    held: int


_runs: dict[tuple[str, Any], Run] = {}


def build(name: str, placement: Any) -> Any:
    make, env = AGENTS[name]
    return placement.build(make(), podium.envs.make(env), max_updates=UPDATES, **SIZES)


def run(name: str, placement: Any) -> Run:
    """Train, once a session."""
    if (name, placement) not in _runs:
        program = build(name, placement)
        state = program.init(3)
        first = jax.device_get(state)
        state, _ = program.chunk(state, UPDATES)
        _runs[name, placement] = Run(program, first, jax.device_get(state), held_by(state.agent, program.devices[0]))
    return _runs[name, placement]


def held_by(tree: Any, device: jax.Device) -> int:
    """Return the bytes of `tree` on a device."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def params(program: Any, state: Any) -> Any:
    return program.agent.actor(state.agent)


# The mathematics.


@pytest.mark.parametrize(("name", "where"), cases(*LAYOUTS))
def test_devices_that_share_a_network_train_what_one_trains(name: str, where: str) -> None:
    one, several = run(name, ONE), run(name, LAYOUTS[where])
    assert_close(params(one.program, one.first), params(several.program, several.first), 0)
    assert_close(params(one.program, one.last), params(several.program, several.last), TOLERANCE)
    moved = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), params(one.program, one.first), params(one.program, one.last)
    )
    assert max(jax.tree.leaves(moved)) > 1e-3, "parameters that never moved would agree as well"


# What a device holds.


# What is not split of Rainbow, its heads, is a larger part of it.
@pytest.mark.parametrize(("name", "where"), cases("1x2", "sharded", without="rainbow"))
def test_a_device_holds_its_part_of_the_state(name: str, where: str) -> None:
    most = {"1x2": 0.55, "sharded": 0.3}[where]
    several = run(name, LAYOUTS[where])
    assert several.held <= most * run(name, ONE).held
    said = re.search(r"A device holds ([\d.]+) ([kM]B) of the agent's State", several.program.explain().headline)
    assert said is not None
    assert float(said[1]) * {"kB": 1e3, "MB": 1e6}[said[2]] == pytest.approx(several.held, rel=0.01)


# What moves.


# The noise of Rainbow's layers is one vector, drawn in parts and dealt out: some thousand numbers a gradient.
@pytest.mark.parametrize(("name", "where"), cases(*LAYOUTS, without="rainbow"))
def test_nothing_is_dealt_out_anew(name: str, where: str) -> None:
    text = run(name, LAYOUTS[where]).program.loop.compiled_text()
    assert not [kind for kind in FORBIDDEN if re.search(rf"\s{kind}(-start)?\(", text)]


@pytest.mark.slow
def test_moments_in_one_vector_would_be_dealt_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr("podium.layout.optimizers.by_array", contextlib.nullcontext)
    text = build("ppo", LAYOUTS["2x2"]).loop.compiled_text()
    assert " all-to-all(" in text or " collective-permute(" in text


@pytest.mark.slow
def test_gates_in_one_product_would_be_dealt_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr("podium.networks.cells.units_are_split", lambda: False)
    assert " all-to-all(" in build("ppo-lstm", LAYOUTS["1x2"]).loop.compiled_text()


def test_the_parameters_gathered_are_those_that_it_says() -> None:
    """Once to play, and once a gradient: each of the two is in the program's text, and here they are as large."""
    program = run("ppo", LAYOUTS["sharded"]).program
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program.loop.compiled_text())
    assert len(shapes) == 2 * 8, shapes
    in_text = sum(4 * int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)
    assert 2 * program.bytes_per_update()["parameters gathered"] == in_text * (1 + GRADIENTS)


@pytest.mark.parametrize(
    ("placement", "words", "moves"),
    [
        (podium.Anakin(8), "", ["gradient sums"]),
        (LAYOUTS["1x2"], "by 1 group of 2 devices, the parameters of wide layers by the 2 of", ["activations"]),
        (LAYOUTS["4x2"], "by 4 groups of 2 devices, the parameters", ["gradient sums", "activations"]),
        (LAYOUTS["sharded"], "by 4 devices, the parameters of wide", ["gradient sums", "parameters gathered"]),
        (LAYOUTS["2x2 sharded"], "by all 4", ["gradient sums", "parameters gathered", "activations"]),
    ],
)
def test_it_says_who_shares_what_and_what_moves(placement: Any, words: str, moves: list[str]) -> None:
    for report in (placement.explain(), build("ppo", placement).explain()):
        assert words in report.headline
        assert [move.name for move in report.moves] == moves
        assert all(move in report.drawing for move in moves)
        assert ("part 2 of 2 of the network" in report.words) == (placement.model == 2)
    amounts = {move.name: move.amount for move in report.moves}
    assert all(amounts[name] > 0 for name in moves if name != "activations")


# Checkpoints.


def test_a_checkpoint_moves_between_layouts(tmp_path: Path) -> None:
    """One device's State, moments and all, is the same bits after a stay in each layout, where it lies as it should."""
    original = run("ppo", ONE)
    state = original.last
    for number, placement in enumerate([*LAYOUTS.values(), ONE]):
        program = build("ppo", placement)
        checkpoints = Checkpoints(tmp_path / str(number))
        checkpoints.save(1, state)
        state, _, _ = checkpoints.restore(program.abstract_state())
        checkpoints.close()
        target = program.abstract_state().agent
        assert jax.tree.map(lambda x: x.sharding, state.agent) == jax.tree.map(lambda x: x.sharding, target)
    assert jax.tree.structure(original.last) == jax.tree.structure(state)
    assert_close(original.last.agent, state.agent, 0)
    assert_close(original.last.rollout, state.rollout, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_run_resumes_in_another_layout(name: str, tmp_path: Path) -> None:
    make, env = AGENTS[name]
    steps = SIZES["num_envs"] * SIZES["rollout_length"]

    def train(placement: Any, updates: int, folder: Path, **options: Any) -> Any:
        return podium.train(
            make(), env, placement=placement, num_steps=updates * steps, run_dir=folder, progress=False,
            eval_episodes=4, eval_steps=8, checkpoint_every=steps, log_every=steps, **SIZES, **options,
        )  # fmt: skip

    whole = train(ONE, UPDATES, tmp_path / "whole")
    order = [ONE, LAYOUTS["2x2"], LAYOUTS["sharded"], ONE]
    for updates, placement in zip((1, 3, 4, UPDATES), order, strict=True):
        moved = train(placement, updates, tmp_path / "moved", resume=updates > 1)
    assert_close(whole.policy.params, moved.policy.params, TOLERANCE)
    policy = podium.load(tmp_path / "moved", step=4 * steps)  # Saved with parameters sharded.
    assert_close(policy.params, podium.load(tmp_path / "whole", step=4 * steps).params, TOLERANCE)


# Bad input.


def never(*args: Any) -> Any:
    raise AssertionError("traced")


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        (podium.Anakin(8, model=3), {}, "model=3 does not divide the 8 devices; use 1 or 2 or 4 or 8."),
        (podium.Anakin(1, model=2), {}, "model=2 does not divide the 1 devices; use 1."),
        (podium.Anakin(8, model=0), {}, "model=0 must be a positive integer."),
        (podium.Anakin(8, model=2.0), {}, "model=2.0 must be a positive integer."),  # type: ignore[arg-type]
        (podium.Anakin(8, shard="all"), {}, "shard='all' is unknown; use 'parameters', or leave it out."),  # type: ignore[arg-type]
        (podium.Anakin(8, model=2), {"seeds": 4}, "model=2 splits the network of one run, but seeds=4; start a run"),
        (podium.Anakin(8, shard="parameters"), {"seeds": 8}, "shard='parameters' splits the network of one run, but"),
    ],
)
def test_bad_input_is_refused_before_anything_is_traced(
    placement: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    agent = ppo.make()._replace(init=never, act=never, plan=never, grad=never)
    with pytest.raises(ValueError, match=re.escape(message)):
        podium.train(
            agent, "podium/Catch", num_steps=1000, placement=placement, run_dir=tmp_path / "run", **SIZES, **changes
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("placement", "widths", "message"),
    [
        (LAYOUTS["1x2"], (64, 64), r"model=2 has nothing to split: no array of ppo has 128 or more numbers in its"),
        (
            podium.Anakin(8, model=4), (256, 254),
            r"into 4 parts, but the last axis of params/actor/params/Dense_1/\S+ is 254; use a width of 252 or 256,",
        ),
        (LAYOUTS["2x2 sharded"], (130, 256), r"model=2 with shard='parameters' splits wide arrays into 4 parts, but"),
    ],
)  # fmt: skip
def test_widths_that_cannot_be_split_are_refused(
    placement: Any, widths: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    agent = ppo.make(ppo.Config(hidden_sizes=widths))
    with pytest.raises(ValueError, match=message):
        podium.train(agent, "podium/Catch", num_steps=1000, placement=placement, run_dir=tmp_path / "run", **SIZES)
    assert not list(tmp_path.iterdir())


# The rule.


def test_what_is_split_is_decided_by_shape() -> None:
    mesh = make_mesh(jax.devices()[:4], "env", 2)
    agent, env = wide_ppo(normalize_obs=True), podium.envs.make("podium/Catch")
    laid = layout.split(mesh, "model=2", agent, env.spec, over_env=False)
    state = jax.eval_shape(lambda key: laid.agent(agent).init(key, env.spec), jax.random.key(0))
    specs = laid.specs(state)
    split = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))
        if any(spec)
    }
    assert {name.split("/")[-1] for name in split} == {"kernel", "bias"}
    assert len(split) == 3 * 8, split  # Parameters and both moments: two networks of two layers, kernel and bias.


def test_a_head_of_many_actions_stays_whole_where_it_cannot_be_split() -> None:
    mesh = make_mesh(jax.devices()[:4], "env", 2)
    env = podium.envs.make("podium/Catch")
    spec = dataclasses.replace(env.spec, action=DiscreteSpec(131))
    laid = layout.split(mesh, "model=2", wide_ppo(), spec, over_env=False)
    assert laid.whole == {131}
    with pytest.raises(ValueError, match="nothing to split"):
        layout.split(mesh, "model=2", wide_ppo(hidden_sizes=(64,)), spec, over_env=False)
