"""Torsos: what turns observations into feature vectors, dense or convolutional, for the heads of `podium.networks`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podium import noisy, products, vision
from podium.ranges import check_choice, check_value, did_you_mean, is_integer
from podium.seen import view_of
from podium.types import Array, DiscreteSpec, EnvSpec, Key, PyTree, is_spec

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
}
TORSOS = ("mlp", *vision.CONVOLUTIONS)
DTYPES = ("float32", "bfloat16")


class NoisyDense(nn.Dense):
    """A dense layer whose parameters have deviations, and which adds the noise that is among them; see `noisy`."""

    std: float = 0.5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return [..., features]."""
        outputs = super().__call__(x)
        init = functools.partial(noisy.init_std, x.shape[-1], self.features, self.std)
        layer = {name: self.param(name, lambda key, name=name: init()[name]) for name in ("kernel_std", "bias_std")}
        if self.has_variable("params", "noise"):
            layer["noise"] = self.get_variable("params", "noise")
        return noisy.add(layer, x.astype(outputs.dtype), outputs)


class MLP(nn.Module):
    """Dense layers with an activation after each; orthogonal initialisation of gain sqrt(2) unless told another.

    With `layer_norm` each layer's outputs are normalised before its activation (Ba et al. 2016, arXiv 1607.06450). With
    a `noisy_std` the layers are noisy, of that deviation to begin with.
    """

    hidden_sizes: Sequence[int]
    activation: str = "tanh"
    dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = nn.initializers.orthogonal(2**0.5)
    layer_norm: bool = False
    noisy_std: float | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return features [..., n] in `dtype`."""
        kind: Any = nn.Dense if self.noisy_std is None else functools.partial(NoisyDense, std=self.noisy_std)
        make = functools.partial(kind, dtype=self.dtype, kernel_init=self.kernel_init, dot_general=products.dot_general)
        for number, size in enumerate(self.hidden_sizes):
            dense = make(size, name=f"Dense_{number}")
            x = ACTIVATIONS[self.activation](vision.normalized(dense(x), self.layer_norm, self.dtype))
        return x


def flatten_obs(obs: PyTree, leading: int, width: int | None = None) -> Array:
    """Flatten the parts of an observation into float vectors [..., n] behind `leading` batch axes.

    A lone array of integers, or one integer, becomes one-hot vectors side by side, `width` numbers in all, unless it
    has so many itself (an integer `ArraySpec`, numbers).
    """
    leaves = jax.tree.leaves(obs)
    size = math.prod(leaves[0].shape[leading:])
    if len(leaves) == 1 and jnp.issubdtype(leaves[0].dtype, jnp.integer) and width != size:
        assert width is not None, "a discrete observation needs its number of values"
        return jax.nn.one_hot(leaves[0], width // size).reshape(*leaves[0].shape[:leading], -1)
    parts = [x.reshape(*x.shape[:leading], -1).astype(jnp.float32) for x in leaves]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def obs_width(spec: EnvSpec) -> int:
    """Return the length of the vector `flatten_obs` makes of one observation.

    Raises:
      ValueError: it is empty.
    """
    leaves = jax.tree.leaves(spec.obs, is_leaf=is_spec)
    if len(leaves) == 1 and isinstance(leaves[0], DiscreteSpec):
        width = leaves[0].num_values * math.prod(leaves[0].shape)
    else:
        width = sum(math.prod(leaf.shape) for leaf in leaves)
    if width < 1:
        raise ValueError(
            f"the observations of {spec.name} hold no number, and a network needs one at least; show a constant where "
            "there is nothing to see."
        )
    return width


def part_of_obs(obs: PyTree, name: str, of: Callable[[PyTree], PyTree] = view_of) -> PyTree:
    """Return the part called `name` of what is seen of an observation, a dictionary; all that is seen for no name.

    Of a `Seen` that is the `view`, or what else `of` takes.
    """
    seen = of(obs)
    return seen[name] if name else seen


def part_of_spec(spec: EnvSpec, name: str, field: str, of: Callable[[PyTree], PyTree] = view_of) -> EnvSpec:
    """Return what an environment is to a network that sees `part_of_obs` of its observations.

    Args:
      spec: of the environment.
      name: of the part; empty for all.
      field: that says so, for a sentence.
      of: as of `part_of_obs`.

    Raises:
      ValueError: what is seen is no dictionary, or has no such part.
    """
    spec = dataclasses.replace(spec, obs=of(spec.obs))
    if not name:
        return spec
    if not isinstance(spec.obs, Mapping):
        raise ValueError(f"{field}={name!r}: the observations of {spec.name} have no parts by name; leave {field} out.")
    if name not in spec.obs:
        hint = did_you_mean(name, spec.obs, 0.5)
        raise ValueError(
            f"{field}={name!r} is no part of the observations of {spec.name}.{hint} They have: "
            f"{', '.join(sorted(spec.obs))}."
        )
    return dataclasses.replace(spec, obs=spec.obs[name])


class Torso(NamedTuple):
    """What turns observations into features, float32 [..., width]: an MLP, or convolutions and an MLP behind them.

    Attributes:
      width: number of features.
      shared: whether policy and value share one, as is usual for convolutions.
      init: `(key, EnvSpec) -> params`.
      apply: `(params, obs, leading) -> features`, behind `leading` batch axes.
    """

    width: int
    shared: bool
    init: Callable[[Key, EnvSpec], PyTree]
    apply: Callable[[PyTree, PyTree, int], Array]


def make_torso(
    torso: str | nn.Module,
    hidden_sizes: Sequence[int],
    activation: str,
    dtype: str = "float32",
    layer_norm: bool = False,
    noisy_std: float | None = None,
) -> Torso:
    """Make a torso.

    Args:
      torso: one of `TORSOS`, or a module like those of `podium.vision`: frames [N, H, W, C] to features [N, n].
      hidden_sizes: of the dense layers: all of an "mlp", behind convolutions those that follow.
      activation: of the dense layers, one of `ACTIVATIONS`; convolutions have a rectifier.
      dtype: to compute in, one of `DTYPES`; parameters and results are float32 in either.
      layer_norm: whether what each layer gives is normalised before its activation; a module of one's own sees to its
        convolutions itself.
      noisy_std: where dense layers are noisy (`podium.noisy`), how much to begin with; None for plain layers.

    Raises:
      ValueError: for an unknown name or sizes that are not positive; from `init`, for frames that convolutions cannot
        take.
    """
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("dtype", dtype, DTYPES)
    check_sizes("hidden_sizes", hidden_sizes)
    check_value("layer_norm", layer_norm, "flags", "False is usual")
    mlp = MLP(tuple(hidden_sizes), activation, jnp.dtype(dtype), layer_norm=layer_norm, noisy_std=noisy_std)
    if isinstance(torso, nn.Module):
        return _convolutional_torso(torso, mlp)
    check_choice("torso", torso, TORSOS)
    if torso != "mlp":
        convolutions = vision.CONVOLUTIONS[torso](dtype=jnp.dtype(dtype), layer_norm=layer_norm)
        return _convolutional_torso(convolutions, mlp)

    def init(key: Key, spec: EnvSpec) -> PyTree:
        return mlp.init(key, jnp.zeros((1, obs_width(spec))))

    def apply(params: PyTree, obs: PyTree, leading: int) -> Array:
        x = flatten_obs(obs, leading, params["params"]["Dense_0"]["kernel"].shape[0])
        return apply_module(mlp, params, x).astype(jnp.float32)

    return Torso(mlp.hidden_sizes[-1], False, init, apply)


def seeing(torso: Torso, name: str, field: str, of: Callable[[PyTree], PyTree] = view_of) -> Torso:
    """Return a torso that sees one part of every observation, see `part_of_spec`, and nothing of the others."""
    return torso._replace(
        init=lambda key, spec: torso.init(key, part_of_spec(spec, name, field, of)),
        apply=lambda params, obs, leading: torso.apply(params, part_of_obs(obs, name, of), leading),
    )


def _convolutional_torso(convolutions: nn.Module, mlp: MLP) -> Torso:
    def init(key: Key, spec: EnvSpec) -> PyTree:
        frame_key, dense_key = jax.random.split(key)
        frames = _one_frame(spec, type(convolutions).__name__, getattr(convolutions, "smallest", 1))
        params = convolutions.init(frame_key, frames)
        return {"frames": params, "dense": mlp.init(dense_key, apply_module(convolutions, params, frames))}

    def apply(params: PyTree, obs: PyTree, leading: int) -> Array:
        (frames,) = jax.tree.leaves(obs)
        # Environments first: where a mesh holds them apart, only then does merging the axes move nothing.
        axes = tuple(range(leading))
        frames = jnp.moveaxis(frames, axes, axes[::-1])
        batch = frames.shape[:leading]
        x = apply_module(convolutions, params["frames"], frames.reshape(-1, *frames.shape[leading:]))
        x = apply_module(mlp, params["dense"], x).astype(jnp.float32)
        return jnp.moveaxis(x.reshape(*batch, -1), axes[::-1], axes)

    return Torso(mlp.hidden_sizes[-1], True, init, apply)


def _one_frame(spec: EnvSpec, name: str, smallest: int) -> Array:
    """Return zeros [1, H, W, C], or say why these observations are no frames."""
    specs = jax.tree.leaves(spec.obs, is_leaf=is_spec)
    shapes = [leaf.shape for leaf in specs]
    if len(shapes) != 1 or len(shapes[0]) != 3:
        raise ValueError(
            f"{name} needs frames [H, W, C], but the observations of {spec.name} have shapes {shapes}; use torso='mlp'."
        )
    if min(shapes[0][:2]) < smallest:
        raise ValueError(
            f"{name} needs frames of at least {smallest} x {smallest}, but those of {spec.name} have shape "
            f"{shapes[0]}; use torso='mlp' or 'impala_resnet'."
        )
    return specs[0].zeros(1)


def apply_module(module: nn.Module, params: PyTree, *args: Any) -> Any:
    """Call a module; flax's own type allows for a second result, which there is only on request."""
    return module.apply(params, *args)


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Raise ValueError unless `sizes` are positive integers."""
    is_sequence = isinstance(sizes, Sequence) and not isinstance(sizes, str | bytes)
    if not is_sequence or not sizes or not all(is_integer(size, 1) for size in sizes):
        raise ValueError(f"{name}={sizes!r} must be a sequence of positive integers; (64, 64) is usual.")
