"""How many devices there are, how to get more of them on a CPU, and how to compile for one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from podium import distributed, xla
from podium.ranges import is_integer, largest_divisor
from podium.types import PyTree

Devices = int | Sequence[jax.Device] | None


def request_devices(number: int) -> str | None:
    """Ask for `number` devices before JAX starts; on a CPU that makes virtual ones.

    Call it before anything touches a JAX array. On an accelerator it changes nothing.

    Args:
      number: of devices wanted.

    Returns:
      a sentence for people where virtual devices were made, else None.

    Raises:
      ValueError: if `number` is not positive.
    """
    _check_number(number)
    if number == 1 or getattr(jax.config, "jax_num_cpu_devices", None) == number:
        return None  # Asked for before, and said so then. JAX, once started, refuses a change but no repetition.
    if not xla.set_cpu_devices(number):
        return None  # JAX has started; `resolve_devices` says what is missing.
    if jax.default_backend() == "cpu":
        return (
            f"{number} virtual devices on a CPU of {num_cores()} cores: one a core suits small networks, more are for "
            "tests and for trying things out."
        )
    return None


def request_cpu_threads(number: int) -> str | None:
    """Ask that JAX compute on `number` threads of the CPU; call it before anything touches a JAX array.

    JAX takes one a core. Programs of small arrays lose more by handing them from core to core than they gain: DQN
    on CartPole runs 1.3 to 1.5 times as fast with 1 (2 cores; 64-64 units, batches of 100).

    Returns:
      a sentence for people where JAX had started, so that its threads stay as they are, else None.

    Raises:
      ValueError: if `number` is not positive.
    """
    if not is_integer(number, 1):
        raise ValueError(f"cpu_threads={number!r} must be a positive integer; leave it out to use every core.")
    # What XLA's CPU client reads when it starts; there is no option of JAX.
    os.environ["PJRT_NPROC"] = str(number)
    if xla.has_started():
        return f"cpu_threads={number} came too late: JAX had started, and computes on as many threads as before."
    return None


def num_cores() -> int:
    """Return how many cores of the CPU this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_devices(devices: Devices) -> list[jax.Device]:
    """Return a list of devices: all for None, the first n for an integer, or those given.

    With several processes an integer counts the devices of each, and those of a process lie side by side.

    Raises:
      ValueError: if there are too few, or none is named.
    """
    if distributed.num_processes() > 1:
        return _resolve_of_each_process(devices)
    if devices is None:
        return jax.devices()
    _check_kind("devices", devices, "all")
    if isinstance(devices, Sequence):
        return list(devices)
    message = request_devices(devices)
    if message and len(jax.devices()) == devices:
        warnings.warn(message, stacklevel=3)
    available = jax.devices()
    if devices > len(available):
        raise ValueError(
            f"devices={devices}, but JAX has started with {len(available)} ({available[0].platform}); use at most "
            f"{len(available)}, or on a CPU call podium.request_devices({devices}) before any other use of JAX."
        )
    return available[:devices]


def resolve_sharing(devices: Devices, name: str, number: int | None) -> list[jax.Device]:
    """Return the devices that share a `number` of what is called `name`; for devices=None as many as divide it.

    A number of None is one a device.

    Raises:
      ValueError: they do not divide it, or as `resolve_devices` does.
    """
    found = resolve_devices(devices)
    if number is None:
        return found
    if devices is None and distributed.num_processes() == 1:
        found = found[: largest_divisor(number, len(found))]
    if number % len(found):
        more = -(-number // len(found)) * len(found)
        raise ValueError(
            f"{name}={number} is not divisible by devices={len(found)}; use {name}={more}, or fewer devices."
        )
    return found


def resolve_apart(acting: Devices, learning: Devices) -> tuple[list[jax.Device], list[jax.Device]]:
    """Return the devices that act, of this process, and those that learn, of all processes.

    None is one. Numbers take the first devices for acting and those after them for learning; where there are not
    enough, both use the same. With several processes numbers count the devices of each.

    Raises:
      ValueError: as `resolve_devices` does.
    """
    acting, learning = (1 if given is None else given for given in (acting, learning))
    if distributed.num_processes() == 1:
        _check_kind("actor_devices", acting, "one")
        _check_kind("learner_devices", learning, "one")
    if not is_integer(acting) or not is_integer(learning):
        return resolve_devices(acting), resolve_devices(learning)
    apart = acting + learning <= len(jax.local_devices())
    number = acting + learning if apart else max(acting, learning)
    available = resolve_devices(number)
    own = [available[i : i + number] for i in range(0, len(available), number)]
    first = acting if apart else 0
    learners = [device for devices in own for device in devices[first : first + learning]]
    return own[distributed.process_id()][:acting], learners


def share_devices(number: int, num_envs: int) -> tuple[int | None, int | None]:
    """Return how many of so many devices act and how many learn, where both divide `num_envs`; None for few."""
    if number < 3:
        return None, None
    learning = largest_divisor(num_envs, number - 1)
    return largest_divisor(num_envs, number - learning), learning


def _resolve_of_each_process(devices: Devices) -> list[jax.Device]:
    if devices is not None and not is_integer(devices):
        raise ValueError(f"devices={devices!r}: with several processes give the number of devices of each.")
    if devices is not None:
        request_devices(devices)
    by_process: dict[int, list[jax.Device]] = {}
    for device in sorted(jax.devices(), key=lambda device: (device.process_index, device.id)):
        by_process.setdefault(device.process_index, []).append(device)
    fewest, most = (choose(map(len, by_process.values())) for choose in (min, max))
    wanted = most if devices is None else devices
    if wanted > fewest:
        have = f"one of the {len(by_process)} processes has {fewest} ({jax.devices()[0].platform})"
        raise ValueError(f"devices={devices} of each process, but {have}; use at most {fewest}.")
    return [device for own in by_process.values() for device in own[:wanted]]


def _check_kind(name: str, devices: Any, usual: str) -> None:
    """Raise ValueError for what is neither a positive number nor a sequence of devices."""
    if is_integer(devices, 1):
        return
    if not isinstance(devices, Sequence) or not all(isinstance(device, jax.Device) for device in devices):
        remedy = f"; leave it out to use {usual}" if is_integer(devices) else ""
        raise ValueError(f"{name}={devices!r} must be a positive integer or a sequence of JAX devices{remedy}.")
    if not devices:
        raise ValueError(f"{name}={devices!r} names no device; leave it out to use {usual}.")


def _check_number(number: int) -> None:
    if not is_integer(number, 1):
        raise ValueError(f"devices={number!r} must be a positive integer; leave it out to use all.")


def jit(function: Callable[..., Any], device: jax.Device, donated: tuple[int, ...] = ()) -> Any:
    """Return `function` jitted for a device."""
    here = SingleDeviceSharding(device)
    return jax.jit(
        function, in_shardings=here, out_shardings=here, donate_argnums=donated, compiler_options=xla.usual(device)
    )


def make_mesh(devices: Sequence[jax.Device], axis: str, model: int = 1) -> Mesh:
    """Return a mesh with one axis of this name; and a second, "model", of so many neighbours where that is several."""
    if model == 1:
        return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))
    return Mesh(np.array(devices).reshape(-1, model), (axis, "model"), axis_types=(AxisType.Auto,) * 2)


def at(tree: PyTree, device: jax.Device) -> Any:
    """Return the shapes of `tree` on `device`."""
    here = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)
