"""Placements: where an agent's functions run. The registry of them, which `train` and the command line read.

To add one, write a `Placement` (`podium.placement.contract`) in a file of its own, and a line here; outside podium,
call `register`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from podium.files import name_of, to_jsonable
from podium.placement.anakin import Anakin
from podium.placement.central_inference import CentralInference
from podium.placement.contract import Placement, Program, RunState, Sizes
from podium.placement.distributed_actors import DistributedActors
from podium.placement.evolution import Evolution
from podium.placement.local_sgd import LocalSGD
from podium.placement.parameter_server import ParameterServer
from podium.placement.population import Population
from podium.placement.remote import ray  # noqa: F401  # Adds its engine; Ray itself is imported when first used.
from podium.placement.sebulba import Sebulba
from podium.placement.single import Single
from podium.ranges import did_you_mean
from podium.report import Report

PLACEMENTS: dict[str, type[Placement]] = {
    "single": Single,
    "anakin": Anakin,
    "sebulba": Sebulba,
    "central_inference": CentralInference,
    "distributed_actors": DistributedActors,
    "parameter_server": ParameterServer,
    "local_sgd": LocalSGD,
    "evolution": Evolution,
    "population": Population,
}
"""Every placement by the name that command lines know it by; `register` adds to it."""


def register(name: str, placement: type[Placement]) -> None:
    """Add a placement to the registry, so that the command line, `podium.plan` and the tables know it.

    Raises:
      ValueError: the name is no lower-case identifier or another placement's, or the class is no dataclass that
        subclasses `Placement`.
    """
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"name={name!r} is no lower-case identifier; use one such as 'my_placement'.")
    if not (isinstance(placement, type) and issubclass(placement, Placement) and dataclasses.is_dataclass(placement)):
        raise ValueError(f"placement={placement!r} must be a dataclass that subclasses podium.Placement.")
    if PLACEMENTS.get(name, placement) is not placement:
        raise ValueError(f"name={name!r} is that of {PLACEMENTS[name].__name__}; use another.")
    PLACEMENTS[name] = placement


def names() -> list[str]:
    """Return the names of all placements."""
    return list(PLACEMENTS)


def find(name: str) -> str:
    """Return the registered name that is meant, whether it is written as in the registry or as the class is.

    >>> find("CentralInference"), find("local-sgd")
    ('central_inference', 'local_sgd')

    Raises:
      ValueError: there is none; names the nearest.
    """
    plain = lambda name: name.replace("_", "").replace("-", "").lower()
    meant = [known for known in PLACEMENTS if plain(known) == plain(name)]
    if meant:
        return meant[0]
    hint = did_you_mean(name.lower(), PLACEMENTS)
    raise ValueError(f"placement {name!r} is unknown.{hint} There are: {', '.join(PLACEMENTS)}.")


def get(name: str) -> type[Placement]:
    """Return the placement of this name; raises ValueError as `find` does."""
    return PLACEMENTS[find(name)]


def record_of(placement: Placement) -> dict[str, Any]:
    """Return what is recorded of a placement: its name, as registered or else its class's, and its settings.

    Of those that a resumed run may have otherwise, numbers and words: no devices, and no engine. Nor is there anything
    that prints as its address, which is another every time.
    """
    kind, settings = type(placement), dict[str, Any]()
    fields: tuple[Any, ...] = dataclasses.fields(placement) if dataclasses.is_dataclass(placement) else ()
    for field in fields:
        value = getattr(placement, field.name)
        value = name_of(value) if callable(value) else value
        says = field.name not in placement.may_change or isinstance(value, int | float | str | None)
        if says and " at 0x" not in repr(value):
            settings[field.name] = to_jsonable(value)
    return {"name": {known: name for name, known in PLACEMENTS.items()}.get(kind, kind.__name__), "settings": settings}


__all__ = [
    "PLACEMENTS",
    "Anakin",
    "CentralInference",
    "DistributedActors",
    "Evolution",
    "LocalSGD",
    "ParameterServer",
    "Placement",
    "Population",
    "Program",
    "Report",
    "RunState",
    "Sebulba",
    "Single",
    "Sizes",
    "find",
    "get",
    "names",
    "record_of",
    "register",
]
