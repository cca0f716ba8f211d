"""The console: processor, video and memory of a batch, and the frame loop that runs them in plain XLA.

Lanes run in lockstep: each step is one row of `opcodes` in every lane whose frame goes on. A lane that reads collisions
waits, and so does one whose log is full; when none can go on, all logs are worked off by `video`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podium.envs.atari import opcodes, picture, processor, video
from podium.envs.atari.cartridges import Cartridges, Lanes
from podium.envs.atari.controls import Controls
from podium.envs.atari.processor import CUT, ENDED, NEVER, RUNNING, Processor
from podium.envs.atari.video import NOTHING, Video
from podium.types import Array

LOG = 512
"""Words that a lane's log holds."""

RECORDS = 2048
"""Of a frame that is drawn; what comes after the last is not drawn."""


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


def system_reset(machine: Machine, cartridges: Cartridges, which: Array, timer: Array) -> Machine:
    """Return consoles as after the power switch, but for their memory, which stays; `timer` is what it starts at."""
    lanes = cartridges.lanes(which)
    zero = jnp.zeros_like(which)
    data = jnp.asarray(cartridges.data)
    byte = lambda address: data[lanes.index(lanes.at_reset, jnp.full_like(which, address))].astype(jnp.int32)  # noqa: E731
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Stored:
    """Memory of a batch in arrays; `processor.Memory`."""

    ram: Array
    logs: Array
    data: Array
    rows: Array

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
        ram = _put(self.ram, self._lane(), address, value.astype(jnp.uint8), where, self.load(address).astype(jnp.uint8))
        return dataclasses.replace(self, ram=ram)

    def log(self, count: Array, word: Array, where: Array) -> _Stored:
        lane = self._lane()
        place = jnp.where(where, count, LOG)
        return dataclasses.replace(
            self, logs=self.logs.at[place, lane].set(word, mode="promise_in_bounds", unique_indices=True)
        )

    def any(self, where: Array) -> Array:
        return where.any()


def _put(ram: Array, lane: Array, address: Array, value: Array, where: Array, old: Array) -> Array:
    value = jnp.where(where, value, old)
    return ram.at[lane, address].set(value, mode="promise_in_bounds", unique_indices=True)


class Frame(NamedTuple):
    """What a frame left.

    Attributes:
      machine: the state after it.
      pictures: uint8 [lanes, height, 160] of colour indices, or None where it was not drawn.
    """

    machine: Machine
    pictures: Array | None


def frame(cartridges: Cartridges, machine: Machine, which: Array, controls: Controls, draws: bool) -> Frame:
    """Run a frame in every lane.

    Args:
      cartridges: there are.
      machine: of the lanes.
      which: int32 [lanes], the cartridge of each.
      controls: what its ports hold, int32 [lanes] each.
      draws: whether the picture is wanted.
    """
    lanes = cartridges.lanes(which)
    count = which.shape[0]
    # A place behind the last takes what is not to be logged.
    logs = jnp.zeros((LOG + 1, count), jnp.int32)
    rows = jnp.asarray(opcodes.table().T)
    memory = _Stored(machine.ram, logs, jnp.asarray(cartridges.data), rows)
    records = jnp.zeros((picture.WORDS, count, RECORDS + 1), jnp.int32) if draws else None
    drawn = jnp.zeros_like(which)
    state = begin(machine.processor)
    start = machine.video

    def runs(state: Processor) -> Array:
        return processor.runs(state, LOG)

    def go(carry: Any) -> Any:
        state, memory = carry
        return processor.step(state, memory, lanes, controls, runs(state))

    def round_(carry: Any) -> Any:
        state, memory, view, drawing = carry
        state, memory = lax.while_loop(lambda c: runs(c[0]).any(), go, (state, memory))
        state, view, drawing = work_off(state, memory, view, drawing)
        return state, memory, view, drawing

    def work_off(state: Processor, memory: _Stored, view: Video, drawing: Any) -> Any:
        lane = jnp.arange(count)
        wanted = state.logged + (state.waits != 0)

        def event(carry: Any) -> Any:
            place, view, drawing = carry
            word = memory.logs[jnp.minimum(place, LOG), lane]
            is_read = place >= state.logged
            cycle = word >> 14 & 0x7F
            clock = jnp.where(is_read, 3 * state.waits, (word >> 21) * video.CLOCKS + 3 * cycle)
            register = jnp.where(is_read, NOTHING, word >> 8 & 0x3F)
            active = place < wanted
            view, record, done = video.step(view, lanes, clock, cycle, register, word & 0xFF, active)
            if drawing is not None:
                kept, number = drawing
                at = jnp.where(record.drew, jnp.minimum(number, RECORDS), RECORDS)
                kept = tuple(
                    words.at[lane, at].set(new, mode="promise_in_bounds", unique_indices=True)
                    for words, new in zip(kept, record.words, strict=True)
                )
                drawing = kept, number + record.drew
            return place + done, view, drawing

        place = jnp.zeros_like(wanted)
        _, view, drawing = lax.while_loop(lambda c: (c[0] < wanted).any(), event, (place, view, drawing))
        state = state._replace(
            logged=jnp.zeros_like(wanted),
            waits=jnp.zeros_like(wanted),
            drawn=video.drawn(view, lanes),
            collisions=view.collisions,
        )
        return state, view, drawing

    drawing = (tuple(records), drawn) if records is not None else None
    unfinished = lambda c: ((c[0].ended == RUNNING) | (c[0].then != 0) | (c[0].logged > 0)).any()  # noqa: E731
    state, memory, view, drawing = lax.while_loop(unfinished, round_, (state, memory, start, drawing))
    pictures = None
    if drawing is not None:
        kept, number = drawing
        ends = view.row * video.WIDTH + jnp.maximum(view.done - video.BLANK, 0)
        pictures = picture.draw(
            jnp.stack(kept)[:, :, :RECORDS], jnp.minimum(number, RECORDS), cartridges.height, ends
        )
    state, view = end(state, view, lanes)
    return Frame(Machine(memory.ram, state, view), pictures)


def begin(state: Processor) -> Processor:
    """Return the state at the start of a frame's loop."""
    return state._replace(ended=jnp.zeros_like(state.ended), instructions=jnp.zeros_like(state.ended))


def end(state: Processor, view: Video, lanes: Lanes) -> tuple[Processor, Video]:
    """Return the states with times counted from the start of the next frame; one that was cut goes on as it is."""
    whole = state.ended == ENDED
    passed = jnp.where(whole, state.line, 0)
    cycles = passed * processor.CYCLES
    view = video.begin_frame(view, passed, whole)
    later = lambda at: jnp.where(at == NEVER, NEVER, at - cycles)  # noqa: E731
    state = state._replace(
        line=state.line - passed,
        first_cycle=jnp.where(whole, state.cycle, state.first_cycle),
        set_at=state.set_at - cycles,
        expired_at=state.expired_at - cycles,
        dump_at=state.dump_at - cycles,
        sync_at=later(state.sync_at),
        drawn=video.drawn(view, lanes),
    )
    return state, view


__all__ = ["CUT", "LOG", "RECORDS", "Frame", "Machine", "frame", "power_on", "system_reset"]
