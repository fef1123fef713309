"""Several environments of one command: processes that end together, however one of them or their parent ends."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from serl_client.several import Share, run_several

from tests.shared.common import until

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


def fails_alone(folder: Path, place: int, share: Share) -> None:
    """Number 1 of three fails once the others are there; they go on until its work is theirs."""
    (folder / f"begun {place}").touch()
    if place == 1:
        until(lambda: len([*folder.glob("begun *")]) == 3)
        sys.exit("error: it fails")
    until(lambda: share() == (place // 2, 2))
    (folder / f"ended {place}").touch()


def fails(place: int, share: Share) -> None:
    sys.exit("error: it fails")


def waits(folder: Path, place: int, share: Share) -> None:
    """Says that it is there, then waits; keeps the pipe `alive` open while it lives."""
    alive = (folder / "alive").open("w")
    alive.write(str(place))
    alive.flush()
    signal.pause()


@pytest.mark.slow
def test_the_others_go_on_without_one_that_fails_and_do_its_share_and_only_if_all_fail_has_the_command(
    tmp_path, capfd, caplog
):
    assert run_several(3, partial(fails_alone, tmp_path)) == 0
    assert {path.name for path in tmp_path.glob("ended *")} == {"ended 0", "ended 2"}
    assert "error: it fails" in capfd.readouterr().err
    assert "environment 1 ended with status 1; 2 go on" in caplog.text
    assert run_several(2, fails) == 1


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_all_end_with_their_parent(tmp_path, sent, status):
    os.mkfifo(tmp_path / "alive")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    with open(tmp_path / "alive") as alive:
        assert {alive.read(1), alive.read(1)} == {"0", "1"}
        parent.send_signal(sent)
        assert parent.wait(60) == status
        assert alive.read() == "", "nobody holds the pipe any more"
