"""Noisy layers: their output by hand, one noise for all rows and one for each, and what a network without noise is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import noisy
from podium.networks import q_network
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

SPEC = EnvSpec("test", ArraySpec((4,)), DiscreteSpec(3))
FRAMES = EnvSpec("frames", ArraySpec((10, 10, 4), bool, False, True), DiscreteSpec(3))
LINEAR = {"kernel": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "bias": jnp.array([0.5, -0.5])}


def layer(seed: int = 0) -> Any:
    """Return a linear layer of 3 inputs and 2 outputs with random deviations."""
    std = noisy.init_std(3, 2, 0.5)
    keys = jax.random.split(jax.random.key(seed), len(std))
    return LINEAR | {
        name: x * jax.random.normal(key, x.shape) for key, (name, x) in zip(keys, std.items(), strict=True)
    }


def test_what_noise_makes_is_the_papers_equation() -> None:
    one, noise = layer(), jnp.array([0.5, -1.0, 2.0, 3.0, -0.25])
    x = jax.random.normal(jax.random.key(1), (7, 3))
    # Weights W + std * e_in e_out, written out, of inputs [0.5, -1, 2] and outputs [3, -0.25].
    kernel = one["kernel"] + one["kernel_std"] * jnp.outer(noise[:3], noise[3:])
    bias = one["bias"] + one["bias_std"] * noise[3:]
    perturbed = noisy.perturb(one, noise)
    np.testing.assert_allclose(perturbed["kernel"], kernel, rtol=1e-6)
    np.testing.assert_allclose(perturbed["bias"], bias, rtol=1e-6)
    inserted = noisy.insert(one, jnp.broadcast_to(noise, (7, 5)))
    plain = x @ one["kernel"] + one["bias"]
    np.testing.assert_allclose(noisy.add(inserted, x, plain), x @ kernel + bias, rtol=1e-5, atol=1e-5)
    assert noisy.add(one, x, plain) is plain


def test_deviations_begin_as_in_the_paper_and_noise_has_its_factorised_form() -> None:
    """sigma_0 / sqrt(p): 0.5 / 2 of four inputs; and f(x) = sign(x) sqrt(|x|) has mean 0 and E f^2 = sqrt(2 / pi)."""
    std = noisy.init_std(4, 3, 0.5)
    np.testing.assert_allclose(std["kernel_std"], np.full((4, 3), 0.25))
    np.testing.assert_allclose(std["bias_std"], np.full(3, 0.25))
    one = noisy.init_std(20_000, 3, 0.5)
    drawn = noisy.sample(jax.random.key(0), one)
    assert drawn.shape == (20_003,)
    np.testing.assert_allclose([drawn.mean(), (drawn**2).mean()], [0, np.sqrt(2 / np.pi)], atol=0.03)


@pytest.mark.parametrize(("spec", "torso"), [(SPEC, "mlp"), (FRAMES, "minatar_cnn")])
@pytest.mark.parametrize("num_atoms", [None, 5])
def test_a_network_without_noise_is_the_plain_one(spec: EnvSpec, torso: str, num_atoms: int | None) -> None:
    """Means are drawn as the weights of plain layers are; deviations lie beside them, and no convolution has any."""
    make = lambda std: q_network((8, 6), torso=torso, dueling=True, num_atoms=num_atoms, noisy_std=std)
    plain, network = make(None), make(0.5)
    params = network.init(jax.random.key(0), spec)
    obs, first = spec.obs.sample(jax.random.key(1))[None], jnp.ones(1, bool)
    expected = plain.unroll(plain.init(jax.random.key(0), spec), (), obs, first)
    np.testing.assert_array_equal(network.unroll(params, (), obs, first), expected)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert sum("kernel_std" in path for path in paths) == 4 and not any("frames" in x and "std" in x for x in paths)
    marks = jax.tree.leaves(jax.tree.broadcast(network.policy_mask(params), params))
    assert marks == [not path.endswith("_std']") for path in paths]
    assert all(jax.tree.leaves(plain.policy_mask(plain.init(jax.random.key(0), spec))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_with_its_own_noise_is_as_alone_with_it(dtype: str) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.05}
    network = q_network((8, 6), dueling=True, num_atoms=5, noisy_std=0.5, dtype=dtype)
    params = network.init(jax.random.key(0), SPEC)
    obs, first = jax.random.normal(jax.random.key(1), (6, 4)), jnp.ones(6, bool)
    noise = jax.vmap(noisy.sample, (0, None))(jax.random.split(jax.random.key(2), 6), params)
    together = network.apply(noisy.insert(params, noise), (), obs, first)[0]
    assert together.dtype == jnp.float32
    for i in range(6):
        alone = network.unroll(noisy.perturb(params, noise[i]), (), obs[i : i + 1], first[:1])[0]
        np.testing.assert_allclose(together[i], alone, **tolerance)
    assert np.abs(together - network.apply(params, (), obs, first)[0]).max() > 0.05
