"""A whole run under kill -9, as an independent reader counts it; and that the reader sees what is wrong with one."""

import json

import numpy as np
import pytest

from tests.faults import counted
from tests.faults.whole import KILLED, Whole

SIZES = ["critic.hidden=[32,32]", "policy.hidden=[32,32]"]
SHORT = ["max_env_steps=800", "baseline_episodes=2", "eval_episodes=2", *SIZES]


@pytest.mark.nightly
def test_a_quickstart_whose_processes_are_killed_goes_on_to_its_end_and_is_counted(tmp_path):
    run = Whole(tmp_path, 1, (0.0, 0.3), SHORT)
    found = run.play(KILLED)
    assert run.violations == []
    assert found.summary["eval"]["episodes"] == 2
    assert len(run.took_s) == len(KILLED)
    said = found.summary | {"env_steps": 1}
    said["eval"] = said["eval"] | {"success": said["eval"]["success"] + 0.5}
    (run.run_dir / "summary.json").write_text(json.dumps(said))
    folder, kind = run.run_dir / "store/online", counted.layout(run.run_dir / "store")
    last, steps = int(counted.published(folder, kind)["number"][-1]), np.memmap(folder / "steps", kind, "r+")
    steps[last % len(steps)] = 0
    counted.Counted(run.run_dir, wrong := []).check({"online": {last: 1}}, {"nobody's": 1})
    sentences = "is damaged, or not there", "that were durable and are not there: 1", "records of session nobody's"
    for sentence in (*sentences, "env_steps: 1,", "eval: episodes, starts, successes"):
        assert any(sentence in violation for violation in wrong), (sentence, wrong)
