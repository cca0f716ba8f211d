"""Cartridges of one or several games in one block of bytes, and how each scheme of bank switching maps addresses to it.

Every scheme is brought to one form: four nibbles that tell which KiB of the cartridge each KiB of the 4 KiB that the
console sees shows. A hot spot changes nibbles. Source: K. Horton's notes on cartridge sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podium.types import Array

SCHEMES = ("2K", "4K", "F8", "F6", "E0", "FE", "F8SC", "F6SC")
"""Schemes by the names that collectors use; SC has 128 bytes of memory of its own."""

_SIZES = {"2K": 2, "4K": 4, "F8": 8, "F6": 16, "E0": 8, "FE": 8, "F8SC": 8, "F6SC": 16}
AT_RESET = {"2K": 0x1010, "4K": 0x3210, "F8": 0x7654, "F6": 0x3210, "E0": 0x7654, "FE": 0x3210}
"""Which KiB of the cartridge each KiB of the console's shows after a reset, a nibble each, the lowest first."""

_SWITCHING = ("F8", "F6", "E0")
_FIXED = ("2K", "4K")  # These take no operation to follow.
LARGEST = 1024 * max(_SIZES.values())
"""Bytes of the largest image."""


@dataclasses.dataclass(frozen=True)
class Cartridge:
    """An image, its scheme, and what the console is to know of the game.

    Args:
      image: the bytes.
      scheme: one of `SCHEMES`.
      first_line: of the frame that belongs to the picture.
      height: lines of the picture.
      comb: whether moving objects blacks out the left edge, as consoles do.

    Raises:
      ValueError: for an unknown scheme or an image of the wrong size.
    """

    image: bytes
    scheme: str
    first_line: int = 34
    height: int = 210
    comb: bool = True

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme={self.scheme!r} is not known; choose one of {', '.join(SCHEMES)}.")
        if len(self.image) != _SIZES[self.scheme] * 1024:
            raise ValueError(
                f"The image has {len(self.image)} bytes; a {self.scheme} cartridge has {_SIZES[self.scheme] * 1024}."
            )


class Cartridges:
    """Several, of which each lane has one.

    Args:
      cartridges: at least one.

    Attributes:
      cartridges: the same.
      data: uint8 of all images, one after the other.
      has_extra: whether any has memory of its own.
      height: lines of the tallest picture.
    """

    def __init__(self, cartridges: Sequence[Cartridge]):
        self.cartridges = tuple(cartridges)
        self.data = np.frombuffer(b"".join(each.image for each in cartridges), np.uint8)
        self.has_extra = any(each.scheme.endswith("SC") for each in cartridges)
        self.height = max(each.height for each in cartridges)
        self._bases = np.cumsum([0, *(len(each.image) for each in cartridges)])[:-1].astype(np.int32)

    def __len__(self) -> int:
        return len(self.cartridges)

    @property
    def memory(self) -> int:
        """Bytes of RAM of a lane."""
        return 256 if self.has_extra else 128

    def slot(self, number: int) -> Slot:
        """Return a slot with one of them."""
        cartridge = self.cartridges[number]
        scheme = cartridge.scheme.removesuffix("SC")
        facts = [
            self._slot_schemes.index(scheme),
            AT_RESET[scheme],
            228 * cartridge.first_line,
            228 * (cartridge.first_line + cartridge.height),
            cartridge.comb,
            cartridge.scheme.endswith("SC"),
        ]
        image = np.frombuffer(cartridge.image.ljust(LARGEST, b"\0"), np.uint8)
        return Slot(image, np.array(facts, np.int32), self._slot_schemes, self.has_extra, self.height)

    @property
    def _slot_schemes(self) -> tuple[str, ...]:
        there = {each.scheme.removesuffix("SC") for each in self.cartridges}
        return (*_FIXED, *sorted(there.difference(_FIXED)))

    def lanes(self, which: Array) -> Lanes:
        """Return what lanes need; `which` is int32 [lanes], the cartridge of each (ignored where there is one only)."""

        def choose(values: Sequence[int] | np.ndarray) -> Array:
            values = np.asarray(values, np.int32)
            if (values == values[0]).all():
                return jnp.full(which.shape, values[0])
            return jnp.asarray(values)[which]

        schemes = [each.scheme.removesuffix("SC") for each in self.cartridges]
        names = sorted(set(schemes))
        return Lanes(
            schemes=tuple(names),
            scheme=choose([names.index(scheme) for scheme in schemes]),
            base=choose(self._bases),
            extra=choose([each.scheme.endswith("SC") for each in self.cartridges]) if self.has_extra else None,
            at_reset=choose([AT_RESET[scheme] for scheme in schemes]),
            window=(
                choose([228 * each.first_line for each in self.cartridges]),
                choose([228 * (each.first_line + each.height) for each in self.cartridges]),
            ),
            comb=choose([each.comb for each in self.cartridges]),
        )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data", "facts"], meta_fields=["schemes", "has_extra", "height"]
)
@dataclasses.dataclass(frozen=True)
class Slot:
    """A slot for one cartridge: in place of `Cartridges` in a program that is compiled once for all of some schemes.

    Attributes:
      data: uint8 [16384], its image and what fills the place.
      facts: int32 [6], what `Lanes` tells of it.
      schemes: those that it takes.
      has_extra: as in `Cartridges`.
      height: as in `Cartridges`.
    """

    data: Array | np.ndarray
    facts: Array | np.ndarray
    schemes: tuple[str, ...]
    has_extra: bool
    height: int

    def __len__(self) -> int:
        return 1

    def lanes(self, which: Array) -> Lanes:
        """Return what lanes need, all with this cartridge; `which` is int32 [lanes]."""
        scheme, at_reset, begins, ends, comb, extra = (jnp.full(which.shape, fact) for fact in self.facts)
        return Lanes(
            schemes=self.schemes,
            scheme=scheme,
            base=jnp.zeros_like(which),
            extra=extra if self.has_extra else None,
            at_reset=at_reset,
            window=(begins, ends),
            comb=comb,
        )


