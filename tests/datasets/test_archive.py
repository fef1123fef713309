"""An archived source lets nothing go before it is exported; an export that is killed leaves whole shards."""

import os
import shutil
import subprocess
import sys
from contextlib import closing, contextmanager

import numpy as np
import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.client import TrainerClient

from serl_launcher.datasets import backlog, shards
from serl_launcher.service.peers import ROLES
from serl_launcher.store.errors import Full
from serl_launcher.store.store import Store
from serl_launcher.supervisor import END
from tests.shared.clients import connected, push_all
from tests.shared.common import until
from tests.shared.servers import ServerThread

from .exporting import Run, opened, segment, writes_shards

pytestmark = pytest.mark.usefixtures("quiet")


def die_at(killer):
    """Let it count the calls of what makes a shard durable, and of LeRobot's own steps."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    for owner, name in ((os, "rename"), (os, "fsync"), (shutil, "rmtree"), (shards, "_exchange"),
                        (LeRobotDataset, "save_episode"), (LeRobotDataset, "finalize")):  # fmt: skip
        setattr(owner, name, killer.wrap(getattr(owner, name)))


@writes_shards
@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_kill_at_every_step_leaves_only_whole_shards_and_a_repeat_doubles_nothing(
    tmp_path, blind, monkeypatch, exchange, killer_at
):
    """Some lives write new shards, the later ones replace them, with and without a file system that exchanges."""
    if not exchange:
        monkeypatch.setattr(shards, "_exchange", lambda part, target: False)
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1", "e2", "e3")
    lives, at, relabelled = 0, 1, False
    while True:
        child = os.fork()
        if child == 0:
            die_at(killer_at(at))
            run.exporter = run.started()
            run.work()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        lives, at = lives + 1, at % 45 + (5 if exchange else 9)
        for shard in [n for n in run.shards() if not n.endswith(shards.PART)] if lives > 1 else []:
            dataset, table = run.opened(shard)
            assert (dataset.num_episodes, len(table["action"])) == (2, 12)
            assert shards.read_manifest(dataset.root)["run"] == run.store.run
        if os.waitstatus_to_exitcode(status) == 0:
            if relabelled:
                break
            relabelled = True
            run.add(Outcome("e0", True, judged_by="operator"), Outcome("e2", True, judged_by="operator"))
            at = 1
    assert lives > 6
    assert run.shards() == ["000001-000002", "000003-000004"]
    outcomes = [run.opened(shard)[1]["outcome"].reshape(2, 6)[:, 0].tolist() for shard in run.shards()]
    assert outcomes == [[1, -1], [1, -1]]


@pytest.mark.slow
def test_an_archived_source_lets_nothing_go_before_it_is_exported(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"])
    run.episodes(*(f"e{i}" for i in range(10)), steps=10)
    with pytest.raises(Full, match=r"source online is full, and its episode e0 waits for its export"):
        run.episodes("e10", steps=10)
    assert (run.seq, run.store.sources["online"].tail) == (10, 0)
    run.episodes("d0", phase="demonstrate", directive=2)  # another source takes what comes
    run.store.add_archived([1, 2])
    run.store.close()
    run.store = Store(tmp_path / "store", ["online"])  # it is durable
    run.episodes("e10", "e11", steps=10)
    with pytest.raises(Full, match="e2 waits"):
        run.episodes("e12", steps=10)
    run.store.add_archived([*range(3, 11), 12, 13])
    for i in range(12, 30):
        run.episodes(f"e{i}", steps=10)
        run.store.add_archived([run.store.index.episode(f"e{i}").number])
    assert run.store.sources["online"].tail > 100
    (may_leave,) = run.store.index._db.execute("SELECT min(number) FROM archived").fetchone()
    assert run.store.index.episode("e15").number < may_leave, "of what has left, nobody asks whether it may"


@pytest.mark.slow
def test_an_open_episode_that_a_full_source_waits_for_is_cut_and_nothing_of_it_leaves_unexported(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"])
    run.store.lives.hello("other", "outbox2", "B", [])
    run.store.stage("B", 0, segment(blind, "long", steps=10, ends=""))
    run.episodes(*(f"e{i}" for i in range(9)), steps=10)
    with pytest.raises(Full, match="its episode long waits for its export"):
        run.episodes("e9", steps=10)
    run.store.commit()
    assert run.store.index.episode("long").closed
    rest = segment(blind, "long", start=10, steps=10)
    with pytest.raises(Full, match="its episode long waits for its export"):
        run.store.stage("B", 1, rest)
    run.store.add_archived([run.store.index.episode("long").number])
    run.store.stage("B", 1, rest)
    run.store.commit()
    assert [(e.id, e.steps, e.final) for e in run.store.index.parts("long")] == [("long", 10, 0), ("long.part2", 10, 1)]
    with pytest.raises(Full, match="its episode e0 waits for its export"):
        run.episodes("e9", steps=10)


def test_an_episode_that_never_ends_waits_for_the_export_of_its_parts(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"])
    for start in range(0, 100, 10):
        run.add(segment(blind, "endless", start=start, steps=10, ends=""))
    with pytest.raises(Full, match="its episode endless waits"):
        run.add(segment(blind, "endless", start=100, steps=10, ends=""))
    run.store.commit()
    parts = run.store.index.parts("endless")
    assert [(part.part_start, part.steps, part.closed) for part in parts] == [
        (start, 20, start < 80) for start in range(0, 100, 20)
    ]  # fmt: skip
    run.store.add_archived(part.number for part in parts[:-1])
    for start in range(100, 180, 10):
        run.add(segment(blind, "endless", start=start, steps=10, ends=""))
    with pytest.raises(Full, match=r"its episode endless\.part5 waits"):
        run.add(segment(blind, "endless", start=180, steps=10, ends=""))


@writes_shards
def test_what_comes_of_an_archived_episode_after_an_operator_closed_it_leaves_in_a_shard_of_its_own(tmp_path, blind):
    """A dead link, a label, the export of 4 steps, the link is back: 36 more must not leave unexported."""
    run = Run(tmp_path, blind, capacity=100, archived=["online"], count=1)
    run.add(segment(blind, "e0", steps=4, ends=""))
    run.store.lives.hello("desk", "outbox2", "B", [])
    run.store.stage("B", 0, Outcome("e0", True, judged_by="operator"))
    run.store.commit()
    run.work(rest=True)
    run.store.add_archived(run.exporter.settled)
    for start in (4, 16, 28):
        run.add(segment(blind, "e0", start=start, steps=12, ends="terminated" if start == 28 else ""))
    run.episodes(*(f"e{i}" for i in range(1, 7)), steps=10)
    with pytest.raises(Full, match=r"its episode e0\.part2 waits for its export"):
        run.episodes("e7", steps=10)
    run.work(rest=True)
    run.store.add_archived(run.exporter.settled)
    entries = [
        entry for name in run.shards()
        for entry in shards.read_manifest(tmp_path / "datasets/online" / name)["episodes"]
        if entry["id"].startswith("e0")
    ]  # fmt: skip
    assert sum(entry["steps"] for entry in entries) == 40
    assert {entry["success"] for entry in entries} == {True}


def test_an_episode_that_the_next_one_cuts_is_closed_although_that_one_has_to_wait(tmp_path, blind):
    """As the importer sends them: nothing says that they end."""
    run = Run(tmp_path, blind, capacity=120, archived=["online"])
    run.episodes("e0", "e1", steps=40)
    for start in (0, 15):
        run.add(segment(blind, "e2", start=start, steps=15, ends=""))
    with pytest.raises(Full, match="e0 waits for its export"):
        run.episodes("e3", steps=20, ends="")
    run.store.commit()
    run.hear()
    assert run.exporter.remaining == 3
    run.store.add_archived([1])
    run.episodes("e3", steps=20, ends="")


def test_whatever_waits_for_the_export_is_due_there(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"], count=10)
    run.episodes("e0", steps=20)
    run.hear()
    assert not run.exporter._due("online", [1], False)
    run.episodes("e1", steps=50)
    with pytest.raises(Full):
        run.episodes("e2", steps=40)
    run.hear()
    assert run.exporter._due("online", [1, 2], False) == [1, 2]


def test_that_more_comes_than_is_exported_is_said_once_until_it_has_caught_up(tmp_path, blind, clock, caplog):
    run = Run(tmp_path, blind, capacity=200, count=100)

    def said():
        clock.advance(backlog.BEHIND_S + 1)
        run.hear()
        return caplog.text.count("half of what source online holds waits to be written")

    run.episodes("e0", "e1", steps=49)
    run.hear()
    assert said() == 0
    run.episodes("e2", steps=10)
    run.hear()
    assert said() == 0, "it becomes no more"
    run.episodes("e3", steps=10)
    assert (said(), said()) == (1, 1)
    run.add(*(Outcome(f"e{number}", None, discard=True) for number in range(4)))
    run.hear()
    run.episodes("e4", "e5", "e6", steps=49)
    run.hear()
    run.episodes("e7", steps=10)
    assert said() == 2


def test_what_may_leave_the_store_is_told_once(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    run.add(Outcome("e0", None, discard=True))
    run.hear()
    assert run.exporter.settled == [1]
    run.exporter.told()
    run.add(Outcome("e1", None, discard=True))
    run.hear()
    assert run.exporter.settled == [2]


NICED = 480.0  # seconds: an export gives way to all others, and gets little of a busy machine
EXPORT = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from serl_launcher.datasets.export import export
from serl_launcher.training.plan import Actors, Phase, Plan, PlanSource
phases = {"practise": Phase("practise", Actors("collect", "online"), ("operator",))}
plan = Plan({"online": PlanSource(120, "lerobot")}, {}, phases)
words = {"export": {"sources": "archived", "episodes": 4}, "record": "none", "live": None}
export(OmegaConf.create(words), Path(sys.argv[1]), sys.argv[2], plan)
"""


