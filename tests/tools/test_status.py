"""tools/status.py: what it says of a learner that is up, that lacks somebody, and that is down."""

import fcntl
import json
import os
import re

import pytest
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection

from serl_launcher.service import sockets
from tests.shared.clients import connected
from tests.shared.common import PATIENCE, free_port, until
from tests.shared.tools import called, typed


def status(port, *words):
    return called("status", "--port", port, *words)


@pytest.fixture
def learner(serve):
    """A server whose trainer is there."""
    made = serve(capacities={"online": 1000})
    made.report()
    return made


def test_a_learner_without_an_actor_says_what_is_missing(learner):
    code, said = typed("status", "--port", learner.port)
    assert code == 0
    assert "new: no actor has come yet" in said
    assert "missing    the inference process" in said
    assert "missing    an actor: start one with run_actor.sh" in said
    assert "the trainer process" not in said


def test_who_is_there_what_it_reports_and_what_lags(learner, spec, tmp_path):
    with TrainerClient(learner.address, actor="left", spec=spec, outbox=tmp_path / "outbox") as client:
        client.report({"directive": 1, "rate": 9.98765, "warning": ""})
        connected(client)
        inference = Connection(learner.local, m.Hello(m.PROTOCOL, "learner", "inference"))
        inference.call(m.Status(), PATIENCE)
        inference.send(m.Heartbeat({"version": 0}))
        for phase in ("first", "second"):
            learner.direct(phase=phase)
        said = until(lambda: "rate" in (said := status(learner.port)[1]) and said)
        report = json.loads(status(learner.port, "--json")[1])
        inference.close()
    assert "phase      second (collect)" in said
    assert "source     online: 0 of 1,000 steps, 0 evicted" in said
    assert re.search(r"actor      left: seen \d+\.\d s ago", said)
    assert ", directive 1, rate 10.0, outbox 0\n" in said
    assert "lags       left: directive 1, the newest is 2" in said
    assert "missing" not in said
    assert {client["actor"] for client in report["clients"]} == {"left", "trainer", "inference"}


@pytest.mark.slow
def test_who_is_silent_is_missing(learner, spec):
    actor = Connection(learner.address, m.Hello(m.PROTOCOL, "actor", "left", "e" * 32, "o" * 32, "", spec.to_dict()))
    actor.call(m.Status(), 5.0)
    actor.close()
    silent = ("missing    left: silent for", "missing    the trainer process")
    until(lambda: all(text in status(learner.port)[1] for text in silent), every=0.3)


def test_a_runs_folder_says_at_which_port_its_learner_is(learner, tmp_path):
    (tmp_path / "config.yaml").write_text(f"host: 0.0.0.0\nport: {learner.port}\n")
    code, said = called("status", "--run-dir", tmp_path)
    assert (code, "new: no actor has come yet" in said) == (0, True), said
    code, said = called("status", "--run-dir", tmp_path, "--port", free_port())
    assert (code, "nobody listens at 127.0.0.1:" in said) == (1, True), "what is said counts more"


def test_beside_a_learner_with_keys_its_run_folder_is_enough_to_see_and_to_label(
    serve, keys, join, make_segment, monkeypatch
):
    learner = serve(keys=keys)
    join(learner, "left").push(make_segment("e0", ends="terminated"))
    monkeypatch.setattr(sockets, "address_here", lambda run_dir: learner.local)
    code, said = until(
        lambda: (found := called("status", "--run-dir", learner.run_dir)) and ": 4 of" in found[1] and found
    )
    assert (code, "actor      left: seen" in said) == (0, True), said
    assert called("label", "--run-dir", learner.run_dir, "e0", "success") == (0, "e0: success\n")
    assert learner.episodes()["e0"]["judged_by"] == "operator"
    assert "lets in only who has a key" in called("status", "--port", learner.port)[1]


@pytest.mark.slow
def test_a_learner_that_is_down_is_told_by_its_run_folder(tmp_path):
    port, run = free_port(), tmp_path / "run"
    code, said = status(port)
    assert code == 1
    assert said.startswith(f"nobody listens at 127.0.0.1:{port}: start the learner; if it runs, compare port= there")
    assert "no-such-host.invalid is no known name" in status(port, "--ip", "no-such-host.invalid")[1]
    assert "tcp://not a host:1 is no address: say ip=" in status(1, "--ip", "not a host")[1]
    assert "There is no run in" in status(port, "--run-dir", run)[1]
    run.mkdir()
    assert "No learner has ever run in" in status(port, "--run-dir", run)[1]
    (run / "lock").write_text("4711")
    assert "start it again with the same command" in status(port, "--run-dir", run)[1]
    (run / "summary.json").touch()
    assert "has ended: see its summary.json" in status(port, "--run-dir", run)[1]
    (run / "config.yaml").touch()  # a later start, which has not ended
    os.utime(run / "summary.json", (1, 1))
    assert "start it again with the same command" in status(port, "--run-dir", run)[1]
    (run / "evaluation.json").touch()
    assert "has ended: see its evaluation.json" in status(port, "--run-dir", run)[1]
    with open(run / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = status(port, "--run-dir", run)
    assert code == 1
    assert f"Process 4711 holds {run}, but does not answer at this address" in said
