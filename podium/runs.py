"""The folder of a run: what was run, how it went, and its checkpoints.

    runs/<name>/config.json     the configuration, the placement's too, with versions, git commit and date
    runs/<name>/placement.txt   who runs where, what moves in an update, how stale it may be and who waits for whom
    runs/<name>/placement.svg   the same, drawn
    runs/<name>/metrics.jsonl   one object a logged chunk
    runs/<name>/summary.json    how it ended
    runs/<name>/curve.png       returns against environment steps
    runs/<name>/checkpoints/    see `podium.checkpoint`

Everything is JSON, pictures and Orbax arrays: reading a run folder from a stranger runs no code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from podium.files import to_jsonable, write_json
from podium.report import Report
from podium.upgrades import NEW_FIELDS, NOT_RECORDED

SCHEMA = 1
CONFIG = "config.json"
MIN_FREE_BYTES = 100 * 2**20
_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "gymnax", "orbax-checkpoint", "podium")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run on disk; made by `create` or `open`.

    Attributes:
      path: the folder.
      record: all of `config.json`: `schema`, `created`, `config`, `placement`, `versions`, `platform`, `git_commit`.
    """

    path: Path
    record: Mapping[str, Any]

    @classmethod
    def create(
        cls, path: Path | str, config: Mapping[str, Any], placement: str = "", min_free_bytes: int = MIN_FREE_BYTES
    ) -> RunFolder:
        """Make the folder of a new run with its `config.json`; on failure nothing is left behind.

        Args:
          path: the folder; missing parents are made.
          config: anything JSON can hold.
          placement: where the run runs, in words.
          min_free_bytes: refuse a disk with less.

        Raises:
          ValueError: the folder has something in it, cannot be written, or the disk is nearly full.
        """
        path = Path(path)
        check_new_folder(path, min_free_bytes)
        record = to_jsonable(
            {
                "schema": SCHEMA,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "config": config,
                "placement": placement,
                "versions": _versions(),
                "platform": f"{platform.system()} {platform.machine()}",
                "git_commit": _git_commit(),
            }
        )
        # Built beside its place and renamed, so that a run folder always has its config.
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        made: list[Path] = []
        try:
            _make_parents(path.parent, made)
            temporary.mkdir()
            write_json(temporary / CONFIG, record)
            os.rename(temporary, path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            for parent in reversed(made):
                parent.rmdir()
            raise ValueError(
                f"run_dir={path} cannot be written ({error.strerror}); choose another --run-dir."
            ) from error
        return cls(path, record)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
          ValueError: there is no such folder, or its `config.json` is missing, broken or of another schema.
        """
        check_is_path(path)
        path = Path(path)
        if not _is_folder(path):
            raise ValueError(f"run_dir={path} is no folder; give the folder of an earlier run.")
        try:
            record = json.loads((path / CONFIG).read_text())
        except FileNotFoundError:
            runs = sorted(found.parent.name for found in path.glob(f"program-*/{CONFIG}"))
            hint = f" It is a sweep, of the runs {', '.join(runs)}; table.json says which is best." if runs else ""
            raise ValueError(f"run_dir={path} has no {CONFIG}, so it is no run of podium's.{hint}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path / CONFIG} cannot be read ({type(error).__name__}).") from None
        if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
            raise ValueError(f"{path / CONFIG} has no object named config, so it is no run of podium's.")
        if record.get("schema") != SCHEMA:
            raise ValueError(
                f"{path / CONFIG} has schema={record.get('schema')!r}; this podium reads schema={SCHEMA}. "
                "Use the podium version in its `versions`, or start a new run."
            )
        return cls(path, record)

    def discard_unused(self) -> None:
        """Remove the folder of a run that ended before it wrote a row of metrics or a checkpoint, with no one's files.

        Its config says how to begin again what cannot be begun.
        """
        ours = {CONFIG, "placement.txt", "placement.svg", self.metrics.name, self.checkpoints.name}
        with contextlib.suppress(OSError):
            found = {path.name: path for path in self.path.iterdir()}
            empty = lambda path: not any(path.iterdir()) if path.is_dir() else not path.stat().st_size
            kept = [found[name] for name in (self.metrics.name, self.checkpoints.name) if name in found]
            if set(found) <= ours and all(map(empty, kept)):
                shutil.rmtree(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the run was made with."""
        return dict(self.record["config"])

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The summary file."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """The picture."""
        return self.path / "curve.png"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_report(self, report: Report) -> None:
        """Write `placement.txt` and `placement.svg`, each atomically."""
        for ending in ("txt", "svg"):
            report.save(self.path / f"placement.{ending}")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` atomically."""
        write_json(self.summary, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary, or None where the run has not ended, or the file holds none."""
        try:
            summary = json.loads(self.summary.read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return summary if isinstance(summary, dict) else None


def check_is_path(path: Any) -> None:
    """Raise ValueError for what names no folder."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"run_dir={path!r} must be the path of a folder.")


def _is_folder(path: Path) -> bool:
    """Tell whether a path is that of a folder; not where it is longer than any, or behind one that is closed."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def check_new_folder(path: Path | str, min_free_bytes: int = MIN_FREE_BYTES) -> None:
    """Check that a run folder can be made, and make nothing.

    Raises:
      ValueError: as `RunFolder.create` does.
    """
    check_is_path(path)
    _check_name(Path(path))
    _check_vacant(Path(path))
    _check_space(Path(path), min_free_bytes)


def compare_config(old: Mapping[str, Any], new: Mapping[str, Any], may_change: Set[str] = frozenset()) -> None:
    """Refuse to resume a run under another configuration.

    Args:
      old: the configuration of the run.
      new: the one asked for.
      may_change: names that may differ, dotted where nested; a name frees all that is below it.

    Raises:
      ValueError: naming each field that differs with both values, and the fields that may.

    >>> compare_config({"seed": 1, "total_steps": 10}, {"seed": 1, "total_steps": 20}, {"total_steps"})
    """
    before, after = _flatten(to_jsonable(old)), _flatten(to_jsonable(new))
    below = lambda name, head: name == head or name.startswith(head + ".")
    not_compared = may_change | {
        head for head, sign in NOT_RECORDED.items() if not any(below(name, sign) for name in before)
    }
    before = {name: value for name, value in NEW_FIELDS.items() if name in after} | before
    compared = sorted(name for name in {*before, *after} if not any(below(name, head) for head in not_compared))
    # Another agent or environment has other fields, a list of which would hide that.
    whose = [name for name in ("agent.name", "env.name") if name in compared and before.get(name) != after.get(name)]
    differences = []
    for name in whose or compared:
        if name not in before or name not in after or not _same(before[name], after[name]):
            was = repr(before[name]) if name in before else "not set"
            now = repr(after[name]) if name in after else "not set"
            differences.append(f"{name} was {was} and is {now}")
    if differences:
        free = f"may change: {', '.join(sorted(may_change))}" if may_change else "nothing may change"
        raise ValueError(
            f"This run was made with another configuration: {'; '.join(differences)}. On --resume {free}; "
            "use another --run-dir for a new run."
        )


def default_run_dir(name: str) -> Path:
    """Return `runs/<name>-<timestamp>`, a folder that does not exist yet; what no file name can hold becomes a dash."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    path = Path("runs") / f"{safe}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


@contextlib.contextmanager
def new_run_dir(name: str) -> Iterator[Path]:
    """Make `default_run_dir`, empty, so that no other process takes it; it is removed if nothing was written."""
    while True:
        path = default_run_dir(name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # Of a process that began in the same second.
        except OSError:  # Whoever writes there says why it cannot be.
            yield path
            return
        break
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
            path.parent.rmdir()


def _check_name(path: Path) -> None:
    """Refuse a path that names no folder of its own, or that no disk can hold."""
    if path.name in ("", ".."):
        raise ValueError(f"run_dir={str(path)!r} names no new folder; choose another --run-dir, such as runs/mine.")
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # What is not there yet.
    except (OSError, ValueError) as error:  # ValueError: a null byte.
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"run_dir={str(path)!r} can name no folder ({reason}); choose another --run-dir.") from None


def _check_vacant(path: Path) -> None:
    """Refuse a path that something is at, but for an empty folder."""
    if path.is_dir():
        try:
            occupied = any(path.iterdir())
        except OSError as error:
            raise ValueError(f"run_dir={path} cannot be read ({error.strerror}); choose another --run-dir.") from None
        if occupied:
            raise ValueError(
                f"run_dir={path} exists and is not empty; add --resume to resume it, or choose another --run-dir."
            )
    elif path.exists() or path.is_symlink():
        raise ValueError(f"run_dir={path} is a file, not a folder; choose another --run-dir.")


def _check_space(path: Path, min_free_bytes: int) -> None:
    """Refuse a place that cannot be written or is nearly full, before anything is made."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"run_dir={path} cannot be made: {existing} is a file; choose another --run-dir.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"run_dir={path} cannot be written (read-only); choose another --run-dir.")
    free = shutil.disk_usage(existing).free
    if free < min_free_bytes:
        raise ValueError(
            f"run_dir={path} is on a disk with {free / 2**20:.0f} MiB free, and a run wants at least "
            f"{min_free_bytes / 2**20:.0f}; make room or choose another --run-dir."
        )


def _make_parents(folder: Path, made: list[Path]) -> None:
    """Make `folder` and its parents, noting which were made."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        parent.mkdir()
        made.append(parent)


def _versions() -> dict[str, str | None]:
    """Return the versions behind a run; None for what is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    if versions["podium"] is None:  # Used from a checkout, without installation.
        versions["podium"] = getattr(sys.modules.get("podium"), "__version__", None)
    return versions


def _git_commit() -> str | None:
    """Return the commit of podium's own checkout, with "+changes" where tracked files differ; None without one."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # In a virtual environment inside somebody's repository git would answer, but about that repository.
        git("ls-files", "--error-unmatch", here.name)
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn `{"a": {"b": 1}}` into `{"a.b": 1}`, and `{"a": [{"b": 1}]}` into `{"a.0.b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _same(old: Any, new: Any) -> bool:
    """Compare JSON values; True is not 1 here."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True) or (
        type(old) in (int, float) and type(new) in (int, float) and old == new
    )
