"""Every registered agent keeps the contract, and `check_agent` says which rule a broken one breaks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import continuous, multi, networks, testing
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.env import Env, restart, transition
from podium.ops.distributions import Categorical, DiagGaussian, TanhNormal
from podium.ops.histogram import Histogram
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Seen

CONTINUOUS: dict[str, Any] = {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 64, "hidden_sizes": (16,)}
WINDOWS: dict[str, Any] = {"sequence_length": 6, "burn_in": 2, "sequence_period": 2, "num_actors": 8, "memory_size": 8}
WINDOWS |= {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 64, "hidden_sizes": (16,)}
AGENTS = {
    "ppo": ppo.make(ppo.Config(num_minibatches=2)),
    "ppo-gru-normalized": ppo.make(
        ppo.Config(num_minibatches=2, memory="gru", normalize_obs=True, normalize_reward=True, target_kl=0.02)
    ),
    "ppo-squashed": ppo.make(ppo.Config(num_minibatches=2, squash=True)),
    "a2c": a2c.make(),
    "a2c-lstm": a2c.make(a2c.Config(memory="lstm", optimizer="adam")),
    "impala": impala.make(impala.Config(num_minibatches=2)),
    "impala-gru": impala.make(impala.Config(memory="gru", num_minibatches=2, optimizer="adam")),
    "dqn": dqn.make(dqn.Config(batch_size=16, buffer_capacity=512, min_replay_size=64, n_step=3, dueling=True)),
    "apex": apex.make(apex.Config(batch_size=16, buffer_capacity=512, min_replay_size=64, num_actors=8)),
    "r2d2": r2d2.make(r2d2.Config(**WINDOWS)),
    "r2d2-gru-plain": r2d2.make(
        r2d2.Config(**{**WINDOWS, "burn_in": 0}, memory="gru", stored_state=False, rescale_values=False)
    ),
    "pqn": pqn.make(pqn.Config(num_minibatches=4)),
    "pqn-gru-normalized": pqn.make(pqn.Config(num_minibatches=2, memory="gru", normalize_obs=True)),
    "rainbow": rainbow.make(rainbow.Config(batch_size=16, buffer_capacity=512, min_replay_size=64, num_atoms=11)),
    "rainbow-quantiles": rainbow.make(
        rainbow.Config(
            batch_size=16,
            buffer_capacity=512,
            min_replay_size=64,
            num_atoms=11,
            head="qr",
            noisy=False,
            epsilon_start=1.0,
        )
    ),
    "reppo": reppo.make(reppo.Config(num_minibatches=2, num_epochs=2, num_bins=21, hidden_sizes=(16,))),
    "sac": sac.make(sac.Config(**CONTINUOUS)),
    "sac-delayed-normalized": sac.make(sac.Config(n_step=3, policy_delay=2, normalize_obs=True, **CONTINUOUS)),
    "td3": td3.make(td3.Config(n_step=3, **CONTINUOUS)),
}

BOUNDED = ("reppo", "sac", "td3")
"""Agents that refuse discrete actions."""

NIGHTLY = set(AGENTS) - {"ppo", "dqn", "rainbow", "reppo", "sac"}
"""Of these, what is like another of them in the contract; checked nightly, as every agent in every probe is."""


def test_every_registered_agent_is_in_the_table() -> None:
    # Other tests of this process register agents of their own.
    own = [name for name in podium.agents.names() if podium.agents.get(name).make.__module__.startswith("podium.")]
    # These need several agents, or an extra to search by: tests/test_multi.py; in tests/agents test_vdn, test_alphazero
    # and test_muzero.
    elsewhere = {"alphazero", "ippo", "mappo", "muzero", "vdn"}
    assert {agent.name for agent in AGENTS.values()} == set(own) - elsewhere


def test_an_agent_is_made_by_name_of_a_config_or_of_its_fields() -> None:
    made = podium.agents.make("ppo", ppo.Config(gamma=0.9)), podium.agents.make("ppo", {"gamma": 0.9})
    assert made[0].config == made[1].config == ppo.Config(gamma=0.9)
    assert podium.agents.make("ppo").config == ppo.Config()


@pytest.mark.parametrize("config", [dqn.Config(), apex.Config(), 3, ["gamma"]])
def test_what_is_no_config_of_an_agent_is_refused(config: Any) -> None:
    """That of an agent made of this one is another's: Ape-X's fields are DQN's and more."""
    name = "dqn" if isinstance(config, apex.Config) else "ppo"
    with pytest.raises(ValueError, match=rf"^config=.* no Config of {name}; give a podium.agents.{name}.Config, or "):
        podium.agents.make(name, config)


