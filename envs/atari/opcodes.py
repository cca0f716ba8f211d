"""The 6507's instructions as data: what each does in one straight path that every lane of a batch takes.

An instruction is a row of three packed words. It has an address (`Mode`), may read there, passes what it read or a
register through two stages (a shift or a step by one, then an operation with a register) and may write the first
stage's result where it read. So the undocumented instructions that do two things at once are rows as well.

Instructions that write or pull more than once take further rows (`Row` numbers from 256 on), one a step.
Counts of cycles and the order of accesses: MOS Technology's 6500 programming manual, and what ale-py was measured to
do.
"""

from __future__ import annotations

import dataclasses

import numpy as np

CARRY, ZERO, INTERRUPT, DECIMAL, OVERFLOW, NEGATIVE = 1, 2, 4, 8, 64, 128
"""Bits of the status byte; bits 4 and 5 are always set in it."""

# Fields: (word, lowest bit, number of bits).
_WIDTHS = (
    # Where: address = base + index, base by the first of these that is set.
    {
        "zero_page": 1,
        "absolute": 1,
        "indirect": 1,
        "push": 1,
        "pull": 1,
        "vector": 2,  # 1: $FFFE, 2: $FFFF
        "next_in_page": 1,  # the byte after the address, in the same page
        "plus_x": 1,
        "plus_y": 1,
        "pointer_plus_x": 1,
        "immediate": 1,
        "read": 1,
        "write": 1,
        "crossing": 1,  # one cycle more where the index crosses a page
        "length": 2,
        "cycles": 4,
        "no_wait": 1,  # a write after a write: WSYNC does not wait
    },
    # What: source, first stage, second stage, destinations.
    {
        "source": 4,
        "left": 1,
        "right": 1,
        "rotate": 1,
        "step": 2,  # 1: plus one, 2: minus one
        "alu": 3,
        "register": 2,
        "invert": 1,
        "compare": 1,  # carry in is one, decimal mode does not count
        "to_a": 1,
        "to_x": 1,
        "to_y": 1,
        "to_sp": 1,
        "to_status": 1,
        "sets_nz": 1,
        "sets_c_added": 1,
        "sets_c_shifted": 1,
        "sets_v": 1,
        "is_bit": 1,
        "arithmetic": 1,  # decimal mode counts
    },
    # Then: flags by value, branches, the program counter, the row that follows.
    {
        "flag": 8,
        "flag_on": 1,
        "branch": 1,
        "to_pc": 2,
        "to_latch": 1,
        "then": 4,  # 0: the next instruction; n: row 255 + n
        "jam": 1,
        "sets_flag": 1,
    },
)

FIELDS = {
    name: (word, sum(list(widths.values())[:position]), width)
    for word, widths in enumerate(_WIDTHS)
    for position, (name, width) in enumerate(widths.items())
}

