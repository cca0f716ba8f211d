"""Environments on the CPU: the contract and its checker, pure environments on the host, and Gymnasium's."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs, keys, testing
from podium.agent import ActOutput, Agent
from podium.env import auto_reset
from podium.host import CheckedHostEnv, HostEnvFactory, on_host
from podium.rollout import begin, rollout
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is in the extras gymnasium, atari and dev")


class Clock(CheckedHostEnv):
    """A NumPy environment: the observation is (a number drawn for the episode, time); it ends after 3 steps.

    Environments reset in the same step.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, first_index: int):
        super().__init__(spec, num_envs)
        self.generators = [np.random.default_rng((seed, first_index + i)) for i in range(num_envs)]
        self.obs = np.zeros((num_envs, 2), np.float32)

    def draw(self, which: Any) -> np.ndarray:
        return np.array([[self.generators[i].random(), 0] for i in which], np.float32).reshape(-1, 2)

    def _reset(self) -> TimeStep:
        self.obs = self.draw(range(self.num_envs))
        no = np.zeros(self.num_envs, bool)
        return TimeStep(self.obs.copy(), np.zeros(self.num_envs, np.float32), no, no, self.obs.copy())

    def _send(self, action: np.ndarray) -> None:
        self.action = action

    def _recv(self) -> TimeStep:
        self.obs[:, 1] += 1
        next_obs, ended = self.obs.copy(), self.obs[:, 1] == 3
        self.obs[ended] = self.draw(np.flatnonzero(ended))
        return TimeStep(self.obs.copy(), self.action.astype(np.float32), ended, np.zeros_like(ended), next_obs)

    def _close(self) -> None:
        pass


class Overwriting(Clock):
    def _reset(self):
        return super()._reset()._replace(obs=self.obs)

    def _recv(self):
        return super()._recv()._replace(obs=self.obs)


class Forgetful(Clock):
    """Gives the first observation of the next episode for the last of this one."""

    def _recv(self):
        timestep = super()._recv()
        return timestep._replace(next_obs=timestep.obs)


class SeededByPlace(Clock):
    def __init__(self, spec, num_envs, seed, first_index):
        super().__init__(spec, num_envs, seed, 0)


class Unseeded(Clock):
    def draw(self, which):
        return np.array([[np.random.random(), 0] for _ in which], np.float32).reshape(-1, 2)


class Obliging(Clock):
    def send(self, action):
        self._remedy = {}
        self._send(np.resize(np.abs(np.nan_to_num(np.asarray(action).ravel())), self.num_envs))


class Marking(Clock):
    """Says that every row is a transition, though it resets in the next step."""

    def _reset(self):
        return super()._reset()._replace(valid=np.zeros(self.num_envs, bool))

    def _recv(self):
        timestep = super()._recv()
        return timestep._replace(valid=np.ones(self.num_envs, bool), next_obs=timestep.obs)


class Widening(Clock):
    def _recv(self):
        timestep = super()._recv()
        return timestep._replace(reward=timestep.reward.astype(np.float64))


def clocks(kind: type[Clock] = Clock, limit: int = 3, **options: Any) -> HostEnvFactory:
    spec = EnvSpec("test/Clock", ArraySpec((2,), low=0, high=3), DiscreteSpec(2), limit)
    return HostEnvFactory(spec, lambda *sizes: kind(spec, *sizes), kind is Marking, **options)


