"""The 6507 with its bus, the RIOT's memory, ports and timer, and what of the TIA concerns time: one instruction a step.

All lanes of a batch take the same straight path, whatever they execute (`opcodes`). What a step writes to the TIA's
picture registers is not done here but logged, one word a write, and `video` does it later for many writes in a row:
between two reads of the collision latches nobody can tell the difference. A lane that reads them waits for that.

Everything is int32 [lanes]. Memory is reached through `Memory` only, so that the same path runs under XLA and inside a
Pallas kernel. Time is a line and a cycle in it (76 cycles a line, 3 clocks of the picture a cycle).

Sources: MOS Technology's 6500 manuals and the MOS 6532 data sheet; S. Wright, Stella Programmer's Guide (1979). Where
ale-py differs from the console, it is ale-py that is followed: an instruction's cycles count before its operand is
read, and nothing else happens within one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self, TypeVar

import jax.numpy as jnp
from jax import lax

from podium.envs.atari import opcodes
from podium.envs.atari.cartridges import Lanes
from podium.envs.atari.controls import Controls
from podium.envs.atari.opcodes import FIELDS
from podium.types import Array

CYCLES = 76
"""Of a line."""

LAST_LINE = 290
"""A write to the TIA below this line ends the frame."""

MAX_INSTRUCTIONS = 25_000
"""Of a frame, after which it is cut."""

RUNNING, ENDED, CUT = 0, 1, 2
"""How a frame stands; one that was cut goes on in the next."""

NEVER = 1 << 30

_STATUS_MASK = opcodes.NEGATIVE | opcodes.OVERFLOW | opcodes.DECIMAL | opcodes.INTERRUPT | opcodes.ZERO | opcodes.CARRY
_WSYNC, _VSYNC, _VBLANK = 0x02, 0x00, 0x01

# Writes that change nothing in the picture or the collisions: sync, sound, and what is not there.
_SILENT = (0x00, 0x02, 0x03, *range(0x15, 0x1B), *range(0x2D, 0x40))
LOGGED = sum(1 << register for register in range(64) if register not in _SILENT)
"""Bit n: whether writes to the TIA's register n are logged."""


Values = TypeVar("Values")


class Memory(Protocol):
    """What a step reads and writes besides the state; each operation is one element a lane."""

    def row(self, code: Array) -> tuple[Array, Array, Array]:
        """Return the three words of rows of `opcodes.table()`."""
        ...

    def rom(self, index: Array) -> Array:
        """Return bytes of the cartridges."""
        ...

    def load(self, address: Array) -> Array:
        """Return bytes of the RAM, by address 0 to 127 (to 255 with a cartridge's own)."""
        ...

    def store(self, address: Array, value: Array, where: Array) -> Self:
        """Return the memory with bytes stored in the lanes `where`."""
        ...

    def log(self, count: Array, word: Array, where: Array) -> Self:
        """Return the memory with words put at place `count` of the logs of the lanes `where`."""
        ...

    def any(self, where: Array) -> Array:
        """Tell whether it holds in any lane."""
        ...

    def settle(self, values: Values) -> Values:
        """Return the same values, computed once: a compiler may else compute them anew wherever they are used."""
        ...


AnyMemory = TypeVar("AnyMemory", bound=Memory)


class Processor(NamedTuple):
    """State of a lane between two steps, int32 each; times are cycles since the frame's first line began.

    Attributes:
      a: accumulator.
      x: index register.
      y: index register.
      sp: stack pointer.
      pc: program counter, 16 bits.
      status: N V 1 1 D I Z C.
      then: 0, or the row that goes on with the instruction, less 255.
      latch: byte that such a row needs.
      line: line in the frame; 0 is the first.
      cycle: in the line, 0 to 75.
      first_cycle: `cycle` at which the frame began, on line 0.
      banks: four nibbles, lowest first: which KiB of the cartridge each KiB of its address space shows.
      timer: value that the timer was set to.
      shift: log2 of its interval.
      set_at: when it was set.
      expired_read: whether it was read after its end.
      expired_at: when that was.
      direction: direction byte of port A.
      dumped: whether the paddles' capacitors are held empty.
      dump_at: when that ended.
      sync_at: earliest time at which VSYNC may end the frame.
      instructions: of this frame so far.
      ended: RUNNING, ENDED or CUT.
      logged: words in the log.
      drawn: clock up to which collisions are known, as `video` says.
      collisions: 16 bits: two for each of the registers from CXM0P to CXPPMM, as far as they are known.
      waits: time up to which it waits for the picture, to read collisions or because the frame ends; 0 where it does
        not wait.
    """

    a: Array
    x: Array
    y: Array
    sp: Array
    pc: Array
    status: Array
    then: Array
    latch: Array
    line: Array
    cycle: Array
    first_cycle: Array
    banks: Array
    timer: Array
    shift: Array
    set_at: Array
    expired_read: Array
    expired_at: Array
    direction: Array
    dumped: Array
    dump_at: Array
    sync_at: Array
    instructions: Array
    ended: Array
    logged: Array
    drawn: Array
    collisions: Array
    waits: Array


