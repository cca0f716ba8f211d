"""`check_env`: run an environment against the whole contract; say in one sentence what is broken and how to mend it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.contracts import ContractError, broken, check_spec, check_timestep, pair, same_shapes, trace
from podium.env import Env
from podium.ranges import check_positive
from podium.seen import legal_of
from podium.testing.specs import check_frames, within
from podium.types import Array, Key, PyTree, Seen, TimeStep, is_spec

_MOST_STEPS = 3_000
_NUM_ENVS = 2
_TOLERANCE = 1e-4

# These programs run once, so compiling them is the cost: this takes a third off it.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


def check_env(env: Env, *, num_steps: int = 200, key: Key | None = None) -> None:
    """Check that `env` keeps the contract of `podium.env.Env`.

    The rules: the spec is sound; `reset` and `step` can be traced, leak no tracer, and return `(state, TimeStep)` of
    one fixed structure, so that a rollout is one `jax.lax.scan`; observations fit the spec, rewards are float32 and
    flags bool; where N agents act together actions, observations, rewards and `valid` begin with their axis, and ends
    are scalars; `Seen.legal` never marks nothing, and `turn` is -1 or 1 as `Seen.player` says; the same key gives the
    same result; `jit`, `vmap` and `scan` agree with plain calls; `next_obs` is the observation reached, also where an
    environment that resets itself begins anew; episodes end within `spec.max_episode_steps`; `render` returns uint8
    [H, W, 3].

    Args:
      env: to check, resetting itself or not.
      num_steps: steps of random play, of legal actions where it is said which are; more where
        `spec.max_episode_steps` is longer, to see the limit kept.
      key: of the play.

    Raises:
      ContractError: for the first rule found broken.
      ValueError: for a `num_steps` that is no positive integer.

    >>> from podium.testing import probe_value
    >>> check_env(probe_value())
    """
    check_positive(num_steps=num_steps)
    if not isinstance(env, Env):
        raise ContractError(f"{env!r} was given; make it a podium.env.Env.")
    key = jax.random.key(0) if key is None else key
    check_spec(env.spec)
    _check_structure(env)
    _check_leaks(env)
    num_steps = max(num_steps, min(_MOST_STEPS, (env.spec.max_episode_steps or 0) + 1))
    play = _play(env, key, num_steps)
    _check_values(env, play)
    _check_next_obs(env, play)
    _check_turns(env, play)
    _check_frames(env, play)
    _check_plain_calls(env, play)
    if env.render is not None:
        _check_render(env, play)


class _Play(NamedTuple):
    """Play of B environments for T steps: the resets, [B, ...], then what went in and what came out, [T, B, ...].

    An environment that does not reset itself begins again from one of the B resets.
    """

    reset_keys: Key
    starts: tuple[PyTree, TimeStep]
    keys: Key
    states: PyTree
    actions: Array
    timesteps: TimeStep


def _play(env: Env, key: Key, num_steps: int) -> _Play:
    reset_key, play_key = jax.random.split(key)
    reset_keys = jax.random.split(reset_key, _NUM_ENVS)
    keys = jax.random.split(play_key, (2, num_steps, _NUM_ENVS))

    def one_step(start: PyTree, before: PyTree, action_key: Key, step_key: Key) -> tuple[PyTree, Any]:
        state, legal = before
        action = _draw(env, action_key, legal)
        next_state, timestep = env.step(step_key, state, action)
        after = next_state, legal_of(timestep.obs)
        if not env.resets_itself:
            after = jax.tree.map(lambda new, old: jnp.where(timestep.last, new, old), start, after)
        return after, (state, action, timestep)

    def all_steps(starts: PyTree, keys: Key) -> Any:
        body = lambda states, keys: jax.vmap(one_step)(starts, states, *keys)
        return jax.lax.scan(body, starts, (keys[0], keys[1]))[1]

    try:
        starts = jax.jit(jax.vmap(env.reset), compiler_options=_COMPILER_OPTIONS)(reset_keys)
        begin = starts[0], legal_of(starts[1].obs)
        steps = jax.jit(all_steps, compiler_options=_COMPILER_OPTIONS)(begin, keys)
    except TypeError as error:
        raise _broken(env, "a rollout by jax.lax.scan failed.", f"jax said: {error}") from error
    return _Play(reset_keys, starts, keys[1], *steps)


def _draw(env: Env, key: Key, legal: Array | None) -> Array:
    """Draw an action, a legal one where it is known which are."""
    if legal is None:
        return env.spec.action.sample(key)
    drawn = jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))
    return jnp.asarray(drawn, env.spec.action.dtype)


def _broken(env: Env, rule: str, remedy: str) -> ContractError:
    return broken(env.spec, rule, remedy)


def _check_structure(env: Env) -> None:
    """Compare the shapes and dtypes that reset and step return with the spec and with each other; nothing runs."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    action = jax.eval_shape(env.spec.action.zeros)
    # New functions, so that what was traced before is traced again.
    reset = lambda *given: jax.eval_shape(lambda *given: env.reset(*given), *given)
    step = lambda *given: jax.eval_shape(lambda *given: env.step(*given), *given)
    state, first = pair(env.spec, "reset", trace(env.spec, "reset", reset, key))
    next_state, timestep = pair(env.spec, "step", trace(env.spec, "step", step, key, state, action))
    for name, each in (("reset", first), ("step", timestep)):
        check_timestep(env.spec, name, each)
    same_shapes(env.spec, "TimeStep", first, timestep)
    same_shapes(env.spec, "state", state, next_state)


