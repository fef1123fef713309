"""tools/bench.py: one entry for all measurements, each of which runs here with little to do."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.benches import beside
from tests.benches.paired import Figure
from tests.shared.common import TOOLS
from tests.shared.tools import called
from tools.bench import BENCHES


def test_the_entry_names_every_measurement_and_each_says_what_it_takes():
    said = called("bench", "--help")[1]
    for name in BENCHES:
        assert f"\n{name} " in said
    assert "usage: bench.py control [-h] [--seconds SECONDS]" in called("bench", "control", "--help")[1]
    status, said = called("bench", "pi1")
    assert status == 2
    assert "invalid choice: 'pi1'" in said


def test_a_goal_speaks_of_the_ratio_or_of_the_value_where_there_is_none():
    assert Figure("ingest", 0.1, "GB/s", "raw TCP", 0.8, ">= 0.75").holds
    assert not Figure("ingest", 100.0, "GB/s", "raw TCP", 0.7, ">= 0.75").holds
    assert Figure("p99", 20.0, "ms", goal="<= 20").holds
    assert Figure("p99", 20.0, "ms", "raw TCP", 3.0).holds is None
    assert [Figure("copied", value, "B", goal="<= 0").holds for value in (0, 1)] == [True, False]


# -- the benches, tiny: each measures what it says, beside what it says, and prints it as data
SMALL = {  # {bench: (its words, {(figure, what it stands beside): its goal})}
    "ingest": (
        "--rounds 1 --mb 4 --sizes '50 KB'",
        {("50 KB over the wire", "raw TCP, row by row"): ">= 0.75", ("50 KB pushed, CPU of both sides", "raw TCP"): "",
         ("50 KB end to end", "the smaller of pushed and disk"): ">= 0.7",
         ("50 KB, one segment until it is durable", "write and fdatasync"): ""},
    ),
    "weights": (
        "--rounds 1 --megabytes 3 --receivers 1 --peers",
        {("weights to 1, ours", "raw TCP"): ">= 0.9", ("weights to 1, ours", "raw TCP, hashed and written"): "",
         ("weights to 1, ours", "lz4(pickle) over PUB"): ">= 15", ("weights to 1, ours: CPU of all sides", ""): ""},
    ),
    "wire": (
        "--rounds 1 --calls 5 --peers",
        {**{(f"round trip, {name}: p50", "raw TCP"): "" for name in ("ours", "ours, CURVE", "websocket (openpi)")},
         ("round trip, ours: p50", "lz4(pickle) over ZeroMQ"): "<= 0.2000",
         ("round trip, ours, CURVE: p50", "ours"): "", ("bytes of it that encoding copies", ""): "<= 0"},
    ),
    "replay": (
        "--rounds 1 --steps 100 --theirs 0",
        {("256 pairs of 3x224x224x3", "a copy of the same bytes"): ">= 0.85",
         ("bytes written per byte of 3x224x224x3", ""): "<= 1.02",
         ("256 pairs of 8 numbers", "a ring of numpy arrays"): ">= 0.3"},
    ),
    "update": (
        "--rounds 1 --updates 2 --megabytes 3",
        {("sac, an update with a batch of 256", "a minimal loop"): "<= 1.1",
         ("publishing 3 MB: training stands still", "one copy"): "<= 1.5"},
    ),
    "control": (
        "--seconds 10",
        {**{(f"{state}: tick p99.9", "without a client"): "" for state in
            ("all", "well", "killed", "stopped", "cut off", "no disk")},
         ("records that were not delivered at the end", ""): "<= 0"},
    ),
    "pi0": (
        "--policy pi0_tiny --rounds 1 --cameras 1 --ways replicas zero3 --rows 3 --batch 4 --ranks 2 device=cpu",
        {("eager, rows 3: p50", "the floor"): "", ("replicas, 2 ranks: work", "a big matrix product on each rank"): "",
         ("zero3, 2 ranks: samples", "replicas"): "",
         ("zero3, 2 ranks: peak memory of rank 0", "what was predicted"): ""},
    ),
    "beside": (
        "--rounds 1 --seconds 20",
        {("acknowledgement, p50", "alone"): "<= 1.5", ("acknowledgement, p99 of the worst run", ""): "<= 200",
         ("acknowledgement, p99", beside.COMPUTES): "", ("steps and records lost", ""): "<= 0"},
    ),
    "beside --browsers": (
        "--actors 2 --rounds 1 --seconds 20",
        {("acknowledgement, p99", "alone"): "", ("step, p99", beside.COMPUTES): "",
         ("steps and records lost", ""): "<= 0"},
    ),
}  # fmt: skip
KEPT = {
    "bytes of it that encoding copies",
    "bytes written per byte of 3x224x224x3",
    "records that were not delivered at the end",
    beside.TURNS,
    *beside.FATES,
}
CHEAP = ("ingest", "weights")


@pytest.mark.parametrize(
    "bench", [pytest.param(name, marks=pytest.mark.slow if name in CHEAP else pytest.mark.nightly) for name in SMALL]
)
def test_a_bench_measures_what_it_says_beside_what_it_says(bench):
    words, wanted = SMALL[bench]
    if bench == "pi0":
        pytest.importorskip("deepspeed")
    command = [sys.executable, TOOLS / "bench.py", *bench.split(), "--json", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bench"] == bench.split()[0]
    figures = [Figure(**each) for each in result["figures"]]
    found = {(each.figure, each.against.partition(" (")[0]): each for each in figures}
    for name, goal in wanted.items():
        assert found[name].goal == goal
        assert found[name].value > 0 or goal == "<= 0"
    assert [each for each in figures if each.figure in KEPT and not each.holds] == [], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "flow"], "--policy flow is no PI0: say pi0, pi0_tiny, pi0_expert or pi0_lora"),
        (["--policy", "pi0_tiny", "policy.widht=4"], "policy has no key 'widht'; did you mean 'width'?"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(words, message):
    status, said = called("bench", "pi0", *words)
    assert (status, said.count("\n"), said.startswith("error: ")) == (1, 1, True)
    assert message in said
