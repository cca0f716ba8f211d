"""PPO: its loss by hand, on-policy identities, targets against a loop, its schedules, and values known on paper."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.agent import Agent, fresh_past
from podium.agents import ppo
from podium.env import Env, auto_reset, restart, transition
from podium.learn import learn
from podium.networks import ActorCritic, actor_critic
from podium.ops.counts import Count
from podium.ops.distributions import Categorical, DiagGaussian
from podium.rollout import begin, rollout
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

T, B, GAMMA = 6, 8, 0.9
SMALL = ppo.Config(hidden_sizes=(8,), memory_size=5, gamma=GAMMA, num_epochs=2, num_minibatches=2, learning_rate=0.01)
DISCRETE, BOX = DiscreteSpec(3), ArraySpec((2,), np.float32, -1, 1)


def make(**fields: Any) -> Agent:
    return ppo.make(ppo.Config(**{**SMALL.__dict__, **fields}))


def noise(action: Any = DISCRETE) -> Env:
    """Make an environment of random observations with random ends of both kinds, reward the sum of what is seen."""
    spec = EnvSpec("test/Noise", ArraySpec((3,)), action)

    def reset(key: jax.Array) -> Any:
        obs = 2 + 3 * jax.random.normal(key, (3,))
        return obs, restart(obs)

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> Any:
        obs_key, end_key = jax.random.split(key)
        obs = 2 + 3 * jax.random.normal(obs_key, (3,))
        ended = jax.random.bernoulli(end_key, 0.25, (2,))
        return obs, transition(obs, obs.sum(), ended[0], ended[1])

    return auto_reset(Env(spec, reset, step))


def first_gradient(agent: Agent, state: Any, trajectory: Trajectory) -> Any:
    """Return what `grad` gives for the whole batch."""
    plan = agent.plan(jax.random.key(0), state, trajectory)
    minibatch = (plan.data, plan.per_env) if plan.unit == "sequence" else flat(plan.data)
    return agent.grad(jax.random.key(0), state, (minibatch, agent.statistics(minibatch)))


def flat(batch: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


class Run:
    """An agent before and after an iteration, and rollouts of either state."""

    def __init__(self, box: bool = False, **fields: Any):
        self.agent = agent = make(**fields)
        self.env = env = noise(BOX if box else DISCRETE)

        def collect(key: jax.Array, state: Any, where: Any) -> Any:
            return rollout(key, agent, env, agent.actor(state), where, T, jnp.int32(0))[:2]

        def reset(key: jax.Array) -> Any:
            carry, past = agent.carry(env.spec, B), fresh_past(agent, B)
            return agent.init(key, env.spec), begin(key, env, jnp.arange(B), carry, past)

        collect, key = jax.jit(collect), jax.random.key(0)
        self.start, where = jax.jit(reset)(key)
        where, self.first = collect(key, self.start, where)
        learned = jax.jit(lambda key, state, first: learn(key, agent, state, (), first, 4))(key, self.start, self.first)
        self.state, self.metrics = learned.state, learned.metrics
        _, self.second = collect(jax.random.fold_in(key, 1), self.state, where)
        self.plan = jax.jit(agent.plan)
        self.gradient = jax.jit(functools.partial(first_gradient, agent))(self.state, self.second)


run = functools.cache(Run)
KINDS: list[dict[str, Any]] = [
    {},
    {"box": True, "normalize_obs": True, "normalize_reward": True},
    {"memory": "gru", "normalize_obs": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_first_ratio_is_1(kind: dict[str, Any]) -> None:
    # In the second iteration: observations have statistics, episodes are under way, memories are not zero.
    r = run(**kind)
    metrics = r.gradient[1].metrics
    assert abs(float(metrics["approx_kl"])) < 1e-6
    assert float(metrics["clip_fraction"]) == 0
    # With advantages of mean 0 and every ratio 1 the surrogate is 0.
    assert abs(float(metrics["policy_loss"])) < 1e-5
    # Meanwhile learning did move the policy: these are not zero of themselves.
    assert float(r.metrics["approx_kl"]) > 1e-6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(r.gradient[0]))


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_statistics_are_of_everything_seen_and_change_after_learning(kind: dict[str, Any]) -> None:
    r = run(**kind)
    assert float(r.start.obs_stats.count) == 0
    assert float(r.state.obs_stats.count) == T * B
    seen = np.asarray(r.first.obs).reshape(-1, 3)
    np.testing.assert_allclose(r.state.obs_stats.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(r.state.obs_stats.std(), seen.std(0), rtol=1e-4)
    normal = r.plan(jax.random.key(0), r.state, r.second).data.obs
    expected = (np.asarray(r.second.obs) - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(normal, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=str)
def test_targets_are_the_slow_loop(kind: dict[str, Any]) -> None:
    r = run(**kind)
    t = jax.device_get(r.second)
    ends = t.terminated, t.truncated
    assert ends[0].any() and (ends[1] & ~ends[0]).any() and ends[1][-1].any()
    config = r.agent.config
    network = actor_critic(config.hidden_sizes, config.activation, config.memory, config.memory_size)
    obs = t.next_obs
    if r.state.obs_stats is not None:
        obs = (obs - r.state.obs_stats.mean) / (np.asarray(r.state.obs_stats.std()) + 1e-8)
    # Every observation reached, with the memory as it was after the step, and no episode begun.
    output, _ = jax.jit(network.apply)(r.state.params, flat(t.extras.memory), flat(obs), jnp.zeros(T * B, bool))
    reached, value = np.asarray(output.value).reshape(T, B), t.extras.value
    advantage = np.zeros((T, B))
    for b in range(B):
        following = 0.0
        for i in reversed(range(T)):
            last = t.terminated[i, b] or t.truncated[i, b]
            next_value = value[i + 1, b] if i + 1 < T and not last else reached[i, b]
            discount = 0.0 if t.terminated[i, b] else GAMMA
            delta = t.reward[i, b] + discount * next_value - value[i, b]
            following = delta + (0.0 if last else discount * config.gae_lambda * following)
            advantage[i, b] = following
    batch = r.plan(jax.random.key(0), r.state, r.second).data
    np.testing.assert_allclose(batch.advantage, advantage, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch.target, advantage + value, rtol=1e-4, atol=1e-4)


def test_rewards_are_divided_by_the_deviation_of_the_return() -> None:
    r = run(**KINDS[1])
    sums, total = np.zeros((T, B)), np.zeros(B)
    for i in range(T):
        sums[i] = total = GAMMA * total * (1 - r.first.terminated[i]) + r.first.reward[i]
    std = float(r.state.return_stats.std())
    np.testing.assert_allclose(std, sums.std(), rtol=1e-4)
    plan = r.plan
    plain = r.state._replace(return_stats=r.start.return_stats)
    scaled = plan(jax.random.key(0), plain, r.second._replace(reward=r.second.reward / std))
    found = plan(jax.random.key(0), r.state, r.second)
    np.testing.assert_allclose(found.data.target, scaled.data.target, rtol=1e-4, atol=1e-5)
    # With a bound, as if they had come between minus and plus that.
    fields = {name: value for name, value in KINDS[1].items() if name != "box"}
    bounded = jax.jit(make(**fields, normalized_reward_bound=0.5).plan)(jax.random.key(0), r.state, r.second)
    assert (np.abs(r.second.reward / std) > 0.5).any()
    clipped = r.second._replace(reward=jnp.clip(r.second.reward, -0.5 * std, 0.5 * std))
    expected = plan(jax.random.key(0), r.state, clipped)
    np.testing.assert_allclose(bounded.data.target, expected.data.target, rtol=1e-4, atol=1e-5)


def test_a_bound_without_normalised_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="normalized_reward_bound=10 bounds normalised rewards only"):
        make(normalized_reward_bound=10)


def sample(seed: int = 0, box: bool = False) -> tuple[ActorCritic, ppo.Batch]:
    """Return an output and a batch of N = 10 that lie apart, so that much is clipped."""
    rng = np.random.default_rng(seed)
    f = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    policy = DiagGaussian(f(10, 2), f(2)) if box else Categorical(f(10, 3))
    action = f(10, 2) if box else jnp.asarray(rng.integers(3, size=10))
    log_prob = policy.log_prob(action) + 0.3 * f(10)
    batch = ppo.Batch(f(10, 1), jnp.zeros(10, bool), action, log_prob, f(10), 2 + f(10), f(10), None)
    return ActorCritic(policy, f(10)), batch


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"normalize_advantage": False, "clip_epsilon": 0.1}, {"value_clip": 0.2, "value_coef": 2.0}], ids=str
)
def test_loss_is_the_slow_loop(fields: dict[str, Any], masked: bool, box: bool) -> None:
    config = ppo.Config(**{"entropy_coef": 0.3, **fields})
    output, batch = sample(box=box)
    rows = [0, 2, 3, 6, 9] if masked else list(range(10))
    valid = jnp.isin(jnp.arange(10), jnp.array(rows)) if masked else None

    @jax.jit
    def found(output: ActorCritic, batch: ppo.Batch) -> Any:
        return ppo.loss(config, output, ppo.normalize_advantage(batch, ppo.summarize(config, batch)))

    total, metrics = found(output, batch._replace(valid=valid))
    log_ratio = np.asarray(output.policy.log_prob(batch.action) - batch.log_prob, np.float64)
    advantage = np.asarray(batch.advantage, np.float64)
    if config.normalize_advantage:
        advantage = (advantage - advantage[rows].mean()) / advantage[rows].std()
    value, old, target = (np.asarray(x, np.float64) for x in (output.value, batch.value, batch.target))
    entropy = np.asarray(output.policy.entropy())
    sums = {"policy_loss": 0.0, "value_loss": 0.0, "entropy": 0.0, "approx_kl": 0.0, "clip_fraction": 0.0}
    for i in rows:
        ratio, epsilon = np.exp(log_ratio[i]), config.clip_epsilon
        clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
        sums["policy_loss"] -= min(ratio * advantage[i], clipped * advantage[i])
        error = (value[i] - target[i]) ** 2
        if config.value_clip:
            near = old[i] + min(max(value[i] - old[i], -config.value_clip), config.value_clip)
            error = max(error, (near - target[i]) ** 2)
        sums["value_loss"] += 0.5 * error
        sums["entropy"] += entropy[i]
        sums["approx_kl"] += ratio - 1 - log_ratio[i]
        sums["clip_fraction"] += abs(ratio - 1) > epsilon
    means = {name: x / len(rows) for name, x in sums.items()}
    assert 0 < means["clip_fraction"] < 1
    for name, mean in means.items():
        np.testing.assert_allclose(metrics[name], mean, rtol=1e-4, atol=1e-5)
    expected = means["policy_loss"] + config.value_coef * means["value_loss"] - 0.3 * means["entropy"]
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"], total)


# Ratio 2 or 1/2 beyond epsilon = 0.2: cut only where the step would go on in the direction of the advantage.
@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"), [(2.0, 1.0, True), (2.0, -1.0, False), (0.5, -1.0, True), (0.5, 1.0, False)]
)
def test_the_gradient_of_the_ratio_is_cut_by_the_clip(ratio: float, advantage: float, cut: bool) -> None:
    config = ppo.Config(normalize_advantage=False, entropy_coef=0.0)
    one, two = jnp.ones(1), jnp.zeros((1, 2))
    batch = ppo.Batch(one, one > 2, jnp.zeros(1, int), jnp.log(0.5 * one / ratio), one, advantage * one, one, None)
    gradient = jax.jit(jax.grad(lambda x: ppo.loss(config, ActorCritic(Categorical(x), one), batch)[0]))(two)
    assert (np.asarray(gradient) == 0).all() == cut


# Acted with value 0, now 1, clip 0.2 (near = 0.2). Target 2: errors 1 and 1.8^2, the larger has no gradient.
# Target -1: errors 4 and 1.2^2, the larger has 0.5 * 0.5 * 2 * 2 = 1. Unclipped: 0.5 * 0.5 * 2 * (1 - target).
@pytest.mark.parametrize(
    ("clip", "target", "loss", "gradient"),
    [(0.2, 2.0, 0.5 * 3.24, 0.0), (0.2, -1.0, 2.0, 1.0), (0.0, 2.0, 0.5, -0.5), (5.0, 2.0, 0.5, -0.5)],
)
def test_value_clipping_by_hand(clip: float, target: float, loss: float, gradient: float) -> None:
    config = ppo.Config(value_clip=clip, entropy_coef=0.0, value_coef=0.5)
    one, policy = jnp.ones(1), Categorical(jnp.zeros((1, 2)))
    batch = ppo.Batch(one, one > 2, jnp.zeros(1, int), jnp.log(0.5 * one), 0 * one, one, target * one, None)
    function = lambda value: ppo.loss(config, ActorCritic(policy, value), batch)
    found, metrics = jax.jit(jax.grad(function, has_aux=True))(one)
    np.testing.assert_allclose(metrics["value_loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(found, [gradient], atol=1e-6)


def masked_trajectory() -> tuple[Any, Trajectory]:
    """Return a trajectory whose rows after an end are none, as environments give that reset in the next step."""
    r = run()
    after = jnp.concatenate([jnp.zeros((1, B), bool), r.second.last[:-1]])
    ended = lambda x: x & ~after
    return r, r.second._replace(
        valid=~after, terminated=ended(r.second.terminated), truncated=ended(r.second.truncated)
    )


def test_rows_that_are_none_change_nothing() -> None:
    r, trajectory = masked_trajectory()
    agent = r.agent
    gradient = jax.jit(lambda t: first_gradient(agent, r.state, t))
    whole = gradient(trajectory)
    # What stands in those rows does not matter.
    none = ~trajectory.valid
    extras = trajectory.extras
    other = trajectory._replace(
        reward=trajectory.reward + 100.0 * none,
        action=jnp.where(none, 0, trajectory.action),
        extras=extras._replace(value=extras.value - 50.0 * none, log_prob=extras.log_prob - 1.0 * none),
    )
    assert none.any()
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, whole, gradient(other))
    # The same without them.
    batch = flat(r.plan(jax.random.key(0), r.state, trajectory).data)
    rows = np.flatnonzero(batch.valid)
    fewer = jax.tree.map(lambda x: x[rows], batch._replace(valid=None))
    given = fewer, agent.statistics(fewer)
    jax.tree.map(compare, whole, jax.jit(agent.grad)(jax.random.key(0), r.state, given))


def test_rows_that_are_none_are_not_observed() -> None:
    r, trajectory = masked_trajectory()
    agent = run(**KINDS[1]).agent
    start = run(**KINDS[1]).start
    state = jax.jit(agent.observe)(start, trajectory._replace(past=jnp.zeros(B)))
    valid = np.asarray(trajectory.valid)
    assert float(state.env_steps) == float(state.obs_stats.count) == float(state.return_stats.count) == valid.sum()
    np.testing.assert_allclose(state.obs_stats.mean, np.asarray(trajectory.obs)[valid].mean(0), rtol=1e-5)


def parameters_differ(a: Any, b: Any) -> bool:
    return any(bool((x != y).any()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_divergence_above_the_target_stops() -> None:
    stops = make(target_kl=0.1).stops
    assert stops is not None and make().stops is None  # Without a target nothing stops.
    for kl, stop in ((0.05, False), (0.1, False), (0.2, True), (np.nan, False)):
        assert bool(stops({"approx_kl": jnp.float32(kl)})) == stop


def test_an_iteration_ends_with_the_update_before_the_target_was_passed() -> None:
    # The first update starts from no divergence, and at this rate the second already sees too much of it.
    r = run()
    fields = {"learning_rate": 0.1, "num_minibatches": 1}
    learned = [
        jax.jit(functools.partial(learn, agent=make(num_epochs=n, **fields, **more), replay_state=(), num_lanes=1))(
            jax.random.key(0), state=r.state, trajectory=r.second
        )
        for n, more in ((1, {}), (4, {"target_kl": 1e-3}), (4, {}))
    ]
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, learned[0].state.params, learned[1].state.params)
    assert parameters_differ(learned[1].state.params, learned[2].state.params)


def test_the_learning_rate_falls_linearly_to_zero() -> None:
    r = run()
    annealed, constant = make(anneal_steps=1000), make()
    grads = r.gradient[0]

    @jax.jit
    def change(steps: Count) -> Any:
        state = r.state._replace(env_steps=steps)
        return [jax.tree.map(jnp.subtract, a.apply(state, grads).params, state.params) for a in (annealed, constant)]

    for steps, factor in ((0, 1.0), (250, 0.75), (500, 0.5), (1000, 0.0), (2000, 0.0)):
        found, whole = change(Count.zero().add(steps))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, factor * b, atol=3e-7), found, whole)  # noqa: B023
        assert parameters_differ(found, jax.tree.map(jnp.zeros_like, found)) == (factor > 0)
    assert float(r.state.env_steps) == T * B


def test_the_gradient_norm_is_bounded() -> None:
    # Adam alone is blind to the scale of a first gradient, so look at its first moment, (1 - 0.9) g.
    r = run()
    large = jax.tree.map(lambda g: 1e3 * g, r.gradient[0])
    for bound in (0.5, 0.0):
        agent = make(max_grad_norm=bound)
        state = jax.jit(agent.apply)(r.start, large)
        leaves = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.inexact)]
        whole = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(large)))
        np.testing.assert_allclose(np.linalg.norm(leaves[0]), 0.1 * (bound or whole), rtol=1e-3)


def test_acting_greedily_takes_the_mode() -> None:
    for kind in KINDS[:2]:
        r = run(**kind)
        keys = jax.random.split(jax.random.key(0), B)
        params = r.agent.actor(r.state)
        act = jax.jit(r.agent.act, static_argnums=5)
        outputs = [act(keys, params, (), r.first.obs[0], r.first.first[0], True) for _ in range(2)]
        assert_same(*outputs)
        output = outputs[0]
        assert output.action.shape == r.first.action.shape[1:]
        sampled = act(keys, params, (), r.first.obs[0], r.first.first[0], False)
        assert (output.extras.log_prob >= sampled.extras.log_prob).all()


BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in ("learning_rate", "clip_epsilon", "adam_eps") for value in (0, -1.0, float("nan"))],
    *[(name, value) for name in ("num_epochs", "num_minibatches") for value in (0, -1, 1.5)],
    *[
        (name, value)
        for name in ("anneal_steps", "value_clip", "value_coef", "entropy_coef", "max_grad_norm", "target_kl")
        for value in (-1, float("nan"))
    ],
    *[(name, value) for name in ("gamma", "gae_lambda") for value in (-0.1, 1.1, float("nan"))],
    ("hidden_sizes", ()),
    ("hidden_sizes", (8, 0)),
    ("activation", "swish"),
    ("memory", "rnn"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        make(**{name: value})


def test_minibatches_of_one_are_refused_where_nothing_of_their_advantage_is_left() -> None:
    build = functools.partial(podium.Anakin(1).build, env=podium.envs.make_pure("podium/Catch"), num_envs=1)
    with pytest.raises(ValueError, match=r"num_minibatches=4 of 4 steps are minibatches of one, whose normalised"):
        build(ppo.make(ppo.Config(num_minibatches=4)), rollout_length=4)
    build(ppo.make(ppo.Config(num_minibatches=2)), rollout_length=4)
    build(ppo.make(ppo.Config(num_minibatches=4, normalize_advantage=False)), rollout_length=4)


def test_a_bad_memory_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="memory_size="):
        make(memory="gru", memory_size=0)
    with pytest.raises(ValueError, match="memory_size="):  # Also where it would not be used.
        make(memory_size="many")


@pytest.mark.parametrize("obs", [DiscreteSpec(4), {"only": DiscreteSpec(4)}], ids=["lone", "dict"])
def test_discrete_observations_are_not_normalised(obs: Any) -> None:
    spec = EnvSpec("test/Discrete", obs, DISCRETE)
    with pytest.raises(ValueError, match="normalize_obs=True.*test/Discrete"):
        make(normalize_obs=True).init(jax.random.key(0), spec)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("probe_truncation", "none"),
        ("probe_termination", "none"),
        pytest.param("probe_truncation", "gru", marks=pytest.mark.slow),
    ],
)
def test_values_are_those_on_paper(name: str, memory: str, values_on_paper: Any) -> None:
    fields = {"learning_rate": 0.03, "max_grad_norm": 0.0, "num_epochs": 4, "num_minibatches": 1, "memory": memory}
    num_updates, length = 250, 5 if name == "probe_truncation" else 3
    values_on_paper(make(**fields, anneal_steps=num_updates * length * 4), name, num_updates)


def test_frames_stay_bytes_until_the_network_sees_them() -> None:
    agent, spec = make(memory="gru"), EnvSpec("test/Frames", ArraySpec((8, 8, 1), np.uint8, 0, 255), DISCRETE)

    def reset(key: jax.Array) -> Any:
        return key, restart(spec.obs.zeros())

    def plan(key: jax.Array) -> Any:
        env = auto_reset(Env(spec, reset, lambda key, state, action: (key, transition(spec.obs.zeros(), 0, False))))
        state, where = agent.init(key, spec), begin(key, env, jnp.arange(B), agent.carry(spec, B))
        trajectory = rollout(key, agent, env, agent.actor(state), where, T, jnp.int32(0))[1]
        return agent.plan(key, state, trajectory)

    batch = jax.eval_shape(plan, jax.random.key(0)).data
    assert batch.obs.dtype == jnp.uint8 and batch.obs.shape == (T, B, 8, 8, 1)
