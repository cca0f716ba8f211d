"""`check_host_env`: run environments on the CPU against the whole contract; say in a sentence what is broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from podium.contracts import ContractError, broken, check_agents, check_spec
from podium.host import HostEnv, HostEnvFactory
from podium.ranges import check_seed, is_integer
from podium.testing.specs import check_frames, within
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, PyTree, TimeStep, is_spec

_COPY = "Copy what a later step overwrites."
_SEED = "Derive all randomness from `seed` and the environment's number, first_index + i, and from nothing else."


def check_host_env(envs: HostEnvFactory, *, num_envs: int = 4, num_steps: int = 200, seed: int = 0) -> None:
    """Check that `envs` keeps the contract of `podium.host.HostEnvFactory` and `podium.host.HostEnv`.

    The rules: the spec is sound, and the record JSON; every step returns a TimeStep of NumPy arrays [num_envs, ...], of
    one structure, which fits the spec and which no later step overwrites; rows that are no transition are marked and
    empty, where the environment resets in the next step, and `next_obs` is the true last observation, where it resets
    in the same; where several agents act together, rewards and `valid` are of each; episodes end within
    `spec.max_episode_steps`; the same seed gives the same episodes, however the environments are grouped; bad actions
    and calls out of turn are refused by an exception and change nothing; `close` may be called twice.

    Args:
      envs: to check.
      num_envs: of the batch; at least 2, to see groupings.
      num_steps: of random play. Rules about the end of an episode are seen only if episodes end within so many.
      seed: of the play.

    Raises:
      ContractError: for the first rule found broken.
      ValueError: for a `num_envs` below 2 or a `num_steps` below 1.

    >>> from podium.host import on_host
    >>> from podium.testing import probe_value
    >>> check_host_env(on_host(probe_value()), num_steps=8)
    """
    if num_envs < 2 or num_steps < 1:
        raise ValueError(f"num_envs={num_envs} and num_steps={num_steps} must be at least 2 and 1.")
    check_seed(seed)
    _check_description(envs)
    actions = random_actions(envs.spec, num_steps, num_envs, seed)
    steps = _play(envs, actions, seed, 0)
    play = _stack(steps)
    if envs.spec.num_agents is not None:  # There `valid` says who is dead, of rows that are all transitions.
        play = play._replace(valid=None)
    _check_values(envs.spec, play)
    _check_ends(envs.spec, play)
    following = play.next_obs if play.valid is None else play.obs
    before, after = jax.tree.map(lambda x: x[:-1], play.obs), jax.tree.map(lambda x: x[1:], following)
    valid = np.ones(play.last.shape, bool) if play.valid is None else np.asarray(play.valid)
    check_frames(envs.spec, jax.tree.map(lambda x: x[0], play.obs), before, after, valid[1:])
    play = _stack(steps)
    again = _stack(_play(envs, actions, seed, 0))
    _check_same(envs.spec, play, again, "the same seed and actions gave other results.", _SEED)
    for group in (slice(0, 1), slice(1, num_envs)):
        alone = _stack(_play(envs, actions[:, group], seed, group.start))
        whole = jax.tree.map(lambda x: x[:, group], play)  # noqa: B023
        _check_same(envs.spec, whole, alone, "grouped otherwise, environments gave other results.", _SEED)
    _check_refusals(envs, actions, steps, seed)


def random_actions(spec: EnvSpec, num_steps: int, num_envs: int, seed: int) -> np.ndarray:
    """Return uniform actions [num_steps, num_envs, ...]; a side without a bound is taken as -1 or 1."""
    generator = np.random.default_rng(seed)
    if isinstance(spec.action, DiscreteSpec):
        size = num_steps, num_envs, *spec.action.shape
        return generator.integers(spec.action.num_values, size=size, dtype=spec.action.dtype)
    low = np.where(np.isfinite(spec.action.low), spec.action.low, -1.0)
    high = np.where(np.isfinite(spec.action.high), spec.action.high, 1.0)
    return generator.uniform(low, high, (num_steps, num_envs, *spec.action.shape)).astype(spec.action.dtype)


def _check_description(envs: HostEnvFactory) -> None:
    if not isinstance(envs, HostEnvFactory):
        raise ContractError(f"A {type(envs).__name__} was given; make it a podium.host.HostEnvFactory.")
    check_spec(envs.spec)
    if envs.spec.num_agents is not None and envs.resets_in_next_step:
        raise broken(
            envs.spec,
            "resets_in_next_step is True where several agents act together.",
            "`valid` says there who is dead: begin episodes in the step that ends one.",
        )
    frames = envs.frames_per_step
    if not is_integer(frames, 1):
        raise broken(envs.spec, f"frames_per_step={frames!r}.", "It must be an int of at least 1.")
    try:
        json.dumps(envs.record)
    except (TypeError, ValueError) as error:
        raise broken(
            envs.spec, f"record cannot be written as JSON ({error}).", "Keep names and numbers only."
        ) from error
    if envs.evaluation is not None and _spaces(envs.evaluation.spec) != _spaces(envs.spec):
        raise broken(envs.spec, "evaluation has other spaces.", "A policy must be able to act in both.")


def _spaces(spec: EnvSpec) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten((spec.obs, spec.action), is_leaf=is_spec)
    return structure, [(type(x), tuple(x.shape), np.dtype(x.dtype), getattr(x, "num_values", 0)) for x in leaves]


def _play(envs: HostEnvFactory, actions: np.ndarray, seed: int, first_index: int) -> list[TimeStep]:
    """Return what `reset` and then each step gave, each checked for its structure."""
    spec, num_envs = envs.spec, actions.shape[1]
    env = envs.make(num_envs, seed, first_index)
    try:
        if env.num_envs != num_envs or _spaces(env.spec) != _spaces(spec):
            raise broken(spec, f"make({num_envs}, ...) has num_envs={env.num_envs} or another spec.", "Keep to both.")
        steps: list[TimeStep] = []
        copies: list[TimeStep] = []
        for timestep in _timesteps(env, actions):
            where = "recv" if steps else "reset"
            _check_structure(spec, timestep, num_envs, where)
            if (timestep.valid is None) == (envs.resets_in_next_step or spec.num_agents is not None):
                raise broken(
                    spec,
                    f"{where} returns valid={timestep.valid}, but resets_in_next_step={envs.resets_in_next_step}.",
                    "Where it resets in the next step, or several agents act together, `valid` is an array in every "
                    "step, else it is None.",
                )
            if steps and _structure(timestep) != _structure(steps[0]):
                raise broken(
                    spec,
                    "a step has other fields in info than reset.",
                    "Return the same keys, shapes and dtypes in every step.",
                )
            steps.append(timestep)
            copies.append(jax.tree.map(np.copy, timestep))
    finally:
        env.close()
    for i, (kept, copy) in enumerate(zip(steps, copies, strict=True)):
        if _first_difference(kept, copy) is not None:
            raise broken(spec, f"what step {i} returned was overwritten by a later one.", _COPY)
    return copies


def _timesteps(env: HostEnv, actions: np.ndarray) -> Iterator[TimeStep]:
    yield env.reset()
    for action in actions:
        env.send(action)
        yield env.recv()


def _structure(timestep: TimeStep) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(timestep)
    return structure, [(x.shape, x.dtype) for x in leaves]


def _check_structure(spec: EnvSpec, timestep: TimeStep, num_envs: int, where: str) -> None:
    if not isinstance(timestep, TimeStep):
        raise broken(spec, f"{where} returns a {type(timestep).__name__}.", "Return a podium.types.TimeStep.")
    if not isinstance(timestep.info, dict):
        raise broken(spec, f"{where} returns info as {type(timestep.info).__name__}.", "It must be a dict of arrays.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(timestep):
        if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (num_envs,):
            raise broken(
                spec,
                f"{where} returns {jax.tree_util.keystr(path)} as {_describe(leaf)}.",
                f"It must be a NumPy array [{num_envs}, ...].",
            )
    expected: Any = jax.tree.structure(spec.obs, is_leaf=is_spec)
    for field in ("obs", "next_obs"):
        obs = getattr(timestep, field)
        if jax.tree.structure(obs) != expected:
            raise broken(spec, f"{where} returns {field} of another structure than spec.obs.", "Make them alike.")
        for leaf_spec, leaf in zip(jax.tree.leaves(spec.obs, is_leaf=is_spec), jax.tree.leaves(obs), strict=True):
            wanted = f"{np.dtype(leaf_spec.dtype)}{[num_envs, *leaf_spec.shape]}"
            if _describe(leaf) != wanted:
                raise broken(spec, f"{where} returns {field} as {_describe(leaf)}.", f"spec.obs says {wanted}.")
    check_agents(spec, jax.tree.map(lambda x: x[0], timestep))
    agents = () if spec.num_agents is None else (spec.num_agents,)
    fields = {"reward": (np.float32, agents), "terminated": (np.bool_, ()), "truncated": (np.bool_, ())}
    for field, (dtype, axes) in {**fields, "valid": (np.bool_, agents)}.items():
        leaf, wanted = getattr(timestep, field), f"{np.dtype(dtype)}{[num_envs, *axes]}"
        if not (field == "valid" and leaf is None) and _describe(leaf) != wanted:
            raise broken(spec, f"{where} returns {field} as {_describe(leaf)}.", f"It must be {wanted}.")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, np.ndarray) else type(leaf).__name__


def _stack(steps: list[TimeStep]) -> TimeStep:
    """Return arrays [1 + T, B, ...]; row 0 is the reset."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


