"""Weights are pulled into a folder, gone on with after a cut, and given out only when they are whole."""

import contextlib
import dataclasses
import hashlib
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq
from serl_client import messages as m
from serl_client import weights as weights_module
from serl_client.errors import MessageError
from serl_client.keys import Key
from serl_client.weights import WeightsFolder, part_checksum

from tests.shared.clients import connected
from tests.shared.common import until
from tests.shared.fake_learner import weights_chunk


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
    assert min(request.part for request in learner.hear(m.WeightsRequest)[before:]) >= 4
    assert {request.part for request in learner.hear(m.WeightsRequest)} == set(range(21))


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
    until(lambda: {path.name for path in folder.iterdir()} == {f"{newest[1]}.safetensors", f"{fourth}.safetensors"})


def test_a_part_that_was_damaged_on_its_way_is_pulled_again_alone_and_nothing_is_given_out_before(
    learner, connect, folder, caplog
):
    learner.flipped = {3, 20}
    client = connected(connect(weights_folder=folder))
    offer(learner, 1, random_bytes(0))
    until(lambda: [request.part for request in learner.hear(m.WeightsRequest)].count(3) > 2)
    assert client.weights(0) is None
    learner.flipped = {20}
    until(lambda: [request.part for request in learner.hear(m.WeightsRequest)].count(20) > 2)
    assert client.weights(0) is None
    learner.flipped = set()
    assert until(lambda: client.weights(0))[1].read_bytes() == random_bytes(0)
    asked = [request.part for request in learner.hear(m.WeightsRequest)]
    assert (asked.count(0), asked.count(15)) == (1, 1)
    assert "part 3 of weights 1 was damaged on its way" in caplog.text


def offer_wrong(learner):
    """Offer weights whose parts fit the checksums that the sender made, and whose whole does not fit its sha256."""
    sha256 = offer(learner, 1, random_bytes(0))
    learner.files[sha256] = bytes(20_500)
    return sha256


def test_who_may_be_somebody_else_is_believed_only_if_the_sha256_of_the_whole_fits(learner, connect, folder):
    """0.0.0.0 is this machine, by an address that is no loopback."""
    sha256 = offer_wrong(learner)
    client = connected(connect(weights_folder=folder, address=learner.address.replace("127.0.0.1", "0.0.0.0")))
    until(lambda: len(learner.hear(m.WeightsRequest)) > 30)  # it begins anew
    assert client.weights(0) is None
    learner.files[sha256] = random_bytes(0)
    assert until(lambda: client.weights(0))[1].read_bytes() == random_bytes(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["loopback", "CURVE"])
def test_of_the_learner_itself_the_sha256_of_the_whole_is_not_computed(learner, connect, folder, tmp_path, host):
    options = {"address": learner.address.replace("127.0.0.1", host)}
    if host == "0.0.0.0":
        learner.stop()
        public, learner.secret = zmq.curve_keypair()
        options["key"] = tmp_path / "robot.key"
        Key("robot", "actor", public.decode(), learner.secret.decode(), public.decode()).write(options["key"])
        learner.start()
    offer_wrong(learner)
    client = connected(connect(weights_folder=folder, **options))
    assert until(lambda: client.weights(0))[1].read_bytes() == bytes(20_500)
    assert len(learner.hear(m.WeightsRequest)) == 21


# -- without a connection
def exchange(weights, content, sha256=None, *, most=100, version=1, order=lambda chunks: chunks, errors=None):
    """Let `weights` pull this content, about so many parts at most; the parts that it asked for."""
    sha256, asked = sha256 or hashlib.sha256(content).hexdigest(), []
    weights.offer({"version": version, "sha256": sha256, "size": len(content)})
    while (weights.newest is None or weights.newest[0] < version) and (len(asked) < most or weights.busy):
        try:
            requests = list(weights.requests())
            asked += [request.part for request in requests]
            for chunk in order([weights_chunk(content, request) for request in requests]):
                weights.add(chunk)
        except OSError as error:
            if errors is None:
                raise
            errors.append(str(error))
            weights.pause()
            weights._resume = 0.0
    return asked


@pytest.fixture
def life(folder):
    """life() -> a WeightsFolder, from the beginning to the end of one process; a context manager."""
    return lambda: contextlib.closing(WeightsFolder(folder, verify=False))


@pytest.fixture
def pull(life):
    """pull(content, ...): the parts that a process asks for until it has all of the content."""

    def pull(content, **options):
        with life() as weights:
            asked = exchange(weights, content, **options)
            assert weights.newest[1].read_bytes() == content
        return asked

    return pull


