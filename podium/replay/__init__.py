"""Replay buffers as pure functions: a ring of steps in lanes.

`uniform` draws every transition alike, `prioritized` those with a large TD error more often; both make n-step
transitions of single steps when they are sampled. `sequences` draws windows of consecutive steps, for agents with
memory.

Every array is [L, rows, E, ...]: L lanes, a ring of `rows` times, E environments a lane. All environments write at one
shared position, a whole rollout at a time, so an insertion is one contiguous in-place write per array. Reading is one
gather per array, batched over lanes by `vmap`: a mesh that holds whole lanes exchanges nothing, and sampling costs the
same whatever the buffer holds. Donate the state (`jax.jit(replay.add, donate_argnums=0)`) and it is never copied.
"""

from podium.agent import Replay
from podium.replay.priorities import Priorities
from podium.replay.prioritized_steps import Estimate, PrioritizedState, prioritized
from podium.replay.ring import ReplayState, Transition, transitions
from podium.replay.steps import Batch, n_step_return, uniform
from podium.replay.windows import SequenceState, Windows, sequences, window_priority

__all__ = [
    "Batch",
    "Estimate",
    "PrioritizedState",
    "Priorities",
    "Replay",
    "ReplayState",
    "SequenceState",
    "Transition",
    "Windows",
    "n_step_return",
    "prioritized",
    "sequences",
    "transitions",
    "uniform",
    "window_priority",
]
