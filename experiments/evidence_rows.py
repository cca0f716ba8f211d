"""The rows of evidence: which agent, where, by which preset, and what others reached. `evidence.py` trains them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from podium import presets
from podium.files import to_jsonable


@dataclasses.dataclass(frozen=True)
class Published:
    """What others reached.

    Attributes:
      value: mean return.
      source: whose it is, and after how many steps.
    """

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One agent in one environment.

    Attributes:
      agent: name in `podium.agents`.
      env: name of the environment.
      preset: name of the agent's preset; "none" for an agent without one.
      placement: name in `podium.placement`.
      flags: further ones, beside the preset's.
      published: the figure to stand beside.
      together: whether one program trains all seeds; else each seed has a run of its own.
      seeds: how many.
      remark: what a reader should know.
      variant: what is special about it, where another row has the same agent and environment.
    """

    agent: str
    env: str
    preset: str
    placement: str = "anakin"
    flags: tuple[str, ...] = ()
    published: Published | None = None
    together: bool = True
    seeds: int = 5
    remark: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        """How the row is called: who learns, and what."""
        name = f"{'evolution' if self.placement == 'evolution' else self.agent}/{self.env}"
        return f"{name}-{self.variant}" if self.variant else name

    @property
    def file(self) -> str:
        """The name of its files, without an ending."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.name)

    def command(self) -> list[str]:
        """Return the arguments of `podium`, but for seeds and the run folder."""
        what = ["train", "--agent", self.agent, "--env", self.env, "--placement", self.placement]
        return [*what, "--preset", self.preset, *self.flags]

    def settings(self) -> dict[str, Any]:
        """Return what a result depends on, beside the code: a result of other settings is none of this row."""
        preset = presets.of_agent(self.agent).get(self.preset)
        return {"command": self.command(), "preset": to_jsonable(dict(preset.values) if preset else {})}


def _zoo(value: float, steps: str) -> Published:
    return Published(value, f"RL Baselines3 Zoo's benchmark.md (22e3ff2), one run of {steps} steps")


def _gymnax(value: float) -> Published:
    return Published(value, "gymnax's README (086ad95), PPO of gymnax-blines")


def _optimum(value: float) -> Published:
    return Published(value, "the optimum")


_PQN_MINATAR = "The settings are the PQN authors'; their figures are drawings only, so one of PPO's stands beside it."

_BESIDE_RAINBOW = (
    "To stand beside rainbow's: the same network, replay, batches, steps and first rate. Young and Tian (2019) show "
    "curves of 5M steps, and no figures."
)

_DQN_MINATAR = "By the settings of Breakout's row; 2M steps for the 5M of Young and Tian (2019), who give no figures."

PUREJAXRL_BREAKOUT = Published(60.7, "PureJaxRL's ppo.py (31756b1), three seeds here, 10M steps: 88, 58, 36")

PLAYGROUND_SAC = Published(857, "MuJoCo Playground's Brax SAC, 5M steps")
PLAYGROUND = Published(
    861, "REPPO's own curves (cvoelcker/reppo, a7ab85b), 50M steps, layers of 512; Playground's Brax PPO: 693, SAC: 857"
)

_SCHULMAN = "Schulman et al. 2017, table 6: the last 100 training episodes, 10M steps, three seeds"


def _blind(value: float) -> Published:
    return Published(value, "the optimum without memory")


JAXMARL_IPPO = Published(
    -22.0, "JaxMARL's ippo_ff_mpe.py (c793d09) and its settings, TOTAL_TIMESTEPS=3e6, three seeds here, sampled"
)

JAXMARL_MAPPO = Published(
    -12.9, "JaxMARL's mappo_rnn_mpe.py (c793d09) and its settings, TOTAL_TIMESTEPS=3e6, one seed here, sampled"
)

_SPREAD = "Mean return an agent over MPE's 26 steps, a third of what JaxMARL logs; random play: -28.0."

_SEARCHES = "Evaluations search as acting does, without noise."

_FLICKER = "Half of the frames are blank (Hausknecht and Stone 2015). No published figure is of MinAtar."

_ABLATED = (
    "Of this row and the three below, the two with burn-in are 0.9 above the two without (standard error 1.0; as they "
    "act in training 0.5 of 0.5), and the two with the stored state 0.1 above the others (1.0; 0.4 of 0.5). Trained at "
    "an earlier commit they were 1.6 (0.7) and -0.2 (0.8) above. Burn-in may help here; the stored state does not show."
)


def _flicker(agent: str, *flags: str, variant: str = "flicker", seeds: int = 5) -> Row:
    row = Row(agent, "Breakout-MinAtar", "breakout-minatar-flicker", flags=flags, remark=_FLICKER, variant=variant)
    return dataclasses.replace(row, seeds=seeds)


def _ablation() -> tuple[Row, ...]:
    """Return r2d2 with blank frames, with and without burn-in and stored state, of one length of learning."""
    plain, zero = ("--burn-in", "0", "--sequence-length", "16"), ("--no-stored-state",)
    flags = {"flicker-no-burn-in": plain, "flicker-zero-state": zero, "flicker-zero-state-no-burn-in": plain + zero}
    return tuple(_flicker("r2d2", *given, variant=name, seeds=3) for name, given in flags.items())


def _evolution(env: str, flags: str, published: Published, remark: str = "") -> Row:
    flags = f"{flags} --hidden-sizes 32 32"
    return Row("ppo", env, "none", "evolution", tuple(flags.split()), published, together=False, remark=remark)


ROWS: tuple[Row, ...] = (
    Row("ppo", "CartPole-v1", "cartpole", published=_zoo(500, "100k")),
    Row("ppo", "Acrobot-v1", "acrobot", published=_zoo(-73.5, "1M")),
    Row("ppo", "MountainCar-v0", "mountain-car", published=_zoo(-110.4, "1M")),
    Row("ppo", "Pendulum-v1", "pendulum", published=_zoo(-172.2, "100k"), remark="Ten times the zoo's steps."),
    Row("ppo", "Breakout-MinAtar", "breakout-minatar", published=PUREJAXRL_BREAKOUT),
    Row("ppo", "Asterix-MinAtar", "asterix-minatar", published=_gymnax(15)),
    Row("ppo", "Freeway-MinAtar", "freeway-minatar", published=_gymnax(58)),
    Row("ppo", "SpaceInvaders-MinAtar", "space-invaders-minatar", published=_gymnax(131)),
    Row("ppo", "Seaquest-MinAtar", "seaquest-minatar"),
    Row("ppo", "Pong-v5", "pong", "sebulba", published=Published(20.7, _SCHULMAN), together=False, seeds=3),
    Row(
        *("ppo", "Boxing-v5", "pong", "sebulba"),
        published=Published(94.6, _SCHULMAN),
        together=False,
        seeds=1,
        remark="One run, a fifth of the published steps, a small network, by the preset that was made for Pong.",
    ),
    Row(
        *("ppo", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=Published(693, "MuJoCo Playground's Brax PPO, 60M steps"),
        remark="A twentieth of the published steps, layers of 64.",
    ),
    Row(
        *("ppo", "craftax/Classic-Symbolic", "craftax-classic"),
        together=False,
        published=Published(
            10.3, "PPO with a ResNet of pixels, 1M steps of Crafter (Moon et al. 2023, arXiv 2307.03486)"
        ),
        remark="Layers of 256 that see 1,345 numbers. Crafter's own table has 4.2 of Stable-Baselines3's PPO and 11.7 "
        "of DreamerV3 (danijar/crafter), both of pixels after 1M steps; figures of PPO are of play as in training, "
        "which here stands under 'sampled'.",
    ),
    Row("ppo", "podium/Catch", "catch", published=_optimum(1)),
    Row("ppo", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("ppo", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row("a2c", "CartPole-v1", "cartpole", published=_zoo(500, "500k")),
    Row("a2c", "podium/Catch", "catch", published=_optimum(1)),
    Row("a2c", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("a2c", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row("impala", "CartPole-v1", "cartpole", published=_optimum(500)),
    Row("impala", "podium/Catch", "catch", published=_optimum(1)),
    Row("impala", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("impala", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row(
        *("pqn", "CartPole-v1", "cartpole"),
        published=_optimum(500),
        seeds=8,
        remark="The PQN authors' settings, annealed over 150,000 steps in place of 500,000, a gamma of 0.995 for 0.99, "
        "an epsilon down to 0.4 for 0.2, and 1e-4 for RAdam's 1e-8. The 1e-4 was chosen by seeds 100 to 163, none of "
        "which ended below 475 (with 1e-8 two, at 469.8 and 474.2); of fresh ones, 200 to 263, one did, at 474.1.",
    ),
    Row(
        *("pqn", "Breakout-MinAtar", "breakout-minatar"),
        published=PUREJAXRL_BREAKOUT,
        remark=f"{_PQN_MINATAR} Seed 2 stands at 24 to 27 from 2M steps on: of the game's two starts, it loses "
        "the ball after 24 points in the one and after 29 in the other. At an earlier commit, which rounds otherwise, "
        "the five came to 88, 98, 70, 86, 96.",
    ),
    Row("pqn", "Asterix-MinAtar", "asterix-minatar", published=_gymnax(15), remark=_PQN_MINATAR),
    Row("pqn", "Freeway-MinAtar", "freeway-minatar", published=_gymnax(58), remark=_PQN_MINATAR),
    Row("pqn", "SpaceInvaders-MinAtar", "space-invaders-minatar", published=_gymnax(131), remark=_PQN_MINATAR),
    Row("pqn", "Seaquest-MinAtar", "seaquest-minatar", remark="The settings are the PQN authors'."),
    Row("pqn", "podium/Catch", "catch", published=_optimum(1)),
    Row("pqn", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("pqn", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row(
        *("dqn", "CartPole-v1", "cartpole"),
        published=_zoo(500, "50k"),
        remark="Below that one run, at ten times the steps. By the zoo's settings and 50k steps Stable-Baselines3 "
        "itself (2.9.2) comes to 374 of eight seeds here (19 to 500, standard error 67), podium to 253 of sixteen (19 "
        "to 500, 51), and with first weights drawn as PyTorch does to 363 (25 to 500, 42): experiments/zoo_dqn.py "
        "--weights pytorch.",
    ),
    Row("dqn", "podium/Catch", "catch", published=_optimum(1)),
    Row("dqn", "Breakout-MinAtar", "breakout-minatar", remark=_BESIDE_RAINBOW),
    Row("dqn", "Asterix-MinAtar", "asterix-minatar", remark=_BESIDE_RAINBOW),
    Row(
        *("dqn", "Freeway-MinAtar", "freeway-minatar"),
        together=False,
        remark=f"{_DQN_MINATAR} Its time includes 70 minutes for which it stood still.",
    ),
    Row("dqn", "SpaceInvaders-MinAtar", "space-invaders-minatar", together=False, remark=_DQN_MINATAR),
    Row(
        *("dqn", "Seaquest-MinAtar", "seaquest-minatar"),
        together=False,
        remark=f"{_DQN_MINATAR} Its time includes pauses for measurements.",
    ),
    Row("rainbow", "CartPole-v1", "cartpole", published=_optimum(500), seeds=8),
    Row(
        *("rainbow", "Breakout-MinAtar", "breakout-minatar"),
        remark="Greedy play of a game without chance is two games a seed, and swings by tens from one evaluation to "
        "the next: by its row's settings (one step, an epsilon down to 0.05, a constant rate) dqn came to 32.5, 53.2 "
        "and 53.8 in three trials of five seeds, and 15.2 to 16.2 as it acts. By this row's (three, 0.01, a rate that "
        "falls; podium train --agent dqn --env Breakout-MinAtar --preset breakout-minatar --n-step 3 --epsilon-end "
        "0.01 --anneal-steps 2000000 --seeds 5) it comes to 32.6, and 28.2 as it acts.",
    ),
    Row(
        *("rainbow", "Asterix-MinAtar", "asterix-minatar"),
        remark="By a rate that falls: 55.8 without. Where dqn has one too (--anneal-steps; its row's is constant), "
        "rainbow is ahead after 1M steps over which it falls, 53.4 and 41.8 of two seeds, and level after 2M: dqn 63.4 "
        "of five, and ahead as it acts in training, 48.9. Games are cut at 1,000 steps; most of both last as long.",
    ),
    Row("ippo", "jaxmarl/MPE_simple_spread_v3", "spread", published=JAXMARL_IPPO, remark=_SPREAD),
    Row("mappo", "jaxmarl/MPE_simple_spread_v3", "spread", published=JAXMARL_MAPPO, remark=_SPREAD),
    Row("muzero", "CartPole-v1", "cartpole", published=_optimum(500), seeds=4, remark=_SEARCHES),
    Row("muzero", "Breakout-MinAtar", "breakout-minatar", seeds=2, remark=_SEARCHES),
    Row("apex", "CartPole-v1", "cartpole", published=_optimum(500)),
    Row("apex", "podium/Catch", "catch", published=_optimum(1)),
    Row("dqn", "podium/RepeatFirst", "repeat-first", published=_blind(1 / 3)),
    Row("dqn", "MemoryChain-bsuite", "memory-chain", published=_blind(0)),
    Row("r2d2", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("r2d2", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    _flicker("dqn"),
    dataclasses.replace(_flicker("r2d2"), remark=f"{_FLICKER} {_ABLATED}"),
    *_ablation(),
    Row(
        *("sac", "Pendulum-v1", "pendulum"),
        published=_zoo(-157.0, "20k"),
        seeds=8,
        remark="Half the zoo's steps, layers of 64 for its 256.",
    ),
    Row(
        *("sac", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=PLAYGROUND_SAC,
        remark="A twenty-fifth of the published steps, layers of 64.",
    ),
    Row(
        *("sac", "mjx/CheetahRun", "mjx-cheetah-run"),
        published=Published(912, "MuJoCo Playground's Brax SAC, 5M steps"),
        seeds=1,
        remark="One long run: a tenth of the published steps, layers of 128; two other programs had the cores too. At "
        "an earlier commit, with a core of its own: 836.4 after 1,322 s.",
    ),
    Row(
        *("td3", "Pendulum-v1", "pendulum"),
        published=_zoo(-151.9, "20k"),
        remark="Half the zoo's steps, layers of 64 for its 400 and 300.",
    ),
    Row(
        *("td3", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=PLAYGROUND_SAC,
        remark="A twenty-fifth of the published steps, layers of 64; the figure is SAC's.",
    ),
    Row(
        *("reppo", "Pendulum-v1", "pendulum"),
        published=_zoo(-172.2, "100k, of PPO"),
    ),
    Row(
        *("reppo", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=PLAYGROUND,
        remark="A fiftieth of the published steps, layers of 64. At an earlier commit, which rounds otherwise, the "
        "five came to 836, 881, 842, 877, 801, and seeds 100 to 109 to 844, 865, 874, 880, 879, 874, 873, 878, 621, "
        "879.",
    ),
    Row(
        *("reppo", "mjx/CheetahRun", "mjx-cheetah-run"),
        published=Published(
            931, "REPPO's own curves (cvoelcker/reppo, a7ab85b), 50M steps; Playground's Brax PPO: 825"
        ),
        seeds=1,
        remark="One long run: a twenty-fifth of the published steps, layers of 128. At an earlier commit: 728.1.",
    ),
    _evolution("CartPole-v1", "--num-envs 256 --rollout-length 500 --num-steps 6400000", _optimum(500)),
    _evolution(
        "Pendulum-v1",
        "--num-envs 1024 --episodes 4 --rollout-length 200 --num-steps 61440000",
        _zoo(-172.2, "100k, of PPO"),
        remark="The policy of ppo, evolved; a figure of PPO's stands beside it. Steps are cheap here: 6 s a seed.",
    ),
)