@contextmanager
def exporting(server):
    """An export process, which is killed at the end of this."""
    process = subprocess.Popen([sys.executable, "-c", EXPORT, server.run_dir, server.local])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@writes_shards
def test_actors_keep_what_a_full_archived_source_does_not_take_until_the_export_catches_up(tmp_path, blind):
    """The export is a process that comes late and is killed; nothing is lost, doubled or out of order."""
    server, names = ServerThread(tmp_path / "run", {"online": 120}, archived=["online"]), [f"e{i}" for i in range(30)]
    arm = TrainerClient(server.address, actor="arm", spec=blind, outbox=tmp_path / "outbox")
    with closing(server), arm as client:
        connected(client)
        server.direct()
        push_all(client, (segment(blind, name, steps=10, weights=0) for name in names))
        until(lambda: "source online is full" in client.state.degraded)
        assert client.pending[0] > 0
        assert server.report()["full"] == ["source online is full, and its episode e0 waits for its export"]
        with exporting(server):
            until(lambda: server.report()["sources"]["online"]["head"] > 100, NICED)
        with exporting(server) as last:
            until(lambda: client.pending[0] == 0 and client.state.degraded == "", NICED)
            last.send_signal(END)
            assert last.wait(NICED) == 0
        rows = server.episodes()
    assert sorted(rows, key=lambda name: rows[name]["first"]) == names
    exported = []
    for path in sorted((tmp_path / "run/datasets/online").iterdir()):
        members = [entry["id"] for entry in shards.read_manifest(path)["episodes"]]
        expected = np.concatenate([segment(blind, name, steps=10).action for name in members])
        assert np.array_equal(opened(path)[1]["action"].astype(np.float32), expected)
        exported += members
    assert exported == names


def test_only_the_learner_may_say_what_is_archived():
    assert [role for role, kinds in ROLES.items() if m.Archived in kinds] == ["learner"]
