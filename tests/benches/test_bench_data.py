"""The benches of the data path, tiny: each measures what it says, beside what it says, and prints it as data."""

import json

from tests.benches.paired import Figure
from tests.benches.test_bench import figures, run


def test_records_come_in_over_the_wire_and_become_durable_beside_raw_tcp_and_the_disk():
    found, _ = figures("ingest", "--rounds", "1", "--mb", "4", "--sizes", "1 KB", "50 KB")
    for size in ("1 KB", "50 KB"):
        wire = found[f"{size} over the wire", "raw TCP, row by row"]
        assert wire["goal"] == ">= 0.75"
        assert wire["value"] > 0
        assert wire["holds"] == (wire["ratio"] >= 0.75)
        assert found[f"{size} pushed, CPU of both sides", "raw TCP"]["value"] > 0
    (durable,) = (each for (name, beside), each in found.items()
                  if name.startswith("50 KB end to end") and beside == "the smaller of pushed and disk")  # fmt: skip
    assert durable["goal"] == ">= 0.7"


def test_pairs_are_drawn_beside_a_copy_and_hardly_more_is_written_than_the_frames():
    found, _ = figures("replay", "--rounds", "1", "--steps", "100", "--theirs", "0", "--large", "500")
    assert found["256 pairs of 3x224x224x3", "a copy of the same bytes"]["goal"] == ">= 0.85"
    stored = found["bytes written per byte of 3x224x224x3", ""]
    assert 1 < stored["value"] <= 1.02


def test_groups_become_durable_beside_plain_writes_and_acknowledgements_beside_syncs():
    found, _ = figures("durable", "--rounds", "1", "--steps", "128", "--seconds", "1")
    for records in (64, 8):
        assert found[f"commits of {records} records", "plain pwrite + fdatasync"]["ratio"] > 0
    p50, p99 = (found[f"acknowledgement {name}", beside] for name, beside in
                (("p50", "pwrite + fdatasync p50"), ("p99", "max")))  # fmt: skip
    assert 0 < p50["value"] <= p99["value"]


def test_every_client_of_a_swarm_is_served_and_counted():
    found, _ = figures("swarm", "--clients", "4", "--processes", "2", "--seconds", "1")
    slowest = found["rate of a client, the slowest", "what was asked"]
    assert 0 < slowest["value"] <= 30
    assert found["CPU of the server", ""]["value"] > 0
    assert found["acknowledgement p99", ""]["goal"] == "<= 50"


def test_what_an_actor_kept_arrives_beside_a_living_one_and_results_become_a_page(tmp_path):
    found, whole = figures("drain", "--minutes", "0.2")
    assert found["  that is, times real time", ""]["goal"] == ">= 5"
    assert found["rate of the living actor", "what was asked"]["value"] > 0
    whole["figures"].append(Figure("bytes that are copied", 0, "B", goal="<= 0").plain())
    result = tmp_path / "drain.json"
    result.write_text(json.dumps(whole))
    assert run("page", result, "--out", tmp_path / "page.md").returncode == 0
    page = (tmp_path / "page.md").read_text()
    assert "## drain" in page
    assert "| bytes that are copied | 0 B |  |  | <= 0: holds |" in page
    assert (tmp_path / "page.png").stat().st_size > 1000
    result.write_text("[]")
    assert "is not what a bench with figures has printed" in run("page", result).stderr
