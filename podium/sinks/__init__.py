"""Where metrics go: a JSON line file, the terminal, a picture, Weights & Biases. Training fails for the first only."""

from podium.sinks.curve import CurveSink, PictureSink, plot_curve, save_figure
from podium.sinks.metrics import JsonlSink, read_metrics
from podium.sinks.rows import Row, interval
from podium.sinks.sink import Sink, Sinks
from podium.sinks.terminal import TerminalSink, progress_line
from podium.sinks.wandb import WandbSink

__all__ = [
    "CurveSink",
    "JsonlSink",
    "PictureSink",
    "Row",
    "Sink",
    "Sinks",
    "TerminalSink",
    "WandbSink",
    "interval",
    "plot_curve",
    "progress_line",
    "read_metrics",
    "save_figure",
]