MEMORY, A, X, Y, SP, STATUS, PC_HIGH, PC_LOW, A_AND_X = range(9)
PASS, ADD, AND, OR, XOR = range(5)
TO_NEXT, TO_ADDRESS, TO_POPPED, TO_STAY = range(4)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row; the fields are those of `FIELDS`, and those not named are 0."""

    fields: dict[str, int]

    def words(self) -> list[int]:
        """Return the three packed words."""
        words = [0, 0, 0]
        for name, value in self.fields.items():
            word, low, width = FIELDS[name]
            assert 0 <= value < 1 << width, (name, value)
            words[word] |= value << low
        return words


def _row(mode: dict[str, int], cycles: int, **fields: int) -> Row:
    return Row({**mode, "cycles": cycles, **fields})


_IMPLIED = {"length": 1}
_IMMEDIATE = {"immediate": 1, "length": 2}
_ZERO_PAGE = {"zero_page": 1, "length": 2}
_ZERO_PAGE_X = {**_ZERO_PAGE, "plus_x": 1}
_ZERO_PAGE_Y = {**_ZERO_PAGE, "plus_y": 1}
_ABSOLUTE = {"absolute": 1, "length": 3}
_ABSOLUTE_X = {**_ABSOLUTE, "plus_x": 1}
_ABSOLUTE_Y = {**_ABSOLUTE, "plus_y": 1}
_INDIRECT_X = {"indirect": 1, "pointer_plus_x": 1, "length": 2}
_INDIRECT_Y = {"indirect": 1, "plus_y": 1, "length": 2}
_PUSH = {"push": 1, "write": 1}
_PULL = {"pull": 1, "read": 1}

# Cycles by mode: of what reads, stores and does both.
_MODES = {
    "imm": (_IMMEDIATE, 2, 0, 0),
    "zp": (_ZERO_PAGE, 3, 3, 5),
    "zpx": (_ZERO_PAGE_X, 4, 4, 6),
    "zpy": (_ZERO_PAGE_Y, 4, 4, 6),
    "abs": (_ABSOLUTE, 4, 4, 6),
    "abx": (_ABSOLUTE_X, 4, 5, 7),
    "aby": (_ABSOLUTE_Y, 4, 5, 7),
    "inx": (_INDIRECT_X, 6, 6, 8),
    "iny": (_INDIRECT_Y, 5, 6, 8),
}
_INDEXED = ("abx", "aby", "iny")

_LOAD = {"sets_nz": 1}
_ACCUMULATE = {"register": 0, "to_a": 1, "sets_nz": 1}
_ADDS = {**_ACCUMULATE, "alu": ADD, "sets_c_added": 1, "sets_v": 1, "arithmetic": 1}
_SUBTRACTS = {**_ADDS, "invert": 1}
_COMPARES = {"alu": ADD, "invert": 1, "compare": 1, "sets_nz": 1, "sets_c_added": 1}
_LEFT = {"left": 1, "sets_c_shifted": 1, "sets_nz": 1}
_RIGHT = {"right": 1, "sets_c_shifted": 1, "sets_nz": 1}
_UP = {"step": 1, "sets_nz": 1}
_DOWN = {"step": 2, "sets_nz": 1}

_READERS = {
    "ORA": {**_ACCUMULATE, "alu": OR},
    "AND": {**_ACCUMULATE, "alu": AND},
    "EOR": {**_ACCUMULATE, "alu": XOR},
    "ADC": _ADDS,
    "SBC": _SUBTRACTS,
    "LDA": {**_LOAD, "to_a": 1},
    "LDX": {**_LOAD, "to_x": 1},
    "LDY": {**_LOAD, "to_y": 1},
    "LAX": {**_LOAD, "to_a": 1, "to_x": 1},
    "CMP": {**_COMPARES, "register": 0},
    "CPX": {**_COMPARES, "register": 1},
    "CPY": {**_COMPARES, "register": 2},
    "BIT": {"register": 0, "alu": AND, "is_bit": 1},
    "NOP": {},
}
_STORES = {"STA": A, "STX": X, "STY": Y, "SAX": A_AND_X}
_MODIFIERS = {
    "ASL": _LEFT,
    "ROL": {**_LEFT, "rotate": 1},
    "LSR": _RIGHT,
    "ROR": {**_RIGHT, "rotate": 1},
    "INC": _UP,
    "DEC": _DOWN,
    "SLO": {**_LEFT, **_ACCUMULATE, "alu": OR},
    "RLA": {**_LEFT, "rotate": 1, **_ACCUMULATE, "alu": AND},
    "SRE": {**_RIGHT, **_ACCUMULATE, "alu": XOR},
    "RRA": {**_RIGHT, "rotate": 1, **_ADDS, "sets_c_shifted": 0},
    "DCP": {**_DOWN, **_COMPARES, "register": 0},
    "ISB": {**_UP, **_SUBTRACTS},
}

# Where the instructions of several modes stand: mode by opcode.
_OPCODES = {
    "ORA": {"imm": 0x09, "zp": 0x05, "zpx": 0x15, "abs": 0x0D, "abx": 0x1D, "aby": 0x19, "inx": 0x01, "iny": 0x11},
    "AND": {"imm": 0x29, "zp": 0x25, "zpx": 0x35, "abs": 0x2D, "abx": 0x3D, "aby": 0x39, "inx": 0x21, "iny": 0x31},
    "EOR": {"imm": 0x49, "zp": 0x45, "zpx": 0x55, "abs": 0x4D, "abx": 0x5D, "aby": 0x59, "inx": 0x41, "iny": 0x51},
    "ADC": {"imm": 0x69, "zp": 0x65, "zpx": 0x75, "abs": 0x6D, "abx": 0x7D, "aby": 0x79, "inx": 0x61, "iny": 0x71},
    "SBC": {"imm": 0xE9, "zp": 0xE5, "zpx": 0xF5, "abs": 0xED, "abx": 0xFD, "aby": 0xF9, "inx": 0xE1, "iny": 0xF1},
    "LDA": {"imm": 0xA9, "zp": 0xA5, "zpx": 0xB5, "abs": 0xAD, "abx": 0xBD, "aby": 0xB9, "inx": 0xA1, "iny": 0xB1},
    "CMP": {"imm": 0xC9, "zp": 0xC5, "zpx": 0xD5, "abs": 0xCD, "abx": 0xDD, "aby": 0xD9, "inx": 0xC1, "iny": 0xD1},
    "STA": {"zp": 0x85, "zpx": 0x95, "abs": 0x8D, "abx": 0x9D, "aby": 0x99, "inx": 0x81, "iny": 0x91},
    "LDX": {"imm": 0xA2, "zp": 0xA6, "zpy": 0xB6, "abs": 0xAE, "aby": 0xBE},
    "LDY": {"imm": 0xA0, "zp": 0xA4, "zpx": 0xB4, "abs": 0xAC, "abx": 0xBC},
    "LAX": {"zp": 0xA7, "zpy": 0xB7, "abs": 0xAF, "aby": 0xBF, "inx": 0xA3, "iny": 0xB3},
    "CPX": {"imm": 0xE0, "zp": 0xE4, "abs": 0xEC},
    "CPY": {"imm": 0xC0, "zp": 0xC4, "abs": 0xCC},
    "BIT": {"zp": 0x24, "abs": 0x2C},
    "STX": {"zp": 0x86, "zpy": 0x96, "abs": 0x8E},
    "STY": {"zp": 0x84, "zpx": 0x94, "abs": 0x8C},
    "SAX": {"zp": 0x87, "zpy": 0x97, "abs": 0x8F, "inx": 0x83},
    "ASL": {"zp": 0x06, "zpx": 0x16, "abs": 0x0E, "abx": 0x1E},
    "ROL": {"zp": 0x26, "zpx": 0x36, "abs": 0x2E, "abx": 0x3E},
    "LSR": {"zp": 0x46, "zpx": 0x56, "abs": 0x4E, "abx": 0x5E},
    "ROR": {"zp": 0x66, "zpx": 0x76, "abs": 0x6E, "abx": 0x7E},
    "INC": {"zp": 0xE6, "zpx": 0xF6, "abs": 0xEE, "abx": 0xFE},
    "DEC": {"zp": 0xC6, "zpx": 0xD6, "abs": 0xCE, "abx": 0xDE},
    "SLO": {"zp": 0x07, "zpx": 0x17, "abs": 0x0F, "abx": 0x1F, "aby": 0x1B, "inx": 0x03, "iny": 0x13},
    "RLA": {"zp": 0x27, "zpx": 0x37, "abs": 0x2F, "abx": 0x3F, "aby": 0x3B, "inx": 0x23, "iny": 0x33},
    "SRE": {"zp": 0x47, "zpx": 0x57, "abs": 0x4F, "abx": 0x5F, "aby": 0x5B, "inx": 0x43, "iny": 0x53},
    "RRA": {"zp": 0x67, "zpx": 0x77, "abs": 0x6F, "abx": 0x7F, "aby": 0x7B, "inx": 0x63, "iny": 0x73},
    "DCP": {"zp": 0xC7, "zpx": 0xD7, "abs": 0xCF, "abx": 0xDF, "aby": 0xDB, "inx": 0xC3, "iny": 0xD3},
    "ISB": {"zp": 0xE7, "zpx": 0xF7, "abs": 0xEF, "abx": 0xFF, "aby": 0xFB, "inx": 0xE3, "iny": 0xF3},
}
_NOPS = {
    "zp": (0x04, 0x44, 0x64),
    "zpx": (0x14, 0x34, 0x54, 0x74, 0xD4, 0xF4),
    "abs": (0x0C,),
    "abx": (0x1C, 0x3C, 0x5C, 0x7C, 0xDC, 0xFC),
    "imm": (0x80, 0x82, 0x89, 0xC2, 0xE2),
}
_JAMS = (0x02, 0x12, 0x22, 0x32, 0x42, 0x52, 0x62, 0x72, 0x92, 0xB2, 0xD2, 0xF2)

# Undocumented ones that no game of the 57 executes and whose results depend on more than this path has: they pass.
_IGNORED = {
    "imm": (0x0B, 0x2B, 0x4B, 0x6B, 0x8B, 0xAB, 0xCB),
    "aby": (0x9B, 0xBB, 0x9E, 0x9F),
    "abx": (0x9C,),
    "iny": (0x93,),
}
_STORING = (0x93, 0x9B, 0x9C, 0x9E, 0x9F)
IGNORED = tuple(sorted(code for codes in _IGNORED.values() for code in codes))
"""Undocumented opcodes that do nothing here but take their time."""

_BRANCHES = {
    0x10: (NEGATIVE, 0),
    0x30: (NEGATIVE, 1),
    0x50: (OVERFLOW, 0),
    0x70: (OVERFLOW, 1),
    0x90: (CARRY, 0),
    0xB0: (CARRY, 1),
    0xD0: (ZERO, 0),
    0xF0: (ZERO, 1),
}
_FLAGS = {
    0x18: (CARRY, 0),
    0x38: (CARRY, 1),
    0x58: (INTERRUPT, 0),
    0x78: (INTERRUPT, 1),
    0xB8: (OVERFLOW, 0),
    0xD8: (DECIMAL, 0),
    0xF8: (DECIMAL, 1),
}

# Rows that go on with an instruction; `then` names them by their position here, counted from 1.
_JSR_2, _RTS_2, _RTI_2, _RTI_3, _BRK_2, _BRK_3, _BRK_4, _BRK_5, _JMP_2 = range(1, 10)


def _documented_alone() -> dict[int, Row]:
    """Return the instructions that have one mode."""
    stay = {"to_pc": TO_STAY}
    rows = {
        0x0A: _row(_IMPLIED, 2, source=A, to_a=1, **_LEFT),
        0x2A: _row(_IMPLIED, 2, source=A, to_a=1, rotate=1, **_LEFT),
        0x4A: _row(_IMPLIED, 2, source=A, to_a=1, **_RIGHT),
        0x6A: _row(_IMPLIED, 2, source=A, to_a=1, rotate=1, **_RIGHT),
        0xAA: _row(_IMPLIED, 2, source=A, to_x=1, **_LOAD),
        0xA8: _row(_IMPLIED, 2, source=A, to_y=1, **_LOAD),
        0x8A: _row(_IMPLIED, 2, source=X, to_a=1, **_LOAD),
        0x98: _row(_IMPLIED, 2, source=Y, to_a=1, **_LOAD),
        0xBA: _row(_IMPLIED, 2, source=SP, to_x=1, **_LOAD),
        0x9A: _row(_IMPLIED, 2, source=X, to_sp=1),
        0xE8: _row(_IMPLIED, 2, source=X, to_x=1, **_UP),
        0xC8: _row(_IMPLIED, 2, source=Y, to_y=1, **_UP),
        0xCA: _row(_IMPLIED, 2, source=X, to_x=1, **_DOWN),
        0x88: _row(_IMPLIED, 2, source=Y, to_y=1, **_DOWN),
        0x48: _row({**_PUSH, **_IMPLIED}, 3, source=A),
        0x08: _row({**_PUSH, **_IMPLIED}, 3, source=STATUS),
        0x68: _row({**_PULL, **_IMPLIED}, 4, to_a=1, **_LOAD),
        0x28: _row({**_PULL, **_IMPLIED}, 4, to_status=1),
        0x4C: _row(_ABSOLUTE, 3, to_pc=TO_ADDRESS),
        0x6C: _row({**_ABSOLUTE, "read": 1}, 5, to_latch=1, then=_JMP_2, **stay),
        0x20: _row({**_PUSH, "length": 3}, 6, source=PC_HIGH, then=_JSR_2, **stay),
        0x60: _row({**_PULL, **_IMPLIED}, 6, to_latch=1, then=_RTS_2, **stay),
        0x40: _row({**_PULL, **_IMPLIED}, 6, to_latch=1, to_status=1, then=_RTI_2, **stay),
        0x00: _row({**_PUSH, "length": 2}, 7, source=PC_HIGH, then=_BRK_2, **stay),
    }
    for code in (0xEA, 0x1A, 0x3A, 0x5A, 0x7A, 0xDA, 0xFA):
        rows[code] = _row(_IMPLIED, 2)
    for code, (flag, on) in _FLAGS.items():
        rows[code] = _row(_IMPLIED, 2, flag=flag, flag_on=on, sets_flag=1)
    for code, (flag, on) in _BRANCHES.items():
        rows[code] = _row({"length": 2}, 2, flag=flag, flag_on=on, branch=1)
    for code in _JAMS:
        rows[code] = _row(_IMPLIED, 0, jam=1, to_pc=TO_STAY)
    return rows


def _continued() -> dict[int, Row]:
    """Return the rows from 256 on; they take no cycles, as an instruction's are all counted when it begins."""
    stay = {"to_pc": TO_STAY}
    rows = {
        # JSR's target is where its operand says: the row writes to the stack, and jumps.
        _JSR_2: _row({**_PUSH, "length": 3}, 0, source=PC_LOW, to_pc=TO_ADDRESS, no_wait=1),
        _RTS_2: _row({**_PULL, **_IMPLIED}, 0, to_pc=TO_POPPED, step=1),
        _RTI_2: _row({**_PULL, **_IMPLIED}, 0, to_latch=1, then=_RTI_3, **stay),
        _RTI_3: _row({**_PULL, **_IMPLIED}, 0, to_pc=TO_POPPED),
        _BRK_2: _row({**_PUSH, **_IMPLIED}, 0, source=PC_LOW, then=_BRK_3, no_wait=1, **stay),
        _BRK_3: _row(
            {**_PUSH, **_IMPLIED},
            0,
            source=STATUS,
            then=_BRK_4,
            no_wait=1,
            flag=INTERRUPT,
            flag_on=1,
            sets_flag=1,
            **stay,
        ),
        _BRK_4: _row({"vector": 1, "read": 1, "length": 1}, 0, to_latch=1, then=_BRK_5, **stay),
        _BRK_5: _row({"vector": 2, "read": 1, "length": 1}, 0, to_pc=TO_POPPED),
        _JMP_2: _row({**_ABSOLUTE, "read": 1, "next_in_page": 1}, 0, to_pc=TO_POPPED),
    }
    return {255 + position: row for position, row in rows.items()}


