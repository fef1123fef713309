"""Weights are pulled into a folder, gone on with after a cut, and given out only when they are whole."""

import dataclasses
import hashlib

import numpy as np
import pytest
from serl_client import messages as m
from serl_client import weights as weights_module

from tests.shared.clients import connected
from tests.shared.common import until


def offer(learner, version, content):
    sha256 = hashlib.sha256(content).hexdigest()
    learner.files[sha256] = content
    learner.tell(weights={"version": version, "sha256": sha256, "size": len(content)})
    return sha256


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(weights_module, "PART_BYTES", 1000)
    monkeypatch.setattr(weights_module, "PAUSE", 0.1)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


def random_bytes(seed, size=20_500):
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("restarts", [False, True], ids=["learner", "actor too"])
def test_weights_are_pulled_and_a_pull_that_was_cut_goes_on_where_it_was(learner, connect, folder, restarts):
    learner.parts = 8
    client = connect(weights_folder=folder)
    sha256 = offer(learner, 5, random_bytes(0))
    until(lambda: not learner._thread.is_alive())
    assert client.weights(0) is None
    if restarts:
        client.close()
        client = connect(weights_folder=folder)
    learner.parts = 1 << 30
    before = len(learner.hear(m.WeightsRequest))
    learner.start()
    version, path = until(lambda: client.weights(0))
    assert (version, path.name, path.read_bytes()) == (5, f"{sha256}.safetensors", random_bytes(0))
    assert client.weights(5) is None
    assert min(request.offset for request in learner.hear(m.WeightsRequest)[before:]) >= 4000
    assert {request.offset for request in learner.hear(m.WeightsRequest)} == set(range(0, 20_500, 1000))


def test_a_pull_is_finished_before_the_newest_weights_are_taken_and_two_files_are_kept(learner, connect, folder):
    client = connected(connect(weights_folder=folder))
    learner.parts = 6
    first = offer(learner, 1, random_bytes(1))
    until(lambda: not learner._thread.is_alive())
    learner.files[first], kept = random_bytes(1), learner.files
    newest = [hashlib.sha256(random_bytes(version)).hexdigest() for version in (2, 3)]
    kept |= dict(zip(newest, (random_bytes(2), random_bytes(3)), strict=True))
    learner.notice = dataclasses.replace(
        learner.notice, weights={"version": 3, "sha256": newest[1], "size": len(random_bytes(3))}
    )
    learner.parts = 1 << 30
    learner.start()
    assert until(lambda: client.weights(2))[0] == 3
    asked = [request.sha256 for request in learner.hear(m.WeightsRequest)]
    assert asked == sorted(asked, key=[first, newest[1]].index)
    assert newest[0] not in asked
    assert {path.stem for path in folder.iterdir()} == {first, newest[1]}
    fourth = offer(learner, 4, random_bytes(4))
    until(lambda: client.weights(3))
    assert {path.name for path in folder.iterdir()} == {f"{newest[1]}.safetensors", f"{fourth}.safetensors"}


def test_damaged_weights_are_never_given_out(learner, connect, folder):
    client = connected(connect(weights_folder=folder))
    sha256 = hashlib.sha256(random_bytes(0)).hexdigest()
    learner.files[sha256] = bytes(20_500)
    learner.tell(weights={"version": 1, "sha256": sha256, "size": 20_500})
    until(lambda: len(learner.hear(m.WeightsRequest)) > 30)  # it begins anew
    assert client.weights(0) is None
    learner.files[sha256] = random_bytes(0)
    assert until(lambda: client.weights(0))[1].read_bytes() == random_bytes(0)


@pytest.mark.parametrize("sha256", ["../../evil", "A" * 64, "a" * 63, 7])
def test_weights_are_named_by_their_hash_alone(learner, connect, folder, sha256):
    client = connected(connect(weights_folder=folder))
    learner.tell(weights={"version": 1, "sha256": sha256, "size": 10})
    until(lambda: client._network.server.malformed)
    assert learner.hear(m.WeightsRequest) == []
    assert list(folder.iterdir()) == []
