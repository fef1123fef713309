"""tools/bench.py: one entry for all measurements, and the one of a control loop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "tools/bench.py"


def run(*words):
    return subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True)


def test_the_entry_names_every_measurement_and_each_says_what_it_takes():
    said = run("--help").stdout
    for name in ("control", "pi0-infer", "pi0-train"):
        assert f"\n{name} " in said
    assert "usage: bench.py control [-h] [--seconds SECONDS]" in run("control", "--help").stdout
    wrong = run("pi0-infr")
    assert wrong.returncode == 2
    assert "invalid choice: 'pi0-infr'" in wrong.stderr


@pytest.mark.slow
def test_a_control_loop_is_measured_in_each_state_of_the_learner_beside_one_without_calls():
    found = json.loads(run("control", "--seconds", "1", "--hz", "20", "--json").stdout)
    assert [line["state"] for line in found] == ["alive", "slow", "stopped", "dead", "full"]
    for line in found:
        assert line["ticks"] == 20
        assert line["ratio"] == pytest.approx(line["late_ms"] / line["plain_late_ms"])
        assert line["push_cpu"] > 0
        assert line["ask_cpu"] > 0


@pytest.mark.slow
def test_the_whole_actor_is_measured_under_each_fault_beside_one_without_a_client():
    found = json.loads(run("control", "--faults", "--seconds", "6", "--json").stdout)
    assert list(found["states"]) == ["all", "well", "killed", "stopped", "cut off", "no disk"]
    for state, both in found["states"].items():
        assert min(loop["ticks"] for loop in both.values()) > 0, state
    late = {loop: found["states"]["all"][loop]["late"] for loop in ("with", "without")}
    assert found["ratio"] == late["with"] / max(1, late["without"])
    assert found["holds"] == (found["ratio"] <= found["goal"])
    assert found["calls"]["push"]["count"] > 0
    assert found["calls"]["ask"]["own_max"] <= found["calls"]["ask"]["wall_max"]
    assert found["undelivered"] == 0  # all that was pushed under the faults came
