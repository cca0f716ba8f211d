"""Cartridges of the scalar core: how an address of the 13-bit bus finds its byte (SPEC 9)."""

from __future__ import annotations


class Cartridge:
    """A cartridge of up to 4K without banks; 2K are repeated. Addresses are the CPU's, 16 bits wide."""

    def __init__(self, image: bytes):
        self.image = image * (4096 // len(image)) if len(image) < 4096 else image
        self.bank = 0
        self.reset()

    def reset(self) -> None:
        """Select what is selected after a system reset."""

    def read(self, address: int) -> int:
        """Return the byte at an address with A12 set; may switch banks first."""
        return self.image[address & 0xFFF]

    def write(self, address: int, value: int) -> None:
        """Take a write to an address with A12 set, which a ROM ignores."""

    def peek(self, address: int) -> int:
        """Return what is selected at an address, without switching banks."""
        return self.read(address)


class Banked(Cartridge):
    """F8 and F6: an access to one of the hot spots selects a whole 4K bank."""

    def __init__(self, image: bytes, first_hot_spot: int, reset_bank: int):
        self.first, self.num_banks, self.reset_bank = first_hot_spot, len(image) // 4096, reset_bank
        super().__init__(image)

    def reset(self) -> None:
        self.select(self.reset_bank)

    def select(self, bank: int) -> None:
        """Show this bank at $1000-$1FFF."""
        self.bank = bank
        self.window = self.image[4096 * bank : 4096 * bank + 4096]

    def touch(self, offset: int) -> None:
        """Select a bank if the offset in the window is a hot spot."""
        if self.first <= offset < self.first + self.num_banks:
            self.select(offset - self.first)

    def read(self, address: int) -> int:
        offset = address & 0xFFF
        if offset >= self.first:
            self.touch(offset)
        return self.window[offset]

    def write(self, address: int, value: int) -> None:
        self.touch(address & 0xFFF)

    def peek(self, address: int) -> int:
        return self.window[address & 0xFFF]


class Banked1K(Cartridge):
    """E0: four segments of 1K, three of which show any of eight slices; the last is always slice 7."""

    def reset(self) -> None:
        self.slices = [4, 5, 6, 7]

    def touch(self, offset: int) -> None:
        """Select a slice if the offset in the window is a hot spot."""
        if 0xFE0 <= offset < 0xFF8:
            self.slices[(offset - 0xFE0) >> 3] = offset & 7

    def read(self, address: int) -> int:
        offset = address & 0xFFF
        self.touch(offset)
        return self.peek(offset)

    def peek(self, address: int) -> int:
        offset = address & 0xFFF
        return self.image[self.slices[offset >> 10] << 10 | offset & 0x3FF]

    def write(self, address: int, value: int) -> None:
        self.touch(address & 0xFFF)


class BankedByA13(Cartridge):
    """FE: bit 13 of the CPU's address set shows the lower 4K, clear the upper."""

    def read(self, address: int) -> int:
        return self.image[address & 0xFFF | (0 if address & 0x2000 else 0x1000)]


class WithExtraRam(Banked):
    """The SC variants: 128 bytes, random after a system reset, written at $1000-$107F and read at $1080-$10FF."""

    def __init__(self, image: bytes, first_hot_spot: int, reset_bank: int):
        self.extra_ram = bytearray(128)
        super().__init__(image, first_hot_spot, reset_bank)

    def read(self, address: int) -> int:
        if address & 0xF80 == 0x080:
            return self.extra_ram[address & 0x7F]
        return super().read(address)

    def write(self, address: int, value: int) -> None:
        if address & 0xF80 == 0:
            self.extra_ram[address & 0x7F] = value
        else:
            super().write(address, value)


def make_cartridge(image: bytes, scheme: str) -> Cartridge:
    """Return a cartridge by its scheme: 2K, 4K, F8, F6, E0, FE, F8SC or F6SC."""
    banked = WithExtraRam if scheme.endswith("SC") else Banked
    if scheme in ("2K", "4K"):
        return Cartridge(image)
    if scheme in ("F8", "F8SC"):
        return banked(image, 0xFF8, 1)
    if scheme in ("F6", "F6SC"):
        return banked(image, 0xFF6, 0)
    if scheme == "E0":
        return Banked1K(image)
    if scheme == "FE":
        return BankedByA13(image)
    raise ValueError(f"scheme={scheme!r} is none of 2K, 4K, F8, F6, E0, FE, F8SC, F6SC.")
