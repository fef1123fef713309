"""What the launcher starts again, and when it gives up."""

import pytest

from serl_launcher import supervisor


@pytest.mark.parametrize(
    ("has_begun", "status", "every", "given_up", "sentence"),
    [
        (False, -9, 30, 4, "inference ended 4 times before it could do anything: giving up"),
        (True, -9, 30, None, ""),
        (True, 1, 300, 10, "inference ended 10 times within an hour, and nobody killed it: giving up"),
        (True, -6, 300, 10, "inference ended 10 times within an hour, and nobody killed it: giving up"),
        (True, -9, 300, None, ""),
        (True, 1, 600, None, ""),
    ],
)
def test_a_process_that_ends_again_and_again_is_not_started_for_ever(
    tmp_path, monkeypatch, caplog, has_begun, status, every, given_up, sentence
):
    """Never more than two within a minute, as on a GPU whose context dies under some batches: each start is slow. Once
    it has begun, only kills are from outside."""
    now = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    family = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/server", [])
    monkeypatch.setattr(family, "_start", lambda name: None)
    if has_begun:
        supervisor.begun_file("inference", f"ipc://{tmp_path}/server").touch()
    found = None
    for death in range(1, 21):
        if (over := family._ended("inference", status)) is not None:
            found = death
            assert over == 1
            break
        now[0] += every
    assert found == given_up
    assert sentence in caplog.text
    assert ("giving up" in caplog.text) == ("give the same command again" in caplog.text) == (given_up is not None)
