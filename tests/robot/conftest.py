"""A terminal that a test types into, and lerobot's drivers with patience."""

import os

import pytest
from sitecustomize import PATIENT, own_time  # tests/watch


@pytest.fixture(scope="module")
def patient_drivers():
    """Nothing of lerobot misses an answer of a simulated servo because others are at work on this machine."""
    ports = pytest.importorskip("scservo_sdk").PortHandler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "getCurrentTime", own_time)
        yield


@pytest.fixture
def patient_guards(monkeypatch):
    """Nor does it in the guards that this test starts; a bus that is unplugged holds them up for seconds."""
    monkeypatch.setenv(PATIENT, "yes")


@pytest.fixture
def terminal():
    """A pseudo-terminal: the end that a person types into, and the end that the program reads."""
    person, program = os.openpty()
    yield person, program
    os.close(person)
    os.close(program)
