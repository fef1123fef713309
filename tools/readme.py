#!/usr/bin/env python
"""Gives every command of README.md and docs/, as a reader would, and says which one fails.

readme.py             in a copy of this folder with the present .venv; what a page has not named yet is not importable
readme.py --clean     in a clone without a .venv, where the pages' own commands install what they name (CI)
readme.py --page P    those of one page, or of several: what a newcomer types first (./test.sh)
readme.py --list      what would be given, and what is not, with the reason

A command is a line of a bash block, or `code` elsewhere that begins with a program. Runs are made short by the words in
SHORT, by the copy's plans, whose phases begin and end EARLY, and by what a page says itself behind a command, or in the
line before a block: <!-- short: random_steps=60 --rounds 1 -->. A learner is given an actor, and an actor a learner,
unless the same block has both. tests/house/test_docs.py checks the words of each run without making it.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.processes import ended, kill, start
from tools.readme_words import EARLY, NOT_RUN, SHORT, SUBSTITUTES

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tutorials", "guides", "concepts", "reference", "evidence")  # of docs/
BASE = ["learner", "sim"]  # extras that start.sh installs
MODULES = {"rerun-sdk": "rerun"}  # where the name to import is another
LIMIT_S = 600.0  # of one command; an installation may take longer
INSTALL_S = 1500.0
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\./|\.venv/bin/|examples/\S+\.sh |\. examples/|tools/\S+\.py |\.\./|gpu-box\$|laptop\$"
    r"|(?:ssh|scp|uv|apt-get|rerun|tmux|setsid|kill|cd|git|pip) )"
)
MADE_SHORT = r"<!-- short: (.*?) -->"
SIDE = re.compile(r"(?:^|/)run_(learner|actor)\w*\.sh\b")

BLOCKS = """import sys
from importlib.machinery import PathFinder


class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {gone} else super().find_spec(name, path, target)


sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""


@dataclass(frozen=True)
class Command:
    """One command of a page, or a file (`text` is its content) that the page tells the reader to write."""

    page: str
    line: int
    text: str
    block: int  # commands of one block share a number
    file: str = ""
    short: str = ""  # words that make it short

    @property
    def reason(self) -> str:
        """Why it is not given here; empty where it is."""
        return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, self.text)), "")

    @property
    def side(self) -> str:
        """learner or actor, where it starts one that goes on."""
        return found[1] if (found := SIDE.search(self.text.split(" ")[0])) else ""


def read(page: Path) -> list[Command]:
    """What a page tells its reader to type, in order."""
    found: list[Command] = []
    kind, begun, block, heading, short, lines = "", 0, 0, "", "", page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and not kind:
            kind, begun, block = line[3:].strip() or "plain", number, block + 1
            before = re.fullmatch(MADE_SHORT, lines[number - 2])
            short = before[1] if before else ""
        elif line.startswith("```"):
            inside = lines[begun : number - 1]
            named = re.search(r"`([\w/]+\.(?:py|yaml))`\s*$", heading)
            if kind in ("python", "yaml") and named:
                found.append(Command(page.name, begun, "\n".join(inside) + "\n", block, named[1]))
            if kind == "bash" or (kind == "plain" and any(PROGRAM.match(each) for each in inside)):
                found += [Command(page.name, begun + at, text, block, short=short) for at, text in _joined(inside)]
            kind = ""
        elif not kind:
            heading = line if line.startswith("#") else heading
            named = re.findall(rf"`([^`]+)`(?: {MADE_SHORT})?", line)
            for code, short in [(line.strip(), "")] if line.startswith("    ") else named:
                if PROGRAM.match(code):
                    found.append(Command(page.name, number, code, block := block + 1, short=short))
    return found


