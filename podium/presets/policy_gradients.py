"""Presets of ppo, impala and a2c: on pure environments, on the CPU (`_SEBULBA`) and emulated (`_ATARI`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from podium.presets.control import RANDOM_FIRST
from podium.presets.preset import Preset

_PUREJAXRL = "PureJaxRL's ppo.py (revision 31756b1)"

_MINATAR_PPO = {
    "num_envs": 64,
    "rollout_length": 128,
    "num_steps": 10_000_000,
    "learning_rate": 5e-3,
    "anneal_steps": 10_000_000,
    "num_epochs": 4,
    "num_minibatches": 8,
    "hidden_sizes": (64, 64),
    "activation": "relu",
}


def _minatar_ppo(game: str) -> Preset:
    source = "PureJaxRL's MinAtar settings (ppo.py with 64 x 128, 8 minibatches, rate 5e-3 annealed, revision 31756b1)."
    return Preset(f"{game}-MinAtar", source, _MINATAR_PPO)


_MEMORY = {"num_envs": 64, "num_steps": 1_000_000, "learning_rate": 1e-3, "memory": "gru", "memory_size": 64}

_REPEAT = {**_MEMORY, "rollout_length": 64, "num_minibatches": 4}

_REPEAT_SHORT = {**_MEMORY, "rollout_length": 16}

_SELF_PLAY: dict[str, Any] = {
    "num_envs": 64,
    "rollout_length": 32,
    "learning_rate": 1e-3,
    "gamma": 1.0,
    "num_epochs": 4,
    "num_minibatches": 4,
    "eval_every": 500_000,
}

_POKER = "arXiv 2502.08938 for self-play with much entropy; the rest from this project's trials."

PPO: dict[str, Preset] = {
    "tic-tac-toe": Preset(
        "podium/TicTacToe",
        "This project.",
        {
            **_SELF_PLAY,
            "rollout_length": 64,
            "num_steps": 1_000_000,
            "entropy_coef": 0.02,
            "hidden_sizes": (128, 128),
            "env_options": ("openings=4",),
        },
    ),
    "connect-four": Preset(
        "podium/ConnectFour",
        "This project.",
        {
            **_SELF_PLAY,
            "rollout_length": 64,
            "num_steps": 2_000_000,
            "entropy_coef": 0.02,
            "hidden_sizes": (128, 128),
            "env_options": ("openings=8",),
        },
    ),
    "kuhn": Preset(
        "podium/Kuhn",
        _POKER,
        {**_SELF_PLAY, "num_steps": 2_000_000, "anneal_steps": 2_000_000, "entropy_coef": 0.15},
        "entropy and a rate that falls, by exploitability of one seed: 0.035; 0.056 with 0.1; 0.24 at a constant rate.",
    ),
    "leduc": Preset(
        "podium/Leduc",
        _POKER,
        {**_SELF_PLAY, "num_steps": 3_000_000, "anneal_steps": 3_000_000, "entropy_coef": 0.1},
        "entropy, by exploitability of one seed: 0.28; 0.34 with 0.05.",
    ),
    "cartpole": Preset(
        "CartPole-v1",
        f"{_PUREJAXRL} but for what was tuned.",
        {
            "num_envs": 16,
            "rollout_length": 128,
            "num_steps": 500_000,
            "learning_rate": 2.5e-3,
            "anneal_steps": 500_000,
            "clip_epsilon": 0.1,
        },
        "16 environments and a clip of 0.1 (the source's: 0.2), by evaluations of 128 seeds, all 500 at the end; with "
        "0.2 or a rate that stays constant one or two seeds of a hundred ended below 475.",
    ),
    "acrobot": Preset(
        "Acrobot-v1",
        "rl-baselines3-zoo's ppo.yml: 16 environments, lambda 0.94, 4 epochs, no entropy bonus, normalised.",
        {
            "num_envs": 16,
            "rollout_length": 128,
            "num_steps": 1_000_000,
            "gae_lambda": 0.94,
            "entropy_coef": 0.0,
            "learning_rate": 2.5e-3,
            "anneal_steps": 1_000_000,
            "num_minibatches": 8,
            "normalize_obs": True,
        },
        "128 steps a rollout (the source's: 256), 8 minibatches and the rate, by the mean of five seeds: -71.6; -79.8 "
        "with 256, 4 and 1e-3.",
    ),
    "mountain-car": Preset(
        "MountainCar-v0",
        "rl-baselines3-zoo's ppo.yml: 16 environments x 16, lambda 0.98, no entropy bonus, normalised.",
        {
            "num_envs": 16,
            "rollout_length": 16,
            "num_steps": 1_000_000,
            "gae_lambda": 0.98,
            "entropy_coef": 0.0,
            "learning_rate": 1e-3,
            "anneal_steps": 1_000_000,
            "normalize_obs": True,
            "normalize_reward": True,
        },
        "the rate, annealed (the source's: 3e-4, constant, which ends at -115 here), by the mean of five seeds.",
    ),
    "pendulum": Preset(
        "Pendulum-v1",
        "rl-baselines3-zoo's ppo.yml: lambda 0.95, 10 epochs, rate 1e-3, no entropy bonus.",
        {
            "num_envs": 16,
            "rollout_length": 256,
            "num_steps": 1_000_000,
            "learning_rate": 1e-3,
            "anneal_steps": 1_000_000,
            "gamma": 0.95,
            "num_epochs": 10,
            "num_minibatches": 16,
            "entropy_coef": 0.0,
            "normalize_obs": True,
            "normalize_reward": True,
        },
        "gamma 0.95 (the source's: 0.9), the rate annealed, observations normalised, by the mean of five seeds: -156; "
        "-187 without the three.",
    ),
    "asterix-minatar": Preset(
        "Asterix-MinAtar",
        "gymnax-blines, agents/Asterix-MinAtar/ppo.yaml (revision 15b76af): two layers of 256, a rate of 5e-4 that "
        "stays, gamma 0.999; its rate rises over the first twentieth, and here it does not.",
        {
            **_MINATAR_PPO,
            "learning_rate": 5e-4,
            "anneal_steps": 0,
            "gamma": 0.999,
            "hidden_sizes": (256, 256),
        },
    ),
    "breakout-minatar": dataclasses.replace(
        _minatar_ppo("Breakout"),
        values={**_MINATAR_PPO, "learning_rate": 4e-3, "hidden_sizes": (128, 128)},
        tuned="layers of 128, rate 4e-3: greedy evaluation 75.9 after 10M steps, mean of five seeds (59 to 95); 59.1 "
        "(30 to 92) with the source's 64 and 5e-3.",
    ),
    "freeway-minatar": _minatar_ppo("Freeway"),
    "seaquest-minatar": _minatar_ppo("Seaquest"),
    "space-invaders-minatar": _minatar_ppo("SpaceInvaders"),
    "catch": Preset(
        "podium/Catch",
        "This project.",
        {"num_envs": 64, "rollout_length": 32, "num_steps": 200_000, "learning_rate": 1e-3},
    ),
    "repeat-first": Preset("podium/RepeatFirst", "This project.", _REPEAT),
    "memory-chain": Preset("MemoryChain-bsuite", "This project.", _REPEAT),
    "craftax-classic": Preset(
        "craftax/Classic-Symbolic",
        "Moon et al. 2023 (arXiv 2307.03486; configs/ppo.yaml, 9514f88): gamma 0.95, lambda 0.65, 4,096 steps in 8 "
        "minibatches; 8 environments, 3 passes, a rate of 3e-4 and a ResNet of pixels there, 16 environments, 4 "
        "passes, 1e-3 that falls and two layers of 256 here.",
        {
            "num_envs": 16,
            "rollout_length": 256,
            "num_steps": 1_000_000,
            "learning_rate": 1e-3,
            "anneal_steps": 1_000_000,
            "num_epochs": 4,
            "num_minibatches": 8,
            "gamma": 0.95,
            "gae_lambda": 0.65,
            "entropy_coef": 0.01,
            "hidden_sizes": (256, 256),
            "activation": "tanh",
        },
        "gamma and lambda, on seed 10: 6.1 as it acts in training, 5.5 with 0.99 and 0.8, 64 steps of 64 environments; "
        "with 3 passes, a rate of 3e-4 and layers of 512 it was behind (4.5 for 5.1 after 650,000 steps).",
    ),
    "mjx-cartpole-swingup": Preset(
        "mjx/CartpoleSwingup",
        "This project; gamma and normalised observations as MuJoCo Playground has them for Brax's PPO.",
        {
            "num_envs": 256,
            "rollout_length": 32,
            "num_steps": 3_000_000,
            "env_options": RANDOM_FIRST,
            "squash": True,
            "normalize_obs": True,
            "gamma": 0.995,
            "learning_rate": 1e-3,
            "anneal_steps": 3_000_000,
            "num_epochs": 8,
            "num_minibatches": 16,
        },
        "the rate, on seeds 10 and 11: 844 and 861, never more than 1 below an evaluation before. Constant: 862 and "
        "862, but one fell to 627 on the way; with no entropy bonus 845 and 770.",
    ),
}

_CATCH = {"num_envs": 64, "num_steps": 300_000, "learning_rate": 2e-3}

IMPALA: dict[str, Preset] = {
    "catch": Preset("podium/Catch", "This project.", {**_CATCH, "rollout_length": 16, "optimizer": "adam"}),
    "repeat-first": Preset("podium/RepeatFirst", "This project.", {**_REPEAT_SHORT, "optimizer": "adam"}),
    "memory-chain": Preset("MemoryChain-bsuite", "This project.", {**_REPEAT_SHORT, "optimizer": "adam"}),
    "cartpole": Preset(
        "CartPole-v1",
        "Espeholt et al. 2018 for the loss and 20 steps a rollout; the rest from this project's trials.",
        {
            "num_envs": 8,
            "rollout_length": 20,
            "num_steps": 500_000,
            "learning_rate": 2e-3,
            "anneal_steps": 500_000,
        },
        "the rate and few environments, which make many updates, by evaluations of twice 8 seeds (all 500 from 400,000 "
        "steps on; of 56 more two ended below, at 210 and 255); the paper's rate is too slow here, and with 16 "
        "environments one seed of 8 fell back.",
    ),
}

A2C: dict[str, Preset] = {
    "catch": Preset("podium/Catch", "This project.", {**_CATCH, "rollout_length": 8}),
    "repeat-first": Preset("podium/RepeatFirst", "This project.", _REPEAT_SHORT),
    "memory-chain": Preset("MemoryChain-bsuite", "This project.", _REPEAT_SHORT),
    "cartpole": Preset(
        "CartPole-v1",
        "Mnih et al. 2016 for the loss; the rest from this project's trials.",
        {
            "num_envs": 8,
            "rollout_length": 16,
            "num_steps": 500_000,
            "learning_rate": 2e-3,
            "anneal_steps": 500_000,
        },
        "rate and sizes, by evaluations of twice 8 seeds (all 500 from 400,000 steps on).",
    ),
}

_ATARI_PPO = {
    "num_envs": 8,
    "rollout_length": 128,
    "num_steps": 10_000_000,
    "learning_rate": 2.5e-4,
    "anneal_steps": 10_000_000,
    "num_epochs": 3,
    "num_minibatches": 4,
    "clip_epsilon": 0.1,
    "value_coef": 1.0,
    "torso": "nature_cnn",
    "hidden_sizes": (512,),
    "activation": "relu",
    "eval_episodes": 10,
}

PPO_SEBULBA: dict[str, Preset] = {
    "atari-ppo": Preset(
        "Pong-v5",
        "Schulman et al. 2017, table 5: 8 environments x 128 steps, 3 passes over 4 minibatches, rate 2.5e-4 and clip "
        "0.1 annealed (the clip is constant here), entropy 0.01, lambda 0.95; Nature CNN.",
        _ATARI_PPO,
    ),
    "pong": Preset(
        "Pong-v5",
        "Schulman et al. 2017, table 5, with the convolutions of Mnih et al. 2013, for a machine of few cores: 16 "
        "environments x 128 steps, 3 passes over 16 minibatches of 128 (the paper's: of 256), rate 5e-4 and a constant "
        "clip of 0.2 (the paper's: 2.5e-4 and 0.1), values weighed by 0.5 (the paper's: 1).",
        {
            **_ATARI_PPO,
            "num_envs": 16,
            "lockstep": True,
            "num_steps": 2_400_000,
            "learning_rate": 5e-4,
            "anneal_steps": 2_400_000,
            "clip_epsilon": 0.2,
            "num_minibatches": 16,
            "value_coef": 0.5,
            "torso": "small_cnn",
            "hidden_sizes": (256,),
            "eval_every": 300_000,
        },
        "by one or two runs each. Lockstep and clip: with parameters one update late and a clip of 0.1 greedy play had "
        "11.6 at 2.4M steps. Minibatches and rate: with 256 and 3e-4 it had -7.2 and -2.6 at 0.9M and -1.7 at 1.5M, "
        "with these 2.2 and 19.6.",
    ),
}

PPO_ATARI: dict[str, Preset] = {
    "atari-ppo-device": Preset(
        "atari/Pong",
        PPO_SEBULBA["atari-ppo"].source,
        _ATARI_PPO,
    ),
    "atari-ppo-wide": Preset(
        "atari/Pong",
        "Schulman et al. 2017, table 5, made wide for a GPU, on which 8,192 consoles take no longer than 1,024: 4,096 "
        "environments x 16 steps, 2 passes over 32 minibatches of 2,048; rate twice the paper's, annealed, a constant "
        "clip of 0.2, values weighed by 0.5, as in `pong`.",
        {
            **_ATARI_PPO,
            "num_envs": 4096,
            "rollout_length": 16,
            "num_steps": 20_000_000,
            "anneal_steps": 20_000_000,
            "num_epochs": 2,
            "num_minibatches": 32,
            "learning_rate": 5e-4,
            "clip_epsilon": 0.2,
            "value_coef": 0.5,
        },
    ),
}

IMPALA_SEBULBA: dict[str, Preset] = {
    "atari-impala": Preset(
        "Pong-v5",
        "Espeholt et al. 2018, appendix: 32 x 20 steps, RMSProp with rate 6e-4 annealed, decay 0.99, eps 0.01, entropy "
        "0.01, gradient norm 40, deep ResNet. Losses are sums there and means here: eps is divided by "
        "(32 * 20)**2, the norm by 32 * 20.",
        {
            "num_envs": 32,
            "rollout_length": 20,
            "num_steps": 10_000_000,
            "learning_rate": 6e-4,
            "anneal_steps": 10_000_000,
            "optimizer_eps": 0.01 / (32 * 20) ** 2,
            "max_grad_norm": 40 / (32 * 20),
            "torso": "impala_resnet",
            "hidden_sizes": (256,),
            "activation": "relu",
            "eval_episodes": 10,
        },
    ),
}

A2C_SEBULBA: dict[str, Preset] = {
    "atari-a2c": Preset(
        "Pong-v5",
        "OpenAI Baselines' a2c: 16 environments x 5 steps, RMSProp with rate 7e-4 annealed, decay 0.99, eps 1e-5, "
        "entropy 0.01, value 0.5, gradient norm 0.5; Nature CNN.",
        {
            "num_envs": 16,
            "rollout_length": 5,
            "num_steps": 10_000_000,
            "learning_rate": 7e-4,
            "anneal_steps": 10_000_000,
            "torso": "nature_cnn",
            "hidden_sizes": (512,),
            "activation": "relu",
            "eval_episodes": 10,
        },
    ),
}
