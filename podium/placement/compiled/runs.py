"""Independent runs side by side in one program: how they start, and one iteration of each, fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podium import episodes, keys, words
from podium.finite import rollout_finite
from podium.learn import learn
from podium.placement.compiled.iteration import start
from podium.placement.contract import Acting, RunState, Sizes
from podium.rollout import RolloutState, play
from podium.types import Array, Key, Metrics, PyTree

BY_RUN = P("run")
"""How states lie along a mesh that whole runs are spread over."""


def fused(
    acting: Acting,
    sizes: Sizes,
    device: jax.Device,
    state: RunState,
    spread: Callable[[Callable], Callable] = lambda play: play,
) -> tuple[RunState, Metrics, Array]:
    """Collect a rollout with the current policy, and learn from it: one iteration of one run.

    Args:
      acting: in environments that are pure.
      sizes: of the run.
      device: of those that compute, the first.
      state: of the run.
      spread: makes of what plays all environments, `(key, params, standing, version)` as of `podium.rollout.play`,
        what lets several devices play them.
    """
    agent, (rollout_key, learn_key) = acting.agent.bound(state.agent), keys.iteration(state.key, state.update)

    def play_all(key: Key, params: PyTree, standing: RolloutState, version: Array) -> Any:
        return play(key, agent, acting.env, params, standing, sizes.rollout_length, version, words.fold(device))

    params = agent.actor(state.agent)
    following, played, ended = spread(play_all)(rollout_key, params, state.rollout, state.update)
    trajectory = played.trajectory()
    learned = learn(learn_key, agent, state.agent, state.replay, trajectory, sizes.num_lanes)
    metrics = {**learned.metrics, **episodes.summarize(ended)}
    state = RunState(state.key, state.update + 1, learned.state, learned.replay, following)
    return state, metrics, rollout_finite(agent, trajectory)


def start_runs(key: Key, acting: Acting, sizes: Sizes, apart: bool = False) -> RunState:
    """Return the first state of all runs, [seeds, ...] where there are several.

    Those of each of an agent's settings have the same seeds, so that settings compare; `apart`, all have their own.
    """
    settings, runs = acting.agent.settings, jnp.arange(sizes.seeds)
    if sizes.seeds == 1:  # One of a setting is the first of its seeds, as where others have settings beside it.
        return start(key if settings is None else jax.random.fold_in(key, 0), acting, sizes)
    seeds = sizes.seeds // (len(settings.values) if settings else 1)
    seed_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, runs if apart else runs % seeds)

    def first(run: tuple[Key, Array]) -> RunState:
        key, setting = run
        if settings is None:
            return start(key, acting, sizes)
        agent = acting.agent._replace(init=lambda key, spec: settings.init(key, spec, setting))
        return start(key, dataclasses.replace(acting, agent=agent), sizes)

    # One after another: batched QR (orthogonal weights) on several CPU threads deadlocks XLA's pool, 3 times in 4.
    return jax.lax.map(first, (seed_keys, runs // seeds))


IN_CACHE = 4
"""Runs that a core does at once, where it has many: more of them leave its caches."""


def side_by_side(iterate: Callable[[RunState], Any], mesh: Mesh | None) -> Callable[[RunState], Any]:
    """Return an iteration of one run as that of several; along a mesh, of whole runs on every device.

    Several devices of a CPU are about a core each, and do their runs a few at a time.
    """
    several: Callable[[RunState], Any] = jax.vmap(iterate)
    if mesh is None:
        return several
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        several = partial(jax.lax.map, iterate, batch_size=IN_CACHE)
    return jax.shard_map(several, mesh=mesh, in_specs=(BY_RUN,), out_specs=BY_RUN, check_vma=False)
