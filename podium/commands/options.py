"""The flags of a run: those of `podium.train`, of the command itself, of the agent and of the placement.

A flag is a field's name. Where the agent and the placement both have a field of that name, or one of them has a field
named as a flag of the run, the two are told apart: `--agent.learning-rate`, `--placement.learning-rate`. These longer
forms are understood for every field. Under explicit flags lie a preset's values, and under those the plain defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from podium import agents, presets
from podium import placement as placements
from podium.commands import fields
from podium.commands.console import find, read_flags, read_options
from podium.commands.fields import Field
from podium.presets import Preset

NO_PRESET = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Arguments of `podium.train`, by their names there."""

    num_envs: int = 64
    """Environments side by side in each run; the devices must divide it."""
    rollout_length: int | None = None
    """Steps of every environment before each learning phase; None takes the agent's own (under a placement that plays
    whole episodes, the environment's limit)."""
    num_steps: int = 500_000
    """Environment steps of each run; rounded down to whole rollouts."""
    num_lanes: int | None = None
    """Groups of environments that are shuffled and sampled apart; None chooses. The devices must divide it."""
    seed: int = 0
    """Fixes everything random, 0 or more."""
    seeds: int = 1
    """Number of independent runs in the one program."""
    run_dir: Path | None = None
    """Folder for configuration, metrics, curve and checkpoints; None takes runs/AGENT-ENV-TIME."""
    resume: bool = False
    """Resume the run in --run-dir, exactly: give the same command again with this flag."""
    eval_every: int | None = None
    """Environment steps between evaluations; None for ten over the run, or fewer where they would take more than half
    of its steps; 0 for one at the end."""
    eval_episodes: int | None = None
    """Episodes of an evaluation; None for 128, and for 8 to 128 where episodes are long or played on the host."""
    eval_steps: int | None = None
    """Environment steps that an evaluation may take in all its episodes, each of which is cut at its equal part; 0 sets
    no bound. None bounds where episodes are long or played on the host, and the plan says by what."""
    checkpoint_every: int | None = None
    """Environment steps between checkpoints; None at every --eval-every, and for ten over the run where that is None;
    0 for one at the end."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep; the best is kept besides."""
    log_every: int | None = None
    """Environment steps between rows of metrics; None for a hundred over the run."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Whether Weights & Biases gets the metrics too."""
    progress: bool = True
    """Show a line of progress while training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetupFlags:
    """What a command does beside calling `podium.train`."""

    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    env_options: tuple[str, ...] = ()
    """Options of the environment, each NAME=VALUE."""
    preset: str | None = None
    """Named values for an environment, under all other flags; None takes the one made for --env where there is one,
    and "none" the plain defaults."""
    list_presets: bool = False
    """Show every preset, its values, where they come from and whether they were tuned here; then end."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register agents, environments or placements of your own."""
    cpu_threads: int | None = None
    """Threads that a CPU computes on; None takes one a core. One is faster for small networks and batches."""
    distributed: bool = False
    """Be one of several processes of the run: start the same command in each, by srun or mpirun (or give each
    $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES and $JAX_PROCESS_ID). Numbers of devices are then those of each
    process, environments and steps those of the whole run."""
    compilation_cache: bool = True
    """Keep compiled programs in a folder of this user ($PODIUM_CACHE, else $XDG_CACHE_HOME/podium, else
    ~/.cache/podium), so that the same command starts sooner the next time."""
    json: bool = False
    """Print the summary as the last line, one line of JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What is trained, and where it runs."""

    agent: str = "ppo"
    """Agent, by a name of podium.agents.names(); its configuration is in flags below."""
    placement: str = "anakin"
    """Where everything runs, by a name of podium.placement.names(); its settings are in flags below."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a command line is about: known before its flags can be read, because they follow from it.

    Attributes:
      agent: name in `podium.agents`.
      placement: name in `podium.placement`.
      presets: by name.
      defaults: under presets, by field.
      aliases: further flags, without dashes before them, by field.
      env_flags: dataclass of options of the environment that have flags of their own; None if there are none.
      is_chosen: whether the agent and the placement are flags themselves.
      settle: what flags that depend on one another mean, once they are read.
    """

    agent: str
    placement: str
    presets: Mapping[str, Preset]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    env_flags: type | None = None
    is_chosen: bool = False
    settle: Callable[[Options], Options] = lambda options: options


