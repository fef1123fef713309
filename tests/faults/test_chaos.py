"""tools/chaos.py: a few rounds of it, and its checker, which has to see each kind of damage."""

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from serl_launcher.store import weights
from tests.faults import checker
from tests.faults.rot import Rot
from tests.shared import oracle

WEIGHTS = "sha256, size, update_, at, checksum"
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
@pytest.mark.parametrize("nemesis", ["insider", "missing-index", "bit-rot"])
def test_a_round_with_keys_of(nemesis):
    done, said = chaos("--round", "0", "--seed", "5", "--only", nemesis)
    assert said["violations"] == [], done.stdout
    assert f"keys; {nemesis}" in done.stdout


def test_a_nemesis_that_there_is_not_is_refused_by_a_sentence_that_names_those_that_there_are():
    done = subprocess.run([sys.executable, CHAOS, "--only", "flood"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no nemesis begins with flood; there are bit-rot, cut, " in done.stderr


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
    done, said = chaos("--round", "1", "--seed", "1", "--only", "kill-actor", "--keep", str(keep))
    assert said["violations"] == [], done.stdout
    return keep / "1-1"


class Kept:
    """A copy of what a round left, to damage and to check."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "disk/run/store"
        self.index = sqlite3.connect(self.store / "index.sqlite", isolation_level=None)
        spec = oracle.spec_of(self.index)
        ((capacity, self.tail, head),) = self.index.execute("SELECT capacity, tail, head FROM sources")
        self.room, self.live = oracle.slots(capacity), [number % capacity for number in range(self.tail, head)]
        self.steps = np.memmap(self.store / "main/steps", oracle.kind(spec), "r+")
        self.rows = oracle.rows(self.store / "main/rows", spec, self.room, "r+")

    def check(self, archived=()):
        self.index.close()
        outboxes = [path for path in (self.folder / "disk").glob("a*") if not path.name.endswith("-weights")]
        return checker.check(self.store, sorted((self.folder / "truth").iterdir()), outboxes, archived)

    def pair(self):
        """Slots of two consecutive live steps, neither the last one, of one episode."""
        return next(
            (one, two) for one, two in pairwise(self.live)
            if self.steps[one]["episode"] == self.steps[two]["episode"] and self.steps[one]["first"] >= self.tail
            and self.steps[two]["final_row"] < 0
        )  # fmt: skip

    def stranger(self, slot):
        """A live step of another episode, without a final row."""
        return next(
            other for other in reversed(self.live)
            if self.steps[other]["episode"] != self.steps[slot]["episode"] and self.steps[other]["final_row"] < 0
        )  # fmt: skip

    def seal(self, slot):
        """Make the checksum of a step right again."""
        record = self.steps[slot]
        seen = [int(record[name]) % self.room for name in ("row", "final_row") if record[name] >= 0]
        columns = [self.rows[name][row] for row in seen for name in sorted(self.rows)]
        record["checksum"] = oracle.checksum(record, columns)


@pytest.fixture
def kept(played, tmp_path):
    return Kept(Path(shutil.copytree(played, tmp_path / "round")))


def lose_a_step(kept):
    kept.steps[kept.pair()[0]] = np.zeros((), kept.steps.dtype)


def store_a_step_twice(kept):
    one, two = kept.pair()
    kept.steps[two]["index"], kept.steps[two]["row"] = kept.steps[one]["index"], kept.steps[one]["row"]
    kept.seal(two)


def swap_two_steps(kept):
    one, two = kept.pair()
    kept.steps[[one, two]] = kept.steps[[two, one]]
    kept.steps["number"][[one, two]] = kept.steps["number"][[two, one]]
    kept.seal(one), kept.seal(two)


def swap_two_episodes(kept):
    (one, a), (two, b) = kept.index.execute(
        "SELECT number, first FROM episodes WHERE session = (SELECT session FROM episodes GROUP BY session "
        "ORDER BY count(*) DESC LIMIT 1) ORDER BY number LIMIT 2"
    ).fetchall()  # fmt: skip
    kept.index.execute("UPDATE episodes SET first = ? WHERE number = ?", (b, one))
    kept.index.execute("UPDATE episodes SET first = ? WHERE number = ?", (a, two))


def put_a_row_into_another_episode(kept):
    one, _ = kept.pair()
    kept.steps[one]["row"] = kept.steps[kept.stranger(one)]["row"]
    kept.seal(one)


def flip_a_bit_of_an_image(kept):
    one, _ = kept.pair()
    kept.rows["observation.images.eye"][kept.steps[one]["row"] % kept.room, 3, 4, 1] ^= 16


def flip_a_bit_and_seal_it(kept):
    one, _ = kept.pair()
    kept.steps[one]["action"][1] = np.nextafter(kept.steps[one]["action"][1], np.float32(2))
    kept.seal(one)


def move(kept, which, to):
    """Another tail (0) or head (1) is published."""
    np.memmap(kept.store / "main/published", "<u8", "r+")[which] = to


def evict_nearly_all(kept):
    (tail,) = kept.index.execute("SELECT max(first) FROM episodes").fetchone()
    kept.index.execute("UPDATE sources SET tail = ?, row_tail = (SELECT max(first_row) FROM episodes)", (tail,))
    move(kept, 0, tail)


def evict_half_of_an_episode(kept):
    tail = int(kept.steps[kept.pair()[1]]["number"])
    kept.index.execute("UPDATE sources SET tail = ?", (tail,))
    move(kept, 0, tail)


def publish_too_much(kept):
    move(kept, 1, kept.tail + len(kept.live) + 1)


def leave_a_file_in_an_outbox(kept):
    (kept.folder / "disk/a0/00000009-aa-0.records").touch()


@pytest.mark.parametrize(
    ("damage", "count", "sentence"),
    [
        (lose_a_step, "lost", "is damaged, or not there"),
        ("UPDATE sessions SET expected = expected - 1", "lost", "records were acknowledged"),
        ("DELETE FROM episodes WHERE number = (SELECT max(number) FROM episodes)", "lost", "is not in the index"),
        ("DELETE FROM outcomes WHERE rowid = 1", "lost", "is there 0 times"),
        (store_a_step_twice, "lost duplicated", "1 are there twice"),
        (swap_two_steps, "reordered", "its steps lie in the order"),
        (swap_two_episodes, "reordered", "and the one before it at"),
        (put_a_row_into_another_episode, "", "its row comes from"),
        (flip_a_bit_of_an_image, "lost", "is damaged, or not there"),
        (flip_a_bit_and_seal_it, "", "is not what was sent"),
        ("UPDATE episodes SET terminated = 1 - terminated WHERE number = 1", "", "its actor sent"),
        (evict_nearly_all, "", "were kept"),
        (evict_half_of_an_episode, "", "lies within an episode"),
        (publish_too_much, "", "is published"),
        ("UPDATE directives SET body = '{}'", "", "is not what was answered to"),
        (f"INSERT INTO weights ({WEIGHTS}) VALUES ('abc', 5, 1, 0.0, 0)", "", "the weights abc are damaged, or not"),
        (leave_a_file_in_an_outbox, "", "still holds"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_checker_sees(kept, damage, count, sentence):
    kept.index.execute(damage) if isinstance(damage, str) else damage(kept)
    report = kept.check()
    assert any(sentence in violation for violation in report.violations), report.violations
    for name in ("lost", "duplicated", "reordered"):
        assert (getattr(report, name) > 0) == (name in count), (name, report)


def test_the_checker_finds_nothing_in_what_is_whole(kept):
    report = kept.check()
    assert report.violations == []
    assert report.acked <= report.produced


def test_the_checker_sees_an_episode_that_left_before_it_was_archived(kept):
    assert kept.tail > 0  # the round has evicted some
    report = kept.check(archived=["main"])
    assert report.lost > 0
    assert any("left the store before it was archived" in violation for violation in report.violations)


def test_bits_that_turn_over_are_found_by_verify_and_no_others_are_named(kept):
    rot = Rot(kept.store.parent, "main", random.Random(1))
    assert len(rot.numbers) == 3
    assert rot.unseen() == []
    rot.numbers.pop()
    assert "verify says" in rot.unseen()[0]
    rot.mend()
    assert kept.check().violations == []
