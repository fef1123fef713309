"""tools/bench.py: one entry for all measurements, each of which runs here with little to do."""

import json
import re
import subprocess
import sys

import pytest
from serl_client.chunks import RULES

from tests.benches import latency, paired
from tests.benches.paired import Figure, cpu_seconds, ratio, rounds
from tests.benches.rtc import NETS
from tests.shared.common import TOOLS
from tests.shared.tools import called
from tools.bench import BENCHES, main


def test_the_entry_names_every_measurement_and_each_says_what_it_takes():
    said = called("bench", "--help")[1]
    for name in BENCHES:
        assert f"\n{name} " in said
    assert "usage: bench.py control [-h] [--seconds SECONDS]" in called("bench", "control", "--help")[1]
    status, said = called("bench", "pi0-infr")
    assert status == 2
    assert "invalid choice: 'pi0-infr'" in said


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


# -- the benches, tiny: each measures what it says, beside what it says, and prints it as data
RAW = "raw TCP, row by row"
SMALL = {  # {bench: (its words, {(figure, what it stands beside): its goal})}
    "wire": (
        ("--rounds", "1", "--calls", "5", "--megabytes", "3"),
        {**{(f"round trip, {name}: p50", "raw TCP"): "" for name in ("ours", "ours, one thread", "ours, CURVE")},
         **{(f"one way, {size}, CURVE", "clear"): ">= 0.3" for size in ("500 KB", "3 MB")},
         ("bytes of it that encoding copies", ""): "<= 0"},
    ),
    "weights": (
        ("--rounds", "1", "--megabytes", "3", "--receivers", "1", "--peers"),
        {("weights to 1, ours", "raw TCP"): ">= 0.9", ("weights to 1, ours", "raw TCP, hashed and written"): "",
         ("weights to 1, ours", "lz4(pickle) over PUB"): ">= 15", ("weights to 1, raw TCP", ""): "",
         ("two fast receivers beside a slow one", "alone"): "<= 1.1"},
    ),
    "ingest": (
        ("--rounds", "1", "--mb", "4", "--sizes", "1 KB", "50 KB"),
        {**{(f"{size} over the wire", RAW): ">= 0.75" for size in ("1 KB", "50 KB")},
         **{(f"{size} pushed, CPU of both sides", "raw TCP"): "" for size in ("1 KB", "50 KB")},
         ("50 KB end to end", "the smaller of pushed and disk"): ">= 0.7"},
    ),
    "replay": (
        ("--rounds", "1", "--steps", "100", "--theirs", "0"),
        {("256 pairs of 3x224x224x3", "a copy of the same bytes"): ">= 0.85",
         ("bytes written per byte of 3x224x224x3", ""): "<= 1.02",
         ("256 pairs of 8 numbers", "a ring of numpy arrays"): ">= 0.3"},
    ),
    "update": (
        ("--rounds", "1", "--updates", "2"),
        {(f"{name}, an update with a batch of {rows}", "a minimal loop"): "<= 1.1"
         for name, rows in (("sac", 256), ("rlpd", 128))},
    ),
    "stall": (
        ("--rounds", "1", "--weights", "3", "--checkpoint", "3"),
        {(f"{what} of 3 MB: training stands still".replace("publishing of", "publishing"), "one copy"): "<= 1.5"
         for what in ("publishing", "a checkpoint")},
    ),
    "durable": (
        ("--rounds", "1", "--steps", "128", "--seconds", "1"),
        {**{(f"commits of {records} records", "plain pwrite + fdatasync"): ">= 0.85" for records in (64, 8)},
         ("acknowledgement p50", "pwrite + fdatasync p50"): "", ("acknowledgement p99", "max"): "<= 1"},
    ),
    "swarm": (
        ("--clients", "4", "--processes", "2", "--seconds", "1"),
        {("rate of a client, the slowest", "what was asked"): ">= 0.9", ("acknowledgement p99", ""): "<= 50",
         ("CPU of the server", ""): ""},
    ),
    "drain": (
        ("--minutes", "0.2"),
        {("  that is, times real time", ""): ">= 5", ("rate of the living actor", "what was asked"): ">= 0.9"},
    ),
    "hostile": (
        ("--records", "2000", "--hellos", "200", "--seconds", "1", "--most", "5"),
        {("ack under 2,000 outcomes", "alone"): "<= 1.1", ("ack under 200 Hellos", "alone"): "<= 1.1"},
    ),
    "servo": (
        ("--rounds", "1", "--seconds", "1"),
        {(f"{kind}: off, {name}", "an empty loop"): "" for kind in ("set points", "commands")
         for name in ("p50", "p99", "most")},
    ),
    "servo of a dobot": (
        ("task=dobot_pnp", "--rounds", "1", "--seconds", "2"),
        {(f"{what}: off, p50", "an empty loop"): "" for what in
         ("set points of the left arm", "set points of the right arm", "commands")},
    ),
    "control": (
        ("--seconds", "10"),
        {**{(f"{state}: tick p99.9", "without a client"): "" for state in
            ("all", "well", "slow", "killed", "stopped", "cut off", "no disk")},
         **{(f"{call}: own p99.9", ""): "" for call in ("push", "ask", "answer")},
         ("records that were not delivered at the end", ""): "<= 0"},
    ),
    "pi0-infer": (
        ("--policy", "pi0_tiny", "--rounds", "2", "--cameras", "1", "--batch", "1", "3", "--samples", "2"),
        {**{(f"{way}: p50", "the floor"): "" for way in
            (*(f"eager, rows {rows}, samples 1" for rows in (1, 2, 3)), "one prefix, rows 1, samples 2")},
         ("a big copy", ""): "", ("eager, rows 1, samples 1: peak memory", ""): ""},
    ),
    "pi0-train": (
        ("--policy", "pi0_tiny", "--rounds", "2", "--cameras", "1", "--batch", "4", "policy.checkpointing=true"),
        {("work", "a big matrix product"): "", ("samples", ""): "", ("peak memory", "what was predicted"): ""},
    ),
}  # fmt: skip
KEPT = {
    "bytes of it that encoding copies",
    "bytes written per byte of 3x224x224x3",
    "records that were not delivered at the end",
}