def rows() -> list[Row]:
    """Return all rows: 256 opcodes and those that go on with one."""
    table = {**_documented_alone(), **_continued()}

    def add(code: int, row: Row) -> None:
        assert code not in table, hex(code)
        table[code] = row

    for name, places in _OPCODES.items():
        for mode, code in places.items():
            where, reads, stores, modifies = _MODES[mode]
            crossing = int(mode in _INDEXED)
            if name in _STORES:
                add(code, _row({**where, "write": 1}, stores, source=_STORES[name]))
            elif name in _MODIFIERS:
                add(code, _row({**where, "read": 1, "write": 1}, modifies, **_MODIFIERS[name]))
            else:
                read = {} if mode == "imm" else {"read": 1}
                add(code, _row({**where, **read, "crossing": crossing}, reads, **_READERS[name]))
    for mode, codes in _NOPS.items():
        for code in codes:
            read = {} if mode == "imm" else {"read": 1}
            add(code, _row({**_MODES[mode][0], **read, "crossing": int(mode in _INDEXED)}, _MODES[mode][1]))
    for mode, codes in _IGNORED.items():
        for code in codes:
            where, reads, stores, _ = _MODES[mode]
            add(code, _row(where, stores if code in _STORING else reads))
    add(0xEB, _row(_IMMEDIATE, 2, **_SUBTRACTS))
    # The one count in which ale-py differs from the manual: 4, not 3.
    table[0xA7] = Row({**table[0xA7].fields, "cycles": 4})
    return [table[code] for code in range(256 + 9)]


def table() -> np.ndarray:
    """Return the packed rows, int32 [265, 3]."""
    return np.array([row.words() for row in rows()], np.int64).astype(np.uint32).view(np.int32)
