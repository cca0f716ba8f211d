"""What the training scripts share: flags, refusals, the plan, the compilation cache, the closing words.

A script adds its agent's `Config` to `AnakinFlags` or `SebulbaFlags` by inheritance, so that every hyperparameter is a
flag, and calls `main`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import tyro
from presets import Preset

import podium
from podium import distributed
from podium.command import guard, read_flags, read_options
from podium.env import Env
from podium.host import HostEnvs, frames_per_step
from podium.loop import Result
from podium.placement.devices import request_cpu_threads
from podium.placement.program import Placement, Program, Sizes
from podium.runs import default_run_dir
from podium.schedule import Schedule
from podium.types import DiscreteSpec

NO_PRESET = "none"

Flags = TypeVar("Flags", bound="RunFlags")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of a run, whatever the agent."""

    preset: str | None = None
    """Named values for an environment, under all other flags; None takes the one made for --env where there is one,
    and "none" the plain defaults."""
    list_presets: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show every preset, its values, where they come from and whether they were tuned here; then end."""
    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    env_options: tuple[str, ...] = ()
    """Options of the environment, each NAME=VALUE."""
    cpu_threads: int | None = None
    """Threads that a CPU computes on; None takes one a core. One is faster for small networks and batches."""
    num_envs: int = 64
    """Environments side by side in each run; the devices must divide it."""
    rollout_length: int = 128
    """Steps of every environment before each learning phase."""
    num_steps: int = 500_000
    """Environment steps of each run; rounded down to whole rollouts."""
    num_lanes: int | None = None
    """Groups of environments that are shuffled and sampled apart; None chooses. The devices must divide it."""
    seed: int = 0
    """Fixes everything random, 0 or more."""
    run_dir: Path | None = None
    """Folder for configuration, metrics, curve and checkpoints; None takes runs/AGENT-ENV-TIME."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with the run in --run-dir, exactly: give the same command again with this flag."""
    eval_every: int | None = None
    """Environment steps between evaluations; None for ten over the run, 0 for one at the end."""
    eval_episodes: int = 128
    """Episodes of an evaluation."""
    checkpoint_every: int | None = None
    """Environment steps between checkpoints; None at every evaluation, 0 for one at the end."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep; the best is kept besides."""
    log_every: int | None = None
    """Environment steps between rows of metrics; None for a hundred over the run."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Whether Weights & Biases gets the metrics too."""
    distributed: tyro.conf.FlagCreatePairsOff[bool] = False
    """Be one of several processes of the run: start the same command in each, by srun or mpirun (or give each
    $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES and $JAX_PROCESS_ID). Numbers of devices are then those of each
    process, environments and steps those of the whole run."""
    progress: bool = True
    """Show a line of progress while training."""
    compilation_cache: bool = True
    """Keep compiled programs in a folder of this user ($PODIUM_CACHE, else $XDG_CACHE_HOME/podium, else
    ~/.cache/podium), so that the same command starts sooner the next time."""

    def options_of_env(self) -> dict[str, Any]:
        """Return what the environment is made with."""
        return read_options(self.env_options, "--env-options")

    def number_of_devices(self) -> int | None:
        """Return how many devices are asked for; None asks for none in particular."""
        return None

    def number_of_seeds(self) -> int:
        """Return how many independent runs are asked for."""
        return 1

    def number_of_envs(self) -> int:
        """Return how many environments run side by side."""
        return self.num_envs

    def placement(self) -> Placement:
        """Return where it all runs."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnakinFlags(RunFlags):
    """Flags of a run in one compiled program."""

    devices: int | None = None
    """Number of devices (of each process); None takes all. On a CPU, more than there are makes virtual ones."""
    seeds: int = 1
    """Number of independent runs in the one program."""

    def number_of_devices(self) -> int | None:
        """Return --devices."""
        return self.devices

    def number_of_seeds(self) -> int:
        """Return --seeds."""
        return self.seeds

    def placement(self) -> Placement:
        """Return Anakin on --devices."""
        return podium.Anakin(devices=self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SebulbaFlags(RunFlags):
    """Flags of a run that acts and learns on devices and steps environments on the CPU."""

    env: str = "Pong-v5"
    """Environment, by a name of podium.envs.names()."""
    num_envs: int = 8
    """Environments side by side; the actor threads must divide it."""
    actor_devices: int = 1
    """Devices that act: the first there are."""
    learner_devices: int = 1
    """Devices that learn: those after them; where there are not enough, both use the same."""
    actor_threads: int = 1
    """Threads of each actor device, with environments of their own."""
    envs_per_thread: int | None = None
    """Environments of a thread, in place of --num-envs; None divides --num-envs among the threads."""
    groups: int = 2
    """Batches that a thread's environments form: one steps while another is acted for."""
    queue_depth: int = 1
    """Rollouts of a thread that may wait for the learner."""
    max_lag: int | None = None
    """Rollouts whose policy is more updates old than this are dropped; None keeps all."""
    lockstep: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let each rollout wait for the update before it, as if all were one program."""
    actor_timeout: float = 60.0
    """Seconds without a step after which a thread counts as hung, and the run ends."""

    def number_of_devices(self) -> int | None:
        """Return how many acting and learning need."""
        return _needed(self.actor_devices, self.learner_devices)

    def number_of_envs(self) -> int:
        """Return the environments of all threads."""
        if self.envs_per_thread is None:
            return self.num_envs
        return self.envs_per_thread * self.actor_threads * self.actor_devices * distributed.num_processes()

    def placement(self) -> Placement:
        """Return Sebulba as these flags say."""
        return podium.Sebulba(**_fields_of(podium.Sebulba, self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedActorsFlags(RunFlags):
    """Flags of a run whose workers play with a copy of the policy each, and whose learner takes what they bring."""

    num_envs: int = 16
    """Environments side by side; the workers must divide it."""
    workers: int = 4
    """Workers, with environments of their own."""
    worker_devices: int = 1
    """Devices that act, which workers take turns in: the first there are."""
    learner_devices: int = 1
    """Devices that learn: those after them; where there are not enough, both use the same."""
    refresh_every: int = 1
    """Rollouts that a worker plays with the same parameters."""
    queue_depth: int = 1
    """Rollouts of a worker that may wait for the learner."""
    max_lag: int | None = None
    """Rollouts whose policy is more updates old than this are dropped; None keeps all."""
    lockstep: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let each rollout wait for the update before it, as if all were one program."""
    replay_apart: bool = True
    """Keep the replay apart: rollouts go into it as they come, learning samples from it, and the faster waits."""
    replay_tolerance: float = 1.0
    """Updates that inserting and sampling may then be ahead of each other, above 0."""
    restarts: int = 0
    """Failures of workers that the run survives."""
    worker_timeout: float = 60.0
    """Seconds without progress after which a worker counts as hung, and the run ends."""
    engine: Literal["threads", "ray"] = "threads"
    """Where workers play: in threads of this process, or in a Ray actor each."""
    replay_engine: Literal["threads", "ray"] = "threads"
    """Where a replay apart is: in this process, or in a Ray actor."""

    def number_of_devices(self) -> int | None:
        """Return how many acting and learning need."""
        return _needed(self.worker_devices, self.learner_devices)

    def placement(self) -> Placement:
        """Return DistributedActors as these flags say."""
        return podium.DistributedActors(**_fields_of(podium.DistributedActors, self))


