"""Each tool says what it does."""

import pytest

from tests.shared.common import TOOLS
from tests.shared.tools import called

NAMES = sorted(path.stem for path in TOOLS.glob("*.py") if "parse_args" in path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_explains_itself(name):
    status, said = called(name, "--help")
    assert status == 0, said
    assert said.startswith("usage:")
