"""What flows through podium: specs of an environment, one step, a batch of steps, and metrics."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.ranges import check_value

Array = jax.Array
Key = jax.Array
PyTree = Any
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySpec:
    """Describe an array: observations, and continuous actions (a box).

    Args:
      shape: of one observation or action, without a batch axis.
      dtype: of the array.
      low: smallest value; a number or an array that broadcasts to `shape`.
      high: largest value, likewise.
      num_frames: of observations, how many frames lie side by side on the last axis, oldest first: a step drops the
        oldest and adds one, and an episode begins with its first frame so many times. Replays and rollouts keep
        every frame once; `podium.testing` checks that it is so.

    Raises:
      ValueError: `num_frames` is no integer of 1 or more, or does not divide the last axis.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    low: Any = -np.inf
    high: Any = np.inf
    num_frames: int = 1

    def __post_init__(self) -> None:
        remedy = "use 1 for what is no stack of frames"
        check_value("num_frames", self.num_frames, "counts", remedy)
        if self.num_frames > 1 and (not self.shape or self.shape[-1] % self.num_frames):
            raise ValueError(
                f"num_frames={self.num_frames} must divide the last axis of shape={tuple(self.shape)}; {remedy}."
            )

    def zeros(self, *batch: int) -> Array:
        """Return zeros of this spec with leading `batch` axes."""
        return jnp.zeros((*batch, *self.shape), self.dtype)

    def sample(self, key: Key) -> Array:
        """Draw one value, uniform between the bounds; of integers each, the bounds too, is as likely.

        A bound that is missing is taken for 1 beyond the other, and for -1 or 1 where both are.
        """
        is_low, is_high = np.isfinite(self.low), np.isfinite(self.high)
        low = np.where(is_low, self.low, np.where(is_high, np.subtract(self.high, 1.0), -1.0))
        high = np.where(is_high, self.high, np.where(is_low, np.add(self.low, 1.0), 1.0))
        if np.issubdtype(self.dtype, np.integer):
            return self._integers(key, low, high)
        with np.errstate(over="ignore"):  # Bounds that lie further apart than float32 can tell are halved meanwhile.
            unit = np.where(np.isfinite(np.subtract(high, low, dtype=np.float32)), 1.0, 0.5).astype(np.float32)
        low, high = low * unit, high * unit
        value = (low + jax.random.uniform(key, self.shape) * (high - low)) / unit
        return jnp.asarray(value > 0.5 if np.dtype(self.dtype) == bool else value, self.dtype)

    def _integers(self, key: Key, low: Any, high: Any) -> Array:
        held = np.iinfo(self.dtype)
        low, high = (np.clip(np.float64(bound), held.min, held.max) for bound in (low, high))
        low, high = np.ceil(low).astype(np.int64), np.floor(high).astype(np.int64)
        # Distances from `low` fit uint32 whatever the dtype; their number does but for all of 32 bits, which lacks one.
        number = np.clip(high - low + 1, 1, 2**32 - 1).astype(np.uint32)
        distance = jax.random.randint(key, self.shape, 0, number, np.uint32)
        return (low.astype(np.uint32) + distance).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class DiscreteSpec:
    """Describe one integer in `0 ... num_values - 1`, a discrete action or observation, or an array of them.

    Args:
      num_values: how many values each integer can take.
      dtype: of the integers.
      shape: () for one integer; (N,) for one an agent, where N agents act together.
    """

    num_values: int
    dtype: Any = np.int32
    shape: tuple[int, ...] = ()

    def zeros(self, *batch: int) -> Array:
        """Return zeros of this spec with leading `batch` axes."""
        return jnp.zeros((*batch, *self.shape), self.dtype)

    def sample(self, key: Key) -> Array:
        """Draw one value uniformly, every integer for itself."""
        return jax.random.randint(key, self.shape, 0, self.num_values, self.dtype)


def is_spec(x: Any) -> bool:
    """Say whether this is a leaf of `EnvSpec.obs`."""
    return isinstance(x, ArraySpec | DiscreteSpec)


@dataclasses.dataclass(frozen=True, eq=False)
class EnvSpec:
    """Describe an environment to an agent: all that an agent ever knows of it.

    Args:
      name: for people and for error messages.
      obs: an `ArraySpec` or `DiscreteSpec`, or a pytree of them.
      action: `DiscreteSpec` (an index) or `ArraySpec` (a box).
      max_episode_steps: the time limit in steps, or None where there is none. Evaluation uses it as
        its bound.
      turns: whether two players move in turn, and one gains what the other loses (`TimeStep.turn`).
      num_agents: N where several agents act together: every array of `obs`, the action, `reward` and `valid` have an
        axis [N] in front; None where one acts. `podium.multi.shared` lets them share an agent.
    """

    name: str
    obs: PyTree
    action: DiscreteSpec | ArraySpec
    max_episode_steps: int | None = None
    turns: bool = False
    num_agents: int | None = None

    def sha256(self) -> str:
        """Return a digest of all of it: the same for two specs that say the same."""
        specs, _ = jax.tree_util.tree_flatten_with_path((self.obs, self.action))
        parts = [(jax.tree_util.keystr(path), *_describe(spec)) for path, spec in specs]
        more = [("turns",)] * self.turns + [("agents", self.num_agents)] * (self.num_agents is not None)
        return hashlib.sha256(repr((self.name, self.max_episode_steps, parts, *more)).encode()).hexdigest()