def _needed(acting: int, learning: int) -> int | None:
    """Return how many devices both need; None where one does for both."""
    return acting + learning if acting + learning > 2 else None


def _fields_of(placement: Any, flags: RunFlags) -> dict[str, Any]:
    """Return the settings of a placement that are flags."""
    names = {field.name for field in dataclasses.fields(flags)}
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(placement) if field.name in names}


class Chosen(NamedTuple):
    """The flags of a run, and in words which defaults lie under them."""

    flags: Any
    preset: str


def parse(flags_class: type[Flags], presets: Mapping[str, Preset], argv: Sequence[str]) -> Chosen:
    """Read the command line: explicit flags over a preset over the plain defaults.

    Raises:
      ValueError: one sentence about the flag that is wrong.
    """
    defaults = flags_class()
    asked, env = _find(argv, "--preset"), _find(argv, "--env")
    name, why = asked, "asked for"
    if name in (None, "None"):
        wanted = env or defaults.env
        name = next((key for key, preset in presets.items() if preset.env == wanted), None)
        why = f"made for {wanted}; --preset {NO_PRESET} takes the plain defaults"
    if name in (None, NO_PRESET):
        words = f"none: plain defaults{'' if asked else f' (there is no preset for {env})'}"
    elif name not in presets:
        raise ValueError(_unknown_preset(name, presets))
    else:
        preset = presets[name]
        defaults = dataclasses.replace(defaults, env=preset.env, **preset.values)
        words = f"{name} ({why}). Source: {preset.source} {preset.tuned_words}"
    return Chosen(read_flags(flags_class, argv, default=defaults, description=_about(presets)), words)


