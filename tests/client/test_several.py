"""Several environments of one command: processes that end together, however one of them or their parent ends."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from serl_client.several import run_several

PARENT = """
import sys
from functools import partial
from pathlib import Path
from serl_client.several import run_several
from tests.client.test_several import waits
if __name__ == "__main__":
    try:
        sys.exit(run_several(2, partial(waits, Path(sys.argv[1]))))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def fails_alone(folder: Path, place: int) -> None:
    """Number 1 fails once the others are there; they would wait for ever."""
    if place == 1:
        (folder / "fifo").open("w").close()
        sys.exit("error: it fails")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    (folder / "fifo").open("r").close()
    try:
        signal.pause()
    except KeyboardInterrupt:
        (folder / f"ended {place}").touch()


def waits(folder: Path, place: int) -> None:
    """Says that it is there, then waits; keeps the pipe `alive` open while it lives."""
    alive = (folder / "alive").open("w")
    alive.write(str(place))
    alive.flush()
    signal.pause()


@pytest.mark.slow
def test_one_that_fails_ends_the_others_and_all_that_end_well_are_a_success(tmp_path, capfd):
    os.mkfifo(tmp_path / "fifo")
    assert run_several(2, partial(fails_alone, tmp_path)) == 1
    assert (tmp_path / "ended 0").exists()
    assert "error: it fails" in capfd.readouterr().err
    assert run_several(2, abs) == 0


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_all_end_with_their_parent(tmp_path, sent, status):
    os.mkfifo(tmp_path / "alive")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    with open(tmp_path / "alive") as alive:
        assert {alive.read(1), alive.read(1)} == {"0", "1"}
        parent.send_signal(sent)
        assert parent.wait(60) == status
        assert alive.read() == "", "nobody holds the pipe any more"
