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
from tests.shared.programs import without_nohup

PARENT = """
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from serl_client.several import run_several
from tests.client.test_several import waits
if __name__ == "__main__":
    join = BaseProcess.join
    BaseProcess.join = lambda process: [Path(sys.argv[1], "told").touch(), join(process)]
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
    """Says that it is there, and when it ends, which lasts until all are told to; keeps the pipe `alive` open."""
    alive = (folder / "alive").open("w", buffering=1)
    try:
        print(os.getpid(), file=alive)
        signal.pause()
    except KeyboardInterrupt:
        until((folder / "told").exists)
        print("ended", file=alive)


@pytest.mark.slow
def test_the_others_go_on_without_one_that_fails_and_do_its_share_and_only_if_all_fail_has_the_command(
    tmp_path, capfd, caplog
):
    assert run_several(3, partial(fails_alone, tmp_path)) == 0
    assert {path.name for path in tmp_path.glob("ended *")} == {"ended 0", "ended 2"}
    assert "error: it fails" in capfd.readouterr().err
    assert "environment 1 ended with status 1; 2 go on" in caplog.text
    assert run_several(2, fails) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "to_all", "status"), [(15, False, 130), (15, True, 130), (1, True, 130), (9, False, -9)]
)
def test_all_end_in_order_with_their_parent(tmp_path, sent, to_all, status):
    """Also where a system signals them all, or their terminal is closed."""
    os.mkfifo(tmp_path / "alive")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], preexec_fn=without_nohup)
    with open(tmp_path / "alive") as alive:
        processes = [int(alive.readline()) for _ in range(2)]
        for process in processes * to_all:
            os.kill(process, sent)
        parent.send_signal(sent)
        assert parent.wait(60) == status
        (tmp_path / "told").touch()
        assert alive.read() == "ended\n" * 2, "nobody holds the pipe any more"
