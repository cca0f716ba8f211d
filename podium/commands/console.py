"""What command lines share: flags read by tyro, and refusals and failures said in one sentence, with an exit code."""

from __future__ import annotations

import ast
import contextlib
import decimal
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from podium import agents, distributed, envs
from podium.checkpoint import CheckpointError
from podium.commands import plugins
from podium.files import one_line
from podium.loop import NonFiniteError

REFUSED, FAILED = 2, 1

_REGISTRY = tyro.constructors.ConstructorRegistry()


def guard(work: Callable[[], int]) -> int:
    """Return what `work` returns, or say in one sentence why not, and return the exit code for that.

    Errors nobody foresaw keep their traceback: a ValueError that neither podium raised nor a plugin nor a script beside
    the one that `work` was written in.
    """
    try:
        return work()
    except BrokenPipeError:  # Whoever read what is printed has left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what Python would still write at its end.
        return 128 + signal.SIGPIPE
    except (NonFiniteError, distributed.PeerError, CheckpointError, OSError) as error:
        return _say(error, FAILED)
    except ValueError as error:
        if not _is_ours(error, Path(work.__code__.co_filename).resolve().parent):
            raise
        return _say(error, REFUSED)
    except jax.errors.JaxRuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        takes = "buffer_capacity, num_envs times rollout_length, the minibatch or the network"
        return _say(f"{one_line(error)} What takes most is usually {takes}; use less of it, or more devices.", FAILED)
    except KeyboardInterrupt:
        print("Stopped by SIGINT before anything could be saved.", file=sys.stderr)
        return 128 + signal.SIGINT


def read_flags(flags_class: Any, argv: Sequence[str], **options: Any) -> Any:
    """Read flags with tyro, but turn its boxed complaint into one sentence.

    Raises:
      ValueError: one sentence about the flag that is wrong.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(flags_class, args=list(argv), registry=_REGISTRY, **options)
    except SystemExit as end:
        if not end.code:
            raise
    raise ValueError(_sentence(complaint.getvalue()))


def read_whole(text: str) -> int:
    """Return the integer that a text is, also one written as 1e6.

    >>> read_whole("1_000"), read_whole("1e6"), read_whole("2.5e3")
    (1000, 1000000, 2500)

    Raises:
      ValueError: it is none.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(decimal.InvalidOperation, OverflowError, ValueError):
        number = decimal.Decimal(text)
        if number == int(number):
            return int(number)
    raise ValueError(f"{text!r} is no integer, such as 1000000, 1_000_000 or 1e6")


def read_options(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Return NAME=VALUE pairs by name; a value is a Python literal, or else text.

    >>> read_options(["size=3", "sizes=(4, 5)", "mode=fast"], "--env-options")
    {'size': 3, 'sizes': (4, 5), 'mode': 'fast'}

    Raises:
      ValueError: one is no such pair.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{flag} {pair} is not NAME=VALUE, such as max_steps_in_episode=200.")
        try:
            options[name] = float(text) if text.strip("+-") in ("nan", "inf") else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


@_REGISTRY.primitive_rule
def _integers(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: read_whole(texts[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda number: [str(number)],
    )


def check_file(flag: str, path: Path | None) -> None:
    """Raise ValueError where no file can be written at `path`, before anything is done for it; None passes."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{flag} {path} is no file in a folder that is there; make the folder, or give another file.")


def find(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag without reading the others; the last one counts, as for tyro.

    >>> find(["--env", "CartPole-v1", "--env=Acrobot-v1"], "--env")
    'Acrobot-v1'
    """
    value = None
    for index, here in enumerate(argv):
        if here == flag:
            value = argv[index + 1] if index + 1 < len(argv) else None
        elif here.startswith(flag + "="):
            value = here[len(flag) + 1 :]
    return value


def _sentence(box: str) -> str:
    r"""Return tyro's complaint without its box, its title and the help it adds.

    >>> _sentence('╭─ Invalid ─╮\n│ no such     │\n│ flag        │\n│ ─────────── │\n│ Perhaps you │\n╰───╯')
    'no such flag; --help lists every flag.'
    """
    # Boxes are drawn in ASCII where the terminal knows no better.
    lines = [line.strip("│| ") for line in box.splitlines() if not line.startswith(("╭", "╰", "+"))]
    sections = re.split(r"\n[─-]{5,}\n?", "\n".join(lines))
    if "╭" not in box and len(sections) > 1:
        del sections[0]  # The title, which a drawn box has in its upper edge.
    first = " ".join(sections[0].split()).rstrip(".")
    # Of a flag that may be left out, the complaint about None says nothing.
    first = re.sub(r"no type matching .* Got errors: - <class 'NoneType'>: .* - <class '\w+'>: ", "", first)
    near = [
        line.split(" ")[0].rstrip(",")
        for section in sections
        if section.startswith(("Perhaps you meant", "Arguments similar to"))
        for line in section.splitlines()
        if line.startswith("--")
    ]
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ";"
    return f"{first}{hint} --help lists every flag."


def _say(error: BaseException | str, code: int) -> int:
    who = f"error in process {distributed.process_id()}" if distributed.num_processes() > 1 else "error"
    print(f"{who}: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code


def _is_ours(error: BaseException, script_folder: Path) -> bool:
    """Tell whether an error was raised on purpose, by podium, a plugin or a script, not deep inside some library."""
    frames = traceback.extract_tb(error.__traceback__)
    # In a checkout podium's agents and environments lie beside it.
    own = (Path(file).resolve().parent for file in (agents.__file__, envs.__file__))
    roots = {script_folder, Path(__file__).resolve().parents[1], *own, *plugins.files()}
    if not frames:
        return True
    file = Path(frames[-1].filename).resolve()
    return any(root in (file, *file.parents) for root in roots)
