"""Run every placement for a few seconds on this machine, and say which is the fastest and what bounds each.

Where the time goes depends on agent and environment: MSRL (Zhu et al. 2023, "MSRL: Distributed Reinforcement Learning
with Dataflow Fragments", USENIX ATC) saw the environment take 98% of it for PPO, inference and training 97% for MuZero,
and up to 2.4 times the speed from placing the same algorithm elsewhere. So the bottleneck moves, and must be measured.
"""

from podium.planner.comparison import Comparison, Row, plan

__all__ = ["Comparison", "Row", "plan"]