@dataclasses.dataclass(frozen=True)
class Lanes:
    """What lanes know of their cartridges.

    Attributes:
      schemes: those that there are.
      scheme: int32 [lanes], of these.
      base: int32 [lanes], where the image begins.
      extra: int32 [lanes], whether it has memory of its own; None where none has.
      at_reset: int32 [lanes], banks after a reset.
      window: clocks at which the picture begins and ends, int32 [lanes] each.
      comb: int32 [lanes], 1 where moving objects blacks out the left edge.
    """

    schemes: tuple[str, ...]
    scheme: Array
    base: Array
    extra: Array | None
    at_reset: Array
    window: tuple[Array, Array]
    comb: Array

    @property
    def switches(self) -> bool:
        """Whether any has hot spots."""
        return any(scheme in _SWITCHING for scheme in self.schemes)

    def _only(self, scheme: str, found: Array, otherwise: Array) -> Array:
        if self.schemes == (scheme,):
            return found
        return jnp.where(self.scheme == self.schemes.index(scheme), found, otherwise)

    def switch(self, banks: Array, address: Array) -> Array:
        """Return the banks after an access to `address`."""
        new, spot = banks, address & 0x1FFF
        if "F8" in self.schemes:
            switched = jnp.where(spot == 0x1FF8, 0x3210, jnp.where(spot == 0x1FF9, 0x7654, banks))
            new = self._only("F8", switched, new)
        if "F6" in self.schemes:
            bank = spot - 0x1FF6
            new = self._only("F6", jnp.where((bank >= 0) & (bank < 4), 0x3210 + 0x4444 * bank, banks), new)
        if "E0" in self.schemes:
            shift = ((spot - 0x1FE0) >> 3) << 2
            is_spot = (spot >= 0x1FE0) & (spot < 0x1FF8)
            shift = jnp.where(is_spot, shift, 0)
            switched = (banks & ~(0xF << shift)) | (spot & 7) << shift
            new = self._only("E0", jnp.where(is_spot, switched, banks), new)
        return new

    def index(self, banks: Array, address: Array) -> Array:
        """Return where in the block of bytes `address` is."""
        if "FE" in self.schemes:
            chosen = jnp.where((address & 0x2000) != 0, 0x3210, 0x7654)
            banks = self._only("FE", chosen, banks)
        kib = (banks >> ((address >> 8) & 0x0C)) & 0x0F
        return self.base + (kib << 10 | address & 0x3FF)

    def reads_extra(self, address: Array) -> Array:
        """Tell whether the cartridge's own memory is read at `address`."""
        return self._in_extra(address, 0x1080)

    def writes_extra(self, address: Array) -> Array:
        """Tell whether the cartridge's own memory is written at `address`, 128 below where it is read."""
        return self._in_extra(address, 0x1000)

    def _in_extra(self, address: Array, place: int) -> Array:
        if self.extra is None:
            return jnp.zeros(address.shape, bool)
        return (self.extra != 0) & ((address & 0x1F80) == place)

    def ram_index(self, address: Array) -> Array:
        """Return where in the lane's memory `address` is; it must be there."""
        index = address & 0x7F
        return index if self.extra is None else jnp.where((address & 0x1000) != 0, index | 0x80, index)
