"""Several processes as one run: how they find each other, agree on what a clock or a signal decides, and end together.

Devices exchange arrays by themselves once `initialize` was called. What the host loops must agree on besides goes
through JAX's coordination service, in meetings: no device waits for it, every wait has an end, and a process that fails
tells the others why. With one process everything here is the identity.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import jax

# No public name gives the coordination service, nor the number of processes without starting the devices.
from jax._src.distributed import global_state
from jax.sharding import NamedSharding, PartitionSpec

from podium.files import one_line
from podium.types import PyTree

HEARTBEAT_SECONDS = 30
"""After so long without a sign of life from one process JAX ends all others."""

MEETING_SECONDS = 3600.0
"""How long a process waits for another that lives; process 0 evaluates and saves meanwhile."""

_POLL_SECONDS = 1.0
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# What errors of collectives and of the coordination service say where the other end is gone.
_SIGNS_OF_LOSS = ("Gloo", "NCCL", "UNAVAILABLE")


class PeerError(RuntimeError):
    """Another process of the run failed or is gone; the message says which and why, as far as that is known."""


class _Meetings:
    """How many meetings this process has been to; all processes go to the same ones in the same order."""

    number = 0


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Join the processes of a run; call it in each, before anything touches a JAX array.

    Args:
      coordinator: host:port of process 0; None takes $JAX_COORDINATOR_ADDRESS.
      num_processes: of the run; None takes $JAX_NUM_PROCESSES.
      process_id: of this process, from 0; None takes $JAX_PROCESS_ID.

    Where none of the three is given JAX asks the cluster: SLURM (`srun`), Open MPI and TPU pods are known to it.

    Raises:
      ValueError: only some of them are given, one is no such number, or there is no cluster that JAX knows.
    """
    given = dict(zip(_VARIABLES, (coordinator, num_processes, process_id), strict=True))
    given = {name: os.environ.get(name) if value is None else value for name, value in given.items()}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{' and '.join(missing)} not given, but not all are missing; set {', '.join(_VARIABLES)}.")
    if missing:
        _detect()
        return
    count = _integer("JAX_NUM_PROCESSES", given["JAX_NUM_PROCESSES"], 1, None)
    number = _integer("JAX_PROCESS_ID", given["JAX_PROCESS_ID"], 0, count - 1)
    address = str(given["JAX_COORDINATOR_ADDRESS"])
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r} must be HOST:PORT, such as node001:12345.")
    _start(address, count, number, cluster_detection_method="deactivate")


def _start(*settings: Any, **options: Any) -> None:
    # JAX would take SIGTERM for itself; the host loop saves and stops at it.
    jax.config.update("jax_enable_preemption_service", False)
    options["heartbeat_timeout_seconds"] = HEARTBEAT_SECONDS
    jax.distributed.initialize(*settings, **options)


def _detect() -> None:
    try:
        _start()
    except ValueError as error:
        raise ValueError(
            f"JAX detects no cluster here ({error}); start the processes with srun or mpirun, or set "
            f"{', '.join(_VARIABLES)} for each."
        ) from None


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    try:
        number = int(value)
    except ValueError:
        number = low - 1
    if number < low or (high is not None and number > high):
        rule = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r} must be an integer {rule}.")
    return number


def num_processes() -> int:
    """Return how many processes the run has; does not start the devices."""
    return global_state.num_processes or 1


def process_id() -> int:
    """Return the number of this process."""
    return global_state.process_id or 0


def is_first() -> bool:
    """Tell whether this process is the one that writes and prints."""
    return process_id() == 0


def gather(value: Any) -> list[Any]:
    """Meet all processes, and return what each brought, by number; `value` is anything JSON can hold.

    Raises:
      PeerError: one failed, or did not come.
    """
    if num_processes() == 1:
        return [value]
    number, _Meetings.number = _Meetings.number, _Meetings.number + 1
    _client().key_value_set(_key(number, process_id()), json.dumps({"value": value}))
    told = [_hear(number, other) for other in range(num_processes())]
    if number:  # All have come to this meeting, so all have read the last one.
        _client().key_value_delete(_key(number - 1, process_id()))
    return told


def from_first(value: Any) -> Any:
    """Meet all processes, and return what process 0 brought."""
    return gather(value if is_first() else None)[0]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Tell the other processes of an error in the block: they raise PeerError at the next meeting."""
    if num_processes() > 1:
        jax.devices()  # Here the processes wait for each other's devices; where only some came they would hear nothing.
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if num_processes() == 1:
            raise
        words = one_line(error, 500)
        with contextlib.suppress(Exception):  # Process 0 may be gone, and with it the service.
            key = _key(_Meetings.number, process_id())
            _client().key_value_set(key, json.dumps({"failed": words}))
        if isinstance(error, Exception) and any(sign in str(error) for sign in _SIGNS_OF_LOSS):
            raise PeerError(_how_to_go_on("Another process is gone", words)) from error
        raise


def _client() -> Any:
    return global_state.client


def _key(meeting: int, process: int) -> str:
    return f"podium/meeting/{meeting}/{process}"


def _hear(meeting: int, process: int) -> Any:
    """Wait for what a process brought to a meeting; in short waits, so that signals are handled meanwhile."""
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            told = json.loads(_client().blocking_key_value_get(_key(meeting, process), int(1000 * _POLL_SECONDS)))
            break
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > deadline:
                why = f"it lives, but did not come in {MEETING_SECONDS:g} s"
                raise PeerError(_how_to_go_on(f"Process {process} hangs", why)) from None
    if "failed" in told:
        raise PeerError(f"Process {process} failed ({told['failed'].rstrip('.')}), so process {process_id()} stops.")
    return told["value"]


def _how_to_go_on(what: str, why: str) -> str:
    return f"{what} ({why}), so process {process_id()} stops; start all of them again with --resume (resume=True)."


def local(tree: PyTree) -> PyTree:
    """Return this process's copy of arrays that every process holds whole."""
    if num_processes() == 1:
        return tree
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def whole(tree: PyTree) -> PyTree:
    """Return arrays as `local` does, after collecting those that are spread over processes; all processes call it.

    A collected array takes room on every device; they are collected one after another.
    """
    if num_processes() == 1:
        return tree

    def collect(x: jax.Array) -> jax.Array:
        if isinstance(x.sharding, NamedSharding) and not x.is_fully_replicated:
            x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
        return jax.block_until_ready(x.addressable_data(0))

    return jax.tree.map(collect, tree)


def put(value: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Lay an array that this process holds whole, as all others do, over devices of all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    data, kind = jax.random.key_data(value), jax.random.key_impl(value)
    spread = put(data, sharding)  # Its further axis, the words of a key, lies whole on every device.
    return jax.jit(lambda x: jax.random.wrap_key_data(x, impl=kind), out_shardings=sharding)(spread)
