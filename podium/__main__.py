"""The command line of the library itself: `python -m podium plan --agent impala --env Pong-v5 --devices 8`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import podium
from podium import agents, envs
from podium.command import guard, read_flags, read_options
from podium.files import write_json
from podium.types import ArraySpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Find the fastest placement: time the stages here, predict every placement from them, and run the best."""

    agent: str = "ppo"
    """Agent, by a name of podium.agents.names()."""
    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    agent_options: tuple[str, ...] = ()
    """Fields of the agent's Config, each NAME=VALUE, such as "hidden_sizes=(1024,1024)"."""
    env_options: tuple[str, ...] = ()
    """Options of the environment, each NAME=VALUE."""
    num_envs: int | None = None
    """Environments side by side; None for 64."""
    rollout_length: int | None = None
    """Steps of every environment before each learning phase; None takes the agent's own."""
    devices: int | None = None
    """Number of devices; None takes all. On a CPU, more than there are makes virtual ones."""
    seconds: float = 1.0
    """That each stage, and each turn of a run, is timed for, about; compiling comes on top."""
    top: int = 2
    """How many of the best are run, 0 for none."""
    placements: tuple[str, ...] | None = None
    """Names to compare; None for all. Evolution is run and recommended only where it is named."""
    seed: int = 0
    """Of everything random."""
    json: Path | None = None
    """File for the whole plan."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code: 2 where it is refused, in one sentence."""
    given = sys.argv[1:] if argv is None else argv
    return guard(lambda: _run(given))


def _run(argv: Sequence[str]) -> int:
    command, *rest = argv or ("",)
    if command in ("-h", "--help"):
        print(f"{__doc__}\n\nplan: {PlanFlags.__doc__}\npython -m podium plan --help lists every flag.")
        return 0
    if command != "plan":
        raise ValueError(f"{command!r} is no command; there is plan, as in python -m podium plan --help.")
    return _plan(read_flags(PlanFlags, rest, prog="python -m podium plan"))


def _plan(flags: PlanFlags) -> int:
    if flags.devices is not None and (sentence := podium.request_devices(flags.devices)):
        print(sentence)  # Before anything starts JAX.
    if not 0 <= flags.seed < 2**32:
        raise ValueError(f"seed={flags.seed} must lie between 0 and 2**32 - 1.")
    fields = read_options(flags.agent_options, "--agent-options")
    try:
        env = envs.make(flags.env, **read_options(flags.env_options, "--env-options"))
    except RuntimeError as error:  # Data that the environment needs are missing.
        raise ValueError(str(error)) from error
    obs = env.spec.obs
    if isinstance(obs, ArraySpec) and len(obs.shape) == 3 and obs.dtype == "uint8" and "torso" not in fields:
        fields["torso"] = "nature_cnn"
        print('Frames are seen through torso=nature_cnn; --agent-options "torso=..." takes another.')
    forecast = podium.plan(
        agents.make(flags.agent, fields),
        env,
        num_envs=flags.num_envs,
        rollout_length=flags.rollout_length,
        devices=flags.devices,
        seconds=flags.seconds,
        top=flags.top,
        placements=flags.placements,
        seed=flags.seed,
        say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
    )
    print(forecast)
    if flags.json:
        write_json(flags.json, forecast.record())
    return 0


if __name__ == "__main__":
    sys.exit(main())
