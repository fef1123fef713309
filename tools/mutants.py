#!/usr/bin/env python
"""Draws random small faults of the product (mutation testing), and says how many of them the nearest tests notice.

tools/mutants.py [--count 100] [--seed 0] [--jobs 1] [--only PATTERN] [--out runs/mutants.jsonl]

Each fault changes a comparison, an operator, a number or a condition, or leaves a statement out, at a place drawn from
all of the product, or from files whose path has PATTERN in it. It lies in a copy of the files that git knows, as they
are now. The nearest test files run there, slow tests last, until a test fails or 30 CPU seconds are spent. OUT gets a
line for each fault, so that the same command goes on where it was stopped; lines of another state of the tree do not
count. At the end stand the rate, and each survivor with its place: it is equivalent, or lacks a test.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.processes import ended, start

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("packages/*/src/**/*.py", "robot_infra/**/*.py", "serl_launcher/**/*.py")
CPU_S, WALL_S, HANGS_S = 30, 900, 15  # of one fault's tests; a single fast test that takes so much CPU time hangs
FILES = 16  # test files that run for a fault
MARKS = "not nightly and not manual and not program"
NO_TESTS, CONFTEST = 5, "while loading conftest"  # what pytest says: its status; that it could not even begin
STARTED = "MUTANTS_STARTED"  # the environment's name of the file that gets a line for each test as it starts
SWAPS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of one file: `new` takes the place of the text from `begin` to `end`, in bytes."""

    path: str
    symbol: str
    line: int
    begin: int
    end: int
    new: str

    def planted(self, text: bytes) -> bytes:
        return text[: self.begin] + self.new.encode() + text[self.end :]


