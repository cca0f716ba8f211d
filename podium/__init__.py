"""podium: reinforcement learning on the accelerator, one agent under every placement."""

from podium import agents, distributed, envs, games, networks, placement, testing
from podium.agent import Agent
from podium.devices import request_cpu_threads, request_devices
from podium.env import Env
from podium.evaluate import Policy, evaluate
from podium.gated import gated
from podium.host import HostEnv, HostEnvFactory
from podium.launch import launch
from podium.league import league
from podium.load import load
from podium.loop import NonFiniteError, Result
from podium.placement import (
    Anakin,
    CentralInference,
    DistributedActors,
    Evolution,
    LocalSGD,
    ParameterServer,
    Placement,
    Population,
    Program,
    Report,
    Sebulba,
    Single,
)
from podium.planner import Comparison, plan
from podium.space import Draws, linear_range, log_range
from podium.sweep import Sweep, sweep
from podium.train import train
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep, Trajectory

__version__ = "0.2.0"

__all__ = [
    "Agent",
    "Anakin",
    "ArraySpec",
    "CentralInference",
    "Comparison",
    "DiscreteSpec",
    "DistributedActors",
    "Draws",
    "Env",
    "EnvSpec",
    "Evolution",
    "HostEnv",
    "HostEnvFactory",
    "LocalSGD",
    "NonFiniteError",
    "ParameterServer",
    "Placement",
    "Policy",
    "Population",
    "Program",
    "Report",
    "Result",
    "Sebulba",
    "Single",
    "Sweep",
    "TimeStep",
    "Trajectory",
    "agents",
    "distributed",
    "envs",
    "evaluate",
    "games",
    "gated",
    "launch",
    "league",
    "linear_range",
    "load",
    "log_range",
    "networks",
    "placement",
    "plan",
    "request_cpu_threads",
    "request_devices",
    "sweep",
    "testing",
    "train",
]