def test_check_host_env_accepts_what_keeps_the_contract():
    testing.check_host_env(clocks(), num_steps=12)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (clocks(Overwriting), "what step 0 returned was overwritten by a later one"),
        (clocks(Forgetful), "next_obs at the end of an episode is the first observation of the next one"),
        (clocks(SeededByPlace), "grouped otherwise, environments gave other results"),
        (clocks(Unseeded), "the same seed and actions gave other results"),
        (clocks(Obliging), "recv before reset|send before reset"),
        (clocks(Marking), "rows with valid=False are not exactly those after the end"),
        (clocks(Widening), r"recv returns reward as float64\[4\]. It must be float32\[4\]"),
        (clocks(limit=2), "an episode went on for 3 steps, but spec.max_episode_steps=2"),
        (dataclasses.replace(clocks(), resets_in_next_step=True), "valid=None, but resets_in_next_step=True"),
        (clocks(frames_per_step=0), "frames_per_step=0"),
        (clocks(record={"seeds": {1}}), "record cannot be written as JSON"),
        (clocks(evaluation=on_host(testing.probe_value())), "evaluation has other spaces"),
    ],
)
def test_check_host_env_says_what_is_broken(broken, sentence):
    with pytest.raises(testing.ContractError, match=sentence):
        testing.check_host_env(broken, num_steps=12)


@pytest.mark.parametrize("arguments", [{"num_envs": 1}, {"num_steps": 0}])
def test_check_host_env_refuses_too_little_play(arguments):
    with pytest.raises(ValueError, match="must be at least 2 and 1"):
        testing.check_host_env(clocks(), **arguments)


def test_pure_environment_on_host_keeps_the_contract():
    testing.check_host_env(on_host(envs.make("podium/Corridor", length=4, max_steps=5)), num_steps=16)


def test_agents_that_act_together_keep_the_contract_on_the_host():
    team = on_host(testing.probe_team(num_agents=2, length=3, dies=True))
    testing.check_host_env(team, num_steps=8)
    with pytest.raises(testing.ContractError, match="resets_in_next_step is True where several agents act together"):
        testing.check_host_env(dataclasses.replace(team, resets_in_next_step=True), num_steps=8)


def test_on_host_equals_the_fused_rollout():
    seed, num_envs, num_steps = 3, 4, 14
    env = auto_reset(envs.make("podium/Catch", rows=4, columns=5))

    def act(keys: Any, params: Any, carry: Any, obs: Any, first: Any, greedy: bool) -> ActOutput:
        return ActOutput(jax.vmap(lambda key: jax.random.randint(key, (), 0, 3))(keys), carry, {})

    agent = Agent(None, None, None, act, None, None, None, None)  # type: ignore[arg-type]

    @jax.jit
    def fused(key: jax.Array) -> Any:
        state = begin(keys.roots(key).env, env, jnp.arange(num_envs), ())
        return rollout(jax.random.key(0), agent, env, (), state, num_steps, jnp.int32(0))[1]

    trajectory = jax.device_get(fused(jax.random.key(seed)))
    host = on_host(env).make(num_envs, seed, 0)
    obs = host.reset().obs
    for t in range(num_steps):
        np.testing.assert_array_equal(obs, trajectory.obs[t])
        host.send(trajectory.action[t])
        timestep = host.recv()
        for field in ("reward", "terminated", "truncated", "next_obs"):
            np.testing.assert_array_equal(getattr(timestep, field), getattr(trajectory, field)[t])
        obs = timestep.obs
    assert trajectory.terminated.any()


def test_anakin_refuses_environments_on_the_cpu():
    agent = podium.agents.make("ppo")
    with pytest.raises(ValueError, match=r"test/Clock runs on the CPU, .* use placement=podium\.Sebulba"):
        podium.Anakin().build(agent, clocks(), num_envs=8, rollout_length=8)


class Line(gymnasium.Env):
    """Walk on a line from 0: action 1 moves on, and position 2 terminates; the third step truncates."""

    def __init__(self, nested: bool = False, start: int = 0):
        place = gymnasium.spaces.Box(0, 2, (1,), np.float64)
        time = gymnasium.spaces.Discrete(4)
        self.observation_space = gymnasium.spaces.Dict({"place": place, "time": time}) if nested else place
        self.action_space = gymnasium.spaces.Discrete(2, start=start)
        self.nested = nested
        self.place, self.time = 0, 0

    def observe(self) -> Any:
        place = np.array([self.place], np.float64)
        return {"place": place, "time": self.time} if self.nested else place

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place, self.time = 0, 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.place, self.time = self.place + int(action), self.time + 1
        return self.observe(), self.place / 2, self.place == 2, self.time == 3, {"note": "left out"}


