"""Presets of agents that learn values of actions: dqn, apex, rainbow, r2d2 and pqn."""

from __future__ import annotations

from typing import Any

from podium.presets.preset import Preset

# What r2d2 is put beside where observations lack something: as many steps, and no memory.
_FLICKER = {"num_envs": 64, "num_steps": 2_000_000, "env_options": ("flicker=0.5",)}

_DQN_MEMORY = {
    "num_envs": 16,
    "cpu_threads": 1,
    "rollout_length": 1,
    "num_steps": 100_000,
    "learning_rate": 1e-3,
    "n_step": 3,
    "batch_size": 64,
    "buffer_capacity": 50_000,
    "epsilon_decay_steps": 25_000,
}

_MINATAR_REPLAY: dict[str, Any] = {
    "num_envs": 32,
    "cpu_threads": 1,
    "rollout_length": 1,
    "num_steps": 2_000_000,
    "learning_rate": 5e-4,
    "batch_size": 128,
    "num_updates": 1,
    "buffer_capacity": 100_000,
    "min_replay_size": 5_000,
    "target_update_period": 250,
    "torso": "minatar_cnn",
    "hidden_sizes": (128,),
}

_YOUNG = (
    "Young and Tian 2019, arXiv 1903.03176, for network, replay of 100,000 and learning from 5,000 on; 32 environments "
    "here, one there, and a batch of 128 every 32 steps, 32 every step there."
)


def _minatar_dqn(game: str) -> Preset:
    return Preset(f"{game}-MinAtar", _YOUNG, {**_MINATAR_REPLAY, "epsilon_decay_steps": 100_000})


DQN: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1",
        "CleanRL's dqn.py for network and batch; the rest from this project's trials.",
        {
            "num_envs": 16,
            "cpu_threads": 1,
            "rollout_length": 1,
            "num_steps": 500_000,
            "learning_rate": 3e-4,
            "n_step": 3,
            "batch_size": 128,
            "num_updates": 1,
            "buffer_capacity": 200_000,
            "min_replay_size": 1_000,
            "target_update_period": 200,
            "epsilon_decay_steps": 50_000,
            "hidden_sizes": (120, 84),
        },
        "rate, n-step and target period, by evaluations of 8 seeds; a period of 30 to 100 lets the values run away.",
    ),
    "catch": Preset(
        "podium/Catch",
        "This project.",
        {
            "num_envs": 16,
            "cpu_threads": 1,
            "rollout_length": 1,
            "num_steps": 100_000,
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_capacity": 20_000,
        },
    ),
    "repeat-first": Preset("podium/RepeatFirst", "This project.", _DQN_MEMORY),
    "memory-chain": Preset("MemoryChain-bsuite", "This project.", _DQN_MEMORY),
    "breakout-minatar-flicker": Preset(
        "Breakout-MinAtar",
        "Young and Tian 2019, arXiv 1903.03176, for the network and learning from 5,000 steps on; the rest by those of "
        "r2d2 with blank frames.",
        {
            **_FLICKER,
            "rollout_length": 2,
            "learning_rate": 2.5e-4,
            "n_step": 3,
            "batch_size": 128,
            "num_updates": 4,
            "buffer_capacity": 100_000,
            "min_replay_size": 5_000,
            "target_update_period": 500,
            "epsilon_decay_steps": 100_000,
            "torso": "minatar_cnn",
            "hidden_sizes": (128,),
        },
        usual=False,
    ),
    "asterix-minatar": _minatar_dqn("Asterix"),
    "breakout-minatar": _minatar_dqn("Breakout"),
    "freeway-minatar": _minatar_dqn("Freeway"),
    "seaquest-minatar": _minatar_dqn("Seaquest"),
    "space-invaders-minatar": _minatar_dqn("SpaceInvaders"),
}

_APEX_TRIALS = "Horgan et al. 2018 for exploration and priorities; the rest from this project's trials."

