"""The tool that proves what takes long: what it draws, what it leaves out, and that it goes on where it was stopped."""

import re
import shlex
from pathlib import Path

import pytest

from tests.shared.tools import called
from tools import nightly
from tools.nightly import Part

PARTS = [Part("good", "echo fine", 1), Part("bad", "echo wrong; exit 3", 2), Part("long", "sleep 99", 90)]


@pytest.fixture
def night(tmp_path, monkeypatch, capsys):
    """night(*words, commit) -> (status, what it says), with PARTS."""
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "RESULTS", tmp_path / "runs/nightly.jsonl")
    monkeypatch.setattr(nightly, "parts", lambda seed: PARTS)

    def night(*words, commit):
        monkeypatch.setattr(nightly, "state", lambda: commit)
        return nightly.main(words), capsys.readouterr().out

    return night


def test_it_goes_on_with_what_has_not_passed_on_this_commit_and_the_table_says_when_it_last_did(night):
    status, said = night("--minutes", "10", commit="a" * 40)
    assert status == 1
    assert "passed in 0 s: fine" in said
    assert "FAILED in 0 s: wrong" in said
    assert said.endswith("1 of 3 have passed on aaaaaaaaa; never run here: long\n")
    assert "0 of 1 have passed" in night("--table", "--only", "bad", commit="a" * 40)[1]
    again = night("--minutes", "10", commit="a" * 40)[1]
    assert "good: about" not in again
    assert "bad: about" in again
    for commit in ("b" * 40, "b" * 40 + nightly.CHANGED, "b" * 40 + nightly.CHANGED):
        assert "good: about" in night("--only", "good", commit=commit)[1]
    assert "bbbbbbbbb+" in night("--table", commit="b" * 40)[1]


def test_what_is_drawn_follows_from_the_commit(night):
    def order(commit):
        said = night("--minutes", "10", "--draw", commit=commit)[1]
        return [line.partition(":")[0] for line in said.splitlines() if ": about" in line]

    drawn = [order(f"{number:040}") for number in range(12)]
    assert {*map(tuple, drawn)} == {("good", "bad"), ("bad", "good")}
    assert drawn[0][-1] != "good" or order(f"{0:040}") == ["bad"], "what has passed is not drawn again"


def test_what_hangs_is_ended_and_told(night, monkeypatch):
    monkeypatch.setattr(nightly, "PATIENCE", 0)
    status, said = night("--only", "long", commit="a" * 40)
    assert (status, "hangs in 0 s" in said) == (1, True)


def test_each_part_says_words_that_its_program_knows():
    known = {}
    for part in nightly.parts(7):
        _, program, *words = shlex.split(part.command)
        if program.startswith("tools/"):
            known[program] = known.get(program) or called(Path(program).stem, "--help")[1]
            assert {word for word in words if word.startswith("--")} <= {*re.findall(r"--[\w-]+", known[program])}
    assert len(known) >= 5
