"""`podium plan`: find the fastest placement for an agent and an environment on this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import podium
from podium import agents, envs
from podium.commands import plugins
from podium.commands.console import check_file, read_flags, read_options
from podium.files import write_json
from podium.types import ArraySpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Find the fastest placement: run every one for a moment, and the fastest longer."""

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
    """Of each turn of a placement, about; compiling comes on top."""
    placements: tuple[str, ...] | None = None
    """Names to compare; None for all. Evolution is run and recommended only where it is named."""
    seed: int = 0
    """Of everything random."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register agents, environments or placements of your own."""
    json: Path | None = None
    """File for the whole plan."""


def run(argv: Sequence[str]) -> int:
    """Plan as the command line says.

    Raises:
      ValueError: a flag or its value is wrong, said in a sentence.
    """
    plugins.load(argv)
    flags = read_flags(Flags, argv, prog="podium plan")
    check_file("--json", flags.json)
    if flags.devices is not None and (sentence := podium.request_devices(flags.devices)):
        print(sentence)  # Before anything starts JAX.
    fields = read_options(flags.agent_options, "--agent-options")
    try:
        env = envs.make(flags.env, **read_options(flags.env_options, "--env-options"))
    except RuntimeError as error:  # Data that the environment needs are missing.
        raise ValueError(str(error)) from error
    obs = env.spec.obs
    if isinstance(obs, ArraySpec) and len(obs.shape) == 3 and obs.dtype == "uint8" and "torso" not in fields:
        fields["torso"] = "nature_cnn"
        print('Frames are seen through torso=nature_cnn; --agent-options "torso=..." takes another.')
    comparison = podium.plan(
        agents.make(flags.agent, fields, env),
        env,
        num_envs=flags.num_envs,
        rollout_length=flags.rollout_length,
        devices=flags.devices,
        seconds=flags.seconds,
        placements=flags.placements,
        seed=flags.seed,
        say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
    )
    print(comparison)
    if flags.json:
        write_json(flags.json, comparison.record())
    return 0
