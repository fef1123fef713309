"""tools/bench.py: one entry for all measurements, and the one of a control loop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benches.paired import Figure, cpu_seconds, ratio, rounds
from tools.bench import BENCHES

BENCH = Path(__file__).parents[2] / "tools/bench.py"


def run(*words):
    return subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True)


def test_the_entry_names_every_measurement_and_each_says_what_it_takes():
    said = run("--help").stdout
    for name in BENCHES:
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
    ours, plain = (found["states"]["all"][loop] for loop in ("with", "without"))
    share = ours["late"] / ours["ticks"]
    assert found["ratio"] == pytest.approx(share / (max(1, plain["late"]) / plain["ticks"]))
    assert found["holds"] == (found["ratio"] <= found["goal"])
    assert found["calls"]["push"]["count"] > 0
    assert found["calls"]["ask"]["own_max"] <= found["calls"]["ask"]["wall_max"]
    assert found["undelivered"] == 0  # all that was pushed under the faults came


def test_contenders_take_turns_and_only_what_one_round_measured_is_compared():
    turns, load = [], iter((1, 1, 10, 10, 2, 2))

    def contender(name, seconds):
        def measure():
            turns.append(name)
            return seconds * next(load)

        return measure

    measured = rounds({"ours": contender("ours", 3.0), "theirs": contender("theirs", 2.0)}, 3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert measured == {"ours": [3.0, 30.0, 6.0], "theirs": [2.0, 20.0, 4.0]}
    assert ratio(measured, "ours", "theirs") == 1.5


def test_a_goal_speaks_of_the_ratio_or_of_the_value_where_there_is_none():
    assert Figure("ingest", 0.1, "GB/s", "raw TCP", 0.8, ">= 0.75").holds
    assert not Figure("ingest", 100.0, "GB/s", "raw TCP", 0.7, ">= 0.75").holds
    assert Figure("p99", 20.0, "ms", goal="<= 20").holds
    assert Figure("p99", 20.0, "ms", "raw TCP", 3.0).holds is None
    assert [Figure("copied", value, "B", goal="<= 0").holds for value in (0, 1)] == [True, False]


def test_cpu_time_is_that_of_all_threads_of_other_processes():
    words = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 300_000); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert 0.05 < cpu_seconds(process.pid) < 60
        process.communicate(b"\n")


def figures(*words):
    """{(figure, what it stands beside): the figure} of one bench, and all that it printed."""
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bench"] == words[0]
    return {(each["figure"], each["against"].partition(" (")[0]): each for each in found["figures"]}, found


@pytest.mark.slow
def test_a_round_trip_is_measured_beside_plain_tcp_and_its_stages_are_told():
    found, whole = figures("wire", "--rounds", "1", "--calls", "5", "--megabytes", "3", "--profile")
    for name in ("ours", "ours, one thread", "ours, CURVE", "raw TCP"):
        assert found[f"round trip, {name}: p50", "raw TCP"]["value"] > 0
    assert len(whole["profile_us"]) == 8
    assert found["bytes of it that encoding copies", ""]["holds"]
    for size in ("500 KB", "3 MB"):
        assert found[f"one way, {size}, CURVE", "clear"]["goal"] == ">= 0.3"


@pytest.mark.slow
def test_weights_reach_receivers_beside_plain_tcp_and_a_slow_one_stands_beside_fast_ones():
    found, _ = figures("weights", "--rounds", "1", "--megabytes", "3", "--receivers", "1", "--peers")
    for other in ("raw TCP", "raw TCP, hashed and written", "lz4(pickle) over PUB"):
        ours = found["weights to 1, ours", other]
        assert ours["ratio"] == pytest.approx(ours["value"] / found[f"weights to 1, {other}", ""]["value"])
    assert found["two fast receivers beside a slow one", "alone"]["goal"] == "<= 1.1"