APEX: dict[str, Preset] = {
    "catch": Preset(
        "podium/Catch",
        _APEX_TRIALS,
        {
            "num_envs": 16,
            "num_steps": 60_000,
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_capacity": 20_000,
            "min_replay_size": 500,
            "hidden_sizes": (64,),
        },
    ),
    "cartpole": Preset(
        "CartPole-v1",
        _APEX_TRIALS,
        {
            "num_envs": 16,
            "rollout_length": 1,
            "num_steps": 500_000,
            "learning_rate": 3e-4,
            "buffer_capacity": 200_000,
            "target_update_period": 200,
            "hidden_sizes": (120, 84),
        },
    ),
    "atari-apex": Preset(
        "Pong-v5",
        "Horgan et al. 2018, appendix C: batches of 512, target every 2,500, learning from 50,000 transitions on, "
        "gradient norm 40, rate 6.25e-5 (of Adam here, of RMSProp there), dueling Nature CNN. 64 actors and 100,000 "
        "transitions here, 360 and 2,000,000 there, for one machine; each is learnt from once, 0.8 times there.",
        {
            "num_envs": 64,
            "num_actors": 64,
            "workers": 8,
            "rollout_length": 16,
            "num_steps": 50_000_000,
            "learning_rate": 6.25e-5,
            "batch_size": 512,
            "samples_per_insert": 1.0,
            "buffer_capacity": 100_000,
            "min_replay_size": 50_000,
            "target_update_period": 2_500,
            "max_grad_norm": 40.0,
            "torso": "nature_cnn",
            "hidden_sizes": (512,),
            "eval_episodes": 10,
        },
    ),
}


def _minatar_rainbow(game: str, **more: Any) -> Preset:
    return Preset(
        f"{game}-MinAtar",
        f"{_YOUNG} Hessel et al. 2018 for exponents and atoms.",
        {
            **_MINATAR_REPLAY,
            "n_step": 1,
            "annealing_updates": 62_500,
            "noisy": False,
            "epsilon_start": 1.0,
            "epsilon_end": 0.05,
            "epsilon_decay_steps": 100_000,
            "adam_eps": 1e-8,
            "anneal_steps": 2_000_000,
            **more,
        },
        "in Asterix one step in place of three, by greedy returns of two seeds after 400,000 steps: 10.7; 2.3 with "
        "three (with dqn, too, three came to 2.8, and one to 9.7 in the five seeds of its row). In Breakout, by five "
        "seeds of 2M steps, three, an epsilon down to 0.01 and a falling rate: 59.3, and 42.7 as it acts; 37.2 and "
        "33.1 with a constant rate; with one step, 0.05 and a constant rate 61.7 and 43.2 in two trials, and 21.2 and "
        "17.2 as it acts. An eps of Adam's own, in Breakout after 600,000 steps: 23.0; 19.2 with the "
        "source's eps of 1.5e-4; noisy layers in place of epsilon had come to no more than dqn by one seed of 300,000 "
        "steps. In Asterix after 600,000 a rate of 1e-3 came to 16.3, draws by no priorities to 21.9, of 21.2. Atoms "
        "from -10 to 10, the source's, whose mean is 0 before anything is learnt: with 0 to 25 they began at 12 and "
        "took 200,000 steps to come down. A falling rate, in Asterix by five seeds after 2M steps: 62.5; 55.8 without. "
        "Exponents of 0.5 and 0.2 there, by two seeds of 1M steps over which the rate falls: 47.6 and 53.4; 49.6 with "
        "none, and with 0.5 37.1 without dueling and 34.3 with scalars. dqn with such a rate: 41.8.",
    )


RAINBOW: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1",
        "Hessel et al. 2018 for n, exponents, atoms and noise; the rest from this project's trials.",
        {
            "num_envs": 16,
            "cpu_threads": 1,
            "rollout_length": 1,
            "num_steps": 300_000,
            "learning_rate": 1e-3,
            "buffer_capacity": 100_000,
            "target_update_period": 200,
            "annealing_updates": 18_750,
            "v_min": 0.0,
            "v_max": 100.0,
            "noisy_std": 0.1,
            "hidden_sizes": (120, 84),
        },
        "the rate and a noise of 0.1 (the source's: 0.5), by evaluations of 8 seeds, all 500 from 240,000 on; with "
        "0.5 and a rate of 3e-4 eight seeds were between 131 and 372 after 150,000.",
    ),
    "asterix-minatar": _minatar_rainbow("Asterix", priority_exponent=0.2),
    "breakout-minatar": _minatar_rainbow("Breakout", n_step=3, epsilon_end=0.01),
    "atari-rainbow": Preset(
        "Pong-v5",
        "Hessel et al. 2018, table 1: rate 6.25e-5, eps 1.5e-4, n 3, exponent 0.5, importance 0.4 to 1, 51 atoms from "
        "-10 to 10, noise of 0.5, learning from 80,000 frames on, target every 32,000 frames, a batch of 32 every 4 "
        "steps of one environment. 16 environments here, of which each iteration of 64 steps learns 16 such batches; "
        "a replay of 200,000 here, of 1,000,000 there; one linear layer a stream behind 512 shared units.",
        {
            "num_envs": 16,
            "rollout_length": 4,
            "num_steps": 50_000_000,
            "learning_rate": 6.25e-5,
            "batch_size": 32,
            "num_updates": 16,
            "buffer_capacity": 200_000,
            "min_replay_size": 20_000,
            "target_update_period": 2_000,
            "annealing_updates": 12_500_000,
            "torso": "nature_cnn",
            "hidden_sizes": (512,),
            "eval_episodes": 10,
        },
    ),
}

