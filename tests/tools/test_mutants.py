"""The tool that plants small faults: what it draws, which tests it thinks are near, and what it says of them."""

import ast
import subprocess
import sys

import pytest

from tests.shared.common import ROOT
from tools import mutants

PRODUCT = '''"""A sum."""
LIMIT = 3


def added(a: int, b: int, most: int = LIMIT) -> int:
    if a + b > most and not a == 7:
        raise ValueError(f"{a} + {b}")
    return a + b
'''
TESTS = """from robot_infra.sums import added


def test_it_adds():
    assert added(1, 1) == 2
    assert added(1, 2) == 3
"""


@pytest.fixture
def tree(tmp_path):
    """A small product with one test."""
    tools = {name: (ROOT / name).read_text() for name in ("tools/mutants.py", "tools/processes.py")}
    for name, text in {"robot_infra/sums.py": PRODUCT, "tests/test_sums.py": TESTS, **tools}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).with_name("__init__.py").touch()
        (tmp_path / name).write_text(text)
    return tmp_path


def test_faults_are_drawn_by_their_seed_from_all_places_and_each_changes_what_the_code_means(tree):
    found = mutants.drawn(tree, 100, 3, "")
    assert found == mutants.drawn(tree, 100, 3, "")
    changes = {
        (fault.symbol, PRODUCT.encode()[fault.begin : fault.end].decode().strip(), fault.new.strip()) for fault in found
    }
    assert changes == {
        ("", "3", "4"), ("added", "+", "-"), ("added", ">", ">="), ("added", "==", "!="), ("added", "and", "or"),
        ("added", "7", "8"), ("added", "not a == 7", "(a == 7)"),
        ("added", "a + b > most and not a == 7", "not (a + b > most and not a == 7)"),
    }  # fmt: skip
    assert len({ast.dump(ast.parse(fault.planted(PRODUCT.encode()))) for fault in found}) == len(found)
    assert mutants.drawn(tree, 100, 3, "serl_launcher") == []


@pytest.mark.slow
def test_the_rate_and_the_survivors_are_told_and_the_same_command_goes_on(tree, monkeypatch, capsys):
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    monkeypatch.setattr(mutants, "ROOT", tree)
    words = ["--count", "3", "--seed", "6", "--out", str(tree / "out.jsonl")]
    mutants.main(words)
    said = capsys.readouterr().out
    assert "killed   robot_infra/sums.py:8 added: `+` -> `-` tests/test_sums.py::test_it_adds" in said
    assert "seed 6: 2 of 3 noticed. Survivors:\nrobot_infra/sums.py:6 added: `not a == 7` -> `(a == 7)`" in said
    monkeypatch.delattr(mutants, "noticed")
    mutants.main(words)
    assert capsys.readouterr().out == said


LOOP = '''"""A loop."""


def counted(left: int) -> int:
    while left:
        left = left - 1
    return left
'''
ENDS = """import resource
import time

from robot_infra.sums import counted


def test_it_ends():
    soon = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soon, soon))
    assert counted(1) == 0
"""


@pytest.mark.slow
def test_a_fault_that_makes_a_test_run_for_ever_is_noticed_and_told_apart(tree):
    (tree / "robot_infra/sums.py").write_text(LOOP)
    (tree / "tests/test_sums.py").write_text(ENDS)
    (fault,) = [fault for fault in mutants.drawn(tree, 100, 3, "") if fault.new.strip() == "+"]
    told = ("hangs", "tests/test_sums.py::test_it_ends")
    assert mutants.noticed(tree, fault, [tree / "tests/test_sums.py"]) == told


@pytest.mark.slow
def test_a_copy_is_what_its_processes_import(tmp_path):
    mutants.copy(ROOT, tmp_path / "tree")
    asks = "import robot_infra, serl_client, serl_launcher; print(robot_infra, serl_client, serl_launcher)"
    words = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asks!r}])"]
    there = mutants.environment(tmp_path / "tree")
    said = subprocess.run(words, env=there, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.count(str(tmp_path / "tree")) == 3