def lines(mode: str, **options: Any) -> HostEnvFactory:
    vector = gymnasium.vector.SyncVectorEnv
    return envs.from_gymnasium(
        lambda num_envs: vector([lambda: Line(**options)] * num_envs, autoreset_mode=mode), max_episode_steps=3
    )


def rows(host_envs: HostEnvFactory, actions: list[list[int]]) -> dict[str, list]:
    """Return what each environment of a batch gives, step by step; row 0 is the reset."""
    env = host_envs.make(len(actions[0]), 0, 0)
    steps = [env.reset()]
    for action in actions:
        env.send(np.array(action))
        steps.append(env.recv())
    env.close()
    fields = ("obs", "next_obs", "reward", "terminated", "truncated", "valid")
    return {field: [getattr(step, field) for step in steps] for field in fields}


# The first environment terminates in its second step, the second is truncated in its third.
ACTIONS = [[1, 0], [1, 1], [0, 0], [1, 0], [0, 1]]


def test_gymnasium_next_step_marks_the_reset_rows():
    seen = rows(lines("NextStep"), ACTIONS)
    assert [x.ravel().tolist() for x in seen["obs"]] == [[0, 0], [1, 0], [2, 1], [0, 1], [1, 0], [1, 1]]
    assert [x.ravel().tolist() for x in seen["next_obs"]] == [x.ravel().tolist() for x in seen["obs"]]
    assert [x.tolist() for x in seen["reward"]] == [[0, 0], [0.5, 0], [1, 0.5], [0, 0.5], [0.5, 0], [0.5, 0.5]]
    assert [x[0] for x in seen["terminated"]] == [False, False, True, False, False, False]
    assert [x[1] for x in seen["truncated"]] == [False, False, False, True, False, False]
    assert not any(x[1] for x in seen["terminated"]) and not any(x[0] for x in seen["truncated"])
    assert [x[0] for x in seen["valid"]] == [False, True, True, False, True, True]
    assert [x[1] for x in seen["valid"]] == [False, True, True, True, False, True]


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_gymnasium_same_step_and_disabled_keep_the_last_observation(mode):
    seen = rows(lines(mode), ACTIONS)
    assert [x.ravel().tolist() for x in seen["obs"]] == [[0, 0], [1, 0], [0, 1], [0, 0], [1, 0], [0, 1]]
    assert [x.ravel().tolist() for x in seen["next_obs"]] == [[0, 0], [1, 0], [2, 1], [0, 1], [1, 0], [1, 1]]
    assert [x.tolist() for x in seen["reward"]] == [[0, 0], [0.5, 0], [1, 0.5], [0, 0.5], [0.5, 0], [0.5, 0.5]]
    assert [x.tolist() for x in seen["terminated"]] == [[t == 2, False] for t in range(6)]
    assert [x.tolist() for x in seen["truncated"]] == [[t == 5, t == 3] for t in range(6)]
    assert seen["valid"] == [None] * 6


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("nested", [False, True])
def test_gymnasium_keeps_the_contract_in_every_mode(mode, nested):
    testing.check_host_env(lines(mode, nested=nested), num_steps=12)


def test_gymnasium_mode_is_told_apart_though_metadata_is_shared():
    next_step = lines("NextStep").make(1, 0, 0)
    same_step = lines("SameStep").make(1, 0, 0)  # Its mode now stands in Line.metadata.
    assert next_step.reset().valid is not None and same_step.reset().valid is None


def test_gymnasium_specs_have_32_bits():
    spec = lines("NextStep", nested=True).spec
    assert spec.obs["place"].dtype == np.float32 and spec.obs["time"] == DiscreteSpec(4)
    assert spec.name == "SyncVectorEnv" and spec.max_episode_steps == 3


