"""A whole run, as an independent reader counts it."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from serl_launcher.store import weights
from serl_launcher.store.store import Store
from tests.faults import counted
from tests.faults.whole import Whole
from tests.shared.data import make_episode


@pytest.mark.slow
def test_a_quickstart_whose_processes_are_killed_goes_on_to_its_end_and_is_counted(tmp_path):
    words = [
        "max_env_steps=300",
        "baseline_episodes=2",
        "eval_episodes=2",
        "critic.hidden=[32,32]",
        "policy.hidden=[32,32]",
    ]
    run = Whole(tmp_path, 1, (0.5, 1.0), words)
    assert run.play(300).summary["eval"]["episodes"] == 2
    assert run.took_s
    assert [text for text in run.violations if "median" not in text] == []  # which is for idle machines


def test_a_kill_that_costs_more_than_two_starts_is_a_violation(tmp_path):
    run = Whole(tmp_path, 1, (5, 15), [])
    run.start_s, run.took_s = 10.0, [5.0, 20.0, 90.0]
    run._check_times()
    assert run.violations == []
    run.took_s += [20.1, 30.0]
    run._check_times()
    assert run.violations == ["the median kill cost 20.1 s, an undisturbed start 10.0 s"]


PHASES = ("demonstrate", "teleop", "demo", 2), ("baseline", "evaluate", "eval", 2), ("practise", "collect", "online", 3)


class Run:
    """A run that is over: its store, its weights and its summary."""

    def __init__(self, folder, spec):
        self.folder, self._seq, self._seed = folder, 0, 0
        self.store = Store.create(folder / "store", spec, {"demo": 200, "online": 200, "eval": 200})
        self.store.hello("arm", "outbox", "A", [])
        for phase, mode, into, count in (*PHASES, ("evaluate", "evaluate", "eval", 3)):
            self.weights, size = weights.write(folder / "weights", phase.encode())
            self.version = self.store.publish_weights(self.weights, size, 0)
            directive = self.store.direct({"phase": phase, "mode": mode, "into": into})
            for _ in range(count):
                self.episode(directive, phase)
        self.store.commit()
        self.summary = {
            "env_steps": 35, "episodes": 5, "assisted": 0,
            "before": {"episodes": 2, "distinct_starts": 2, "success": 1.0, "return_mean": 21.0},
            "eval": {"episodes": 3, "distinct_starts": 3, "success": 1.0, "return_mean": 21.0,
                     "weights_sha256": self.weights},
        }  # fmt: skip

    def episode(self, directive, phase):
        """Seven steps, a success."""
        self._seed += 1
        name = f"{phase}-{self._seed}"
        stamp = dict(directive=directive, phase=phase, weights=self.version)
        for record in make_episode(name, self._seed, steps=7, success=True, **stamp):
            self.store.stage("A", self._seq, record)
            self._seq += 1

    def durable(self, source):
        found = counted.published(self.folder / "store" / source, counted.layout(self.folder / "store"))
        return {source: dict(zip(found["number"].tolist(), found["checksum"].tolist(), strict=True))}

    def violations(self, durable=None, spooled=None):
        (self.folder / "summary.json").write_text(json.dumps(self.summary))
        violations = []
        counted.Counted(self.folder, violations).check(durable or {}, spooled or {})
        return violations


@pytest.fixture
def run(tmp_path, spec):
    made = Run(tmp_path, spec)
    yield made
    made.store.close()


def test_what_an_independent_reader_counts_is_what_the_summary_of_a_whole_run_says(run):
    assert run.violations(run.durable("online"), {"A": 30}) == []


def a_lie(part, **values):
    def tell(run):
        (run.summary[part] if part else run.summary).update(values)

    return tell


def a_step_is_lost(run):
    np.memmap(run.folder / "store/online/steps", counted.layout(run.folder / "store"), "r+")[3] = 0


def another_policy_acted(run):
    run.summary["eval"]["weights_sha256"], _ = weights.write(run.folder / "weights", b"another")


def the_published_file_is_damaged(run):
    (run.folder / f"weights/{run.weights}.safetensors").write_bytes(b"else")


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (a_lie("", env_steps=36), "env_steps: 36, and an independent reader counts 35"),
        (a_lie("", episodes=4), "episodes: 4"),
        (a_lie("", assisted=1), "assisted: 1"),
        (a_lie("eval", success=2 / 3), "eval: successes of 3"),
        (a_lie("eval", episodes=4), "eval: successes of 4"),
        (a_lie("eval", distinct_starts=2), "eval: successes of 3, starts"),
        (a_lie("before", return_mean=20.0), "before: successes of 2"),
        (another_policy_acted, "eval: successes of 3"),
        (the_published_file_is_damaged, "are damaged, or not there"),
        (a_step_is_lost, "is damaged, or not there"),
        ("UPDATE episodes SET reward = 22 WHERE number = 1", "reward of demonstrate-1"),
        ("UPDATE episodes SET intervened = 1 WHERE number = 6", "takeovers in practise-6"),
    ],
    ids=lambda value: value.__name__ if callable(value) and value.__name__ != "tell" else None,
)
def test_the_independent_reader_sees(run, plant, sentence):
    if isinstance(plant, str):
        with closing(sqlite3.connect(run.folder / "store/index.sqlite", isolation_level=None)) as index:
            index.execute(plant)
    else:
        plant(run)
    assert any(sentence in violation for violation in run.violations()), run.violations()


def test_the_independent_reader_sees_that_something_durable_went_and_that_an_outbox_was_forgotten(run):
    durable = run.durable("online")
    durable["online"][5] ^= 1
    assert "steps of online that were durable and are not there: 1" in run.violations(durable)[0]
    assert "records of session A that lay on the actor's disk: 30" in run.violations(spooled={"A": 31})[0]
