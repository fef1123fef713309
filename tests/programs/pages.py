"""A reader of tutorials, who writes the files of a page into a folder of their own, and gives its commands."""

import os
import shlex

from tests.shared.common import ROOT
from tools import readme


def page(name):
    """The commands and files of a tutorial."""
    return readme.read(ROOT / f"docs/tutorials/{name}.md")


def write(folder, *pages):
    """Write the files of pages into a folder; returns the environment of programs that find them."""
    for file in (command for page in pages for command in page if command.file):
        (folder / file.file).write_text(file.text)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def runs(page):
    """The words of each run that a page starts, without its folder."""
    commands = [command.text.partition(".sh ")[2] for command in page if ".sh " in command.text]
    return [[word for word in shlex.split(text) if "run_dir=" not in word] for text in commands]
