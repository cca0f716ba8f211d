"""The console's frame loop as one kernel for GPUs: the second back end, by Pallas and Triton.

The steps are those of `machine`; what differs is where things are. A program of the kernel runs a frame of `LANES`
consoles, one a thread of one warp, and holds their processors and pictures in registers all the while. Their memory,
logs and records lie in global memory, of which a warp's part stays in the cache next to it.

A lane's store must be seen by its next load. It is, because a thread does both: blocks of as many lanes as a warp has
threads are laid out one lane a thread, whatever is computed with them.

What goes in and out once a frame is packed into groups of four words a lane. That is less for speed than for Triton's
compiler, which takes time in proportion to the loads and stores there are, times the square of all operations.

On other devices the same kernel is interpreted, slowly: for tests. JAX 0.11 calls Pallas's way to Triton deprecated and
still has it; podium needs JAX below 0.12.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.envs.atari import machine, opcodes, picture, processor, video
from podium.envs.atari.cartridges import Cartridges, Lanes
from podium.envs.atari.controls import Controls
from podium.envs.atari.machine import LOG, RECORDS, Machine
from podium.envs.atari.processor import Processor, Values
from podium.envs.atari.video import NOTHING, Video
from podium.types import Array

LANES = 32
"""Of a program: as many as a warp has threads."""

STEPS = 4
"""Of the processors between two looks at whether any goes on, which all lanes must wait for."""


class _Given(NamedTuple):
    """What the kernel is given.

    Attributes:
      draws: int32 [1].
      data: uint8, the cartridges.
      rows: int32 [rows, 4], of `opcodes.table()` and a column of zeros.
      lanes: groups of `_Constants`.
    """

    draws: Any
    data: Any
    rows: Any
    lanes: Any


class _Constants(NamedTuple):
    """What a lane is given, int32 each.

    Attributes:
      active: whether its frame is run.
      controls: what its ports hold.
      lanes: the arrays of `Lanes` by name; none where there is one cartridge only.
    """

    active: Array
    controls: Controls
    lanes: dict[str, Any]


class _Changed(NamedTuple):
    """What the kernel changes.

    Attributes:
      ram: uint8 [blocks, places, LANES].
      lanes: groups of `Processor` and `Video`, and one word more: how many records there are.
    """

    ram: Any
    lanes: Any


class _Made(NamedTuple):
    """What the kernel leaves besides.

    Attributes:
      logs: int32 [blocks, LOG, LANES], of no meaning afterwards.
      starts: int32 [blocks, RECORDS, LANES], the first words of records.
      records: int32 [blocks, RECORDS, LANES, 4], the others.
    """

    logs: Any
    starts: Any
    records: Any


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
    arrays = {name: value for name, value in vars(lanes).items() if name != "schemes"} if len(cartridges) > 1 else {}
    constants = _Constants(jnp.asarray(active, jnp.int32), controls, arrays)
    given = _Given(
        jnp.asarray(draws, jnp.int32).reshape(1),
        jnp.asarray(cartridges.data),
        jnp.asarray(np.pad(opcodes.table(), ((0, 0), (0, 1)))),
        _group(constants, blocks),
    )
    words = machine_.processor, machine_.video, jnp.zeros_like(which)
    structure: Any = jax.tree.structure(words)
    changed, made = _call(
        functools.partial(_run, cartridges, lanes.schemes, jax.tree.structure(constants), structure),
        given,
        _Changed(_by_place(machine_.ram, blocks), _group(words, blocks)),
        interpret,
    )
    state, view, kept = jax.tree.unflatten(structure, _ungroup(changed.lanes, count)[: structure.num_leaves])

    def draw() -> Array:
        others = jnp.moveaxis(made.records, (3, 0, 2), (0, 1, 2)).reshape(4, -1, RECORDS)[:, :count]
        records = jnp.concatenate([_by_lane(made.starts, count)[None], others])
        ends = view.row * video.WIDTH + jnp.maximum(view.done - video.BLANK, 0)
        return picture.draw(records, kept, cartridges.height, ends)

    pictures = lax.cond(draws, draw, lambda: jnp.zeros((count, cartridges.height, video.WIDTH), jnp.uint8))
    return Machine(_by_lane(changed.ram, count), *machine.end(state, view, lanes, active)), pictures


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Memory of a block of lanes in references; `processor.Memory`."""

    given: _Given
    ram: Any
    logs: Any
    lane: Array

    def row(self, code: Array) -> tuple[Array, Array, Array]:
        first, second, third, _ = _apart(self.given.rows[code])
        return first, second, third

    def rom(self, index: Array) -> Array:
        return self.given.data[index].astype(jnp.int32)

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
    constants: Any,
    words: Any,
    given: _Given,
    before: _Changed,
    changed: _Changed,
    made: _Made,
) -> None:
    """Run a frame of a block.

    The last four are references, `changed` to where `before` was; `constants` and `words` are structures of groups.
    """
    del before
    lane = jnp.arange(LANES, dtype=jnp.int32)
    active, controls, arrays = _load(given.lanes, constants)
    lanes = Lanes(schemes, **arrays) if arrays else cartridges.lanes(lane)
    draws = given.draws[0] != 0
    memory = _Stored(given, changed.ram, made.logs, lane)
    none = jnp.zeros((LANES,), jnp.int32)
    wide = functools.partial(jnp.broadcast_to, shape=(LANES, 4))

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
            start, *others = record.words
            plgpu.store(made.starts.at[kept, lane], start, mask=keeps)
            at = wide(kept[:, None]), wide(lane[:, None]), wide(jnp.arange(4, dtype=jnp.int32)[None])
            plgpu.store(made.records.at[at], _together(others), mask=wide(keeps[:, None]))
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
        return memory.any(machine.unfinished(carry[0]))

    state, view, _ = _load(changed.lanes, words)
    state = machine.begin(state, active != 0)
    _store(changed.lanes, lax.while_loop(goes_on, round_, (state, view, none)))


