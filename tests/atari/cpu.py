"""The 6507 of the scalar core: 256 opcodes as functions of a console, built from one table of mnemonics.

An operation sees a console with `A X Y SP PC`, the flags `N V D I Z C` as 0 or 1, the clock `T`, and `read`, `write`
and `fetch`, which move bytes over the bus. A whole instruction's base cycles are added to `T` before its function is
called, so that every access of the instruction happens at its last cycle (SPEC 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Operation = Callable[..., Any]

# Two rows of sixteen opcodes a line. The addressing mode follows from the low five bits, see `addressing_mode`.
MNEMONICS = """
BRK ORA JAM SLO NOP ORA ASL SLO PHP ORA ASL ANC NOP ORA ASL SLO  BPL ORA JAM SLO NOP ORA ASL SLO CLC ORA NOP SLO NOP ORA ASL SLO
JSR AND JAM RLA BIT AND ROL RLA PLP AND ROL ANC BIT AND ROL RLA  BMI AND JAM RLA NOP AND ROL RLA SEC AND NOP RLA NOP AND ROL RLA
RTI EOR JAM SRE NOP EOR LSR SRE PHA EOR LSR ASR JMP EOR LSR SRE  BVC EOR JAM SRE NOP EOR LSR SRE CLI EOR NOP SRE NOP EOR LSR SRE
RTS ADC JAM RRA NOP ADC ROR RRA PLA ADC ROR ARR JMP ADC ROR RRA  BVS ADC JAM RRA NOP ADC ROR RRA SEI ADC NOP RRA NOP ADC ROR RRA
NOP STA NOP SAX STY STA STX SAX DEY NOP TXA ANE STY STA STX SAX  BCC STA JAM SHA STY STA STX SAX TYA STA TXS SHS SHY STA SHX SHA
LDY LDA LDX LAX LDY LDA LDX LAX TAY LDA TAX LXA LDY LDA LDX LAX  BCS LDA JAM LAX LDY LDA LDX LAX CLV LDA TSX LAS LDY LDA LDX LAX
CPY CMP NOP DCP CPY CMP DEC DCP INY CMP DEX SBX CPY CMP DEC DCP  BNE CMP JAM DCP NOP CMP DEC DCP CLD CMP NOP DCP NOP CMP DEC DCP
CPX SBC NOP ISB CPX SBC INC ISB INX SBC NOP SBC CPX SBC INC ISB  BEQ SBC JAM ISB NOP SBC INC ISB SED SBC NOP ISB NOP SBC INC ISB
""".split()  # noqa: E501


def addressing_mode(opcode: int) -> str:
    """Return how this opcode finds its operand."""
    mnemonic, column = MNEMONICS[opcode], opcode & 0x1F
    if mnemonic in ("BRK", "JSR", "RTI", "RTS", "JAM", "JMP"):
        return "jump"
    if column == 0x10:
        return "relative"
    if column in (0x00, 0x02, 0x09, 0x0B):
        return "immediate"
    if column == 0x0A and mnemonic in ("ASL", "ROL", "LSR", "ROR"):
        return "accumulator"
    if column in (0x08, 0x0A, 0x18, 0x1A):
        return "implied"
    index_y = mnemonic in ("STX", "SAX", "LDX", "LAX", "SHX", "SHA")
    return {
        0x00: "(zero page,X)",
        0x04: "zero page",
        0x0C: "absolute",
        0x10: "(zero page),Y",
        0x14: "zero page,Y" if index_y else "zero page,X",
        0x18: "absolute,Y",
        0x1C: "absolute,Y" if index_y else "absolute,X",
    }[column & 0x1C]


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def set_nz(c: Any, value: int) -> int:
    """Set N and Z from a byte, and return the byte."""
    c.N = value >> 7
    c.Z = 0 if value else 1
    return value


def from_digits(byte: int) -> int:
    """Return ten times the high nibble plus the low nibble, whether they are digits or not."""
    return 10 * (byte >> 4) + (byte & 15)


def to_digits(value: int) -> int:
    """Return the byte of two decimal digits of a number below 100."""
    return value // 10 << 4 | value % 10


def adc(c: Any, m: int) -> None:
    """Add with carry, SPEC 3.4."""
    a = c.A
    if c.D:
        total = from_digits(a) + from_digits(m) + c.C
        result = to_digits((total & 0xFF) % 100)
        c.C = 1 if total > 99 else 0
        c.V = ((a ^ result) & (result ^ m)) >> 7
    else:
        total = a + m + c.C
        result = total & 0xFF
        c.C = total >> 8
        c.V = ((a ^ result) & (m ^ result)) >> 7
    c.A = result
    c.N = result >> 7
    c.Z = 0 if result else 1


def sbc(c: Any, m: int) -> None:
    """Subtract with borrow, SPEC 3.4."""
    if not c.D:
        adc(c, m ^ 0xFF)
        return
    a, borrow = c.A, 1 - c.C
    difference = from_digits(a) - from_digits(m) - borrow
    if difference < 0:
        difference += 100
    # With invalid digits it may still be negative.
    result = to_digits(difference % 100) if difference >= 0 else from_digits(256 + difference)
    c.C = 1 if a >= m + borrow else 0
    c.V = ((a ^ result) & (result ^ m)) >> 7
    c.A = set_nz(c, result)


def compare(c: Any, register: int, m: int) -> None:
    """Set N, Z and C as register minus operand does."""
    c.C = 1 if register >= m else 0
    set_nz(c, register - m & 0xFF)


def lda(c: Any, m: int) -> None:
    c.A = m
    c.N = m >> 7
    c.Z = 0 if m else 1


def ldx(c: Any, m: int) -> None:
    c.X = set_nz(c, m)


def ldy(c: Any, m: int) -> None:
    c.Y = set_nz(c, m)


def ora(c: Any, m: int) -> None:
    c.A = set_nz(c, c.A | m)


def and_(c: Any, m: int) -> None:
    c.A = set_nz(c, c.A & m)


def eor(c: Any, m: int) -> None:
    c.A = set_nz(c, c.A ^ m)


def bit(c: Any, m: int) -> None:
    c.N, c.V, c.Z = m >> 7, m >> 6 & 1, 0 if m & c.A else 1


def nop(c: Any, m: int = 0) -> None:
    """Do nothing with the operand, which was read."""


def lax(c: Any, m: int) -> None:
    c.A = c.X = set_nz(c, m)


def las(c: Any, m: int) -> None:
    c.A = c.X = c.SP = set_nz(c, m & c.SP)


def anc(c: Any, m: int) -> None:
    and_(c, m)
    c.C = c.N


def asr(c: Any, m: int) -> None:
    c.A = lsr(c, c.A & m)


def arr(c: Any, m: int) -> None:
    """And, then rotate right, with flags of its own; decimal as in "No More Secrets"."""
    masked = c.A & m
    result = masked >> 1 | c.C << 7
    set_nz(c, result)
    c.V = (result >> 6 ^ result >> 5) & 1
    if not c.D:
        c.C = result >> 6 & 1
    else:
        if (masked & 0x0F) + (masked & 0x01) > 5:
            result = result & 0xF0 | result + 6 & 0x0F
        c.C = 1 if (masked & 0xF0) + (masked & 0x10) > 0x50 else 0
        if c.C:
            result = result + 0x60 & 0xFF
    c.A = result


def sbx(c: Any, m: int) -> None:
    masked = c.A & c.X
    compare(c, masked, m)
    c.X = masked - m & 0xFF


def ane(c: Any, m: int) -> None:
    c.A = set_nz(c, (c.A | 0xEE) & c.X & m)


def lxa(c: Any, m: int) -> None:
    c.A = c.X = set_nz(c, (c.A | 0xEE) & m)


READERS: dict[str, Operation] = {
    "ADC": adc, "SBC": sbc, "LDA": lda, "LDX": ldx, "LDY": ldy, "ORA": ora, "AND": and_, "EOR": eor, "BIT": bit,
    "CMP": lambda c, m: compare(c, c.A, m), "CPX": lambda c, m: compare(c, c.X, m),
    "CPY": lambda c, m: compare(c, c.Y, m), "NOP": nop, "LAX": lax, "LAS": las, "ANC": anc, "ASR": asr, "ARR": arr,
    "SBX": sbx, "ANE": ane, "LXA": lxa,
}  # fmt: skip


# Read-modify-write operations return the byte to write.


def asl(c: Any, m: int) -> int:
    c.C = m >> 7
    return set_nz(c, m << 1 & 0xFF)


def lsr(c: Any, m: int) -> int:
    c.C = m & 1
    return set_nz(c, m >> 1)


def rol(c: Any, m: int) -> int:
    result = (m << 1 | c.C) & 0xFF
    c.C = m >> 7
    return set_nz(c, result)


def ror(c: Any, m: int) -> int:
    result = m >> 1 | c.C << 7
    c.C = m & 1
    return set_nz(c, result)


def inc(c: Any, m: int) -> int:
    return set_nz(c, m + 1 & 0xFF)


def dec(c: Any, m: int) -> int:
    return set_nz(c, m - 1 & 0xFF)


def _then(modify: Operation, read: Operation) -> Operation:
    def both(c: Any, m: int) -> int:
        result = modify(c, m)
        read(c, result)
        return result

    return both


MODIFIERS: dict[str, Operation] = {
    "ASL": asl, "LSR": lsr, "ROL": rol, "ROR": ror, "INC": inc, "DEC": dec, "SLO": _then(asl, ora),
    "RLA": _then(rol, and_), "SRE": _then(lsr, eor), "RRA": _then(ror, adc), "DCP": _then(dec, READERS["CMP"]),
    "ISB": _then(inc, sbc),
}  # fmt: skip


def shs(c: Any, address: int) -> int:
    c.SP = c.A & c.X
    return c.SP & (address >> 8) + 1


# Stores return the byte to write; some depend on the address.
STORES: dict[str, Operation] = {
    "STA": lambda c, address: c.A,
    "STX": lambda c, address: c.X,
    "STY": lambda c, address: c.Y,
    "SAX": lambda c, address: c.A & c.X,
    "SHA": lambda c, address: c.A & c.X & (address >> 8) + 1,
    "SHX": lambda c, address: c.X & (address >> 8) + 1,
    "SHY": lambda c, address: c.Y & (address >> 8) + 1,
    "SHS": shs,
}


# ---- implied, branches, jumps and the stack --------------------------------------------------------------------------


def _set(flag: str, value: int) -> Operation:
    return lambda c: setattr(c, flag, value)


def _move(source: str, target: str) -> Operation:
    return lambda c: setattr(c, target, set_nz(c, getattr(c, source)))


def _step(register: str, by: int) -> Operation:
    return lambda c: setattr(c, register, set_nz(c, getattr(c, register) + by & 0xFF))


def push(c: Any, value: int) -> None:
    """Store a byte at the stack pointer, which may reach the TIA."""
    c.write(0x100 | c.SP, value)
    c.SP = c.SP - 1 & 0xFF


def pull(c: Any) -> int:
    """Return the next byte of the stack."""
    c.SP = c.SP + 1 & 0xFF
    return c.read(0x100 | c.SP)


def pull_first(c: Any) -> int:
    """Read the stack once in vain, as the first pull of an instruction does, then pull."""
    c.read(0x100 | c.SP)
    return pull(c)


def pla(c: Any) -> None:
    c.A = set_nz(c, pull_first(c))


def brk(c: Any) -> None:
    c.fetch()
    push(c, c.PC >> 8)
    push(c, c.PC & 0xFF)
    push(c, c.status())
    c.I = 1
    low = c.read(0xFFFE)
    c.PC = low | c.read(0xFFFF) << 8


def jsr(c: Any) -> None:
    low = c.fetch()
    c.read(0x100 | c.SP)
    push(c, c.PC >> 8)
    push(c, c.PC & 0xFF)
    c.PC = low | c.read(c.PC) << 8


def rts(c: Any) -> None:
    low = pull_first(c)
    c.PC = low | pull(c) << 8
    c.fetch()


def rti(c: Any) -> None:
    c.set_status(pull_first(c))
    low = pull(c)
    c.PC = low | pull(c) << 8


def jmp(c: Any) -> None:
    c.PC = absolute(c)


def jmp_indirect(c: Any) -> None:
    pointer = absolute(c)
    low = c.read(pointer)
    c.PC = low | c.read(pointer & 0xFF00 | pointer + 1 & 0xFF) << 8


def jam(c: Any) -> None:
    c.jammed = True


def _branch(flag: str, wanted: int) -> Operation:
    def branch(c: Any) -> None:
        offset = c.fetch()
        if getattr(c, flag) == wanted:
            target = c.PC + (offset ^ 0x80) - 0x80 & 0xFFFF
            c.T += 1 if (target ^ c.PC) < 0x100 else 2
            c.PC = target

    return branch


IMPLIED: dict[str, Operation] = {
    "CLC": _set("C", 0), "SEC": _set("C", 1), "CLI": _set("I", 0), "SEI": _set("I", 1), "CLD": _set("D", 0),
    "SED": _set("D", 1), "CLV": _set("V", 0), "TAX": _move("A", "X"), "TXA": _move("X", "A"), "TAY": _move("A", "Y"),
    "TYA": _move("Y", "A"), "TSX": _move("SP", "X"), "TXS": lambda c: setattr(c, "SP", c.X), "INX": _step("X", 1),
    "DEX": _step("X", -1), "INY": _step("Y", 1), "DEY": _step("Y", -1), "NOP": nop, "PHA": lambda c: push(c, c.A),
    "PHP": lambda c: push(c, c.status()), "PLA": pla, "PLP": lambda c: c.set_status(pull_first(c)),
}  # fmt: skip
STACK_CYCLES = {"PHA": 3, "PHP": 3, "PLA": 4, "PLP": 4}
BRANCHES: dict[str, Operation] = {
    "BPL": _branch("N", 0), "BMI": _branch("N", 1), "BVC": _branch("V", 0), "BVS": _branch("V", 1),
    "BCC": _branch("C", 0), "BCS": _branch("C", 1), "BNE": _branch("Z", 0), "BEQ": _branch("Z", 1),
}  # fmt: skip
JUMPS: dict[int, tuple[Operation, int]] = {
    0x00: (brk, 7), 0x20: (jsr, 6), 0x40: (rti, 6), 0x60: (rts, 6), 0x4C: (jmp, 3), 0x6C: (jmp_indirect, 5),
}  # fmt: skip


# ---- addressing ------------------------------------------------------------------------------------------------------


def zero_page(c: Any) -> int:
    return c.fetch()


def zero_page_x(c: Any) -> int:
    return c.fetch() + c.X & 0xFF


def zero_page_y(c: Any) -> int:
    return c.fetch() + c.Y & 0xFF


def absolute(c: Any) -> int:
    low = c.fetch()
    return low | c.fetch() << 8


def absolute_x(c: Any) -> int:
    low = c.fetch()
    return (low | c.fetch() << 8) + c.X & 0xFFFF


def absolute_y(c: Any) -> int:
    low = c.fetch()
    return (low | c.fetch() << 8) + c.Y & 0xFFFF


def indirect_x(c: Any) -> int:
    pointer = c.fetch() + c.X & 0xFF
    low = c.read(pointer)
    return low | c.read(pointer + 1 & 0xFF) << 8


def indirect_y(c: Any) -> int:
    pointer = c.fetch()
    low = c.read(pointer)
    return (low | c.read(pointer + 1 & 0xFF) << 8) + c.Y & 0xFFFF


# The same for instructions that only read: a crossed page costs a cycle, before the operand is read.


def absolute_x_reading(c: Any) -> int:
    low = c.fetch()
    high = c.fetch()
    if low + c.X > 0xFF:
        c.T += 1
    return (low | high << 8) + c.X & 0xFFFF


def absolute_y_reading(c: Any) -> int:
    low = c.fetch()
    high = c.fetch()
    if low + c.Y > 0xFF:
        c.T += 1
    return (low | high << 8) + c.Y & 0xFFFF


def indirect_y_reading(c: Any) -> int:
    pointer = c.fetch()
    low = c.read(pointer)
    high = c.read(pointer + 1 & 0xFF)
    if low + c.Y > 0xFF:
        c.T += 1
    return (low | high << 8) + c.Y & 0xFFFF


# Mode: (address, address when only reading, cycles of a read, of a store, of a read-modify-write).
MODES: dict[str, tuple[Operation, Operation, int, int, int]] = {
    "zero page": (zero_page, zero_page, 3, 3, 5),
    "zero page,X": (zero_page_x, zero_page_x, 4, 4, 6),
    "zero page,Y": (zero_page_y, zero_page_y, 4, 4, 6),
    "absolute": (absolute, absolute, 4, 4, 6),
    "absolute,X": (absolute_x, absolute_x_reading, 4, 5, 7),
    "absolute,Y": (absolute_y, absolute_y_reading, 4, 5, 7),
    "(zero page,X)": (indirect_x, indirect_x, 6, 6, 8),
    "(zero page),Y": (indirect_y, indirect_y_reading, 5, 6, 8),
}


# ---- the table of opcodes --------------------------------------------------------------------------------------------


def _reading(operation: Operation, address: Operation) -> Operation:
    return lambda c: operation(c, c.read(address(c)))


def _immediate(operation: Operation) -> Operation:
    return lambda c: operation(c, c.fetch())


def _modifying(operation: Operation, address: Operation) -> Operation:
    def run(c: Any) -> None:
        at = address(c)
        c.write(at, operation(c, c.read(at)))

    return run


def _modifying_a(operation: Operation) -> Operation:
    return lambda c: setattr(c, "A", operation(c, c.A))


def _storing(operation: Operation, address: Operation) -> Operation:
    def run(c: Any) -> None:
        at = address(c)
        c.write(at, operation(c, at))

    return run


def _opcode(opcode: int) -> tuple[Operation, int]:
    """Return the function of an opcode and its base cycles."""
    mnemonic, mode = MNEMONICS[opcode], addressing_mode(opcode)
    if mnemonic == "JAM":
        return jam, 2
    if mode == "jump":
        return JUMPS[opcode]
    if mode == "relative":
        return BRANCHES[mnemonic], 2
    if mode == "implied":
        return IMPLIED[mnemonic], STACK_CYCLES.get(mnemonic, 2)
    if mode == "accumulator":
        return _modifying_a(MODIFIERS[mnemonic]), 2
    if mode == "immediate":
        return _immediate(READERS[mnemonic]), 2
    address, address_reading, read_cycles, store_cycles, modify_cycles = MODES[mode]
    if mnemonic in STORES:
        return _storing(STORES[mnemonic], address), store_cycles
    if mnemonic in MODIFIERS:
        return _modifying(MODIFIERS[mnemonic], address), modify_cycles
    return _reading(READERS[mnemonic], address_reading), read_cycles + (opcode == 0xA7)  # LAX zero page: one more.


OPERATIONS: list[Operation] = [_opcode(opcode)[0] for opcode in range(256)]
CYCLES: list[int] = [_opcode(opcode)[1] for opcode in range(256)]
