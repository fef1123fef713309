#!/usr/bin/env python
"""Lines per folder: code (without blank lines and comments), and the longest file and function of each."""

import argparse
import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    names = subprocess.run(["git", "ls-files", "*.py", "*.sh", "*.yaml"], cwd=ROOT, capture_output=True, text=True)
    folders: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name in names.stdout.split():
        path = ROOT / name
        folder = "/".join(path.relative_to(ROOT).parts[:2][: -1 if path.parent == ROOT else 2]) or "."
        folders[folder if (ROOT / folder).is_dir() else str(Path(folder).parent)].append(measure(path))
    total = 0
    for folder, files in sorted(folders.items()):
        lines = sum(count for count, _, _ in files)
        longest = max(files)
        function = max(longest_function for _, longest_function, _ in files)
        print(f"{lines:6} {folder:28} {len(files):3} files, longest {longest[0]} ({longest[2]}), function {function}")
        total += lines
    print(f"{total:6} in all")


def measure(path: Path) -> tuple[int, int, str]:
    """(lines of code, lines of the longest function, name)."""
    text = path.read_text()
    code = sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())
    functions = [0]
    if path.suffix == ".py":
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        functions += [(node.end_lineno or 0) - node.lineno + 1 for node in nodes]
    return code, max(functions), path.name


if __name__ == "__main__":
    main()