@pytest.mark.slow
@pytest.mark.parametrize(("bench", "words", "wanted"), [(name, *both) for name, both in SMALL.items()], ids=SMALL)
def test_a_bench_measures_what_it_says_beside_what_it_says(bench, words, wanted):
    bench = bench.partition(" ")[0]
    command = [sys.executable, TOOLS / "bench.py", bench, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bench"] == bench
    found = {(re.sub(r", \d+ groups", "", each["figure"]), each["against"].partition(" (")[0]): each
             for each in result["figures"]}  # fmt: skip
    for name, goal in wanted.items():
        assert found[name]["goal"] == goal
        assert found[name]["value"] > 0 or goal == "<= 0"
    assert all(each["holds"] for (name, _), each in found.items() if name in KEPT)


def test_results_become_a_page(tmp_path, capsys):
    figures = [Figure("bytes that are copied", 0, "B", goal="<= 0"), Figure("rate", 2.0, "Hz", goal=">= 1")]
    result = tmp_path / "result.json"
    result.write_text(json.dumps(paired.result("drain", figures)))
    main(["page", str(result), "--out", str(tmp_path / "page.md")])
    assert capsys.readouterr().out == f"wrote {tmp_path}/page.md\n"
    page = (tmp_path / "page.md").read_text()
    assert "## drain" in page
    assert "| bytes that are copied | 0 B |  |  | <= 0: holds |" in page
    assert (tmp_path / "page.png").stat().st_size > 1000
    result.write_text("[]")
    with pytest.raises(SystemExit, match="is not what a bench with figures has printed"):
        main(["page", str(result)])


@pytest.mark.slow
def test_a_slow_policy_is_measured_under_each_rule_of_chunks(monkeypatch, capsys):
    monkeypatch.setattr(latency, "LATENCIES", (12,))
    main(["control", "--latency", "--seconds", "3", "--hz", "20", "--json"])
    found = {each["figure"]: each["value"] for each in json.loads(capsys.readouterr().out)["figures"]}
    assert len(found) == 5 * len(RULES)
    for rule in RULES:
        assert found[f"12 ms, {rule}: ticks held"] == 0, "50 actions outlast any machine's pause"
        assert found[f"12 ms, {rule}: age of the action p50"] > 12
        assert found[f"12 ms, {rule}: jump at a border p95"] > 0


@pytest.mark.slow
def test_a_study_goes_on_at_its_first_missing_cell(tmp_path, capsys):
    pytest.importorskip("mujoco")
    out = tmp_path / "cells.json"
    words = ["rtc", "--out", str(out), "--seeds", "0", "--starts", "1", "--demonstrations", "3", "--updates", "3"]
    main([*words, "--delays", "0", "2"])
    cells = json.loads(out.read_text())
    assert [(cell["net"], cell["way"], cell["delay"]) for cell in cells] == [
        (net, way, delay) for net in NETS for way, delay in (("naive", 0), ("naive", 2), ("rtc", 2))
    ]
    printed = capsys.readouterr().out
    assert printed.count("| learned to continue | rtc | 2 |") == printed.count("| did not | async | 0 |") == 1
    kept = [{**cell, "held": 7} for number, cell in enumerate(cells) if number != 3]
    out.write_text(json.dumps(kept))
    main([*words, "--delays", "0", "2"])
    assert json.loads(out.read_text()) == [*kept, cells[3]], "finished cells stay; the missing one is as it was"