def time(state: Processor) -> Array:
    """Return the cycles since line 0 of the frame began."""
    return state.line * CYCLES + state.cycle


def runs(state: Processor, capacity: int) -> Array:
    """Tell which lanes can take a step: those whose frame goes on and that need not wait for the picture."""
    unfinished = (state.ended == RUNNING) | (state.then != 0)
    return unfinished & (state.waits == 0) & (state.logged < capacity)


def step(
    state: Processor, memory: AnyMemory, lanes: Lanes, controls: Controls, active: Array
) -> tuple[Processor, AnyMemory]:
    """Execute one row in the lanes `active`; the others stay as they are."""
    # Fetch and decode.
    banks = lanes.switch(state.banks, state.pc)
    code, first, second = _fetch(state, memory, lanes, banks)
    fresh = state.then == 0
    words = memory.row(jnp.where(fresh, code, state.then + 255))

    def field(name: str) -> Array:
        word, low, width = FIELDS[name]
        return lax.shift_right_logical(words[word], jnp.int32(low)) & ((1 << width) - 1)

    def has(name: str) -> Array:
        word, low, _ = FIELDS[name]
        return (words[word] & _signed(1 << low)) != 0

    length = field("length")
    if lanes.switches:
        # Operand bytes may lie on a hot spot as well: the table of rows tells how many of them are read.
        from_rom = (state.pc & 0x1000) != 0
        banks = jnp.where(length > 1, lanes.switch(banks, state.pc + 1), banks)
        first = jnp.where(from_rom, _code_byte(state.pc + 1, memory, lanes, banks), first)
        banks = jnp.where(length > 2, lanes.switch(banks, state.pc + 2), banks)
        second = jnp.where(from_rom, _code_byte(state.pc + 2, memory, lanes, banks), second)

    words, first, second, banks = memory.settle((words, first, second, banks))

    # Address.
    pointer = (first + jnp.where(has("pointer_plus_x"), state.x, 0)) & 0xFF
    pointed = memory.load(pointer & 0x7F), memory.load((pointer + 1) & 0x7F)
    stack = jnp.where(has("pull"), (state.sp + 1) & 0xFF, state.sp) | 0x100
    pointed = memory.settle(pointed)
    is_indirect, is_zero_page, is_absolute = has("indirect"), has("zero_page"), has("absolute")
    is_stack = has("pull") | has("push")
    base = jnp.where(
        is_indirect,
        pointed[0] | pointed[1] << 8,
        jnp.where(is_stack, stack, jnp.where(is_zero_page, first, first | second << 8)),
    )
    base = jnp.where(field("vector") > 0, 0xFFFD + field("vector"), base)
    address = base + jnp.where(has("plus_x"), state.x, 0) + jnp.where(has("plus_y"), state.y, 0)
    address = jnp.where(is_zero_page, address & 0xFF, address & 0xFFFF)
    crosses = ((base ^ address) & 0xFF00) != 0
    address = jnp.where(has("next_in_page"), (address & 0xFF00) | ((address + 1) & 0xFF), address)

    # Time: all of it passes before the operand is read.
    taken = has("branch") & (((state.status & field("flag")) != 0) == has("flag_on"))
    following = (state.pc + length) & 0xFFFF
    target = (following + (first ^ 0x80) - 0x80) & 0xFFFF
    leaves = ((following ^ target) & 0xFF00) != 0
    cycles = jnp.where(fresh, field("cycles"), 0) + (has("crossing") & crosses)
    cycles = cycles + jnp.where(taken, jnp.where(leaves, 2, 1), 0)
    cycle = state.cycle + cycles
    line = state.line + (cycle >= CYCLES)
    cycle = jnp.where(cycle >= CYCLES, cycle - CYCLES, cycle)

    address, cycle, line = memory.settle((address, cycle, line))
    now = line * CYCLES + cycle

    # Read.
    reads, writes = has("read"), has("write")
    in_cartridge = (address & 0x1000) != 0
    in_tia = (address & 0x1080) == 0
    in_ram = (address & 0x1280) == 0x80
    in_riot = (address & 0x1280) == 0x280
    register = address & 0x0F
    latches = in_tia & reads & (register < 8)
    waits = latches & _unknown(state, lanes, line * 228 + 3 * cycle)
    banks = jnp.where(reads | writes, lanes.switch(banks, address), banks)
    bus = jnp.where(is_indirect, pointed[1], jnp.where(is_absolute, second, first))
    # A pull first reads where the stack pointer stands, and that is seen where the next read is not of the RAM.
    pulled = jnp.where(state.sp == 0xFF, memory.load(jnp.full_like(state.sp, 127)), jnp.where(fresh, code, state.latch))
    bus = jnp.where(is_stack, pulled, bus)
    timed, expired_read, expired_at = _timer(state, now)
    polled = in_riot & reads & ((address & 5) == 4)
    from_riot = _riot(state, controls, address, timed, now)
    from_tia = _tia(state, controls, register, bus, now)
    from_rom = memory.rom(lanes.index(banks, address))
    from_ram = memory.load(lanes.ram_index(address))
    read = jnp.where(in_tia, from_tia, jnp.where(in_riot, from_riot, from_ram))
    read = jnp.where(in_cartridge & ~lanes.reads_extra(address), from_rom, read)
    operand = memory.settle(jnp.where(has("immediate"), first, read))

    # First stage: pass, shift, or one more or less.
    source = field("source")
    return_address = (state.pc + 2) & 0xFFFF
    value = operand
    for number, register_value in (
        (opcodes.A, state.a),
        (opcodes.X, state.x),
        (opcodes.Y, state.y),
        (opcodes.SP, state.sp),
        (opcodes.STATUS, state.status | 0x30),
        (opcodes.PC_HIGH, return_address >> 8),
        (opcodes.PC_LOW, return_address & 0xFF),
        (opcodes.A_AND_X, state.a & state.x),
    ):
        value = jnp.where(source == number, register_value, value)
    carry = state.status & opcodes.CARRY
    left, right, rotates = has("left"), has("right"), jnp.where(has("rotate"), carry, 0)
    change = field("step")
    moved = jnp.where(left, value << 1 | rotates, value) + jnp.where(change == 2, -1, change)
    moved = jnp.where(right, value >> 1 | rotates << 7, moved) & 0xFF
    shifted_out = jnp.where(left, value >> 7, value & 1)

    moved, shifted_out = memory.settle((moved, shifted_out))

    # Second stage: with a register.
    chosen = field("register")
    register_value = jnp.where(chosen == 0, state.a, jnp.where(chosen == 1, state.x, state.y))
    inverts, compares, arithmetic = has("invert"), has("compare"), has("arithmetic")
    carried = jnp.where(left | right, shifted_out, carry)
    total = register_value + jnp.where(inverts, moved ^ 0xFF, moved) + jnp.where(compares, 1, carried)
    alu = field("alu")
    result = jnp.where(alu == opcodes.ADD, total & 0xFF, moved)
    result = jnp.where(alu == opcodes.AND, register_value & moved, result)
    result = jnp.where(alu == opcodes.OR, register_value | moved, result)
    result = jnp.where(alu == opcodes.XOR, register_value ^ moved, result)
    carry_out = total >> 8
    overflow = (register_value ^ total) & (jnp.where(inverts, moved ^ 0xFF, moved) ^ total) & 0x80
    is_decimal = arithmetic & ((state.status & opcodes.DECIMAL) != 0)
    decimal, decimal_carry = _decimal(register_value, moved, carried, inverts)
    result = jnp.where(is_decimal, decimal, result)
    carry_out = jnp.where(is_decimal, decimal_carry, carry_out)
    overflow = jnp.where(is_decimal, (register_value ^ decimal) & (decimal ^ moved) & 0x80, overflow)

    result, moved, carry_out, overflow = memory.settle((result, moved, carry_out, overflow))

    # Flags.
    status = state.status
    zero = jnp.where(result == 0, opcodes.ZERO, 0)
    status = jnp.where(has("sets_nz"), (status & 0x7D) | (result & 0x80) | zero, status)
    tested = (status & 0x3D) | (moved & 0xC0) | zero
    status = jnp.where(has("is_bit"), tested, status)
    status = jnp.where(has("sets_c_shifted"), (status & 0xFE) | shifted_out, status)
    status = jnp.where(has("sets_c_added"), (status & 0xFE) | carry_out, status)
    status = jnp.where(has("sets_v"), (status & 0xBF) | overflow >> 1, status)
    flag = jnp.where(has("sets_flag"), field("flag"), 0)
    status = jnp.where(has("flag_on"), status | flag, status & ~flag)
    status = jnp.where(has("to_status"), moved & _STATUS_MASK, status)

    status = memory.settle(status)

    # Where it goes on.
    popped = ((operand << 8 | state.latch) + (change == 1)) & 0xFFFF
    to_pc = field("to_pc")
    pc = jnp.where(taken, target, following)
    pc = jnp.where(to_pc == opcodes.TO_ADDRESS, first | second << 8, pc)
    pc = jnp.where(to_pc == opcodes.TO_POPPED, popped, pc)
    pc = jnp.where(to_pc == opcodes.TO_STAY, state.pc, pc)

    # Write.
    began, active = active, active & ~waits
    acts = active & writes
    to_tia, to_riot = acts & in_tia, acts & in_riot
    memory = memory.store(lanes.ram_index(address), moved, acts & (in_ram | lanes.writes_extra(address)))
    written = address & 0x3F
    ended = jnp.where(to_tia & (line > LAST_LINE), ENDED, state.ended)
    is_vsync = to_tia & (written == _VSYNC)
    pulses = (moved & 2) != 0
    synced = is_vsync & ~pulses & (now >= state.sync_at)
    ended = jnp.where(synced, ENDED, ended)
    # The picture goes on up to the access that ends the frame, though nothing is written to it.
    closes = (ended == ENDED) & (state.ended == RUNNING)
    sync_at = jnp.where(synced, NEVER, jnp.where(is_vsync & pulses, now + CYCLES, state.sync_at))
    is_vblank = to_tia & (written == _VBLANK)
    dumps = moved >> 7
    dump_at = jnp.where(is_vblank & (state.dumped > dumps), now, state.dump_at)
    low, high = _signed(LOGGED & 0xFFFFFFFF), _signed(LOGGED >> 32)
    kept = lax.shift_right_logical(jnp.where(written < 32, low, high), written & 31) & 1
    logs = to_tia & (kept != 0)
    memory = memory.log(state.logged, jnp.minimum(line, 511) << 21 | cycle << 14 | written << 8 | moved, logs)
    clears = to_tia & (written == 0x2C) & ~_unknown(state, lanes, line * 228 + 3 * cycle)
    waits_sync = to_tia & (written == _WSYNC) & ~has("no_wait") & (cycle != 0)
    sets_timer = to_riot & ((address & 0x14) == 0x14)
    interval = address & 3
    shift = jnp.where(interval == 0, 0, jnp.where(interval == 3, 10, 3 * interval))

    count = jnp.where(fresh, state.instructions + 1, state.instructions)
    jams = active & has("jam")
    cut = active & ((count >= MAX_INSTRUCTIONS) | jams) & (field("then") == 0) & (ended == RUNNING)
    ended = jnp.where(cut, CUT, ended)

    sp = jnp.where(has("pull"), stack, jnp.where(has("push"), state.sp - 1, state.sp))
    sp = jnp.where(has("to_sp"), moved, sp)

    def new(value: Array, old: Array, where: Array = active) -> Array:
        return jnp.where(where, value, old)

    return state._replace(
        a=new(result, state.a, active & has("to_a")),
        x=new(result, state.x, active & has("to_x")),
        y=new(result, state.y, active & has("to_y")),
        sp=new(sp & 0xFF, state.sp),
        pc=new(pc, state.pc),
        status=new(status | 0x30, state.status),
        then=new(field("then"), state.then),
        latch=new(operand, state.latch, active & has("to_latch")),
        line=new(line + waits_sync, state.line),
        cycle=new(jnp.where(waits_sync, 0, cycle), state.cycle),
        banks=new(banks, state.banks),
        timer=new(moved, state.timer, sets_timer),
        shift=new(shift, state.shift, sets_timer),
        set_at=new(now, state.set_at, sets_timer),
        expired_read=jnp.where(sets_timer, 0, new(expired_read, state.expired_read, active & polled)),
        expired_at=new(expired_at, state.expired_at, active & polled),
        direction=new(moved, state.direction, to_riot & ((address & 7) == 1)),
        dumped=new(dumps, state.dumped, is_vblank),
        dump_at=dump_at,
        sync_at=sync_at,
        instructions=new(count, state.instructions),
        ended=ended,
        logged=state.logged + logs,
        collisions=jnp.where(clears, 0, state.collisions),
        waits=jnp.where((began & waits) | closes, now, state.waits),
    ), memory


