"""podium: reinforcement learning on the accelerator, one agent under every placement."""

from podium import agents, distributed, envs, networks, testing, xla
from podium.evaluate import Policy, evaluate
from podium.launch import launch
from podium.load import load
from podium.loop import NonFiniteError, Result
from podium.placement.anakin import Anakin
from podium.placement.central_inference import CentralInference
from podium.placement.devices import request_cpu_threads, request_devices
from podium.placement.distributed_actors import DistributedActors
from podium.placement.evolution import Evolution
from podium.placement.local_sgd import LocalSGD
from podium.placement.parameter_server import ParameterServer
from podium.placement.sebulba import Sebulba
from podium.placement.single import Single
from podium.planner import Forecast, plan
from podium.train import train

__version__ = "0.1.0"

__all__ = [
    "Anakin",
    "CentralInference",
    "DistributedActors",
    "Evolution",
    "Forecast",
    "LocalSGD",
    "NonFiniteError",
    "ParameterServer",
    "Policy",
    "Result",
    "Sebulba",
    "Single",
    "agents",
    "distributed",
    "envs",
    "evaluate",
    "launch",
    "load",
    "networks",
    "plan",
    "request_cpu_threads",
    "request_devices",
    "testing",
    "train",
]

xla.avoid_avx512()