class Places(ast.NodeVisitor):
    """Collects each place of a file where a fault can be, as `found`."""

    def __init__(self, path: str, text: bytes) -> None:
        self.path, self.text, self.found = path, text, list[Fault]()
        self._symbol: list[str] = []
        self._lines = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
        self.visit(ast.parse(text))

    def visit_FunctionDef(self, node: Any) -> None:
        self._symbol.append(node.name)
        for each in (*getattr(getattr(node, "args", None), "defaults", ()), *node.body):
            self.visit(each)
        self._symbol.pop()

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.AST) -> None:
        """What an error says is no behaviour."""

    visit_JoinedStr = visit_Raise

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self._said(node.value).startswith("log."):
            self._add(node, "pass")
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        self.visit(node.value)

    def visit_If(self, node: Any) -> None:
        self._add(node.test, f"not ({self._said(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "break")

    def visit_Compare(self, node: ast.Compare) -> None:
        self._swap(node, node.left, node.ops[0], node.comparators[0])

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap(node, node.left, node.op, node.right)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap(node, node.values[0], node.op, node.values[1])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({self._said(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, str(node.value + 1 if isinstance(node.value, int) else node.value * 2))

    def _swap(self, node: ast.expr, left: ast.expr, operator: Any, right: ast.expr) -> None:
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.text[begin:end].decode()
        changed, count = re.subn(r"[^\s()#]+(?: (?:not|in))?", SWAPS.get(type(operator), ""), between, count=1)
        if count and type(operator) in SWAPS:
            self._keep(node.lineno, begin, end, changed)
        self.generic_visit(node)

    def _add(self, node: Any, new: str) -> None:
        self._keep(node.lineno, *self._span(node), new)

    def _keep(self, line: int, begin: int, end: int, new: str) -> None:
        self.found.append(Fault(self.path, ".".join(self._symbol), line, begin, end, new))

    def _said(self, node: Any) -> str:
        begin, end = self._span(node)
        return self.text[begin:end].decode()

    def _span(self, node: Any) -> tuple[int, int]:
        lines = self._lines
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset


def drawn(tree: Path, count: int, seed: int, only: str) -> list[Fault]:
    """Draw faults, each in a place of its own; those that are no Python or change nothing are drawn again."""
    texts = {
        str(file.relative_to(tree)): file.read_bytes()
        for pattern in PRODUCT for file in sorted(tree.glob(pattern)) if only in str(file.relative_to(tree))
    }  # fmt: skip
    places = [fault for path, text in texts.items() for fault in Places(path, text).found]
    random.Random(seed).shuffle(places)
    found = (fault for fault in places if _counts(texts[fault.path], fault))
    return [fault for fault, _ in zip(found, range(count), strict=False)]


def _counts(text: bytes, fault: Fault) -> bool:
    with suppress(SyntaxError):
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(fault.planted(text)))
    return False


class Nearest:
    """Ranks the test files of a tree by how near they are to a place of the product."""

    def __init__(self, tree: Path) -> None:
        self._texts = {file: file.read_text() for file in sorted((tree / "tests").rglob("test_*.py"))}

    def to(self, fault: Fault) -> list[Path]:
        """Return the files to run, the nearest first: they name the symbol, its module, or its folder."""
        path = Path(fault.path)
        module, names = path.stem, fault.symbol.split(".")
        dotted = ".".join(path.with_suffix("").parts).partition("src.")[2] or ".".join(path.with_suffix("").parts)
        package = dotted.rpartition(".")[0]
        score = {}
        for file, text in self._texts.items():
            imports = dotted in text or re.search(rf"from {package} import [^\n]*\b{module}\b", text) is not None
            score[file] = (
                4 * (file.stem.removeprefix("test_") == module)
                + 3 * imports
                + sum(bool(name) and re.search(rf"\b{name}\b", text) is not None for name in names)
                + (file.parent.name in fault.path)
                - len(text) / 1e6
            )
        near = sorted((file for file, points in score.items() if points > 0.5), key=lambda file: -score[file])
        return near[:FILES]


# -- running them


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run slow tests last: pytest loads this file as a plugin in each copy."""
    items.sort(key=_slow)


def pytest_runtest_protocol(item: Any) -> None:
    """Write down each test as it starts: the CPU time, whether it is slow, its name."""
    with Path(os.environ[STARTED]).open("a") as file:
        print(time.process_time(), int(_slow(item)), item.nodeid, file=file)


def _slow(item: Any) -> bool:
    return item.get_closest_marker("slow") is not None


def copy(root: Path, into: Path) -> str:
    """Copy the files that git knows. Returns a hash of all Python and yaml files."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256()
    for name in sorted(name for name in names.split("\0") if name and (root / name).is_file()):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, into / name)
        if Path(name).suffix in (".py", ".yaml"):
            digest.update(f"{name}\0".encode() + (into / name).read_bytes())
    (into / ".venv").symlink_to(sys.prefix)
    return digest.hexdigest()[:12]


def environment(root: Path) -> dict[str, str]:
    """Return an environment in which a process, and each one that it starts, imports the product from this tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, *root.glob("packages/*/src"))))}


def noticed(tree: Path, fault: Fault, tests: Sequence[Path]) -> tuple[str, str]:
    """Run tests in a copy with the fault. Returns (killed, hangs or survives, the last test that ran)."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root, started, said = (Path(folder) / name for name in ("tree", "started", "said"))
        shutil.copytree(tree, root, symlinks=True)
        (root / fault.path).write_bytes(fault.planted((root / fault.path).read_bytes()))
        started.touch()
        words = ["-m", "pytest", "-qx", "-m", MARKS, "-p", "no:cacheprovider", "-p", "tools.mutants"]
        words += [str(root / test.relative_to(tree)) for test in tests]
        with said.open("w") as log:
            limited = ["bash", "-c", f'ulimit -t {CPU_S}; exec "$@"', "-", sys.executable, *words]
            code = ended(start(limited, log, cwd=root, env={**environment(root), STARTED: str(started)}), WALL_S)
        lines = started.read_text().splitlines()
        if code in (3, 4) and CONFTEST not in said.read_text():  # pytest itself fails
            raise SystemExit(said.read_text()[-2000:])
    at, slow, last = lines[-1].split(" ", 2) if lines else ("0", "0", "the import")
    if code is not None and code > 0 and code != NO_TESTS:
        return "killed", last
    if code is None or (code < 0 and CPU_S - float(at) > HANGS_S):
        return ("survives", "") if int(slow) else ("hangs", last)
    return "survives", ""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--only", default="", metavar="PATTERN", help="faults of files whose path has this in it")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants.jsonl")
    options = parser.parse_args(words)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        tree = Path(folder)
        version = copy(ROOT, tree)
        faults, nearest = drawn(tree, options.count, options.seed, options.only), Nearest(tree)
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        kept = (row for row in map(json.loads, lines) if row["tree"] == version)
        rows = {(row["path"], row["begin"], row["new"]): row for row in kept}

        def tried(fault: Fault) -> dict[str, Any]:
            if (row := rows.get((fault.path, fault.begin, fault.new))) is None:
                result, test = noticed(tree, fault, nearest.to(fault))
                old = (tree / fault.path).read_bytes()[fault.begin : fault.end].decode()
                row = {"tree": version, "result": result, "test": test, "old": old}
                row |= {name: getattr(fault, name) for name in Fault.__slots__}
                with options.out.open("a") as file:
                    print(json.dumps(row), file=file)
            print(f"{row['result']:8} {_told(row)}", flush=True)
            return row

        found = list(pool.map(tried, faults))
    left = [row for row in found if row["result"] == "survives"]
    print(f"\nseed {options.seed}: {len(found) - len(left)} of {len(found)} noticed. Survivors:")
    print(*map(_told, left), sep="\n")


def _told(row: dict[str, Any]) -> str:
    old, new = (" ".join(row[name].split())[:70] for name in ("old", "new"))
    return f"{row['path']}:{row['line']} {row['symbol']}: `{old}` -> `{new}` {row['test']}"


if __name__ == "__main__":
    main()
