#!/usr/bin/env python
"""Writes docs/reference/errors.md: what a start, a resume, a handshake or the doctor may refuse, in its own words.

The texts are read from the syntax trees, so none is forgotten.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.map import FILES, ROOT, parsed

PAGE = ROOT / "docs/reference/errors.md"
HEAD = """# Errors
Each refusal says its cause and what to do about it. Search this page for a few words of yours. `...` stands for what
the message fills in. `tools/errors.py` writes the page from the code; the file is where to read on."""
OTHERS = (
    path for place in ("examples/*.py", "examples/*/*_actor/*.py", "tools/checks/*.py") for path in ROOT.glob(place)
)
READ = [*FILES, *sorted(OTHERS)]
KINDS = {  # what refuses: which of its arguments a person reads
    **dict.fromkeys(("ConfigError", "Refused", "Replaced", "VersionMismatch", "Disconnected", "Timeout"), slice(1)),
    "Look": slice(1, 3), "Finding": slice(1, 3),
}  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())


def page() -> str:
    """Return what docs/reference/errors.md should be."""
    found = sorted({(place.partition(":")[0], text) for place, text in refusals()})
    lines = [HEAD]
    for folder, members in groupby(found, lambda each: each[0].rpartition("/")[0]):
        lines += [f"\n## {folder}\n", "| message | file |", "|---|---|"]
        for place, text in members:
            said = re.sub(r"(\{\})+", "...", " ".join(text.split())).replace("|", "\\|").replace("<", "&lt;")
            said = said.replace("`", "")  # tools/readme.py would give what is marked as a command
            lines.append(f"| {said} | {place.rpartition('/')[2]} |")
    return "\n".join(lines) + "\n"


def assigned(statements: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """What is given these names, the later for the earlier."""
    found = [node for node in statements if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): node.value for node in sorted(found, key=lambda node: node.lineno)}


def constants() -> dict[str, ast.expr]:
    """What the files give names, but for a name to which two of them give different values."""
    found = defaultdict[str, list[ast.expr]](list)
    for file in READ:
        for name, value in assigned(parsed(file).body).items():
            found[name].append(value)
    return {name: values[0] for name, values in found.items() if len({*map(ast.unparse, values)}) == 1}


def texts(node: ast.expr, names: Mapping[str, ast.expr]) -> list[str]:
    """What an expression may say, with {} for what is known only where it runs."""
    match node:
        case ast.Constant(value):
            return [str(value)]
        case ast.JoinedStr(values) | ast.List(values) | ast.Tuple(values):
            return ["".join(each) for each in product(*(texts(value, names) for value in values))]
        case ast.BinOp(left, ast.Add() | ast.Mult() | ast.Mod(), right):
            return ["".join(each) for each in product(texts(left, names), texts(right, names))]
        case ast.IfExp(_, one, other):
            return texts(one, names) + texts(other, names)
        case ast.Dict(_, values):
            return [text for value in values for text in texts(value, names)]
        case ast.Name(name) if name in names:
            return texts(names[name], {known: value for known, value in names.items() if known != name})
        case ast.Call(ast.Attribute(gap, "join"), [value]):
            return joined(gap, value, names)
        case (
            ast.FormattedValue(value) | ast.GeneratorExp(value) | ast.Subscript(value, ast.Name() | ast.Attribute())
            | ast.Call(ast.Attribute(value, "format"))
        ):  # fmt: skip
            return texts(value, names)
    return ["{}"]


def joined(gap: ast.expr, value: ast.expr, names: Mapping[str, ast.expr]) -> list[str]:
    """What `gap.join(value)` may say."""
    members = names.get(value.id) if isinstance(value, ast.Name) else value
    if not isinstance(members, ast.List | ast.Tuple):
        return texts(value, names)
    (between,) = texts(gap, names)
    return [between.join(each) for each in product(*(texts(member, names) for member in members.elts))]


def refusals() -> Iterator[tuple[str, str]]:
    """(file:line, text) of each refusal that says anything of its own."""
    every = constants()
    for file in READ:
        tree, place = parsed(file), file.relative_to(ROOT)
        for around in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(around):
                if not isinstance(node, ast.Call) or (kind := getattr(node.func, "id", "")) not in KINDS:
                    continue
                arguments = node.args[KINDS[kind]]
                if kind in ("Look", "Finding") and ast.unparse(node.args[0]) in ("True", "'ok'"):
                    continue
                here = assigned(each for each in ast.walk(around) if getattr(each, "lineno", node.lineno) < node.lineno)
                for said in product(*(texts(argument, every | assigned(tree.body) | here) for argument in arguments)):
                    text = ": ".join(filter(None, said))
                    if re.search(r"\w", text.replace("{}", "")) and (kind != "Finding" or len(said) < 2 or said[1]):
                        yield f"{place}:{node.lineno}", text


if __name__ == "__main__":
    main()