def _check_values(spec: EnvSpec, play: TimeStep) -> None:
    last = np.asarray(play.last)
    if last[0].any() or np.any(play.reward[0]) or (play.valid is not None and np.any(play.valid[0])):
        raise broken(
            spec, "reset returns a reward, a flag, or valid=True.", "It is no transition: all three are 0 or False."
        )
    if not np.isfinite(play.reward).all():
        raise broken(spec, "a reward is not finite.", "Look for a division by zero in the simulator.")
    for field in ("obs", "next_obs"):
        leaves = jax.tree.leaves(getattr(play, field))
        for leaf_spec, leaf in zip(jax.tree.leaves(spec.obs, is_leaf=is_spec), leaves, strict=True):
            if not within(leaf_spec, leaf):
                raise broken(
                    spec,
                    f"{field} leaves the bounds of spec.obs (seen: {np.min(leaf):g} to {np.max(leaf):g}).",
                    "Widen low and high, or mend the observation.",
                )
    between = jax.tree.map(lambda x: x[~last], (play.obs, play.next_obs))
    if _first_difference(*between) is not None:
        raise broken(spec, "next_obs differs from obs though no episode ended.", "Set both alike there.")


def _check_ends(spec: EnvSpec, play: TimeStep) -> None:
    """Check what surrounds an episode's end, and how long episodes are."""
    last = np.asarray(play.last)
    end = play.info.get("episode_end", last)
    if np.any(end & ~last):
        raise broken(spec, 'info["episode_end"] is set where no flag is.', "Set terminated or truncated there.")
    if play.valid is None:
        valid = np.ones_like(last)
        _check_last_obs(spec, play, last)
    else:
        valid = np.asarray(play.valid)
        empty = [play.reward, play.terminated, play.truncated, play.info.get("raw_reward", play.reward)]
        if any(np.any(x[~valid]) for x in empty):
            raise broken(
                spec, "a row with valid=False has a reward or a flag.", "It is no transition: set 0 and False."
            )
        if np.any(valid[1:] == end[:-1]):
            raise broken(
                spec,
                "rows with valid=False are not exactly those after the end of an episode.",
                "Mark the step that ignored its action and began the next episode, and no other.",
            )
    limit = spec.max_episode_steps
    length, longest = np.zeros(last.shape[1], int), 0
    for t in range(1, len(last)):
        length += valid[t]
        longest = max(longest, int(length.max()))
        length[end[t]] = 0
    if limit is not None and longest > limit:
        raise broken(
            spec,
            f"an episode went on for {longest} steps, but spec.max_episode_steps={limit}.",
            "Set truncated in the step that reaches the limit, or the limit to None.",
        )


