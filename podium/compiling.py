"""What is traced once and compiled once, and counts the seconds; and of that, what has the state of a run on a mesh."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import xla
from podium.types import Key


class CompiledOnce(abc.ABC):
    """Something that is traced once and compiled once; `_lower` and `_compile` of a subclass say how."""

    compile_seconds: float = 0.0
    """Spent in tracing and compiling so far."""
    _lowered: Any = None
    _compiled: Any = None

    @abc.abstractmethod
    def _lower(self) -> Any: ...

    @abc.abstractmethod
    def _compile(self, options: dict[str, Any] | None) -> Any: ...

    def lower(self) -> None:
        """Trace, once, without compiling."""
        if self._lowered is None:
            began = time.perf_counter()
            self._lowered = self._lower()
            self.compile_seconds += time.perf_counter() - began

    def compile(self, options: dict[str, Any] | None = None) -> None:
        """Trace and compile, once, with these options for the compiler."""
        if self._compiled is None:
            self.lower()
            began = time.perf_counter()
            self._compiled = self._compile(options)
            self.compile_seconds += time.perf_counter() - began


class CompiledOnMesh(CompiledOnce):
    """A function of a run's state, which lies along a mesh; a dataclass that has these fields.

    Args:
      start: `(key) -> state`, the first one.
      partition: `(shapes of the state) -> a PartitionSpec for every leaf`.
      mesh: of the devices of all processes.
    """

    start: Callable[[Key], Any]
    partition: Callable[[Any], Any]
    mesh: Mesh

    def __post_init__(self) -> None:
        self.devices: list[jax.Device] = list(self.mesh.devices.flat)
        self.state_shapes = jax.eval_shape(self.start, jax.random.key(0))
        along = lambda spec: NamedSharding(self.mesh, spec)
        self.shardings = jax.tree.map(along, self.partition(self.state_shapes), is_leaf=lambda x: isinstance(x, P))

    def init(self, seed: int) -> Any:
        """Return the first state."""
        return run_once(self.start, self.shardings)(jax.random.key(seed))

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings."""
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(place, self.state_shapes, self.shardings)

    def _compile(self, options: dict[str, Any] | None) -> Any:
        return self._lowered.compile({**(options or {}), **xla.in_one_order(self.devices)})

    def compiled_text(self) -> str:
        """Return the optimised program as text, to see what is communicated."""
        self.compile()
        return str(self._compiled.as_text())

    def memory_analysis(self) -> Any:
        """Return XLA's account of the program's memory."""
        self.compile()
        return self._compiled.memory_analysis()


def run_once(function: Callable[..., Any], out_shardings: Any) -> Any:
    """Return `function` jitted for a single call: on CPU compiling takes half the time, and running some more."""
    return jax.jit(function, out_shardings=out_shardings, compiler_options={"xla_backend_optimization_level": 0})