def main(
    flags_class: type[RunFlags],
    agents: types.ModuleType,
    presets: Mapping[str, Preset],
    sizes_in_words: Callable[[Any, Sizes], Mapping[str, str]],
    argv: Sequence[str] | None = None,
) -> int:
    """Train as the command line says.

    Args:
      flags_class: `AnakinFlags`, `SebulbaFlags` or `DistributedActorsFlags` with the fields of `agents.Config`.
      agents: module of the agent: `Config` and `make`.
      presets: by name.
      sizes_in_words: `(agent config, Sizes) -> rows of the plan` about what an iteration learns from.
      argv: flags; None takes those of the process.

    Returns:
      the exit code: 0, 1 for a run that failed, 2 for one that was refused, 128 + n for one that signal n stopped.
    """
    argv = sys.argv[1:] if argv is None else argv
    return guard(lambda: _train(flags_class, agents, presets, sizes_in_words, argv))


def agent_config(config_class: Any, flags: RunFlags) -> Any:
    """Return the agent's `Config` among the flags."""
    return config_class(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(config_class)})


def use_compilation_cache() -> Path | None:
    """Let JAX keep compiled programs in a folder of this user alone, and return it; None where it cannot be made.

    Whoever can write the folder can run code here, so it is made with mode 0700, refused if it is somebody else's,
    and never part of a run folder.
    """
    base = os.environ.get("PODIUM_CACHE")
    if base:
        folder = Path(base) / "jax"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podium" / "jax"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _train(
    flags_class: type[RunFlags],
    agents: types.ModuleType,
    presets: Mapping[str, Preset],
    sizes_in_words: Callable[[Any, Sizes], Mapping[str, str]],
    argv: Sequence[str],
) -> int:
    if "--list-presets" in argv:
        print(list_presets(presets))
        return 0
    flags, preset = parse(flags_class, presets, argv)
    if flags.resume and flags.run_dir is None:
        raise ValueError("--resume needs --run-dir, the folder of the run to go on with.")
    if not 0 <= flags.seed < 2**32:
        raise ValueError(f"seed={flags.seed} must lie between 0 and 2**32 - 1.")
    if flags.cpu_threads is not None and (late := request_cpu_threads(flags.cpu_threads)):
        print(late)
    if flags.distributed:
        distributed.initialize()
    devices = flags.number_of_devices()
    if devices is not None and (sentence := podium.request_devices(devices)) and distributed.is_first():
        print(sentence)
    if flags.compilation_cache:
        use_compilation_cache()
    config = agent_config(agents.Config, flags)
    agent = agents.make(config)
    # By process 0, because the name holds the time.
    run_dir = flags.run_dir or Path(distributed.from_first(str(default_run_dir(f"{agent.name}-{flags.env}"))))

    def announce(program: Program, schedule: Schedule) -> None:
        learning = {**_learning_in_words(config), **sizes_in_words(config, program.sizes)}
        print(plan(flags, program, schedule, run_dir, preset, learning), flush=True)

    result = podium.train(
        agent,
        flags.env,
        num_steps=flags.num_steps,
        num_envs=flags.number_of_envs(),
        rollout_length=flags.rollout_length,
        placement=flags.placement(),
        seed=flags.seed,
        seeds=flags.number_of_seeds(),
        num_lanes=flags.num_lanes,
        eval_every=flags.eval_every,
        eval_episodes=flags.eval_episodes,
        checkpoint_every=flags.checkpoint_every,
        log_every=flags.log_every,
        run_dir=run_dir,
        resume=flags.resume,
        keep_checkpoints=flags.keep_checkpoints,
        progress=flags.progress,
        wandb=flags.wandb,
        env_options=flags.options_of_env(),
        announce=announce,
    )
    if result.interrupted:
        return 128 + signal.Signals[result.interrupted]
    if distributed.is_first():
        print(closing_words(result))
    return 0


