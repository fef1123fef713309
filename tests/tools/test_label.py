"""tools/label.py: a verdict that comes late is durable, wins over earlier ones, and all of them are kept."""

import pytest
from serl_client import Outcome
from serl_client.client import TrainerClient

from serl_launcher.store.index import Index
from tests.shared.clients import connected, push_all
from tests.shared.common import PATIENCE, free_port
from tests.shared.tools import called, typed


def label(run, *words, folder=None):
    status, said = called("label", "--port", run.port, "--run-dir", folder or run.run_dir, *words)
    return status, said.strip()


def verdicts(run):
    """{episode: (success, discard, whose word it is)}."""
    return {id: (row["success"], row["discard"], row["judged_by"]) for id, row in run.episodes().items()}


@pytest.fixture
def run(serve):
    made = serve()
    made.report()
    return made


@pytest.fixture
def actor(run, spec, tmp_path, make_segment):
    """An actor of the run that has delivered the finished episodes e0, a success, and e1."""
    with TrainerClient(run.address, actor="arm", spec=spec, outbox=tmp_path / "outbox") as client:
        connected(client)
        run.direct()
        segments = make_segment("e0", ends="terminated"), make_segment("e1", ends="truncated")
        push_all(client, [Outcome("e0", True), *segments])
        assert client.drain(PATIENCE)
        yield client


@pytest.mark.usefixtures("actor")
def test_a_late_failure_wins_a_later_success_wins_over_that_and_a_discard_over_all(run):
    assert verdicts(run)["e0"] == (True, False, "judge")
    for word, kept in (("failure", (False, False)), ("success", (True, False)), ("discard", (None, True))):
        assert label(run, "e0", word) == (0, f"e0: {word}")
        assert verdicts(run) == {"e0": (*kept, "operator"), "e1": (None, False, "")}
    outcomes = Index(run.run_dir / "store" / "index.sqlite").outcomes("e0")
    assert [(o.success, o.discard, o.judged_by) for o in outcomes] == [
        (True, False, "judge"), (False, False, "operator"), (True, False, "operator"), (None, True, "operator"),
    ]  # fmt: skip


def test_what_the_environment_says_afterwards_does_not_overrule_the_operator(run, actor):
    assert label(run, "e1", "failure")[0] == 0
    actor.push(Outcome("e1", True))
    assert actor.drain(20)
    assert verdicts(run)["e1"] == (False, False, "operator")


@pytest.mark.usefixtures("actor")
def test_a_name_that_no_episode_has_is_refused_where_the_store_can_be_seen(run, tmp_path):
    status, said = label(run, "e7", "success")
    assert (status, said.count("\n")) == (1, 0)
    assert "there is no episode 'e7'" in said
    assert "did you mean 'e" in said
    assert "the newest are e1, e0; tools/label.py --run-dir" in label(run, "nothing", "success")[1]
    assert label(run, "e0", "failure", folder=tmp_path / "robot")[0] == 0  # on another machine: the store is not here
    assert verdicts(run)["e0"] == (False, False, "operator")


@pytest.mark.usefixtures("actor")
def test_without_a_name_it_lists_the_episodes_with_what_is_said_of_them(run, tmp_path):
    label(run, "e1", "discard")
    status, said = label(run)
    lines = [line.split() for line in said.splitlines()]
    assert (status, [line[0] for line in lines]) == (0, ["e1", "e0"])
    assert lines[0][-2:] == ["discarded", "(operator)"]
    assert lines[1][1:] == ["practise", "4", "steps", "success", "(judge)"]
    assert "there is no episode in" in label(run, folder=tmp_path / "robot")[1]
    assert "say what e0 was: success, failure, discard" in label(run, "e0")[1]


def test_without_an_actor_or_without_a_learner_it_says_so(run):
    words = ("--port", run.port, "--run-dir", run.run_dir, "e0", "success")
    assert typed("label", *words) == (
        1,
        "error: no actor has come to this run yet, so there is no episode: start one\n",
    )
    run.port = free_port()
    status, said = label(run, "e0", "success")
    assert status == 1
    assert f"nobody listens at 127.0.0.1:{run.port}: start the learner" in said
