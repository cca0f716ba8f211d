"""Dataclasses as flags: which fields can be one, of what type, and how what is typed becomes a value again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

import docstring_parser
import jax
import tyro

_PLAIN = (bool, int, float, str, Path, type(None))


class Field(NamedTuple):
    """A field of a dataclass as a flag.

    Attributes:
      name: of the field.
      type: that tyro reads.
      default: the field's own; `dataclasses.MISSING` where it has none.
      help: what the class's docstring says about it.
      counts_devices: whether a number says how many devices there must be.
      convert: what makes the field's value of what was typed.
    """

    name: str
    type: Any
    default: Any
    help: str
    counts_devices: bool = False
    convert: Callable[[Any], Any] = lambda value: value

    @property
    def flag(self) -> str:
        """The flag, without dashes before it."""
        return self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value, and has one that says no."""
        return self.type is bool


def of_class(cls: Any) -> Mapping[str, Field]:
    """Return the fields of a dataclass that can be flags, by name.

    Numbers, texts, paths, choices and tuples of them can be; of several types, those that can are left. So a field for
    a number or a sequence of devices takes the number, one for an engine or its name the name, and one for a device its
    number.

    Raises:
      ValueError: a field can be no flag and has no default, or its type is unknown.

    >>> @dataclasses.dataclass
    ... class Example:
    ...     size: int | Callable = 3
    ...     function: Callable = len
    >>> list(of_class(Example)), of_class(Example)["size"].type
    (['size'], <class 'int'>)
    """
    return _of_class(cls)


@functools.cache
def _of_class(cls: Any) -> Mapping[str, Field]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise ValueError(
            f"{cls.__name__} cannot be read as flags: a type of its fields is unknown; {error}."
        ) from error
    words = _words(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        flag_type = _flag_type(hint)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if flag_type is None:
            if default is dataclasses.MISSING:
                raise ValueError(
                    f"{cls.__name__} cannot be made on a command line: {field.name} has no default, and is no number, "
                    "text, choice or tuple of them."
                )
            continue
        options = typing.get_args(hint) or (hint,)
        found[field.name] = Field(
            field.name,
            flag_type,
            default,
            words.get(field.name, "See the class."),
            counts_devices=Sequence[jax.Device] in options,
            convert=_device if jax.Device in options else lambda value: value,
        )
    return found


def as_class(title: str, fields: Mapping[str, Field], flags: Mapping[str, str], defaults: Mapping[str, Any]) -> type:
    """Return a dataclass that tyro turns into flags.

    Args:
      title: its name.
      fields: by name.
      flags: of a field, without dashes before it, where it is not the field's own; a further one follows a space.
      defaults: over those of the fields.
    """
    members: list[Any] = []
    for field in fields.values():
        flag, *aliases = flags.get(field.name, field.flag).split()
        arg = tyro.conf.arg(name=flag, help=field.help, aliases=[f"--{alias}" for alias in aliases])
        default = defaults.get(field.name, field.default)
        has_default = default is not dataclasses.MISSING
        made = (
            dataclasses.field(default_factory=functools.partial(_same, default)) if has_default else dataclasses.field()
        )
        members.append((field.name, Annotated[field.type, arg], made))
    return dataclasses.make_dataclass(title, members, frozen=True, kw_only=True)


def _same(value: Any) -> Any:
    return value


def _flag_type(hint: Any) -> Any:
    """Return what of a type can be typed; None if nothing."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN or origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return hint
    if hint is jax.Device:
        return int
    if origin is Annotated:
        return _flag_type(arguments[0])
    if origin in (Union, types.UnionType):
        known = [x for x in map(_flag_type, arguments) if x is not None]
        return Union[tuple(known)] if any(x is not type(None) for x in known) else None  # noqa: UP007
    if origin is tuple and arguments:
        inner = [x if x is Ellipsis else _flag_type(x) for x in arguments]
        return None if None in inner else tuple[tuple(inner)]  # type: ignore[misc]
    if origin in (list, Sequence) and arguments:
        # Devices are given by their number, of them.
        item = None if arguments[0] is jax.Device else _flag_type(arguments[0])
        return None if item is None else tuple.__class_getitem__((item, ...))
    return None


def _device(number: int | None) -> jax.Device | None:
    if number is None:
        return None
    if not 0 <= number < len(jax.devices()):
        raise ValueError(f"there is no device {number}; there are 0 to {len(jax.devices()) - 1}.")
    return jax.devices()[number]


def _words(cls: type) -> dict[str, str]:
    """Return what docstrings say about the fields of a class, its bases' included: as Args, or below each field."""
    words = {}
    for base in reversed(cls.__mro__):
        if base.__module__ == "builtins":
            continue
        try:
            found = docstring_parser.parse_from_object(base).params
        except (OSError, TypeError):  # Its source is nowhere.
            found = docstring_parser.parse(base.__doc__ or "").params
        for x, before in zip(found, [None, *found], strict=False):
            said = before if x.description == "likewise." and before else x  # SHIM until each Args line stands alone.
            if said.description:
                words[x.arg_name] = " ".join(said.description.split())
    return {name: text[:1].upper() + text[1:] for name, text in words.items()}
