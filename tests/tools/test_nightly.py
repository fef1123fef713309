"""The tool that proves what takes long: each of its parts is a command that there is."""

import re
import shlex
from pathlib import Path

from tests.shared.tools import called
from tools import nightly


def test_each_part_says_words_that_its_program_knows():
    known = {}
    for part in nightly.parts(7):
        _, program, *words = shlex.split(part.command)
        if program.startswith("tools/"):
            known[program] = known.get(program) or called(Path(program).stem, "--help")[1]
            assert {word for word in words if word.startswith("--")} <= {*re.findall(r"--[\w-]+", known[program])}
    assert len(known) >= 5
