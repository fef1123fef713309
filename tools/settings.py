#!/usr/bin/env python
"""Write docs/reference/settings.md: each setting of config/ with its default, unit, meaning and reader.

The meaning is a comment in the yaml: on the setting's own line, or in whole lines directly above it. The comment on a
map of one line is for all of its settings, or for those that it names: `# speed: ...; jump: ...`. A setting needs none
if a yaml that this one continues, or that base.yaml chooses, explains the same name to the same reader.
"""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIG, BASE, PAGE = ROOT / "config", ROOT / "config/base.yaml", ROOT / "docs/reference/settings.md"
NAMED = {"phases": "<phase>", **dict.fromkeys(("sources", "data"), "<source>"), "cameras": "<camera>"}
NAMED |= dict.fromkeys(("limits", "home"), "<joint>")  # {map whose keys are free: what stands for a key}
UNIT = re.compile(
    r"((milli)?seconds|GB|pixels|radians|degrees|percent|episodes|(environment )?steps( per second)?"
    r"|set points per second|updates( per environment step)?)\b"
)
USED = re.compile(r"\bconfig\.([\w.]+)|(?:\bconfig\[|config, |WHERE = )\"([\w.]+)\"|\$\{([\w.]+)\}")
HEAD = """# Settings
`tools/settings.py` writes this page from the comments in `config/`. The command line says a setting by its name, as in
`seed=1`, and a yaml of a group as in the headings. A yaml's table shows what it adds to the yamls that it continues,
and what it changes. `<phase>`, `<source>`, `<camera>` and `<joint>` stand for names that the yaml or the robot has."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())


def page() -> str:
    parts = [HEAD, "\n## config/base.yaml", heading(BASE), *table(BASE)]
    for group in sorted(path for path in CONFIG.iterdir() if path.is_dir()):
        parts.append(f"\n## {group.name}")
        files, is_plan = sorted(group.glob("*.yaml")), group.name == "plan"
        for file in files:
            parts += [f"\n### {group.name}={file.stem}", heading(file), *([] if is_plan else table(file))]
        if is_plan:  # each has the same names
            parts += ["\n### What a plan says", "Defaults are examples.", *table(*files)]
    return "\n".join(parts) + "\n"


def heading(file: Path) -> str:
    """Return the comment with which a yaml begins."""
    found: Any = re.match(r"(?:# @package.*\n)?((?:#.*\n)*)", file.read_text())
    return re.sub("^# ", "", found[1], flags=re.MULTILINE).rstrip()


def table(*files: Path) -> list[str]:
    """Return the lines of a table of what these yamls set, without what only repeats another setting."""
    rows: dict[str, str] = {}
    for file, name in ((each, name) for each in files for name in settings(each)):
        default, text = settings(file)[name][0], meaning(file, name)
        if not name.endswith("_target_") and (text or not default.startswith("${")):
            unit = UNIT.match(text)
            cells = f"`{name}`", f"`{default}`", unit[0] if unit else "", text, reader(file, name)
            row = "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
            rows.setdefault(name, row)
    found = [rows[name] for name in (sorted(rows) if len(files) > 1 else rows)]
    return ["", "| name | default | unit | meaning | read by |", "|---|---|---|---|---|", *found] if found else []


def meaning(file: Path, name: str) -> str:
    """Return the comment on a setting: the yaml's own, else the nearest one of another yaml; or an empty text."""
    those = [other for other in chain(file) if name in settings(other) and reader(other, name) == reader(file, name)]
    return next((settings(other)[name][1] for other in those if settings(other)[name][1]), "")


def reader(file: Path, name: str) -> str:
    """Return the class or function of the nearest `_target_` around a setting; else what uses the setting."""
    *above, _ = name.split(".")
    for place in (".".join([*above[:count], "_target_"]) for count in range(len(above), 0, -1)):
        for target in (settings(other)[place][0] for other in chain(file) if place in settings(other)):
            return re.findall(r"[A-Z]\w*$|\w+\.[a-z]\w*$", target)[0]
    places = [place for place, names in used().items() if name in names]
    return ", ".join(places) if places or not above else reader(file, ".".join(above))


@cache
def used() -> dict[str, set[str]]:
    """Return {module, or group of yamls: names of the settings that stand in it}."""
    found: dict[str, set[str]] = {}
    modules = ROOT / "examples/train.py", *sorted((ROOT / "serl_launcher").rglob("*.py"))
    for path in (*modules, BASE, *sorted(CONFIG.glob("*/*.yaml"))):
        place = str((path.parent if path.suffix == ".yaml" else path).relative_to(ROOT)).removeprefix("serl_launcher/")
        found.setdefault(place, set()).update("".join(each) for each in USED.findall(path.read_text()))
    del found["config.py"]  # which reads each of them
    return found


def chain(file: Path) -> tuple[Path, ...]:
    """Return the yamls that explain this one: itself, those below it, and what base.yaml chooses."""
    return file, *below(file), BASE, *below(BASE)


@cache
def below(file: Path) -> tuple[Path, ...]:
    """Return the yamls that this one continues and chooses, nearest first."""
    found = []
    for entry in yaml.safe_load(file.read_text()).get("defaults", []):
        group, name = next(iter(entry.items())) if isinstance(entry, dict) else (file.parent.name, entry)
        if name not in (None, "_self_"):
            found.append(CONFIG / re.sub("override |/|@.*", "", group) / f"{name}.yaml")
    return tuple(dict.fromkeys([*found, *(one for each in found for one in below(each))]))


@cache
def settings(file: Path) -> dict[str, tuple[str, str]]:
    """Return {name: (default, comment)} of what the yaml sets."""
    package = re.match(r"# @package (\S+)", file.read_text())
    prefix = package[1].replace("_global_", "") if package else "" if file == BASE else file.parent.name
    text = re.sub(r"\A(#.*\n)+", "", file.read_text())
    found: dict[str, tuple[str, str]] = {}
    for name, default, said in walk(yaml.compose(text), text, prefix):
        if not found.get(name, ("", ""))[1]:
            found[name] = default, said
    return found


def walk(node: Any, text: str, above: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, default, comment) of each value in a map of the yaml with this text."""
    keys = "|".join(re.escape(key.value) for key, _ in node.value)
    for key, value in node.value:
        name = f"{above}.{NAMED.get(above.rpartition('.')[2], key.value)}".lstrip(".")
        is_block = not isinstance(value, yaml.ScalarNode) and not value.flow_style
        if key.value in ("defaults", "_partial_"):
            continue
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from walk(value, text, name)
            continue
        after = text[key.end_mark.index if is_block else value.end_mark.index :].partition("\n")[0]
        over = re.search(r"\n(?: *#.*\n)* *$", text[: key.start_mark.index])
        said = " ".join(re.findall("# (.*)", after) or re.findall(" *# (.*)", over[0] if over else ""))
        if node.flow_style and (parts := dict(re.findall(rf"\b({keys}): (.*?)(?=; (?:{keys}): |$)", said))):
            said = parts.get(key.value, "")
        items = value.value if is_block else [value]
        default = ", ".join(" ".join(text[each.start_mark.index : each.end_mark.index].split()) for each in items)
        yield name, f"[{default}]" if is_block else default.strip('"'), said


if __name__ == "__main__":
    main()
