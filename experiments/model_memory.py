"""What a device holds where devices share a network: the agent's State by the width of its layers, in a table.

python experiments/model_memory.py                    # from shapes, in seconds
python experiments/model_memory.py --temporaries      # and what the compiled program takes beside it, in minutes

Nothing is trained, and nothing is said of speed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import tyro

import podium
from podium.agents import ppo
from podium.report import in_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Say what a device holds of PPO's State."""

    widths: tuple[int, ...] = (256, 1024, 4096)
    """Units of each of two hidden layers."""
    env: str = "CartPole-v1"
    """A pure environment."""
    num_envs: int = 64
    """Environments side by side."""
    rollout_length: int = 32
    """Steps of each in an update."""
    temporaries: bool = False
    """Whether to compile, for what the program takes beside its State and the environments'."""


def layouts() -> Mapping[str, podium.Anakin]:
    """Return the layouts beside one another, by what they are called in the table."""
    return {
        "1 device": podium.Anakin(1),
        "8 devices": podium.Anakin(8),
        "8, model=2": podium.Anakin(8, model=2),
        "8, model=4": podium.Anakin(8, model=4),
        "8, model=8": podium.Anakin(8, model=8),
        '8, shard="parameters"': podium.Anakin(8, shard="parameters"),
        '8, model=2, shard="parameters"': podium.Anakin(8, model=2, shard="parameters"),
    }


def cell(flags: Flags, width: int, placement: podium.Anakin) -> str:
    """Return what a device holds of the State, and what the program takes beside it where that is asked for."""
    agent, env = ppo.make(ppo.Config(hidden_sizes=(width, width))), podium.envs.make(flags.env)
    program = placement.build(agent, env, num_envs=flags.num_envs, rollout_length=flags.rollout_length)
    held = in_bytes(sum(map(share, jax.tree.leaves(program.abstract_state().agent))))
    if not flags.temporaries:
        return held
    memory = program.loop.memory_analysis()  # type: ignore[attr-defined]
    return f"{held} + {in_bytes(memory.temp_size_in_bytes)}"


def share(array: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array that one device holds."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; `arguments` are those of the command line."""
    flags = tyro.cli(Flags, args=arguments, description=__doc__)
    podium.request_devices(8)
    print(f"| hidden_sizes | {' | '.join(layouts())} |\n|{'---|' * (1 + len(layouts()))}")
    for width in flags.widths:
        cells = [cell(flags, width, placement) for placement in layouts().values()]
        print(f"| ({width}, {width}) | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
