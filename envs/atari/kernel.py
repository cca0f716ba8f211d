"""The console's frame loop as one kernel for GPUs: the second back end, by Pallas and Triton.

The steps are those of `machine`; what differs is where things are. A program of the kernel runs a frame of `LANES`
consoles, one a thread of one warp, and holds their processors and pictures in registers all the while. Their memory,
logs and records lie in global memory, of which a warp's part stays in the cache next to it.

A lane's store must be seen by its next load. It is, because a thread does both: blocks of as many lanes as a warp has
threads are laid out one lane a thread, whatever is computed with them.

On other devices the same kernel is interpreted, slowly: for tests.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.envs.atari import machine, opcodes, picture, processor, video
from podium.envs.atari.cartridges import Cartridges, Lanes
from podium.envs.atari.controls import Controls
from podium.envs.atari.machine import LOG, RECORDS, Machine
from podium.envs.atari.processor import RUNNING, Processor, Values
from podium.envs.atari.video import NOTHING, Video
from podium.types import Array

LANES = 32
"""Of a program: as many as a warp has threads."""

STEPS = 4
"""Of the processors between two looks at whether any goes on, which all lanes must wait for."""


class _Shared(NamedTuple):
    """What all blocks are given.

    Attributes:
      draws: int32 [1].
      data: uint8, the cartridges.
      rows: int32 [3, rows], of `opcodes.table()`.
    """

    draws: Any
    data: Any
    rows: Any


class _Each(NamedTuple):
    """What lanes are given, int32 [blocks, LANES] each.

    Attributes:
      controls: what their ports hold.
      lanes: the arrays of `Lanes` by name; none where there is one cartridge only.
    """

    controls: Controls
    lanes: dict[str, Any]


class _State(NamedTuple):
    """What a frame changes.

    Attributes:
      ram: uint8 [blocks, places, LANES].
      processor: int32 [blocks, LANES] each.
      video: likewise.
    """

    ram: Any
    processor: Processor
    video: Video


class _Made(NamedTuple):
    """What a frame leaves besides.

    Attributes:
      logs: int32 [blocks, LOG, LANES], of no meaning afterwards.
      records: int32 [blocks, RECORDS, LANES] each.
      kept: int32 [blocks, LANES], how many records there are.
    """

    logs: Any
    records: tuple[Any, ...]
    kept: Any


def frame(
    cartridges: Cartridges,
    machine_: Machine,
    which: Array,
    controls: Controls,
    active: Array,
    draws: Array,
    interpret: bool | None = None,
) -> tuple[Machine, Array]:
    """Run a frame in the lanes `active`, as `machine.frame` does.

    Args:
      cartridges: there are.
      machine_: of the lanes.
      which: int32 [lanes], the cartridge of each.
      controls: what its ports hold, int32 [lanes] each.
      active: bool [lanes].
      draws: bool, whether the pictures are wanted.
      interpret: whether the kernel is interpreted; None: where the default device is no GPU.

    Returns:
      the state after it, and the pictures: colour indices, uint8 [lanes, height, 160]; zeros where they are not wanted.
    """
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    count = which.shape[0]
    blocks = -(-count // LANES)
    lanes = cartridges.lanes(which)
    arrays = {name: value for name, value in vars(lanes).items() if name != "schemes"}
    shared = _Shared(
        jnp.asarray(draws, jnp.int32).reshape(1), jnp.asarray(cartridges.data), jnp.asarray(opcodes.table().T)
    )
    each = _Each(_fill(controls, blocks), _fill(arrays, blocks) if len(cartridges) > 1 else {})
    state = _State(
        _by_place(machine_.ram, blocks),
        machine.begin(_fill(machine_.processor, blocks), _fill(active, blocks)),
        _fill(machine_.video, blocks),
    )
    state, made = _call(cartridges, lanes.schemes, shared, each, state, interpret)
    ended, view = jax.tree.map(lambda x: x.reshape(-1)[:count], (state.processor, state.video))

    def draw() -> Array:
        records = jnp.stack([_by_lane(words, count) for words in made.records])
        ends = view.row * video.WIDTH + jnp.maximum(view.done - video.BLANK, 0)
        return picture.draw(records, made.kept.reshape(-1)[:count], cartridges.height, ends)

    pictures = lax.cond(draws, draw, lambda: jnp.zeros((count, cartridges.height, video.WIDTH), jnp.uint8))
    return Machine(_by_lane(state.ram, count), *machine.end(ended, view, lanes, active)), pictures


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Memory of a block of lanes in references; `processor.Memory`."""

    shared: _Shared
    ram: Any
    logs: Any
    lane: Array

    def row(self, code: Array) -> tuple[Array, Array, Array]:
        return tuple(self.shared.rows[jnp.full_like(code, word), code] for word in range(3))

    def rom(self, index: Array) -> Array:
        return self.shared.data[index].astype(jnp.int32)

    def load(self, address: Array) -> Array:
        return self.ram[address, self.lane].astype(jnp.int32)

    def store(self, address: Array, value: Array, where: Array) -> _Stored:
        plgpu.store(self.ram.at[address, self.lane], value.astype(jnp.uint8), mask=where)
        return self

    def log(self, count: Array, word: Array, where: Array) -> _Stored:
        plgpu.store(self.logs.at[count, self.lane], word, mask=where)
        return self

    def any(self, where: Array) -> Array:
        return jnp.max(where.astype(jnp.int32)) != 0

    def settle(self, values: Values) -> Values:
        return values


