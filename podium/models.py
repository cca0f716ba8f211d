"""Learnt models of an environment: what MuZero searches by (Schrittwieser et al. 2020, arXiv 1911.08265, appendix F).

A model is three functions: h represents an observation as a state, g takes an action from one state to the next and
says the reward, f predicts policy and value. States mean nothing but what f and g make of them; each is a vector whose
numbers lie between 0 and 1 (there, appendix G). Rewards and values are logits of a `podium.ops.categorical.Support`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.networks import apply_linear, apply_value, init_linear, num_actions, sum_once
from podium.torsos import MLP, apply_module, check_sizes, make_torso, seeing
from podium.types import Array, EnvSpec, Key, PyTree


class Prediction(NamedTuple):
    """What a model thinks of states [N, ...]: logits [N, A] of actions, and of the value [N, Z] to who is to move."""

    policy: Array
    value: Array


class Moved(NamedTuple):
    """What a model says of actions [N]: the next `state` [N, S], logits of the reward [N, Z], and whose turn it is.

    `turn` [N] is the logit of its being the opponent's; None where nobody takes turns.
    """

    state: Array
    reward: Array
    turn: Array | None


class Model(NamedTuple):
    """A learnt model of an environment with discrete actions.

    Attributes:
      init: `(key, EnvSpec) -> params`.
      represent: `(params, obs [N, ...]) -> state [N, S]`, h; of a `Seen` the `view`.
      move: `(params, state [N, S], action int32 [N]) -> Moved`, g.
      predict: `(params, state [N, S]) -> Prediction`, f.
    """

    init: Callable[[Key, EnvSpec], PyTree]
    represent: Callable[[PyTree, PyTree], Array]
    move: Callable[[PyTree, Array, Array], Moved]
    predict: Callable[[PyTree, Array], Prediction]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model an agent learns: fields that such an agent's `Config` begins with."""

    torso: str = "mlp"
    """What sees observations: mlp; or frames: minatar_cnn (Young 2019), small_cnn (Mnih 2013), nature_cnn (2015) or
    impala_resnet (Espeholt 2018)."""
    dtype: str = "float32"
    """What hidden layers compute in: float32 or bfloat16; parameters stay float32."""
    hidden_sizes: tuple[int, ...] = (128,)
    """Units of each hidden layer of representation, dynamics and prediction."""
    activation: str = "relu"
    """Nonlinearity of hidden layers, behind a layer norm: tanh, relu, silu, gelu or elu."""
    state_size: int = 64
    """Numbers of a state of the model, 1 or more."""
    num_bins: int = 51
    """Z, atoms that values and rewards are distributions over, 2 or more."""

    def model(self) -> Model:
        """Build it; raises ValueError for an unknown name, or sizes that are not positive."""
        sizes = self.hidden_sizes, self.activation, self.dtype
        return learnt_model(self.torso, *sizes, state_size=self.state_size, num_bins=self.num_bins)


def learnt_model(
    torso: str = "mlp",
    hidden_sizes: Sequence[int] = (128,),
    activation: str = "relu",
    dtype: str = "float32",
    state_size: int = 64,
    num_bins: int = 51,
) -> Model:
    """Make a model of MLPs, each with a layer norm before every activation.

    Deliberate difference: the paper's are residual towers, whose states are planes.

    Args:
      torso: what sees observations, one of `podium.torsos.TORSOS`; `hidden_sizes` stand behind convolutions.
      hidden_sizes: of each MLP.
      activation: one of `podium.torsos.ACTIVATIONS`.
      dtype: that hidden layers compute in, one of `podium.torsos.DTYPES`.
      state_size: S.
      num_bins: Z.

    Raises:
      ValueError: for an unknown name, or sizes that are not positive; from `init`, for continuous actions or several at
        once.
    """
    check_sizes("state_size", (state_size,))
    check_sizes("num_bins", (num_bins,))
    encoder = seeing(make_torso(torso, hidden_sizes, activation, dtype, layer_norm=True), "", "")
    mlp = MLP(tuple(hidden_sizes), activation, jnp.dtype(dtype), layer_norm=True)
    width = mlp.hidden_sizes[-1]

    def init(key: Key, spec: EnvSpec) -> PyTree:
        number = num_actions(spec, "searches")
        keys = iter(jax.random.split(key, 9))
        params = {
            "torso": encoder.init(next(keys), spec),
            "state": init_linear(next(keys), encoder.width, state_size, 1.0),
            "dynamics": mlp.init(next(keys), jnp.zeros((1, state_size + number))),
            "next": init_linear(next(keys), width, state_size, 1.0),
            "prediction": mlp.init(next(keys), jnp.zeros((1, state_size))),
            "policy": init_linear(next(keys), width, number, 0.01),
            "value": init_linear(next(keys), width, num_bins, 0.01),
            "reward": init_linear(next(keys), width, num_bins, 0.01),
        }
        return {**params, "turn": init_linear(next(keys), width, 1, 0.01)} if spec.turns else params

    def represent(params: PyTree, obs: PyTree) -> Array:
        return _scaled(apply_linear(params["state"], encoder.apply(params["torso"], obs, 1)))

    def move(params: PyTree, state: Array, action: Array) -> Moved:
        number = params["policy"]["bias"].shape[0]
        inputs = jnp.concatenate([state, jax.nn.one_hot(action, number)], axis=-1)
        x = apply_module(mlp, params["dynamics"], inputs).astype(jnp.float32)
        following = _scaled(state + apply_linear(params["next"], x))
        turn = apply_value(params["turn"], x) if "turn" in params else None
        return Moved(following, apply_linear(params["reward"], x), turn)

    def predict(params: PyTree, state: Array) -> Prediction:
        x = apply_module(mlp, params["prediction"], state).astype(jnp.float32)
        return Prediction(apply_linear(params["policy"], x), apply_linear(params["value"], x))

    return Model(init, represent, move, predict)


def unrolled(model: Model, params: PyTree, obs: PyTree, actions: Array) -> tuple[Prediction, Moved]:
    """Return what a model says from observations [N, ...] on, over K actions [N, K], for the gradient of `params`.

    At the start of every step of the dynamics half of the gradient goes on (appendix G), so that the representation's
    does not grow with K. Devices sum it once, see `podium.networks.sum_once`.

    Returns:
      predictions [N, K + 1, ...] for the first state and those that actions led to, and moves [N, K, ...].
    """

    @sum_once
    def unroll(params: PyTree, memory: PyTree, inputs: PyTree, first: Array) -> tuple[Prediction, Moved]:
        obs, actions = inputs
        state, moves = model.represent(params, obs), []
        predictions = [model.predict(params, state)]
        for k in range(actions.shape[1]):
            moves.append(model.move(params, 0.5 * state + jax.lax.stop_gradient(0.5 * state), actions[:, k]))
            state = moves[-1].state
            predictions.append(model.predict(params, state))
        stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x, axis=1), *trees)
        return stack(predictions), stack(moves)

    found: tuple[Prediction, Moved] = unroll(params, (), (obs, actions), jnp.zeros(actions.shape[:1], bool))
    return found


def _scaled(state: Array) -> Array:
    """Return states [N, S], each with its least number at 0 and its largest at 1 (appendix G)."""
    low, high = state.min(-1, keepdims=True), state.max(-1, keepdims=True)
    return (state - low) / (high - low + 1e-5)
