"""Count what a GPU is asked to run in an update, without a GPU: compile for one, and read what each loop launches.

    pip install "jax[cuda13]"      # its compiler; JAX then says that there is no GPU, and goes on
    python experiments/gpu_kernels.py --agent ppo --env CartPole-v1 --num-envs 64

A small kernel takes an H100 about 1.3 microseconds, whatever it does, and those of a rollout wait for one another: for
small environments their number is the time (PPO on CartPole, 64 x 128: 2.1M steps/s measured, 2.2M by the count).
Nothing is timed here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84929347584  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
runtime_version { major: 13 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Compile an agent's update under Anakin for an H100, and count."""

    agent: str = "ppo"
    """Registered agent, with its own settings."""
    env: str = "CartPole-v1"
    """Pure environment, by a name of podium.envs.names()."""
    num_envs: int = 64
    """Environments side by side."""
    rollout_length: int = 128
    """Steps of each in an update."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a loop launches in one turn, loops inside it included once.

    Attributes:
      depth: how many loops it is in.
      kernels: that compute.
      copies: of arrays, by themselves.
      launches: graphs, and kernels and copies outside of them.
    """

    depth: int
    kernels: int
    copies: int
    launches: int


def loops(text: str) -> list[Loop]:
    """Return the loops of a program, in order, from what XLA writes of its thunks.

    >>> loops('''001: kWhile
    ... condition:
    ...   002: kCustomKernel
    ... body:
    ...   000: kCommandBuffer
    ...     003: kCopy
    ...     004: kCustomKernel
    ... 005: kCopy''')
    [Loop(depth=0, kernels=2, copies=1, launches=2)]
    """
    rows = [(len(line) - len(line.lstrip()), match[1]) for line in text.splitlines() if (match := _THUNK.match(line))]
    found: list[Loop] = []
    around: list[int] = []  # Indents of the loops that a row is inside of.
    for number, (indent, kind) in enumerate(rows):
        while around and around[-1] >= indent:
            around.pop()
        if kind != "While":
            continue
        behind = rows[number + 1 :]
        end = next((i for i, (other, _) in enumerate(behind) if other <= indent), len(behind))
        inside = behind[:end]
        kinds = [kind for _, kind in inside]
        found.append(Loop(len(around), kinds.count("CustomKernel"), kinds.count("Copy"), _launches(inside)))
        around.append(indent)
    return found


_THUNK = re.compile(r"\s*\d+: k(\w+)")


def _launches(rows: list[tuple[int, str]]) -> int:
    """Return the number of graphs, and of kernels and copies that are in none."""
    count, graph = 0, None
    for indent, kind in rows:
        if graph is not None and indent > graph:
            continue
        graph = indent if kind == "CommandBuffer" else None
        count += kind in ("CommandBuffer", "CustomKernel", "Copy")
    return count


def measure(flags: Flags) -> dict[str, Any]:
    """Compile, and return the loops.

    Raises:
      ValueError: JAX has no compiler for GPUs here.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # Which asks for a driver.
        from jax.experimental import topologies  # Now that JAX's compiler is told what to write.

        import podium

        try:
            device = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1").devices[0]
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"JAX has no compiler for NVIDIA's GPUs here ({error}): pip install 'jax[cuda13]'."
            ) from error
        env = podium.envs.make_pure(flags.env)
        agent = podium.agents.make(flags.agent, env=env)
        sizes = {"num_envs": flags.num_envs, "rollout_length": flags.rollout_length}
        podium.Anakin(devices=[device]).build(agent, env, **sizes, max_updates=4).compile()
        written = Path(folder).glob("*jit__chunk*thunk_sequence_after_thunk_passes.txt")
        text = max((path.read_text() for path in written), key=len)
    return {"what": "gpu_kernels", **dataclasses.asdict(flags), "loops": [dataclasses.asdict(x) for x in loops(text)]}


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print JSON, and return the exit code."""
    from podium.commands.console import guard, read_flags

    def run() -> int:
        print(json.dumps(measure(read_flags(Flags, sys.argv[1:] if argv is None else argv))))
        return 0

    return guard(run)


if __name__ == "__main__":
    sys.exit(main())
