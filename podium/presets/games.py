"""Presets of agents of games and teams: ippo, mappo, vdn, alphazero and muzero."""

from __future__ import annotations

from podium.presets.preset import Preset

_SPREAD = {
    "num_envs": 16,
    "rollout_length": 128,
    "num_steps": 3_000_000,
    "learning_rate": 2.5e-3,
    "anneal_steps": 9_000_000,
    "num_epochs": 4,
    "num_minibatches": 4,
    "entropy_coef": 0.01,
}


def _team() -> dict[str, Preset]:
    return {
        "spread": Preset(
            "jaxmarl/MPE_simple_spread_v3",
            "This project; 16 environments x 128 as in JaxMARL's scripts. Rates fall by steps of agents, three a step.",
            _SPREAD,
        ),
        "smax-3m": Preset(
            "jaxmarl/smax-3m",
            "This project; 128 environments and a GRU of 128 as in JaxMARL's scripts. Rates fall by steps of agents, "
            "three a step.",
            {
                "num_envs": 128,
                "rollout_length": 64,
                "num_steps": 3_000_000,
                "learning_rate": 2e-3,
                "anneal_steps": 9_000_000,
                "num_epochs": 4,
                "num_minibatches": 4,
                "entropy_coef": 0.01,
                "hidden_sizes": (128, 128),
                "activation": "relu",
                "memory": "gru",
                "memory_size": 128,
            },
            "memory and entropy, by sampled return (2: all battles won) of ippo, seed 0: 1.93; without memory 1.90, "
            "then with an entropy of 0.03 1.86, with none 1.85, with 8 epochs 1.89, with twice the rate 1.89.",
        ),
    }


IPPO, MAPPO = _team(), _team()

VDN: dict[str, Preset] = {
    "spread": Preset(
        "jaxmarl/MPE_simple_spread_v3",
        "This project.",
        {
            "num_envs": 16,
            "rollout_length": 4,
            "num_steps": 1_000_000,
            "learning_rate": 1e-3,
            "gamma": 0.95,
            "batch_size": 128,
            "num_updates": 4,
            "buffer_capacity": 100_000,
            "min_replay_size": 5_000,
            "target_update_period": 200,
            "epsilon_decay_steps": 200_000,
        },
    )
}

_ALPHAZERO = {"num_envs": 256, "rollout_length": 16, "learning_rate": 1e-3, "eval_every": 100_000}

ALPHAZERO: dict[str, Preset] = {
    "tic-tac-toe": Preset(
        "podium/TicTacToe",
        "This project.",
        {
            **_ALPHAZERO,
            "num_steps": 400_000,
            "num_simulations": 16,
            "buffer_capacity": 50_000,
            "env_options": ("rules=True", "openings=5"),
        },
    ),
    "connect-four": Preset(
        "podium/ConnectFour",
        "This project.",
        {
            **_ALPHAZERO,
            "eval_every": 500_000,
            "num_steps": 3_000_000,
            "anneal_steps": 3_000_000,
            "num_simulations": 24,
            "num_updates": 64,
            "td_lambda": 0.95,
            "hidden_sizes": (256, 256),
            "env_options": ("rules=True", "openings=8"),
        },
        "four passes a position, by games won of 100 against alpha-beta of depth 6 after eight random plies: 75 after "
        "0.7M plies of one seed; 73 after 1.2M with one pass. A falling rate, by games won of 200 from the empty board "
        "after 1M plies of seed 1: 0.85; 0.805 with a constant one. One torso for policy and value, likewise of seeds "
        "0 and 1 after all plies: 0.895 and 0.915 in 6 CPU minutes; 0.86 and 0.905 in 12 with two. Eight passes, "
        "likewise the mean of seeds 0 to 3: 0.901 in 7 CPU minutes; 0.887 with four.",
    ),
}

_MUZERO = (
    "Schrittwieser et al. 2020 for 5 unrolled steps, gamma 0.997 and a value loss of a quarter, Danihelka et al. 2022 "
    "for few simulations"
)

MUZERO: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1",
        f"{_MUZERO}; sizes from this project's trials.",
        {
            "num_envs": 32,
            "rollout_length": 8,
            "num_steps": 300_000,
            "anneal_steps": 300_000,
            "num_simulations": 8,
            "value_min": 0.0,
            "value_max": 400.0,
            "hidden_sizes": (64,),
            "batch_size": 128,
            "num_updates": 16,
            "min_replay_size": 2_000,
        },
        "a rate that falls, by the last returns of four seeds: 500, 321, 500 and 500; 396, 441, 500 and 500 without.",
    ),
    "breakout-minatar": Preset(
        "Breakout-MinAtar",
        f"{_MUZERO}; sizes not tried in a long run yet.",
        {
            "num_envs": 64,
            "rollout_length": 8,
            "num_steps": 1_000_000,
            "num_simulations": 8,
            "torso": "minatar_cnn",
            "num_updates": 16,
            "buffer_capacity": 200_000,
        },
    ),
    "tic-tac-toe": Preset(
        "podium/TicTacToe",
        f"{_MUZERO}; no discount, and sizes not tried in a long run yet.",
        {
            "num_envs": 256,
            "rollout_length": 8,
            "num_steps": 1_000_000,
            "num_simulations": 16,
            "rescale_search": False,
            "gamma": 1.0,
            "value_min": -1.0,
            "value_max": 1.0,
            "num_bins": 21,
            "value_coef": 1.0,
            "num_updates": 16,
            "buffer_capacity": 50_000,
            "env_options": ("openings=5",),
            "eval_every": 100_000,
        },
    ),
}
