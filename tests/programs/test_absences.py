"""A machine that lacks what a run could use: the run goes on with one sentence for each thing that is missing, which
says how to get it; where it was asked for by name, that sentence is all that happens.

The real programs; a module is taken from them by a sitecustomize, which their children load, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from robot_infra.cameras import gl
from serl_launcher.datasets import shards
from serl_launcher.datasets.names import MANIFEST
from tests.shared.common import free_port

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "train.py")]
PATIENCE = 150.0  # seconds
COLLECT = ["task=sim_arm", "task.image_size=32", "plan=collect", "export.sources=all", "export.episodes=1"]
PRACTISE = [
    "task=sim_arm", "task.cameras=auto", "utd=1", "algo.hidden=[32,32]", "policy.hidden=[32,32]", "record=eval",
    "export.sources=all", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline",
    "plan.phases.practise.start_when='online.steps >= 20'", 'plan.phases.practise.until=["env_steps >= 60"]',
    'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


@pytest.fixture
def lacking(tmp_path):
    """lacking(*modules) -> the environment of a machine where those cannot be imported, and without an ffmpeg."""

    def lacking(*modules):
        place = tmp_path / "lacks"
        place.mkdir()
        (place / "sitecustomize.py").write_text(f"import sys\nfor name in {modules}:\n    sys.modules[name] = None\n")
        mine = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "MUJOCO_GL")}
        return mine | {"PYTHONPATH": str(place), "PATH": str(Path(sys.executable).parent)}

    return lacking


@pytest.fixture
def run(tmp_path):
    """run(environment, *words) -> {side: (exit status, the lines it said)} of a learner and its actor."""
    processes = {}

    def run(environment, *words, sides=("learner", "actor")):
        ports = [f"port={free_port()}", f"inference_port={free_port()}"]
        for side in sides:
            command = [*COMMAND, f"{side}=true", f"run_dir={tmp_path}/run", *ports, *words]
            with open(tmp_path / side, "w") as log:
                processes[side] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=tmp_path
                )  # fmt: skip
        statuses = {side: process.wait(PATIENCE) for side, process in processes.items()}
        return {side: (status, (tmp_path / side).read_text().splitlines()) for side, status in statuses.items()}

    yield run
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_run_without_wandb_lerobot_rerun_av_gl_and_ffmpeg_ends_well_and_names_each_once(lacking, run, tmp_path):
    absent = lacking("wandb", "lerobot", "av", "torchcodec", "rerun", "OpenGL")
    done = run(absent, *PRACTISE)
    assert {side: status for side, (status, _) in done.items()} == {"learner": 0, "actor": 0}
    said = [line for _, lines in done.values() for line in lines]
    assert not [line for line in said if "Traceback" in line]
    for what, how in {
        "wandb is not installed": "--extra wandb",
        "no shards are written, as lerobot, av, torchcodec is not installed": "--extra data",
        "rerun is not installed": "--extra data",
        "can draw no camera images": "apt-get install libegl1 libosmesa6",
    }.items():
        (sentence,) = [line for line in said if what in line]
        assert how in sentence
    assert sum("install" in line for line in said) == 4
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["eval"]["episodes"], summary["env_steps"] >= 60, summary["updates"] > 0) == (2, True, True)


@pytest.mark.parametrize(
    ("side", "words", "absent", "sentence"),
    [
        ("actor", ["task=sim_arm", "task.cameras=true"], "OpenGL", "libosmesa6): install them, or say task.cameras=f"),
        (
            "learner", ["task=fake", "+plan.sources.online.archive=lerobot"], "lerobot",
            "archive: lerobot of online needs lerobot: run `uv sync --inexact --extra data` here, or say",
        ),
        ("learner", ["task=fake", "wandb=online"], "wandb", "--extra wandb`): install it, or say wandb=false"),
    ],
)  # fmt: skip
def test_what_was_asked_for_by_name_and_is_missing_is_refused(lacking, run, tmp_path, side, words, absent, sentence):
    """At once: before there is a run folder, or anybody to wait for."""
    status, lines = run(lacking(absent), *words, sides=(side,))[side]
    assert (status, len(lines)) == (1, 1), lines
    assert lines[0].startswith("error: ")
    assert sentence in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`")
def test_images_of_a_machine_whose_torchcodec_finds_no_ffmpeg_are_exported_as_they_are(lacking, run, tmp_path):
    if not gl.backend():
        pytest.skip("needs OpenGL: apt-get install libegl1 libosmesa6")
    environment = lacking()
    (tmp_path / "lacks/torchcodec").mkdir()
    (tmp_path / "lacks/torchcodec/__init__.py").write_text("raise RuntimeError('Could not load libtorchcodec')\n")
    words = [*COLLECT, "task.cameras=true", "wandb=false", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]']
    done = run(environment, *words)
    assert {side: status for side, (status, _) in done.items()} == {"learner": 0, "actor": 0}
    said = [line for _, lines in done.values() for line in lines]
    (sentence,) = [line for line in said if "apt-get" in line]
    assert "no video can be written and read here" in sentence
    assert "(apt-get install ffmpeg)" in sentence
    made = [shards.read_manifest(path.parent) for path in tmp_path.glob(f"run/datasets/demo/*/{MANIFEST}")]
    assert len(made) >= 2
    assert {manifest["images"]["stored_as"] for manifest in made} == {"image"}