@pytest.mark.parametrize(
    "take", [podium.league, podium.gated, multi.shared, lambda agent: podium.plan(agent, "podium/Catch")]
)
def test_what_is_no_agent_is_refused_by_all_that_take_one(take: Any) -> None:
    with pytest.raises(ValueError, match=r"agent='ppo' is no Agent; make one, such as podium\.agents\.make\('ppo'\)"):
        take("ppo")


TAKE_NETWORK = ("ppo", "a2c", "impala", "mappo", "ippo", "dqn", "apex", "rainbow", "r2d2", "pqn", "vdn", "alphazero")


@pytest.mark.parametrize(
    ("name", "argument"),
    [*((name, "network") for name in TAKE_NETWORK), *itertools.product(("sac", "td3", "reppo"), ("policy", "critic"))],
)
def test_what_is_no_network_is_refused_by_all_that_take_one(name: str, argument: str) -> None:
    make = getattr(podium.agents, name).make
    more = {"model": testing.probe_termination()} if name == "alphazero" else {}
    with pytest.raises(ValueError, match=rf"^{argument}='mlp' is no Network; leave it out .* networks\.from_nnx makes"):
        make(**{argument: "mlp"}, **more)


VALUES, ACTOR_CRITIC = networks.q_network((4,)), networks.actor_critic((4,))
COLUMN = ACTOR_CRITIC._replace(apply=lambda *x: jax.tree.map(lambda x: x[:, None], ACTOR_CRITIC.apply(*x)))
HISTOGRAM = Histogram(-1.0, 1.0, 3)


def _giving(policy: Any) -> networks.Network:
    """Return a network that has this policy, whatever the actions are."""
    output = networks.ActorCritic(policy, jnp.zeros(3))
    return ACTOR_CRITIC._replace(apply=lambda params, memory, obs, first: (output, memory))


MISFITS: list[tuple[str, str, networks.Network, str]] = [
    *((name, "network", VALUES, "an ActorCritic with one value each") for name in ("ppo", "a2c", "impala")),
    *((name, "network", ACTOR_CRITIC, "action values") for name in ("dqn", "apex", "pqn", "rainbow")),
    ("ppo", "network", COLUMN, "an ActorCritic with one value each"),
    ("a2c", "network", _giving(Categorical(jnp.zeros((3, 5)))), r"an ActorCritic .*\(a Categorical of as many logits"),
    ("ppo", "network", _giving(DiagGaussian(*jnp.zeros((2, 3, 2)))), "an ActorCritic .* policy over the actions there"),
    ("impala", "network", _giving(TanhNormal(*jnp.zeros((2, 3, 1)))), "an ActorCritic"),
    ("rainbow", "network", VALUES, r"action values \[3, number of actions, 51\]"),
    ("r2d2", "network", networks.actor_critic((4,), memory="gru"), "action values"),
    ("sac", "policy", continuous.deterministic_policy((4,)), "a TanhNormal"),
    ("reppo", "policy", ACTOR_CRITIC, "a TanhNormal"),
    ("td3", "policy", continuous.gaussian_policy((4,)), "actions"),
    ("sac", "critic", continuous.predictive_critic(HISTOGRAM, (4,)), "values"),
    ("td3", "critic", continuous.predictive_critic(HISTOGRAM, (4,)), "values"),
    ("reppo", "critic", continuous.critic_ensemble(2, (4,)), "a Judgement"),
]


@pytest.mark.parametrize(("name", "argument", "network", "words"), MISFITS)
def test_a_network_of_another_kind_is_refused_before_any_compile(
    name: str, argument: str, network: networks.Network, words: str
) -> None:
    agent = getattr(podium.agents, name).make(**{argument: network})
    spec = testing.probe_termination(continuous=name in BOUNDED).spec
    with pytest.raises(
        ValueError, match=rf"^{argument} gives .* for 3 observations of {spec.name}, but must give {words}"
    ):
        jax.eval_shape(lambda key: agent.init(key, spec), jax.random.key(0))


