"""The registry of placements: what it refuses and which name it takes for meant; a placement from outside, trained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import episodes, keys, placement
from podium.agent import fresh_carry
from podium.agents import ppo
from podium.env import auto_reset
from podium.learn import learn
from podium.placement import PLACEMENTS
from podium.placement.contract import Asked, RunState, Sizes
from podium.placement.remote.engine import Threads
from podium.placement.remote.ray import RayEngine
from podium.report import NEVER, Report, Role, device_name
from podium.rollout import begin, rollout
from podium.testing import check_metrics


class EagerLoop:
    """A `Loop` whose every iteration is a call of one compiled function.

    Args:
      agent: without a replay.
      env: pure.
      sizes: of the run.
    """

    compile_seconds = 0.0

    def __init__(self, agent: podium.Agent, env: podium.Env, sizes: Sizes):
        self.agent, self.env, self.sizes = agent, auto_reset(env), sizes
        self.iterate = jax.jit(self.iteration)

    def start(self, key: Any) -> RunState:
        roots, index = keys.roots(key), jnp.arange(self.sizes.num_envs)
        state = self.agent.init(roots.agent, self.env.spec)
        standing = begin(roots.env, self.env, index, fresh_carry(self.agent, self.env.spec, index))
        return RunState(roots.run, jnp.zeros((), jnp.int32), state, (), standing)

    def iteration(self, state: RunState) -> tuple[RunState, Any]:
        mine, agent = keys.iteration(state.key, state.update), self.agent
        params, length = agent.actor(state.agent), self.sizes.rollout_length
        standing, trajectory, ended = rollout(
            mine.rollout, agent, self.env, params, state.rollout, length, state.update
        )
        learned = learn(mine.learn, agent, state.agent, (), trajectory, self.sizes.num_lanes)
        metrics = {**learned.metrics, **episodes.summarize(ended), "newest": state.update}
        return RunState(state.key, state.update + 1, learned.state, (), standing), metrics

    def init(self, seed: int) -> RunState:
        return self.start(jax.random.key(seed))

    def abstract_state(self) -> RunState:
        described = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return jax.tree.map(described, self.init(0))

    def lower(self) -> None:
        pass

    def compile(self) -> None:
        pass

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Any]:
        rows = []
        for _ in range(num_updates):
            state, row = self.iterate(state)
            rows.append(jax.device_get(row))
        return state, {**jax.tree.map(lambda *x: np.stack(x), *rows), "finite": np.ones(2, bool)}

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Eager(podium.Placement):
    """Compile an iteration and call it again and again.

    Args:
      lanes: that environments form.
    """

    takes_host_envs: ClassVar[bool] = False

    lanes: int = 8

    def program(self, agent: podium.Agent, env: Any, asked: Asked) -> podium.Program:
        """Return the program."""
        sizes = Sizes(asked.num_envs, asked.rollout_length, 1, asked.num_lanes or self.lanes)
        loop = EagerLoop(agent, env, sizes)
        report = lambda moves: self.explain()
        return podium.Program(
            agent, env, sizes, jax.devices()[:1], loop, "Eager", dict, report, additions={"newest": "max"}
        )

    def explain(self) -> Report:
        """Say that everything is on one device."""
        roles = [Role("everything", device_name(jax.devices()[0]))]
        return Report("Eager: one call an iteration.", roles, [], stale=NEVER, waits="nobody.")


@pytest.fixture
def outside() -> Iterator[str]:
    """Register the placement from outside for one test."""
    placement.register("eager", Eager)
    yield "eager"
    del PLACEMENTS["eager"]


SETTINGS: Mapping[str, Any] = {
    "num_envs": 8,
    "rollout_length": 9,
    "eval_episodes": 4,
    "eval_every": 0,
    "log_every": 144,
    "progress": False,
}


@dataclasses.dataclass(frozen=True)
class Odd(podium.placement.Placement):
    """A placement that nobody registered, with settings that JSON does not know."""

    rule: Any = dataclasses.replace
    thing: Any = dataclasses.field(default_factory=object)
    space: Any = None


def test_what_is_recorded_of_a_placement_is_json_and_tells_no_secret() -> None:
    engine = RayEngine({"runtime_env": {"env_vars": {"KEY": "secret"}}})
    for name, kind in PLACEMENTS.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        assert kind.may_change - podium.placement.Placement.may_change <= fields
        given = {"engine": engine, "replay_engine": engine, "replay_device": jax.devices()[0], "devices": jax.devices()}
        changed = kind(**{name: value for name, value in given.items() if name in fields})
        record = placement.record_of(changed)
        assert record["name"] == name and record["settings"].keys() == fields - given.keys()
        assert "secret" not in json.dumps(record)
        assert json.loads(json.dumps(record)) == record == placement.record_of(dataclasses.replace(changed))
    space = {"learning_rate": np.float32([0.5, 1.0]), "gamma": podium.Draws(0.5, 0.75)}
    of_odd = {
        "rule": "dataclasses.replace",
        "space": {"learning_rate": [0.5, 1.0], "gamma": {"low": 0.5, "high": 0.75, "log": False}},
    }
    assert placement.record_of(Odd(space=space)) == {"name": "Odd", "settings": of_odd}


def test_a_placement_from_outside_is_trained_as_those_from_inside(outside: str, tmp_path: Path) -> None:
    """By name from Python: to the parameters that Anakin comes to, and resumed exactly."""
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
    mine, anakin = placement.get(outside)(), podium.Anakin(1)

    def train(value: Any, updates: int, name: str, **options: Any) -> podium.Result:
        folder = tmp_path / name
        return podium.train(
            agent, "podium/Catch", num_steps=72 * updates, placement=value, run_dir=folder, **SETTINGS, **options
        )

    whole, expected = train(mine, 4, "whole"), train(anakin, 4, "anakin")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), *jax.device_get((whole.state, expected.state))
    )
    for name in ("episodes", "episode_return", "env_steps"):
        assert [row[name] for row in whole.metrics] == [row[name] for row in expected.metrics]
    assert [row["newest"] for row in whole.metrics] == [1, 3], "the maximum of two updates, as was declared"
    train(mine, 2, "parts")
    assert train(mine, 4, "parts", resume=True).summary["params_sha256"] == whole.summary["params_sha256"]
    assert "Eager: one call an iteration." in (tmp_path / "whole" / "placement.txt").read_text()


def test_it_is_checked_as_those_from_inside(outside: str) -> None:
    agent, env = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1)), podium.envs.native.catch()
    program = placement.get(outside)().build(agent, env, num_envs=8, rollout_length=9)
    check_metrics(program, program.chunk(program.init(0), 1)[1])
    with pytest.raises(ValueError, match="seeds=2: Eager runs one seed"):
        placement.get(outside)().build(agent, env, num_envs=8, rollout_length=9, seeds=2)
    with pytest.raises(ValueError, match="podium/Catch runs on the CPU, .* and Eager takes pure environments"):
        placement.get(outside)().build(agent, podium.host.on_host(env), num_envs=8, rollout_length=9)
    with pytest.raises(ValueError, match="num_envs=0 must be a positive integer"):
        placement.get(outside)().build(agent, env, num_envs=0, rollout_length=9)
    for lanes in ("2", 2.0, True, 0):
        with pytest.raises(ValueError, match=f"num_lanes={lanes!r} must be a positive integer"):
            placement.get(outside)().build(agent, env, num_envs=8, rollout_length=9, num_lanes=lanes)


def test_it_is_found_listed_and_registered_twice_without_harm(outside: str) -> None:
    placement.register("eager", Eager)
    assert placement.names() == [*PLACEMENTS] and placement.names()[-1] == "eager"
    assert placement.get("Eager") is placement.get("eager") is Eager
    with pytest.raises(ValueError, match="'eagre' is unknown. Did you mean 'eager'?"):
        placement.find("eagre")


class Plain(podium.Placement):
    """A placement that is no dataclass of its own."""


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A dataclass that is no placement."""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("my-placement", Eager, "name='my-placement' is no lower-case identifier; use one such as 'my_placement'"),
        ("Eager", Eager, "name='Eager' is no lower-case identifier"),
        ("", Eager, "name='' is no lower-case identifier"),
        ("eager", Stranger, "must be a dataclass that subclasses podium.Placement"),
        ("eager", Plain, "must be a dataclass that subclasses podium.Placement"),
        ("eager", Eager(), r"placement=Eager\(lanes=8\) must be a dataclass that subclasses podium.Placement"),
        ("anakin", Eager, "name='anakin' is that of Anakin; use another"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, value: Any, words: str) -> None:
    before = dict(PLACEMENTS)
    with pytest.raises(ValueError, match=words):
        placement.register(name, value)
    assert before == PLACEMENTS


def test_a_name_is_found_however_it_is_written() -> None:
    for name, value in PLACEMENTS.items():
        for written in (name, name.upper(), name.replace("_", "-"), name.title().replace("_", "")):
            assert placement.find(written) == name and placement.get(written) is value
    assert placement.get("LocalSGD") is podium.LocalSGD


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("anakim", "placement 'anakim' is unknown. Did you mean 'anakin'? There are: single, anakin,"),
        ("Sebulbs", "Did you mean 'sebulba'?"),
        ("zzz", "placement 'zzz' is unknown. There are: single,"),
    ],
)
def test_the_nearest_name_is_named(name: str, words: str) -> None:
    for ask in (placement.find, placement.get):
        with pytest.raises(ValueError) as refused:
            ask(name)
        assert words in str(refused.value)


@pytest.mark.parametrize(
    "placement", [podium.Sebulba, podium.CentralInference, podium.ParameterServer, podium.DistributedActors]
)
def test_an_engine_of_ones_own_is_taken_beside_the_names_there_are(placement: Any) -> None:
    engine = Threads()
    assert placement(engine=engine).engine is engine
