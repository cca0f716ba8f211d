"""Convolutional torsos for frames, and a convolution whose gradient is fast on CPU as well.

Frames are [N, H, W, C]; bytes stay bytes until a convolution divides them by 255. Torsos end in a flat vector: dense
layers follow in `podium.torsos`. Layers are initialised orthogonally with a gain of sqrt(2), in float32, whatever they
compute in. With `layer_norm` the channels of every pixel are normalised after each convolution (Ba et al. 2016).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from podium.types import Array

_PATCHES = 2**16
"""Numbers of a frame's patches up to which they are stored, for the gradient of a kernel of stride 1 on a CPU."""


def lax_convolve(x: Array, kernel: Array, stride: int = 1, padding: int = 0) -> Array:
    """Do what `convolve` does, with the gradient of `jax.lax` on every platform."""
    if kernel.shape[0] % stride:
        raise ValueError(f"stride={stride} must divide the kernel's size of {kernel.shape[0]}.")
    sides, x = [(padding, padding)] * 2, unit_interval(x, kernel.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(x: Array, kernel: Array, stride: int = 1, padding: int = 0) -> Array:
    """Convolve frames [N, H, W, C] with a kernel [K, K, C, O]; the same mathematics on every platform.

    Forward this is `jax.lax.conv_general_dilated`, and on accelerators its gradient too. On CPU that gradient is 10 to
    30 times slower inside a loop, where learning always is, than one by matrix products (batches of 64 frames through
    `NatureCNN` and back: 85 frames a second against 2,600, on two cores). So there, frames are cut in cells of stride x
    stride pixels, which makes every convolution one of stride 1, and that is a sum over the (K / stride)^2 taps of the
    kernel: shifted cells times a matrix. Patches are stored for a kernel's gradient alone, at stride 1, where they are
    small. There, too, several kernels, as of seeds in one program, are taken one after another. Only reverse-mode
    derivatives are defined.

    Args:
      x: [N, H, W, C], in the kernel's dtype, or bytes, of which `unit_interval` is convolved.
      kernel: [K, K, C, O]; the stride divides K.
      stride: in both directions.
      padding: zeros on each side.

    Returns:
      [N, (H + 2 padding - K) // stride + 1, likewise W, O].
    """
    convolve = functools.partial(lax_convolve, stride=stride, padding=padding)
    return _by_platform(convolve, convolve, x, kernel)


def _by_platform(cpu: Callable[..., Array], default: Callable[..., Array], *arrays: Array) -> Array:
    """Return `cpu(*arrays)` on a CPU, several kernels in turn, and `default(*arrays)` elsewhere."""
    result: Array = jax.lax.platform_dependent(*arrays, cpu=_kernels_in_turn(cpu), default=default)
    return result


def _kernels_in_turn(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function of (frames, kernel, ...) that takes several kernels, of seeds or members, one after another.

    Side by side they are one convolution in groups, or a batch of products, which take a CPU 2 to 6 times as long.
    """
    in_turn = jax.custom_batching.custom_vmap(function)

    @in_turn.def_vmap
    def several(size: int, batched: Sequence[bool], *arrays: Array) -> tuple[Array, bool]:
        if not batched[1]:
            return jax.vmap(function, [0 if each else None for each in batched])(*arrays), True

        def one(apart: Sequence[Array]) -> Array:
            rest = iter(apart)
            return in_turn(*(next(rest) if each else array for each, array in zip(batched, arrays, strict=True)))

        return jax.lax.map(one, [array for each, array in zip(batched, arrays, strict=True) if each]), True

    return in_turn


def _save(x: Array, kernel: Array, stride: int, padding: int) -> tuple[Array, tuple[Array, Array]]:
    return convolve(x, kernel, stride, padding), (x, kernel)


def _gradient(stride: int, padding: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array | None, Array]:
    """Return gradients of frames and kernel, apart, so that either is left out where nothing needs it."""
    by_x = _frames_gradient(*saved, gradient, stride, padding) if jnp.issubdtype(saved[0].dtype, jnp.floating) else None
    return by_x, _kernels_gradient(*saved, gradient, stride, padding)


convolve.defvjp(_save, _gradient)


def _frames_gradient(x: Array, kernel: Array, gradient: Array, stride: int, padding: int) -> Array:
    def by_taps(x: Array, kernel: Array, gradient: Array) -> Any:
        return jax.linear_transpose(lambda x: _sum_taps(x, kernel, stride, padding), x)(gradient)[0]

    def by_lax(x: Array, kernel: Array, gradient: Array) -> Any:
        return jax.vjp(lambda x: lax_convolve(x, kernel, stride, padding), x)[1](gradient)[0]

    return _by_platform(by_taps, by_lax, x, kernel, gradient)


def _kernels_gradient(x: Array, kernel: Array, gradient: Array, stride: int, padding: int) -> Array:
    def by_taps(x: Array, kernel: Array, gradient: Array) -> Array:
        return _gradient_by_taps(x, kernel, gradient, stride, padding)

    def by_lax(x: Array, kernel: Array, gradient: Array) -> Any:
        return jax.vjp(lambda kernel: lax_convolve(x, kernel, stride, padding), kernel)[1](gradient)[0]

    return _by_platform(by_taps, by_lax, x, kernel, gradient)


def _cells(x: Array, size: int, stride: int, padding: int) -> Array:
    """Return frames padded and cut in cells, [N, rows, columns, stride^2 C]; pixels no kernel reaches are left out."""
    if x.dtype == jnp.uint8 and x.shape[-1] % 4 == 0:  # Four bytes are moved as one word.
        words = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)
        cells = jax.lax.bitcast_convert_type(_cells(words, size, stride, padding), jnp.uint8)
        return cells.reshape(*cells.shape[:3], -1)
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = (((n - size) // stride * stride + size) // stride for n in x.shape[1:3])
    if stride == 1:
        return x[:, :rows, :columns]
    x = x[:, : rows * stride, : columns * stride].reshape(-1, rows, stride, columns, stride, x.shape[-1])
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows, columns, stride**2 * x.shape[-1])


def _taps(kernel: Array, stride: int) -> Array:
    """Return a kernel as matrices [K / stride, K / stride, stride^2 C, O] that act on cells."""
    size, _, channels, outputs = kernel.shape
    taps = size // stride
    kernel = kernel.reshape(taps, stride, taps, stride, channels, outputs).transpose(0, 2, 1, 3, 4, 5)
    return kernel.reshape(taps, taps, stride**2 * channels, outputs)


def _shifted(cells: Array, taps: int) -> list[list[Array]]:
    """Return for every tap the cells that it meets, each [N, H', W', stride^2 C]."""
    rows, columns = (n - taps + 1 for n in cells.shape[1:3])
    return [[cells[:, i : i + rows, j : j + columns] for j in range(taps)] for i in range(taps)]


def _sum_taps(x: Array, kernel: Array, stride: int, padding: int) -> Array:
    taps = _taps(kernel, stride)
    met = _shifted(_cells(x, len(kernel), stride, padding), len(taps))
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    total = sum(multiply(met[i][j], taps[i, j]) for i in range(len(taps)) for j in range(len(taps)))
    return jnp.asarray(total).astype(x.dtype)


def _gradient_by_taps(x: Array, kernel: Array, gradient: Array, stride: int, padding: int) -> Array:
    taps = len(kernel) // stride
    cells = unit_interval(_cells(x, len(kernel), stride, padding), kernel.dtype)
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    outputs, width, (rows, columns) = gradient.shape[-1], cells.shape[-1], gradient.shape[1:3]
    if stride == 1 and rows * columns * taps**2 * width <= _PATCHES:
        # One product, whose transposed side is the narrower: the other way round it takes a CPU twice as long.
        patches = jnp.concatenate([met for row in _shifted(cells, taps) for met in row], axis=-1)
        product = multiply(gradient.reshape(-1, outputs).T, patches.reshape(-1, taps**2 * width))
        by_tap = jnp.moveaxis(product.reshape(outputs, taps, taps, width), 0, 3)
    else:
        # One product of cells shifted by columns and gradients shifted by rows: less is copied than of either by both.
        below = cells.shape[1] - rows
        shifted = [jnp.pad(gradient, ((0, 0), (i, below - i), (0, 0), (0, 0))) for i in range(taps)]
        met = jnp.concatenate([cells[:, :, j : j + columns] for j in range(taps)], axis=-1)
        turned = jnp.concatenate(shifted, axis=-1).reshape(-1, taps * outputs).T
        product = multiply(turned, met.reshape(-1, taps * width))
        by_tap = product.reshape(taps, outputs, taps, width).transpose(0, 2, 3, 1)
    # Taps are the kernel in another order, so the way back is that of the gradient.
    return jax.vjp(lambda k: _taps(k, stride), kernel)[1](by_tap.astype(kernel.dtype))[0]


class Conv(nn.Module):
    """A convolution with a bias, of frames in `dtype` or of bytes, which are divided by 255."""

    outputs: int
    size: int
    stride: int = 1
    padding: int = 0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return [N, H', W', outputs]."""
        x = x if x.dtype == jnp.uint8 else x.astype(self.dtype)
        shape = (self.size, self.size, x.shape[-1], self.outputs)
        kernel = self.param("kernel", nn.initializers.orthogonal(2**0.5), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.outputs,))
        return convolve(x, kernel.astype(self.dtype), self.stride, self.padding) + bias.astype(self.dtype)


class SmallCNN(nn.Module):
    """The convolutions of Mnih et al. 2013 (arXiv 1312.5602, section 4.1); frames of at least 20 x 20.

    16 of 8 x 8 with stride 4 and 32 of 4 x 4 with stride 2, a rectifier after each. Its dense layer of 256 units is
    `hidden_sizes=(256,), activation="relu"` of the network. On 42 x 42 pixels it does 1/20 of the work of `NatureCNN`
    on 84 x 84.
    """

    dtype: Any = jnp.float32
    layer_norm: bool = False
    smallest = 20

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return features [N, n] of frames [N, H, W, C]."""
        return _rectified(x, ((16, 8, 4), (32, 4, 2)), self.dtype, self.layer_norm)


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al. 2015 (Nature 518, "Model architecture"); frames of at least 36 x 36.

    32 of 8 x 8 with stride 4, 64 of 4 x 4 with stride 2, 64 of 3 x 3, a rectifier after each. Its dense layer of 512
    units is `hidden_sizes=(512,), activation="relu"` of the network.
    """

    dtype: Any = jnp.float32
    layer_norm: bool = False
    smallest = 36

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return features [N, n] of frames [N, H, W, C]."""
        return _rectified(x, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), self.dtype, self.layer_norm)


class MinAtarCNN(nn.Module):
    """The convolution of Young and Tian 2019 (arXiv 1903.03176), for MinAtar's planes of 10 x 10.

    16 of 3 x 3, a rectifier after it. Its dense layer of 128 units is `hidden_sizes=(128,), activation="relu"` of the
    network.
    """

    dtype: Any = jnp.float32
    layer_norm: bool = False
    smallest = 3

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return features [N, n] of frames [N, H, W, C]."""
        return _rectified(x, ((16, 3, 1),), self.dtype, self.layer_norm)


def _rectified(x: Array, layers: Sequence[tuple[int, int, int]], dtype: Any, layer_norm: bool) -> Array:
    """Put frames through convolutions of (outputs, size, stride), a rectifier after each; for a compact module."""
    for outputs, size, stride in layers:
        x = jax.nn.relu(normalized(Conv(outputs, size, stride, dtype=dtype)(x), layer_norm, dtype))
    return x.reshape(x.shape[0], -1)


def normalized(x: Array, layer_norm: bool, dtype: Any) -> Array:
    """Normalise the last axis if `layer_norm` (Ba et al. 2016, arXiv 1607.06450, eq. 3); for a compact module."""
    return nn.LayerNorm(dtype=dtype)(x) if layer_norm else x


class ImpalaResNet(nn.Module):
    """The convolutions of Espeholt et al. 2018 (arXiv 1802.01561, figure 3, right: the deep one).

    Three sections of 16, 32 and 32 channels times `width`: a convolution, a maximum over 3 x 3 with stride 2, and two
    residual blocks of two convolutions; a rectifier at the end. Its dense layer of 256 units is `hidden_sizes=(256,),
    activation="relu"` of the network.
    """

    width: int = 1
    dtype: Any = jnp.float32
    layer_norm: bool = False
    smallest = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return features [N, n] of frames [N, H, W, C]."""
        for channels in (16, 32, 32):

            def conv(x: Array, outputs: int = channels * self.width) -> Array:
                return normalized(Conv(outputs, 3, padding=1, dtype=self.dtype)(x), self.layer_norm, self.dtype)

            x = max_pool(conv(x))
            for _ in range(2):
                x = x + conv(jax.nn.relu(conv(jax.nn.relu(x))))
        return jax.nn.relu(x).reshape(x.shape[0], -1)


CONVOLUTIONS: dict[str, Any] = {
    "small_cnn": SmallCNN,
    "nature_cnn": NatureCNN,
    "impala_resnet": ImpalaResNet,
    "minatar_cnn": MinAtarCNN,
}


def unit_interval(x: Array, dtype: Any = jnp.float32) -> Array:
    """Return frames in `dtype`: bytes divided by 255, anything else as it is."""
    return x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)


def max_pool(x: Array) -> Array:
    """Return the maximum over 3 x 3 with stride 2 of [N, H, W, C], padded so that ceil(H / 2) x ceil(W / 2) remain.

    First over columns, then over rows, as maxima of shifted frames: the gradient of a windowed reduction is slow on
    every platform. Where several are largest, they share the gradient.
    """
    for axis in (1, 2):
        size = x.shape[axis]
        outputs = -(-size // 2)
        missing = 2 * outputs + 1 - size
        sides = [(missing // 2, missing - missing // 2) if i == axis else (0, 0) for i in range(4)]
        padded = jnp.pad(x, sides, constant_values=-jnp.inf)
        shifted = [jax.lax.slice_in_dim(padded, i, i + 2 * outputs - 1, 2, axis) for i in range(3)]
        x = functools.reduce(jnp.maximum, shifted)
    return x