def _joined(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(number, command) of a block's lines: without comments, with what a backslash continues, and with the variables
    that lines before it have set."""
    text = known = ""
    for number, line in enumerate(lines, 1):
        text += re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        if text.endswith("\\"):
            text = text[:-1]
        elif re.fullmatch(r"\w+=(\$\(.*\)|\S*)", text):
            text, known = "", f"{known}{text}; "
        elif text:
            text = known + text
            yield number, " ".join(text.split())
            text = ""


def pages(root: Path) -> list[Path]:
    """All pages, in the order in which a newcomer reads them."""
    docs = root / "docs"
    rooms = (page for room in ROOMS for page in sorted((docs / room).glob("*.md")))
    return [root / "README.md", docs / "index.md", *rooms]


# -- giving them


class Reader:
    """Somebody who types the commands of the pages in a folder of their own."""

    def __init__(self, folder: Path, port: int, *, clean: bool) -> None:
        self.folder, self.clean = folder, clean
        self.extras = list(BASE)
        self._words = [f"port={port}", f"inference_port={port + 1}"]
        self._log = folder / "reader.log"
        self._running: list[tuple[str, subprocess.Popen[Any]]] = []

    def close(self) -> None:
        """End the sides that still run: only where this program is stopped."""
        for _, process in self._running:
            kill(process)

    def turn(self) -> None:
        """Begin another page: who reads it may have read no other, and has made no keys."""
        self.extras = self.extras if self.clean else list(BASE)
        shutil.rmtree(self.folder / "keys", ignore_errors=True)

    def give(self, command: Command) -> str:
        """What went wrong with it; empty when nothing did."""
        if command.file:
            (self.folder / command.file).write_text(command.text)
            return ""
        if installs := re.match(r"\. examples/install\.sh(.*)", command.text):
            self.extras += re.findall(r"--extra (\w+)", installs[1])
        text = self.shortened(command.text, "" if installs else command.short)
        if command.side:
            self._running.append((text, self._start(text)))
            return self._listening(text) if command.side == "learner" else ""
        return self._ended(self._start(text), INSTALL_S if self.clean and installs else LIMIT_S)

    def _listening(self, text: str) -> str:
        """Wait, as a person does, until the learner that was started last listens."""
        port = int(re.findall(r"\bport=(\d+)", text)[-1])
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self._running[-1][1].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return ""
            time.sleep(0.2)
        return "does not listen" + self._last()

    def finish(self) -> Iterator[tuple[str, str]]:
        """End what a block has left running, which it does by itself once both sides are there: (command, what went
        wrong)."""
        sides = {found[1] for text, _ in self._running if (found := SIDE.search(text))}
        if len(sides) == 1:
            text = self.partner(self._running[0][0], *sides)
            self._running.append((text, self._start(text)))
        for text, process in self._running:
            if failed := self._ended(process, LIMIT_S):
                yield text, failed
        self._running.clear()

    def partner(self, text: str, side: str) -> str:
        """The command of the other side that belongs to this one."""
        other = {"learner": "actor", "actor": "learner"}[side]
        kept = [word for word in shlex.split(text)[1:] if re.match(r"(run_dir|task[\w.]*|port|inference_port)=", word)]
        keys = {"keys=keys": "key=keys/left.key", "key=keys/left.key": "keys=keys"}
        kept += [keys[word] for word in shlex.split(text) if word in keys]
        short = SHORT if other == "learner" else []
        return shlex.join([f"examples/experiments/sim_arm/run_{other}.sh", *kept, *short])

    def shortened(self, text: str, short: str = "") -> str:
        """The command with other places, and with words that make a run short and keep it off others' ports."""
        for old, new in SUBSTITUTES.items():
            text = text.replace(old, new)
        for word in shlex.split(short):
            text = re.sub(rf" {re.escape(word.partition('=')[0])}=\S+", "", text) + f" {shlex.quote(word)}"
        text = f".venv/bin/python {text}" if text.startswith("tools/") else text
        if re.match(r"([A-Z]+=\S+ )*\./start\.sh|.*(run_(learner|actor)\w*\.sh|tools/doctor\.py)", text):
            said = {word.partition("=")[0] for word in shlex.split(text)}
            text += "".join(f" {word}" for word in [*SHORT, *self._words] if word.partition("=")[0] not in said)
        return text

    def _start(self, text: str) -> subprocess.Popen[Any]:
        environment = {**os.environ, "WANDB_MODE": "disabled"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process compiles torch anew, for half a minute
        if not self.clean:
            environment["PYTHONPATH"] = f"{blocked(self.folder, self.extras)}:{self.folder}"  # the copy
        with open(self._log, "ab") as log:
            log.write(f"\n$ {text}\n".encode())
            log.flush()
            return start(["bash", "-c", text], log, cwd=self.folder, env=environment)

    def _ended(self, process: subprocess.Popen[Any], limit: float) -> str:
        if (status := ended(process, limit)) == 0:
            return ""
        return (f"did not end within {limit:.0f} s" if status is None else f"ended with status {status}") + self._last()

    def _last(self) -> str:
        """The last lines, without the middle of long ones: an error says what is wrong first, and what to do last."""
        lines = self._log.read_text(errors="replace").splitlines()[-8:]
        cut = (line if len(line) <= 200 else f"{line[:97]} ... {line[-98:]}" for line in lines)
        return "".join(f"\n        {line}" for line in cut)


def blocked(folder: Path, extras: Sequence[str]) -> Path:
    """A folder for PYTHONPATH with which the modules of no other extras can be imported."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: {re.match(r"[\w-]+", need)[0] for need in needs} for extra, needs in listed.items()}  # type: ignore[index]
    there = required(set().union(*(named[extra] for extra in extras if extra in named)))
    gone = sorted(MODULES.get(name, name) for name in set().union(*named.values()) - there)
    place = folder / ".reader"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(BLOCKS.format(gone=gone))
    return place


def required(packages: Iterable[str]) -> set[str]:
    """These packages, and all that they need."""
    found: set[str] = set()
    wanted = list(packages)
    while wanted:
        if (package := wanted.pop()) not in found:
            found.add(package)
            with suppress(metadata.PackageNotFoundError):
                needs = [need for need in metadata.requires(package) or () if "extra ==" not in need]
                wanted += [re.match(r"[\w.-]+", need)[0].lower().replace("_", "-") for need in needs]  # type: ignore[index]
    return found


def copied(folder: Path, *, clean: bool) -> Path:
    """This repository's files in `folder`, its plans short, without a .venv or with the present one, which is never
    changed."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for plan in (folder / "config/plan").glob("*.yaml"):
        text = plan.read_text()
        for condition, earlier in EARLY.items():
            text = re.sub(condition, earlier, text)
        plan.write_text(text)
    if not clean:
        (folder / ".venv").symlink_to(ROOT / ".venv")
        stub = folder / ".uv" / "bin" / "uv"
        stub.parent.mkdir(parents=True)
        stub.write_text("#!/bin/sh\nexit 0\n")
        stub.chmod(0o755)
    return folder


def give(commands: Sequence[Command], reader: Reader) -> int:
    """Give the commands, and print what became of each; returns how many failed."""
    failed, page = 0, ""
    for (of, _), block in groupby(commands, key=lambda command: (command.page, command.block)):
        if of != page:
            reader.turn()
        page, line = of, 0
        for command in block:
            line, place = command.line, f"{page}:{command.line}  {command.file or command.text}"
            if command.reason:
                print(f"not run  {place}: {command.reason}", flush=True)
                continue
            began = time.monotonic()
            reason = reader.give(command)
            failed += bool(reason)
            took = f"{time.monotonic() - began:6.1f} s {place}"
            print(f"FAILED   {place}\n    {reason}" if reason else took, flush=True)
        for text, reason in reader.finish():
            failed += 1
            print(f"FAILED   {page}:{line}  {text}\n    {reason}", flush=True)
    return failed


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", action="store_true", help="install what the pages name")
    parser.add_argument("--list", action="store_true", help="give nothing")
    parser.add_argument("--port", type=int, default=5588, help="the first of two ports (5588)")
    parser.add_argument("--page", type=Path, action="append", help="this page alone; may be said several times")
    options = parser.parse_args(words)
    commands = [command for page in options.page or pages(ROOT) for command in read(page)]
    named = [command.text for page in pages(ROOT) for command in read(page)]
    wrong = [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, text) for text in named)]
    if options.list:
        for each in commands:
            print(f"{each.page}:{each.line}  {each.file or each.text}", each.reason and f"[{each.reason}]")
    for pattern in wrong:
        print(f"FAILED   tools/readme.py: the exception {pattern!r} fits no command: remove it")
    if options.list:
        return 1 if wrong else 0
    with tempfile.TemporaryDirectory(prefix="reader-") as folder:
        reader = Reader(copied(Path(folder), clean=options.clean), options.port, clean=options.clean)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            failed = give(commands, reader) + len(wrong)
        finally:
            reader.close()
    print(f"{len(commands)} commands, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
