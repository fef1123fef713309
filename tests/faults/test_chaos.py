"""tools/chaos.py: a few rounds of it, and its checker, which has to see each kind of damage."""

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from serl_launcher.store import weights
from tests.faults import checker
from tests.faults.rot import Rot
from tests.shared import oracle

CHAOS = Path(__file__).parents[2] / "tools/chaos.py"


def chaos(*words):
    done = subprocess.run([sys.executable, CHAOS, *words], capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


def test_rounds_of_faults_lose_double_and_reorder_nothing():
    done, said = chaos("--rounds", "4", "--seed", "2698")
    assert said["violations"] == [], done.stdout
    assert done.returncode == 0
    assert (said["rounds"], said["seed"]) == (4, 2698)
    assert said["lost"] == said["duplicated"] == said["reordered"] == 0
    assert 0 < said["acked"] <= said["produced"]


@pytest.mark.slow
@pytest.mark.parametrize("nemesis", ["insider", "missing-index", "bit-rot", "outbox-rot"])
def test_a_round_with_keys_of(nemesis):
    done, said = chaos("--rounds", "1", "--seed", "5", "--only", nemesis)
    assert said["violations"] == [], done.stdout
    assert f"keys; {nemesis}" in done.stdout


@pytest.mark.slow
def test_a_driver_that_hangs_and_a_guard_that_does_not_end_cost_no_record(tmp_path):
    done, said = chaos("--rounds", "1", "--seed", "4", "--only", "hang-stop", "--keep", str(tmp_path))
    assert said["violations"] == [], done.stdout
    logs = list(tmp_path.glob("*/a*.log"))
    assert logs
    assert all("its driver hangs" in log.read_text() for log in logs)


def test_the_checker_knows_nothing_of_the_product():
    code = "import sys, tests.faults.checker; sys.exit([m for m in sys.modules if m.startswith('serl_')] or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHAOS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_killed_trainer_has_left_of_its_weights_goes_with_the_next_version(tmp_path):
    (tmp_path / "abc.123.part").write_bytes(b"half")
    sha256, _ = weights.write(tmp_path, b"whole")
    assert {file.name for file in tmp_path.iterdir()} == {f"{sha256}.safetensors", f"{sha256}.checksums"}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What one round left: its folder."""
    keep = tmp_path_factory.mktemp("keep")
    done, said = chaos("--first", "1", "--rounds", "1", "--seed", "1", "--only", "kill-actor", "--keep", str(keep))
    assert said["violations"] == [], done.stdout
    return keep / "1-1"


class Kept:
    """A copy of what a round left, to damage and to check."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "disk/run/store"
        with closing(sqlite3.connect(self.store / "index.sqlite")) as index:
            spec = oracle.spec_of(index)
            ((capacity, self.tail, head),) = index.execute("SELECT capacity, tail, head FROM sources")
        steps, self.room = np.memmap(self.store / "main/steps", oracle.kind(spec), "r+"), oracle.slots(capacity)
        self.live = [steps[number % capacity : number % capacity + 1] for number in range(self.tail, head)]
        self.rows = oracle.rows(self.store / "main/rows", spec, self.room)

    def check(self, archived=()):
        outboxes = [path for path in (self.folder / "disk").glob("a*") if not path.name.endswith("-weights")]
        return checker.check(self.store, sorted((self.folder / "truth").iterdir()), outboxes, archived)

    def write(self, sql):
        with closing(sqlite3.connect(self.store / "index.sqlite", isolation_level=None)) as index:
            index.execute(sql)

    def lose_a_step(self):
        self.live[-1][:] = 0

    def store_a_step_twice(self):
        """In the place of the one that follows it, in the middle of an episode."""
        one, two = next(
            (one, two) for one, two in pairwise(self.live[::-1])
            if one["episode"] == two["episode"] and max(one["final_row"], two["final_row"]) < 0
        )  # fmt: skip
        one["index"], one["row"] = two["index"], two["row"]
        seen = [self.rows[name][one["row"][0] % self.room] for name in sorted(self.rows)]
        one["checksum"] = oracle.checksum(one[0], seen)


@pytest.fixture
def kept(played, tmp_path):
    return Kept(Path(shutil.copytree(played, tmp_path / "round")))


LAST = "(SELECT number FROM episodes ORDER BY number DESC LIMIT 1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "count", "sentence"),
    [
        (Kept.lose_a_step, "lost", "is damaged, or not there"),
        ("UPDATE sessions SET expected = expected - 1", "lost", "records were acknowledged"),
        ("INSERT INTO lost SELECT session, 0, '', 0, 0 FROM sessions LIMIT 1", "lost", "was declared lost"),
        ("DELETE FROM outcomes WHERE rowid = 1", "lost", "is there 0 times"),
        (Kept.store_a_step_twice, "lost duplicated", "1 are there twice"),
        (f"UPDATE episodes SET first = 0 WHERE number = {LAST}", "reordered", "and the one before it at"),
        (f"UPDATE episodes SET terminated = 1 - terminated WHERE number = {LAST}", "", "its actor sent"),
    ],
    ids=["lost step", "lost record", "declared loss", "lost outcome", "doubled step", "order", "end"],
)
def test_the_checker_sees(kept, damage, count, sentence):
    assert kept.check().violations == []
    kept.write(damage) if isinstance(damage, str) else damage(kept)
    report = kept.check()
    assert any(sentence in violation for violation in report.violations), report.violations
    for name in ("lost", "duplicated", "reordered"):
        assert (getattr(report, name) > 0) == (name in count), (name, report)


@pytest.mark.slow
def test_the_checker_sees_an_episode_that_left_before_it_was_archived(kept):
    assert kept.tail > 0  # the round has evicted some
    assert any("left the store before it was archived" in said for said in kept.check(archived=["main"]).violations)


@pytest.mark.slow
def test_bits_that_turn_over_are_found_by_verify_and_no_others_are_named(kept):
    rot = Rot(kept.store.parent, "main", random.Random(1))
    assert len(rot.numbers) == 3
    assert rot.unseen() == []
    rot.numbers.pop()
    assert "verify says" in rot.unseen()[0]
    rot.mend()
    assert kept.check().violations == []