class Counter(gymnasium.Env):
    """Shows a number of 64 bits, whose bounds are those of its type."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, np.iinfo(np.int64).max, (1,), np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([2**31 - 2]), {}

    def step(self, action: Any) -> Any:
        return np.array([2**31 - 1 + int(action)]), 0.0, False, False, {}


def test_gymnasium_integers_beyond_32_bits_are_refused_and_never_wrapped():
    counters = envs.from_gymnasium(lambda num_envs: gymnasium.vector.SyncVectorEnv([Counter] * num_envs))
    assert (counters.spec.obs.low[0], counters.spec.obs.high[0]) == (0, 2**31 - 1)
    env = counters.make(1, 0, 0)
    assert env.reset().obs.tolist() == [[2**31 - 2]]
    env.send(np.zeros(1, int))
    assert env.recv().obs.tolist() == [[2**31 - 1]]
    env.send(np.ones(1, int))
    with pytest.raises(ValueError, match="an observation holds 2147483648, and int32 cannot"):
        env.recv()


@pytest.mark.parametrize("autoreset", ["NextStep", "Disabled"])
def test_gymnasium_by_name_keeps_the_contract(autoreset):
    testing.check_host_env(envs.make("gymnasium/CartPole-v1", autoreset=autoreset), num_steps=60)


def test_gymnasium_clips_continuous_actions():
    pendulum = envs.make("gymnasium/Pendulum-v1")
    steps = []
    for torque in (2.0, 200.0):
        env = pendulum.make(1, 0, 0)
        env.reset()
        env.send(np.full((1, 1), torque, np.float32))
        steps.append(env.recv())
    jax.tree.map(np.testing.assert_array_equal, *steps)


def test_gymnasium_processes_give_what_one_process_gives():
    made = [envs.make("gymnasium/CartPole-v1", asynchronous=asynchronous) for asynchronous in (False, True)]
    seen = [rows(host_envs, [[0, 1]] * 12) for host_envs in made]
    jax.tree.map(np.testing.assert_array_equal, *seen)
    assert any(x.any() for x in seen[0]["terminated"])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: lines("NextStep", start=1), "SyncVectorEnv has a Discrete space that starts at 1; wrap it"),
        (lambda: envs.from_gymnasium(3), "make_vector_env=3 must be a function"),
        (lambda: envs.from_gymnasium(lambda num_envs: Line()), r"make_vector_env\(1\) returned .*SyncVectorEnv"),
        (lambda: envs.from_gymnasium(print, frames_per_step=0), "frames_per_step=0 must be an integer of 1 or more"),
        (lambda: envs.from_gymnasium(print, max_episode_steps=0), "max_episode_steps=0 must be .* None"),
        (lambda: envs.make("gymnasium/NoSuch-v0"), "gymnasium cannot make gymnasium/NoSuch-v0"),
        (lambda: envs.make("gymnasium/CartPole-v1", gravitas=1), "gymnasium cannot make .* 'gravitas'"),
        (
            lambda: envs.make("gymnasium/CartPole-v1", autoreset="Never"),
            "autoreset='Never' is not a mode; use 'NextStep'",
        ),
    ],
)
def test_gymnasium_refusals(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("Pong-v5", "envpool", "atari"),
        ("envpool/CartPole-v1", "envpool", "atari"),
        ("envpool/NoSuch-v0", "envpool", "atari"),
        ("ale/Pong-v5", "ale_py", "atari"),
        ("gymnasium/CartPole-v1", "gymnasium", "gymnasium"),
    ],
)
@pytest.mark.extras
def test_missing_simulator_names_the_extra(name, module, extra, monkeypatch):
    for loaded in [each for each in sys.modules if each.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf'{name} needs {module}, .*; pip install "podium\[{extra}\]"'):
        envs.make(name)


def test_atari_keeps_the_names_short_and_the_pure_families_first():
    names = envs.names()
    assert names.index("CartPole-v1") < names.index("envpool/CartPole-v1")
    assert {"Pong-v5", "ale/Pong-v5", "envpool/HalfCheetah-v5", "gymnasium/CartPole-v1"} < set(names)
    assert len(names) < 350
    assert isinstance(envs.make("CartPole-v1"), podium.env.Env)
