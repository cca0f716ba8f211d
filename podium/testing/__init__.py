"""What any environment and any agent can be put through: the contracts as functions, and environments that probe.

`check_env`, `check_host_env` and `check_agent` say in one sentence which rule is broken and how to mend it. The probe
environments have values known on paper. `check_metrics` holds a program to what it declares of its metrics.
`assert_compiles_once` watches jitted functions.
"""

from podium.contracts import ContractError
from podium.testing.agents import check_agent
from podium.testing.compiles import assert_compiles_once
from podium.testing.environments import check_env
from podium.testing.host import check_host_env
from podium.testing.metrics import check_metrics
from podium.testing.probes import (
    probe_continuous,
    probe_discount,
    probe_environments,
    probe_game,
    probe_memory,
    probe_policy,
    probe_team,
    probe_termination,
    probe_truncation,
    probe_value,
)

__all__ = [
    "ContractError",
    "assert_compiles_once",
    "check_agent",
    "check_env",
    "check_host_env",
    "check_metrics",
    "probe_continuous",
    "probe_discount",
    "probe_environments",
    "probe_game",
    "probe_memory",
    "probe_policy",
    "probe_team",
    "probe_termination",
    "probe_truncation",
    "probe_value",
]