def test_what_acts_out_of_bounds_is_refused_too() -> None:
    """A squashed policy without the bounds would act by what it drew, and be weighed as squashed."""
    spec = testing.probe_termination(continuous=True).spec
    agent = ppo.make(network=_giving(TanhNormal(*jnp.zeros((2, 3, *spec.action.shape)))))
    with pytest.raises(ValueError, match="a TanhNormal and the bounds"):
        jax.eval_shape(lambda key: agent.init(key, spec), jax.random.key(0))


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala"])
def test_a_network_that_knows_nothing_of_rules_plays_what_is_legal(name: str) -> None:
    spec = EnvSpec("game", Seen(ArraySpec((2,)), ArraySpec((4,), bool)), DiscreteSpec(4))
    plain = networks.actor_critic((4,))
    blind = lambda spec: dataclasses.replace(spec, obs=spec.obs.view)
    network = plain._replace(
        init=lambda key, spec: plain.init(key, blind(spec)),
        apply=lambda params, memory, obs, first: plain.apply(params, memory, obs.view, first),
        unroll=lambda params, memory, obs, first: plain.unroll(params, memory, obs.view, first),
    )
    agent = getattr(podium.agents, name).make(network=network)
    state = agent.init(jax.random.key(0), spec)
    obs = Seen(jnp.ones((64, 2)), jnp.arange(4) == jnp.arange(64)[:, None] % 4)
    keys, params = jax.random.split(jax.random.key(1), 64), agent.actor(state)
    for greedy in (False, True):
        output = agent.act(keys, params, agent.carry(spec, 64), obs, jnp.ones(64, bool), greedy)
        assert output.action.tolist() == list(range(4)) * 16
    np.testing.assert_allclose(output.extras.log_prob, 0.0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(AGENTS) - NIGHTLY))
def test_agents_keep_the_contract(name: str) -> None:
    testing.check_agent(AGENTS[name], testing.probe_termination(continuous=AGENTS[name].name in BOUNDED))


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_agents_keep_the_contract_in_every_probe(name: str) -> None:
    testing.check_agent(AGENTS[name])


@pytest.fixture(scope="module")
def agent() -> podium.agent.Agent:
    return ppo.make(ppo.Config(num_minibatches=1, num_epochs=1, hidden_sizes=(4,)))


def _expect(agent: object, message: str) -> None:
    with pytest.raises(testing.ContractError, match=message):
        testing.check_agent(agent, testing.probe_termination())  # type: ignore[arg-type]


def test_something_else_is_no_agent() -> None:
    _expect(object(), "is no podium.agent.Agent")


def test_actions_of_a_wrong_shape_are_refused(agent) -> None:
    _expect(agent._replace(act=lambda *a: agent.act(*a)._replace(action=jnp.zeros((8, 1), int))), "shape .* must be")


def test_actions_out_of_range_are_refused(agent) -> None:
    _expect(agent._replace(act=lambda *a: agent.act(*a)._replace(action=jnp.full(8, 7))), "out of range")


def test_a_random_greedy_action_is_refused(agent) -> None:
    _expect(agent._replace(act=lambda k, p, c, o, f, greedy: agent.act(k, p, c, o, f, False)), "depend on the key")


def test_rows_that_look_at_each_other_are_refused(agent) -> None:
    def act(keys, params, carry, obs, first, greedy):
        output = agent.act(keys, params, carry, obs, first, greedy)
        return output._replace(extras=output.extras._replace(value=output.extras.value + keys.shape[0]))

    _expect(agent._replace(act=act), "half a batch")


def test_a_python_branch_is_refused(agent) -> None:
    def grad(key, state, minibatch):
        if minibatch[0].advantage.sum() > 0:
            return agent.grad(key, state, minibatch)
        return agent.grad(key, state, minibatch)

    _expect(agent._replace(grad=grad), "grad cannot be compiled")


def test_a_state_that_changes_its_structure_is_refused(agent) -> None:
    _expect(agent._replace(apply=lambda state, grads: state._replace(env_steps=state.env_steps.total())), "apply")


def test_what_stops_is_a_bool(agent) -> None:
    _expect(agent._replace(stops=lambda metrics: metrics["approx_kl"]), "stops returns")


def test_a_metric_with_a_shape_is_refused(agent) -> None:
    def grad(key, state, minibatch):
        grads, aux = agent.grad(key, state, minibatch)
        return grads, aux._replace(metrics={"advantage": minibatch[0].advantage})

    _expect(agent._replace(grad=grad), "must be scalars")


def test_a_policy_mask_that_does_not_fit_or_marks_nothing_is_refused(agent) -> None:
    _expect(agent._replace(policy_mask=lambda state: (True, False)), "policy_mask does not fit the State")
    _expect(agent._replace(policy_mask=lambda state: state), "policy_mask does not fit the State")
    _expect(agent._replace(policy_mask=lambda state: False), "policy_mask marks no floating-point array")


def test_bootstrapping_past_a_termination_is_refused(agent) -> None:
    def plan(key, state, trajectory):
        return agent.plan(key, state, trajectory._replace(terminated=trajectory.truncated, truncated=trajectory.last))

    _expect(agent._replace(plan=plan), "terminating step")