def _check_last_obs(spec: EnvSpec, play: TimeStep, last: np.ndarray) -> None:
    ends = [
        np.concatenate([x[last].reshape(last.sum(), -1).astype(np.float64) for x in jax.tree.leaves(obs)], -1)
        for obs in (play.obs, play.next_obs)
    ]
    if last.sum() > 1 and np.any(ends[0] != ends[0][0]) and np.array_equal(ends[0], ends[1]):
        raise broken(
            spec,
            "next_obs at the end of an episode is the first observation of the next one.",
            "Keep the observation that the action led to; or, if `obs` is that too, mark the row after by valid=False.",
        )


def _check_refusals(envs: HostEnvFactory, actions: np.ndarray, steps: list[TimeStep], seed: int) -> None:
    """Call out of turn and send bad actions; then play as before, which must give the same."""
    spec = envs.spec
    env = envs.make(actions.shape[1], seed, 0)
    try:
        _must_refuse(spec, env.recv, "recv before reset", RuntimeError)
        _must_refuse(spec, lambda: env.send(actions[0]), "send before reset", RuntimeError)
        env.reset()
        _must_refuse(spec, env.recv, "recv without send", RuntimeError)
        for what, action in _bad_actions(spec, actions[0]):
            _must_refuse(spec, lambda action=action: env.send(action), f"send with {what}", ValueError)  # type: ignore[misc]
        env.send(actions[0])
        _must_refuse(spec, lambda: env.send(actions[0]), "send before recv", RuntimeError)
        _must_refuse(spec, env.reset, "reset before recv", RuntimeError)
        _check_same(spec, steps[1], env.recv(), "a refused call changed the next step.", "Check before you act.")
    finally:
        env.close()
        env.close()
    _must_refuse(spec, env.reset, "reset after close", RuntimeError)


