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


@pytest.mark.parametrize(
    ("part", "texts"),
    [
        (Part((), ["echo 3 TFLOP/s", "echo no kernel >&2; exit 3"]),
         ["$ echo 3 TFLOP/s\n3 TFLOP/s\n```\nended well, after ", "no kernel\n```\nFAILED: 3, after "]),
        (Part(("os", "no_such_package"), ["echo ran"]), ["Left out: this Python lacks no_such_package."]),
        (Part((), ["echo ran"], gpus=2), ["Left out: it needs 2 GPUs, and this machine has 1."]),
        (Part((), ["echo ran"], gpus=1), ["ran\n```\nended well"]),
        (Part((), ["sleep 600"]), ["FAILED: the part took more than 0.2 s"]),
    ],
)  # fmt: skip
def test_a_part_stands_on_the_page_with_what_it_said_and_how_it_ended_or_why_it_was_left_out(part, texts, monkeypatch):
    monkeypatch.setattr(first_gpu, "gpus", lambda: 1)
    page = "\n".join(tried("train", part, 0.2 if "sleep 600" in part.commands else 60))
    assert [text for text in texts if text not in page] == []
    assert ("\n$ " in page) == ("Left out" not in page)


@pytest.mark.slow
def test_what_is_too_slow_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "child"
    status, text = run(f"sleep 600 & echo $! > {file}; trap '' INT; echo began; wait; sleep 600", 3.0)
    assert (status, text) == (None, "began\n")
    until(lambda: not os.path.exists(f"/proc/{int(file.read_text())}"))
