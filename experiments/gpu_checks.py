"""Whether podium computes on this machine's accelerator what it computes on its CPU; pieces of `benchmark.py gpu`.

python experiments/gpu_checks.py parity     # one update of each agent, here and on the CPU
python experiments/gpu_checks.py traces     # memory of Atari games, by the emulator's kernel and by XLA
python experiments/gpu_checks.py record     # write gpu_traces.json, on a CPU on which the tests pass
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import podium
from podium import Agent, Env, testing
from podium.agents import a2c, apex, dqn, impala, ippo, mappo, muzero, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.commands.console import guard, read_flags

TRACES = Path(__file__).resolve().parent / "gpu_traces.json"
GAMES = ("Pong", "Breakout", "Freeway", "SpaceInvaders")
XLA_STEPS = 2
"""Of a trace where there is the kernel too: XLA runs each instruction of the console as dozens of kernels."""
TOLERANCE = 0.02
"""Of an update's difference, in norm, relative to the update; devices add in another order, and Adam's first steps
have the same length for gradients that are all but zero."""

HIDDEN: dict[str, Any] = {"hidden_sizes": (32,)}
REPLAY: dict[str, Any] = {**HIDDEN, "buffer_capacity": 1024, "batch_size": 32, "min_replay_size": 64}
SEARCHED: dict[str, Any] = {"num_simulations": 8, "batch_size": 32, "min_replay_size": 64, "buffer_capacity": 1024}
WINDOWS: dict[str, Any] = {"sequence_length": 8, "burn_in": 2, "sequence_period": 4, "num_actors": 16}

AGENTS: dict[str, tuple[str | Env, Callable[[], Agent]]] = {
    "ppo": ("podium/Catch", lambda: ppo.make(ppo.Config(**HIDDEN, normalize_obs=True, normalize_reward=True))),
    "ppo gru": ("podium/RepeatFirst", lambda: ppo.make(ppo.Config(**HIDDEN, memory="gru"))),
    "ppo continuous": ("Pendulum-v1", lambda: ppo.make(ppo.Config(**HIDDEN, squash=True))),
    "ppo resnet": ("Breakout-MinAtar", lambda: ppo.make(ppo.Config(**HIDDEN, torso="impala_resnet"))),
    "a2c": ("podium/Catch", lambda: a2c.make(a2c.Config(**HIDDEN))),
    "impala": ("podium/Catch", lambda: impala.make(impala.Config(**HIDDEN))),
    "pqn": ("podium/Catch", lambda: pqn.make(pqn.Config(**HIDDEN))),
    "dqn": ("podium/Catch", lambda: dqn.make(dqn.Config(**REPLAY))),
    "apex": ("podium/Catch", lambda: apex.make(apex.Config(**REPLAY, num_actors=16))),
    "r2d2": ("podium/RepeatFirst", lambda: r2d2.make(r2d2.Config(**REPLAY, **WINDOWS))),
    "rainbow": ("podium/Catch", lambda: rainbow.make(rainbow.Config(**REPLAY))),
    "sac": ("Pendulum-v1", lambda: sac.make(sac.Config(**REPLAY))),
    "td3": ("Pendulum-v1", lambda: td3.make(td3.Config(**REPLAY))),
    "reppo": ("Pendulum-v1", lambda: reppo.make(reppo.Config(**HIDDEN))),
    "ippo": ("podium/Tag", lambda: ippo.make(ippo.Config(**HIDDEN))),
    "mappo": (testing.probe_team(4), lambda: mappo.make(mappo.Config(**HIDDEN))),
    "muzero": ("CartPole-v1", lambda: muzero.make(muzero.Config(**SEARCHED))),
}
"""By a name: an environment or its name, and an agent that learns in its first update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Check something."""

    what: Annotated[Literal["parity", "parameters", "traces", "record", "policy"], tyro.conf.Positional]
    """parameters writes those of every agent after an update to `out`, which parity asks of another process; policy
    writes those that a run's newest policy acts with."""
    small: bool = False
    """One agent, one game: to see that it runs."""
    only: tuple[str, ...] = ()
    """Names of the agents, or of the games, to take; none: all of them."""
    out: Path | None = None
    """For parameters and policy: the file."""
    run: Path | None = None
    """For policy: the folder of the run."""


def chosen(flags: Flags, names: Iterable[str]) -> list[str]:
    """Return which of the names are checked.

    Raises:
      ValueError: others are asked for.
    """
    names = list(names)
    if unknown := sorted(set(flags.only) - set(names)):
        raise ValueError(f"only={', '.join(unknown)} is none of {', '.join(names)}.")
    return list(flags.only) or names[: 1 if flags.small else None]


