"""What an update of each agent learns from, in words: rows of the plan that a command line prints before it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from podium.agents import a2c, alphazero, apex, dqn, impala, muzero, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.networks import ActorCriticConfig
from podium.search import SearchConfig


def of_ppo(config: ppo.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe PPO's minibatches and passes."""
    return {
        "learning rate": _rate(config.learning_rate, "adam", config.anneal_steps),
        **_memory(config),
        **_passes(config, num_envs, rollout_length),
    }


def of_reppo(config: reppo.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe REPPO's minibatches and passes, and what its critic can tell."""
    steps = num_envs * rollout_length
    return {
        "learning rate": _rate(config.learning_rate, "adam", config.anneal_steps),
        "batch": f"{steps:,} steps",
        "minibatch": f"{steps // config.num_minibatches:,} steps, {config.num_minibatches} a pass, "
        f"{config.num_epochs} passes",
        "values": f"{config.value_min:g} to {config.value_max:g}, in {config.num_bins} bins",
    }


def of_a2c(config: a2c.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe A2C's one gradient step."""
    return {
        "learning rate": _rate(config.learning_rate, config.optimizer, config.anneal_steps),
        **_memory(config),
        "batch": f"{num_envs * rollout_length:,} steps, one gradient step",
    }


def of_impala(config: impala.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe IMPALA's sequences."""
    parts = "" if config.num_minibatches == 1 else f", in {config.num_minibatches} parts"
    return {
        "learning rate": _rate(config.learning_rate, config.optimizer, config.anneal_steps),
        **_memory(config),
        "batch": f"{num_envs} sequences of {rollout_length} steps{parts}",
    }


def of_dqn(config: dqn.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe DQN's gradient steps, replay and exploration."""
    inserted = num_envs * rollout_length
    rows = config.buffer_capacity // inserted * inserted
    return {
        "learning rate": _rate(config.learning_rate, "adam", config.anneal_steps),
        "learning": _replayed(config, inserted, f"{config.batch_size} transitions", config.batch_size),
        "replay": f"{rows:,} steps",
        "exploration": _epsilon(config),
    }


def of_apex(config: apex.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe what DQN's rows say, and how each actor of Ape-X explores."""
    words = dict(of_dqn(config, num_envs, rollout_length))
    power = 1 + config.epsilon_spread
    if config.epsilon_start != config.epsilon_end:
        over = f", to the power of 1 to {power:g} over {config.num_actors} actors" if config.num_actors > 1 else ""
        words["exploration"] = _epsilon(config) + over
    else:
        over = f" to {config.epsilon_start**power:.2g} over {config.num_actors} actors" if config.num_actors > 1 else ""
        words["exploration"] = f"epsilon {config.epsilon_start:g}{over}"
    words["replay"] += f", drawn by |TD error| to the power of {config.priority_exponent:g}"
    return words


def of_r2d2(config: r2d2.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe what Ape-X's rows say, and the windows of R2D2."""
    unit = num_envs * max(rollout_length, config.sequence_period)
    learnt = config.batch_size * (config.sequence_length - config.burn_in)
    begin = "the memory that acting had" if config.stored_state else "none"
    what = f"{config.batch_size} windows of {config.sequence_length} steps"
    words = dict(of_apex(config, num_envs, rollout_length))
    words["memory"] = (
        f"{config.memory}, {config.memory_size} units, from {begin}, with {config.burn_in} steps of a window to burn in"
    )
    words["learning"] = _replayed(config, num_envs * rollout_length, what, learnt)
    words["replay"] = (
        f"{config.buffer_capacity // unit * unit:,} steps, a window every {config.sequence_period}, "
        f"drawn by |TD error| to the power of {config.priority_exponent:g}"
    )
    return words


def of_rainbow(config: rainbow.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe what DQN's rows say, the head, and what explores."""
    words = dict(of_dqn(config, num_envs, rollout_length))
    if config.noisy:
        also = f", and {words['exploration']}" if config.epsilon_start else ""
        words["exploration"] = f"noisy layers, deviation {config.noisy_std:g}{also}"
    words["replay"] += f", drawn by the loss to the power of {config.priority_exponent:g}"
    between = f" from {config.v_min:g} to {config.v_max:g}" if config.head == "c51" else ""
    words["values"] = config.head if config.head == "scalar" else f"{config.head}, {config.num_atoms} atoms{between}"
    return words


def of_alphazero(config: alphazero.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe AlphaZero's search, and what it learns from."""
    held = config.buffer_capacity // (num_envs * rollout_length) * num_envs * rollout_length
    return {
        "learning rate": _rate(config.learning_rate, "adamw", config.anneal_steps),
        "search": _search(config),
        "learning": f"{config.num_updates} minibatches of {config.batch_size} positions an iteration, of {held:,} held",
    }


def of_muzero(config: muzero.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe MuZero's search, its model, and what it learns from."""
    held = config.buffer_capacity // (num_envs * rollout_length) * num_envs * rollout_length
    return {
        "learning rate": _rate(config.learning_rate, "adamw", config.anneal_steps),
        "search": _search(config),
        "model": f"states of {config.state_size} numbers, unrolled {config.unroll_steps} steps",
        "values": f"{config.value_min:g} to {config.value_max:g}, in {config.num_bins} atoms",
        "learning": f"{config.num_updates} minibatches of {config.batch_size} windows of "
        f"{config.unroll_steps + config.td_steps} steps an iteration, of {held:,} steps held",
    }


def of_pqn(config: pqn.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe PQN's minibatches, passes and exploration."""
    return {
        "learning rate": _rate(config.learning_rate, "radam", config.anneal_steps),
        **_memory(config),
        **_passes(config, num_envs, rollout_length),
        "exploration": _epsilon(config),
    }


def of_sac(config: sac.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe SAC's gradient steps, replay and exploration."""
    return {
        **_off_policy(config, num_envs, rollout_length),
        "exploration": f"{_random(config)} the policy's own, of entropy {-config.target_entropy_scale:g} a dimension",
    }


def of_td3(config: td3.Config, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe TD3's gradient steps, replay and exploration."""
    return {
        **_off_policy(config, num_envs, rollout_length),
        "exploration": f"{_random(config)} noise of deviation {config.exploration_noise:g} on actions in [-1, 1]",
    }


def of_any(config: Any, num_envs: int, rollout_length: int) -> Mapping[str, str]:
    """Describe an agent that is described nowhere: the size of a rollout, and the fields that are not as usual."""
    changed = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    ]
    return {"batch": f"{num_envs * rollout_length:,} steps", "settings": " ".join(changed) or "as the agent's Config"}


def _search(config: SearchConfig) -> str:
    if not config.num_simulations:
        return "none: acts by the network alone"
    noise = f", {config.max_considered_actions} actions at the root" if config.search == "gumbel" else ""
    return f"{config.search}, {config.num_simulations} simulations{noise}"


def _rate(rate: float, optimizer: str, anneal_steps: int) -> str:
    falling = f", falling to 0 over {anneal_steps:,} steps" if anneal_steps else ""
    return f"{rate:g} ({optimizer}){falling}"


def _passes(config: ppo.Config | pqn.Config, num_envs: int, rollout_length: int) -> dict[str, str]:
    steps = num_envs * rollout_length
    if config.memory == "none":
        minibatch = f"{steps // config.num_minibatches:,} steps"
    else:
        minibatch = f"{num_envs // config.num_minibatches} sequences of {rollout_length} steps"
    return {
        "batch": f"{steps:,} steps",
        "minibatch": f"{minibatch}, {config.num_minibatches} a pass, {config.num_epochs} passes",
    }


def _replayed(config: dqn.Config, inserted: int, what: str, steps: int) -> str:
    """Say how much is learnt from a rollout of `inserted` steps by minibatches of so many."""
    updates = round(config.samples_per_insert * inserted / steps) or config.num_updates
    return (
        f"{updates} gradient steps a rollout, {what} each ({updates * steps / inserted:.3g} samples per insert), "
        f"from {config.min_replay_size:,} steps on"
    )


def _epsilon(config: dqn.Config | pqn.Config) -> str:
    falling = f"over {config.epsilon_decay_steps:,} steps"
    return f"epsilon {config.epsilon_start:g} to {config.epsilon_end:g} {falling}"


def _memory(config: ActorCriticConfig | pqn.Config) -> dict[str, str]:
    return {} if config.memory == "none" else {"memory": f"{config.memory}, {config.memory_size} units"}


def _off_policy(config: sac.Config | td3.Config, num_envs: int, rollout_length: int) -> dict[str, str]:
    inserted = num_envs * rollout_length
    delay = "" if config.policy_delay == 1 else f", the policy's every {config.policy_delay}"
    return {
        "learning rate": f"{config.learning_rate:g}, of the critics {config.critic_learning_rate:g} (adam)",
        "learning": f"{config.updates_per_step * inserted:g} gradient steps a rollout of {inserted:,} steps{delay}, "
        f"{config.batch_size} transitions each, from {config.min_replay_size:,} steps on",
        "replay": f"{config.buffer_capacity // inserted * inserted:,} steps",
    }


def _random(config: sac.Config | td3.Config) -> str:
    return f"uniform for {config.warmup_steps:,} steps, then" if config.warmup_steps else "by"
