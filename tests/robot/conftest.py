"""A terminal that a test types into, and lerobot's drivers with patience."""

import os
import time

import pytest

PATIENCE = 5  # times as long as lerobot's drivers wait for an answer, and only while they run: a busy machine stalls


@pytest.fixture(scope="module")
def patient_drivers():
    """Nothing of lerobot misses an answer of a simulated servo because others are at work on this machine."""
    ports = pytest.importorskip("scservo_sdk").PortHandler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "getCurrentTime", lambda port: time.thread_time() * 1e3 / PATIENCE)
        yield


@pytest.fixture
def terminal():
    """A pseudo-terminal: the end that a person types into, and the end that the program reads."""
    person, program = os.openpty()
    yield person, program
    os.close(person)
    os.close(program)
