"""A terminal that a test types into."""

import os

import pytest


@pytest.fixture
def terminal():
    """A pseudo-terminal: the end that a person types into, and the end that the program reads."""
    person, program = os.openpty()
    yield person, program
    os.close(person)
    os.close(program)
