"""What a sink is, and several as one: whatever fails is dropped, but for what the run cannot do without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from podium.files import one_line
from podium.sinks.rows import Row
from podium.sinks.terminal import TerminalSink


class Sink(Protocol):
    """A place that takes metrics. `essential` sinks end the run when they fail; others are dropped with a warning."""

    def write(self, row: Row) -> None:
        """Take the metrics of one chunk."""

    def close(self, summary: Row) -> None:
        """Take the summary of the run, and end."""


class Sinks(list[Any]):
    """Several sinks as one. A sink that raises is warned about once and dropped, unless it is `essential`.

    >>> Sinks([]).write({"env_steps": 1})
    """

    def write(self, row: Row) -> None:
        """Hand `row` to every sink.

        Raises:
          OSError: the metrics file cannot be written.
        """
        for sink in list(self):
            self._call(sink, sink.write, row)

    def show(self, row: Row) -> None:
        """Hand a row that is not whole yet to the line of progress."""
        for sink in list(self):
            if isinstance(sink, TerminalSink):
                self._call(sink, sink.show, row)

    def close(self, summary: Row) -> None:
        """Close every sink, then raise the error of an essential one, if any."""
        failed: Exception | None = None
        for sink in list(self):
            try:
                self._call(sink, sink.close, summary)
            except Exception as error:
                failed = failed or error
        self.clear()
        if failed is not None:
            raise failed

    def _call(self, sink: Any, method: Callable[[Row], None], row: Row) -> None:
        try:
            method(row)
        except Exception as error:
            if getattr(sink, "essential", False):
                raise
            if any(sink is other for other in self):
                self[:] = [other for other in self if other is not sink]
            warnings.warn(f"{type(sink).__name__} failed and is off from here on: {one_line(error)}", stacklevel=3)