def plan(
    flags: RunFlags, program: Program, schedule: Schedule, run_dir: Path, preset: str, learning: Mapping[str, str]
) -> str:
    """Return in lines what is about to happen; `learning` are rows about what an iteration learns from."""
    devices, sizes, per_update = program.devices, program.sizes, schedule.steps_per_update
    by_seed = sizes.seeds > 1 and sizes.seeds % len(devices) == 0
    steps, frames = schedule.total * per_update, frames_per_step(program.env)
    counted = f" ({steps * frames:,} frames)" if frames > 1 else ""
    rounded = "" if steps == flags.num_steps else f", rounded down from {flags.num_steps:,} to whole rollouts"
    share = f"{sizes.seeds // len(devices)} whole runs" if by_seed else f"{sizes.num_envs // len(devices)} environments"
    processes = distributed.num_processes()
    rows = {
        "agent": program.agent.name,
        "environment": flags.env + "".join(f" {option}" for option in flags.env_options),
        "actions": _actions(program.env),
        "preset": preset,
        "devices": f"{len(devices)} {devices[0].platform} ({devices[0].device_kind}), {share} on each",
        **({"processes": f"{processes}, {sizes.num_envs // processes} environments in each"} if processes > 1 else {}),
        "seeds": str(sizes.seeds) + (f" independent runs from seed {flags.seed}" if sizes.seeds > 1 else ""),
        "environments": f"{sizes.num_envs} x {sizes.rollout_length} steps a rollout, in {sizes.num_lanes} lanes",
        "steps": f"{steps:,}{counted}{' a seed' if sizes.seeds > 1 else ''}{rounded}",
        "updates": f"{schedule.total:,} rollouts of {per_update:,} steps",
        **learning,
        "evaluations": f"{_times(schedule, schedule.evaluate)} of {flags.eval_episodes} episodes"
        + _protocol(program.env),
        "checkpoints": f"{_times(schedule, schedule.checkpoint)}, keeping {flags.keep_checkpoints} and the best",
        "run folder": f"{run_dir}{' (resumed)' if flags.resume else ''}",
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([*lines, "", *(f"  {line}" for line in program.explain().splitlines()), ""])


def closing_words(result: Result) -> str:
    """Return in lines how a run ended and how to look at it."""
    summary = result.summary
    rows = {
        "eval return": f"{_mean(summary['eval_return'])}, greedy, at {summary['env_steps']:,} steps",
        "speed": f"{summary['steps_per_second']:,.0f} steps/s" if summary["steps_per_second"] else "nothing left to do",
        "time": f"{summary['wall_seconds']:.1f} s, of which {summary['compile_seconds']:.1f} s compiling",
        "files": f"{result.run_dir}: summary.json, metrics.jsonl, curve.png, checkpoints/",
        "replay": f"python {_shown('replay.py')} {shlex.quote(str(result.run_dir))}",
    }
    return "\n".join(f"  {name:<11}  {text}" for name, text in rows.items())


def list_presets(presets: Mapping[str, Preset]) -> str:
    """Return every preset with its values, their source and whether they were tuned here."""
    parts = []
    for name, preset in presets.items():
        values = " ".join(
            f"{key}={' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for key, value in preset.values.items()
        )
        parts.append(f"{name}: {preset.env}\n  values: {values}\n  source: {preset.source}\n  {preset.tuned_words}")
    return "\n".join(parts)


def _about(presets: Mapping[str, Preset]) -> str:
    names = ", ".join(f"{name} ({preset.env})" for name, preset in presets.items())
    return (
        f"Presets: {names}; --list-presets says where their values come from. Defaults below are those of the preset "
        "in force. Steps and intervals count environment steps of one run."
    )


def _find(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag without reading the others; the last one counts, as for tyro."""
    value = None
    for index, here in enumerate(argv):
        if here == flag:
            value = argv[index + 1] if index + 1 < len(argv) else None
        elif here.startswith(flag + "="):
            value = here[len(flag) + 1 :]
    return value


def _unknown_preset(name: str | None, presets: Mapping[str, Preset]) -> str:
    from podium.envs import near_misses

    near = near_misses(name or "", list(presets))
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"--preset={name!r} is unknown.{hint} There are: {', '.join(presets)}, and {NO_PRESET}."


def _actions(env: Env) -> str:
    action = env.spec.action
    return f"{action.num_values} discrete" if isinstance(action, DiscreteSpec) else f"{action.shape} continuous"


def _learning_in_words(config: Any) -> dict[str, str]:
    """Return the rows of the plan that every agent has, or would not need: an optimiser, and perhaps a memory."""
    optimizer, anneal = getattr(config, "optimizer", "adam"), getattr(config, "anneal_steps", 0)
    falling = f", falling to 0 over {anneal:,} steps" if anneal else ""
    rows = {"learning rate": f"{config.learning_rate:g} ({optimizer}){falling}"}
    memory = getattr(config, "memory", "none")
    return rows | ({"memory": f"{memory}, {config.memory_size} units"} if memory != "none" else {})


def _protocol(env: Env | HostEnvs) -> str:
    """Say how episodes of an evaluation are played, where that needs saying."""
    task = (env.evaluation or env) if isinstance(env, HostEnvs) else None
    return f": {task.protocol}" if task and task.protocol else ""


def _times(schedule: Schedule, every: int) -> int:
    return len({*range(every, schedule.total + 1, every)} | {schedule.total}) if every else 1


def _mean(value: Any) -> str:
    if isinstance(value, list):
        return f"{sum(value) / len(value):.4g} mean of {len(value)} seeds ({min(value):.4g} to {max(value):.4g})"
    return f"{value:.4g}"


def _shown(script: str) -> str:
    """Return the path of a script beside this one, as one types it from here."""
    path = Path(__file__).resolve().parent / script
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd().resolve()))
    return str(path)