@dataclasses.dataclass(frozen=True)
class Options:
    """A command line, read: values by field, and in words which preset lies under them.

    Attributes:
      subject: what it is about.
      setup: values of `SetupFlags`.
      train: values of `TrainFlags`.
      agent: of the agent's configuration.
      placement: of the placement.
      env: of `Subject.env_flags`.
      preset: in words.
    """

    subject: Subject
    setup: SetupFlags
    train: Mapping[str, Any]
    agent: Mapping[str, Any]
    placement: Mapping[str, Any]
    env: Mapping[str, Any]
    preset: str

    @property
    def env_options(self) -> dict[str, Any]:
        """What the environment is made with."""
        return {**self.env, **read_options(self.setup.env_options, "--env-options")}

    def make_placement(self) -> Any:
        """Return the placement; raises ValueError for what it does not take."""
        found = fields.of_class(placements.get(self.subject.placement))
        return placements.get(self.subject.placement)(**{k: found[k].convert(v) for k, v in self.placement.items()})

    def number_of_devices(self) -> int | None:
        """Return how many devices are asked for; None asks for none in particular."""
        found = fields.of_class(placements.get(self.subject.placement))
        asked = [self.placement[name] for name, field in found.items() if field.counts_devices]
        if len(asked) < 2:
            return asked[0] if asked else None
        # Devices of two roles lie side by side, and None is one; one device does for both.
        needed = sum(1 if number is None else number for number in asked)
        return needed if needed > len(asked) else None


def choose(argv: Sequence[str]) -> Subject:
    """Return what a command line of `podium train` is about.

    Raises:
      ValueError: no agent or placement has the name, or a flag has none after it.
    """
    agent = find(argv, "--agent") or Choice.agent
    placement = find(argv, "--placement") or Choice.placement
    agents.get(agent), placements.get(placement)
    return Subject(agent, placement, presets.of_agent(agent), is_chosen=True)


def read(subject: Subject, argv: Sequence[str]) -> Options:
    """Read the flags of a run.

    Raises:
      ValueError: one sentence about the flag that is wrong.
    """
    owners = _owners(subject)
    argv = _settle(argv, subject, owners)
    preset, words = _preset(subject, argv)
    defaults = {**subject.defaults, **({} if preset is None else {"env": preset.env})}
    by_owner: dict[str, dict[str, Any]] = {owner: dict(defaults) for owner in ("setup", "train", "env")}
    by_owner |= {"agent": dict(subject.defaults), "placement": dict(subject.defaults)}
    for name, value in (preset.values if preset else {}).items():
        if name == "rollout_length" and placements.get(subject.placement).whole_episodes:
            continue  # It would cut them.
        owner = next((owner for owner, found in owners.items() if name in found), None)
        if owner:  # Else it is of a placement that is not the one.
            by_owner[owner][name] = value
    flags = _flags(subject, owners)
    members: list[Any] = (
        [("choice", Annotated[Choice, tyro.conf.OmitArgPrefixes, tyro.conf.arg(help="What is trained, and where.")])]
        if subject.is_chosen
        else []
    )
    for owner, found in owners.items():
        own = {name: flag for (whose, name), flag in flags.items() if whose == owner}
        made = fields.as_class(f"{owner.capitalize()}Flags", found, own, by_owner[owner])
        said = tyro.conf.arg(help=_HEADINGS[owner].format(agent=subject.agent, placement=subject.placement))
        members.append((_TITLES[owner], Annotated[made, tyro.conf.OmitArgPrefixes, said]))
    flags_class = dataclasses.make_dataclass("Flags", members)
    prog = "podium train" if subject.is_chosen else None
    got = read_flags(flags_class, argv, description=_about(subject), prog=prog)
    taken = {
        owner: {name: getattr(getattr(got, _TITLES[owner]), name) for name in found} for owner, found in owners.items()
    }
    setup = SetupFlags(**taken.pop("setup"))
    return Options(subject, setup, **taken, preset=words)


