"""Try settings of an agent side by side: numbers vary within one compiled program, sizes from program to program.

sweep/sweep.json          what was asked for
sweep/program-0/          the run of the first program, a run folder as `podium.train` makes it; and so on
sweep/program-0-rung-1/   how those of its settings went on that were not dropped at the first halving; and so on
sweep/table.json          one object a setting, best first; written anew after every program
sweep/sweep.png           returns while training, and the last ones against every field that varies
sweep/best.txt            the best setting, as a command that trains it and as a preset
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from podium.agent import Agent
from podium.devices import Devices, resolve_devices
from podium.env import Env
from podium.evaluate import longest_evaluated
from podium.files import to_jsonable, write_json
from podium.host import HostEnvFactory
from podium.loop import Result
from podium.narrow import narrow
from podium.placement.anakin import Anakin
from podium.placement.contract import Program
from podium.ranges import check_type, is_integer, is_number, largest_divisor, nearest_multiples
from podium.report import nbytes
from podium.runs import CONFIG, check_is_path, check_new_folder
from podium.schedule import Schedule, make_schedule
from podium.space import Setting, Space, listed, settings_of
from podium.sweep_table import Group, Progress, command_of, first_reaching, rank, rows_of, write
from podium.train import agent_record, integers, resolve_env, train, usual_length
from podium.types import is_spec
from podium.varied import check_field, may_vary, varied

RECORD = "sweep.json"

SHARE_OF_MEMORY = 0.5
"""Of what is free, that the runs of a program may take."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
      table: one dict a setting, best first, of equals the one whose evaluations were better on the way; those that were
        dropped come after those that were not. The fields that vary by name; `eval_return`, the mean over seeds of the
        last greedy evaluation, `eval_returns` of each seed, `interval` (Student's, 95%) and `median`;
        `steps_to_threshold`, environment steps until the mean first reached it, None where it did not or none was asked
        for; `diverged`, how many seeds became NaN or infinite and were kept at zeros; `env_steps`, of each seed;
        `curve`, [steps, mean] of evaluations; `program`, the folder in `run_dir`, and `first_seed`, of which of its
        runs the setting's begin: `podium.load(run_dir / row["program"], seed=row["first_seed"])` is a policy of it.
      fields: names of those that vary.
      run_dir: the folder, or None.
      interrupted: the signal that ended it early, or None; settings that were not tried are not in the table then.
    """

    table: list[dict[str, Any]]
    fields: tuple[str, ...]
    run_dir: Path | None = None
    interrupted: str | None = None

    @property
    def best(self) -> Setting:
        """The fields of the best setting."""
        return {name: self.table[0][name] for name in self.fields}


def sweep(
    make: Any,
    space: Space,
    env: Env | str,
    *,
    num_steps: int,
    seeds: int = 8,
    config: Any = None,
    samples: int | None = None,
    seed: int = 0,
    at_once: int | None = None,
    devices: Devices = None,
    threshold: float | None = None,
    halve_at: Sequence[int] = (),
    num_envs: int = 64,
    rollout_length: int | None = None,
    eval_every: int | None = None,
    eval_episodes: int | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
    env_options: Mapping[str, Any] | None = None,
) -> Sweep:
    """Train an agent with every setting of a space, each with the same seeds.

    Settings that differ in numbers (rates, gamma, clips, coefficients) are one program, and so are their seeds; those
    that differ in sizes, names or switches, and a number that is 0, which may switch something off, are programs of
    their own, one after the other. So are settings that do not fit in memory together.

    Args:
      make: a module with `make` and `Config`, as `podium.agents.ppo`; or `(config) -> Agent`, with `config`.
      space: by field of the configuration a sequence or an array of values, such as `podium.log_range`, or
        `podium.Draws`.
      env: a pure environment, or a name for `podium.envs.make`.
      num_steps: environment steps of each setting and seed.
      seeds: of each setting.
      config: what all settings share; None is `make.Config()`.
      samples: settings to draw of the space; None tries every one of a grid.
      seed: fixes everything random.
      at_once: settings of a program at most; None takes as many as fit in half of the memory that is free.
      devices: as of `podium.Anakin`; None takes as many as share the runs of a program evenly. Each has whole runs.
      threshold: return whose first reaching is counted.
      halve_at: environment steps, rising, at which the worse half of the settings is dropped, by the mean over seeds
        of the greedy evaluation there (successive halving, Jamieson and Talwalkar 2016). The others go on as they
        would have without, in a smaller program.
      num_envs: environments side by side of each run.
      rollout_length: steps of each an iteration; None takes the agent's own.
      eval_every: environment steps between evaluations; see `podium.train`, also for what None means.
      eval_episodes: of an evaluation of each run; likewise.
      run_dir: folder for the runs, the table and the picture; None writes nothing.
      resume: resume the sweep in `run_dir`, exactly: what it has done is read, not done again.
      progress: say after every evaluation how far it is, and which setting is best.
      env_options: of `podium.envs.make`, where `env` is a name.

    Returns:
      a `Sweep`.

    Raises:
      ValueError: for anything out of range, before anything is compiled or written.
    """
    make, config = _resolve(make, config)
    num_steps, num_envs, rollout_length, seeds, at_once, eval_episodes = integers(
        1,
        num_steps=num_steps,
        num_envs=num_envs,
        rollout_length=rollout_length,
        seeds=seeds,
        at_once=at_once,
        eval_episodes=eval_episodes,
    )
    seed, eval_every = integers(0, seed=seed, eval_every=eval_every)
    if threshold is not None and not (is_number(threshold) and math.isfinite(threshold)):
        raise ValueError(f"threshold={threshold!r} must be a finite number, a return; use None for no threshold.")
    if run_dir is not None:
        check_is_path(run_dir)
    check_type("resume", resume, False)
    check_type("progress", progress, True)
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir, the folder of the sweep to resume.")
    if not isinstance(space, Mapping):
        raise ValueError(f"space={space!r} must be a mapping from fields of the configuration to their values.")
    space = listed(space)
    _check_fields(space, config)
    settings = settings_of(space, samples, seed)
    agents = [_made(make, config, setting) for setting in settings]
    made, env_record = resolve_env(env, env_options)
    if isinstance(made, HostEnvFactory):
        raise ValueError(f"{made.spec.name} runs on the CPU, outside compiled programs; a sweep takes pure ones.")
    length = usual_length(Anakin(), agents[0], made) if rollout_length is None else rollout_length
    path = None if run_dir is None else Path(run_dir)
    before = _recorded(path) if path and resume else {}
    if at_once is None:  # What fits may be other than it was, but a program's runs may not.
        at_once = before.get("at_once")
    at_once = _at_once(agents[0], made, num_envs, length, seeds, len(settings), at_once)
    groups = _grouped(make, config, settings, at_once)
    longest = longest_evaluated(made)
    schedule = make_schedule(
        num_steps, num_envs * length, eval_every, eval_episodes=eval_episodes, longest_episode=longest
    )
    _check_halvings(halve_at, schedule, len(settings))
    evaluations: dict[str, Any] = {"eval_every": eval_every, "eval_episodes": eval_episodes}
    if halve_at:  # Those of the whole run, not of a rung.
        plan = schedule.evaluation
        evaluations["eval_every"] = schedule.evaluate * schedule.steps_per_update
        evaluations |= {"eval_episodes": plan.episodes, "eval_steps": plan.episodes * plan.last_max_steps}
    trial = _Trial(make, config, made, env, env_options, seeds, devices, num_envs, length, seed, evaluations)
    for group in groups:
        trial.program(group)  # Refuses what does not fit, such as minibatches, before others have trained for hours.
    asked = to_jsonable(
        {
            "agent": {"name": agents[0].name, "config": config},
            "settings": settings,
            "at_once": at_once,
            "env": env_record,
            "seeds": seeds,
            "seed": seed,
            "num_envs": num_envs,
            "rollout_length": length,
            "halve_at": list(halve_at) or None,
        }
    )
    if path and resume:
        _check_same(path, before, asked)
    elif path:
        check_new_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / RECORD, asked)
    tried: dict[int, dict[str, Any]] = {}
    ranked = lambda: sorted(tried.values(), key=lambda row: (-row["env_steps"], *rank(row)))
    with contextlib.ExitStack() as stack:
        # What is left of a program goes on from its checkpoint.
        runs = Path(stack.enter_context(tempfile.TemporaryDirectory())) if halve_at and not path else path
        for rung, until in enumerate([*halve_at, num_steps]):
            if rung and runs:
                groups = [trial.go_on(*each, runs) for each in _better_half(groups, tried, rung)]
            for number, group in enumerate(groups):
                where = f"program {number + 1} of {len(groups)}"
                where += f", rung {rung + 1} of {len(halve_at) + 1}" if halve_at else ""
                say = Progress(ranked(), group, seeds, where, num_steps) if progress else None
                result = trial.train(group, until, runs, [say] if say else [])
                if result.interrupted:
                    return Sweep(ranked(), tuple(space), path, result.interrupted)
                for place, row in zip(group.places, rows_of(group, result, seeds), strict=True):
                    row["curve"] = tried.get(place, {}).get("curve", []) + row["curve"]
                    row["steps_to_threshold"] = first_reaching(threshold, row["curve"])
                    tried[place] = row
                if path:
                    best = dataclasses.replace(config, **{name: ranked()[0][name] for name in space})
                    env_named = env_record["name"], env_record["options"] or {}
                    train_as = {"num_steps": num_steps, "num_envs": num_envs, "rollout_length": length}
                    command = command_of(agents[0].name, *env_named, best, train_as)
                    write(path, ranked(), tuple(space), env_record["name"], command)
    return Sweep(ranked(), tuple(space), path)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Trains the settings of a group in one program; the arguments of `sweep` that say how."""

    make: Callable[[Any], Agent]
    config: Any
    made: Env
    env: Env | str
    env_options: Mapping[str, Any] | None
    seeds: int
    devices: Devices
    num_envs: int
    length: int
    seed: int
    evaluations: Mapping[str, Any]

    def train(self, group: Group, until: int, runs: Path | None, sinks: Sequence[Any]) -> Result:
        """Train to so many environment steps, or resume and then train."""
        folder = runs / group.folder if runs else None
        return train(
            self._agent(group),
            self.env,
            env_options=self.env_options,
            num_steps=until,
            num_envs=self.num_envs,
            rollout_length=self.length,
            placement=self._placement(group),
            seed=self.seed,
            seeds=self.seeds * len(group.numbers),
            run_dir=folder,
            resume=bool(folder and (folder / CONFIG).exists()),
            keep_checkpoints=1,
            progress=False,
            sinks=sinks,
            **self.evaluations,
        )

    def program(self, group: Group) -> Program:
        """Return the program that trains the settings of a group; raises ValueError where there can be none."""
        return self._placement(group).build(
            self._agent(group),
            self.made,
            num_envs=self.num_envs,
            rollout_length=self.length,
            seeds=self.seeds * len(group.numbers),
        )

    def go_on(self, group: Group, indices: Sequence[int], rung: int, runs: Path) -> Group:
        """Return the group of some of the settings of a group, and make the run folder that they go on from."""
        some = group.some(indices, f"{group.folder.split('-rung-')[0]}-rung-{rung}")
        if not (runs / some.folder).exists():
            keep = [index * self.seeds + seed for index in indices for seed in range(self.seeds)]
            agent = self._agent(some)
            narrow(runs / group.folder, runs / some.folder, self.program(group), keep, {"agent": agent_record(agent)})
        return some

    def _agent(self, group: Group) -> Agent:
        return varied(self.make, dataclasses.replace(self.config, **group.fixed), group.numbers)

    def _placement(self, group: Group) -> Anakin:
        return Anakin(_devices(self.devices, len(group.numbers), self.seeds, rung="-rung-" in group.folder))


def _better_half(
    groups: Sequence[Group], tried: Mapping[int, Mapping[str, Any]], rung: int
) -> list[tuple[Group, list[int], int]]:
    """Return the groups that go on, and of each the indices of the settings that do."""
    alive = [place for group in groups for place in group.places]
    kept = set(sorted(alive, key=lambda place: rank(tried[place]))[: (len(alive) + 1) // 2])
    indices = [[i for i, place in enumerate(group.places) if place in kept] for group in groups]
    return [(group, some, rung) for group, some in zip(groups, indices, strict=True) if some]


def _check_halvings(halve_at: Sequence[int], schedule: Schedule, settings: int) -> None:
    """Raise ValueError for steps at which settings cannot be halved."""
    if not isinstance(halve_at, Sequence) or isinstance(halve_at, str):
        raise ValueError(f"halve_at={halve_at!r} must be a sequence of environment steps, such as (100_000,).")
    for each in halve_at:
        if not is_integer(each, 1):
            raise ValueError(f"halve_at={list(halve_at)}: {each!r} must be a positive integer of environment steps.")
    updates = [steps // schedule.steps_per_update for steps in halve_at]
    if any(after <= before for before, after in itertools.pairwise([0, *updates, schedule.total])):
        raise ValueError(
            f"halve_at={list(halve_at)} must rise, by an iteration of {schedule.steps_per_update} steps or more, and "
            f"end before the {schedule.total * schedule.steps_per_update} steps of the sweep."
        )
    most = (settings - 1).bit_length()
    if len(halve_at) > most:
        raise ValueError(
            f"halve_at={list(halve_at)} drops settings {len(halve_at)} times, but {settings} settings are one after "
            f"{most}; use {most} or fewer."
        )


def _resolve(make: Any, config: Any) -> tuple[Callable[[Any], Agent], Any]:
    if hasattr(make, "make") and hasattr(make, "Config"):
        make, config = make.make, make.Config() if config is None else config
    if not callable(make) or not dataclasses.is_dataclass(config):
        raise ValueError(
            f"make={make!r} must be a module with make and Config, as podium.agents.ppo, or a function of a "
            "configuration; then give config, a dataclass, too."
        )
    return make, config


def _check_fields(space: Space, config: Any) -> None:
    if not space:
        raise ValueError("space={} varies nothing; give a field of the configuration and its values.")
    for name in space:
        check_field(config, name)


def _made(make: Callable[[Any], Agent], config: Any, setting: Setting) -> Agent:
    try:
        return make(dataclasses.replace(config, **setting))
    except TypeError as error:
        raise ValueError(f"{setting} is no setting of {type(config).__qualname__}: {error}.") from error


def _grouped(make: Callable[[Any], Agent], config: Any, settings: Sequence[Setting], at_once: int) -> list[Group]:
    """Return the settings by program: alike in all that is no number, and at most `at_once` in each."""
    traced = {
        name
        for name in settings[0]
        if all(is_number(setting[name]) for setting in settings) and may_vary(make, config, name)
    }
    groups: list[Group] = []
    for place, setting in enumerate(settings):
        # Where 0 switches something off, a number that is not 0 is another program.
        numbers = {name: float(setting[name]) for name in setting if name in traced and setting[name] != 0}
        fixed = {name: value for name, value in setting.items() if name not in numbers}
        same = lambda group, fixed=fixed, numbers=numbers: (
            group.fixed == fixed and group.numbers[0].keys() == numbers.keys() and len(group.numbers) < at_once
        )
        group = next(filter(same, groups), None) if numbers else None
        if group:
            group.numbers.append(numbers)
            group.places.append(place)
        else:
            groups.append(Group(fixed, [numbers], [place], f"program-{len(groups)}"))
    return groups


def _at_once(agent: Agent, env: Env, num_envs: int, length: int, seeds: int, settings: int, asked: int | None) -> int:
    """Return how many of so many settings a program may have, from the bytes of one run and of what is free.

    Raises:
      ValueError: fewer fit than are asked for, or not even one does.
    """
    program = Anakin(1).build(agent, env, num_envs=num_envs, rollout_length=length)
    obs = nbytes(jax.tree.map(lambda spec: spec.zeros(), env.spec.obs, is_leaf=is_spec))
    # A rollout has each observation twice, and learning about as much again beside it.
    one = seeds * (nbytes(program.loop.abstract_state()) + 2 * num_envs * length * (2 * obs + 32))
    free = _free_bytes()
    fit = int(SHARE_OF_MEMORY * free / one)
    wanted = 1 if asked is None else min(asked, settings)
    if fit < wanted:
        use = f"at_once={fit}" if fit else "fewer seeds, environments or steps of a rollout, or a smaller replay"
        raise ValueError(
            f"at_once={asked}: {wanted} setting(s) of {seeds} seeds take {wanted * one / 1e9:.3g} GB together, and "
            f"half of the {free / 1e9:.3g} GB that are free holds {fit}; use {use}."
        )
    return min(fit, settings) if asked is None else wanted


def _free_bytes() -> int:
    """Return the memory that the first device can still give."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _devices(asked: Devices, settings: int, seeds: int, rung: bool = False) -> list[jax.Device]:
    """Return the devices that share the runs of a program evenly.

    Args:
      asked: devices.
      settings: of the program.
      seeds: of each.
      rung: whether settings were dropped; then it may be fewer devices than were asked for.

    Raises:
      ValueError: those asked for do not.
    """
    runs, available = settings * seeds, resolve_devices(asked)
    if asked is None or rung:
        return available[: largest_divisor(runs, len(available))]
    if runs % len(available):
        raise ValueError(
            f"devices={len(available)} do not share {runs} runs evenly ({settings} settings of a program x {seeds} "
            f"seeds); use seeds={nearest_multiples(seeds, len(available))}, or leave devices out."
        )
    return available


def _recorded(path: Path) -> dict[str, Any]:
    """Return what a sweep was asked for."""
    try:
        return dict(json.loads((path / RECORD).read_text()))
    except (OSError, ValueError):
        raise ValueError(f"run_dir={path} has no {RECORD} that can be read, so it is no sweep to resume.") from None


def _check_same(path: Path, before: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path} is a sweep with {name}={before.get(name)}, not {value}; give the same again, or another "
                "folder."
            )
