"""Measure searches a second beside mctx's own with one key for the whole batch; see `benchmark.py search`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import podium
from podium.agents import alphazero
from podium.env import auto_reset
from podium.ranges import check_fields
from podium.seen import only_legal
from podium.types import Array, Key, PyTree, Seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Search positions of a game by its rules: podium's search, a key an environment, and mctx's with one for all.

    The network, its parameters, the positions (after random openings) and the settings of Gumbel MuZero are the same;
    both are timed in turn.
    """

    env: str = "podium/ConnectFour"
    """A game of podium's whose observations can hold its rules."""
    num_simulations: int = 32
    """Positions that a search evaluates."""
    num_envs: int = 256
    """Positions that are searched side by side."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Units of each hidden layer of policy and value."""
    openings: int = 8
    """Random plies before a position, at most."""
    searches: int = 8
    """Batches of searches in a timed turn."""
    repeats: int = 9
    """Turns of each, after one that is not counted."""


def measure(flags: SearchFlags) -> dict[str, Any]:
    """Return the medians of both rates, and of the ratios of neighbouring turns."""
    check_fields(flags, counts=("num_simulations", "num_envs", "searches", "repeats"))
    env = auto_reset(podium.envs.make_pure(flags.env, rules=True, openings=flags.openings))
    model = podium.envs.make_pure(flags.env)
    config = alphazero.Config(num_simulations=flags.num_simulations, hidden_sizes=flags.hidden_sizes)
    agent, network = alphazero.make(config, model=model), config.network()
    mctx = importlib.import_module("mctx")  # It is there, or there were no agent.
    params = agent.actor(agent.init(jax.random.key(0), env.spec))
    obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), flags.num_envs))[1].obs
    first = jnp.zeros(flags.num_envs, bool)

    def expand(params: PyTree, key: Key, action: Array, state: PyTree) -> tuple[Any, PyTree]:
        state, timestep = jax.vmap(model.step)(jax.random.split(key, flags.num_envs), state, action)
        output, _ = network.apply(params, (), timestep.obs, first)
        found = mctx.RecurrentFnOutput(
            reward=timestep.reward,
            discount=config.gamma * (1.0 - timestep.terminated) * (1.0 if timestep.turn is None else timestep.turn),
            prior_logits=only_legal(output.policy.logits, timestep.obs),
            value=output.value,
        )
        return found, state

    def theirs(key: Key, obs: Seen) -> Any:
        output, _ = network.apply(params, (), obs, first)
        root = mctx.RootFnOutput(prior_logits=output.policy.logits, value=output.value, embedding=obs.rules)
        found = mctx.gumbel_muzero_policy(
            params,
            key,
            root,
            expand,
            config.num_simulations,
            ~obs.legal,
            qtransform=functools.partial(mctx.qtransform_completed_by_mix_value, rescale_values=False),
            max_num_considered_actions=config.max_considered_actions,
        )
        return found.action, found.action_weights, found.search_tree.summary().value

    def ours(key: Key, obs: Seen) -> Any:
        output = agent.act(jax.random.split(key, flags.num_envs), params, (), obs, first, False)
        return output.action, output.extras

    timed = [functools.partial(_seconds, jax.jit(search), obs, flags.searches) for search in (ours, theirs)]
    for turn in timed:
        turn()
    seconds = [[turn() for turn in timed] for _ in range(flags.repeats)]
    number = flags.searches * flags.num_envs
    rates = [number / statistics.median(each) for each in zip(*seconds, strict=True)]
    ratios = [other / own for own, other in seconds]
    return {
        "what": "search",
        **dataclasses.asdict(flags),
        "searches_per_second": rates[0],
        "mctx_searches_per_second": rates[1],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _seconds(search: Callable[[Key, Seen], Any], obs: Seen, number: int) -> float:
    began = time.perf_counter()
    for i in range(number):
        jax.block_until_ready(search(jax.random.key(i), obs))
    return time.perf_counter() - began
