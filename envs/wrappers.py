"""Wrappers: pure functions from `Env` to `Env`.

They compose in any order, with `auto_reset` inside or outside, but for one pair: `time_limit` goes inside `auto_reset`
(it says so). Every wrapper leaves `next_obs` the true last observation. One that keeps state of its own starts it
afresh with each episode, also on an environment that resets itself. What an evaluation plays is wrapped alike, where
that is another environment (`Env.evaluation`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, auto_reset, check_is_pure, truncate
from podium.episodes import gained
from podium.film import unstacked
from podium.ranges import check_value, is_number
from podium.types import Array, ArraySpec, DiscreteSpec, Key, PyTree, Seen, TimeStep

__all__ = [
    "action_repeat",
    "auto_reset",
    "clip_reward",
    "episode_statistics",
    "flicker",
    "frame_stack",
    "random_first_length",
    "scale_reward",
    "show_last_action",
    "sign_reward",
    "sticky_actions",
    "time_limit",
    "truncate_nonfinite",
]


class WrappedState(NamedTuple):
    """The state of the environment inside, and what the wrapper itself remembers."""

    env: PyTree
    own: PyTree


_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Env])


def _evaluation_too(wrapper: _Wrapper) -> _Wrapper:
    """Return a wrapper that wraps what an evaluation plays as well."""

    @functools.wraps(wrapper)
    def both(env: Env, *args: Any, **kwargs: Any) -> Env:
        check_is_pure(env, wrapper.__name__)
        wrapped = wrapper(env, *args, **kwargs)
        played = None if env.evaluation is None else both(env.evaluation, *args, **kwargs)
        return wrapped._replace(evaluation=played)

    return both  # type: ignore[return-value]


@_evaluation_too
def time_limit(env: Env, max_steps: int) -> Env:
    """Truncate every episode after `max_steps` steps.

    Where the environment terminates in that very step both flags are set, and termination counts. Where it tells ends
    of episodes from marks for the learner (`info["episode_end"]`, such as lost lives), the limit is an end.

    Args:
      env: an `Env` that does not reset itself yet: what is cut here must be reset by an `auto_reset` outside.
      max_steps: at least 1; `spec.max_episode_steps` becomes this where it was longer or None.

    Raises:
      ValueError: for a limit below 1, or an `env` that already resets itself.
    """
    check_value("max_steps", max_steps, "counts", "an episode has at least one step")
    if env.resets_itself:
        raise ValueError(
            f"time_limit cannot cut {env.spec.name}, which resets itself already; put it inside: "
            f"auto_reset(time_limit(env, {max_steps}))."
        )
    old = env.spec.max_episode_steps
    spec = dataclasses.replace(env.spec, max_episode_steps=max_steps if old is None else min(old, max_steps))

    def begin(timestep: TimeStep) -> tuple[Array, TimeStep]:
        return jnp.zeros((), jnp.int32), timestep

    def advance(time: Array, timestep: TimeStep) -> tuple[Array, TimeStep]:
        time = time + 1
        cut = time >= max_steps
        return time, truncate(timestep, cut)

    return _remember(env._replace(spec=spec), begin, advance)


class _Episode(NamedTuple):
    episode_return: Array
    episode_length: Array


@_evaluation_too
def episode_statistics(env: Env) -> Env:
    """Report returns and lengths: `info["episode_return"]` float32 and `info["episode_length"]` int32.

    Both run along with the episode and hold its total where `timestep.last`. The return is counted without discount
    from `info["raw_reward"]` where there is one, else from the reward: of agents that act together it is their mean,
    and where two take turns that of who moved first.
    """

    def begin(timestep: TimeStep) -> tuple[tuple[_Episode, Array | None], TimeStep]:
        episode = _Episode(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
        sign = None if timestep.turn is None else jnp.ones((), jnp.float32)
        return (episode, sign), _add_info(timestep, **episode._asdict())

    def advance(own: tuple[_Episode, Array | None], timestep: TimeStep) -> tuple[tuple[_Episode, Any], TimeStep]:
        episode, sign = own
        reward, sign = gained(timestep, sign)
        episode = _Episode(episode.episode_return + reward, episode.episode_length + 1)
        return (episode, sign), _add_info(timestep, **episode._asdict())

    return _remember(env, begin, advance)


@_evaluation_too
def frame_stack(env: Env, num_frames: int) -> Env:
    """Show the last `num_frames` observations at once, oldest first, concatenated on the last axis.

    [H, W, C] becomes [H, W, num_frames * C], [D] becomes [num_frames * D], a scalar [num_frames], and one of each of N
    agents [N, num_frames]; each array of a pytree is stacked for itself. At the start of an episode the first
    observation stands in for those before it, so no frame of the old episode is ever seen in the new one. The stack in
    `next_obs` ends with the true last observation. Of a `Seen` the view and the world are stacked; what is legal, and
    for whom, stays that of now.

    Args:
      env: any `Env` whose observations are arrays.
      num_frames: at least 1.

    Raises:
      ValueError: for fewer than 1 frame, or for discrete observations (concatenated indices are no index).
    """
    check_value("num_frames", num_frames, "counts", "use 1 (no change) or more")
    axes = 0 if env.spec.num_agents is None else 1

    def stack_spec(spec: Any) -> ArraySpec:
        if isinstance(spec, DiscreteSpec):
            raise ValueError(
                f"frame_stack cannot concatenate the discrete observations of {env.spec.name}; encode them as "
                "arrays first (one-hot)."
            )
        shape = spec.shape if len(spec.shape) > axes else (*spec.shape, 1)
        bounds = (np.broadcast_to(bound, spec.shape).reshape(shape) for bound in (spec.low, spec.high))
        low, high = (np.concatenate([bound] * num_frames, -1) for bound in bounds)
        return ArraySpec((*shape[:-1], num_frames * shape[-1]), spec.dtype, low, high, num_frames)

    def frame(obs: Array) -> Array:
        return obs if obs.ndim > axes else obs[..., None]

    def push(frames: Array, obs: Array) -> Array:
        obs = frame(obs)
        return jnp.concatenate([frames[..., obs.shape[-1] :], obs], -1)

    def begin(timestep: TimeStep) -> tuple[PyTree, TimeStep]:
        frames = jax.tree.map(lambda x: jnp.concatenate([frame(x)] * num_frames, -1), _shown(timestep.obs))
        obs = _showing(timestep.obs, frames)
        return frames, timestep._replace(obs=obs, next_obs=obs)

    def advance(frames: PyTree, timestep: TimeStep) -> tuple[PyTree, TimeStep]:
        frames = jax.tree.map(push, frames, _shown(timestep.next_obs))
        obs = _showing(timestep.next_obs, frames)
        return frames, timestep._replace(obs=obs, next_obs=obs)

    stacked = jax.tree.map(stack_spec, _shown(env.spec.obs), is_leaf=_is_spec)
    spec = dataclasses.replace(env.spec, obs=_showing(env.spec.obs, stacked))
    return _remember(env._replace(spec=spec), begin, advance)


class _LastAction(NamedTuple):
    action: Array
    exists: Array


@_evaluation_too
def sticky_actions(env: Env, probability: float = 0.25) -> Env:
    """Repeat the previous action instead of the new one with some probability (Machado et al. 2018, section 5.2).

    What is repeated is the action executed in the previous step (which may itself have been a repeat). The first
    action of an episode is always executed as given; the Arcade Learning Environment may replace it by no-op.

    Args:
      env: any `Env`.
      probability: in [0, 1); the paper uses 0.25.

    Raises:
      ValueError: for a probability outside [0, 1), or where players take turns: the last action is another's.
    """
    if not (_is_real(probability) and 0 <= probability < 1):
        raise ValueError(f"probability={probability!r} is outside [0, 1); the paper uses 0.25.")
    _check_no_turns(env, "sticky_actions")

    def nothing() -> _LastAction:
        return _LastAction(env.spec.action.zeros(), jnp.zeros((), bool))

    def reset(key: Key) -> tuple[WrappedState, TimeStep]:
        env_state, timestep = env.reset(key)
        return WrappedState(env_state, nothing()), timestep

    def step(key: Key, state: WrappedState, action: Array) -> tuple[WrappedState, TimeStep]:
        sticky_key, step_key = jax.random.split(key)
        repeats = state.own.exists & jax.random.bernoulli(sticky_key, probability)
        action = jnp.where(repeats, state.own.action, jnp.asarray(action, env.spec.action.dtype))
        env_state, timestep = env.step(step_key, state.env, action)
        last_action = _LastAction(action, jnp.ones((), bool))
        if env.resets_itself:
            last_action = _where(timestep.last, nothing(), last_action)
        return WrappedState(env_state, last_action), timestep

    return env._replace(reset=reset, step=step, render=_render_inside(env))


@_evaluation_too
def action_repeat(env: Env, num_repeats: int) -> Env:
    """Take every action `num_repeats` times, or until the episode ends; the rewards are summed.

    `info` is that of the last of these steps, but for `info["raw_reward"]`, which is summed too. `valid` is that of the
    first: an agent that dies in between has acted, and its reward is what it got until then. Returns count all that was
    paid, as they do without, so the raw reward is told where agents may die.

    Args:
      env: any `Env`. Where it cuts episodes itself (`time_limit` inside), its limit counts the steps inside;
        `spec.max_episode_steps` becomes the number of steps that are seen.
      num_repeats: at least 1.

    Raises:
      ValueError: for a number below 1, or where players take turns: the next move is another's.
    """
    check_value("num_repeats", num_repeats, "counts", "use 1 (no change) or more")
    if num_repeats == 1:
        return env
    _check_no_turns(env, "action_repeat")
    limit = env.spec.max_episode_steps
    spec = dataclasses.replace(unstacked(env.spec), max_episode_steps=limit and -(-limit // num_repeats))

    def told(timestep: TimeStep) -> TimeStep:
        several = timestep.valid is not None and timestep.valid.ndim
        if not several or "raw_reward" in timestep.info:
            return timestep
        return _add_info(timestep, raw_reward=timestep.reward)

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state, timestep = env.reset(key)
        return state, told(timestep)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        def again(before: tuple[PyTree, TimeStep], key: Key) -> tuple[tuple[PyTree, TimeStep], None]:
            old_state, old = before
            new_state, new = env.step(key, old_state, action)
            new = told(new)
            gained = new.reward if new.valid is None else jnp.where(new.valid, new.reward, 0.0)
            new = new._replace(reward=old.reward + gained, valid=old.valid)
            if "raw_reward" in new.info:
                new = _add_info(new, raw_reward=old.info["raw_reward"] + new.info["raw_reward"])
            return _where(old.last, (old_state, old), (new_state, new)), None

        keys = jax.random.split(key, num_repeats)
        state, timestep = env.step(keys[0], state, action)
        return jax.lax.scan(again, (state, told(timestep)), keys[1:])[0]

    return env._replace(spec=spec, reset=reset, step=step)


@_evaluation_too
def show_last_action(env: Env) -> Env:
    """Add the last action and the reward it got to what is observed, for policies with memory (Espeholt et al. 2018).

    The observation becomes {"obs": the environment's, "last_action": one-hot float32 [A] of a discrete action or the
    continuous one itself, "last_reward": float32, as the wrappers inside left it}: both 0 where an episode begins.
    Of a `Seen` it is the view that becomes so. Of agents that act together each sees its own.
    """
    action_spec = env.spec.action
    if isinstance(action_spec, DiscreteSpec):
        shown = ArraySpec((*action_spec.shape, action_spec.num_values), np.float32, 0, 1)
        show = lambda action: jax.nn.one_hot(action, action_spec.num_values, dtype=jnp.float32)
    else:
        shown = ArraySpec(action_spec.shape, action_spec.dtype)  # No bounds: a policy may leave those of the action.
        show = lambda action: jnp.asarray(action, action_spec.dtype)

    def beside(obs: PyTree, action: Any, reward: Any) -> PyTree:
        if isinstance(obs, Seen):
            return obs._replace(view=beside(obs.view, action, reward))
        return {"obs": obs, "last_action": action, "last_reward": reward}

    paid = ArraySpec(() if env.spec.num_agents is None else (env.spec.num_agents,))
    nothing = lambda obs: beside(obs, shown.zeros(), paid.zeros())

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state, timestep = env.reset(key)
        obs = nothing(timestep.obs)
        return state, timestep._replace(obs=obs, next_obs=obs)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        reached = beside(timestep.next_obs, show(action), timestep.reward)
        obs = _where(timestep.last, nothing(timestep.obs), reached) if env.resets_itself else reached
        return state, timestep._replace(obs=obs, next_obs=reached)

    spec = dataclasses.replace(env.spec, obs=beside(env.spec.obs, shown, paid))
    return env._replace(spec=spec, reset=reset, step=step)


@_evaluation_too
def flicker(env: Env, probability: float = 0.5) -> Env:
    """Show nothing, all zeros, in place of an observation with some probability (Hausknecht and Stone 2015, section 5).

    Each observation is drawn for by itself, first and last ones of episodes too; all arrays of a pytree go together,
    of a `Seen` the view and the world: what is legal, and for whom, is always told. What the environment does is not
    touched: a policy must remember what it cannot see (arXiv 1507.06527).

    Args:
      env: any `Env` whose observations are arrays.
      probability: in [0, 1); the paper's is 0.5.

    Raises:
      ValueError: for a probability outside [0, 1), or discrete observations (no index means nothing).
    """
    if not (_is_real(probability) and 0 <= probability < 1):
        raise ValueError(f"probability={probability!r} is outside [0, 1); the paper's is 0.5.")

    def with_zero(spec: Any) -> ArraySpec:
        if isinstance(spec, DiscreteSpec):
            raise ValueError(
                f"flicker cannot blank the discrete observations of {env.spec.name}; encode them as arrays first "
                "(one-hot)."
            )
        return dataclasses.replace(spec, low=np.minimum(spec.low, 0), high=np.maximum(spec.high, 0), num_frames=1)

    def shown(key: Key, obs: PyTree) -> PyTree:
        blank = jax.random.bernoulli(key, probability)
        return _showing(obs, jax.tree.map(lambda x: jnp.where(blank, jnp.zeros_like(x), x), _shown(obs)))

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        blank_key, env_key = jax.random.split(key)
        state, timestep = env.reset(env_key)
        obs = shown(blank_key, timestep.obs)
        return state, timestep._replace(obs=obs, next_obs=obs)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        blank_key, env_key = jax.random.split(key)
        state, timestep = env.step(env_key, state, action)
        reached = obs = shown(blank_key, timestep.next_obs)
        if env.resets_itself:
            obs = _where(timestep.last, shown(jax.random.fold_in(blank_key, 1), timestep.obs), reached)
        return state, timestep._replace(obs=obs, next_obs=reached)

    blanked = jax.tree.map(with_zero, _shown(env.spec.obs), is_leaf=_is_spec)
    spec = dataclasses.replace(env.spec, obs=_showing(env.spec.obs, blanked))
    return env._replace(spec=spec, reset=reset, step=step)


def random_first_length(env: Env) -> Env:
    """Cut the first episode of every environment of a run after 1 to `spec.max_episode_steps` steps, drawn uniformly.

    Without it environments that end by their time limit alone all end in the same step, again and again, and batches
    are of one age. The cut is a truncation. `auto_reset`, which placements apply, does it: evaluation does not see it.

    Raises:
      ValueError: for an environment without a time limit, or one that resets itself already.
    """
    check_is_pure(env, "random_first_length")
    if env.spec.max_episode_steps is None:
        raise ValueError(
            f"random_first_length needs a time limit, and {env.spec.name} has none; put time_limit inside."
        )
    if env.resets_itself:
        raise ValueError(
            f"random_first_length cannot cut {env.spec.name}, which resets itself already; put it inside auto_reset."
        )
    return env._replace(random_first_length=True)


@_evaluation_too
def truncate_nonfinite(env: Env) -> Env:
    """Cut an episode where the simulator loses its numbers, in place of handing on NaN or infinity.

    That step has reward 0 and `truncated`, not `terminated`, and shows the last finite observation, from which values
    bootstrap: what the simulator would have done is not known. `info["nonfinite"]` is True there, and is counted in the
    metric `nonfinite_steps`; an environment may set it itself, where it knows more than its observations show.

    Such a step adds no frame to a stack, so `ArraySpec.num_frames` becomes 1. With `frame_stack` outside it does, and
    frames are kept once.

    Raises:
      ValueError: for an `env` that already resets itself.
    """
    if env.resets_itself:
        raise ValueError(
            f"truncate_nonfinite cannot cut {env.spec.name}, which resets itself already; put it inside auto_reset."
        )

    def begin(timestep: TimeStep) -> tuple[PyTree, TimeStep]:
        return timestep.obs, _add_info(timestep, nonfinite=jnp.zeros((), bool))

    def advance(last_obs: PyTree, timestep: TimeStep) -> tuple[PyTree, TimeStep]:
        told = timestep.next_obs, timestep.reward, timestep.info.get("raw_reward", ())
        lost = timestep.info.get("nonfinite", jnp.zeros((), bool))
        for x in jax.tree.leaves(told):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                lost = lost | ~jnp.isfinite(x).all()
        obs = _where(lost, last_obs, timestep.next_obs)
        info = {**timestep.info, "nonfinite": lost}
        if "raw_reward" in info:
            info["raw_reward"] = jnp.where(lost, 0.0, info["raw_reward"])
        timestep = timestep._replace(
            obs=obs,
            next_obs=obs,
            reward=jnp.where(lost, 0.0, timestep.reward),
            terminated=timestep.terminated & ~lost,
            info=info,
        )
        return obs, truncate(timestep, lost)

    return _remember(env._replace(spec=unstacked(env.spec)), begin, advance)


@_evaluation_too
def clip_reward(env: Env, low: float = -1.0, high: float = 1.0) -> Env:
    """Clip rewards to [low, high]; `info["raw_reward"]` keeps what the innermost environment paid.

    Raises:
      ValueError: unless low < high.
    """
    if not (_is_real(low) and _is_real(high) and low < high):
        raise ValueError(f"low={low!r} is not below high={high!r}; use -1 and 1.")
    return _map_reward(env, lambda reward: jnp.clip(reward, low, high))


@_evaluation_too
def sign_reward(env: Env) -> Env:
    """Keep only the sign of rewards, -1, 0 or 1 (Mnih et al. 2015); `info["raw_reward"]` keeps what was paid."""
    return _map_reward(env, jnp.sign)


@_evaluation_too
def scale_reward(env: Env, factor: float) -> Env:
    """Multiply rewards by `factor`; `info["raw_reward"]` keeps what the innermost environment paid.

    Raises:
      ValueError: for a factor that is 0 or not finite.
    """
    if not _is_real(factor) or factor == 0 or not math.isfinite(factor):
        raise ValueError(f"factor={factor!r} would destroy the rewards; use a finite number other than 0.")
    return _map_reward(env, lambda reward: reward * factor)


def _map_reward(env: Env, function: Callable[[Array], Array]) -> Env:
    def keep_raw(timestep: TimeStep) -> TimeStep:
        return _add_info(timestep, raw_reward=timestep.info.get("raw_reward", timestep.reward))

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state, timestep = env.reset(key)
        return state, keep_raw(timestep)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, keep_raw(timestep)._replace(reward=function(timestep.reward).astype(jnp.float32))

    return env._replace(reset=reset, step=step)


def _remember(
    env: Env,
    begin: Callable[[TimeStep], tuple[PyTree, TimeStep]],
    advance: Callable[[PyTree, TimeStep], tuple[PyTree, TimeStep]],
) -> Env:
    """Give `env` a memory of one episode: `begin` makes it at a reset, `advance` carries it over a step.

    Both also rewrite the TimeStep. On an environment that resets itself a step which ends an episode begins one too:
    `obs` and the memory are then those of `begin`, all else is of `advance`.
    """

    def reset(key: Key) -> tuple[WrappedState, TimeStep]:
        env_state, timestep = env.reset(key)
        own, timestep = begin(timestep)
        return WrappedState(env_state, own), timestep

    def step(key: Key, state: WrappedState, action: Array) -> tuple[WrappedState, TimeStep]:
        env_state, timestep = env.step(key, state.env, action)
        own, advanced = advance(state.own, timestep)
        if env.resets_itself:
            fresh, first = begin(timestep)
            own, obs = _where(timestep.last, (fresh, first.obs), (own, advanced.obs))
            advanced = advanced._replace(obs=obs)
        return WrappedState(env_state, own), advanced

    return env._replace(reset=reset, step=step, render=_render_inside(env))


def _check_no_turns(env: Env, who: str) -> None:
    if env.spec.turns:
        raise ValueError(
            f"{who} takes an action again in the next step, and in {env.spec.name}, where players take turns, that is "
            "another's move; leave it out."
        )


def _render_inside(env: Env) -> Callable[[PyTree], np.ndarray] | None:
    inner = env.render
    return None if inner is None else lambda state: inner(state.env)


def _shown(obs: PyTree) -> PyTree:
    """Return what is seen of an observation, or of its spec: of a `Seen` no legal actions, player or rules."""
    return (obs.view, obs.world) if isinstance(obs, Seen) else obs


def _showing(obs: PyTree, shown: PyTree) -> PyTree:
    """Return the observation with another `_shown`."""
    return obs._replace(view=shown[0], world=shown[1]) if isinstance(obs, Seen) else shown


def _add_info(timestep: TimeStep, **info: Array) -> TimeStep:
    return timestep._replace(info={**timestep.info, **info})


def _where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _is_real(value: Any) -> bool:
    return is_number(value) or getattr(value, "ndim", None) == 0  # An array of one number is one too.


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, ArraySpec | DiscreteSpec)
