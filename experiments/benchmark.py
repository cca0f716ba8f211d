"""Measure: one JSON object a line on standard output, compile time apart, every repeat beside the median.

python experiments/benchmark.py anakin --agent ppo --env CartPole-v1
python experiments/benchmark.py paired --env CartPole-v1
python experiments/benchmark.py solve --env CartPole-v1 --threshold 475
python experiments/benchmark.py sebulba --env Pong-v5 --network negligible
python experiments/benchmark.py central --num-envs 64
python experiments/benchmark.py replay --env Pong-v5 --capacity 1000000
python experiments/benchmark.py search --env podium/ConnectFour
python experiments/benchmark.py sac --buffer-capacity 1000000
python experiments/benchmark.py atari --game Pong --num-envs 1024 --mode emulate
python experiments/benchmark.py tag --agents 10 100 1000
python experiments/benchmark.py env --env CartPole-v1 --num-envs 1024
python experiments/benchmark.py scaling --env CartPole-v1
python experiments/benchmark.py matmul
python experiments/benchmark.py gpu --part 1 --minutes 8 --out gpu
"""

from __future__ import annotations

import functools
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import anakin_rate
import atari_rate
import bounds
import central_rate
import evolution_rate
import gpu
import machine
import paired_rate
import replay_rate
import sac_rate
import search_rate
import sebulba_rate
import solve_time
import sweep_rate
import tag_rate
import tyro

from podium.commands.console import guard, read_flags

Measure = Callable[[Any], dict[str, Any] | Iterator[dict[str, Any]]]

MODES: dict[str, tuple[type, Measure]] = {
    "anakin": (anakin_rate.AnakinFlags, anakin_rate.measure),
    "paired": (paired_rate.PairedFlags, paired_rate.measure),
    "solve": (solve_time.SolveFlags, solve_time.measure),
    "sebulba": (sebulba_rate.SebulbaFlags, sebulba_rate.measure),
    "central": (central_rate.CentralFlags, central_rate.measure),
    "evolution": (evolution_rate.EvolutionFlags, evolution_rate.measure),
    "sac": (sac_rate.SacFlags, sac_rate.measure),
    "sweep": (sweep_rate.SweepFlags, sweep_rate.measure),
    "search": (search_rate.SearchFlags, search_rate.measure),
    "replay": (replay_rate.ReplayFlags, replay_rate.measure),
    "atari": (atari_rate.AtariFlags, atari_rate.measure),
    "tag": (tag_rate.TagFlags, tag_rate.measure),
    "env": (bounds.EnvFlags, bounds.of_environments),
    "scaling": (anakin_rate.ScalingFlags, anakin_rate.scale),
    "matmul": (bounds.MatmulFlags, bounds.of_products),
    "gpu": (gpu.GpuFlags, gpu.measure),
}
"""What can be measured: its flags, and the function of them that gives a row, or one row after another."""

BY_OTHERS = frozenset({"scaling", "gpu"})
"""Modes that measure in processes of their own, one after another: JAX, and a GPU's memory, is theirs alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    modes = [Annotated[flags, tyro.conf.subcommand(name)] for name, (flags, _) in MODES.items()]
    flags = read_flags(functools.reduce(operator.or_, modes), argv, description="Measure; one JSON object a line.")
    mode, measure = next((name, measure) for name, (known, measure) in MODES.items() if known is type(flags))
    rows = measure(flags)
    for row in [rows] if isinstance(rows, dict) else rows:
        print(json.dumps(row if mode in BY_OTHERS else {**row, **machine.circumstances()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