_R2D2_SMALL = {
    "num_envs": 16,
    "cpu_threads": 1,
    "rollout_length": 4,
    "num_steps": 100_000,
    "learning_rate": 1e-3,
    "gamma": 0.97,
    "n_step": 3,
    "batch_size": 32,
    "buffer_capacity": 50_000,
    "target_update_period": 100,
    "sequence_length": 16,
    "burn_in": 4,
    "sequence_period": 4,
    "memory": "gru",
    "memory_size": 32,
    "hidden_sizes": (32,),
}

_R2D2_TRIALS = "Kapturowski et al. 2019 for windows, priorities and exploration; sizes from this project's trials."

_R2D2_CARTPOLE = {
    **_R2D2_SMALL,
    "num_steps": 500_000,
    "learning_rate": 5e-4,
    "gamma": 0.99,
    "n_step": 5,
    "batch_size": 16,
    "num_updates": 2,
    "target_update_period": 200,
    "buffer_capacity": 200_000,
    "memory_size": 64,
    "hidden_sizes": (64,),
}

_R2D2_FLICKER = {
    **_FLICKER,
    "rollout_length": 2,
    "learning_rate": 5e-4,
    "gamma": 0.99,
    "n_step": 5,
    "batch_size": 16,
    "num_updates": 2,
    "buffer_capacity": 100_000,
    "min_replay_size": 5_000,
    "target_update_period": 200,
    "sequence_length": 24,
    "burn_in": 8,
    "sequence_period": 8,
    "num_actors": 64,
    "memory": "gru",
    "memory_size": 128,
    "torso": "minatar_cnn",
    "hidden_sizes": (128,),
}

R2D2: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1",
        _R2D2_TRIALS,
        _R2D2_CARTPOLE,
        "rate and sizes, by three seeds, which end at 498, 500 and 331 (480, 497 and 500 at 450,000 steps): the "
        "optimum is reached, and not held.",
    ),
    "repeat-first": Preset("podium/RepeatFirst", _R2D2_TRIALS, _R2D2_SMALL),
    "memory-chain": Preset("MemoryChain-bsuite", _R2D2_TRIALS, _R2D2_SMALL),
    "breakout-minatar-flicker": Preset(
        "Breakout-MinAtar",
        _R2D2_TRIALS,
        _R2D2_FLICKER,
        "16 windows twice and a target every 200, by one seed after 150,000 steps: 3.7; 1.7 with 32 once and 500.",
        usual=False,
    ),
}

R2D2_CENTRAL: dict[str, Preset] = {
    "atari-r2d2": Preset(
        "Pong-v5",
        "Kapturowski et al. 2019, section 2.3 and appendix: windows of 80 steps every 40, behind 40 to burn in, "
        "batches of 64, n 5, gamma 0.997, rate 1e-4 and eps 1e-3 of Adam, target every 2,500, priority exponent 0.9, "
        "eta 0.9, an LSTM of 512 behind the Nature CNN, dueling, rewards as they are. 64 actors, 100,000 steps held "
        "and a gradient norm of 40 (Ape-X's) here; 256 actors and 4,000,000 steps there.",
        {
            "num_envs": 64,
            "num_actors": 64,
            "env_options": ("reward_clip=False",),
            "rollout_length": 40,
            "num_steps": 50_000_000,
            "learning_rate": 1e-4,
            "adam_eps": 1e-3,
            "gamma": 0.997,
            "n_step": 5,
            "batch_size": 64,
            "samples_per_insert": 1.0,
            "buffer_capacity": 100_000,
            "min_replay_size": 50_000,
            "target_update_period": 2_500,
            "max_grad_norm": 40.0,
            "sequence_length": 120,
            "burn_in": 40,
            "sequence_period": 40,
            "memory": "lstm",
            "memory_size": 512,
            "torso": "nature_cnn",
            "hidden_sizes": (512,),
            "eval_episodes": 10,
        },
    ),
}

