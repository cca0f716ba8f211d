"""What shapes tell of an environment or agent of one's own: a sentence before anything is compiled or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import podium
from podium.agent import Agent
from podium.agents import dqn, ppo
from podium.contracts import ContractError
from podium.env import Env, restart, transition
from podium.testing import check_agent
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Key, TimeStep

SPEC = EnvSpec("walk", ArraySpec((2,)), DiscreteSpec(2), max_episode_steps=5)
Change = Callable[[Any, TimeStep], Any]


def walk(change: Change = lambda state, timestep: (state, timestep)) -> Env:
    """A walk to the left or right, whose `step` gives what `change` makes of a state and a TimeStep."""

    def reset(key: Key) -> tuple[Any, TimeStep]:
        obs = jnp.zeros(2)
        return (obs, jnp.zeros((), jnp.int32)), restart(obs)

    def step(key: Key, state: Any, action: Any) -> Any:
        obs, time = state[0] + jnp.where(action == 1, 0.1, -0.1), state[1] + 1
        return change((obs, time), transition(obs, -jnp.abs(obs[0]), False, time >= 5))

    return Env(SPEC, reset, step)


def train(agent: Agent, env: Env, run_dir: Path, placement: podium.Placement | None = None, **more: Any) -> Any:
    sizes: dict[str, Any] = {"num_steps": 64, "num_envs": 4, "rollout_length": 8, "run_dir": run_dir}
    return podium.train(agent, env, placement=placement or podium.Anakin(1), progress=False, **sizes, **more)


PPO = ppo.make(ppo.Config(num_epochs=1, num_minibatches=2))
DQN = dqn.make(dqn.Config(buffer_capacity=64, min_replay_size=8, batch_size=8))

ENVS: dict[str, tuple[Change, str]] = {
    "reward": (lambda s, t: (s, t._replace(reward=jnp.int32(1))), "step returns reward as int32.*podium.env.restart"),
    "reward_axis": (lambda s, t: (s, t._replace(reward=jnp.ones(1))), r"step returns reward as float32\[1\]"),
    "flag": (lambda s, t: (s, t._replace(terminated=jnp.float32(0))), "step returns terminated as float32"),
    "obs": (lambda s, t: (s, t._replace(obs=t.obs.astype(int))), r"step returns obs int32\[2\], but spec.obs says"),
    "next_obs": (lambda s, t: (s, t._replace(next_obs=t.obs[None])), r"step returns next_obs float32\[1, 2\], but"),
    "five": (lambda s, t: (s, t.obs, t.reward, t.terminated, t.truncated), "step does not return a pair"),
    "alone": (lambda s, t: t, "step does not return a pair"),
    "state": (lambda s, t: ((s[0], s[1] * 1.0), t), r"state\[1\] is int32\[\] after reset and float32\[\] after step"),
    "structure": (lambda s, t: ({"obs": s[0]}, t), "the state has another structure after step than after reset"),
    "branch": (lambda s, t: (s, t) if s[0][0] > 0 else (s, t), "step cannot be traced by jax.*jnp.where"),
    "text": (lambda s, t: (("left", s[1]), t), "step cannot be traced by jax.*return arrays only"),
}


@pytest.mark.parametrize("agent", [PPO, DQN], ids=["ppo", "dqn"])
@pytest.mark.parametrize("broken", ENVS)
def test_a_broken_environment_is_refused_before_anything_is_written(broken: str, agent: Agent, tmp_path: Path) -> None:
    change, words = ENVS[broken]
    with pytest.raises(ValueError, match=f"^walk: .*{words}"):
        train(agent, walk(change), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "placement",
    [podium.Single(), podium.Sebulba(), podium.CentralInference(), podium.ParameterServer(), podium.Evolution()],
    ids=lambda placement: type(placement).__name__,
)
def test_every_placement_refuses_it(placement: podium.Placement, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="walk: step returns reward as int32"):
        train(PPO, walk(ENVS["reward"][0]), tmp_path / "run", placement)
    assert not list(tmp_path.iterdir())


def test_one_that_resets_itself_is_asked_too(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="walk: step returns reward as int32"):
        train(PPO, walk(ENVS["reward"][0])._replace(resets_itself=True), tmp_path / "run")


def _acting(change: Callable[[Any], Any]) -> Agent:
    return PPO._replace(act=lambda *given: change(PPO.act(*given)))


AGENTS: dict[str, tuple[Agent, str]] = {
    "act": (_acting(lambda output: output.action), "act returns .*It must return podium.agent.ActOutput"),
    "action": (_acting(lambda o: o._replace(action=o.action[0])), r"act returns actions of shape \(\). It must be"),
    "kind": (_acting(lambda o: o._replace(action=o.action * 1.0)), "act returns float32 actions"),
    "plan": (PPO._replace(plan=lambda *given: PPO.plan(*given).data), "plan returns Batch. It must .*agent.Plan"),
    "grad": (PPO._replace(grad=lambda *given: PPO.grad(*given)[0]), "grad returns something else than .grads, Aux"),
    "apply": (PPO._replace(apply=lambda state, grads: state.params), "apply returns dict of another structure"),
    "observe": (PPO._replace(observe=lambda *given: None), "observe returns None of another structure than the State"),
}


@pytest.mark.parametrize("broken", AGENTS)
def test_a_broken_agent_is_refused_and_leaves_no_folder(broken: str, tmp_path: Path) -> None:
    agent, words = AGENTS[broken]
    with pytest.raises(ValueError, match=f"^ppo: {words}"):
        train(agent, walk(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_run_that_began_keeps_its_folder(tmp_path: Path) -> None:
    lost = walk(lambda state, timestep: (state, timestep._replace(reward=timestep.reward * jnp.nan)))
    with pytest.raises(podium.NonFiniteError):
        train(PPO, lost, tmp_path / "run")
    assert (tmp_path / "run" / "config.json").is_file()


def test_a_rollout_of_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ppo's rollout_length=0 must be a positive integer"):
        podium.train(PPO._replace(rollout_length=0), walk(), num_steps=64, num_envs=4)


def test_an_agent_that_takes_no_step_breaks_the_contract() -> None:
    with pytest.raises(ContractError, match="apply leaves the State as it was"):
        check_agent(PPO._replace(apply=lambda state, grads: state), walk())