def parameters(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the parameters with which each agent acts, flat, before and after an update on the first device."""
    found = {}
    for name in names:
        env, make = AGENTS[name]
        env = podium.envs.make_pure(env) if isinstance(env, str) else env
        program = podium.Anakin(devices=1).build(make(), env, num_envs=16, rollout_length=16)
        acts = lambda state, program=program: _flat(program.agent.actor(program.agent_state(state)))
        state = program.init(0)
        found[f"{name}/before"] = acts(state)
        state, _ = program.chunk(state, 1)
        found[f"{name}/after"] = acts(state)
    return found


def _flat(params: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(jax.device_get(params))])


def parity(flags: Flags) -> dict[str, Any]:
    """Compare an update with that of a process that has only the CPU."""
    names = chosen(flags, AGENTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parameters.npz"
        command = [sys.executable, __file__, "parameters", "--out", str(path), "--only", *names]
        with subprocess.Popen(
            command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL
        ) as elsewhere:
            jax.config.update("jax_default_matmul_precision", "highest")
            mine = parameters(names)
        if elsewhere.returncode:
            raise ValueError(f"the process of the CPU ended with exit code {elsewhere.returncode}.")
        with np.load(path) as file:
            theirs = dict(file)
    relative = {name: _difference(mine, theirs, name) for name in names}
    ok = all(x <= TOLERANCE for x in relative.values())  # NaN is no small difference.
    return {"relative_difference": relative, "tolerance": TOLERANCE, "ok": ok}


def _difference(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], name: str) -> float:
    """Return how far two updates of an agent are apart, relative to the other's."""
    before, after = f"{name}/before", f"{name}/after"
    update = np.linalg.norm(theirs[after] - theirs[before])
    return float(np.linalg.norm(mine[after] - theirs[after]) / update) if update else float("inf")


def trace(game: str, backend: str, steps: int, num_envs: int = 4) -> list[str]:
    """Return a hash of all environments' memory after every step, of actions that are the same everywhere."""
    env = podium.envs.make(f"atari/{game}", observation="ram", backend=backend, noop_max=0)
    assert isinstance(env, Env)
    actions = np.random.default_rng(7).integers(0, env.spec.action.num_values, (steps, num_envs))  # type: ignore[union-attr]
    keys = jax.random.split(jax.random.key(0), num_envs)
    state, timestep = jax.jit(jax.vmap(env.reset))(keys)
    step, hashes = jax.jit(jax.vmap(env.step)), []
    for action in actions:
        state, timestep = step(keys, state, action.astype(np.int32))
        ram = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(timestep.obs)])
        hashes.append(hashlib.sha256(ram.tobytes()).hexdigest()[:16])
    return hashes


def traces(flags: Flags) -> dict[str, Any]:
    """Compare games with what was recorded: by the kernel too where there is a GPU (elsewhere it is interpreted)."""
    recorded = json.loads(TRACES.read_text())
    has_kernel = jax.default_backend() == "gpu"
    first_difference: dict[str, int | None] = {}
    todo = [(game, "pallas" if has_kernel else "xla", 8 if flags.small else None) for game in chosen(flags, GAMES)]
    if has_kernel and GAMES[0] in chosen(flags, GAMES):
        todo.append((GAMES[0], "xla", XLA_STEPS))  # Which takes a minute to compile for a GPU: one game must do.
    for game, backend, few in todo:
        wanted = recorded[game][:few]
        pairs = enumerate(zip(trace(game, backend, len(wanted)), wanted, strict=True))
        first_difference[f"{game} {backend}"] = next((step for step, (a, b) in pairs if a != b), None)
    return {"first_difference": first_difference, "ok": not any(x is not None for x in first_difference.values())}


def check(flags: Flags) -> int:
    """Check, print JSON, and return the exit code: 1 for a difference."""
    if flags.what == "record":
        TRACES.write_text(json.dumps({game: trace(game, "xla", 128) for game in GAMES}, indent=1) + "\n")
        return 0
    if flags.what == "parameters":
        if flags.out is None:
            raise ValueError("parameters needs --out, the file to write.")
        jax.config.update("jax_default_matmul_precision", "highest")
        np.savez(flags.out, **parameters(chosen(flags, AGENTS)))  # type: ignore[arg-type]
        return 0
    if flags.what == "policy":
        if flags.out is None or flags.run is None:
            raise ValueError("policy needs --run, the folder of a run, and --out, the file to write.")
        leaves = jax.tree.leaves(podium.load(flags.run).params)
        np.savez(flags.out, *[np.asarray(x) for x in leaves])
        print(json.dumps({"what": flags.what, "file": str(flags.out), "arrays": len(leaves)}))
        return 0
    row = {"parity": parity, "traces": traces}[flags.what](flags)
    device = jax.devices()[0]
    print(json.dumps({"what": flags.what, **row, "device": device.device_kind, "jax": jax.__version__}))
    if not row["ok"]:
        print(f"error: {flags.what} differs: {row}", file=sys.stderr)
    return 0 if row["ok"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Check, and return the exit code."""
    return guard(lambda: check(read_flags(Flags, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