@pytest.mark.parametrize("pulled", [8, 100], ids=["a part file", "a whole file"])
def test_what_the_disk_has_damaged_between_two_lives_is_found_and_pulled_again(folder, life, pull, pulled):
    content, errors = random_bytes(0), []
    with life() as weights:
        exchange(weights, content, most=pulled)
    (left,) = folder.iterdir()
    data = bytearray(left.read_bytes())
    data[2500] ^= 1
    left.write_bytes(data)
    asked = pull(content, errors=errors)
    assert errors == ["weights 1 are not what their sha256 says; they are pulled again"]
    assert asked.count(0) == 1, "what has come is worth nothing, as nobody knows which part it is"


@pytest.mark.parametrize("left", [2999, 3000, 3001, 20_499, 20_500, 30_000])
def test_a_pull_goes_on_after_the_last_whole_part_that_an_earlier_life_left(folder, pull, left):
    content = random_bytes(0)
    folder.mkdir()
    (folder / f"{hashlib.sha256(content).hexdigest()}.part").write_bytes((content + bytes(10_000))[:left])
    assert pull(content) == list(range(min(left, 20_500) // 1000, 21))


CONTENT = random_bytes(0, 3000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def of_length(length, checksum):
    data = np.zeros(length, np.uint8)
    return m.WeightsChunk(SHA256, 0, checksum and part_checksum(data.data, SHA256, 3000, 0), {"data": data})


WRONG = {
    "another part": lambda: weights_chunk(CONTENT, m.WeightsRequest(SHA256, 1)),
    "another file's": lambda: weights_chunk(CONTENT, m.WeightsRequest("a" * 64, 0)),
    "of another size": lambda: weights_chunk(CONTENT[:2000], m.WeightsRequest(SHA256, 0)),
    **{f"of {length} bytes": partial(of_length, length, "true") for length in (0, 999, 1001)},
    **{f"of {length} bytes, unsigned": partial(of_length, length, "") for length in (0, 999, 1001)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_part_is_no_other_part_and_not_of_another_file_size_or_length(pull, wrong):
    came, errors = [dataclasses.replace(wrong(), sha256=SHA256, part=0)], []
    pull(CONTENT, order=lambda chunks: [came.pop(), *chunks[1:]] if came else chunks, errors=errors)
    assert errors == ["part 0 of weights 1 was damaged on its way; it is pulled again"]


@pytest.mark.parametrize(
    "order",
    [lambda chunks: chunks * 2, lambda chunks: chunks[::-1], lambda chunks: chunks[1:] + chunks[:1]],
    ids=["twice", "backwards", "the first last"],
)
def test_parts_that_come_twice_or_out_of_order_do_no_harm(pull, order):
    pull(random_bytes(0), order=order, most=1000)


def test_two_versions_in_a_row_and_the_first_again(folder, life):
    with life() as weights:
        for version, seed in enumerate((1, 2, 1, 1, 2), 1):
            exchange(weights, random_bytes(seed), version=version)
            assert (weights.newest[0], weights.newest[1].read_bytes()) == (version, random_bytes(seed))
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}


def test_a_file_that_goes_while_the_folder_is_read_does_no_harm(folder, life, monkeypatch):
    hold, listed = threading.Event(), Path.iterdir

    def iterdir(path):
        paths = list(listed(path))
        hold.set()
        weights._beside.submit(bool).result()  # all that was to be deleted is gone now
        return iter(paths)

    with life() as weights:
        for version in (1, 2, 3):
            exchange(weights, random_bytes(version), version=version)
        weights._beside.submit(hold.wait)
        exchange(weights, random_bytes(4), version=4)
        monkeypatch.setattr(Path, "iterdir", iterdir)
        exchange(weights, random_bytes(5), version=5)
    assert {path.suffix for path in listed(folder)} == {".safetensors"}


@pytest.mark.parametrize("size", [0, -1, -(1 << 40), "1", 1.5, None])
def test_weights_have_a_size(life, size):
    with life() as weights:
        with pytest.raises(MessageError, match="cannot be named"):
            weights.offer({"version": 1, "sha256": "a" * 64, "size": size})
        assert not list(weights.requests())


@pytest.mark.parametrize("sha256", ["../../evil", "A" * 64, "a" * 63, 7])
def test_weights_are_named_by_their_hash_alone(learner, connect, folder, sha256, caplog):
    connected(connect(weights_folder=folder))
    learner.tell(weights={"version": 1, "sha256": sha256, "size": 10})
    until(lambda: "is not understood" in caplog.text)
    assert learner.hear(m.WeightsRequest) == []
    assert list(folder.iterdir()) == []
