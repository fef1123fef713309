"""The mutants fit the code of today, and their runner imports the code that it has changed."""

import subprocess
import sys

from tests.faults.mutants import KNOWN, ROOT, Mutant, copy, environment, misfits, read, symbols

MUTANTS = read()


def test_every_mutant_applies():
    """Where this fails, the code has changed: write the mutant anew, with the same meaning."""
    wrong = misfits(MUTANTS, symbols(ROOT))
    assert not wrong, "\n".join(wrong.values())


def test_a_mutant_that_does_not_apply_is_named(tmp_path):
    (tmp_path / "robot_infra").mkdir()
    (tmp_path / "robot_infra/sum.py").write_text("class Sum:\n    def of(self):\n        return 1 + 1\n")
    changes = {"fits": ("1 + 1", "2"), "gone": ("2", "3"), "often": ("1", "2"), "same": ("1 + 1", "(1 + 1)"),
               "broken": ("1 + 1", "(")}  # fmt: skip
    mutants = [Mutant(name, "killed", "Sum.of", "", old, new, ()) for name, (old, new) in changes.items()]
    assert misfits(mutants, symbols(tmp_path)).keys() == changes.keys() - {"fits"}


def test_ids_are_unique_and_each_mutant_has_test_files():
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.known for mutant in MUTANTS} <= set(KNOWN)
    there = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert not {name for mutant in MUTANTS for name in mutant.tests} - there


def test_a_copy_is_what_its_processes_import(tmp_path):
    copy(ROOT, tmp_path / "tree")
    asks = "import robot_infra, serl_client, serl_launcher; print(robot_infra, serl_client, serl_launcher)"
    words = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asks!r}])"]
    there = environment(tmp_path / "tree")
    said = subprocess.run(words, env=there, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.count(str(tmp_path / "tree")) == 3
