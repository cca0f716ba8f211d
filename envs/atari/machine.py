"""The console: processor, video and memory of a batch, and the frame loop that runs them in plain XLA.

Lanes run in lockstep: each step is one row of `opcodes` in every lane whose frame goes on. A lane that reads collisions
waits, and so does one whose log is full; when none can go on, all logs are worked off by `video`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from podium.envs.atari import opcodes, picture, processor, video
from podium.envs.atari.cartridges import Cartridges, Lanes, Slot
from podium.envs.atari.controls import Controls
from podium.envs.atari.processor import ENDED, NEVER, RUNNING, Processor, Values
from podium.envs.atari.video import NOTHING, Video
from podium.types import Array

LOG = 512
"""Words that a lane's log holds."""

IMPATIENCE = 32
"""Lanes that must be able to go on for each that waits, where the games are several."""

RECORDS = 2048
"""Of a frame that is drawn; what comes after the last is not drawn."""


@jax.jit
def _same(values: Any) -> Any:
    return values


class Machine(NamedTuple):
    """State of a batch of consoles between two frames.

    Attributes:
      ram: uint8 [lanes, 128], or 256 with a cartridge's own memory behind the console's.
      processor: see `processor.Processor`.
      video: see `video.Video`.
    """

    ram: Array
    processor: Processor
    video: Video


def power_on(ram: Array) -> Machine:
    """Return consoles that have never run; `ram` is uint8 [lanes, bytes]. A `system_reset` must follow."""
    zero = jnp.zeros(ram.shape[:1], jnp.int32)
    return Machine(ram, Processor(*[zero] * len(Processor._fields)), Video(*[zero] * len(Video._fields)))


def system_reset(machine: Machine, cartridges: Cartridges | Slot, which: Array, timer: Array) -> Machine:
    """Return consoles as after the power switch, but for their memory, which stays; `timer` is what it starts at."""
    lanes = cartridges.lanes(which)
    zero = jnp.zeros_like(which)
    data = jnp.asarray(cartridges.data)
    byte = lambda address: data[lanes.index(lanes.at_reset, jnp.full_like(which, address))].astype(jnp.int32)
    state = Processor(*[zero] * len(Processor._fields))._replace(
        sp=zero + 0xFF,
        pc=byte(0xFFFC) | byte(0xFFFD) << 8,
        status=zero + 0x30,
        banks=lanes.at_reset,
        timer=timer,
        shift=zero + 6,
        sync_at=zero + NEVER,
        drawn=lanes.window[0],
    )
    return machine._replace(processor=state, video=Video(*[zero] * len(Video._fields)))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ram", "logs", "data", "rows"], meta_fields=["one_kernel"]
)
@dataclasses.dataclass(frozen=True)
class _Stored:
    """Memory of a batch in arrays; `processor.Memory`. `one_kernel` is that of `run`."""

    ram: Array
    logs: Array
    data: Array
    rows: Array
    one_kernel: bool

    def _lane(self) -> Array:
        return jnp.arange(self.ram.shape[0], dtype=jnp.int32)

    def row(self, code: Array) -> tuple[Array, Array, Array]:
        return tuple(self.rows[word].at[code].get(mode="promise_in_bounds") for word in range(3))  # type: ignore[return-value]

    def rom(self, index: Array) -> Array:
        return self.data.at[index].get(mode="promise_in_bounds").astype(jnp.int32)

    def load(self, address: Array) -> Array:
        found = jnp.take_along_axis(self.ram, address[:, None], 1, mode="promise_in_bounds")
        return found[:, 0].astype(jnp.int32)

    def store(self, address: Array, value: Array, where: Array) -> _Stored:
        value = jnp.where(where, value, self.load(address)).astype(jnp.uint8)
        return dataclasses.replace(self, ram=self.put(self.ram, (self._lane(), address), value))

    def log(self, count: Array, word: Array, where: Array) -> _Stored:
        place = jnp.where(where, count, LOG)
        return dataclasses.replace(self, logs=self.put(self.logs, (place, self._lane()), word))

    def put(self, array: Array, places: tuple[Array, Array], values: Array) -> Array:
        """Return an array with an element changed in every lane."""
        if self.one_kernel:
            return lax.dynamic_update_slice(array, values[:, None], [place[0] for place in places])
        return array.at[places].set(values, mode="promise_in_bounds", unique_indices=True)

    def any(self, where: Array) -> Array:
        return where.any()

    def settle(self, values: Values) -> Values:
        if self.one_kernel:
            return values
        # A call that is not inlined: XLA's CPU fuses what it can, and computes it again in each fusion that uses it.
        with set_xla_metadata(inlineable="false"):
            return _same(values)


def frame(
    cartridges: Cartridges | Slot, machine: Machine, which: Array, controls: Controls, active: Array, draws: Array
) -> tuple[Machine, Array]:
    """Run a frame in the lanes `active`; the others stay as they are.

    Args:
      cartridges: there are.
      machine: of the lanes.
      which: int32 [lanes], the cartridge of each.
      controls: what its ports hold, int32 [lanes] each.
      active: bool [lanes].
      draws: bool, whether the pictures are wanted.

    Returns:
      the state after it, and the pictures: colour indices, uint8 [lanes, height, 160]; zeros where they are not wanted.
    """
    after, drawn = run(cartridges, machine, which, controls, active, draws)
    blank = jnp.zeros((len(which), cartridges.height, video.WIDTH), jnp.uint8)
    return after, lax.cond(draws, lambda: draw(drawn, cartridges.height), lambda: blank)


