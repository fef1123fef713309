"""The examples of the classes that a developer derives others from. Those of other classes run beside their tests."""

from types import SimpleNamespace

import numpy as np
import pytest
from hydra.utils import instantiate

from robot_infra.drivers.arm import Arm
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.types import Window
from tests.shared.examples import run_example
from tests.shared.models import batch, config_of, robot


def test_the_driver_moves_what_its_maker_gives():
    at = [0.0, 0.0]
    port = SimpleNamespace(positions=at.copy, go_to=lambda positions: at.__setitem__(slice(None), positions))
    arm = run_example(Arm, {"Arm": Arm, "np": np, "Port": lambda address: port})["Slide"]("usb0")
    arm.write(np.array([0.25, 1.0]))
    assert arm.read().tolist() == [0.25, 1.0] == at
    assert len(arm.entries) == len(at)


@pytest.mark.usefixtures("one_thread")
def test_the_algorithm_learns():
    spec, config = robot(cameras=()), config_of("algo=rejection", "policy=flow").algo
    made = run_example(Algorithm, {"Algorithm": Algorithm, "Window": Window})["Cloning"]
    algorithm = made(spec, policy=instantiate(config.policy), optimizer=instantiate(config.optimizer))
    rows = batch(spec, window=algorithm.windows["update"])
    losses = [algorithm.update(rows)["loss"].item() for _ in range(30)]
    assert losses[-1] < losses[0]
    assert not algorithm.unkept