def _describe(spec: ArraySpec | DiscreteSpec) -> tuple[Any, ...]:
    if isinstance(spec, DiscreteSpec):
        shape = (tuple(map(int, spec.shape)),) if spec.shape else ()  # Digests of single integers stay what they were.
        return "discrete", int(spec.num_values), np.dtype(spec.dtype).name, *shape
    bounds = [np.broadcast_to(np.asarray(bound, np.float64), spec.shape).tobytes() for bound in (spec.low, spec.high)]
    return "array", tuple(map(int, spec.shape)), np.dtype(spec.dtype).name, *bounds


class Seen(NamedTuple):
    """An observation that says what acting may know, and who sees what; a plain observation is a `view` alone.

    Attributes:
      view: what the policy sees, of whoever acts.
      legal: [A] bool, the actions that may be taken, one at least, always, also at an end; None: all may.
      world: what a centralised critic sees; None: no more than `view`.
      player: int32, who is to move; None where nobody takes turns.
      rules: what a planner may simulate from, such as the state of the environment; `()` where nobody asked for it.
    """

    view: PyTree
    legal: PyTree = None
    world: PyTree = None
    player: PyTree = None
    rules: PyTree = ()


class TimeStep(NamedTuple):
    """One step of an environment, or a batch of them.

    Attributes:
      obs: what to act on next. After an automatic reset it is the first observation of the next episode.
      reward: float32, for the action just taken; 0 at a reset.
      terminated: True where the environment ended the episode: nothing is worth anything afterwards.
      truncated: True where something outside (a time limit) cut the episode: the future still counts.
      next_obs: the observation that the action led to, before any reset. Equal to `obs` but where an
        episode ended and an automatic reset followed.
      info: further arrays, of one fixed structure in every step. `info["raw_reward"]`, where present, is
        the reward before clipping or scaling; returns are reported from it. `info["episode_end"]`, where present, is
        where the environment's episode ends, if a learner's may end before (a lost life).
      valid: None when every row is a real transition; else False marks a row that is none (an
        environment that resets in the NEXT step returns such a row), which losses and statistics leave out. Of agents
        that act together [N], False for one that is dead.
      turn: None where one acts alone; else float32, in a game of two whose gains are each other's losses: -1 where the
        opponent moves next, so that what comes is worth its negative to who moved, and 1 where the same moves again.
        `reward` is that of who moved.
    """

    obs: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    info: dict[str, Array] = {}
    valid: Array | None = None
    turn: Array | None = None

    @property
    def last(self) -> Array:
        """True where the episode ended here, either way."""
        return self.terminated | self.truncated


class Trajectory(NamedTuple):
    """A rollout of `T` steps of `B` environments, time first.

    Attributes:
      obs: [T, B, ...], what was acted on.
      action: [T, B, ...].
      reward: [T, B] float32.
      terminated: [T, B] bool, the environment ended the episode at this step.
      truncated: [T, B] bool, the episode was cut at this step. Where both are set, termination counts.
      next_obs: [T, B, ...], what the action led to, before any reset.
      first: [T, B] bool, `obs` is the first of an episode; recurrent memory is zeroed there.
      extras: [T, B, ...], what `Agent.act` returned beside the action (log-probabilities, values).
      carry: [B, ...], recurrent memory before step 0.
      end_carry: [B, ...], recurrent memory after step T-1.
      policy_version: int32 scalar, the number of learner updates behind the parameters that acted.
      valid: None (all are), or [T, B] bool, False for rows that are no transition.
      gap: None (there is none), or [B] bool, True where step 0 does not follow the last step that was learnt from
        before: a rollout between them was dropped, or the episodes began anew.
      past: None where the agent has no `reward_discount`, or [B] float32, the discounted sum of each environment's
        rewards up to step 0, as `podium.ops.returns.discounted_sum` has it; 0 at the start of a run.
      turn: None, or [T, B] float32, as of `TimeStep`: 1, or -1 where the opponent moves next.
    """

    obs: PyTree
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    first: Array
    extras: PyTree
    carry: PyTree
    end_carry: PyTree
    policy_version: Array
    valid: Array | None = None
    gap: Array | None = None
    past: Array | None = None
    turn: Array | None = None

    @property
    def last(self) -> Array:
        """[T, B], True where an episode ended, either way."""
        return self.terminated | self.truncated

    @property
    def discount(self) -> Array:
        """[T, B] float32, what the future counts.

        0 where the episode terminated, else 1 (truncation keeps it), or -1 where the opponent moves next.
        """
        discount = 1.0 - self.terminated.astype(jnp.float32)
        return discount if self.turn is None else discount * self.turn

    def reached(self, step: Array | None) -> PyTree:
        """Return what step number `step` [B] of each environment led to, [B, ...]; the last one for None.

        It is `next_obs` there. Rollouts may hold an observation, or a frame of it, once: read so, they are not copied.
        """
        return at_step(self.next_obs, step)

    def kept(self) -> PyTree:
        """Return `obs` to be put in the data of a Plan that is learnt from in minibatches, not to be read.

        It is `obs`, but of stacks of frames of which a rollout keeps every frame once what it keeps
        (`podium.film.Strips`): a minibatch then has stacks again, and nothing holds them all.
        """
        return self.obs


def choose_rows(condition: Array, yes: PyTree, no: PyTree) -> Any:
    """Return a tree of [B, ...] whose rows are those of `yes` where `condition` [B], bool, is set, else of `no`."""
    choose = lambda x, y: jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y)
    return jax.tree.map(choose, yes, no)


def at_step(rows: PyTree, step: Array | None) -> PyTree:
    """Return of rows [T, B, ...] that of number `step` [B] of each environment, [B, ...]; the last one for None."""
    if step is None:
        return jax.tree.map(lambda x: x[-1], rows)
    return jax.tree.map(lambda x: jnp.take_along_axis(x, step.reshape(1, -1, *[1] * (x.ndim - 2)), 0)[0], rows)
