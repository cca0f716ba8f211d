"""Environments of JaxMARL (Rutherford et al. 2024, arXiv 2311.10090) whose agents are alike, as `podium.env.Env`.

`jaxmarl/MPE_simple_spread_v3` and `jaxmarl/MPE_simple_reference_v3` (particles), `jaxmarl/smax-3m` and the other maps
of SMAX against its own enemy, `jaxmarl/overcooked`, `jaxmarl/hanabi`. Every array has an axis of agents in front
(`EnvSpec.num_agents`), and observations are a `Seen`: each agent's `view`, what is `legal` where the environment says
so, and as `world` what the environment gives a centralised critic, else the views of all agents together.

What they are is theirs; but an end by the time limit is a truncation (JaxMARL has one `done`), and the bare environment
is stepped: JaxMARL's own `step` resets, and hides the last observation. MPE's episodes of 25 steps are 26. A unit of
SMAX that is dead has one legal action, stop, and is paid as its team is until the battle ends, as there: were its death
an end, units would learn to keep out of battles.

Options of `make`: those of `podium.envs.suites.Options`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import suites
from podium.envs.simulators import import_simulator
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, Seen, TimeStep

PREFIX = "jaxmarl/"

_SMAX_MAPS = (
    *("3m", "2s3z", "25m", "3s5z", "8m", "5m_vs_6m", "10m_vs_11m", "27m_vs_30m", "3s5z_vs_3s6z", "3s_vs_5z"),
    *("6h_vs_8z", "smacv2_5_units", "smacv2_10_units", "smacv2_20_units"),
)


class _Game(NamedTuple):
    """How one of JaxMARL's environments is read.

    Attributes:
      registered: JaxMARL's own name.
      steps: `(state) -> int32`, the steps of the episode so far.
      limit: the steps after which an episode is cut; None where none is.
      legal: name of the method that says what is legal, a dictionary by agent; None where all is.
    """

    registered: str
    steps: Callable[[Any], Array] = lambda state: jnp.zeros((), jnp.int32)
    limit: int | None = None
    legal: str | None = None


_MPE = _Game("", lambda state: state.step, 26)
_SMAX = _Game(
    "HeuristicEnemySMAX",
    lambda state: state.state.step,
    100,
    legal="get_avail_actions",
)
_GAMES: dict[str, _Game] = {
    "MPE_simple_spread_v3": _MPE._replace(registered="MPE_simple_spread_v3"),
    "MPE_simple_reference_v3": _MPE._replace(registered="MPE_simple_reference_v3"),
    **{f"smax-{name}": _SMAX for name in _SMAX_MAPS},
    "overcooked": _Game("overcooked", lambda state: state.step, 400),
    "hanabi": _Game("hanabi", legal="get_legal_moves"),
}


def names() -> list[str]:
    """List the environments."""
    return [PREFIX + name for name in _GAMES]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: `podium.envs.suites.Options`.

    Returns:
      an `Env` of several agents that does not reset itself.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where jaxmarl is not installed.
    """
    suites.check_name(name, names(), "JaxMARL (of which podium has those whose agents are alike)")
    shared, _ = suites.split_options(name, options, [])
    library = import_simulator("jaxmarl", name, "marl")
    game = _GAMES[name.removeprefix(PREFIX)]
    arguments = {}
    if game.registered == _SMAX.registered:
        maps = import_simulator("jaxmarl.environments.smax", name, "marl")
        arguments["scenario"] = maps.map_name_to_scenario(name.removeprefix(f"{PREFIX}smax-"))
    return shared.wrap(_adapt(name, game, library.make(game.registered, **arguments)), 0)


def _adapt(name: str, game: _Game, bare: Any) -> Env:
    agents, number = list(bare.agents), len(bare.agents)
    stacked = lambda by_agent: jnp.stack([jnp.asarray(by_agent[agent]) for agent in agents])

    def seen(obs: PyTree, state: PyTree) -> Seen:
        view = stacked(obs).astype(jnp.float32)
        world = jnp.asarray(obs.get("world_state", view), jnp.float32).reshape(-1)
        legal = None if game.legal is None else stacked(getattr(bare, game.legal)(state)).astype(bool)
        return Seen(view, legal, jnp.broadcast_to(world, (number, world.size)))

    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    advance = lambda key, state, action: bare.step_env(key, state, dict(zip(agents, action, strict=True)))
    shapes = jax.eval_shape(
        lambda key, action: advance(key, bare.reset(key)[1], action)[1], key_shape, jnp.zeros(number, jnp.int32)
    )

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        obs, state = bare.reset(key)
        state = suites.like(shapes, state)
        timestep = restart(seen(obs, state))
        return state, timestep._replace(reward=jnp.zeros(number, jnp.float32))

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        obs, state, reward, done, _ = advance(key, state, jnp.asarray(action, jnp.int32))
        state = suites.like(shapes, state)
        over = jnp.asarray(done["__all__"], bool)
        late = jnp.zeros((), bool) if game.limit is None else game.steps(state) >= game.limit
        return state, transition(seen(obs, state), stacked(reward), over & ~late, over & late)

    seen_shapes = jax.eval_shape(lambda key: reset(key)[1].obs, key_shape)
    obs_spec = jax.tree.map(
        lambda x: ArraySpec(x.shape, x.dtype, *((0, 1) if x.dtype == np.bool_ else (-np.inf, np.inf))), seen_shapes
    )
    actions = int(bare.action_space(agents[0]).n)
    spec = EnvSpec(name, obs_spec, DiscreteSpec(actions, shape=(number,)), game.limit, num_agents=number)
    return Env(spec, reset, step)
