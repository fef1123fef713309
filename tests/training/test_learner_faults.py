"""The trainer while others fail: the server, the disk, and numbers that are not finite."""

import errno
import math
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from serl_client import Feature, Spec
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import RetakeError

from serl_launcher.replay.statistics import statistics
from serl_launcher.service.link import capacities
from serl_launcher.training import monitor, writers
from serl_launcher.training.staging import Staging
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import make_episode
from tests.shared.models import differences

from .life import LEARNING, Life, finite, found, leave, phase, plan_of, poisoned, push

# -- the server


@pytest.mark.slow
def test_a_trainer_that_starts_while_the_server_is_dead_waits_for_it(server):
    heard = []
    server.report()  # it is up
    with Connection(server.local, m.Hello(m.PROTOCOL, "learner", "trainer")) as link:
        link.hello(PATIENCE)
        server.kill()
        thread = threading.Thread(target=lambda: heard.append(capacities(link)), daemon=True)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        server.start()
        thread.join(PATIENCE)
    assert heard == [{"demo": 500, "eval": 20_000, "online": 2000}]


def assert_newest(server, life):
    """What the trainer published last is what the server has."""
    told = server.report()["weights"]
    assert {name: told[name] for name in ("version", "sha256")} == life.learner.publisher.version


@pytest.mark.slow
def test_a_trainer_hears_and_is_heard_again_after_each_death_of_the_server(server, live, connect):
    """It dies while it is asked, and while it is told: the trainer publishes after every update."""
    plan = plan_of(
        practise=phase(publish={"every_updates": 1}, until="env_steps >= 192"),
        rest=phase(updates=(), until="operator"),
    )
    life = live(server, plan, checkpoint_s=60.0).begin()
    client = connect(server)
    for number in range(4):
        made = len(life.made)
        until(lambda: len(life.made) > made + 3)  # noqa: B023
        server.kill()
        server.start()
        push(client, range(3 * number, 3 * number + 3))
    until(lambda: client.state.directive["phase"] == "rest")
    client.command("next")
    until(lambda: client.state.directive["mode"] == "stop")
    leave(client, life)
    assert server.report()["directive"]["number"] == life.learner.director.number
    assert_newest(server, life)


@pytest.mark.slow
def test_a_trainer_takes_no_answer_for_that_to_another_request_when_the_store_fails(server, live, connect, caplog):
    plan = plan_of(
        practise=phase(publish={"every_updates": 1}, until="env_steps >= 150"),
        rest=phase(updates=(), until="env_steps >= 40"),
        last=phase(updates=(), until="operator"),
    )
    life = live(server, plan, checkpoint_s=60.0).begin()
    client = connect(server)
    until(lambda: len(life.made) > 3)
    with server.full_disk():
        for record in make_episode("failing", directive=client.state.directive["number"]):
            client.push(record)
        until(lambda: client.state.degraded)
        before = caplog.text.count("server: ")
        until(lambda: caplog.text.count("server: ") > before + 1)  # it is opened again each second, and fails again
    assert client.drain(PATIENCE)
    push(client, range(8))
    until(lambda: client.state.directive["phase"] == "rest")
    push(client, range(8, 14))
    until(lambda: life.phase == "last" and client.state.directive["phase"] == "last")
    until(lambda: life.learner.director.number == client.state.directive["number"])
    assert_newest(server, life)
    client.command("next")
    leave(client, life)


# -- a checkpoint that is cut off