def _must_refuse(spec: EnvSpec, call: Callable[[], Any], what: str, error: type[Exception]) -> None:
    try:
        call()
    except error:
        return
    except Exception as other:
        raise broken(
            spec, f"{what} raises {type(other).__name__} ({other}).", f"Raise a {error.__name__} in one sentence."
        ) from other
    raise broken(
        spec,
        f"{what} is accepted.",
        f"Raise a {error.__name__}; podium.host.CheckedHostEnv does, and podium.host.check_actions for actions.",
    )


def _bad_actions(spec: EnvSpec, good: np.ndarray) -> list[tuple[str, np.ndarray]]:
    bad = [
        ("one action too many", np.concatenate([good, good[:1]])),
        ("one action too few", good[1:]),
        ("an axis too many", good[..., None]),
    ]
    if isinstance(spec.action, ArraySpec):
        values = [("integers", good.astype(np.int32)), ("NaN", np.full_like(good, np.nan))]
        return [*bad, *values, ("an infinite number", np.full_like(good, np.inf))]
    highest = np.full(good.shape, spec.action.num_values, np.int64)
    return [*bad, ("floats", good.astype(np.float32)), ("an index too high", highest), ("-1", -np.ones_like(highest))]


def _check_same(spec: EnvSpec, a: PyTree, b: PyTree, rule: str, remedy: str) -> None:
    where = _first_difference(a, b)
    if where is not None:
        raise broken(spec, rule, f"{remedy} (Seen in {where}.)")


def _first_difference(a: PyTree, b: PyTree) -> str | None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        if not np.array_equal(x, y):
            return jax.tree_util.keystr(path)
    return None
