"""Each head and each network of config/ goes the way of a run that trains a policy of chunks, but for its processes."""

import copy
from functools import cache

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from serl_launcher.config import composed
from tests.shared.common import CONFIG
from tests.shared.models import config_of

from .test_offered import NO_RUN, OFFERED, PARTS, SEEN, check, small

pytestmark = pytest.mark.usefixtures("one_thread", "same_loggers")


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in NO_RUN[1:] for name in OFFERED[group]])
def test_every_part_of_a_policy_of_chunks_trains_and_acts(group, name):
    config = copy.deepcopy(chunk())
    part = config_of(f"+{group}={name}")[group]
    for option, value in PARTS.items():
        if option.startswith(group) and option.partition(".")[2] in part:
            OmegaConf.update(part, option.partition(".")[2], yaml.safe_load(value))
    config.algo.policy[group] = part
    check(config, SEEN)


@cache
def chunk() -> DictConfig:
    return composed(CONFIG, ["learner=true", *small(["algo=rejection", "policy=chunk"])])
