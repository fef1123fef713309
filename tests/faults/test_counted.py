"""A whole run, as an independent reader counts it."""

import json

import numpy as np
import pytest

from serl_launcher.store import weights
from serl_launcher.store.store import Store
from tests.faults import counted
from tests.faults.whole import KILLED, Whole
from tests.shared.data import make_episode


@pytest.mark.nightly
def test_a_quickstart_whose_processes_are_killed_goes_on_to_its_end_and_is_counted(tmp_path):
    sizes = ["critic.hidden=[32,32]", "policy.hidden=[32,32]"]
    run = Whole(tmp_path, 1, (0.5, 1.0), ["max_env_steps=300", "baseline_episodes=2", "eval_episodes=2", *sizes])
    found = run.play(KILLED)
    assert run.violations == []
    assert found.summary["eval"]["episodes"] == 2
    assert run.took_s


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

    def lose_a_step(self):
        np.memmap(self.folder / "store/online/steps", counted.layout(self.folder / "store"), "r+")[3] = 0

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


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (lambda run: run.summary.update(env_steps=36), "env_steps: 36, and an independent reader counts 35"),
        (lambda run: run.summary["eval"].update(success=2 / 3), "eval: successes of 3"),
        (lambda run: run.summary["before"].update(return_mean=20.0), "before: successes of 2"),
        (lambda run: run.lose_a_step(), "is damaged, or not there"),
    ],
)
def test_the_independent_reader_sees(run, plant, sentence):
    durable = run.durable("online")
    assert run.violations(durable, {"A": 30}) == []
    plant(run)
    assert any(sentence in violation for violation in run.violations(durable)), run.violations()


def test_the_independent_reader_sees_that_something_durable_went_and_that_an_outbox_was_forgotten(run):
    durable = run.durable("online")
    durable["online"][5] ^= 1
    assert "steps of online that were durable and are not there: 1" in run.violations(durable)[0]
    assert "records of session A that lay on the actor's disk: 30" in run.violations(spooled={"A": 31})[0]
