"""The server gives out parts of published weights with checksums that the trainer made of the bytes that it had."""

import hashlib
from contextlib import suppress

import numpy as np
import pytest
import zmq
from serl_client import connection
from serl_client import messages as m
from serl_client.errors import Refused
from serl_client.weights import PART_BYTES, part_checksum

from serl_launcher.store import weights
from tests.shared.clients import connected, push_episodes
from tests.shared.common import PATIENCE, until


@pytest.fixture
def content():
    return np.random.default_rng(0).bytes(2 * PART_BYTES + 77)


def test_each_part_has_the_checksum_of_what_the_trainer_had(tmp_path, content):
    sha256, size = weights.write(tmp_path, content)
    files = weights.WeightFiles(tmp_path)
    for part, length in enumerate((PART_BYTES, PART_BYTES, 77)):
        there = content[part * PART_BYTES :][:length]
        data, checksum = files.read(sha256, part)
        assert (data.tobytes(), checksum) == (there, part_checksum(there, sha256, size, part))
    for part in (3, -1, 1 << 64):
        with pytest.raises(Refused, match="have no part"):
            files.read(sha256, part)


@pytest.mark.parametrize("suffix", ["safetensors", "checksums"])
def test_what_the_servers_disk_has_damaged_is_given_to_nobody_as_good(server, join, tmp_path, content, suffix, caplog):
    client = connected(join(server, weights_folder=tmp_path / "pulled"))
    sha256, size = weights.write(server.run_dir / "weights", content)
    damaged = server.run_dir / "weights" / f"{sha256}.{suffix}"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    server.ask(m.Publish(sha256, size, 0))
    until(lambda: "part 2 of weights 1 was damaged on its way" in caplog.text)
    assert client.weights(0) is None
    assert hashlib.sha256((tmp_path / "pulled" / f"{sha256}.part").read_bytes()).hexdigest() != sha256


def test_who_takes_nothing_of_what_it_has_asked_for_holds_up_nobody(server, act, join, tmp_path, content, monkeypatch):
    """Its parts are more than all queues on the way hold: 64 of the server, and the kernel's few MB."""
    with monkeypatch.context() as patch:
        patch.setitem(connection.OPTIONS, zmq.RCVHWM, 1)
        slow = act(server, "slow")
    server.publish(content)
    for _ in range(100):
        slow.link.send(m.WeightsRequest(hashlib.sha256(content).hexdigest(), 0))
    other = join(server, "other", weights_folder=tmp_path / "pulled")
    push_episodes(other, [0])
    assert other.drain(PATIENCE)
    assert until(lambda: other.weights(0))[1].read_bytes() == content


@pytest.mark.parametrize("suffix", ["safetensors", "checksums"])
@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"?" * 16)])
def test_what_is_gone_or_damaged_is_written_and_served_anew(tmp_path, suffix, damage):
    content = b"weights of 16 B."
    sha256, size = weights.write(tmp_path, content)
    files = weights.WeightFiles(tmp_path)
    damage(tmp_path / f"{sha256}.{suffix}")
    with suppress(Refused):
        files.read(sha256, 0)  # it may be mapped already
    weights.write(tmp_path, content)
    data, checksum = files.read(sha256, 0)
    assert (data.tobytes(), checksum) == (content, part_checksum(content, sha256, size, 0))


def test_of_more_versions_than_two_the_older_files_go(tmp_path):
    files, names = weights.WeightFiles(tmp_path), [weights.write(tmp_path, bytes([i]) * 9)[0] for i in range(3)]
    files.read(names[0], 0)
    files.clean([{"sha256": names[2]}])
    until(lambda: {file.stem for file in tmp_path.iterdir()} == {names[0], names[2]})  # the first is being pulled
    files._asked.clear()
    files.clean([{"sha256": names[2]}])
    until(lambda: {file.name for file in tmp_path.iterdir()} == {f"{names[2]}.safetensors", f"{names[2]}.checksums"})
    assert not files.mapped
