"""Files written whole or not at all, and values turned into valid JSON: what every part that meets the disk needs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def to_jsonable(value: Any) -> Any:
    """Turn `value` into what JSON can hold, so that every reader can parse it.

    NaN and infinities become null (JSON has no word for them), NumPy and JAX values numbers or lists, tuples lists,
    dataclasses objects, paths strings; anything else its `repr`.

    >>> to_jsonable({"loss": float("nan"), "shape": (2, np.int32(3))})
    {'loss': None, 'shape': [2, 3]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [to_jsonable(item) for item in sorted(value, key=repr)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic) or (hasattr(value, "__array__") and hasattr(value, "dtype")):
        # `item` and `tolist` widen bfloat16 and friends to Python floats.
        return to_jsonable(np.asarray(value).tolist())
    return repr(value)


def name_of(function: Any) -> str:
    """Return what can be recorded of something that can be called: the name of it, or of its type; the same every time.

    >>> name_of(to_jsonable)
    'podium.files.to_jsonable'
    """
    named = function if inspect.isfunction(function) else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def one_line(error: BaseException, most: int = 160) -> str:
    """Return what an error is and says, in one line.

    >>> one_line(ValueError("no such", 1), most=8)
    "ValueError: ('no suc..."
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}{'...' if len(text) > most else ''}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a kill, sees the old file or the new one and never a part."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically; see `to_jsonable` for what becomes of NaN."""
    write_atomic(path, (json.dumps(to_jsonable(value), indent=2, allow_nan=False) + "\n").encode())