_PUREJAXQL = "purejaxql (the PQN authors' code, revision 47af6d7)"


def _minatar_pqn(game: str) -> Preset:
    return Preset(
        f"{game}-MinAtar",
        f"{_PUREJAXQL}, pqn_minatar.yaml: 128 x 32, 2 passes over 32 minibatches, rate 5e-4 annealed, lambda 0.65, "
        "epsilon to 0.05 over a tenth of the steps.",
        {
            "num_envs": 128,
            "rollout_length": 32,
            "num_steps": 10_000_000,
            "learning_rate": 5e-4,
            "anneal_steps": 10_000_000,
            "q_lambda": 0.65,
            "num_epochs": 2,
            "num_minibatches": 32,
            "epsilon_end": 0.05,
            "epsilon_decay_steps": 1_000_000,
            "torso": "minatar_cnn",
            "hidden_sizes": (128,),
        },
    )


_PQN_SMALL = {"num_envs": 64, "learning_rate": 1e-3, "q_lambda": 0.95, "num_epochs": 4, "num_minibatches": 8}

_PQN_MEMORY = {
    **_PQN_SMALL,
    "rollout_length": 16,
    "num_steps": 1_000_000,
    "epsilon_decay_steps": 100_000,
    "hidden_sizes": (64, 64),
    "memory": "gru",
    "memory_size": 64,
}

PQN: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1",
        f"{_PUREJAXQL}, pqn_cartpole.yaml: 32 x 64, 4 passes over 16 minibatches, rate 1e-4 annealed, lambda 0.95, "
        "rewards times 0.1, epsilon over a fifth of the steps; epsilon to 0.2, gamma 0.99 and 500,000 steps there.",
        {
            "num_envs": 32,
            "rollout_length": 64,
            "num_steps": 150_000,
            "learning_rate": 1e-4,
            "anneal_steps": 150_000,
            "gamma": 0.995,
            "q_lambda": 0.95,
            "num_epochs": 4,
            "num_minibatches": 16,
            "epsilon_end": 0.4,
            "epsilon_decay_steps": 30_000,
            "reward_scale": 0.1,
            "optimizer_eps": 1e-4,
            "hidden_sizes": (256, 256),
        },
        "150,000 steps, rate and epsilon falling within them: with a rate that falls over 500,000 three of 8 seeds "
        "ended below 475. optimizer_eps was chosen of 1e-8, 1e-5 and 1e-4 by seeds 100 to 163, of which two (469.8, "
        "474.2), one (436.3) and none ended below; of fresh ones, 200 to 263, one did (474.1), so that the gain is "
        "within what chance gives. With an epsilon of 0.2 and 1e-8 three of 100 to 163 did, at 163 to 226. Gamma, "
        "other seeds and an epsilon of 0.2: two of 88; with 0.99 four of 96.",
    ),
    "asterix-minatar": _minatar_pqn("Asterix"),
    "breakout-minatar": _minatar_pqn("Breakout"),
    "freeway-minatar": _minatar_pqn("Freeway"),
    "seaquest-minatar": _minatar_pqn("Seaquest"),
    "space-invaders-minatar": _minatar_pqn("SpaceInvaders"),
    "catch": Preset(
        "podium/Catch",
        "This project.",
        {**_PQN_SMALL, "rollout_length": 8, "num_steps": 200_000, "epsilon_decay_steps": 50_000, "hidden_sizes": (64,)},
    ),
    "repeat-first": Preset("podium/RepeatFirst", "This project.", _PQN_MEMORY),
    "memory-chain": Preset("MemoryChain-bsuite", "This project.", _PQN_MEMORY),
}
