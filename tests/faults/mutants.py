"""Runs the tests on each mutant of the files planted*.py: does any of them notice the fault?

    python -m tests.faults.mutants [ID ...] [--jobs N] [--out FILE]

Each mutant is planted in a copy of the files that git knows, as they are in the working tree now, and the tests of its
area, without the slow ones, run there up to the first failure. They run once without a mutant before; a test that
fails then kills nothing. FILE gets a line for each result, so that the same command goes on where it was stopped; lines
of another state of the tree do not count.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import planted, planted_learning, planted_replay, planted_robot

ROOT = Path(__file__).resolve().parents[2]
TABLE = planted.TABLE + planted_learning.TABLE + planted_replay.TABLE + planted_robot.TABLE
PRODUCT = ("packages/*/src/**/*.py", "robot_infra/**/*.py", "serl_launcher/**/*.py")
ENTRY = re.compile(r"^(\w+) (\w+) (\S+): (.+)\n((?: {4}- .+\n)+)((?: {4}\+ .+\n)+)", re.MULTILINE)
KNOWN = ("killed", "survives", "chance", "equivalent")
FAILED = "MUTANTS_FAILED"  # the environment's name of the file that gets the names of the tests that fail
LIMIT_S, LIMIT_TIMES = 60, 4  # a mutant hangs after this and so many times what its tests take without it

Places = Mapping[str, Sequence[tuple[Path, int, int]]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """An entry of planted.py; `tests` are the names of test files."""

    id: str
    known: str
    symbol: str
    meaning: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(table: str = TABLE) -> list[Mutant]:
    """All mutants, in order. Raises ValueError for what is no entry."""
    found = []
    for area in table.split("\n== ")[1:]:
        heading, _, entries = area.partition("\n")
        tests = tuple(heading.partition(": ")[2].split())
        for id, known, symbol, meaning, *texts in ENTRY.findall(entries):
            old, new = (re.sub("^ {4}[-+] ", "", text, flags=re.MULTILINE)[:-1] for text in texts)
            found.append(Mutant(id, known, symbol, meaning, old, new, tests))
        if rest := ENTRY.sub("", entries).strip():
            raise ValueError(f"no mutant: {rest}")
    return found


def symbols(root: Path) -> Places:
    """Find what the product defines: {function, class or Class.method: [(file, first line from 0 on, end)]}."""
    found = defaultdict(list)
    for file in sorted(file for pattern in PRODUCT for file in root.glob(pattern)):
        for name, node in _named(ast.parse(file.read_text()), ""):
            found[name].append((file, min(n.lineno for n in (node, *node.decorator_list)) - 1, node.end_lineno or 0))
    return found


def _named(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _named(node, f"{prefix}{node.name}.")


def plant(mutant: Mutant, places: Places) -> tuple[Path, str]:
    """Return (file, its text with the mutant). Raises ValueError where the mutant does not apply: its text does not
    occur exactly once, or the result is no Python or means the same."""
    fits = []
    for file, begin, end in places.get(mutant.symbol, ()):
        text = file.read_text()
        lines = text.splitlines(keepends=True)
        first, last = len("".join(lines[:begin])), len("".join(lines[:end]))
        for match in re.finditer(re.escape(mutant.old.split("\n")[0]), text[first:last]):
            at = first + match.start()
            line = text[text.rindex("\n", 0, at) + 1 :]
            margin = "\n" + line[: len(line) - len(line.lstrip(" "))]
            old, new = mutant.old.replace("\n", margin), mutant.new.replace("\n", margin)
            if text.startswith(old, at):
                fits.append((file, text, text[:at] + new + text[at + len(old) :]))
    if len(fits) != 1:
        raise ValueError(f"{mutant.id} does not apply: its text occurs {len(fits)} times in {mutant.symbol}")
    file, before, after = fits[0]
    try:
        if ast.dump(ast.parse(before)) == ast.dump(ast.parse(after)):
            raise ValueError(f"{mutant.id} does not apply: it changes nothing")
    except SyntaxError as error:
        raise ValueError(f"{mutant.id} does not apply: {error}") from None
    return file, after


def misfits(mutants: Sequence[Mutant], places: Places) -> dict[str, str]:
    """{id: why} of the mutants that do not apply."""
    found = {}
    for mutant in mutants:
        try:
            plant(mutant, places)
        except ValueError as error:
            found[mutant.id] = str(error)
    return found


def pytest_runtest_logreport(report: Any) -> None:
    """Write down a test that fails: pytest loads this file as a plugin in each copy."""
    if report.failed:
        with Path(os.environ[FAILED]).open("a") as file:
            print(report.nodeid, file=file)


def pytest_collectreport(report: Any) -> None:
    pytest_runtest_logreport(report)


def copy(root: Path, into: Path) -> str:
    """Copy the files that git knows. Returns a hash of them all but pages and pictures."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256()
    for name in sorted(name for name in names.split("\0") if name and (root / name).is_file()):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, into / name)
        if Path(name).suffix not in (".md", ".png", ".gif"):
            digest.update(f"{name}\0".encode() + (into / name).read_bytes())
    (into / ".venv").symlink_to(sys.prefix)
    return digest.hexdigest()[:12]


