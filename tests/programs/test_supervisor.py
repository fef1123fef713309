"""What the launcher starts again, when it gives up, and what ends with it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from serl_launcher import supervisor

PARENT = """
import subprocess, sys
from serl_launcher.supervisor import killed_with_parent
child = "import time; time.sleep(10); print('the child lives')"
subprocess.Popen([sys.executable, "-c", child], preexec_fn=killed_with_parent)
print("begun", flush=True)
input()
"""


@pytest.fixture
def deaths(tmp_path, monkeypatch):
    """deaths(status, every) -> after how many deaths of inference, so many seconds apart, it gives up; None: never."""
    now = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])

    def deaths(status, every, *, has_begun):
        family = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/server", [])
        monkeypatch.setattr(family, "_start", lambda name: None)
        if has_begun:
            supervisor.begun_file("inference", f"ipc://{tmp_path}/server").touch()
        for death in range(1, 21):
            if (over := family._ended("inference", status)) is not None:
                assert over == 1
                return death
            now[0] += every
        return None

    return deaths


def test_a_process_that_dies_slowly_before_it_does_anything_is_not_started_for_ever(deaths, caplog):
    assert deaths(-9, 30, has_begun=False) == 4  # never more than two within a minute
    assert "inference ended 4 times before it could do anything: giving up" in caplog.text
    assert "give the same command again" in caplog.text
    assert deaths(-9, 30, has_begun=True) is None


@pytest.mark.parametrize(("status", "minutes", "given_up"), [(1, 5, 10), (-6, 5, 10), (-9, 5, None), (1, 10, None)])
def test_inference_that_works_and_then_fails_again_and_again_ends_the_run(deaths, caplog, status, minutes, given_up):
    """As on a GPU whose context dies under some batches: each start is slow, and ready. Only kills are from outside."""
    assert deaths(status, 60 * minutes, has_begun=True) == given_up
    sentence = "inference ended 10 times within an hour, and nobody killed it: giving up"
    assert (sentence in caplog.text) == bool(given_up)


def test_only_the_server_has_a_limit_of_memory(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nulimit -d > "$4/limit of $3"\n')
    program.chmod(0o755)
    monkeypatch.setattr(supervisor.sys, "executable", str(program))
    family = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/local", [])
    for name in ("server", "inference"):
        family._start(name)
        assert family._children[name].wait() == 0
    assert (tmp_path / "limit of server").read_text() == f"{supervisor.SERVER_BYTES >> 10}\n"
    assert (tmp_path / "limit of inference").read_text() == "unlimited\n"


@pytest.mark.parametrize("hangs", [False, True])
def test_the_trainer_keeps_a_checkpoint_before_inference_that_refuses_ends_the_run(tmp_path, monkeypatch, hangs):
    """It may hang for the same reason, such as a broken GPU: then it is not waited for without an end."""
    monkeypatch.setattr(supervisor, "KEPT_S", 0.2 if hangs else 600.0)
    local = f"ipc://{tmp_path}/server"
    made, asked = supervisor.Supervisor(tmp_path, local, []), supervisor.stop_file(local)
    ends = {"server": lambda: None, "inference": lambda: supervisor.REFUSED}
    ends["trainer"] = lambda: 0 if asked.exists() and not hangs else None
    made._children = {name: SimpleNamespace(poll=poll) for name, poll in ends.items()}
    supervisor.begun_file("trainer", local).touch()
    assert made._look() == 1
    assert asked.exists()


@pytest.fixture
def family(tmp_path, monkeypatch):
    """family(name, status, archives) -> (what is started, one name for each second, of a process that always ends
    with this status; the exit status of the run, if it is over)."""

    def family(name, status, *, archives=False, seconds=200):
        now, started, over = [0.0], [], None
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
        made = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/server", [], archives=archives)
        monkeypatch.setattr(made, "_start", started.append)
        made._children[name] = SimpleNamespace(poll=lambda: status)
        supervisor.begun_file(name, f"ipc://{tmp_path}/server").touch()
        while now[0] < seconds and over is None:
            over = made._look()
            now[0] += 1.0
        return started, over

    return family


@pytest.mark.parametrize(
    ("name", "status", "archives", "started"),
    [
        ("export", -9, False, ["export"] * 3),
        ("export", supervisor.REFUSED, False, []),
        ("export", 1, True, ["export"] * 6),  # three at once, and then each minute
        ("export", supervisor.REFUSED, True, ["export"] * 3),
        ("page", -9, False, ["page"] * 3),
        ("page", supervisor.REFUSED, False, []),
        ("importer", -11, False, ["importer"] * 3 + ["trainer", "inference"]),
    ],
)
def test_a_run_goes_on_without_what_ends_again_and_again_and_says_so_once(
    family, caplog, name, status, archives, started
):
    assert family(name, status, archives=archives) == (started, None)
    assert caplog.text.count(f"{name} ended") - caplog.text.count("starting it again") == 1
    assert ("It is started again every minute. Actors whose source is full wait for it" in caplog.text) == archives


def test_a_run_that_is_stopped_says_how_its_last_episodes_come_into_datasets(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(supervisor, "STOPS", ())
    made = supervisor.Supervisor(tmp_path, f"ipc://{tmp_path}/server", ["export"])
    child = SimpleNamespace(kill=lambda: None, wait=lambda: None)
    monkeypatch.setattr(made, "_start", lambda name: made._children.update({name: child}))
    monkeypatch.setattr(made, "_look", lambda: 1)
    assert made.run() == 1
    assert f"`tools/data.py export {tmp_path}`" in caplog.text


def test_an_importer_that_refuses_to_run_ends_the_run(family):
    assert family("importer", supervisor.REFUSED) == ([], 1)


def test_temporary_files_of_a_runs_processes_lie_in_the_folder_that_goes_with_it(tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr(supervisor.subprocess, "Popen", lambda *_, env, **__: places.append(env["TMPDIR"]))
    supervisor.Supervisor(tmp_path / "run", f"ipc://{tmp_path}/sockets/server", [])._start("export")
    supervisor.Supervisor(tmp_path / "sockets", "", [])._start("trainer")  # of a node beyond the first
    assert places == [f"{tmp_path}/sockets"] * 2


def test_a_child_is_killed_with_its_parent():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"begun\n"
        parent.kill()
        assert parent.stdout.read() == b""  # the pipe ends when the child, which holds it too, is dead


def test_who_gives_way_does_so_to_other_sessions_too_and_never_to_its_own_terminal():
    """Where the kernel does not group by session, or not this process, the nice value is all there is."""
    asks = "import os; from serl_launcher.supervisor import give_way; give_way(7); print(os.nice(0)); "
    asks += "print(*[each.read_text() for each in __import__('pathlib').Path('/proc/self').glob('autogroup')])"
    here = "".join(each.read_text() for each in Path("/proc/self").glob("autogroup")).split()[-1:]
    for alone, nice in ((True, ["7"]), (False, here)):
        said = subprocess.check_output([sys.executable, "-c", asks], text=True, start_new_session=alone).split()
        assert said[0] == str(min(19, os.nice(0) + 7))
        assert said[-1:] == nice or len(said) == 1
