"""A machine that lacks what a run could use: the run goes on with one sentence for each thing that is missing, which
says how to get it. What was asked for by name is refused: test_errors.

The real programs; a module is taken from them by a sitecustomize, which their children load, too.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from robot_infra.cameras import gl
from serl_launcher.datasets import shards
from serl_launcher.datasets.names import MANIFEST
from tests.shared.programs import Programs

COLLECT = ["task=sim_arm", "task.image_size=32", "plan=collect", "export.sources=all", "export.episodes=1"]
PRACTISE = [
    "task=sim_arm", "task.cameras=auto", "utd=1", "algo.hidden=[32,32]", "policy.hidden=[32,32]", "record=eval",
    "export.sources=all", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline",
    "plan.phases.practise.start_when='online.steps >= 20'",
    'plan.phases.practise.until=["env_steps >= 60 and updates >= 1"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """run(modules, *words) -> the lines of a learner and an actor where those cannot be imported, without an ffmpeg."""
    mine = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "MUJOCO_GL")}
    place = tmp_path / "lacks"
    place.mkdir()
    programs = Programs(tmp_path, mine | {"PYTHONPATH": str(place), "PATH": str(Path(sys.executable).parent)})

    def run(modules, *words):
        code = f"import sys\nfor name in {modules}:\n    sys.modules[name] = None\n"
        (place / "sitecustomize.py").write_text(code)
        programs.complete(words, words, 150.0)
        return programs.said().splitlines()

    yield run
    programs.end()


@pytest.mark.slow
def test_a_run_without_wandb_lerobot_rerun_av_gl_and_ffmpeg_ends_well_and_names_each_once(run, tmp_path):
    said = run(("wandb", "lerobot", "av", "torchcodec", "rerun", "OpenGL"), *PRACTISE)
    for what, how in {
        "wandb is not installed": "--extra wandb",
        "no datasets are written, because lerobot, av, torchcodec is not installed": "--extra data",
        "rerun is not installed": "--extra data",
        "can draw no camera images": "apt-get install libegl1 libosmesa6",
    }.items():
        (sentence,) = [line for line in said if what in line]
        assert how in sentence
    assert sum("install" in line for line in said) == 4
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["eval"]["episodes"], summary["env_steps"] >= 60, summary["updates"] > 0) == (2, True, True)


@pytest.mark.slow
@pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`")
def test_images_of_a_machine_whose_torchcodec_finds_no_ffmpeg_are_exported_as_they_are(run, tmp_path):
    if not gl.backend():
        pytest.skip("needs OpenGL: apt-get install libegl1 libosmesa6")
    (tmp_path / "lacks/torchcodec").mkdir()
    (tmp_path / "lacks/torchcodec/__init__.py").write_text("raise RuntimeError('Could not load libtorchcodec')\n")
    words = [*COLLECT, "task.cameras=true", "wandb=false", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]']
    (sentence,) = [line for line in run((), *words) if "apt-get" in line]
    assert "no video can be written and read here" in sentence
    assert "apt-get install ffmpeg" in sentence
    made = [shards.read_manifest(path.parent) for path in tmp_path.glob(f"run/datasets/demo/*/{MANIFEST}")]
    assert len(made) >= 2
    assert {manifest["images"]["stored_as"] for manifest in made} == {"image"}