def list_presets(known: Mapping[str, Preset]) -> str:
    """Return every preset with its values, their source and whether they were tuned here."""
    parts = []
    for name, preset in known.items():
        values = " ".join(
            f"{key}={' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for key, value in preset.values.items()
        )
        parts.append(f"{name}: {preset.env}\n  values: {values}\n  source: {preset.source}\n  {preset.tuned_words}")
    return "\n".join(parts)


def _owners(subject: Subject) -> dict[str, Mapping[str, Field]]:
    """Return the flags of a run by whose they are; earlier owners' names come before later ones'."""
    placement = placements.get(subject.placement)
    train = dict(fields.of_class(TrainFlags))
    if not placement.takes_seeds:
        del train["seeds"]
    return {
        "setup": fields.of_class(SetupFlags),
        "train": train,
        "env": fields.of_class(subject.env_flags) if subject.env_flags else {},
        "agent": fields.of_class(agents.get(subject.agent).config),
        "placement": fields.of_class(placement),
    }


_OF_RUN = ("setup", "train", "env")
_TITLES = {"setup": "command", "train": "run", "env": "environment", "agent": "agent", "placement": "placement"}
_HEADINGS = {
    "setup": "Beside training.",
    "train": "How much, how often, and where to.",
    "env": "Of the environment.",
    "agent": "Of {agent}; --agent.NAME is understood too.",
    "placement": "Of {placement}; --placement.NAME is understood too.",
}
"""Titles of the flags' groups in --help, and what stands under them."""


def _flags(subject: Subject, owners: Mapping[str, Mapping[str, Field]]) -> dict[tuple[str, str], str]:
    """Return the flags of each field, (owner, name), without dashes before them: its own, then its alias if any."""
    of_run = {field.flag for owner in _OF_RUN for field in owners[owner].values()}
    if subject.is_chosen:
        of_run |= {"agent", "placement"}
    shared = {field.flag for field in owners["agent"].values()} & {x.flag for x in owners["placement"].values()}
    flags = {}
    for owner, found in owners.items():
        for name, field in found.items():
            is_apart = owner not in _OF_RUN and field.flag in of_run | shared
            flag = f"{owner}.{field.flag}" if is_apart else field.flag
            flags[owner, name] = " ".join([flag, *([subject.aliases[name]] if name in subject.aliases else [])])
    return flags


def _settle(argv: Sequence[str], subject: Subject, owners: Mapping[str, Mapping[str, Field]]) -> list[str]:
    """Return the command line with the longer forms of flags made plain where they can be.

    Raises:
      ValueError: a flag is two fields', or another agent's or placement's.
    """
    forms: dict[str, str] = {}
    candidates: dict[str, list[str]] = {}
    for (owner, name), words in _flags(subject, owners).items():
        field, flag = owners[owner][name], words.split()[0]
        for typed in (*words.split(), *([f"{owner}.{field.flag}"] if owner not in _OF_RUN else [])):
            forms[typed] = flag
            if field.is_switch:
                forms[_negated(typed)] = forms[f"no-{typed}"] = _negated(flag)
        if flag != field.flag:
            candidates.setdefault(field.flag, []).append(flag)
    if subject.is_chosen:
        forms |= {"agent": "agent", "placement": "placement"}
    settled = []
    for here in argv:
        typed, equals, value = here.removeprefix("--").partition("=")
        typed = typed.replace("_", "-")
        if not here.startswith("--") or typed in ("", "help"):
            settled.append(here)
        elif typed in forms:
            settled.append(f"--{forms[typed]}{equals}{value}")
        else:
            plain = typed.removeprefix("no-")
            if plain in candidates:
                raise ValueError(_ambiguous(plain, candidates[plain], subject))
            _refuse_anothers(plain, subject)
            settled.append(here)
    return settled