def _signed(word: int) -> Array:
    """Return 32 bits as an int32."""
    return jnp.int32(word - (1 << 32) if word >> 31 else word)


def _code_byte(pc: Array, memory: Memory, lanes: Lanes, banks: Array) -> Array:
    return memory.rom(lanes.index(banks, pc & 0xFFFF))


def _fetch(state: Processor, memory: Memory, lanes: Lanes, banks: Array) -> tuple[Array, Array, Array]:
    """Return the bytes at the program counter and the two after it.

    Code among the TIA's registers reads as 0, which it is when a console is switched on: StarGunner's first instruction
    lies there, and is a BRK.
    """
    bytes_ = [_code_byte(state.pc + offset, memory, lanes, banks) for offset in range(3)]
    in_ram = (state.pc & 0x1000) == 0

    def from_ram() -> list[Array]:
        found = [memory.load((state.pc + offset) & 0x7F) for offset in range(3)]
        found = [jnp.where(((state.pc + i) & 0x80) == 0, 0, byte) for i, byte in enumerate(found)]
        return [jnp.where(in_ram, byte, other) for byte, other in zip(found, bytes_, strict=True)]

    code, first, second = lax.cond(memory.any(in_ram), from_ram, lambda: bytes_)
    return code, first, second


def _unknown(state: Processor, lanes: Lanes, clock: Array) -> Array:
    """Tell whether collisions may have happened up to `clock` that `state.collisions` does not have."""
    begins, ends = lanes.window
    return (clock > begins) & (state.drawn < jnp.minimum(clock, ends))


