"""The placements that a plan compares: a row each, which says how its iteration is made of measured stages.

To add a placement, write a function that returns its values for a number of devices, one that returns its lines, and a
row in `CANDIDATES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from podium.placement.anakin import Anakin
from podium.placement.central_inference import CentralInference
from podium.placement.distributed_actors import DistributedActors
from podium.placement.evolution import Evolution
from podium.placement.local_sgd import LocalSGD
from podium.placement.parameter_server import ParameterServer
from podium.placement.program import Placement
from podium.placement.sebulba import Sebulba
from podium.placement.single import Single
from podium.planner.models import Cost, Line, Stage, act_on_host
from podium.planner.stages import Bench


class Made(NamedTuple):
    """What an iteration is made of: lines of stages, and environment steps."""

    lines: tuple[Line, ...]
    steps: float


class Candidate(NamedTuple):
    """A placement to compare.

    Attributes:
      name: of the placement.
      values: `(number of devices, num_envs) -> placements`, each a line of the table; raises ValueError where there is
        none, with the reason.
      iteration: `(Bench, placement, its program) -> Made`.
      alike: whether its steps teach as much as those of the others, so that steps a second may be compared.
    """

    name: str
    values: Callable[[int, int], Sequence[Any]]
    iteration: Callable[[Bench, Any, Any], Made]
    alike: bool = True


def _steps(bench: Bench) -> int:
    return bench.num_envs * bench.length


def _single(bench: Bench, placement: Single, program: Any) -> Made:
    return Made((Line("the loop", bench.single(program)),), _steps(bench))


def _played(bench: Bench, share: int, workers: int, device: jax.Device) -> tuple[Stage, ...]:
    """Return the stages of a rollout of one of some workers: step by step on the host, or as one program."""
    if bench.env is not None:
        return bench.rollout(share, (device,))
    return act_on_host(bench.length, bench.acting(share, device, workers), bench.stepping(share, workers))


def _anakin(bench: Bench, placement: Anakin, program: Any) -> Made:
    devices = tuple(program.devices)
    stages = *bench.rollout(bench.num_envs, devices), bench.update(bench.num_envs, devices)
    return Made((Line("the program", stages),), _steps(bench))


def _local_sgd_values(devices: int, num_envs: int) -> Sequence[LocalSGD]:
    if devices == 1:
        raise ValueError("devices=1 make one worker, which is podium.Anakin(1); LocalSGD averages two or more.")
    return [LocalSGD(workers=devices, devices=devices)]


def _local_sgd(bench: Bench, placement: LocalSGD, program: Any) -> Made:
    """One worker a device, none of which waits for another but at the mean, which is left out: few bytes, seldom."""
    share, first = bench.num_envs // program.workers, program.devices[0]
    stages = *_played(bench, share, program.workers, first), bench.update(share, (first,))
    return Made((Line("a worker", stages, program.workers),), _steps(bench))


def _sebulba_values(devices: int, num_envs: int) -> Sequence[Sebulba]:
    """Return it with as many learners as divide `num_envs`, one or four threads for each device that is left."""
    learners = max(n for n in range(1, max(2, devices)) if num_envs % n == 0)
    actors = max(n for n in range(1, max(1, devices - learners) + 1) if num_envs % n == 0)
    own: dict[str, Any] = {} if devices < 3 else {"actor_devices": actors, "learner_devices": learners}
    return [Sebulba(**own), Sebulba(**own, actor_threads=4)]


def _sebulba(bench: Bench, placement: Sebulba, program: Any) -> Made:
    actors, learners = placement.devices()
    threads = len(actors) * placement.actor_threads
    per_thread = bench.num_envs // threads
    groups = min(placement.groups, per_thread)
    size = per_thread // groups
    inference = bench.acting(size, actors[0], placement.actor_threads * groups)
    acting = act_on_host(bench.length, inference, bench.stepping(size, threads * groups))
    moving = bench.transfer(bench.num_envs, actors[0], tuple(learners))
    learning = Stage("transfer", moving), bench.update(bench.num_envs, tuple(learners))
    lines = [Line("acting", acting, threads * groups), Line("learning", learning)]
    if set(actors) & set(learners) and actors[0].platform != "cpu":
        # An accelerator does one thing at a time; on a CPU the cores say what goes on at once.
        busy = max(0.0, inference.seconds - bench.dispatch().seconds) * groups * placement.actor_threads * bench.length
        update = learning[1].cost.seconds
        lines.append(Line("the device", (Stage("inference", Cost(busy, 0.0)), Stage("update", Cost(update, 0.0)))))
    return Made(tuple(lines), _steps(bench))


def _central_inference_values(devices: int, num_envs: int) -> Sequence[CentralInference]:
    """Return it with a thread for every environment, as slow ones want, and with four a device, as fast ones do."""
    each = max(n for n in range(1, max(1, num_envs // (4 * devices)) + 1) if num_envs % (n * devices) == 0)
    return [CentralInference(devices=devices), *([CentralInference(each, devices)] if each > 1 else [])]


def _central_inference(bench: Bench, placement: CentralInference, program: Any) -> Made:
    """A thread steps and waits for the server, which acts for all of a device at once."""
    devices = tuple(program.devices)
    threads = bench.num_envs // placement.envs_per_worker
    stepping = bench.stepping(placement.envs_per_worker, threads).cycle.times(bench.length)
    inference = bench.acting(bench.num_envs // len(devices), devices[0], len(devices)).times(bench.length)
    # What the server does is in the lines of threads, who wait for it, and beside them in its own.
    own = Stage("environment", stepping), Stage("inference", Cost(inference.seconds, 0.0))
    moving = bench.transfer(bench.num_envs, devices[0], devices)
    return Made(
        (
            Line("acting", own, threads),
            Line("the server", (Stage("inference", inference),), len(devices)),
            Line("learning", (Stage("transfer", moving), bench.update(bench.num_envs, devices))),
        ),
        _steps(bench),
    )


def _distributed_actors_values(devices: int, num_envs: int) -> Sequence[DistributedActors]:
    learners = max(n for n in range(1, max(2, devices)) if num_envs % n == 0)
    own: dict[str, Any] = {}
    if devices > 2:
        own = {"worker_devices": devices - learners, "learner_devices": learners}
    return [DistributedActors(workers=n, **own) for n in (4, 2, 1) if num_envs % n == 0][:1]


def _distributed_actors(bench: Bench, placement: DistributedActors, program: Any) -> Made:
    """Workers play side by side, whole rollouts where environments are pure; one learner takes what they bring."""
    acting, learners = placement.devices()
    share = bench.num_envs // placement.workers
    stages = _played(bench, share, placement.workers, acting[0])
    moving = bench.transfer(bench.num_envs, acting[0], tuple(learners))
    learning = Stage("transfer", moving), bench.update(bench.num_envs, tuple(learners))
    return Made((Line("a worker", stages, placement.workers), Line("learning", learning)), _steps(bench))


def _parameter_server_values(devices: int, num_envs: int) -> Sequence[ParameterServer]:
    return [ParameterServer(workers=4 if 4 % devices == 0 else devices, devices=devices)]


def _parameter_server(bench: Bench, placement: ParameterServer, program: Any) -> Made:
    """Each worker waits for the server to apply its gradients; the server serves one at a time, whoever it is."""
    workers = placement.workers
    own, server = bench.gradients(bench.num_envs // workers, workers, program.devices[0])
    # What the server does is in the lines of workers, who wait for it, and beside them in its own, for its turn.
    turn = Stage("server", Cost(server.cost.seconds * workers, 0.0))
    lines = [Line("a worker", (*own, server), workers), Line("the server", (turn,))]
    if program.devices[0].platform != "cpu":
        shared = -(-workers // len(program.devices))
        busy = [Stage(name, Cost(cost.seconds * shared, 0.0)) for name, cost in (*own, server)]
        lines.append(Line("the device", tuple(busy)))
    return Made(tuple(lines), _steps(bench))


def _evolution(bench: Bench, placement: Evolution, program: Any) -> Made:
    """Members play alike, so that a generation costs as its members; of its steps those count that are played."""
    unit = 2 * placement.episodes * len(program.devices)
    members = program.sizes.num_envs
    small = max(unit, min(members, 16) // unit * unit)
    sizes = {"num_envs": small, "rollout_length": program.sizes.rollout_length}
    stages, steps = bench.generation(placement.build(program.agent, program.env, **sizes), members)
    return Made((Line("the program", stages),), steps)


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("Single", lambda devices, num_envs: [Single()], _single),
    Candidate("Anakin", lambda devices, num_envs: [Anakin(devices)], _anakin),
    Candidate("LocalSGD", _local_sgd_values, _local_sgd),
    Candidate("Sebulba", _sebulba_values, _sebulba),
    Candidate("CentralInference", _central_inference_values, _central_inference),
    Candidate("DistributedActors", _distributed_actors_values, _distributed_actors),
    Candidate("ParameterServer", _parameter_server_values, _parameter_server),
    Candidate("Evolution", lambda devices, num_envs: [Evolution(devices=devices)], _evolution, alike=False),
)
"""In the order of the table."""


def call(placement: Placement) -> str:
    """Return the call that makes a placement, to be pasted.

    >>> call(Sebulba(actor_threads=4))
    'podium.Sebulba(actor_threads=4)'
    """
    fields = dataclasses.fields(placement)  # type: ignore[arg-type]
    given = [f"{x.name}={getattr(placement, x.name)!r}" for x in fields if getattr(placement, x.name) != x.default]
    return f"podium.{type(placement).__name__}({', '.join(given)})"