def _negated(flag: str) -> str:
    """Return the flag that says no, as tyro names it."""
    owner, dot, name = flag.rpartition(".")
    return f"{owner}{dot}no-{name}"


def _ambiguous(flag: str, candidates: Sequence[str], subject: Subject) -> str:
    names = {"agent": subject.agent, "placement": subject.placement}
    whose = " and ".join(f"the {x.partition('.')[0]} {names[x.partition('.')[0]]}" for x in candidates)
    return f"--{flag} is a field of {whose}; use {' or '.join(f'--{x}' for x in candidates)}."


def _refuse_anothers(flag: str, subject: Subject) -> None:
    """Raise ValueError where a flag is none here, but is one under another placement or for another agent."""
    plain = flag.removeprefix("placement.").removeprefix("agent.")
    having = {
        "agent": [] if flag.startswith("placement.") else _agents_with(plain),
        "placement": [] if flag.startswith("agent.") else _placements_with(plain),
    }
    if not any(having.values()):
        return
    here = " or ".join(f"the {kind} {getattr(subject, kind)}" for kind, names in having.items() if names)
    there = [name for names in having.values() for name in names]
    verb = "has" if len(there) == 1 else "have"
    raise ValueError(
        f"--{flag} is no flag of {here}; {' and '.join(_listed(x) for x in having.values() if x)} {verb} it."
    )


def _placements_with(flag: str) -> list[str]:
    return [
        name
        for name in placements.names()
        if flag in {x.flag for x in fields.of_class(placements.get(name)).values()}
        or (flag == "seeds" and placements.get(name).takes_seeds)
    ]


def _agents_with(flag: str) -> list[str]:
    return [
        name
        for name in agents.names()
        if flag in {field.flag for field in fields.of_class(agents.get(name).config).values()}
    ]


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _preset(subject: Subject, argv: Sequence[str]) -> tuple[Preset | None, str]:
    """Return the preset that lies under the flags, and words about it."""
    name, env = find(argv, "--preset"), find(argv, "--env")
    known, asked = subject.presets, name not in (None, "None")
    why = "asked for"
    if not asked:
        wanted = env or subject.defaults.get("env", SetupFlags.env)
        if placements.get(subject.placement).whole_episodes:
            return None, f"none by itself: {subject.placement} plays whole episodes, presets are for rollouts"
        name = next((key for key, preset in known.items() if preset.env == wanted and preset.usual), None)
        why = f"made for {wanted}; --preset {NO_PRESET} takes the plain defaults"
    if name in (None, NO_PRESET):
        return None, "none: plain defaults" + ("" if asked else f" ({_none_for(wanted, known)})")
    if name not in known:
        raise ValueError(_unknown_preset(name or "", known))
    preset = known[name]
    return preset, f"{name} ({why}). Source: {preset.source} {preset.tuned_words}"


def _none_for(env: str, known: Mapping[str, Preset]) -> str:
    """Say that nothing lies under the flags by itself, and which presets that are not usual would, if named."""
    others = [name for name, preset in known.items() if preset.env == env]
    named = f"; {' and '.join(others)} must be asked for: --preset {others[0]}" if others else ""
    return f"there is no {'usual ' if others else ''}preset for {env}{named}"


def _unknown_preset(name: str, known: Mapping[str, Preset]) -> str:
    from podium.envs import near_misses

    near = near_misses(name, list(known))
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"--preset={name!r} is unknown.{hint} There are: {', '.join([*known, NO_PRESET])}."


def _about(subject: Subject) -> str:
    names = ", ".join(f"{name} ({preset.env})" for name, preset in subject.presets.items()) or "none"
    return (
        f"Train {subject.agent} under {subject.placement}. Presets: {names}; --list-presets says where their values "
        "come from. Defaults below are those of the preset in force. Steps and intervals count environment steps of "
        "one run. A field that the agent and the placement both have is --agent.NAME and --placement.NAME."
    )
