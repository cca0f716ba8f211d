"""What every test process needs before it touches JAX: eight devices, a compilation cache, and no network."""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

NUM_DEVICES = 8

# Looked through for doctests, it would register what it has in every test process.
collect_ignore = ["plugin_of_own.py"]

NIGHTLY = (
    # The emulator against ale-py, frame by frame: only what touches envs/atari can break it.
    "tests/atari/test_core.py",
    "tests/atari/test_ends.py",
    "tests/atari/test_environment.py",
    "tests/atari/test_kernel.py",
    "tests/atari/test_machine.py",
    "tests/atari/test_pictures.py",
    "tests/atari/test_rules.py",
    "tests/atari/test_scalar.py",
    "tests/atari/test_starts.py",
    "tests/atari/test_states.py",
    "tests/experiments/test_replay_atari.py",
    "tests/contract/test_envs.py::test_atari_contract",
    "tests/atari/test_compiler.py::test_what_a_console_does_is_the_same_in_every_number_of_them",
    # Processes: two as one run, and Ray's.
    "tests/distributed/test_two_processes.py",
    "tests/engines/test_distributed_actors_on_ray.py",
    "tests/engines/test_envs_on_ray.py",
    "tests/engines/test_parameter_server_on_ray.py",
    "tests/engines/test_replay_on_ray.py",
    "tests/engines/test_launch.py::test_it_trains",
    "tests/engines/test_engines.py::test_a_process_computes_on_its_share",
    "tests/engines/test_engines.py::test_a_killed_process_is_lost",
    "tests/engines/test_engines.py::test_a_heartbeat_can_end_a_call_that_hangs",
    "tests/engines/test_engines.py::test_a_lost_head_ends_the_run_with_a_sentence",
    "tests/test_replay_frames.py::test_agents_learn_the_same_of_frames_as_of_stacks[apex",
    "tests/test_replay_frames.py::test_agents_learn_the_same_of_frames_as_of_stacks[dqn-anakin",
    *(
        f"tests/test_turns.py::test_values_are_those_of_who_moves[{name}-{moves}]"
        for name in ("a2c", "apex", "dqn", "dqn-3-step", "impala", "ppo", "ppo-gru", "pqn", "r2d2", "rainbow")
        for moves in (1, 2, 3)
        if moves != 2 or name in ("a2c", "apex", "dqn", "ppo-gru")
    ),
    *(
        f"tests/{file}.py::test_every_placement_learns_the_same[{placement}"
        for file in ("test_turns", "test_multi")
        for placement in ("single", "local", "two", "parameter")
    ),
    "tests/test_multi.py::test_they_learn[ippo-gru",
    "tests/agents/test_alphazero.py::test_every_placement_learns_the_same[single",
    "tests/agents/test_alphazero.py::test_every_placement_learns_the_same[two",
    "tests/envs/test_jaxmarl.py::test_it_trains",
    "tests/test_multi.py::test_they_learn[mappo-all",
    "tests/test_multi.py::test_they_learn[pqn-all",
    # Products of agents and placements, of which tests/parity and tests/placements keep covering pairs.
    "tests/agents/test_ppo.py::test_the_first_ratio_is_1[{'box'",
    "tests/agents/test_ppo.py::test_the_first_ratio_is_1[{'memory'",
    "tests/contract/test_agents.py::test_numbers_of_environments_are_no_memory",
    "tests/contract/test_envs.py::test_contract[Asterix-MinAtar]",
    "tests/contract/test_envs.py::test_contract[Freeway-MinAtar]",
    "tests/contract/test_envs.py::test_contract[Seaquest-MinAtar]",
    "tests/contract/test_envs.py::test_contract[SpaceInvaders-MinAtar]",
    "tests/devices/test_programs.py::test_gradient_sums_are_all_that_crosses[ppo-continuous]",
    "tests/devices/test_programs.py::test_gradient_sums_are_all_that_crosses[ppo-normalized]",
    "tests/devices/test_programs.py::test_gradient_sums_are_all_that_crosses[impala-gru]",
    "tests/devices/test_programs.py::test_gradient_sums_are_all_that_crosses[dqn]",
    "tests/devices/test_programs.py::test_the_state_is_donated_and_the_buffer_never_copied[1-podium.agents.apex]",
    "tests/devices/test_programs.py::test_seeds_are_runs_of_their_own[ppo-8-8]",
    "tests/envs/test_gymnax_envs.py::test_minatar_loses_nothing_as_bool",
    "tests/experiments/test_benchmark.py::test_anakin_dqn",
    "tests/experiments/test_benchmark.py::test_solve",
    "tests/experiments/test_benchmark.py::test_paired",
    "tests/experiments/test_benchmark.py::test_evolution",
    "tests/experiments/test_benchmark.py::test_sebulba",
    "tests/experiments/test_benchmark.py::test_central_inference",
    "tests/experiments/test_placements.py::test_a_row_has_what_other_tools_read",
    "tests/experiments/test_runs_end_to_end.py::test_played_returns_are_those_of_evaluate",
    "tests/faults/test_old_runs.py::test_a_run_of_0_1_0_is_resumed[dqn]",
    "tests/faults/test_old_runs.py::test_another_placement_takes_its_agent_over",
    "tests/faults/test_train_faults.py::test_nan_in_the_gradient_stops_the_run_and_keeps_the_last_good_checkpoint[dqn]",
    "tests/faults/test_train_faults.py::test_nan_in_a_reward_stops_the_run_before_it_is_saved[ppo-single]",
    "tests/faults/test_train_faults.py::test_nan_in_a_reward_stops_the_run_before_it_is_saved[dqn-",
    "tests/faults/test_train_faults.py::test_nan_in_a_reward_stops_the_run_before_it_is_saved[waiting-single]",
    "tests/faults/test_train_resume.py::test_stopped_and_resumed_is_the_run_that_was_not[ppo-1-2-6]",
    "tests/faults/test_train_resume.py::test_stopped_and_resumed_is_the_run_that_was_not[dqn-1-",
    "tests/faults/test_train_resume.py::test_stopped_and_resumed_is_the_run_that_was_not[dqn-8-15",
    "tests/faults/test_train_resume.py::test_stopped_between_two_rows_the_next_row_is_whole[dqn]",
    "tests/ops/test_shuffle.py::test_bijection_for_every_small_size",
    "tests/parity/test_parity.py::test_the_runs_compared_did_learn",
    "tests/parity/test_single_compiles_once.py::test_an_update_from_a_replay_compiles_nothing_twice[agent1]",
    "tests/sebulba/test_sebulba.py::test_in_lockstep_it_is_anakin[a2c]",
    "tests/sebulba/test_sebulba.py::test_in_lockstep_it_is_anakin[impala",
    "tests/sebulba/test_sebulba.py::test_in_lockstep_it_is_anakin[dqn]",
    "tests/test_networks.py::test_batches_over_a_mesh_change_no_output_and_no_gradient[two torsos]",
    "tests/test_networks.py::test_batches_over_a_mesh_change_no_output_and_no_gradient[a gaussian]",
    "tests/test_networks.py::test_batches_over_a_mesh_change_no_output_and_no_gradient[observations",
    "tests/test_networks.py::test_batches_over_a_mesh_change_no_output_and_no_gradient[lstm]",
    "tests/test_networks.py::test_batches_over_a_mesh_change_no_output_and_no_gradient[action values",
    "tests/test_vision.py::test_torsos_are_the_same_however_they_are_lowered[impala_resnet",
    "tests/placements/test_numbers.py",
    "tests/placements/test_on_the_host.py",
    "tests/placements/test_resume_elsewhere.py",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[ppo-2]",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[ppo-gru-8]",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[ppo-continuous-normalized-8]",
    "tests/parity/test_parity.py::test_the_readable_oracle_agrees[impala-single]",
    "tests/parity/test_parity.py::test_the_readable_oracle_agrees[dqn-",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[ppo-gru]",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[a2c-",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[impala-",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[apex-]",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[pqn-",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[reppo-]",
    "tests/placements/test_local_sgd.py::test_the_number_of_devices_changes_nothing",
    "tests/placements/test_local_sgd.py::test_averaging_every_plain_gradient_step_is_the_global_gradient[ppo",
    "tests/placements/test_local_sgd.py::test_workers_differ_between_averages_and_are_one_after_them",
    "tests/placements/test_local_sgd.py::test_the_first_rollout_is_that_of_every_other_placement",
    "tests/placements/test_local_sgd.py::test_a_run_that_resumes_is_the_run_that_was_not_stopped",
    "tests/placements/test_local_sgd.py::test_it_learns",
    "tests/placements/test_local_sgd.py::test_counters_count_the_steps_of_all_workers",
    "tests/placements/test_local_sgd.py::test_the_mean_stands_for_the_workers_between_averages",
    "tests/placements/test_evolution.py::test_it_says_how_its_metrics_add_up",
    "tests/placements/test_evolution.py::test_the_number_of_devices_and_of_members_at_once_changes_nothing",
    "tests/placements/test_evolution.py::test_it_reaches_the_optimum_of_catch",
    "tests/placements/test_evolution.py::test_another_program_resumes_a_state_exactly[True]",
    "tests/placements/test_evolution.py::test_a_generation_counts_the_steps_that_were_played",
    "tests/placements/test_evolution.py::test_a_generation_is_that_of_a_loop_over_its_members[2]",
    "tests/placements/test_parameter_server.py::test_the_first_rollout_of_all_workers_is_that_of_single",
    "tests/placements/test_parameter_server.py::test_a_gradient_that_is_not_finite_is_as_if_it_had_never_been",
    "tests/placements/test_parameter_server.py::test_a_run_that_resumes_is_the_run_that_was_not_stopped",
    "tests/placements/test_parameter_server.py::test_an_iteration_that_failed_is_repeated_as_if_it_had_not_begun[dqn]",
    "tests/placements/test_parameter_server_on_host.py::test_a_run_that_resumes_says_that_episodes_restart",
    "tests/placements/test_replay_apart.py::test_as_much_is_sampled_for_what_is_inserted_as_the_agent_says[workers",
    "tests/placements/test_threads_that_play.py::test_environments_that_reset_in_the_next_step",
    "tests/placements/test_threads_that_play.py::test_in_lockstep_it_is_anakin[DistributedActors-dqn]",
    "tests/placements/test_threads_that_play.py::test_in_lockstep_it_is_anakin[DistributedActors on the host",
    "tests/placements/test_threads_that_play.py::test_a_worker_that_raises_begins_anew_and_what_it_played_is_dropped[impala",
    "tests/placements/test_threads_that_play.py::test_a_worker_that_hangs_ends_the_run_and_says_where[Distributed",
    "tests/placements/test_threads_that_play.py::test_devices_and_batches_change_nothing",
    "tests/placements/test_threads_that_play.py::test_in_lockstep_it_is_anakin[CentralInference-impala lstm]",
    "tests/placements/test_metrics_add_up.py::test_so_do_those_of_an_agent_with_a_replay",
    "tests/placements/test_metrics_add_up.py::test_every_metric_adds_up_as_the_program_says[single-host]",
    "tests/placements/test_metrics_add_up.py::test_every_metric_adds_up_as_the_program_says[local_sgd-host]",
    "tests/placements/test_metrics_add_up.py::test_every_metric_adds_up_as_the_program_says[parameter_server-host]",
    "tests/placements/test_metrics_add_up.py::test_every_metric_adds_up_as_the_program_says[central_inference-pure]",
    # What jax takes long for in a process that holds much: naming who keeps a traced value, and its caches emptied.
    "tests/envs/test_check_env.py::test_broken_environment_is_named[leak]",
    "tests/envs/test_check_env.py::test_what_only_jax_caches_keep_is_no_leak",
    "tests/envs/test_check_env.py::test_a_leak_from_inside_a_loop_is_found",
    "tests/atari/test_compiler.py::test_it_is_avoided_before_jax_starts_and_for_atari_only",
    "tests/contract/test_agents.py::test_agents_keep_the_contract[reppo]",
    "tests/contract/test_agents.py::test_agents_keep_the_contract[sac]",
    "tests/contract/test_agents.py::test_an_agent_for_continuous_actions_is_checked_in_a_probe_that_terminates",
    "tests/contract/test_envs.py::test_contract[Acrobot-v1]",
    "tests/contract/test_envs.py::test_contract[BernoulliBandit-misc]",
    "tests/contract/test_envs.py::test_contract[DeepSea-bsuite]",
    "tests/contract/test_envs.py::test_contract[DiscountingChain-bsuite]",
    "tests/contract/test_envs.py::test_contract[FourRooms-misc]",
    "tests/contract/test_envs.py::test_contract[MemoryChain-bsuite]",
    "tests/contract/test_envs.py::test_contract[MetaMaze-misc]",
    "tests/contract/test_envs.py::test_contract[PointRobot-misc]",
    "tests/contract/test_envs.py::test_contract[Pong-misc]",
    "tests/contract/test_envs.py::test_contract[SimpleBandit-bsuite]",
    "tests/contract/test_envs.py::test_contract[Swimmer-misc]",
    "tests/contract/test_envs.py::test_contract[UmbrellaChain-bsuite]",
    "tests/contract/test_envs.py::test_sharded_rollout_equals_single_device[FrozenLake-misc]",
    "tests/contract/test_envs.py::test_sharded_rollout_equals_single_device[Pendulum-v1]",
    "tests/agents/test_off_policy.py::test_values_on_paper[sac-truncation-1]",
    "tests/agents/test_off_policy.py::test_values_on_paper[td3-termination-1]",
    "tests/agents/test_off_policy.py::test_policy_steps_are_delayed_exactly[3-sac]",
    "tests/agents/test_ppo.py::test_statistics_are_of_everything_seen_and_change_after_learning[{'memory'",
    "tests/agents/test_ppo.py::test_acting_greedily_takes_the_mode",
    "tests/agents/test_squashed.py::test_at_the_bounds_themselves_nothing_is_lost[impala gru]",
    "tests/agents/test_squashed.py::test_actions_lie_within_bounds_and_learning_sees_what_was_drawn[impala gru]",
    "tests/devices/test_programs.py::test_priorities_are_never_copied[1-1]",
    "tests/devices/test_programs.py::test_gradient_sums_are_all_that_crosses[ppo-gru]",
    "tests/devices/test_programs.py::test_a_gradient_step_of_ppo_waits_for_other_devices_once[ppo-",
    "tests/devices/test_programs.py::test_rows_that_are_none_add_no_wait[impala]",
    "tests/experiments/test_evidence.py::test_a_try_gives_a_row_and_keeps_nothing",
    "tests/experiments/test_gpu.py::test_one_update_is_that_of_a_process_of_the_cpu",
    "tests/faults/test_train_resume.py::test_stopped_and_resumed_is_the_run_that_was_not[sac-1-2-6]",
    "tests/faults/test_train_resume.py::test_resume_on_another_number_of_devices[dqn-1-8]",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[sac-8]",
    "tests/placements/test_local_sgd.py::test_two_on_a_ring_take_the_mean_of_all",
    "tests/placements/test_local_sgd.py::test_among_neighbours_the_number_of_devices_changes_nothing",
    "tests/placements/test_local_sgd.py::test_among_neighbours_environments_on_the_host_are_the_same",
    "tests/placements/test_model_axis.py::test_devices_that_share_a_network_train_what_one_trains[ppo-sharded]",
    "tests/placements/test_normalized_rewards.py::test_every_placement_carries_the_sums[LocalSGD, host]",
    "tests/placements/test_normalized_rewards.py::test_every_placement_carries_the_sums[ParameterServer, host]",
    "tests/placements/test_normalized_rewards.py::test_every_placement_carries_the_sums[Single, host]",
    "tests/placements/test_population.py::test_a_run_resumes_to_the_bit_and_leaves_its_lineage",
    "tests/placements/test_population.py::test_devices_change_nothing[2]",
    "tests/placements/test_population.py::test_one_that_diverged_begins_anew_from_a_good_one",
    "tests/placements/test_threads_that_play.py::test_in_lockstep_it_is_anakin[CentralInference-td3]",
    "tests/test_sweep.py::test_settings_that_are_not_dropped_go_on_as_without_halving",
    "tests/test_traced.py::test_settings_side_by_side_are_each_alone[ppo]",
    # Of the families of games, teams and searches one placement of actors and one agent stay.
    "tests/agents/test_alphazero.py::test_a_resumed_run_is_the_same_and_loads_by_name",
    "tests/agents/test_alphazero.py::test_every_placement_learns_the_same[distributed",
    "tests/agents/test_alphazero.py::test_a_search_wins_in_one_and_does_not_lose_in_one[1-",
    "tests/agents/test_muzero.py::test_the_model_knows_rewards_values_and_the_end_of_an_episode",
    "tests/experiments/test_alphazero.py::test_the_summary_says_how_many_lines_are_lost",
    "tests/test_turns.py::test_evolution_and_populations_play_it",
    "tests/test_turns.py::test_every_placement_learns_the_same[central inference-impala",
    "tests/test_turns.py::test_every_placement_learns_the_same[central inference-ppo",
    "tests/test_turns.py::test_every_placement_learns_the_same[sebulba-dqn",
    "tests/test_turns.py::test_every_placement_learns_the_same[sebulba-impala",
    "tests/test_turns.py::test_every_placement_learns_the_same[distributed actors-dqn",
    "tests/test_turns.py::test_every_placement_learns_the_same[distributed actors-ppo",
    "tests/test_multi.py::test_a_resumed_run_is_the_same",
    "tests/test_multi.py::test_they_learn[pqn-",
    "tests/test_multi.py::test_every_placement_learns_the_same[central inference-dqn",
    "tests/test_multi.py::test_every_placement_learns_the_same[central inference-ippo",
    "tests/test_multi.py::test_every_placement_learns_the_same[sebulba-ippo",
    "tests/test_multi.py::test_every_placement_learns_the_same[sebulba-mappo",
    "tests/test_multi.py::test_every_placement_learns_the_same[distributed actors-dqn",
    "tests/test_multi.py::test_every_placement_learns_the_same[distributed actors-mappo",
    # Of replays' random trials some shapes stay, and of frames kept once one way of resetting.
    "tests/test_replay_frames.py::test_a_run_resumes_with_its_frames",
    "tests/test_replay_frames.py::test_agents_learn_the_same_of_frames_as_of_stacks[dqn-two",
    "tests/test_replay_frames.py::test_behind_a_gap_steps_are_left_out_whose_frames_were_never_written[4-resets in",
    *(
        f"tests/test_replay_sequences.py::test_random_insertions_cuts_ends_and_samples_against_lists[{shape}"
        for shape in ("4-6-2-2-16-True", "4-5-0", "1-6-3", "2-7-6-4-16-False")
    ),
    "tests/test_replay_sequences.py::test_seeds_batch_under_vmap",
    "tests/agents/test_r2d2.py::test_without_memory_windows_of_n_steps_have_the_targets_of_dqn",
    "tests/contract/test_agents.py::test_agents_keep_the_contract[rainbow]",
    "tests/devices/test_programs.py::test_a_gradient_step_sums_its_gradient_as_one_array[dqn]",
    "tests/engines/test_engines.py::test_what_asks_for_too_much_says_so",
    "tests/placements/test_model_axis.py::test_a_device_holds_its_part_of_the_state[ppo-sharded]",
    "tests/test_varied.py::test_each_setting_is_what_it_is_alone[ppo]",
    # What takes long, and has a cheaper test beside it that is not nightly.
    "tests/agents/test_alphazero.py::test_a_search_wins_in_one_and_does_not_lose_in_one[2-",
    "tests/agents/test_muzero.py::test_every_placement_learns_the_same[two",
    "tests/agents/test_r2d2.py::test_gradients_and_priorities_are_those_of_a_loop_over_steps[True",
    "tests/engines/test_engines.py::test_what_cannot_be_sent_is_refused_in_a_sentence",
    "tests/envs/test_gymnax_envs.py::test_what_gymnax_draws_with_is_loaded_when_it_is_used",
    "tests/experiments/test_gpu.py::test_a_failing_and_an_endless_piece_leave_the_others_alone_and_are_tried_again",
    "tests/faults/test_train_resume.py::test_a_signal_during_compilation_ends_the_run_after_it[compile-15",
    "tests/faults/test_train_resume.py::test_stopped_between_two_rows_the_next_row_is_whole",
    "tests/games/test_connect_four.py::test_who_looks_ahead_beats_who_does_not",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[r2d2",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[rainbow",
    "tests/placements/test_model_axis.py::test_a_checkpoint_moves_between_layouts",
    "tests/placements/test_model_axis.py::test_the_parameters_gathered_are_those_that_it_says",
    "tests/placements/test_neighbours.py::test_windows_stop_where_a_run_is_resumed[Single",
    "tests/placements/test_normalized_rewards.py::test_a_run_that_resumes_has_the_sums_of_the_run_that_was_not_stopped",
    "tests/placements/test_parameter_server.py::test_a_worker_that_hangs_ends_the_run_and_says_where",
    "tests/placements/test_parameter_server_on_host.py::test_with_one_worker_it_is_single[a2c",
    "tests/placements/test_population.py::test_the_command_line_knows_it",
    "tests/placements/test_replay_apart.py::test_as_much_is_sampled_for_what_is_inserted_as_the_agent_says[all",
    "tests/placements/test_replay_apart.py::test_windows_count_as_the_steps_that_are_learnt_from",
    "tests/placements/test_threads_that_play.py::test_in_lockstep_it_is_anakin[CentralInference-r2d2",
    "tests/placements/test_threads_that_play.py::test_nobody_waits_for_a_slow_worker_but_an_agent_with_a_replay",
    "tests/placements/test_threads_that_play.py::test_staleness_is_bounded_and_late_rollouts_are_dropped[Distributed",
    "tests/sebulba/test_sebulba.py::test_in_lockstep_it_is_anakin[pqn",
    "tests/sebulba/test_sebulba.py::test_in_lockstep_it_is_anakin[sac",
    "tests/sebulba/test_sebulba_runs.py::test_frames_are_counted_apart_from_steps",
    "tests/test_command.py::test_a_plugin_trains_in_a_process_of_its_own",
    "tests/test_command.py::test_train_evaluate_replay[sebulba",
    "tests/test_command.py::test_what_is_registered_from_outside_is_trained_with",
    "tests/test_evaluate.py::test_a_run_ends_with_greedy_and_with_sampled_play",
    "tests/test_groups.py::test_every_placement_learns_the_same",
    "tests/test_groups.py::test_losses_add_up_and_groups_learn_from_their_own_rewards",
    "tests/test_league.py::test_opponents_are_drawn_by_their_weights[uniform",
    "tests/test_league.py::test_the_pool_holds_the_newest_snapshots",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[r2d2-",
    "tests/test_learn.py::test_gradients_that_are_applied_one_by_one_are_what_learn_does[rainbow-",
    "tests/test_multi.py::test_every_placement_learns_the_same[central inference-mappo",
    "tests/test_multi.py::test_they_learn[dqn-all",
    "tests/test_multi.py::test_they_learn[ippo-all",
    "tests/test_parts_of_observations.py::test_the_policy_sees_its_part_alone_and_the_critic_its_own[reppo",
    "tests/test_replay_frames.py::test_behind_a_gap_steps_are_left_out_whose_frames_were_never_written[1-",
    "tests/test_replay_frames.py::test_minibatches_are_those_of_whole_stacks[prioritized-1-",
    "tests/test_replay_sequences.py::test_a_lane_without_windows_counts_nothing",
    "tests/test_replay_sequences.py::test_random_insertions_cuts_ends_and_samples_against_lists[12-",
    "tests/test_replay_sequences.py::test_random_insertions_cuts_ends_and_samples_against_lists[6-",
    "tests/test_sweep.py::test_every_setting_is_what_it_is_alone",
    "tests/test_tally.py::test_metrics_are_the_agents_own_or_declared[dqn",
    "tests/test_turns.py::test_an_evaluation_counts_for_who_moves_first",
    "tests/test_turns.py::test_every_placement_learns_the_same[central inference-dqn",
    "tests/test_turns.py::test_every_placement_learns_the_same[distributed actors-impala",
    "tests/test_turns.py::test_values_are_those_of_who_moves[impala-2",
    "tests/test_turns.py::test_values_are_those_of_who_moves[pqn-2",
    "tests/test_turns.py::test_values_are_those_of_who_moves[r2d2-2",
    "tests/test_turns.py::test_values_are_those_of_who_moves[rainbow-2",
    "tests/test_varied.py::test_devices_hold_whole_runs",
)
"""Tests that are `slow`, by how their names begin: what they hold need not be waited for at every change.

Each placement keeps two agents in the fast tests, and each agent two placements.
"""

SMOKE = (
    "tests/test_packaging.py",
    "tests/test_layers.py",
    "tests/contract/test_agents.py::test_agents_keep_the_contract[ppo]",
    "tests/contract/test_agents.py::test_agents_keep_the_contract[dqn]",
    "tests/parity/test_parity.py::test_the_number_of_devices_changes_nothing[ppo-8]",
    "tests/parity/test_parity.py::test_the_readable_oracle_agrees[ppo-single]",
    *(
        f"tests/placements/test_metrics_add_up.py::test_every_metric_adds_up_as_the_program_says[{case}]"
        for case in (
            "single-pure",
            "anakin-pure",
            "sebulba-host",
            "central_inference-host",
            "distributed_actors-host",
            "parameter_server-pure",
            "local_sgd-pure",
            "evolution-pure",
        )
    ),
    "tests/test_command.py::test_train_evaluate_replay[anakin]",
)
"""Tests that are `smoke`: whether podium works on another Python."""


def _cache_folder() -> Path:
    """Return a folder of this user (cached programs are code) and these versions, for all workers of a session."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(base if base.exists() else base.parent, os.W_OK):
        base = Path(tempfile.gettempdir()) / f"podium-tests-{os.getuid()}"
    versions = (
        f"jax-{version('jax')}-jaxlib-{version('jaxlib')}-python-{sys.version_info.major}.{sys.version_info.minor}"
    )
    return base / "podium-tests" / f"{versions}-{platform.machine()}"


# Set as environment variables where child processes, which several tests start, shall have the same.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most programs here run once: compiling them is what takes time. .ci/nightly compiles them as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and version("jaxlib").startswith("0.10."):
    # Loops from templates of LLVM's in place of MLIR's passes: two fifths less to compile. Other versions may not know
    # the flag, and XLA ends the process for one that it does not know.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()
if "PYTEST_XDIST_WORKER" not in os.environ:  # One folder for all workers of a session, and nobody's own.
    os.environ["PODIUM_CACHE"] = tempfile.mkdtemp(prefix="podium-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["PODIUM_CACHE"], ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # noqa: E402

from podium.envs.atari import compiler  # noqa: E402

compiler.avoid_avx512()  # JAX starts here, before any test makes an environment that would.
# In this process only: a child says itself how many devices it wants.
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.devices()  # Started here, so that no test starts it with fewer.


def pytest_report_header() -> str:
    """Say what the tests run on."""
    return f"jax {jax.__version__} on {jax.default_backend()}, {jax.device_count()} devices"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in `NIGHTLY`, and in `SMOKE`."""
    for item in items:
        if item.nodeid.startswith(SMOKE):
            item.add_marker(pytest.mark.smoke)
        if item.nodeid.startswith(NIGHTLY):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def rlax() -> Any:
    """Return rlax, an oracle; without it the test is skipped."""
    with warnings.catch_warnings():
        # Its dependency tensorflow_probability asks jax for names that have moved.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip("rlax", reason="rlax is in the dev extra")


@pytest.fixture(autouse=True)
def _wait_for_the_devices() -> Iterator[None]:
    """Let no test leave work behind: virtual devices beyond the cores, each with a queue, can starve a collective."""
    yield
    jax.effects_barrier()
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()
