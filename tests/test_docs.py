"""What the documents name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_test_that_the_table_of_faults_names_exists():
    rows = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    there = {name for file in (ROOT / "tests").glob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert not set(named) - there


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_tool_and_page_that_a_document_names_exists(document):
    text = document.read_text()
    files = {ROOT / name for name in re.findall(r"\b(?:tools|tests|examples)/[\w/]+\.(?:py|sh)\b", text)}
    files |= {document.parent / name for name in re.findall(r"\]\(((?!http)[^)#]+)\)", text)}
    assert not [path for path in files if not path.exists()]