def _timer(state: Processor, now: Array) -> tuple[Array, Array, Array]:
    """Return what the timer shows, and its two variables after a read."""
    passed = now - 1 - state.set_at
    counted = lax.shift_right_logical(passed, state.shift)
    shown = state.timer - counted - 1
    over = (state.timer << state.shift) - passed - 1
    is_over = shown < 0
    first = is_over & (over <= -2) & (state.expired_read == 0)
    read = jnp.where(first, 1, state.expired_read)
    at = jnp.where(first, now, state.expired_at)
    late = state.timer - counted - (at - (state.set_at + (state.timer << state.shift)))
    return jnp.where(is_over & (read != 0), late, shown) & 0xFF, read, at


def _riot(state: Processor, controls: Controls, address: Array, timed: Array, now: Array) -> Array:
    """Return what the RIOT's ports and timer read."""
    which = address & 7
    counted = lax.shift_right_logical(now - 1 - state.set_at, state.shift)
    expired = (state.timer - counted - 1 < 0) & (state.expired_read == 0)
    value = jnp.where((which & 1) == 0, timed, jnp.where(expired, 0x80, 0))
    value = jnp.where(which == 3, 0, value)
    value = jnp.where(which == 2, controls.port_b, value)
    value = jnp.where(which == 1, state.direction, value)
    return jnp.where(which == 0, controls.port_a, value)


