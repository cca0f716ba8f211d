"""Train with the fragments of a placement in Ray actors, and a learner that goes on from its checkpoint when it dies.

podium.launch(agent, "CartPole-v1", placement=podium.ParameterServer(8), num_steps=1_000_000)            # this machine
podium.launch(agent, "CartPole-v1", placement=podium.ParameterServer(64), address="auto", num_steps=...) # its cluster
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podium.agent import Agent
from podium.checkpoint import CheckpointError
from podium.env import Env
from podium.host import HostEnvFactory
from podium.loop import NonFiniteError, Result
from podium.placement.contract import Placement, check_is_placement
from podium.placement.remote.engine import EngineError
from podium.placement.remote.ray import Head, RayEngine, require_ray, to_numpy
from podium.placement.threads.supervision import POLL_SECONDS, ActorError
from podium.ranges import is_integer
from podium.signals import catch_signals
from podium.train import train

LOCAL_CPUS = 1024
"""CPUs that a cluster of launch's own believes in: on one machine workers may outnumber cores, as threads may."""


def launch(
    agent: Agent,
    env: Env | HostEnvFactory | str,
    *,
    placement: Placement,
    address: str | None = None,
    restarts: int = 0,
    worker_options: Mapping[str, Any] | None = None,
    learner_options: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Result:
    """Train as `podium.train` does, with the workers of the placement in Ray actors: processes, on several machines.

    With `restarts` the learner is a process of the cluster too, and this one watches over it: when it dies, another
    goes on from the last checkpoint. SIGINT and SIGTERM reach it from here: it saves, and returns what it has.

    Agent and environment travel as code, and whoever can reach the cluster can run code in it: join none that you do
    not trust. All its machines need podium, in the same versions of everything.

    Args:
      agent: as for `podium.train`; it travels, so it must be made of functions and values that cloudpickle can send.
      env: likewise; a name travels best.
      placement: one with an `engine`: `ParameterServer`, `Sebulba`, `CentralInference` or `DistributedActors`; with
        `restarts` any.
      address: of a Ray cluster to join, from one of its machines, such as "auto" or "10.0.0.1:6379"; None starts one on
        this machine and ends it afterwards, unless this process has joined one (`ray.init`).
      restarts: deaths of the learner's process that the run survives; needs `run_dir`, on a disk that all machines
        share, and checkpoints. What a worker survives is `restarts` of the placement.
      worker_options: of the workers' actors: `num_cpus` (1), `num_gpus` (0), `resources`, ... as Ray calls them.
      learner_options: likewise, of the learner's process; where the cluster has GPUs it asks for one.
      cluster: further arguments of `ray.init`.
      **arguments: of `podium.train`.

    Returns:
      what `podium.train` does.

    Raises:
      ValueError: Ray is not installed, the placement has nothing to put elsewhere, or as `podium.train`.
      podium.placement.remote.engine.EngineError: the learner died more often than `restarts`, or the cluster is gone.
    """
    ray = require_ray()
    _check_restarts(restarts, arguments)
    check_is_placement(placement)
    if any(field.name == "engine" for field in dataclasses.fields(placement)):  # type: ignore[arg-type]
        placement = dataclasses.replace(placement, engine=RayEngine(dict(worker_options or {})))  # type: ignore
    elif not restarts:
        name = type(placement).__name__
        raise ValueError(
            f"placement={name}: it has no workers that could live in other processes; use podium.train, or restarts=1 "
            "to have its learner watched over."
        )
    with _joined(ray, address, dict(cluster or {})):
        if restarts:
            return _supervise(ray, agent, env, placement, restarts, dict(learner_options or {}), arguments)
        return train(agent, env, placement=placement, **arguments)


def _check_restarts(restarts: int, arguments: Mapping[str, Any]) -> None:
    if not is_integer(restarts, 0):
        raise ValueError(f"restarts={restarts!r} must be an integer of 0 or more; use 0 to end with the learner.")
    if restarts and arguments.get("run_dir") is None:
        raise ValueError(f"restarts={restarts} needs run_dir: a learner that died goes on from its checkpoint there.")
    every, evaluated = arguments.get("checkpoint_every"), arguments.get("eval_every")
    if restarts and (every == 0 or (every is None and evaluated == 0)):
        name = "checkpoint_every=0" if every == 0 else "eval_every=0, without checkpoint_every,"
        raise ValueError(f"restarts={restarts}, but {name} saves at the end only; give checkpoint_every, in steps.")


@contextlib.contextmanager
def _joined(ray: Any, address: str | None, options: dict[str, Any]) -> Iterator[None]:
    """Join a cluster, or start one, and leave it; one that this process is in already stays as it is."""
    if ray.is_initialized():
        if address is not None or options:
            raise ValueError("This process has joined a Ray cluster already; leave address and cluster out.")
        yield
        return
    if address is not None and "://" in address:
        raise ValueError(f"address={address!r} is that of a Ray client; run on a machine of the cluster, with 'auto'.")
    if address is None:
        options = {"num_cpus": LOCAL_CPUS, "include_dashboard": False, **options}
    options = {"logging_level": "WARNING", **options}
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    hook = sys.excepthook
    try:
        with warnings.catch_warnings():
            # Ray starts its processes by a fork, which JAX warns of; nothing but `exec` follows here.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            try:
                ray.init(address=address or "local", **options)
            except ConnectionError as error:
                raise ValueError(f"address={address!r}: no Ray cluster is there ({error}).") from None
        yield
    finally:
        ray.shutdown()
        # Ray puts its own in their place.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.excepthook = hook


class _Failed(NamedTuple):
    """An error of the learner's, and where it came from."""

    error: BaseException
    where: str


def _learn(agent: Agent, env: Any, arguments: dict[str, Any]) -> Result | _Failed:
    """Train, in the learner's process; errors are returned, for Ray would wrap them."""
    try:
        result = train(agent, env, **arguments)
        return dataclasses.replace(result, state=to_numpy(result.state))
    except Exception as error:
        # What is no error of ours may be of a type that the other process does not have.
        known = type(error) in (ValueError, NonFiniteError, ActorError, EngineError, CheckpointError)
        return _Failed(error if known else RuntimeError(repr(error)), traceback.format_exc())


def _tell(told: Result | _Failed, agent: Agent) -> Result:
    """Return what the learner returned, or raise what it raised."""
    if isinstance(told, _Failed):
        if not isinstance(told.error, ValueError):
            told.error.add_note(f"In the learner's process:\n{told.where}")
        raise told.error
    # The agent that came back is a copy of its code.
    ours = lambda policy: dataclasses.replace(policy, agent=agent)
    policy = [ours(each) for each in told.policy] if isinstance(told.policy, list) else ours(told.policy)
    return dataclasses.replace(told, policy=policy)


def _supervise(
    ray: Any,
    agent: Agent,
    env: Any,
    placement: Placement,
    restarts: int,
    options: dict[str, Any],
    arguments: dict[str, Any],
) -> Result:
    """Let a process of the cluster train, and another one go on where it died."""
    if ray.cluster_resources().get("GPU"):
        options = {"num_gpus": 1, **options}
    asked = RayEngine(options).actor_options()
    if "num_cpus" not in options:
        del asked["runtime_env"]["env_vars"]["PJRT_NPROC"]  # It computes on every core, as it would here.
    head = Head(ray.get_runtime_context().gcs_address)
    learner = ray.remote(_learn).options(name="podium-learner", max_retries=0, **asked)
    arguments = {**arguments, "placement": placement}
    with catch_signals() as caught:
        for attempt in range(restarts + 1):
            began = (Path(arguments["run_dir"]) / "config.json").exists()
            resume = arguments.get("resume", False) or (attempt > 0 and began)
            try:
                task = learner.remote(agent, env, {**arguments, "resume": resume})
            except TypeError as error:
                raise ValueError(f"The learner cannot be sent to another process: {_short(error)}") from None
            try:
                told = _wait(ray, task, head, caught)
            except ray.exceptions.RayTaskError:
                raise  # An error that could not be told otherwise.
            except ray.exceptions.TaskCancelledError:
                raise KeyboardInterrupt from None
            except ray.exceptions.RayError as error:
                head.require()
                if attempt == restarts or caught:
                    raise EngineError(
                        f"The learner's process is gone for the {attempt + 1}. time, and restarts={restarts}: "
                        f"{_short(error)} The same call with resume=True goes on from its last checkpoint."
                    ) from None
                print(
                    f"The learner's process is gone; restart {attempt + 1} of {restarts} goes on from its checkpoint. "
                    f"({_short(error)})",
                    file=sys.stderr,
                )
            else:
                return _tell(told, agent)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _wait(ray: Any, task: Any, head: Head, caught: list[str]) -> Any:
    asked = False
    while True:
        try:
            return ray.get(task, timeout=POLL_SECONDS)
        except ray.exceptions.GetTimeoutError:
            head.look()
        if caught and not asked:
            # It comes as SIGINT, which the host loop saves and stops at.
            ray.cancel(task, force=False, recursive=False)
            asked = True


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
