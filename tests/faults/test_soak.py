"""tools/soak.py: what it calls drift, what it counts, and a short run of it."""

import json
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from tests.faults.soaking import drift
from tests.faults.soaking.tables import tables

TOOLS = Path(__file__).parents[2] / "tools"
TIMES = np.arange(100) * 5.0  # seconds


@pytest.fixture
def noise():
    return np.random.default_rng(0).normal(0, 3, len(TIMES))


def test_a_slow_leak_under_noise_is_drift_and_noise_alone_is_none(noise):
    still, leak = drift.drift(TIMES, 100 + noise), drift.drift(TIMES, 100 + noise + TIMES / 60)
    assert not still.grows
    assert leak.grows
    assert leak.per_hour == pytest.approx(60, abs=2 * leak.error)
    assert leak.last - leak.first == pytest.approx(6.25 * 0.8, abs=1.5)


def test_what_fills_up_once_and_a_random_walk_that_comes_back_are_no_drift(noise):
    assert not drift.drift(TIMES, np.minimum(TIMES, 80) + noise).grows
    assert not drift.drift(TIMES, np.sin(TIMES / 60) * 50).grows


def test_a_series_beyond_its_bound_is_named_with_both_ends():
    fine = dict.fromkeys(drift.BOUNDS, drift.Drift(100.0, 100.0, 0.0, 0.0))
    assert drift.broken(fine) == []
    leaking = fine | {"server files": drift.Drift(100.0, 120.0, 300.0, 1.0)}
    assert drift.broken(leaking) == ["server files went from 100.0 to 120.0, beyond 109.0"]


def test_every_table_of_our_own_objects_is_counted_and_nothing_twice():
    class Slotted:
        __slots__ = ("inner", "queue")

    class Plain:
        pass

    for kind in (Slotted, Plain):
        kind.__module__ = "serl_client.invented"
    root, slotted = Plain(), Slotted()
    slotted.inner, slotted.queue = root, deque([1, 2, 3])
    root.table, root.parts, root.other, root.name = {"a": slotted, "b": slotted}, [Plain(), Plain()], object(), "text"
    for part in root.parts:
        part.kept = {1, 2}
    assert tables(root, "root") == {
        "root.table": 2, "root.parts": 2, "root.parts.kept": 4, "root.table.queue": 3,
    }  # fmt: skip


def test_actors_come_and_go_at_a_store_that_evicts_and_the_last_line_tells_it(tmp_path):
    words = [sys.executable, TOOLS / "soak.py", "--minutes", "0.08", "--actors", "6", "--processes", "2"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    said = done.stdout.splitlines()
    result = json.loads(said[-1])
    assert done.returncode == (0 if result["holds"] else 1)
    assert result["errors"] == []
    assert result["refused"] == {}
    assert result["kills"] >= 2
    assert result["lives"] > 2 * 6  # of each actor more than one beside those after a kill
    assert result["evicted"] > 0
    assert {"server MB", "server files", "server threads", "ack p99 ms", "index KB", "rows of sessions"} <= set(
        result["drift"]
    )
    assert "server.keeper.store.sessions" in {*result["grows_with_history"], *result["grows"]}
