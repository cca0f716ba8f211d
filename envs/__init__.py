"""Environments: adapters, native ones and wrappers, found by name with `make(name)` and `names()`.

A family is a group of environments that one module serves. Each is imported when one of its names is first asked
for, so that a simulator nobody uses is never loaded. To add a family, add a module with the functions of `Family` and a
line to `_families`; a name that two families have goes to the first.

Pure environments (`podium.env.Env`): podium's own, with games for two and for many (`podium.envs.games`), gymnax, Atari
games (`atari/Pong`) and the suites, each in a package of its own (`podium.envs.suites`): `brax/ant`,
`mjx/CartpoleSwingup`, `craftax/Classic-Symbolic`, `xminigrid/MiniGrid-Empty-8x8`, `jumanji/Game2048-v1`,
`pgx/minatar-breakout`, `jaxmarl/smax-3m`. On the CPU (`podium.host.HostEnvFactory`): envpool (`Pong-v5`,
`envpool/NAME`), ale-py (`ale/Pong-v5`), Gymnasium (`gymnasium/NAME`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from podium.env import Env
from podium.envs import games, native, wrappers
from podium.host import HostEnvFactory
from podium.ranges import check_type, did_you_mean, is_number

__all__ = [
    "Family",
    "from_gymnasium",
    "games",
    "make",
    "make_pure",
    "names",
    "native",
    "register",
    "runs_on_host",
    "wrappers",
]


class Family(NamedTuple):
    """Environments that one module serves.

    Attributes:
      names: `() -> list[str]`, without importing a simulator that may be missing.
      option_names: `(name) -> list[str]`, what `make` accepts, or None where the family's `make` says so itself.
      make: `(name, **options) -> Env`, or `HostEnvFactory` for families that run on the CPU.
      prefix: every name that begins so is this family's, listed or not; "" for none.
      on_host: whether its environments run on the CPU; None where that shows only once one is made.
    """

    names: Callable[[], list[str]]
    option_names: Callable[[str], list[str] | None]
    make: Callable[..., Env | HostEnvFactory]
    prefix: str = ""
    on_host: bool | None = False


_factories: dict[str, Callable[..., Env | HostEnvFactory]] = {
    "podium/Catch": native.catch,
    "podium/Corridor": native.corridor,
    "podium/RepeatFirst": native.repeat_first,
    "podium/TicTacToe": games.tic_tac_toe,
    "podium/ConnectFour": games.connect_four,
    "podium/Kuhn": games.kuhn,
    "podium/Leduc": games.leduc,
    "podium/Tag": games.tag,
}


def _gymnax_family() -> Family:
    from podium.envs import gymnax_envs

    return Family(gymnax_envs.names, lambda name: None, gymnax_envs.make)


def _factory_family() -> Family:
    return Family(lambda: list(_factories), _factory_options, _call_factory, on_host=None)


def _suite(module: str) -> Callable[[], Family]:
    """Return the family of `podium.envs.<module>`; a suite's package is imported when one of its names is made."""

    def load() -> Family:
        suite = importlib.import_module(f"podium.envs.{module}")
        return Family(suite.names, lambda name: None, suite.make, suite.PREFIX)

    return load


def _envpool_family() -> Family:
    from podium.envs import envpool_envs

    return Family(envpool_envs.names, envpool_envs.option_names, envpool_envs.make, envpool_envs.PREFIX, on_host=True)


def _atari_family() -> Family:
    from podium.envs import atari

    return Family(atari.names, atari.option_names, atari.make)


def _ale_family() -> Family:
    from podium.envs import ale_envs

    return Family(ale_envs.names, ale_envs.option_names, ale_envs.make, ale_envs.PREFIX, on_host=True)


def _gymnasium_family() -> Family:
    from podium.envs import gymnasium_envs

    return Family(gymnasium_envs.names, lambda name: None, gymnasium_envs.make, gymnasium_envs.PREFIX, on_host=True)


_FLICKER = "flicker"
"""An option of every pure environment, whatever its family."""

_families: list[Callable[[], Family]] = [
    _factory_family,
    _atari_family,  # Before gymnax, which starts JAX as it is imported; see `podium.envs.atari.compiler`.
    _gymnax_family,
    _suite("brax_envs"),
    _suite("mjx_envs"),
    _suite("craftax_envs"),
    _suite("xminigrid_envs"),
    _suite("jumanji_envs"),
    _suite("pgx_envs"),
    _suite("jaxmarl_envs"),
    _envpool_family,
    _ale_family,
    _gymnasium_family,
]


def names() -> list[str]:
    """List the environments that `make` knows, but of those on the CPU only the usual ones.

    `envpool/`, `ale/` and `gymnasium/` before a name reach everything those libraries have.
    """
    return [name for family in _families for name in family().names()]


