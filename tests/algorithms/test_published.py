"""The numbers of config/algo/*_published.yaml and of plan=hiors_published, as their sources have them."""

import math

import pytest
from omegaconf import OmegaConf

from serl_launcher.config import groups
from serl_launcher.training.plan_reader import plan_of
from tests.shared.common import CONFIG
from tests.shared.models import config_of

CRITICS = {
    "algo.discount": 0.99, "batch_size": 256, "critic.num_critics": 2, "critic.layer_norm": True, "algo.tau": 0.005,
    "algo.critic_optimizer.learning_rate": 3e-4,
}  # fmt: skip
QC = {  # ColinQiyangLi/qc 48283b4: get_config of agents/acfql.py, flags of main.py
    **CRITICS, "algo.optimizer.learning_rate": 3e-4, "policy.horizon": 5, "policy.head.steps": 10,
    "policy.head.times": "uniform", "policy.network.hidden": [512] * 4, "policy.network.layer_norm": False,
    "critic.hidden": [512] * 4, "critic.lowest": 1.0,  # q_agg=mean
}  # fmt: skip
SAID = {
    "qc": {**QC, "algo.samples": 32, "utd": 2},  # actor_type=best-of-n; one step of both losses
    "fql": {**QC, "algo.distill_weight": 100.0, "algo.normalize_values": False, "utd": 3,
            "algo.one_step_optimizer.learning_rate": 3e-4},
    "expo": {  # Servo97/EXPO b7ed710: scripts/expo_robomimic/expo_square.sh, configs/, expo/agents/sac/expo_learner.py
        **CRITICS, "critic.num_critics": 10, "critic.num_target_critics": 2, "critic.lowest": 0.0,
        "critic.hidden": [256] * 3, "algo.hidden": [256] * 3, "algo.samples": 8, "algo.reach": 0.05,
        "algo.initial_temperature": 1.0, "algo.entropy_per_action": round(0.5 + math.log(0.05), 4),
        "algo.ema_decay": 1 - 0.001, "head.train_steps": 10, "head.steps": 10, "head.fresh_noise": True,
        "algo.edit_optimizer.learning_rate": 3e-4, "algo.optimizer.learning_rate": 3e-4,
        "algo.optimizer.decay": 3_000_000, "algo.optimizer.final": 0.0, "algo.optimizer.weight_decay": 1e-4,
        "algo.edit_optimizer.decay": 3_000_000, "algo.edit_optimizer.final": 0.0,
        "network.width": 256, "network.depth": 3, "policy.horizon": 1,
    },
    "dsrl": {  # ajwagen/dsrl 8d21b9c: cfg/robomimic/dsrl_can.yaml, train_dsrl.py
        **CRITICS, "algo.discount": round(0.99 ** (1 / 4), 4), "critic.hidden": [2048] * 3, "critic.lowest": 0.0,
        "algo.noise_policy.hidden": [2048] * 3,
        "algo.noise_policy.layer_norm": True, "algo.noise_optimizer.learning_rate": 3e-4, "algo.reach": 1.5,
        "algo.initial_temperature": 1.0, "algo.entropy_per_action": 0.0, "head.train_steps": 20, "head.steps": 8,
        "head.fresh_noise": False, "policy.horizon": 4, "algo.noise_rows": None,
    },
    "recap": {  # RLinf/RLinf a3816b5: examples/offline_rl/config, docs recap.rst
        "batch_size": 512, "critic.values.atoms": 201, "algo.steps": 10, "algo.failure": -300.0, "algo.share": 0.3,
        "algo.dropped": 0.1, "algo.task_weight": 1.0, "algo.optimizer.learning_rate": 1e-5,
        "algo.optimizer.betas": [0.9, 0.95], "algo.optimizer.weight_decay": 1e-10, "algo.optimizer.grad_clip_norm": 1.0,
        "algo.optimizer.warmup": 5000, "algo.optimizer.decay": 30000, "algo.optimizer.final": 0.0,
        "policy.horizon": 10, "policy.head.steps": 5, "algo.value_optimizer.learning_rate": 1e-4,
        "algo.value_optimizer.warmup": 500,
    },
    "rejection": {  # hiors-project/hiors 5fa4b23: config/algo/reject_sampling_pi0.yaml, scripts
        "algo.optimizer.learning_rate": 2.5e-5, "algo.optimizer.betas": [0.9, 0.95], "algo.optimizer.warmup": 100,
        "algo.optimizer.weight_decay": 1e-10, "algo.optimizer.grad_clip_norm": 1.0, "algo.optimizer.decay": 500,
        "algo.optimizer.final": 0.1, "algo.ema_decay": 0.0, "algo.augment": None, "algo.idle_filter.threshold": 1e-3,
    },
}  # fmt: skip


def test_each_has_its_source_here():
    assert {f"{name}_published" for name in SAID} == {name for name in groups(CONFIG)["algo"] if "published" in name}


@pytest.mark.parametrize(("name", "numbers"), SAID.items(), ids=list(SAID))
def test_the_numbers_are_those_of_the_source(name, numbers):
    config = config_of(f"algo={name}_published")
    found = {option: OmegaConf.select(config, option) for option in numbers}
    assert {option: list(each) if OmegaConf.is_list(each) else each for option, each in found.items()} == numbers


@pytest.mark.parametrize(
    ("name", "rounds", "others"),  # rounds on a step of the robot; in how many of them the others come, or how often
    [
        ("expo", 20, {"update_clone": 1 / 20, "update_edit": 1 / 20}),
        ("dsrl", 20 / (4 * 4), {"update_noise_critic": 9, "update_noise": 1}),  # 20 on 4 actions of each of 4 robots
    ],
)
def test_updates_come_as_often_as_there(name, rounds, others):
    config = config_of("plan=value_guided", f"algo={name}_published")
    made = plan_of(config, {"update_critic", "update_clone", *others}).phases["practise"].updates
    found = {each: sum(1 / update.every for update in made if update.name == each) for each in others}
    assert found == others
    assert config.utd == rounds * (1 + sum(others.values()))


def test_hiors_practises_on_its_own_successes_alone_and_a_chunk_is_one_row():
    plan = plan_of(config_of("plan=hiors_published"), {"update"})
    practise = plan.phases["practise"]
    assert [update.data for update in practise.updates] == [{"success": 1.0}]
    view = plan.views["success"]
    assert (view.of, view.keep, view.min_length, view.start_steps) == (("online",), ("successful",), 3, "decisions")
    assert practise.publish_every == 50
