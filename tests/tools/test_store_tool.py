"""tools/store.py says one sentence for each damage."""

import os
import re
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from serl_client import ConfigError
from serl_client.episode import LostRecord, Outcome

from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from tests.shared.tools import called
from tests.store.made import founded


@pytest.fixture
def run(tmp_path, make_segment):
    """A run with eight steps of two episodes."""
    made = founded(tmp_path / "run")
    for number in range(2):
        made.stage("A", number, make_segment(f"e{number}", number, ends="terminated"))
    made.stage("A", 2, Outcome("e0", True))
    made.stage("A", 3, LostRecord("damaged on the actor's disk"))
    made.add_archived([1])
    made.publish_weights("a" * 64, 1, 1)
    made.command("next", "", "arm")
    made.commit()
    made.close()
    return tmp_path / "run"


def flip(path, at):
    data = np.memmap(path, "u1", "r+")
    data[at] ^= 1


def change(run, sql):
    with closing(sqlite3.connect(run / "store/index.sqlite")) as index, index:
        index.execute(sql)


DAMAGES = {
    "short rows": (lambda run: os.truncate(run / "store/online/rows", 4096), r"online/rows should have .* bytes"),
    "no steps": (lambda run: (run / "store/online/steps").unlink(), r"online/steps should have .* bytes, not None"),
    "no published": (lambda run: (run / "store/online/published").unlink(), r"online/published should have 16 bytes"),
    "a head far beyond": (
        lambda run: np.memmap(run / "store/online/published", "<u8", "r+").__setitem__(1, 10**9),
        r"1,000,000,000 steps were published, and its index knows 8",
    ),
    "a bit of a row": (lambda run: flip(run / "store/online/rows", 3), r"source online, step 0: damaged"),
    "a bit of a step": (lambda run: flip(run / "store/online/steps", 60), r"source online, step 0: damaged"),
    "a letter of an id": (
        lambda run: change(run, "UPDATE episodes SET id = 'f0' WHERE id = 'e0'"),
        r"a row of episodes, which begins with 1 is damaged",
    ),
    "a watermark": (lambda run: change(run, "UPDATE sessions SET expected = 7"), r"a row of sessions, .* is damaged"),
    "a tail": (lambda run: change(run, "UPDATE sources SET tail = 4"), r"a row of sources"),
    **{
        table: (lambda run, sql=f"UPDATE {table} SET {what}": change(run, sql), rf"a row of {table}, .* is damaged")
        for table, what in {
            "phases": "steps = 7",
            "archived": "number = 2",
            "outcomes": "success = 0",
            "lost": "seq = 1",
            "directives": "body = '{}'",
            "weights": "sha256 = 'b'",
            "commands": "name = 'stop'",
        }.items()
    },
    "no index": (lambda run: (run / "store/index.sqlite").unlink(), r"but no index\.sqlite"),
}


@pytest.mark.parametrize("raises", [False, True])
def test_a_learner_that_starts_meanwhile_is_no_damage(run, monkeypatch, raises):
    """SQLite may find anything in a file that it was told nobody writes: here that is made up."""
    rows, started = Index.damaged_rows, []

    def damaged_rows(index):
        if started:
            return rows(index)
        started.append(Store(run / "store"))
        if raises:
            raise ConfigError("the index is damaged")
        return iter(["a row of commands"])

    monkeypatch.setattr(Index, "damaged_rows", damaged_rows)
    status, said = called("store", "verify", run)
    started[0].close()
    assert (status, said.splitlines()[-1]) == (0, "source online: 8 steps checked"), said
    assert "a learner has started meanwhile" in said


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_one_sentence(run, damage):
    assert called("store", "verify", run) == (0, "source online: 8 steps checked\n")
    spoil, says = DAMAGES[damage]
    spoil(run)
    status, said = called("store", "verify", run)
    assert status == 1
    [line] = [line for line in said.splitlines() if not line.endswith("checked")]
    assert re.search(says, line), said