@pytest.mark.parametrize(
    "made",
    [
        lambda: ppo.make(ppo.Config(num_minibatches=1, num_epochs=1, hidden_sizes=(4,))),
        lambda: td3.make(td3.Config(hidden_sizes=(4,), batch_size=16, buffer_capacity=512, min_replay_size=64)),
    ],
    ids=["ppo", "td3"],
)
def test_truncation_taken_for_termination_is_refused(made) -> None:
    agent = made()

    def plan(key, state, trajectory):
        return agent.plan(key, state, trajectory._replace(terminated=trajectory.last))

    probe = testing.probe_truncation(continuous=agent.name == "td3")
    with pytest.raises(testing.ContractError, match="not on that of a truncated one. Truncation is not termination"):
        testing.check_agent(agent._replace(plan=plan), probe)


@pytest.mark.slow
def test_rows_that_an_agent_leaves_out_where_an_episode_was_cut_are_no_terminations() -> None:
    agent = td3.make(td3.Config(hidden_sizes=(4,), batch_size=16, buffer_capacity=512, min_replay_size=64))

    def plan(key, state, trajectory):
        return agent.plan(key, state, trajectory._replace(valid=~(trajectory.truncated & ~trajectory.terminated)))

    testing.check_agent(agent._replace(plan=plan), testing.probe_truncation(continuous=True))


def test_what_is_no_observation_is_shown_to_no_agent() -> None:
    """An embedding gives NaN for an index that there is not."""
    network = networks.actor_critic((4,))

    def embedded(obs):
        return jnp.take(jnp.eye(4), obs, axis=0)

    boxed = lambda spec: dataclasses.replace(spec, obs=ArraySpec((4,)))
    seeing = network._replace(
        init=lambda key, spec: network.init(key, boxed(spec)),
        apply=lambda params, memory, obs, first: network.apply(params, memory, embedded(obs), first),
        unroll=lambda params, memory, obs, first: network.unroll(params, memory, embedded(obs), first),
    )
    agent = ppo.make(ppo.Config(num_minibatches=1, num_epochs=1), seeing)
    spec = EnvSpec("line", DiscreteSpec(4), DiscreteSpec(2), 3)
    line = Env(
        spec,
        lambda key: (jnp.int32(0), restart(jnp.int32(0))),
        lambda key, state, action: (state + 1, transition(state + 1, 1.0, state >= 2)),
    )
    testing.check_agent(agent, line)


def test_what_an_agent_refuses_is_said_as_it_says_it() -> None:
    with pytest.raises(testing.ContractError, match="init refuses it: the actions of probe_truncation are continuous"):
        testing.check_agent(pqn.make(), testing.probe_truncation(continuous=True))
    with pytest.raises(ValueError, match="num_envs=0 must be a positive integer"):
        testing.check_agent(pqn.make(), num_envs=0)


def only_continuous(agent) -> podium.agent.Agent:
    def init(key, spec):
        if isinstance(spec.action, DiscreteSpec):
            raise ValueError("continuous actions only")
        return agent.init(key, spec)

    return agent._replace(init=init)


def test_an_agent_for_continuous_actions_is_checked_in_a_probe_that_terminates(agent) -> None:
    def plan(key, state, trajectory):
        return agent.plan(key, state, trajectory._replace(terminated=trajectory.truncated, truncated=trajectory.last))

    with pytest.raises(testing.ContractError, match="probe_termination.*terminating step"):
        testing.check_agent(only_continuous(agent)._replace(plan=plan))


def numbered(act) -> podium.agent.Agent:
    """Return an agent without memory but for the numbers of its environments, which `act` is given."""
    agent = ppo.make(ppo.Config(num_minibatches=1, num_epochs=1, hidden_sizes=(4,)))

    def act_and_number(keys, params, carry, obs, first, greedy):
        return act(agent.act(keys, params, (), obs, first, greedy), carry, first)

    return agent._replace(
        act=act_and_number,
        carry=lambda spec, num_envs: jnp.zeros(num_envs, jnp.int32),
        number=lambda carry, index: carry * 0 + index,
    )


def test_numbers_of_environments_are_no_memory_and_must_be_handed_on() -> None:
    differ = lambda output, carry: output._replace(action=(output.action + carry) % 2, carry=carry)
    testing.check_agent(numbered(lambda output, carry, first: differ(output, carry)), testing.probe_termination())
    _expect(
        numbered(lambda output, carry, first: differ(output, carry)._replace(carry=jnp.where(first, 0, carry))),
        "act changes the numbers",
    )


def test_memory_kept_over_an_episode_is_refused() -> None:
    agent = ppo.make(ppo.Config(num_minibatches=1, num_epochs=1, hidden_sizes=(4,), memory="gru", memory_size=4))

    def act(keys, params, carry, obs, first, greedy):
        output = agent.act(keys, params, carry, obs, first, greedy)
        return output._replace(action=jnp.where(carry.sum(-1) > 0, 1 - output.action, output.action))

    _expect(agent._replace(act=act), "memory of the one before")
