"""Networks: shapes for every kind of spec, memory against a loop written out, and layout hints that change nothing."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from podium import networks
from podium.agent import Agent
from podium.agents import dqn, muzero, ppo, pqn, reppo, sac, td3
from podium.networks import ActorCritic, Network, actor_critic, batch_over, from_nnx, q_network
from podium.ops.distributions import Categorical, DiagGaussian
from podium.torsos import flatten_obs
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Seen

T, B = 5, 8
OBS = {
    "vector": ArraySpec((3,)),
    "picture": ArraySpec((4, 4, 2), np.uint8, 0, 255),
    "discrete": DiscreteSpec(6),
    "dict": {"a": ArraySpec((3,)), "b": {"c": ArraySpec((2, 2), np.uint8), "d": DiscreteSpec(4), "e": ArraySpec(())}},
    "scalar": ArraySpec((), np.float32),
    "integer": ArraySpec((), np.int32),
    "lone": {"only": DiscreteSpec(6)},
    "several": DiscreteSpec(6, shape=(2,)),
}
ACTIONS = {"discrete": DiscreteSpec(4), "box": ArraySpec((2,), np.float32, -1, 1)}


def observations(spec: Any, *batch: int) -> Any:
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        if isinstance(leaf, DiscreteSpec):
            return jnp.asarray(rng.integers(leaf.num_values, size=(*batch, *leaf.shape)), jnp.int32)
        x = (
            rng.integers(0, 255, (*batch, *leaf.shape))
            if leaf.dtype != np.float32
            else rng.normal(size=(*batch, *leaf.shape))
        )
        return jnp.asarray(x.astype(leaf.dtype))

    return jax.tree.map(draw, spec, is_leaf=lambda x: isinstance(x, ArraySpec | DiscreteSpec))


def firsts(probability: float = 0.3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).random((T, B)) < probability)


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("obs", OBS)
def test_shapes_for_every_kind_of_spec(obs: str, action: str, memory: str) -> None:
    spec = EnvSpec("test", OBS[obs], ACTIONS[action])
    network = actor_critic((8,), memory=memory, memory_size=6)

    def outputs(key: jax.Array) -> Any:
        params = network.init(key, spec)
        one, memory = network.apply(params, network.carry(B), observations(spec.obs, B), firsts()[0])
        return one, network.unroll(params, network.carry(B), observations(spec.obs, T, B), firsts()), memory

    one, many, carry = jax.eval_shape(outputs, jax.random.key(0))
    assert one.value.shape == (B,) and many.value.shape == (T, B)
    assert network.recurrent == (memory != "none")
    assert jax.tree.map(jnp.shape, carry) == (() if memory == "none" else (B, 6))
    for output, leading in ((one, (B,)), (many, (T, B))):
        if action == "box":
            assert isinstance(output.policy, DiagGaussian)
            assert output.policy.mean.shape == output.policy.log_std.shape == (*leading, 2)
        else:
            assert isinstance(output.policy, Categorical)
            assert output.policy.logits.shape == (*leading, 4)


def test_a_discrete_observation_is_one_hot() -> None:
    np.testing.assert_array_equal(flatten_obs(jnp.array([2, 0]), 1, 3), [[0, 0, 1], [1, 0, 0]])


def test_an_array_of_integers_is_several_one_hots_unless_they_are_numbers() -> None:
    two = jnp.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(flatten_obs(two, 1, 6), [[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0]])
    np.testing.assert_array_equal(flatten_obs(two, 1, 2), two)


@pytest.mark.parametrize(
    "agent",
    [ppo.make(), dqn.make(), pqn.make(), sac.make(), muzero.make(muzero.Config(num_simulations=0))],
    ids=lambda agent: agent.name,
)
def test_agents_act_on_an_array_of_integers(agent: Agent) -> None:
    action = ACTIONS["box" if agent.name == "sac" else "discrete"]
    spec = EnvSpec("test", OBS["several"], action)

    def act(key: jax.Array) -> jax.Array:
        params = agent.actor(agent.init(key, spec))
        obs = spec.obs.zeros(B)
        return agent.act(jax.random.split(key, B), params, agent.carry(spec, B), obs, jnp.ones(B, bool), False).action

    assert jax.eval_shape(act, jax.random.key(0)).shape == (B, *action.shape)


@pytest.mark.parametrize(("obs", "values"), [("lone", range(6)), ("integer", range(6)), ("discrete", range(6))])
def test_integers_are_told_apart(obs: str, values: range) -> None:
    spec = EnvSpec("test", OBS[obs], DiscreteSpec(2))
    network = q_network((8,))
    params = network.init(jax.random.key(0), spec)
    each = jax.tree.map(lambda _: jnp.array(values), spec.obs, is_leaf=lambda x: hasattr(x, "zeros"))
    output = jax.jit(network.apply)(params, (), each, jnp.zeros(6, bool))[0]
    assert len(np.unique(np.asarray(output)[:, 0])) == 6


def test_several_parts_are_laid_side_by_side() -> None:
    obs = {"a": jnp.array([[1.5, 2.5]]), "b": jnp.array([[[3], [4]]], jnp.uint8), "c": jnp.array([5])}
    np.testing.assert_array_equal(flatten_obs(obs, 1), [[1.5, 2.5, 3, 4, 5]])


SPEC = EnvSpec("test", ArraySpec((3,)), DiscreteSpec(4))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_unroll_is_repeated_apply_with_memory_zeroed_where_first(kind: str) -> None:
    network = actor_critic((8,), memory=kind, memory_size=6)
    params = network.init(jax.random.key(0), SPEC)
    obs, first = observations(SPEC.obs, T, B), firsts()
    first = first.at[0].set(jnp.arange(B) % 2 == 0)
    start = jax.tree.map(lambda m: m + 0.7, network.carry(B))
    apply, unroll = jax.jit(network.apply), jax.jit(network.unroll)
    unrolled = jax.device_get(unroll(params, start, obs, first))
    obs, first, start = jax.device_get((obs, first, start))
    for b in range(3):
        # Every environment alone; whoever begins an episode here is given zeros, and told nothing of `first`.
        memory = jax.tree.map(lambda m: m[b : b + 1], start)  # noqa: B023
        for t in range(T):
            if first[t, b]:
                memory = network.carry(1)
            output, memory = apply(params, memory, obs[t, b : b + 1], jnp.zeros(1, bool))
            np.testing.assert_allclose(unrolled.policy.logits[t, b], output.policy.logits[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(unrolled.value[t, b], output.value[0], rtol=1e-5, atol=1e-6)
    # And by way of `first`, the whole batch.
    memory = start
    for t in range(T):
        output, memory = apply(params, memory, obs[t], first[t])
        np.testing.assert_allclose(unrolled.value[t], output.value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_memory_reaches_forward_to_the_next_first_and_no_further(kind: str) -> None:
    network = actor_critic((8,), memory=kind, memory_size=6)
    params = network.init(jax.random.key(0), SPEC)
    obs, first = observations(SPEC.obs, T, B), jnp.zeros((T, B), bool).at[3, :4].set(True)
    unroll = jax.jit(network.unroll)
    before = unroll(params, network.carry(B), obs, first).value
    after = unroll(params, network.carry(B), obs.at[1].add(1.0), first).value
    changed = np.asarray(before != after)
    np.testing.assert_array_equal(changed[:, :4], np.repeat([[False], [True], [True], [False], [False]], 4, 1))
    np.testing.assert_array_equal(changed[:, 4:], np.repeat([[False], [True], [True], [True], [True]], 4, 1))


SPREAD = {
    "two torsos": lambda: (actor_critic((8,)), SPEC),
    "a gaussian": lambda: (actor_critic((8,)), EnvSpec("test", OBS["vector"], ACTIONS["box"])),
    "observations of several kinds": lambda: (actor_critic((8,)), EnvSpec("test", OBS["dict"], ACTIONS["discrete"])),
    "one torso": lambda: (
        actor_critic((8,), torso="small_cnn"),
        EnvSpec("test", ArraySpec((36, 36, 1), np.uint8, 0, 255), ACTIONS["discrete"]),
    ),
    "gru": lambda: (actor_critic((8,), memory="gru", memory_size=6), SPEC),
    "lstm": lambda: (actor_critic((8,), memory="lstm", memory_size=6), SPEC),
    "action values": lambda: (q_network((8,), dueling=True), SPEC),
    "action values, gru": lambda: (q_network((8,), memory="gru", memory_size=6, layer_norm=True), SPEC),
    "action values, atoms": lambda: (q_network((8,), dueling=True, num_atoms=5, noisy_std=0.5), SPEC),
    "nnx": lambda: (nnx_network(), SPEC),
}


@pytest.mark.parametrize("kind", list(SPREAD))
def test_batches_over_a_mesh_change_no_output_and_no_gradient(kind: str) -> None:
    network, spec = SPREAD[kind]()
    params = network.init(jax.random.key(0), spec)
    obs, first = observations(spec.obs, T, B), firsts()
    start = jax.tree.map(lambda m: m + 0.3, network.carry(B))

    def total(number: int) -> Any:
        mesh = jax.make_mesh((number,), ("env",), (AxisType.Auto,), devices=jax.devices()[:number])

        def function(params: Any, start: Any) -> Any:
            with batch_over(mesh):
                output = network.unroll(params, start, obs, first)
            rows = output.policy.log_prob(output.policy.mode()) + output.value if spread else jnp.sum(output, axis=-1)
            return jnp.sum(jnp.square(rows)), output

        spread = not kind.startswith("action values")
        compiled = jax.jit(jax.grad(function, (0, 1), has_aux=True)).lower(params, start).compile()
        return compiled(params, start), compiled.as_text()

    whole, text = total(1)
    assert "all-reduce" not in text
    # 3 does not divide the batch: nothing is cut.
    for number in (4, 3):
        cut, text = total(number)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, cut)
        sums = re.findall(r"= (.*) all-reduce\(", text)
        assert len(sums) == (number == 4) and not any("(" in summed for summed in sums), sums


def test_within_devices_of_their_own_nothing_is_cut() -> None:
    """A rollout already is: each device has its own environments there."""
    network, first = actor_critic((8,)), jnp.zeros(B, bool)
    params, obs = network.init(jax.random.key(0), SPEC), observations(SPEC.obs, B)
    mesh = jax.make_mesh((4,), ("env",), (AxisType.Auto,), devices=jax.devices()[:4])
    local = lambda obs, first: network.unroll(params, (), obs, first).value
    rows = PartitionSpec("env")

    @jax.jit
    def everywhere(obs: jax.Array, first: jax.Array) -> jax.Array:
        with batch_over(mesh):
            return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(obs, first)

    np.testing.assert_allclose(everywhere(obs, first), local(obs, first), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outputs", range(1, networks.NARROW + 2))
def test_a_narrow_head_is_a_matrix_product(outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((T, B, 7), (T, B, outputs)))
    params = {"kernel": rng.normal(size=(7, outputs)), "bias": rng.normal(size=outputs)}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)

    def both(function: Any) -> Any:
        total = lambda params, x: (jnp.sum(weight * function(params, x)), function(params, x))
        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)

    found = both(networks.apply_linear)
    expected = both(lambda params, x: x @ params["kernel"] + params["bias"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    if outputs == 1:
        np.testing.assert_allclose(networks.apply_value(params, x), found[0][1][..., 0], rtol=1e-5, atol=1e-5)


def test_the_initial_policy_is_nearly_uniform_and_the_init_orthogonal() -> None:
    params = actor_critic((16,)).init(jax.random.key(0), SPEC)
    kernel = np.asarray(params["policy"]["kernel"])
    np.testing.assert_allclose(kernel.T @ kernel, 1e-4 * np.eye(4), atol=1e-8)
    kernel = np.asarray(params["actor"]["params"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(3), atol=1e-5)


def test_dueling_advantages_have_mean_0() -> None:
    network = q_network((8,), dueling=True)
    params = network.init(jax.random.key(0), SPEC)
    obs, first = observations(SPEC.obs, B), jnp.zeros(B, bool)
    values = network.unroll(params, (), obs, first)
    assert values.shape == (B, 4)
    shifted = {**params, "advantage": {**params["advantage"], "bias": params["advantage"]["bias"] + 5.0}}
    np.testing.assert_allclose(network.unroll(shifted, (), obs, first), values, rtol=1e-4, atol=1e-5)


def nnx_network() -> Network:
    class Module(nnx.Module):
        def __init__(self, key: jax.Array, spec: EnvSpec):
            rngs = nnx.Rngs(key)
            self.torso = nnx.Linear(spec.obs.shape[0], 8, rngs=rngs)
            self.policy = nnx.Linear(8, spec.action.num_values, rngs=rngs)
            self.value = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, obs: jax.Array, leading: int) -> ActorCritic:
            assert obs.ndim == leading + 1
            x = jnp.tanh(self.torso(obs))
            return ActorCritic(Categorical(self.policy(x)), self.value(x)[..., 0])

    return from_nnx(Module)


def test_layer_norm_stands_between_a_layer_and_its_activation() -> None:
    network = q_network((8, 6), layer_norm=True)
    params = network.init(jax.random.key(0), SPEC)
    layers = params["torso"]["params"]
    layers["LayerNorm_0"]["scale"] = jnp.linspace(0.5, 2, 8)
    layers["LayerNorm_0"]["bias"] = jnp.linspace(-1, 1, 8)
    obs = observations(SPEC.obs, B)
    x = np.asarray(obs, np.float64)
    for i in range(2):
        dense, norm = layers[f"Dense_{i}"], layers[f"LayerNorm_{i}"]
        x = x @ dense["kernel"] + dense["bias"]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = np.maximum(x * norm["scale"] + norm["bias"], 0)
    expected = x @ params["advantage"]["kernel"] + params["advantage"]["bias"]
    np.testing.assert_allclose(network.unroll(params, (), obs, jnp.zeros(B, bool)), expected, rtol=1e-4, atol=1e-5)
    # Whatever the scale of observations is, values of the first layer are not.
    bare = network.init(jax.random.key(0), SPEC)
    for scale in (1.0, 1e3):
        values = network.unroll(bare, (), scale * obs, jnp.zeros(B, bool))
        np.testing.assert_allclose(values, network.unroll(bare, (), obs, jnp.zeros(B, bool)), rtol=1e-2, atol=1e-2)


def test_action_values_with_memory_are_repeated_steps_and_begin_anew_where_first() -> None:
    network = q_network((8,), memory="gru", memory_size=6, layer_norm=True)
    params = network.init(jax.random.key(0), SPEC)
    obs, first = observations(SPEC.obs, T, B), firsts()
    memory = start = network.carry(B) + 0.7
    apply, rows = jax.jit(network.apply), []
    for t in range(T):
        value, memory = apply(params, memory, obs[t], first[t])
        rows.append(value)
    assert network.recurrent and rows[0].shape == (B, 4)
    np.testing.assert_allclose(jax.jit(network.unroll)(params, start, obs, first), np.stack(rows), rtol=1e-4, atol=1e-5)
    fresh, _ = apply(params, network.carry(B), obs[0], jnp.ones(B, bool))
    np.testing.assert_array_equal(apply(params, start, obs[0], jnp.ones(B, bool))[0], fresh)


def test_an_nnx_module_acts_unrolls_and_has_gradients() -> None:
    network = nnx_network()
    # Made under jit, as placements do: nothing traced may stay behind.
    params = jax.jit(lambda key: network.init(key, SPEC))(jax.random.key(0))
    obs, first = observations(SPEC.obs, T, B), firsts()
    output = jax.jit(network.unroll)(params, (), obs, first)
    x = np.tanh(obs @ params["torso"]["kernel"] + params["torso"]["bias"])
    np.testing.assert_allclose(output.value, (x @ params["value"]["kernel"])[..., 0], rtol=1e-4, atol=1e-5)
    one, memory = jax.jit(network.apply)(params, (), obs[0], first[0])
    assert memory == () and not network.recurrent
    np.testing.assert_allclose(one.value, output.value[0], rtol=1e-4, atol=1e-5)

    def total(params: Any) -> jax.Array:
        output = network.unroll(params, (), obs, first)
        return jnp.sum(output.value) + jnp.sum(output.policy.log_prob(jnp.zeros((T, B), jnp.int32)))

    gradient = jax.jit(jax.grad(total))(params)
    np.testing.assert_allclose(gradient["value"]["kernel"][:, 0], x.sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_an_nnx_module_serves_ppo() -> None:
    agent = ppo.make(ppo.Config(), network=nnx_network())
    state = agent.init(jax.random.key(0), SPEC)
    keys = jax.random.split(jax.random.key(1), B)
    output = agent.act(keys, agent.actor(state), agent.carry(SPEC, B), observations(SPEC.obs, B), firsts()[0], False)
    assert output.action.shape == (B,)


KEPT: dict[str, Any] = {
    "RngCount, RngKey": lambda rngs: nnx.Dropout(0.1, rngs=rngs),
    "BatchStat": lambda rngs: nnx.BatchNorm(8, rngs=rngs),
    "plain arrays": lambda rngs: jnp.ones(3),
}


@pytest.mark.parametrize("kinds", KEPT)
def test_an_nnx_module_that_keeps_more_than_parameters_is_refused(kinds: str) -> None:
    class Module(nnx.Module):
        def __init__(self, key: jax.Array, spec: EnvSpec):
            self.linear = nnx.Linear(3, 8, rngs=nnx.Rngs(key))
            self.more = KEPT[kinds](nnx.Rngs(key))

    with pytest.raises(
        ValueError, match=f"Module keeps {kinds} beside nnx.Param, which nothing would update; use Layer"
    ):
        from_nnx(Module).init(jax.random.key(0), SPEC)


def test_nothing_traced_stays_in_a_network_of_an_nnx_module() -> None:
    agent = ppo.make(network=nnx_network())
    with jax.checking_leaks():
        jax.eval_shape(lambda key: agent.init(key, SPEC), jax.random.key(0))


def test_one_network_of_an_nnx_module_serves_two_environments() -> None:
    class Module(nnx.Module):
        def __init__(self, key: jax.Array, spec: EnvSpec):
            self.scale = float(spec.obs.high)
            self.linear = nnx.Linear(3, 4, kernel_init=lambda *x: jnp.ones(x[1]), rngs=nnx.Rngs(key))

        def __call__(self, obs: jax.Array, leading: int) -> jax.Array:
            return self.linear(obs / self.scale)

    network, obs, first = from_nnx(Module), jnp.ones((B, 3)), jnp.zeros(B, bool)
    specs = [EnvSpec("test", ArraySpec((3,), high=high), DiscreteSpec(4)) for high in (1.0, 3.0)]
    params = [network.init(jax.random.key(0), spec) for spec in specs]
    for each, value in zip(params, (3.0, 1.0), strict=True):
        np.testing.assert_allclose(jax.jit(network.unroll)(each, (), obs, first), value, rtol=1e-5)
    # Made anew, as when a run goes on, they fit what was there.
    again = network.init(jax.random.key(1), specs[0])
    assert jax.tree.structure(again) == jax.tree.structure(params[0]) != jax.tree.structure(params[1])


@pytest.mark.parametrize("make", [actor_critic, q_network])
@pytest.mark.parametrize(
    "bad", [{"activation": "swish"}, {"hidden_sizes": ()}, {"hidden_sizes": (8, 0)}, {"hidden_sizes": (-1,)}], ids=str
)
def test_bad_fields_are_named(make: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        make(**bad)


@pytest.mark.parametrize("bad", [{"memory": "rnn"}, {"memory": "gru", "memory_size": 0}], ids=str)
def test_bad_memories_are_named(bad: dict[str, Any]) -> None:
    for make in (actor_critic, q_network):
        with pytest.raises(ValueError, match=f"{list(bad)[-1]}="):
            make(**bad)


def test_a_layer_norm_that_is_no_flag_is_named() -> None:
    with pytest.raises(ValueError, match="layer_norm=1 must be True or False"):
        q_network(layer_norm=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1.5, "8", True])
def test_sizes_that_are_no_integers_are_named(size: Any) -> None:
    with pytest.raises(ValueError, match="hidden_sizes"):
        actor_critic((size,))
    with pytest.raises(ValueError, match="memory_size"):
        actor_critic((8,), memory="gru", memory_size=size)


@pytest.mark.parametrize("obs", [ArraySpec((0,)), ArraySpec((2, 0)), {}, {"a": ArraySpec((0,))}], ids=str)
def test_observations_without_a_number_are_named(obs: Any) -> None:
    for agent in (ppo.make(), dqn.make(), pqn.make(pqn.Config(memory="gru"))):
        with pytest.raises(ValueError, match="observations of test hold no number, and a network needs one"):
            agent.init(jax.random.key(0), EnvSpec("test", obs, DiscreteSpec(2)))
    for agent in (sac.make(), td3.make(), reppo.make(reppo.Config(normalize_obs=False))):
        with pytest.raises(ValueError, match="the observations of test hold no number"):
            agent.init(jax.random.key(0), EnvSpec("test", obs, ArraySpec((2,), low=-1, high=1)))


def test_no_actions_are_named() -> None:
    for make in (actor_critic, q_network):
        with pytest.raises(ValueError, match="test has num_values=0 discrete actions, and one must be taken"):
            make((8,)).init(jax.random.key(0), EnvSpec("test", ArraySpec((3,)), DiscreteSpec(0)))
    for agent in (ppo.make(), sac.make(), td3.make()):
        with pytest.raises(ValueError, match=r"actions of test have shape \(0,\), but .* a vector \(A,\), A 1 or more"):
            agent.init(jax.random.key(0), EnvSpec("test", ArraySpec((3,)), ArraySpec((0,), low=-1, high=1)))


def test_actions_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"actions of test have shape \(2, 2\)"):
        actor_critic((8,)).init(jax.random.key(0), EnvSpec("test", ArraySpec((3,)), ArraySpec((2, 2))))
    for make in (actor_critic, q_network):
        with pytest.raises(ValueError, match="actions of test are int32 in a box, and an agent chooses one index or"):
            make((8,)).init(jax.random.key(0), EnvSpec("test", ArraySpec((3,)), ArraySpec((2,), np.int32, 0, 10)))
    with pytest.raises(ValueError, match="actions of test are continuous"):
        q_network((8,)).init(jax.random.key(0), EnvSpec("test", ArraySpec((3,)), ArraySpec((2,))))


def players_and_firsts() -> tuple[EnvSpec, Seen, jax.Array]:
    spec = EnvSpec("game", Seen(ArraySpec((3,)), ArraySpec((4,), bool), None, DiscreteSpec(2)), ACTIONS["discrete"])
    obs = observations(spec.obs, T, B)
    return spec, obs._replace(legal=jnp.ones((T, B, 4), bool)), firsts()


BY_PLAYERS = {
    "gru": lambda: actor_critic((8,), memory="gru", memory_size=4),
    "lstm": lambda: q_network((8,), memory="lstm", memory_size=4),
    "separate": lambda: actor_critic((8,), memory="gru", memory_size=4, separate=True),
}


@pytest.mark.parametrize("name", BY_PLAYERS)
def test_of_two_who_take_turns_each_remembers_its_own_moves(name: str) -> None:
    """Stepped and unrolled, from any memory, it is a loop over two memories of the network without."""
    plain = BY_PLAYERS[name]()
    network, (spec, obs, first) = networks.by_players(plain), players_and_firsts()
    params = network.init(jax.random.key(0), spec)
    memory = networks.fresh_memory(network, spec.obs, B)
    memory = jax.tree.map(lambda m: jax.random.normal(jax.random.key(1), m.shape), memory)
    stepped, memories = networks.remember(network, params, memory, obs, first)
    unrolled = jax.jit(network.unroll)(params, memory, obs, first)
    apply, loops = jax.jit(plain.apply), []
    for b in range(B):
        own = [jax.tree.map(lambda m: m[b : b + 1, p], memory.each) for p in range(2)]  # noqa: B023
        outputs = []
        for t in range(T):
            if first[t, b]:
                own = [plain.carry(1), plain.carry(1)]
            p = int(obs.player[t, b])
            row = jax.tree.map(lambda x: x[t, b : b + 1], obs)  # noqa: B023
            output, own[p] = apply(params, own[p], row, jnp.zeros(1, bool))
            outputs.append(output)
        loops.append((jax.tree.map(lambda *x: jnp.stack(x), *outputs), own))
    looped = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *[outputs for outputs, _ in loops])
    assert_close(stepped, looped, 1e-5)
    assert_close(unrolled, looped, 1e-5)
    for p in range(2):
        end = jax.tree.map(lambda *x: jnp.concatenate(x), *[own[p] for _, own in loops])
        assert_close(jax.tree.map(lambda m: m[-1, :, p], memories.each), end, 1e-5)  # noqa: B023


def test_what_one_player_saw_moves_nothing_of_the_other() -> None:
    network, (spec, obs, _) = networks.by_players(BY_PLAYERS["gru"]()), players_and_firsts()
    params, memory = network.init(jax.random.key(0), spec), networks.fresh_memory(network, spec.obs, B)

    def values_of_second(view: jax.Array) -> jax.Array:
        value = network.unroll(params, memory, obs._replace(view=view), jnp.zeros((T, B), bool)).value
        return jnp.sum(value, where=obs.player == 1)

    moved = jnp.abs(jax.grad(values_of_second)(obs.view)).sum(-1)
    assert not moved[obs.player == 0].any() and (moved[obs.player == 1] > 0).all()


def test_memories_of_players_stay_where_a_mesh_has_their_environment() -> None:
    """What crosses between devices is one sum of gradients, as without players; acting sends nothing."""
    network, (spec, obs, first) = networks.by_players(BY_PLAYERS["gru"]()), players_and_firsts()
    params, memory = network.init(jax.random.key(0), spec), networks.fresh_memory(network, spec.obs, B)
    mesh = jax.make_mesh((4,), ("env",), axis_types=(AxisType.Auto,))
    rows, envs, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "env"), ("env",), ()))

    def sent(function: Any) -> list[str]:
        compiled = jax.jit(function, in_shardings=(whole, envs, rows, rows)).lower(params, memory, obs, first).compile()
        names = "all-gather|all-reduce|all-to-all|collective-permute"
        return re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())

    with batch_over(mesh):
        squares = lambda *inputs: jnp.mean(jnp.square(network.unroll(*inputs).value))
        assert sent(jax.grad(squares)) == ["all-reduce"]
        assert sent(functools.partial(networks.remember, network)) == []


def test_memory_is_one_where_nobody_takes_turns() -> None:
    for agent in (ppo.make(ppo.Config(memory="gru")), pqn.make(pqn.Config(memory="lstm"))):
        alone = EnvSpec("alone", Seen(ArraySpec((3,)), ArraySpec((4,), bool)), ACTIONS["discrete"])
        assert {x.shape for x in jax.tree.leaves(agent.carry(alone, B))} == {(B, agent.config.memory_size)}
        assert {x.shape for x in jax.tree.leaves(agent.carry(players_and_firsts()[0], B))} == {
            (B, 2, agent.config.memory_size)
        }
