"""Search by a model, be it the rules of a game or learnt: what `alphazero` and `muzero` share, by mctx (DeepMind 2022).

One search an environment under `jax.vmap`, each with a key of its own, so that what is chosen does not depend on what
is played beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.ops.distributions import Categorical
from podium.ranges import check_choice, check_fields, check_value
from podium.types import Array, Key, PyTree


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How an agent searches: fields that the `Config` of one that does has among its own."""

    num_simulations: int = 32
    """Positions that a search evaluates, 0 or more; 0 plays by the network alone."""
    search: str = "gumbel"
    """How actions are chosen: gumbel, or puct as in AlphaZero."""
    max_considered_actions: int = 16
    """Of gumbel, actions at the root that are searched, 2 or more."""
    dirichlet_alpha: float = 0.3
    """Of puct, concentration of the noise at the root, above 0: about 10 by the number of legal actions."""
    dirichlet_fraction: float = 0.25
    """Of puct, share of that noise, 0 to 1."""


class Root(NamedTuple):
    """Where searches begin, [B, ...]: logits [B, A], value [B], the model's state, and legal bool [B, A] or None."""

    logits: Array
    value: Array
    state: PyTree
    legal: Array | None


class Leaf(NamedTuple):
    """What an action led to, in a batch of one: `reward`, `discount` and `value` [1], and `logits` [1, A].

    The discount is what the value counts for who acted: negative where the opponent moves next.
    """

    reward: Array
    discount: Array
    logits: Array
    value: Array


class Searched(NamedTuple):
    """What a search left: its policy [B, A], and the value [B] of the position to who is to move."""

    policy: Array
    value: Array


Expand = Callable[[PyTree, Key, Array, PyTree], tuple[Leaf, PyTree]]
"""`(params, key, action [1], state [1, ...]) -> (Leaf, state)`: a model's step, and what is thought of where it led."""

Search = Callable[[Key, PyTree, Root, bool], tuple[Array, Searched]]
"""`(keys [B], params, root, greedy) -> (action int32 [B], Searched)`; greedy searches have no noise."""


def make_search(config: SearchConfig, expand: Expand, rescale_values: bool, agent: str) -> Search:
    """Make a search: with Gumbel (Danihelka et al. 2022, ICLR), or with PUCT (Silver et al. 2018; Schrittwieser 2020).

    Args:
      config: how to search; without simulations the network's policy acts, and its value is the root's.
      expand: the model.
      rescale_values: of gumbel, whether values are compared as shares of the range between a position's best and worst
        action (where nothing is known of their scale); else as they are, for games won by 1 and lost by -1. PUCT
        always rescales.
      agent: whose, for a sentence.

    Raises:
      ValueError: for a field out of range, or where mctx is not installed.
    """
    check_fields(
        config,
        positive=("dirichlet_alpha",),
        fractions=("dirichlet_fraction",),
        naturals=("num_simulations",),
    )
    check_value("max_considered_actions", config.max_considered_actions, "several", "16 is usual")
    check_choice("search", config.search, ("gumbel", "puct"))
    if not config.num_simulations:
        return _by_network
    mctx = _library(agent)

    def recurrent(params: PyTree, key: Key, action: Array, state: PyTree) -> tuple[Any, PyTree]:
        leaf, state = expand(params, key, action, state)
        found = mctx.RecurrentFnOutput(
            reward=leaf.reward, discount=leaf.discount, prior_logits=leaf.logits, value=leaf.value
        )
        return found, state

    def one(key: Key, params: PyTree, root: Root, greedy: bool) -> tuple[Array, Searched]:
        root = jax.tree.map(lambda x: x[None], root)
        begin = mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=root.state)
        illegal = None if root.legal is None else ~root.legal
        what = params, key, begin, recurrent, config.num_simulations, illegal
        if config.search == "gumbel":
            scale = functools.partial(mctx.qtransform_completed_by_mix_value, rescale_values=rescale_values)
            found = mctx.gumbel_muzero_policy(
                *what,
                qtransform=scale,
                max_num_considered_actions=config.max_considered_actions,
                gumbel_scale=0.0 if greedy else 1.0,
            )
        else:
            quiet = (
                {"dirichlet_fraction": 0.0, "temperature": 0.0}
                if greedy
                else {"dirichlet_fraction": config.dirichlet_fraction}
            )
            if greedy:  # mctx breaks ties by the key.
                what = params, jax.random.key(0), *what[2:]
            found = mctx.muzero_policy(*what, dirichlet_alpha=config.dirichlet_alpha, **quiet)
        value = found.search_tree.summary().value[0]
        return found.action[0].astype(jnp.int32), Searched(found.action_weights[0], value)

    def search(keys: Key, params: PyTree, root: Root, greedy: bool) -> tuple[Array, Searched]:
        return jax.vmap(lambda key, root: one(key, params, root, greedy))(keys, root)

    return search


def _by_network(keys: Key, params: PyTree, root: Root, greedy: bool) -> tuple[Array, Searched]:
    policy = Categorical(root.logits)
    action = policy.mode() if greedy else policy.sample(keys)
    return action, Searched(jax.nn.softmax(root.logits), root.value)


def _library(agent: str) -> Any:
    try:
        return importlib.import_module("mctx")
    except ImportError as error:
        raise ValueError(f'{agent} searches by mctx, which is not installed: pip install "podium[games]".') from error
