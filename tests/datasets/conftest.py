"""Specs with and without a camera; datasets of LeRobot; LeRobot without a network."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from serl_client import Feature, Spec

from serl_launcher.datasets import lerobot_api, shards
from serl_launcher.datasets.reader import Dataset
from tests.shared.common import STATE

from .exporting import CAMERA, PROPOSED
from .lerobots import KINDS, MAKE


@pytest.fixture
def blind():
    """A Spec with an extra column."""
    return Spec({STATE: Feature((4,))}, Feature((2,), low=-1, high=1), fps=10.0, extras=PROPOSED)


@pytest.fixture
def seen(blind):
    """The same with a camera."""
    return replace(blind, observation={**blind.observation, CAMERA: Feature((64, 64, 3), "uint8")})


@pytest.fixture
def quiet(tmp_path, monkeypatch):
    """LeRobot asks nobody, and keeps its copies out of the user's home."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not shards.missing():
        import datasets

        lerobot_api.dataset_class()
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def serving(serve):
    """serving(capacity) -> the server of a run folder, in a thread."""

    def serving(capacity=1000):
        server = serve(capacities={"demo": capacity})
        server.capacity = capacity
        return server

    return serving


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """{name: Dataset}, by LeRobot's own writer, in a process of its own: it takes long to import, and warns."""
    folder = tmp_path_factory.mktemp("datasets")
    command = [sys.executable, "-W", "ignore", "-c", MAKE, folder, json.dumps(KINDS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Dataset(folder / name) for name in KINDS}


@pytest.fixture(scope="session")
def low(made):
    return made["low"]


@pytest.fixture(scope="session")
def flagged(made):
    return made["flagged"]
