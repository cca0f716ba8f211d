"""Fragments in Ray actors: each in a process of its own, on this machine or on another of a Ray cluster.

All of podium that knows Ray is here and in `podium.launch`. Ray is imported when it is first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from podium.placement.remote.engine import ENGINES, EngineError, FragmentError, LostError
from podium.placement.threads.supervision import POLL_SECONDS, Heartbeat
from podium.types import PyTree

LOOK_SECONDS = 1.0
"""How long a call waits before it looks whether the head of the cluster is there, and how often it looks then."""

LOOKS = 3
"""After so many in vain in a row the head counts as gone."""


def require_ray() -> Any:
    """Return the module `ray`.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ValueError('Ray is not installed; pip install "podium[ray]" brings it.') from None
    return ray


@dataclasses.dataclass(frozen=True)
class RayEngine:
    """Put every fragment into a Ray actor, in the cluster that this process has joined (`podium.launch`, `ray.init`).

    A fragment computes on the CPU unless `options` ask for GPUs, with as many threads as `num_cpus`; JAX then takes GPU
    memory as it needs it, and not three quarters of it at the start. Arrays travel as NumPy.

    Args:
      options: of Ray's actors: `num_cpus` (1 where it is left out), `num_gpus`, `resources`, `memory`,
        `scheduling_strategy`, `runtime_env`. What is asked for here is reserved, per fragment.
      start_timeout: seconds after which a fragment must stand: its process, and what it compiles.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start_timeout: float = 300.0
    apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.start_timeout > 0:
            raise ValueError(f"start_timeout={self.start_timeout!r} must be greater than 0 seconds; 300 is usual.")

    def place(self, name: str, make: Callable[[], Any]) -> RayHandle:
        """Let an actor make the fragment; ValueError without Ray or a cluster, or if `make` cannot be sent."""
        return RayHandle(self.require_cluster(name), name, make, self)

    def require_cluster(self, who: str) -> Any:
        """Return the module `ray`; ValueError without it, or where this process has joined no cluster."""
        ray = require_ray()
        if not ray.is_initialized():
            raise ValueError(f"{who} has no Ray cluster to live in; use podium.launch, or call ray.init() before.")
        return ray

    def actor_options(self) -> dict[str, Any]:
        """Return the options that an actor is made with, the environment variables of its process among them."""
        options = {"num_cpus": 1, **self.options}
        given = dict(options.pop("runtime_env", None) or {})
        threads = str(max(1, int(options["num_cpus"])))
        variables = {"PJRT_NPROC": threads, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if not options.get("num_gpus") and not options.get("resources"):
            variables["JAX_PLATFORMS"] = "cpu"
        return {**options, "runtime_env": {**given, "env_vars": {**variables, **given.get("env_vars", {})}}}


ENGINES["ray"] = RayEngine


class Host:
    """What runs in an actor: makes one fragment, and calls its methods.

    Errors are returned, not raised: Ray would send them as they are, which not every error survives.
    """

    def __init__(self, name: str):
        self._name, self._fragment = name, None

    def __repr__(self) -> str:
        return self._name  # What Ray puts before lines that the process prints.

    def started(self) -> int:
        """Say that the process is there, and its number on its machine."""
        return os.getpid()

    def make(self, make: Callable[[], Any]) -> Any:
        """Make the fragment."""
        return _attempt(lambda: setattr(self, "_fragment", make()))

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the fragment returns, as NumPy."""
        return _attempt(lambda: to_numpy(getattr(self._fragment, method)(*arguments)))


class _Raised(NamedTuple):
    """An error, in words."""

    error: str
    where: str


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return _Raised(repr(error), traceback.format_exc())


def to_numpy(tree: PyTree) -> PyTree:
    """Return `tree` with its arrays fetched; typed keys, which NumPy does not know, and other values as they are."""
    is_plain = lambda x: isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_plain(leaf)]
    fetched = iter(jax.device_get(arrays) if arrays else [])
    return jax.tree.unflatten(structure, [next(fetched) if is_plain(leaf) else leaf for leaf in leaves])


