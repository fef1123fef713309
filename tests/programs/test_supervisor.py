"""What the launcher starts again, and when it gives up."""

import pytest

from serl_launcher import supervisor


@pytest.mark.parametrize(("works", "given_up"), [(False, 4), (True, None)])
def test_a_process_that_dies_slowly_before_it_does_anything_is_not_started_for_ever(
    tmp_path, monkeypatch, caplog, works, given_up
):
    now, started = [0.0], []
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    family = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/server", [])
    monkeypatch.setattr(family, "_start", started.append)
    if works:
        supervisor.begun_file("inference", f"ipc://{tmp_path}/server").touch()
    deaths = 0
    while deaths < 10 and (over := family._ended("inference", -9)) is None:
        now[0] += 30.0  # never more than two within a minute
        deaths += 1
    assert (over, deaths) == ((1, given_up - 1) if given_up else (None, 10))
    if given_up:
        assert "inference ended 4 times before it could do anything: giving up" in caplog.text
        assert "give the same command again" in caplog.text


@pytest.mark.parametrize(("status", "minutes", "deaths"), [(1, 5, 10), (-6, 5, 10), (-9, 5, None), (1, 10, None)])
def test_inference_that_works_and_then_fails_again_and_again_ends_the_run(
    tmp_path, monkeypatch, caplog, status, minutes, deaths
):
    """As on a GPU whose context dies under some batches: each start is slow, and ready. Only kills are from outside."""
    now = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    family = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/server", [])
    monkeypatch.setattr(family, "_start", lambda name: None)
    supervisor.begun_file("inference", f"ipc://{tmp_path}/server").touch()
    given_up = None
    for death in range(1, 21):
        if family._ended("inference", status) == 1:
            given_up = death
            break
        now[0] += 60.0 * minutes
    assert given_up == deaths
    assert ("inference ended 10 times within an hour, and nobody killed it: giving up" in caplog.text) == bool(deaths)