def _run(
    cartridges: Cartridges,
    schemes: tuple[str, ...],
    shared: _Shared,
    each: _Each,
    before: _State,
    state_: _State,
    made: _Made,
) -> None:
    """Run a frame of a block; all are references, and `state_` is where `before` was."""
    del before
    read = functools.partial(jax.tree.map, lambda ref: ref[...])
    lane = jnp.arange(LANES, dtype=jnp.int32)
    controls = read(each.controls)
    lanes = Lanes(schemes, **read(each.lanes)) if each.lanes else cartridges.lanes(lane)
    draws = shared.draws[0] != 0
    memory = _Stored(shared, state_.ram, made.logs, lane)
    none = jnp.zeros((LANES,), jnp.int32)

    def runs(state: Processor) -> Array:
        return processor.runs(state, LOG)

    def execute(state: Processor) -> Processor:
        def step(_: Any, state: Processor) -> Processor:
            return processor.step(state, memory, lanes, controls, runs(state))[0]

        return lax.fori_loop(0, STEPS, step, state)

    def work_off(state: Processor, view: Video, kept: Array) -> tuple[Processor, Video, Array]:
        """Do what is logged, and what a read that waits needs to know."""
        wanted = state.logged + (state.waits != 0)

        def event(carry: Any) -> Any:
            place, view, kept = carry
            active, is_read = place < wanted, place >= state.logged
            word = plgpu.load(made.logs.at[place, lane], mask=place < state.logged, other=0)
            cycle = word >> 14 & 0x7F
            clock = jnp.where(is_read, 3 * state.waits, (word >> 21) * video.CLOCKS + 3 * cycle)
            register = jnp.where(is_read, NOTHING, word >> 8 & 0x3F)
            view, record, done = video.step(view, lanes, clock, cycle, register, word & 0xFF, active)
            keeps = record.drew & draws & (kept < RECORDS)
            for ref, words in zip(made.records, record.words, strict=True):
                plgpu.store(ref.at[kept, lane], words, mask=keeps)
            return place + done, view, kept + keeps

        _, view, kept = lax.while_loop(lambda carry: memory.any(carry[0] < wanted), event, (none, view, kept))
        known = video.drawn(view, lanes)
        state = state._replace(logged=none, waits=none, drawn=known, collisions=view.collisions)
        return state, view, kept

    def round_(carry: Any) -> Any:
        state, view, kept = carry
        state = lax.while_loop(lambda state: memory.any(runs(state)), execute, state)
        return work_off(state, view, kept)

    def goes_on(carry: Any) -> Array:
        state = carry[0]
        return memory.any((state.ended == RUNNING) | (state.then != 0) | (state.logged > 0))

    carry = read(state_.processor), read(state_.video), none
    *after, kept = lax.while_loop(goes_on, round_, carry)
    for ref, value in zip(jax.tree.leaves((state_.processor, state_.video, made.kept)),
                          jax.tree.leaves((*after, kept)), strict=True):  # fmt: skip
        ref[...] = value


def _call(
    cartridges: Cartridges, schemes: tuple[str, ...], shared: _Shared, each: _Each, state: _State, interpret: bool
) -> tuple[_State, _Made]:
    """Run the kernel."""
    blocks = state.processor.a.shape[0]
    of = lambda *places: jax.ShapeDtypeStruct((blocks, *places, LANES), jnp.int32)  # noqa: E731
    made = _Made(of(LOG), tuple(of(RECORDS) for _ in range(picture.WORDS)), of())

    def by_block(x: Any) -> pl.BlockSpec:
        inner = (0,) * (len(x.shape) - 1)
        return pl.BlockSpec((None, *x.shape[1:]), lambda block: (block, *inner))

    each_specs, state_specs, made_specs = jax.tree.map(by_block, (each, state, made))
    first, leaves = len(jax.tree.leaves((shared, each))), len(jax.tree.leaves(state))
    return pl.pallas_call(
        functools.partial(_run, cartridges, schemes),
        grid=(blocks,),
        in_specs=[jax.tree.map(lambda x: pl.BlockSpec(), shared), each_specs, state_specs],
        out_specs=[state_specs, made_specs],
        out_shape=[jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), made],
        input_output_aliases={first + leaf: leaf for leaf in range(leaves)},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="atari_frame",
    )(shared, each, state)


def _fill(tree: Any, blocks: int) -> Any:
    """Return arrays [lanes] as [blocks, LANES], with zeros in the lanes that there are not."""
    return jax.tree.map(lambda x: jnp.pad(x, (0, blocks * LANES - x.shape[0])).reshape(blocks, LANES), tree)


def _by_place(x: Array, blocks: int) -> Array:
    """Return [lanes, places] as [blocks, places, LANES]."""
    x = jnp.pad(x, ((0, blocks * LANES - x.shape[0]), (0, 0)))
    return jnp.swapaxes(x.reshape(blocks, LANES, -1), 1, 2)


def _by_lane(x: Array, count: int) -> Array:
    """Return [blocks, places, LANES] as [lanes, places]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1])[:count]