def environment(root: Path) -> dict[str, str]:
    """Return an environment in which a process, and each one that it starts, imports the product from this tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, *root.glob("packages/*/src"))))}


class Runs:
    """Runs tests in copies of a tree, and keeps the results in a file."""

    def __init__(self, tree: Path, version: str, out: Path) -> None:
        self.tree, self.version, self.out = tree, version, out
        self.places = symbols(tree)
        rows = map(json.loads, out.read_text().splitlines()) if out.exists() else ()
        self.rows: dict[str, dict[str, Any]] = {row["id"]: row for row in rows if row["tree"] == version}

    def keep(self, name: str, result: str, failed: Sequence[str], seconds: float) -> None:
        row = {"id": name, "result": result, "failed": failed, "seconds": round(seconds, 1), "tree": self.version}
        self.rows[name] = row
        with self.out.open("a") as file:
            print(json.dumps(row), file=file)
        print(f"{name:4} {result} {row['seconds']} s {' '.join(failed)}", flush=True)

    def unmutated(self, name: str) -> None:
        """Run one test file without a mutant."""
        code, failed, seconds, said = self._run(None, [name], [], None)
        if code not in (0, 1, 5):  # 5: all its tests are slow
            raise SystemExit(f"{name} does not run:\n{said[-2000:]}")
        self.keep(name, "unmutated", failed, seconds)

    def mutated(self, mutant: Mutant) -> None:
        """Run the tests of a mutant until one fails; a file that cannot be imported any more is a failure, too."""
        known = [self.rows[name] for name in mutant.tests]
        limit = LIMIT_S + LIMIT_TIMES * sum(row["seconds"] for row in known)
        left_out = [name for row in known for name in row["failed"]]
        code, failed, seconds, _ = self._run(mutant, mutant.tests, left_out, limit)
        if code in (0, 5):
            self.keep(mutant.id, "survives", [], seconds)
        elif code is None:
            self.keep(mutant.id, "timeout", failed, seconds)
        else:
            self.keep(mutant.id, "killed", failed or [f"exit code {code}"], seconds)

    def _run(
        self, mutant: Mutant | None, tests: Sequence[str], left_out: Sequence[str], limit: float | None
    ) -> tuple[int | None, list[str], float, str]:  # fmt: skip
        """Run pytest. Returns (exit code, or None after `limit` seconds; tests that failed; seconds; its output)."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            root, failed, said = (Path(folder) / name for name in ("tree", "failed", "said"))
            shutil.copytree(self.tree, root, symlinks=True)
            failed.touch()
            if mutant:
                file, text = plant(mutant, self.places)
                (root / file.relative_to(self.tree)).write_text(text)
            words = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "tests.faults.mutants"]
            words += ["-x"] * bool(mutant) + [f"--deselect={name}" for name in left_out]
            files = [str(path.relative_to(root)) for name in tests for path in (root / "tests").rglob(f"{name}.py")]
            begin = time.monotonic()
            with said.open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *words, *files], cwd=root, env={**environment(root), FAILED: str(failed)},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
                try:
                    code = process.wait(limit)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            return code, failed.read_text().splitlines(), time.monotonic() - begin, said.read_text()


def summary(mutants: Sequence[Mutant], rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Print what differs from the known results. Returns whether no kill was lost."""
    groups = defaultdict(list)
    for mutant in mutants:
        groups[mutant.known, rows[mutant.id]["result"] != "survives"].append(mutant)
    print(f"\n{sum(len(group) for (_, killed), group in groups.items() if killed)} of {len(mutants)} killed")
    for title, known, killed in (
        ("kills lost", "killed", False), ("survivors now killed", "survives", True),
        ("still survive", "survives", False), ("killed by chance then, and now", "chance", True),
        ("killed by chance then, survive now", "chance", False), ("equivalent, and yet killed", "equivalent", True),
    ):  # fmt: skip
        print(f"{title}: {len(groups[known, killed])}")
        for mutant in groups[known, killed]:
            print(f"    {mutant.id:3} {mutant.symbol}: {mutant.meaning} {' '.join(rows[mutant.id]['failed'])}")
    return not groups["killed", False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="mutants of planted.py; none: all of them")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants.jsonl", help="the file of results")
    options = parser.parse_args()
    mutants = [mutant for mutant in read() if mutant.id in options.ids or not options.ids]
    if unknown := set(options.ids) - {mutant.id for mutant in mutants}:
        parser.error(f"no mutants: {' '.join(sorted(unknown))}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        runs = Runs(Path(folder), copy(ROOT, Path(folder)), options.out)
        wrong = misfits(mutants, runs.places)
        mutants = [mutant for mutant in mutants if mutant.id not in wrong]
        files = dict.fromkeys(name for mutant in mutants for name in mutant.tests)
        list(pool.map(runs.unmutated, [name for name in files if name not in runs.rows]))
        list(pool.map(runs.mutated, [mutant for mutant in mutants if mutant.id not in runs.rows]))
    kept = summary(mutants, runs.rows)
    print(*wrong.values(), sep="\n")
    sys.exit(0 if kept and not wrong else 1)


if __name__ == "__main__":
    main()
