"""One algorithm with several settings, as an agent: its State holds the numbers that vary, a program has them as data.

What varies must be numbers that an agent's `make` may be handed while they are traced: rates, gamma, clips,
coefficients. Sizes decide what is compiled; settings that differ in them are programs of their own (`podium.sweep`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import ActOutput, Agent, Aux, Plan, Settings, parts_of
from podium.types import Array, EnvSpec, Key, PyTree, Trajectory


class Varied(NamedTuple):
    """The State of an agent with settings.

    Attributes:
      numbers: float32 scalars by name of their field.
      state: the agent's own.
      diverged: bool scalar, whether it became NaN or infinite. It is kept at zeros from then on, so that other settings
        go on beside it.
    """

    numbers: dict[str, Array]
    state: PyTree
    diverged: Array


class Params(NamedTuple):
    """What acting needs: the numbers that vary, and the agent's own parameters."""

    numbers: dict[str, Array]
    params: PyTree


def varied(make: Callable[[Any], Agent], config: Any, settings: Sequence[Mapping[str, float]]) -> Agent:
    """Make an agent of the same algorithm with several settings, for independent runs in one program.

    Args:
      make: `(config) -> Agent`, of any agent whose numbers may be traced.
      config: what all settings share, a dataclass.
      settings: of each the numbers that vary, by name of their field; of all the same fields.

    Returns:
      an agent whose `settings` tell its runs apart. Its other functions take the numbers from State and parameters.

    Raises:
      ValueError: there is no setting, or one has other fields or is refused by `make`.
    """
    if not settings or any(setting.keys() != settings[0].keys() for setting in settings):
        raise ValueError(f"settings={list(settings)} must be one or more, all of the same fields.")
    for setting in settings:
        make(dataclasses.replace(config, **setting))
    table = {name: np.array([setting[name] for setting in settings], np.float32) for name in settings[0]}
    base = make(dataclasses.replace(config, **settings[0]))

    def of(numbers: Mapping[str, Array]) -> Agent:
        return make(dataclasses.replace(config, **numbers))

    def init(key: Key, spec: EnvSpec, index: Array) -> Varied:
        numbers = {name: jnp.asarray(values)[index] for name, values in table.items()}
        return Varied(numbers, of(numbers).init(key, spec), jnp.zeros((), bool))

    def actor(state: Varied) -> Params:
        return Params(state.numbers, of(state.numbers).actor(state.state))

    def act(keys: Key, params: Params, carry: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        return of(params.numbers).act(keys, params.params, carry, obs, first, greedy)

    def plan(key: Key, state: Varied, trajectory: Trajectory) -> Plan:
        return of(state.numbers).plan(key, state.state, trajectory)

    def grad(key: Key, state: Varied, minibatch: PyTree) -> tuple[PyTree, Aux]:
        return of(state.numbers).grad(key, state.state, minibatch)

    def apply(state: Varied, grads: PyTree) -> Varied:
        return state._replace(state=of(state.numbers).apply(state.state, grads))

    def observe(state: Varied, trajectory: Trajectory) -> Varied:
        following = of(state.numbers).observe(state.state, trajectory)
        numbers = [x for x in jax.tree.leaves(following) if jnp.issubdtype(x.dtype, jnp.inexact)]
        diverged = state.diverged | ~jnp.stack([jnp.isfinite(x).all() for x in numbers]).all()
        kept = lambda x: jnp.where(diverged, jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return state._replace(state=jax.tree.map(kept, following), diverged=diverged)

    def policy_mask(state: Varied) -> Varied:
        assert base.policy_mask is not None
        mask = base.policy_mask(state.state)
        return Varied(dict.fromkeys(state.numbers, False), mask, False)  # type: ignore[arg-type]

    evaluation: Agent | None = None
    if base.evaluation is not None:
        evaluated = lambda numbers: of(numbers).evaluation
        evaluation = base.evaluation._replace(
            actor=lambda state: Params(state.numbers, evaluated(state.numbers).actor(state.state)),
            act=lambda keys, params, *given: evaluated(params.numbers).act(keys, params.params, *given),
        )

    own: Agent = base._replace(
        init=lambda key, spec: init(key, spec, jnp.int32(0)),
        actor=actor,
        act=act,
        plan=plan,
        grad=grad,
        apply=apply,
        observe=observe,
        policy_mask=policy_mask if base.policy_mask else None,
        config=config,
        evaluation=evaluation,
        brought=parts_of(base),
    )

    def bind(state: Varied) -> Agent:
        # What is no function of a State has the numbers of this one all the same.
        agent = of(state.numbers)
        return own._replace(
            statistics=agent.statistics,
            stops=agent.stops,
            reward_discount=agent.reward_discount,
            replay=agent.replay,
        )

    return own._replace(settings=Settings(tuple(map(dict, settings)), init, bind))


def check_field(config: Any, name: str) -> None:
    """Raise ValueError where a configuration has no such field."""
    known = [field.name for field in dataclasses.fields(config)]
    if name not in known:
        raise ValueError(
            f"{name!r} is no field of {type(config).__module__}.{type(config).__qualname__}, so it cannot vary; "
            f"these can: {', '.join(known)}."
        )


def may_vary(make: Callable[[Any], Agent], config: Any, name: str) -> bool:
    """Say whether a field may vary within a program: whether the agent can be made while its number is traced."""

    def trial(x: Any) -> Any:
        make(dataclasses.replace(config, **{name: x}))
        return x

    if not isinstance(getattr(config, name), int | float | None):
        return False
    try:
        jax.eval_shape(trial, jax.ShapeDtypeStruct((), np.float32))
    except (ValueError, TypeError, jax.errors.JAXTypeError):
        return False
    return True


def check_may_vary(make: Callable[[Any], Agent], config: Any, name: str) -> None:
    """Raise ValueError where a field cannot vary within a program."""
    check_field(config, name)
    if not may_vary(make, config, name):
        numbers = [field.name for field in dataclasses.fields(config) if may_vary(make, config, field.name)]
        raise ValueError(
            f"{name}={getattr(config, name)!r} decides what is compiled, so it cannot vary within a program; these "
            f"can: {', '.join(numbers)}."
        )