def _load(ref: Any, structure: Any) -> Any:
    """Return what groups hold."""
    found = [word for group in range(ref.shape[0]) for word in _apart(ref[group])]
    return jax.tree.unflatten(structure, found[: structure.num_leaves])


def _store(ref: Any, tree: Any) -> None:
    """Put words into groups."""
    words = jax.tree.leaves(tree)
    words += [words[-1]] * (-len(words) % 4)
    for group in range(ref.shape[0]):
        ref[group] = _together(words[4 * group :][:4])


def _apart(group: Array) -> tuple[Array, ...]:
    """Return the four columns of [LANES, 4]; Triton only knows how to halve."""
    even, odd = jnp.unstack(group.reshape(-1, 2, 2), axis=-1)
    (first, third), (second, fourth) = jnp.unstack(even, axis=-1), jnp.unstack(odd, axis=-1)
    return first, second, third, fourth


def _together(words: Sequence[Array]) -> Array:
    """Return [LANES, 4] of four columns."""
    first, second, third, fourth = words
    even, odd = jnp.stack([first, third], -1), jnp.stack([second, fourth], -1)
    return jnp.stack([even, odd], -1).reshape(-1, 4)


def _call(run: Callable[..., None], given: _Given, before: _Changed, interpret: bool) -> tuple[_Changed, _Made]:
    """Run the kernel."""
    blocks = before.ram.shape[0]
    of = lambda *shape: jax.ShapeDtypeStruct((blocks, *shape), jnp.int32)
    made = _Made(of(LOG, LANES), of(RECORDS, LANES), of(RECORDS, LANES, 4))

    def by_block(x: Any) -> pl.BlockSpec:
        inner = (0,) * (len(x.shape) - 1)
        return pl.BlockSpec((None, *x.shape[1:]), lambda block: (block, *inner))

    changed_specs, made_specs = jax.tree.map(by_block, (before, made))
    return pl.pallas_call(
        run,
        grid=(blocks,),
        in_specs=[_Given(pl.BlockSpec(), pl.BlockSpec(), pl.BlockSpec(), by_block(given.lanes)), changed_specs],
        out_specs=[changed_specs, made_specs],
        out_shape=[jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), before), made],
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="atari_frame",
    )(given, before)


def _group(tree: Any, blocks: int) -> Array:
    """Return arrays [lanes] in groups of four words, [blocks, groups, LANES, 4], with zeros where there is nothing."""
    words = jnp.stack(jax.tree.leaves(tree))
    count, lanes = words.shape
    words = jnp.pad(words, ((0, -count % 4), (0, blocks * LANES - lanes)))
    return words.reshape(-1, 4, blocks, LANES).transpose(2, 0, 3, 1)


def _ungroup(groups: Array, lanes: int) -> list[Array]:
    """Return arrays [lanes] of groups; the last few have no meaning where there were not four words."""
    return list(groups.transpose(1, 3, 0, 2).reshape(groups.shape[1] * 4, -1)[:, :lanes])


def _by_place(x: Array, blocks: int) -> Array:
    """Return [lanes, places] as [blocks, places, LANES]."""
    x = jnp.pad(x, ((0, blocks * LANES - x.shape[0]), (0, 0)))
    return jnp.swapaxes(x.reshape(blocks, LANES, -1), 1, 2)


def _by_lane(x: Array, count: int) -> Array:
    """Return [blocks, places, LANES] as [lanes, places]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1])[:count]
