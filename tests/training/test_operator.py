"""What an operator says to the plan is obeyed once, in the phase that its person saw, over all restarts."""

import shutil

import pytest

from serl_launcher.training import learner, server_sync
from tests.shared.common import until

from .life import commands, leave, phase, plan_of


@pytest.mark.slow
def test_an_operators_command_is_carried_out_once_over_all_restarts(server, live, connect):
    plan = plan_of(**{name: phase(until="operator") for name in ("one", "two", "three")})
    first = live(server, plan).begin()
    client = connect(server)
    client.command("next")
    until(lambda: first.phase == "two" and len(first.made) > 5)
    first.die()
    second = live(server, plan, seed=1).begin()
    until(lambda: len(second.made) > 20)
    assert second.phase == "two", "'next' was for phase one"
    client.command("hold")
    until(lambda: second.learner.state.at.held)
    client.command("resume")
    until(lambda: not second.learner.state.at.held)
    second.die()
    client.command("hold")  # nobody is there to hear it
    until(lambda: [row[1] for row in commands(server.run_dir)] == ["next", "hold", "resume", "hold"])
    third = live(server, plan, seed=2).begin()
    until(lambda: client.state.directive["mode"] == "idle")
    assert (third.phase, third.made) == ("two", [])
    third.die()
    for command in ("resume", "next", "hold"):  # heard at once
        client.command(command)
    until(lambda: len(commands(server.run_dir)) == 7)
    fourth = live(server, plan, seed=3).begin()
    until(lambda: fourth.phase == "three" and fourth.learner.state.at.held)
    for command in ("resume", "next"):
        client.command(command)
    leave(client, fourth)


@pytest.mark.slow
def test_a_run_whose_checkpoints_were_deleted_counts_and_obeys_what_comes_from_then_on(server, live, connect, caplog):
    plan = plan_of(practise=phase(until="env_steps >= 50"), two=phase(until="operator"), three=phase(until="operator"))
    first = live(server, plan).begin()
    client = connect(server)
    until(lambda: first.phase == "two" and len(first.made) > 5)  # the store holds more steps of `practise`
    client.command("next")
    until(lambda: first.phase == "three")
    first.die()
    shutil.rmtree(server.run_dir / "checkpoints")
    second = live(server, plan, seed=1).begin()
    until(lambda: len(second.made) > 20)
    assert second.phase == "practise"
    assert "no checkpoint is left: learning anew" in caplog.text
    assert "`next`, `goto` and `stop` from before are not obeyed" in caplog.text


@pytest.mark.slow
def test_goto_to_the_phase_under_way_ends_it_and_begins_it_again(server, live, connect):
    life = live(server, plan_of(practise=phase(until="operator", on_end=["publish"]))).begin()
    until(lambda: len(life.made) > 20)
    published = life.learner.publisher.version["version"]
    connect(server).command("goto", "practise")
    until(lambda: life.learner.publisher.version["version"] > published)
    until(lambda: life.learner.state.at.updates < life.updates - 20)


@pytest.mark.slow
def test_next_that_is_said_after_goto_to_the_phase_under_way_ends_it(server, live, connect, monkeypatch):
    life = live(server, plan_of(one=phase(until="operator"), two=phase(until="operator"))).begin()
    client, checkpoint = connect(server), learner.Learner.checkpoint

    def slow(trainer, *words):
        monkeypatch.setattr(learner.Learner, "checkpoint", checkpoint)
        client.command("next")
        until(lambda: len(commands(server.run_dir)) == 2)
        return checkpoint(trainer, *words)

    monkeypatch.setattr(learner.Learner, "checkpoint", slow)
    client.command("goto", "one")
    until(lambda: client.state.directive["phase"] == "two")
    client.command("next")
    leave(client, life)


@pytest.mark.slow
def test_next_that_is_said_while_its_phase_ends_by_itself_skips_no_other_one(
    server, live, connect, monkeypatch, caplog
):  # fmt: skip
    plan = plan_of(one=phase(until="updates >= 5"), two=phase(until="operator"), three=phase(until="operator"))
    clients, checkpoint = [], learner.Learner.checkpoint

    def slow(trainer, *words):
        clients.append(connect(server))
        clients[0].command("next")
        until(lambda: commands(server.run_dir))
        monkeypatch.setattr(learner.Learner, "checkpoint", checkpoint)
        return checkpoint(trainer, *words)

    monkeypatch.setattr(learner.Learner, "checkpoint", slow)
    life = live(server, plan).begin()
    until(lambda: len(life.made) > 20)
    assert life.phase == "two"
    assert caplog.text.count(server_sync.LATE) == 1
    (client,) = clients
    client.command("next")
    until(lambda: client.state.directive["phase"] == "three")
    client.command("next")
    leave(client, life)


@pytest.mark.slow
@pytest.mark.parametrize("said", ["before", "after"])
def test_next_is_about_the_phase_that_the_server_had_told_of_when_it_was_said(
    server, live, connect, monkeypatch, caplog, said
):  # fmt: skip
    """Also while the trainer tells of the next phase, and hears of it only afterwards."""
    plan = plan_of(one=phase(until="updates >= 5"), two=phase(until="operator"), three=phase(until="operator"))
    clients, direct = [], server_sync.Director.direct

    def say():
        clients.append(connect(server))
        clients[0].command("next")
        until(lambda: commands(server.run_dir))

    def slow(director, body, limit):
        is_second = body["phase"] == "two" and director.body["phase"] == "one"
        if is_second and said == "before":
            say()
        direct(director, body, limit)
        if is_second and said == "after":
            say()

    monkeypatch.setattr(server_sync.Director, "direct", slow)
    life = live(server, plan).begin()
    until(lambda: life.phase == ("two" if said == "before" else "three") and len(life.made) > 20)
    assert caplog.text.count(server_sync.LATE) == (said == "before")