def _tia(state: Processor, controls: Controls, register: Array, bus: Array, now: Array) -> Array:
    """Return what the TIA's registers read: bits 7 and 6, and below them what was on the bus."""
    value = (lax.shift_right_logical(state.collisions, (register & 7) << 1) & 3) << 6
    charge = controls.charge[0]
    for number in (1, 2, 3):
        charge = jnp.where(register == 8 + number, controls.charge[number], charge)
    begun = state.first_cycle
    full = (now - begun).astype(jnp.uint32) > (state.dump_at - begun + charge).astype(jnp.uint32)
    charged = jnp.where(full & (state.dumped == 0), 0x80, 0)
    value = jnp.where(register >= 8, jnp.where(charge >= 0, charged, charge & 0x80), value)
    value = jnp.where(register == 12, controls.fire[0], jnp.where(register == 13, controls.fire[1], value))
    return jnp.where(register >= 14, 0, value) | (bus & 0x3F)


def _decimal(register: Array, value: Array, carry: Array, subtracts: Array) -> tuple[Array, Array]:
    """Return sum or difference of two bytes of two digits each, and the carry."""
    number = lambda x: 10 * (x >> 4) + (x & 15)
    left, right = number(register), number(value)
    total = jnp.where(subtracts, left - right - (1 - carry), left + right + carry)
    carried = jnp.where(subtracts, register >= value + 1 - carry, total > 99)
    rest = jnp.where(subtracts, jnp.where(total < 0, total + 100, total), total & 0xFF)
    raw = number((rest + 256) & 0xFF)
    small = jnp.where(rest >= 200, rest - 200, jnp.where(rest >= 100, rest - 100, rest))
    tens = (small * 205) >> 11
    digits = tens << 4 | (small - 10 * tens)
    return jnp.where(rest < 0, raw, digits), carried.astype(jnp.int32)