def make(name: str, **options: Any) -> Env | HostEnvFactory:
    """Make an environment by name.

    Args:
      name: one of `names()`, spelt as there.
      **options: of this environment; for those of gymnax its constructor arguments and parameters. Every pure one takes
        `flicker`, the probability that an observation is blank (`podium.envs.wrappers.flicker`).

    Returns:
      An `Env` that does not reset itself (placements apply `podium.env.auto_reset`), or a `HostEnvFactory`, whose
      environments run on the CPU and need a placement that has actors there.

    Raises:
      ValueError: for an unknown name (with the nearest known ones), an option that the environment has not, or a
        simulator that is not installed (with the extra that has it).

    >>> make("podium/Catch", rows=5).spec.max_episode_steps
    4
    """
    family = _family_of(name)
    known = family.option_names(name)
    flicker = options.pop(_FLICKER, None) if known is None or _FLICKER not in known else None
    for option in options:
        if known is not None and option not in known:
            hint = did_you_mean(option, known, 0.5)
            raise ValueError(f"{name} has no option {option!r}.{hint} It has: {', '.join(known) or 'none'}.")
    made = family.make(name, **options)
    if flicker is None:
        return made
    if not is_number(flicker):
        raise ValueError(f"{_FLICKER}={flicker!r} must be a number, the probability that an observation is blank.")
    if isinstance(made, HostEnvFactory):
        raise ValueError(f"{_FLICKER}={flicker} is for pure environments, and {name} runs on the CPU; leave it out.")
    return wrappers.flicker(made, flicker)


def make_pure(name: str, **options: Any) -> Env:
    """Make an environment that can be a part of compiled programs.

    Raises:
      ValueError: as `make` does, and where the environment runs on the CPU.
    """
    env = make(name, **options)
    if isinstance(env, HostEnvFactory):
        raise ValueError(f"env={name!r} runs on the CPU, outside compiled programs; choose a pure one.")
    return env


def runs_on_host(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Say whether an environment runs on the CPU, outside compiled programs; it is made only where nothing else tells.

    Raises:
      ValueError: for an unknown name, as `make` does.

    >>> runs_on_host("podium/Catch"), runs_on_host("Pong-v5")
    (False, True)
    """
    on_host = _family_of(name).on_host
    return isinstance(make(name, **(options or {})), HostEnvFactory) if on_host is None else on_host


def _family_of(name: str) -> Family:
    """Return the family that serves a name; raises ValueError where none does."""
    if not isinstance(name, str):
        raise ValueError(f"name={name!r} must be one of podium.envs.names().")
    for load_family in _families:
        family = load_family()
        if name in family.names() or (family.prefix and name.startswith(family.prefix)):
            return family
    near = near_misses(name, names())
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"No environment is named {name!r}.{hint} podium.envs.names() lists them.")


def from_gymnasium(
    make_vector_env: Callable[[int], Any],
    *,
    name: str | None = None,
    max_episode_steps: int | None = None,
    frames_per_step: int = 1,
) -> HostEnvFactory:
    """Return a simulator of your own, which speaks Gymnasium's vector API, as host environments.

    Args:
      make_vector_env: `(num_envs) -> gymnasium.vector.VectorEnv` in any autoreset mode; its `reset` takes a list of
        seeds. Where it has `step_async` and `step_wait`, as `AsyncVectorEnv` has, it steps while podium does other
        things.
      name: for error messages; None takes the class's.
      max_episode_steps: the time limit in steps, if there is one.
      frames_per_step: of the simulator, for counting.

    Raises:
      ValueError: a space is not one of podium's.
    """
    from podium.envs import gymnasium_envs

    return gymnasium_envs.from_vector_env(make_vector_env, name, max_episode_steps, frames_per_step)


def register(name: str, factory: Callable[..., Env | HostEnvFactory]) -> None:
    """Make `make(name, **options)` call `factory(**options)`; the factory's signature says which options there are.

    Raises:
      ValueError: for a name that is taken, or a factory that is no function.
    """
    if not callable(factory):
        raise ValueError(f"factory={reprlib.repr(factory)} must be a function that returns the environment.")
    if name in names():
        raise ValueError(f"{name!r} is taken already; choose another name.")
    _factories[name] = factory


def near_misses(name: str, known: list[str], most: int = 3) -> list[str]:
    """Return up to `most` names that `name` may have meant, best first.

    Case, punctuation and what stands before a slash or after a dash count for little.

    >>> near_misses("breakout", ["Breakout-MinAtar", "CartPole-v1"])
    ['Breakout-MinAtar']
    """

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    def forms(text: str) -> list[str]:
        short = text.split("/")[-1]
        return [plain(text), plain(short), plain(short.split("-")[0])]

    def similarity(other: str) -> float:
        return max(difflib.SequenceMatcher(None, a, b).ratio() for a in forms(name) for b in forms(other))

    scores = {other: similarity(other) for other in known}
    best = max(scores.values(), default=0.0)
    close = [other for other in known if scores[other] >= max(0.7, best - 0.1)]
    return sorted(close, key=lambda other: (-scores[other], plain(other) != plain(name)))[:most]


def _call_factory(name: str, **options: Any) -> Env | HostEnvFactory:
    factory = _factories[name]
    if factory.__module__.startswith("podium."):  # What defaults of a user's own mean, only the user knows.
        parameters = inspect.signature(factory).parameters
        for option, value in options.items():
            check_type(f"{name}: {option}", value, parameters[option].default)
    made = factory(**options)
    if not isinstance(made, Env | HostEnvFactory):
        raise ValueError(
            f"the factory of {name} returned {reprlib.repr(made)}, which is neither a podium.Env nor a "
            "podium.HostEnvFactory."
        )
    return made


def _factory_options(name: str) -> list[str] | None:
    parameters = inspect.signature(_factories[name]).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]