@pytest.mark.slow
def test_a_checkpoint_that_is_cut_off_at_any_step_leaves_the_last_good_one(tmp_path, spec, killer_at):
    run_dir, plan = found(tmp_path / "run", spec), plan_of(**LEARNING)
    life, at, kept, status = Life(run_dir, None, spec, plan), 0, set(), None
    for updates in range(1, 6):
        life.learner.state.updates = updates
        life.learner.checkpoint()
    while status != 0:
        at += 1
        life.learner.state.updates = 5 + at
        child = os.fork()
        if child == 0:
            try:
                killer = killer_at(at)
                for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
                    setattr(os, name, killer.wrap(getattr(os, name)))
                life.learner.checkpoint()
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        saved = life.learner.keeper.checkpoints.load()
        kept.add(5 + at - saved["plan"]["updates"])
        assert not differences(saved["algorithm"], life.algorithm.state_dict())
        assert saved["sources"]["generator"] == life.learner.sources.generator.bit_generator.state
        life.learner.checkpoint()  # the next start's
        assert life.learner.keeper.checkpoints.load()["plan"]["updates"] == 5 + at
    assert at > 10
    assert kept == {0, 1}, "either the one that was cut off is whole, or the one before it is there"
    names = sorted(path.name for path in life.learner.keeper.checkpoints.folder.iterdir())
    assert len([name for name in names if name.isdecimal()]) == 3