class Drawn(NamedTuple):
    """What a frame drew.

    Attributes:
      records: of `picture.WORDS` words, int32 [lanes, RECORDS + 1] each.
      counts: int32 [lanes], how many there are.
      ends: int32 [lanes], pixel at which drawing stopped.
    """

    records: tuple[Array, ...]
    counts: Array
    ends: Array


def draw(drawn: Drawn, height: int) -> Array:
    """Return the pictures, uint8 [lanes, height, 160]."""
    return picture.draw(jnp.stack(drawn.records)[:, :, :RECORDS], drawn.counts, height, drawn.ends)


def run(
    cartridges: Cartridges | Slot,
    machine: Machine,
    which: Array,
    controls: Controls,
    active: Array,
    draws: Array,
    one_kernel: bool = False,
) -> tuple[Machine, Drawn]:
    """Run a frame as `frame` does, and return what it drew in place of the pictures.

    With `one_kernel`, for a batch of one, there are only such operations as XLA's CPU compiler can make one kernel of:
    no scatter, and no help against computing things twice, which it needs among kernels.
    """
    assert not one_kernel or len(which) == 1
    lanes = cartridges.lanes(which)
    count = which.shape[0]
    lane = jnp.arange(count, dtype=jnp.int32)
    # A place behind the last takes what is not to be kept, in the log as among the records.
    logs = jnp.zeros((LOG + 1, count), jnp.int32)
    records = tuple(jnp.zeros((count, RECORDS + 1), jnp.int32) for _ in range(picture.WORDS))
    data, rows = jnp.asarray(cartridges.data), jnp.asarray(opcodes.table().T)
    memory = _Stored(machine.ram, logs, data, rows, one_kernel)
    none = jnp.zeros_like(which)

    def runs(state: Processor) -> Array:
        return processor.runs(state, LOG)

    def execute(carry: tuple[Processor, _Stored]) -> tuple[Processor, _Stored]:
        state, memory = carry
        return processor.step(state, memory, lanes, controls, runs(state))

    def work_off(state: Processor, memory: _Stored, view: Video, records: Any, kept: Array) -> Any:
        """Do what is logged, and what a read that waits needs to know."""
        wanted = state.logged + (state.waits != 0)

        def event(carry: Any) -> Any:
            place, view, records, kept = carry
            word = memory.logs[jnp.minimum(place, LOG), lane]
            is_read = place >= state.logged
            cycle = word >> 14 & 0x7F
            clock = jnp.where(is_read, 3 * state.waits, (word >> 21) * video.CLOCKS + 3 * cycle)
            register = jnp.where(is_read, NOTHING, word >> 8 & 0x3F)
            value, active = word & 0xFF, place < wanted
            view, record, done = video.step(view, lanes, clock, cycle, register, value, active, memory.settle)
            keeps = record.drew & draws & (kept < RECORDS)
            at = jnp.where(keeps, kept, RECORDS)
            records = tuple(
                memory.put(words, (lane, at), new) for words, new in zip(records, record.words, strict=True)
            )
            return place + done, view, records, kept + keeps

        carry = none, view, records, kept
        _, view, records, kept = lax.while_loop(lambda carry: (carry[0] < wanted).any(), event, carry)
        known = video.drawn(view, lanes)
        state = state._replace(logged=none, waits=none, drawn=known, collisions=view.collisions)
        return state, memory, view, records, kept

    def carries_on(state: Processor) -> Array:
        going = runs(state)
        if len(cartridges) == 1:
            return going.any()
        # Several games read collisions at different times. If each lane waited until none can go on, they would run
        # one after the other: a frame of all 57 took six times the steps.
        unfinished = (state.ended == RUNNING) | (state.then != 0)
        return going.any() & (going.sum() >= IMPATIENCE * (unfinished & ~going).sum())

    def round_(carry: Any) -> Any:
        state, memory, *rest = carry
        state, memory = lax.while_loop(lambda carry: carries_on(carry[0]), execute, (state, memory))
        return work_off(state, memory, *rest)

    def goes_on(carry: Any) -> Array:
        return unfinished(carry[0]).any()

    carry = begin(machine.processor, active), memory, machine.video, records, none
    state, memory, view, records, kept = lax.while_loop(goes_on, round_, carry)

    ends = view.row * video.WIDTH + jnp.maximum(view.done - video.BLANK, 0)
    state, view = end(state, view, lanes, active)
    return Machine(memory.ram, state, view), Drawn(records, kept, ends)


def begin(state: Processor, active: Array) -> Processor:
    """Return the state at the start of a frame's loop."""
    ended = jnp.where(active, RUNNING, ENDED)
    return state._replace(ended=ended, instructions=jnp.where(active, 0, state.instructions))


def unfinished(state: Processor) -> Array:
    """Tell whose frame goes on, or ended with something that is not worked off yet."""
    return (state.ended == RUNNING) | (state.then != 0) | (state.logged + state.waits > 0)


def end(state: Processor, view: Video, lanes: Lanes, active: Array) -> tuple[Processor, Video]:
    """Return the states with times counted from the start of the next frame; one that was cut goes on as it is."""
    whole = active & (state.ended == ENDED)
    passed = jnp.where(whole, state.line, 0)
    cycles = passed * processor.CYCLES
    view = video.begin_frame(view, passed, whole)
    state = state._replace(
        line=state.line - passed,
        first_cycle=jnp.where(whole, state.cycle, state.first_cycle),
        set_at=state.set_at - cycles,
        expired_at=state.expired_at - cycles,
        dump_at=state.dump_at - cycles,
        sync_at=jnp.where(state.sync_at == NEVER, NEVER, state.sync_at - cycles),
        drawn=video.drawn(view, lanes),
    )
    return state, view
