"""A scan whose small arrays travel as one gives the bits of `jax.lax.scan`, and carries few arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

import podium
from podium import words
from podium.agent import fresh_carry, fresh_past
from podium.agents import dqn, ippo, ppo
from podium.rollout import begin, rollout

STEPS, ROWS = 5, 3


def step(carry: Any, given: Any) -> tuple[Any, Any]:
    small, flag, key, big = carry
    number, draw = given
    small = {"x": small["x"] * draw[:, None] + number, "n": small["n"] + 1}
    flag = flag ^ (small["x"][:, 0] > 1)
    outputs = {
        "small": small["x"],
        "bits": jnp.where(flag, jnp.nan, -0.0),
        "unsigned": small["n"].astype(jnp.uint32) + jnp.uint32(2**31),
        "flag": flag[:, None, None],
        "byte": big[:, :1],
        "half": draw.astype(jnp.bfloat16),
        "wide": big,
        "nothing": None,
    }
    return (small, flag, key, big + 1), outputs


def start() -> tuple[Any, Any]:
    carry = (
        {"x": jnp.linspace(-2, 2, ROWS * 4).reshape(ROWS, 4), "n": jnp.arange(ROWS)},
        jnp.array([True, False, True]),
        jax.random.split(jax.random.key(0), ROWS),
        jnp.zeros((ROWS, 40), jnp.uint8),
    )
    return carry, (jnp.arange(STEPS, dtype=jnp.float32), jnp.linspace(0.5, 2, STEPS * ROWS).reshape(STEPS, ROWS))


def bits(tree: Any) -> Any:
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, np.asarray(raw(x)).tobytes()), tree)


@pytest.mark.parametrize("seeds", [0, 2])
def test_the_bits_are_those_of_jax(seeds: int) -> None:
    given = start()
    over: Any = jax.vmap if seeds else lambda function: function
    if seeds:
        given = jax.tree.map(lambda x: jnp.stack([x] * seeds), given)
    want, got = (jax.jit(over(lambda *x, scan=scan: scan(step, *x)))(*given) for scan in (jax.lax.scan, words.scan))
    assert bits(got) == bits(want)


def test_a_step_may_carry_and_put_out_nothing_small() -> None:
    big = jnp.zeros((ROWS, 40))
    end, rows = words.scan(lambda x, t: (x + t, x), big, jnp.arange(2.0))
    assert end[0, 0] == 1 and rows.shape == (2, ROWS, 40)
    assert words.scan(lambda x, t: (x, None), (), jnp.arange(2.0)) == ((), None)


def test_a_carry_of_another_type_is_refused_and_not_read_as_other_bits() -> None:
    with pytest.raises(TypeError, match=r"but \['n'\]: int32\[3\] became float32\[3\]\."):
        words.scan(lambda x, t: ({**x, "n": x["n"] * 0.5}, None), {"n": jnp.arange(ROWS)}, jnp.arange(2.0))
    with pytest.raises(TypeError, match=r"but \['n'\]: nothing became int32\[3\]"):
        words.scan(lambda x, t: ({"n": jnp.arange(ROWS)}, None), {}, jnp.arange(2.0))


def play(agent: podium.Agent, name: str, fold: Any, length: int = 8) -> Any:
    env = podium.env.auto_reset(podium.envs.make_pure(name))
    index = jnp.arange(4)

    def function(key: Any) -> Any:
        params = agent.actor(agent.init(key, env.spec))
        state = begin(key, env, index, fresh_carry(agent, env.spec, index), fresh_past(agent, 4))
        return rollout(key, agent, env, params, state, length, jnp.int32(0), fold)

    return function


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        (ppo.make(ppo.Config(normalize_reward=True)), "CartPole-v1"),
        (ppo.make(ppo.Config(memory="lstm")), "podium/RepeatFirst"),
        (dqn.make(), "Breakout-MinAtar"),
        (ppo.make(ppo.Config(squash=True)), "Pendulum-v1"),
        (ppo.make(ppo.Config(hidden_sizes=(8,))), "podium/ConnectFour"),
        (ippo.make(), "podium/Tag"),
    ],
    ids=lambda x: x.name if isinstance(x, podium.Agent) else x,
)
def test_rollouts_are_those_of_jax(agent: podium.Agent, name: str) -> None:
    # Compiled otherwise, a sum may be rounded otherwise.
    want, got = (jax.jit(play(agent, name, fold))(jax.random.key(3)) for fold in (jax.lax.scan, words.scan))
    same = lambda a, b: np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-4, atol=1e-5)
    jax.tree.map(same, want, got)


def test_a_gpus_rollout_carries_two_arrays_and_puts_out_one() -> None:
    # A GPU takes time by the kernel: PPO on CartPole had twenty arrays here, and half of its rate.
    gpu, cpu = (SimpleNamespace(platform=platform) for platform in ("gpu", "cpu"))
    for device, most in ((gpu, 3), (cpu, 30)):
        fold = words.fold(device)
        program = jax.make_jaxpr(play(ppo.make(), "CartPole-v1", fold))(jax.random.key(0)).jaxpr
        (scan,) = [x for x in equations(program) if x.primitive.name == "scan" and x.params["length"] == 8]
        assert most / 3 < len(scan.outvars) <= most