@pytest.mark.slow
def test_a_full_disk_makes_training_wait_and_ends_nothing(live, monkeypatch, server):
    sync, refused, room = os.fsync, [], threading.Event()

    def full(descriptor):
        if not room.is_set():
            refused.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(writers, "FULL_S", 0.01)
    monkeypatch.setattr(os, "fsync", full)
    life = live(server, plan_of(practise=phase(until="updates >= 3"))).begin()
    until(lambda: len(refused) > 3)
    assert life.updates == 0  # nothing was published yet
    room.set()
    assert life.end().updates == 3
    assert life.learner.keeper.checkpoints.load()["plan"]["updates"] == 3


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_published_weights_whose_file_is_gone_or_damaged_are_written_anew(tmp_path, damage):
    staging = Staging()
    staging.copy({"w": torch.ones(3)})
    ranks, done = SimpleNamespace(published=lambda: staging), SimpleNamespace(value=1)
    publisher = writers.Publisher(tmp_path, ranks, lambda _: done, writers.Patience(tmp_path))
    publisher.publish(1)
    (file,) = tmp_path.glob("*.safetensors")
    damage(file)
    publisher.publish(2)
    assert safetensors.torch.load_file(file)["w"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_training_goes_on_while_weights_and_a_checkpoint_are_written(live, monkeypatch, server, connect):
    """Weights that come meanwhile are published together, as the newest, before the phase ends."""
    sync, room, held = os.fsync, threading.Event(), set()

    def slow(descriptor):
        if threading.current_thread() is not threading.main_thread() and life.updates > 3:
            held.add(threading.current_thread().name.partition("_")[0])
            assert room.wait(PATIENCE)
        sync(descriptor)

    life = live(server, plan_of(practise=phase(publish={"every_updates": 1}, until="operator")), checkpoint_s=0.01)
    monkeypatch.setattr(os, "fsync", slow)
    life.begin()
    client = connect(server)
    until(lambda: held == {"weights", "checkpoint"})
    reached = life.updates
    until(lambda: life.updates > reached + 50)
    room.set()
    client.command("next")
    leave(client, life)
    assert life.learner.publisher.version["version"] < life.updates - 40
    assert_newest(server, life)
    assert life.learner.ranks.still_published()
    assert life.learner.keeper.checkpoints.load()["plan"]["updates"] == life.updates


@pytest.mark.slow
def test_batches_that_are_not_finite_cost_their_updates_and_nothing_else(server, live, caplog, monkeypatch):
    monkeypatch.setattr(monitor, "METRICS_S", math.inf)  # it is looked at where a phase ends: nobody asks why

    def spoil(batch, updates):
        if updates in (7, 8, 9, 15):
            batch.observation[STATE][3, 0, 1] = float("nan")
        if updates == 16:
            batch.reward[0, 0] = float("inf")

    life = poisoned(live(server, plan_of(**LEARNING)), "update_critic", spoil)
    poisoned(life, "update", spoil).run()
    assert life.updates == 30
    assert life.learner.ranks.steps()["critic_optimizer"] == (30, 5)
    saved = life.learner.keeper.checkpoints.load()
    assert finite(saved["algorithm"])
    assert saved["plan"]["updates"] == 30
    assert finite(life.learner.ranks.published().tensors())
    assert "had no finite gradient: skipped" in caplog.text


@pytest.mark.slow
def test_critics_that_cannot_represent_the_returns_are_told_once(server, live, caplog, monkeypatch):
    monkeypatch.setattr(monitor, "METRICS_S", 0.0)
    live(server, plan_of(**LEARNING), words=("critic=c51",)).run()  # rewards of 0 to 3, and a range of 0 to 1
    (said,) = [line for line in caplog.messages if "lie outside" in line]
    assert "critic.values.low to critic.values.high and are clipped: begin another run with a range" in said


@pytest.mark.slow
def test_a_run_whose_gradients_are_never_finite_ends_with_one_sentence_and_its_good_weights(server, live, monkeypatch):
    monkeypatch.setattr(monitor, "METRICS_S", 0.0)
    monkeypatch.setattr("serl_launcher.training.finite.MOST_IN_A_ROW", 5)

    def spoil(batch, updates):
        if updates >= 12:
            batch.reward[0, 0] = float("nan")

    life = poisoned(live(server, plan_of(**LEARNING)), "update_critic", spoil)
    with pytest.raises(RetakeError, match=r"critic_optimizer: the gradients of the last [5-9] steps up to update \d+"):
        poisoned(life, "update", spoil).run()
    assert not server.report()["set_aside"], "an update without that row fails, too"
    assert finite(life.learner.keeper.checkpoints.load()["algorithm"])
    assert finite(life.algorithm.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "checkpoint_s", "said", "kept"),
    [
        ("policy", 60.0, "before publishing the weights of update", 6),  # no checkpoint is due before that
        ("target_critic", 0.0, r"target_critic\..* before keeping a checkpoint of update 1\d", 13),
    ],
    ids=["published", "kept"],
)
def test_weights_that_are_not_finite_are_neither_published_nor_kept(server, live, where, checkpoint_s, said, kept):
    """What is published is checked, and what only a checkpoint holds. The same command again goes on."""

    def spoil(batch, updates):
        if updates == 13:
            next(getattr(life.algorithm, where).parameters()).data[0] = float("nan")

    life = poisoned(live(server, plan_of(**LEARNING), checkpoint_s=checkpoint_s), "update_critic", spoil)
    with pytest.raises(RetakeError, match=said):
        poisoned(life, "update", spoil).run()
    saved = life.learner.keeper.checkpoints.load()
    assert finite(saved["algorithm"])
    assert saved["plan"]["updates"] == kept
    newest = server.run_dir / "weights" / f"{life.learner.publisher.version['sha256']}.safetensors"
    assert finite(safetensors.torch.load_file(newest))
    assert live(server, plan_of(**LEARNING), seed=1).run().updates == 30


def test_the_statistics_leave_out_what_is_not_finite_or_beyond_its_limit():
    class Buffer:
        def observed(self, name, among):
            return np.array([[1.0, 2.0], [3.0, 4.0], [np.nan, 6.0], [5.0, np.inf], [2e6, 4.0]], np.float32)

    class Stored:
        spec = Spec({STATE: Feature((2,))}, Feature((2,), low=-9, high=9), fps=10.0)
        views, buffers = {"demo": SimpleNamespace(of=["demo"])}, {"demo": Buffer()}

        def in_view(self, name, part):
            return None

    found = statistics(Stored(), "demo")
    for name in (STATE, "action"):
        values = {kind: found[kind][name].tolist() for kind in found}
        assert values == {
            "mean": [2.0, 3.0], "std": [1.0, 1.0], "low": [1.0, 2.0], "high": [3.0, 4.0],
            "q01": pytest.approx([1.02, 2.02]), "q99": pytest.approx([2.98, 3.98]),
        }  # fmt: skip
