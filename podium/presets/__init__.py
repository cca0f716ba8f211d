"""Named hyperparameters, one set an environment, with where they come from.

Tables are those of an agent on pure environments (`PPO`), on the CPU (`PPO_SEBULBA`) or emulated (`PPO_ATARI`);
`of_agent` returns all of an agent's.
"""

from __future__ import annotations

from podium.presets.control import REPPO, SAC, TD3
from podium.presets.games import ALPHAZERO, IPPO, MAPPO, MUZERO, VDN
from podium.presets.policy_gradients import A2C, A2C_SEBULBA, IMPALA, IMPALA_SEBULBA, PPO, PPO_ATARI, PPO_SEBULBA
from podium.presets.preset import Preset
from podium.presets.values import APEX, DQN, PQN, R2D2, R2D2_CENTRAL, RAINBOW

_TABLES: dict[str, tuple[dict[str, Preset], ...]] = {
    "a2c": (A2C, A2C_SEBULBA),
    "alphazero": (ALPHAZERO,),
    "apex": (APEX,),
    "dqn": (DQN,),
    "impala": (IMPALA, IMPALA_SEBULBA),
    "ippo": (IPPO,),
    "mappo": (MAPPO,),
    "muzero": (MUZERO,),
    "ppo": (PPO, PPO_SEBULBA, PPO_ATARI),
    "pqn": (PQN,),
    "r2d2": (R2D2, R2D2_CENTRAL),
    "rainbow": (RAINBOW,),
    "reppo": (REPPO,),
    "sac": (SAC,),
    "td3": (TD3,),
    "vdn": (VDN,),
}


def of_agent(agent: str) -> dict[str, Preset]:
    """Return the presets of an agent by name; none for an agent that has none."""
    return {name: preset for table in _TABLES.get(agent, ()) for name, preset in table.items()}


def agents() -> list[str]:
    """List the agents that have presets."""
    return list(_TABLES)