class RayHandle:
    """A fragment in an actor; a `Handle`. One thread at a time may use it, but any may close it.

    Attributes:
      pid: number of its process, on the machine that it is on; None before the first answer.
    """

    def __init__(self, ray: Any, name: str, make: Callable[[], Any], engine: RayEngine):
        self.name, self._ray, self._engine = name, ray, engine
        self.pid: int | None = None
        self._head = Head(ray.get_runtime_context().gcs_address)
        self._actor_class = ray.remote(Host)
        try:
            self._make = ray.put(make)
        except TypeError as error:  # What Ray raises; its message tells which object it is, in many lines.
            raise ValueError(
                f"{name} cannot be sent to another process: {' '.join(str(error).split())[:500]} Make the agent and "
                "the environment of functions and values that cloudpickle can send."
            ) from None
        self._place()

    def _place(self) -> None:
        self._stands, self._began = False, time.monotonic()
        self._actor = self._actor_class.options(**self._engine.actor_options()).remote(self.name)
        self._started = self._actor.started.remote()
        self._made = self._actor.make.remote(self._make)

    def start(self, method: str, *arguments: Any) -> _Reply:
        """Begin a call."""
        with self._translated():
            return _Reply(self, self._actor.call.remote(method, *map(to_numpy, arguments)))

    def call(self, method: str, *arguments: Any, heartbeat: Heartbeat) -> Any:
        """Do a call."""
        return self.start(method, *arguments).result(heartbeat)

    def restart(self) -> None:
        """Make the fragment anew in another process."""
        self.close()
        with self._translated():
            self._place()

    def close(self) -> None:
        """Kill the actor's process."""
        # After the head is lost, or Ray shut down, there is nobody to ask; the process ends by itself then.
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(self._actor)

    def wait(self, reference: Any, heartbeat: Heartbeat) -> Any:
        """Return the value behind `reference`, of the actor that stands by then."""
        if not self._stands:
            self.pid = self._await_start(self._started, "its process has not started", heartbeat)
            self._await_start(self._made, "its process runs, but it is not made yet", heartbeat)
            self._stands = True
        return self._get(reference, heartbeat)

    def _await_start(self, reference: Any, what: str, heartbeat: Heartbeat) -> Any:
        def look() -> None:
            heartbeat()
            if time.monotonic() > self._began + self._engine.start_timeout:
                options = self._engine.actor_options()
                asked = _shown({name: value for name, value in options.items() if name != "runtime_env"})
                free, all_there_is = _shown(self._ray.available_resources()), _shown(self._ray.cluster_resources())
                raise EngineError(
                    f"{self.name} does not stand after start_timeout={self._engine.start_timeout:g} s: {what}. It asks "
                    f"for {asked}; free in the Ray cluster: {free}, of {all_there_is}."
                )

        return self._get(reference, look)

    def _get(self, reference: Any, heartbeat: Heartbeat) -> Any:
        while True:
            with self._translated(), contextlib.suppress(self._ray.exceptions.GetTimeoutError):
                value = self._ray.get(reference, timeout=POLL_SECONDS)
                self._head.missed = 0
                if isinstance(value, _Raised):
                    raise FragmentError(f"{self.name} raised {value.error}, in its process:\n{value.where}")
                # In memory of this process: large arrays lie in the store of Ray, and fill it.
                return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, value)
            heartbeat()
            self._head.look()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of Ray in the block into those of `podium.placement.remote.engine`."""
        try:
            yield
        except self._ray.exceptions.RayError as error:
            self._head.require()
            raise self.lost(error) from None

    def lost(self, error: Exception) -> Exception:
        """Return what an error of Ray means for a run."""
        words = " ".join(str(error).split())[:400]
        if isinstance(error, self._ray.exceptions.RayActorError):
            if not any(node["Alive"] for node in self._ray.nodes()):
                return EngineError(f"No machine of the Ray cluster at {self._head.address} is alive any more.")
            return LostError(f"The process of {self.name} ({self.pid}) is gone: {words}")
        return EngineError(f"Ray failed {self.name}: {type(error).__name__}: {words}")


@dataclasses.dataclass(frozen=True, eq=False)
class _Reply:
    """A call of an actor under way."""

    handle: RayHandle
    reference: Any

    def result(self, heartbeat: Heartbeat) -> Any:
        """Wait for the value."""
        return self.handle.wait(self.reference, heartbeat)


class Head:
    """The process that a Ray cluster hangs on. Ray itself ends the driver a minute after it is gone, with no error."""

    def __init__(self, address: str):
        self.address, self.missed, self._looked = address, 0, time.monotonic()

    def look(self) -> None:
        """Look, if it is time; raises EngineError once it was not there `LOOKS` times in a row."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self.missed = 0 if self._responds() else self.missed + 1
        if self.missed >= LOOKS:
            raise self._gone()

    def require(self) -> None:
        """Raise EngineError if it is not there now: nothing may be asked of Ray then, or it waits for a minute."""
        if not self._responds():
            raise self._gone()

    def _responds(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
        except OSError:
            return False
        return True

    def _gone(self) -> EngineError:
        # Ray's own hook would tell the head of the error, and wait a minute for it, before anybody else is told.
        if sys.excepthook.__module__.startswith("ray."):
            sys.excepthook = sys.__excepthook__
        return EngineError(
            f"The head of the Ray cluster at {self.address} is gone, and with it every process of the run; start the "
            "cluster again, and go on with resume=True."
        )


def _shown(resources: Mapping[str, Any]) -> str:
    others = ("node:", "object_store", "memory")
    kept = {name: value for name, value in resources.items() if not name.startswith(others)}
    return ", ".join(f"{name}={f'{x:g}' if isinstance(x, float) else x}" for name, x in kept.items())