def _check_leaks(env: Env) -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    action = jax.eval_shape(env.spec.action.zeros)

    def trace() -> None:
        state, _ = jax.eval_shape(lambda key: env.reset(key), key)
        jax.eval_shape(lambda *a: env.step(*a), key, state, action)

    if _leaks(trace) and _outlives_the_caches(trace):
        raise _broken(
            env,
            "reset or step keeps a traced value after it returned (a leaked tracer).",
            "Store nothing in globals or attributes; return all that must last as part of the state.",
        )


def _leaks(trace: Callable[[], None]) -> bool:
    try:
        with jax.checking_leaks():
            trace()
    except Exception as error:
        if "Leaked" not in str(error):
            raise
        return True
    return False


def _outlives_the_caches(trace: Callable[[], None]) -> bool:
    """Return whether a traced value lives on elsewhere than in jax's own caches.

    There a solver from jaxopt leaves those that its line search closes over: they are dropped with the cache, and no
    later trace meets them.
    """
    tracers = lambda: [x for x in gc.get_objects() if issubclass(type(x), jax.core.Tracer)]
    gc.collect()
    before = tracers()
    trace()
    jax.clear_caches()
    gc.collect()
    known = {id(x) for x in before}
    return any(id(x) not in known for x in tracers())


def _check_values(env: Env, play: _Play) -> None:
    action_spec = env.spec.action
    if not within(action_spec, play.actions):
        raise _broken(env, "spec.action.sample left the bounds of spec.action.", "Correct low and high.")
    first, timesteps = play.starts[1], play.timesteps
    if np.any(first.last) or np.any(first.reward):
        raise _broken(env, "reset returns a reward or an ended episode.", "Make its TimeStep with podium.env.restart.")
    if not np.all(np.isfinite(timesteps.reward)):
        raise _broken(env, "a reward is not finite.", "Look for a division by zero in step.")
    for field, obs in (("obs", first.obs), ("obs", timesteps.obs), ("next_obs", timesteps.next_obs)):
        for spec, leaf in zip(jax.tree.leaves(env.spec.obs, is_leaf=is_spec), jax.tree.leaves(obs), strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.all(np.isfinite(leaf)):
                raise _broken(
                    env,
                    f"{field} is not finite.",
                    "Mend step, or let podium.envs.wrappers.truncate_nonfinite cut such an episode.",
                )
            if not within(spec, leaf):
                low, high = float(np.min(leaf)), float(np.max(leaf))
                raise _broken(
                    env,
                    f"{field} leaves the bounds of spec.obs (seen: {low:g} to {high:g}).",
                    "Widen low and high, or mend the observation.",
                )
    if np.any(timesteps.info.get("episode_end", False) & ~timesteps.last):
        raise _broken(env, 'info["episode_end"] is set where no flag is.', "Set terminated or truncated there.")
    _check_same(env, first.obs, first.next_obs, "reset returns a next_obs that differs from obs.", "Set both alike.")
    limit = env.spec.max_episode_steps
    if limit is not None:
        last = np.asarray(timesteps.last)[:, 0]
        longest = int(np.max(np.diff(np.flatnonzero(last), prepend=-1, append=len(last) - 1)))
        if longest > limit:
            raise _broken(
                env,
                f"an episode went on for {longest} steps, but spec.max_episode_steps={limit}.",
                "Set truncated in the step that reaches the limit (podium.envs.wrappers.time_limit does), or None.",
            )


def _check_next_obs(env: Env, play: _Play) -> None:
    timesteps = play.timesteps
    if not env.resets_itself:
        _check_same(
            env,
            timesteps.obs,
            timesteps.next_obs,
            "step returns a next_obs that differs from obs, without resets_itself.",
            "Both are the observation reached (podium.env.transition); where step resets by itself, set resets_itself.",
        )
        return
    last = np.asarray(timesteps.last)
    obs, next_obs = jax.tree.map(lambda x: np.asarray(x)[~last], (timesteps.obs, timesteps.next_obs))
    rule = "next_obs differs from obs though no episode ended."
    _check_same(env, obs, next_obs, rule, "They differ only where `last` is set and a new episode began.")
    if last[:, 0].any():
        _check_self_reset(env, play, int(np.flatnonzero(last[:, 0])[0]))


def _check_turns(env: Env, play: _Play) -> None:
    """Check whose turn it is: something is legal at every time, and the sign is that of the players seen."""
    first, timesteps = play.starts[1], play.timesteps
    for name, obs in (("obs", first.obs), ("obs", timesteps.obs), ("next_obs", timesteps.next_obs)):
        legal = legal_of(obs)
        if legal is not None and not np.all(np.any(legal, -1)):
            raise _broken(
                env, f"{name}.legal marks no action.", "Mark one at least, also at an end: where none counts, all."
            )
    if first.turn is None or timesteps.turn is None:
        return
    if not np.all(np.abs(np.concatenate([first.turn[None], timesteps.turn])) == 1):
        raise _broken(env, "turn is neither -1 nor 1.", "It is -1 where the opponent moves next, else 1.")
    if not isinstance(timesteps.obs, Seen) or timesteps.obs.player is None:
        return
    before = np.concatenate([np.asarray(first.obs.player)[None], np.asarray(timesteps.obs.player)[:-1]])
    follows = ~np.asarray(timesteps.last)
    if not env.resets_itself:  # What follows an end is one of the resets.
        follows[1:] &= ~np.asarray(timesteps.last)[:-1]
    stays = np.asarray(timesteps.next_obs.player) == before
    if np.any((np.asarray(timesteps.turn) == 1)[follows] != stays[follows]):
        raise _broken(
            env, "turn does not say what obs.player does.", "It is 1 where the same player moves again, else -1."
        )


def _check_frames(env: Env, play: _Play) -> None:
    first, timesteps = play.starts[1], play.timesteps
    before = jax.tree.map(lambda x, y: np.concatenate([x[None], y[:-1]]), first.obs, timesteps.obs)
    follows = np.ones(timesteps.last.shape, bool)
    if not env.resets_itself:  # What follows an end is one of the resets.
        follows[1:] = ~np.asarray(timesteps.last)[:-1]
    check_frames(env.spec, first.obs, before, timesteps.next_obs, follows)


def _check_self_reset(env: Env, play: _Play, end: int) -> None:
    """Repeat the step that ended an episode with other keys: the true last obs does not follow each new start."""
    keys = jax.random.split(jax.random.fold_in(play.reset_keys[0], 1), 8)
    state, action = jax.tree.map(lambda x: x[end, 0], (play.states, play.actions))
    _, timestep = jax.jit(jax.vmap(env.step, (0, None, None)), compiler_options=_COMPILER_OPTIONS)(keys, state, action)
    ended = np.asarray(timestep.last)
    obs, next_obs = (
        np.concatenate([_raw(x).reshape(len(keys), -1)[ended].astype(np.float64) for x in jax.tree.leaves(o)], -1)
        for o in (timestep.obs, timestep.next_obs)
    )
    if len(obs) > 1 and np.any(obs != obs[0]) and np.array_equal(obs, next_obs):
        raise _broken(
            env,
            "next_obs at the end of an episode is the first observation of the next one.",
            "Keep the observation that the action led to: apply podium.env.auto_reset to an environment that does "
            "not reset itself.",
        )


def _check_plain_calls(env: Env, play: _Play) -> None:
    """Call reset and step without jit, each twice with the same key, and compare with the compiled play."""
    remedy = "Take all randomness from the key, and all that changes from the state; call no numpy.random, no time."
    reset_key, played_start = jax.tree.map(lambda x: x[0], (play.reset_keys, play.starts))
    start, again = (env.reset(reset_key) for _ in range(2))
    _check_same(env, start, again, "reset gives two results for one key.", remedy, exactly=True)
    _check_same(env, start, played_start, "reset differs with and without jax.jit and jax.vmap.", remedy)
    ends = np.flatnonzero(np.asarray(play.timesteps.last)[:, 0])
    for t in sorted({0, *ends[:1].tolist()}):
        row = jax.tree.map(lambda x: x[t, 0], (play.keys, play.states, play.actions, play.timesteps))  # noqa: B023
        result, again = (env.step(*row[:3]) for _ in range(2))
        _check_same(env, result, again, "step gives two results for one key.", remedy, exactly=True)
        rule = "step differs with and without jax.jit, jax.vmap and jax.lax.scan."
        _check_same(env, result[1], row[3], rule, remedy)
        if t not in ends and t + 1 < len(play.actions):
            _check_same(env, result[0], jax.tree.map(lambda x: x[t + 1, 0], play.states), rule, remedy)  # noqa: B023


def _check_render(env: Env, play: _Play) -> None:
    assert env.render is not None
    try:
        picture = env.render(jax.tree.map(lambda x: x[0], play.starts[0]))
    except Exception as error:
        raise _broken(
            env, f"render raises {type(error).__name__}: {error}.", "Make it draw any state, or leave it None."
        ) from error
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        found = f"{getattr(picture, 'dtype', type(picture).__name__)}{list(getattr(picture, 'shape', []))}"
        raise _broken(env, f"render returns {found}.", "It must be a NumPy array, uint8 [H, W, 3].")


def _check_same(env: Env, a: PyTree, b: PyTree, rule: str, remedy: str, *, exactly: bool = False) -> None:
    tolerance = 0 if exactly else _TOLERANCE
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in pairs:
        if not np.allclose(_raw(x), _raw(y), rtol=tolerance, atol=tolerance, equal_nan=True):
            where = jax.tree_util.keystr(path)
            raise _broken(env, rule, f"{remedy}{f' (Seen in {where}.)' if where else ''}")


def _raw(x: Any) -> np.ndarray:
    """Return an array as NumPy, a typed random key as its words."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
