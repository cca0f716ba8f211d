"""Convolutions: one mathematics however they are lowered, torsos for frames, and nothing that crosses a mesh."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close_in_scale
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from podium import vision
from podium.networks import actor_critic, q_network
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

T, B = 3, 8


def frames(*batch: int, size: int = 36, channels: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*batch, size, size, channels), np.uint8)


def frame_spec(size: int = 36, channels: int = 2) -> EnvSpec:
    return EnvSpec("test/Frames", ArraySpec((size, size, channels), np.uint8, 0, 255), DiscreteSpec(3))


# Height, width, channels, outputs, kernel, stride, padding: Nature's layers and the ResNet's, small, and some that do
# not come out even; the last so large that no patches are stored on a CPU.
SHAPES = [
    (20, 24, 4, 8, 8, 4, 0),
    (11, 12, 16, 8, 4, 2, 0),
    (5, 6, 64, 8, 3, 1, 0),
    (7, 6, 4, 8, 3, 1, 1),
    (13, 10, 3, 5, 4, 2, 1),
    (84, 84, 4, 32, 8, 4, 0),
    (61, 70, 6, 4, 4, 2, 1),
    (24, 24, 16, 8, 3, 1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution_and_its_gradients_are_those_of_lax(shape: tuple[int, ...]) -> None:
    height, width, channels, outputs, size, stride, padding = shape
    rng = np.random.default_rng(0)
    x, kernel, weight = (
        rng.normal(size=s).astype(np.float32)
        for s in ((3, height, width, channels), (size, size, channels, outputs), ())
    )

    def both(convolve: Any) -> Any:
        def compute(x: Any, kernel: Any) -> Any:
            y, pull = jax.vjp(lambda x, kernel: convolve(x, kernel, stride, padding), x, kernel)
            return y, pull(jnp.sin(weight * y))

        return jax.jit(compute)(x, kernel)

    assert_close_in_scale(both(vision.convolve), both(vision.lax_convolve))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [3, 4, 12])
def test_bytes_are_convolved_as_their_255ths(channels: int, dtype: Any) -> None:
    x, kernel = frames(3, size=21, channels=channels), np.random.default_rng(0).normal(size=(8, 8, channels, 5))

    def both(convolve: Any, x: Any) -> Any:
        loss = lambda kernel: jnp.sum(jnp.sin(convolve(x, kernel, 4, 1)).astype(jnp.float32))
        return jax.jit(jax.value_and_grad(loss))(jnp.asarray(kernel, dtype))

    value, gradient = both(vision.convolve, jnp.asarray(x))
    assert gradient.dtype == dtype
    tolerance = 1e-5 if dtype == np.float32 else 0.02
    assert_close_in_scale(
        (value, gradient), both(vision.convolve, vision.unit_interval(jnp.asarray(x), dtype)), tolerance
    )
    assert_close_in_scale((value, gradient), both(vision.lax_convolve, jnp.asarray(x)), tolerance)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_frames_are_computed_with_in_the_dtype_whatever_they_are(dtype: str) -> None:
    x = frames(2, size=20)
    for frame in (x, x > 100):
        module = vision.SmallCNN(dtype=jnp.dtype(dtype))
        params = module.init(jax.random.key(0), frame)
        output, pull = jax.vjp(lambda params, m=module, x=frame: m.apply(params, x), params)
        assert output.dtype == dtype
        gradient = pull(output)[0]
        assert all(np.abs(leaf).max() > 0 and leaf.dtype == np.float32 for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("platform", "size", "outputs", "convolutions", "products"),
    [("cpu", 8, 64, 1, 5), ("cpu", 64, 8, 1, 5), ("cpu", 64, 64, 1, 5), ("cuda", 8, 8, 3, 0), ("tpu", 8, 8, 3, 0)],
)
def test_what_each_platform_is_given(platform: str, size: int, outputs: int, convolutions: int, products: int) -> None:
    # A kernel of 2 x 2 taps: on CPU the gradient of frames is four products, that of the kernel one; elsewhere both are
    # convolutions.
    x, kernel = jnp.zeros((2, size, size, 16)), jnp.zeros((4, 4, 16, outputs))
    gradient = jax.jit(jax.grad(lambda x, kernel: jnp.sum(jnp.sin(vision.convolve(x, kernel, 2))), (0, 1)))
    text = gradient.trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.convolution") == convolutions
    assert text.count("stablehlo.dot_general") == products


@pytest.mark.parametrize(
    "apart", [pytest.param((True, True), marks=pytest.mark.slow), (False, True), (True, False)], ids=str
)
def test_several_kernels_are_taken_in_turn_on_a_cpu_and_give_what_each_gives_alone(apart: tuple[bool, bool]) -> None:
    shapes = (2, 9, 9, 3), (4, 4, 3, 5)
    keys = jax.random.split(jax.random.key(0))
    arrays = [
        jax.random.normal(key, (3, *shape) if each else shape)
        for key, shape, each in zip(keys, shapes, apart, strict=True)
    ]

    def loss(x: Any, kernel: Any) -> Any:
        return jnp.sum(jnp.sin(vision.convolve(x, kernel, 2, 1)))

    both = jax.value_and_grad(loss, (0, 1))
    axes = tuple(0 if each else None for each in apart)
    together = jax.jit(jax.vmap(both, axes))
    for i in range(3):
        alone = both(*(array[i] if each else array for array, each in zip(arrays, apart, strict=True)))
        assert_close_in_scale(jax.tree.map(lambda x: x[i], together(*arrays)), alone)  # noqa: B023
    again = [array[None] if each else array for array, each in zip(arrays, apart, strict=True)]
    twice = jax.vmap(jax.vmap(both, axes), axes)(*again)
    assert_close_in_scale(jax.tree.map(lambda x: x[0], twice), together(*arrays))
    text = together.trace(*arrays).lower(lowering_platforms=("cpu",)).as_text()
    assert "group_count = 3" not in text
    assert ("stablehlo.while" in text) == apart[1]


def test_a_stride_that_does_not_divide_the_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="stride=2 must divide the kernel's size of 3"):
        vision.convolve(jnp.zeros((1, 8, 8, 1)), jnp.zeros((3, 3, 1, 1)), 2)


@pytest.mark.parametrize("size", [1, 6])
def test_max_pool_is_the_windowed_maximum(size: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, size, size + 1, 3)).astype(np.float32)
    expected = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    np.testing.assert_array_equal(vision.max_pool(jnp.asarray(x)), expected)
    # Every maximum passes its gradient on, whole; of equal ones, their sum does.
    for y in (x, np.zeros_like(x)):
        gradient = jax.grad(lambda y: vision.max_pool(y).sum())(jnp.asarray(y))
        np.testing.assert_allclose(gradient.sum(), expected.size)


@pytest.mark.parametrize(
    ("name", "size", "features", "norm"),
    [
        ("small_cnn", 20, 32, False),
        ("nature_cnn", 36, 64, False),
        ("impala_resnet", 9, 2 * 2 * 32, False),
        ("minatar_cnn", 10, 8 * 8 * 16, True),
        pytest.param("impala_resnet", 9, 2 * 2 * 32, True, marks=pytest.mark.slow),
    ],
)
def test_torsos_are_the_same_however_they_are_lowered(
    name: str, size: int, features: int, norm: bool, monkeypatch: Any
) -> None:
    module, x = vision.CONVOLUTIONS[name](layer_norm=norm), frames(2, size=size)
    params = jax.jit(module.init)(jax.random.key(0), x[:1])

    def both() -> Any:
        def total(params: Any) -> Any:
            y = module.apply(params, x)
            return jnp.sum(jnp.square(y)), y

        return jax.jit(jax.grad(total, has_aux=True))(params)

    gradient, output = both()
    assert output.shape == (2, features)
    monkeypatch.setattr(vision, "convolve", vision.lax_convolve)
    expected = both()
    assert_close_in_scale((gradient, output), expected)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    norms = [path for path, _ in jax.tree_util.tree_leaves_with_path(params) if "LayerNorm" in str(path)]
    assert len(norms) == 2 * norm * sum(leaf.ndim == 4 for leaf in jax.tree.leaves(params))


def test_channels_are_normalised_pixel_by_pixel_before_the_rectifier() -> None:
    module, x = vision.MinAtarCNN(layer_norm=True), np.random.default_rng(0).random((2, 10, 10, 4)) < 0.3
    params = module.init(jax.random.key(0), x)
    kernel = np.asarray(params["params"]["Conv_0"]["kernel"], np.float64)
    y = np.zeros((2, 8, 8, 16))
    for i, j in np.ndindex(8, 8):
        y[:, i, j] = np.einsum("nabc,abco->no", x[:, i : i + 3, j : j + 3].astype(float), kernel)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(module.apply(params, x), np.maximum(y, 0).reshape(2, -1), rtol=1e-3, atol=1e-4)


def test_the_published_sizes() -> None:
    # Mnih et al. 2013: 84 -> 20 -> 9; 2015: 84 -> 20 -> 9 -> 7.
    # Espeholt et al. 2018: 84 -> 42 -> 21 -> 11, and 15 convolutions.
    for module, features, kernels in (
        (vision.SmallCNN(), 9 * 9 * 32, 2),
        (vision.NatureCNN(), 7 * 7 * 64, 3),
        (vision.ImpalaResNet(width=2), 11 * 11 * 64, 15),
    ):
        shapes = jax.eval_shape(lambda m=module: m.init_with_output(jax.random.key(0), frames(1, size=84, channels=4)))
        assert shapes[0].shape == (1, features)
        assert sum(leaf.ndim == 4 for leaf in jax.tree.leaves(shapes[1])) == kernels


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_unroll_is_repeated_apply(memory: str) -> None:
    # Also that environments are not mixed up with times.
    network = actor_critic((8,), "relu", memory, 5, torso="nature_cnn")
    params = network.init(jax.random.key(0), frame_spec())
    obs, first = frames(T, B), np.random.default_rng(1).random((T, B)) < 0.3

    @jax.jit
    def compute(params: Any) -> Any:
        state, values = network.carry(B), []
        for t in range(T):
            output, state = network.apply(params, state, obs[t], first[t])
            values.append(output.value)
        return jnp.stack(values), network.unroll(params, network.carry(B), obs, first)

    values, output = compute(params)
    assert output.policy.logits.shape == (T, B, 3) and output.value.dtype == jnp.float32
    assert_close_in_scale(output.value, values)
    # One torso serves policy and value.
    assert set(params) == {"torso", "policy", "value"} | ({"memory"} if memory != "none" else set())


@pytest.mark.slow
def test_bfloat16_computes_in_it_and_keeps_parameters_and_heads_in_float32() -> None:
    networks = [q_network((8,), torso="nature_cnn", dtype=dtype) for dtype in ("float32", "bfloat16")]
    params = networks[0].init(jax.random.key(0), frame_spec())
    other = jax.eval_shape(lambda: networks[1].init(jax.random.key(0), frame_spec()))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), other)
    obs, first = frames(B), np.zeros(B, bool)
    exact, rough = (jax.jit(n.unroll)(params, (), obs, first) for n in networks)
    assert rough.dtype == jnp.float32
    assert_close_in_scale(rough, exact, 0.05)
    assert (rough != exact).any()


def test_bytes_are_divided_and_numbers_are_not() -> None:
    np.testing.assert_allclose(vision.unit_interval(jnp.array([0, 51, 255], jnp.uint8)), [0, 0.2, 1], rtol=1e-6)
    np.testing.assert_array_equal(vision.unit_interval(jnp.array([0.0, 51.0])), [0, 51])


class OneConvolution(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return vision.Conv(4, 4, 2)(vision.unit_interval(x)).reshape(x.shape[0], -1)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices; tests/conftest.py makes them")
def test_sequences_of_frames_stay_on_their_device() -> None:
    network = actor_critic((8,), torso=OneConvolution())
    params = network.init(jax.random.key(0), frame_spec(8))
    mesh = jax.make_mesh((8,), ("env",), axis_types=(AxisType.Auto,))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "env")))
    obs, first = place(frames(T, 16, size=8)), place(np.zeros((T, 16), bool))
    total = lambda params, obs, first: jnp.mean(network.unroll(params, (), obs, first).value)
    text = jax.jit(jax.grad(total)).lower(params, obs, first).compile().as_text()
    assert "all-reduce" in text
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


@pytest.mark.parametrize("make", [actor_critic, q_network])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvSpec("test", ArraySpec((3,)), DiscreteSpec(2)), r"needs frames .* shapes \[\(3,\)\]; use torso='mlp'"),
        (EnvSpec("test", DiscreteSpec(3), DiscreteSpec(2)), "NatureCNN needs frames"),
        (frame_spec(35), r"at least 36 x 36, but those of test/Frames have shape \(35, 35, 2\)"),
    ],
)  # fmt: skip
def test_observations_that_are_no_frames_are_refused(make: Any, spec: EnvSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(torso="nature_cnn").init(jax.random.key(0), spec)


@pytest.mark.parametrize("bad", [{"torso": "resnet"}, {"dtype": "float16"}], ids=str)
def test_unknown_names_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        actor_critic(**bad)  # type: ignore[arg-type]
