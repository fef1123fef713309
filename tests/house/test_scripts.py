"""Each script of an experiment asks for a run that can be made of its words."""

import shutil
import subprocess

import pytest

from serl_launcher.training.plan_reader import plan_of
from tests.shared.models import CONFIG, config_of

EXAMPLES = CONFIG.parent / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("experiments/*/run_*.sh"))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """said(script) -> the words with which it starts examples/train.py."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(EXAMPLES, root / "examples", ignore=shutil.ignore_patterns(".venv"))
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)

    def said(script):
        answer = subprocess.run(["bash", script], cwd=root / "examples", capture_output=True, text=True, check=True)
        program, *words = answer.stdout.splitlines()
        assert program == "examples/train.py"
        return words

    return said


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=[pytest.mark.slow] * bool(i % 6)) for i, each in enumerate(SCRIPTS)]
)
def test_a_scripts_words_make_a_run(script, said):
    side, *words = said(script)
    assert side == ("learner=true" if "run_learner" in script else "actor=true")
    assert plan_of(config_of(*words)).phases
