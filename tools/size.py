#!/usr/bin/env python
"""Counts lines of code per folder, without blank lines and comments, and the longest file and function of each.

Then the bytes of all files that git tracks, and how many lines tests and tools have for each line of the product.
"""

import argparse
import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT, PROOF = ("packages", "robot_infra", "serl_launcher"), ("tests", "tools")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name and (ROOT / name).exists()]  # others are not yet committed
    folders: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for path in paths:
        if path.suffix in (".py", ".sh", ".yaml"):
            folders["/".join(path.relative_to(ROOT).parts[:-1][:2]) or "."].append(measure(path))
    total, part = 0, {"product": 0, "proof": 0}
    for folder, files in sorted(folders.items()):
        lines = sum(count for count, _, _ in files)
        longest = max(files)
        function = max(longest_function for _, longest_function, _ in files)
        print(f"{lines:6} {folder:28} {len(files):3} files, longest {longest[0]} ({longest[2]}), function {function}")
        total += lines
        if folder.startswith((*PRODUCT, *PROOF)):
            part["proof" if folder.startswith(PROOF) else "product"] += lines
    print(f"{total:6} in all")
    size = sum(path.lstat().st_size for path in paths)
    print(f"{size / 1e6:6.2f} MB in {len(names) - 1} tracked files")
    print(f"{part['proof'] / part['product']:6.2f} lines of tests and tools for each line of the product")


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
