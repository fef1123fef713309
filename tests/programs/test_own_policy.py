"""The page about a policy that somebody has, as a reader follows it, with little training."""

import json
import shlex
from pathlib import Path

import pytest

from serl_launcher.datasets import shards
from serl_launcher.training.metrics import read
from tests.programs.pages import page
from tests.shared.here import start
from tests.shared.tools import called
from tools.readme_words import SHORT

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers"),
    pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`"),
]  # fmt: skip
FEW = [*SHORT, "log=false", "batch_size=2"]


def given(command):
    """Do in this process what a command of the page does."""
    program, *words = shlex.split(command.text)
    if program == "./start.sh":
        (folder,) = (word.removeprefix("run_dir=") for word in words if word.startswith("run_dir="))
        start(Path(folder), [*words, *FEW, *shlex.split(command.short)])
    elif words[0] == "-c":
        exec(words[1], {})
    else:
        status, said = called(Path(words[0]).stem, *words[1:])
        assert status == 0, said


def test_the_page_is_enough_for_a_policy_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in page("own_policy"):
        if not command.reason and "install.sh" not in command.text:
            given(command)
    assert "observation.images.cam_wrist" in capsys.readouterr().out.splitlines()[-1]
    assert json.loads((tmp_path / "runs/before/evaluation.json").read_text())["eval"]["episodes"] == 2
    lines = list(read(tmp_path / "runs/practised/metrics.jsonl"))
    assert [line["phase"] for line in lines if line["kind"] == "evaluation"] == ["evaluate"]
    was, now = ((tmp_path / f"runs/{name}/model.safetensors").read_bytes() for name in ("act", "act_practised"))
    assert was != now
    names = [path.name for path in (tmp_path / "runs/act").iterdir() if "processor_step" in path.name]
    assert names
    for name in names:
        one, other = ((tmp_path / "runs" / folder / name).read_bytes() for folder in ("act", "act_practised"))
        assert one == other, "the statistics stay as they were"
