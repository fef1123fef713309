"""A machine that lacks what a run could use: the run goes on with one sentence for each thing that is missing, which
says how to get it. What was asked for by name is refused: test_errors.

The real programs; a module is taken from them by a sitecustomize, which their children load, too.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.shared.programs import Programs

LACKS = ("wandb", "lerobot", "av", "torchcodec", "rerun", "OpenGL")
PRACTISE = [
    "task=sim_arm", "task.cameras=auto", "utd=1", "critic.hidden=[32,32]", "policy.hidden=[32,32]", "record=eval",
    "export.sources=all", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline",
    "plan.phases.practise.start_when='online.steps >= 20'",
    'plan.phases.practise.until=["env_steps >= 60 and updates >= 1"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


@pytest.mark.slow
def test_a_run_without_wandb_lerobot_rerun_av_gl_and_ffmpeg_ends_well_and_names_each_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({LACKS})\n")
    mine = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "MUJOCO_GL")}
    mine |= {"PYTHONPATH": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    with Programs(tmp_path, mine) as programs:
        programs.complete(PRACTISE, PRACTISE)
    said = programs.said().splitlines()
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
