"""Who an actor is: the name that its folder keeps, and the records of others that lie beside its own."""

import re
import shlex
import subprocess
import sys
from contextlib import closing

import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.identity import keep_name, named
from serl_client.outbox import Outbox

from tests.shared.common import PATIENCE, ROOT, free_port, until


@pytest.mark.parametrize(
    ("first", "second", "machine"),
    [("0" * 12, "1" * 12, "robot-pc"), ("arm-7f9c5d4b8-x2xvz", "arm-7f9c5d4b8-bq9wk", "arm-0")],
)
def test_a_name_that_nobody_gave_is_kept_by_the_folder_for_whoever_is_free_to_take_it(
    tmp_path, monkeypatch, first, second, machine
):
    """A container has another host name at each start, and so has a pod, but not that of a StatefulSet."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: second)
    for damaged in ("", "../../elsewhere", "\n"):
        (tmp_path / ".name").write_text(damaged)
        assert named("auto", None, tmp_path) == second
    (tmp_path / ".name").unlink()
    for name in (machine, first, second):
        keep_name(name, tmp_path)
    assert named("auto", None, tmp_path) == first
    with closing(Outbox(tmp_path / first / "0/outbox", 1)):
        assert named("auto", None, tmp_path) == second, "somebody has that outbox"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert named("auto", None, tmp_path) == f"{second}-3"
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    (tmp_path / second).mkdir()
    assert named("auto", None, tmp_path) == second, "it was here before"
    monkeypatch.setattr("socket.gethostname", lambda: machine)
    assert named("auto", None, tmp_path) == machine, "a machine keeps its own name"
    monkeypatch.setattr("socket.gethostname", lambda: "rig-7f9c5d4b8-bq9wk")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert named("auto", None, tmp_path) == "rig-7f9c5d4b8-bq9wk", "it is no pod"


@pytest.mark.slow
def test_records_that_another_actor_has_left_are_named_with_the_command_that_delivers_them(
    learner, acting, spec, tmp_path
):
    left = tmp_path / "run/actors/left/outbox"
    for name in ("left", "dataset-demo"):  # the latter is a learner's importer
        box = left.parents[1] / name / "outbox"
        with TrainerClient(f"tcp://127.0.0.1:{free_port()}", actor=name, spec=spec, outbox=box) as away:
            away.push(Outcome("e0", True))
    with acting(learner.port, "task=fake", "name=right", "envs=1") as said:
        told = until(lambda: re.search(r"holds .* records that nobody delivers.*: `(.*)`", said()))
        until(lambda: learner.hear(m.Heartbeat))
    assert (str(left) in said(), said().count("nobody delivers"), learner.records) == (True, 1, [])
    _, *command = shlex.split(told[1])
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL) as other:
        until(lambda: learner.records)
        other.terminate()
        assert other.wait(PATIENCE) == 130
    assert [record.episode for _, _, record in learner.records] == ["e0"]
    with acting(learner.port, "task=fake", "name=right") as said:
        until(lambda: "IDLE" in said())
    assert "nobody delivers" not in said()
