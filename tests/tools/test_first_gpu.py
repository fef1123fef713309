"""The page of the first GPU holds each command with what it printed, and each failure; nothing is left running."""

import os

import pytest

from tests.shared.common import until
from tools import first_gpu
from tools.first_gpu import Part, run, tried

MACHINE = "a machine"


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch):
    monkeypatch.setattr(first_gpu, "machine", lambda: MACHINE)
    monkeypatch.setattr(first_gpu, "ENDS_S", 0.5)


def test_each_command_stands_on_the_page_with_what_it_said_and_how_it_ended():
    page = "\n".join(tried("train", Part((), ["echo 3 TFLOP/s", "echo no kernel >&2; exit 3"]), 60))
    assert "$ echo 3 TFLOP/s\n3 TFLOP/s\n```\nended well, after " in page
    assert "no kernel\n```\nFAILED: 3, after " in page


def test_a_part_whose_packages_are_missing_is_left_out_and_names_them():
    page = "\n".join(tried("infer", Part(("os", "no_such_package"), ["echo ran"]), 60))
    assert page.endswith("Left out: this Python lacks no_such_package.\n")


def test_a_part_for_several_gpus_says_how_many_there_are(monkeypatch):
    monkeypatch.setattr(first_gpu, "gpus", lambda: 1)
    page = "\n".join(tried("ranks", Part((), ["echo ran"], gpus=2), 60))
    assert page.endswith("Left out: it needs 2 GPUs, and this machine has 1.\n")
    assert "ran\n```\nended well" in "\n".join(tried("ranks", Part((), ["echo ran"], gpus=1), 60))


@pytest.mark.slow
def test_what_is_too_slow_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "child"
    status, text = run(f"sleep 600 & echo $! > {file}; trap '' INT; echo began; wait; sleep 600", 3.0)
    assert (status, text) == (None, "began\n")
    until(lambda: not os.path.exists(f"/proc/{int(file.read_text())}"))


def test_a_part_ends_within_its_limit_and_says_so():
    page = "\n".join(tried("infer", Part((), ["sleep 600"]), 0.2))
    assert "FAILED: the part took more than 0.2 s" in page
