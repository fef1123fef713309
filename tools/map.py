#!/usr/bin/env python
"""Writes docs/reference/map.md, "Where do I change X": the first sentence of each file, room by room."""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import groupby
from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "packages/serl_client/src/serl_client"
SIDES = CLIENT, ROOT / "robot_infra", ROOT / "serl_launcher"
FILES = sorted((path for side in SIDES for path in side.rglob("*.py")), key=lambda path: (path.parent, path.name))
TOOLS = [*sorted((ROOT / "tools").glob("*.py")), ROOT / "examples/train.py"]
PAGE = ROOT / "docs/reference/map.md"
HEAD = """# Where do I change X

Search this page for a word of your question, such as `wandb`, `camera` or `entropy`. `tools/map.py` writes it,
from the first sentence of each file. [architecture.md](../concepts/architecture.md) says how the folders belong
together.

| settings | what they say | one of |
|---|---|---|"""
SETTINGS = {  # a file of config/, or a folder there
    "base.yaml": "ports, keys, GPUs, seed, wandb, checkpoints, random steps, evaluations, chunks, deadline, judge",
    "algo": "learning rate, discount, tau, target entropy, batch size, UTD ratio, loss weights, image augmentation",
    "critic": "critics: size of the ensemble, layers, distribution of values, minimum for targets",
    "head": "how action chunks are sampled: denoising steps, noise",
    "network": "the network over action chunks: widths, depth",
    "plan": "phases, shares of a batch (demonstrations, online), replay capacity, how often weights are published",
    "policy": "action horizon (chunk length), history of frames, cameras, encoder, scale of actions, PI0, LoRA",
    "robot": "the arms of task=dobot_pnp",
    "sharding": "how weights are spread over GPUs (ZeRO)",
    "source": "a dataset that fills a source of a plan: its units, names, crop, size, rate",
    "task": "control rate (fps), episode length, joint limits, home, camera crop, prompt, action space, devices",
}


def module(path: Path) -> str:
    """Return the full name of a module."""
    base = CLIENT.parent if path.is_relative_to(CLIENT) else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    """Yield the full names of what a module imports: also inside a function, or for its types alone."""
    package = module(path).split(".")[: None if path.stem == "__init__" else -1]
    for node in ast.walk(tree or parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join(filter(None, [*above, node.module, alias.name])) for alias in node.names)


def room(name: str) -> str:
    """Return the folder of a module, two names deep; serl_client is one room, and so is a module beside the folders."""
    side, *inside = name.split(".")
    return side if side == "serl_client" else ".".join([side, *inside[:1]])


def arrows() -> dict[str, set[str]]:
    """Return {room: the rooms that it imports}."""
    known, found = {module(path) for path in FILES}, defaultdict[str, set[str]](set)
    for path in FILES:
        here = room(module(path))
        there = {other if other in known else other.rpartition(".")[0] for other in imports(path)} & known
        found[here] |= {room(other) for other in there} - {here}
    return found


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, in one line; empty without one."""
    said = " ".join((ast.get_docstring(parsed(path)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])(?<!et al\.)(?<!e\.g\.)(?<!i\.e\.) (?=[A-Z`])", said)[0]


def page() -> str:
    """Return what docs/reference/map.md should be."""
    lines = [HEAD]
    for name, text in SETTINGS.items():
        names = ", ".join(sorted(path.stem for path in (ROOT / "config" / name).glob("*.yaml")))
        lines.append(f"| config/{name} | {text} | {names} |")
    for folder, paths in groupby([*FILES, *TOOLS], attrgetter("parent")):
        lines += [f"\n## {folder.relative_to(ROOT)}\n", "| file | what it does |", "|---|---|"]
        lines += [f"| {path.name} | {sentence(path)} |" for path in paths if path.name != "__init__.py"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrows", action="store_true", help="print which room imports which; a circle is an error")
    if not parser.parse_args().arrows:
        PAGE.write_text(page())
        return
    for name, others in sorted((found := arrows()).items()):
        print(f"{name:32} -> {', '.join(sorted(others)) or 'nothing'}")
    print(f"{sum(map(len, found.values()))} arrows between {len(found)} rooms")
    TopologicalSorter(found).prepare()  # its CycleError names a circle


if __name__ == "__main__":
    main()
