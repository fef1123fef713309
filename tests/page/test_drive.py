"""Driving from the page: browsers, the page, the server and an actor on the real clock, over real sockets."""

import io
import os
import time
from contextlib import closing
from threading import Thread

import numpy as np
import pytest
from PIL import Image
from serl_client import messages as m
from serl_client.controller import RandomPolicy
from serl_client.driving import BACK, LEAVE, TAKE, RemoteDriver
from serl_client.runner import run_actor
from websockets.exceptions import ConnectionClosed

from robot_infra.tasks.sim_arm import make
from serl_launcher.datasets.episodes import open_run
from tests.page.conftest import Browser, knocking, serving
from tests.shared.common import PATIENCE, until

CAMERA = "observation.images.front"
PUSH, HELD = {"x": 1.0}, np.zeros(3)


class Wheel(Browser):
    """A page at the controls of an actor. told: what it was answered last."""

    def __init__(self, link, token, actor="arm"):
        super().__init__(link, token)
        self.actor, self.inputs, self.told = actor, 0, {"number": 0}
        self.welcome()

    def turn(self, press="", motion=None, **more):
        """Say an input, as the page does every 50 ms; what it is answered."""
        self.inputs += 1
        said = {"actor": self.actor, "number": self.inputs, "seen": self.told["number"], "press": press}
        self.told = self.ask("drive", **{**said, "motion": motion or {}, "gripper": 0, **more})
        return self.told

    def takes(self):
        """Press until the actor has heard it."""
        until(lambda: self.turn(TAKE)["holder"] == self.told["driver"], why=lambda: str(self.told))


@pytest.fixture
def run(serve):
    return serve(capacities={"online": 20_000})


@pytest.fixture
def sits(run, exits):
    """sits(role) -> a Wheel of one page of the run; all are closed at the end."""
    page = exits.enter_context(serving(run.run_dir, run.local))
    return lambda role="operator", **options: Wheel(
        exits.enter_context(knocking(page)), page.page.tokens.make(role), **options
    )


@pytest.fixture
def steps(run, join):
    """The steps of a simulated arm on the real clock, as its environment gave them; the policy moves it at random."""
    pytest.importorskip("mujoco")
    with closing(make(max_steps=2000, noise=0.0, clock="real", operator="page")) as env:
        client, made, step = join(run, spec=env.spec, remote=env.operator.remote, told=False), [], env.step
        env.step = lambda action: made.append(step(action)) or made[-1]
        run.direct(intervene=True)
        options = {"seed": 0, "operator": env.operator}
        actor = Thread(target=run_actor, args=(env, RandomPolicy(env.spec, 0), client), kwargs=options)
        actor.start()
        try:
            until(lambda: made)
            yield made
        finally:
            run.direct({"phase": "practise", "mode": "stop", "into": "online", "boundary": "now"})
            actor.join(PATIENCE)
        assert not actor.is_alive()


def last(steps, count, *, driven, moves=None):
    """Whether the newest steps were all driven by a person, or none; and whether they moved the arm forward, or not."""
    newest = steps[-count:]
    ahead = [step.executed[0] > 0.4 if moves else (step.executed[:3] == HELD).all() for step in newest]
    return [step.intervened for step in newest] == [driven] * count and (moves is None or all(ahead))


def test_hold_to_move_a_closed_tab_holds_one_drives_and_each_row_says_who(run, sits, steps):
    anna, bert = sits(), sits()
    assert last(steps, 1, driven=False)
    anna.takes()
    until(lambda: anna.turn() and last(steps, 2, driven=True, moves=False))
    until(lambda: anna.turn("", PUSH) and last(steps, 2, driven=True, moves=True))
    refused = until(lambda: bert.turn(TAKE, PUSH)["text"] and bert.told)
    assert (refused["text"], refused["holder"]) == ("somebody else drives", anna.told["driver"])
    until(lambda: anna.turn("", PUSH) and last(steps, 1, driven=True, moves=True))
    anna.socket.close()
    until(lambda: last(steps, 3, driven=True, moves=False))
    bert.takes()
    assert last(steps, 1, driven=True, moves=False), "the arm holds until somebody moves it, or hands it back"
    until(lambda: bert.turn(BACK)["holder"] == "" and last(steps, 2, driven=False), why=lambda: str(bert.told))
    made = len(steps)
    run.direct({"phase": "practise", "mode": "idle", "into": "online", "boundary": "now"})
    until(lambda: all(each["closed"] for each in run.episodes().values()))
    _, readers, (episode,) = open_run(run.run_dir)
    rows = readers["online"].rows(episode)
    assert len(rows["action"]) >= made
    assert rows["intervened"].tolist() == [step.intervened for step in steps][: episode.steps]
    np.testing.assert_array_equal(rows["action"], [step.executed for step in steps][: episode.steps])
    policys = rows["policy_action"] == rows["action"]
    assert policys[~rows["intervened"]].all()
    assert not run.refusals()


@pytest.mark.parametrize("word", ["pause", "discard"])
def test_a_pause_and_the_end_of_an_episode_end_a_takeover(run, sits, steps, word):
    (episode,) = until(lambda: [each["episode"] for each in run.report()["clients"] if each.get("episode")])
    anna = sits()
    anna.takes()
    until(lambda: anna.turn("", PUSH) and last(steps, 1, driven=True, moves=True))
    run.ask(m.Command(word, episode, actor="arm"))
    if word == "pause":
        told = until(lambda: not anna.turn("", PUSH)["holder"] and anna.told["text"] and anna.told)
        assert "the robot is paused" in told["text"]
        made = len(steps)
        assert "the robot is paused" in until(lambda: anna.turn(TAKE)["text"])
        resume = m.Command("resume", actor="arm")  # refused within a second of a pause
        until(lambda: run.ask(resume) and anna.turn("", PUSH) and len(steps) > made + 2)
        assert last(steps, 2, driven=True, moves=False), "it goes on as it was, and nobody is at the controls"
    else:
        until(lambda: anna.turn("", PUSH) and last(steps, 2, driven=False))
        assert anna.told["holder"] == anna.told["driver"], "at the controls, but the policy begins each episode"


def test_previews_come_small_to_whoever_drives_and_an_actor_that_nobody_may_drive_says_nothing(run, sits, join):
    remote = RemoteDriver()
    client = join(run, remote=remote)
    anna, none, viewer = sits(), sits(actor="nobody"), sits("viewer")
    assert "to look only" in viewer.turn(TAKE)
    assert until(lambda: none.turn(TAKE)["text"]) == "this actor is not connected"

    def turn(shade):
        remote.read()
        remote.show({CAMERA: np.full((480, 640, 3), shade, np.uint8)})
        anna.turn(TAKE)
        jpeg = anna.ask("preview", camera=CAMERA)
        image = jpeg and Image.open(io.BytesIO(jpeg))
        return image and (image.size, round(np.asarray(image).mean()))

    until(lambda: turn(200) == ((214, 160), 200))
    until(lambda: turn(90) == ((214, 160), 90))
    assert anna.ask("preview", camera="none") is None
    client.report({"driver": "HUMAN", "remote": remote.holder})
    banner = until(lambda: (told := viewer.ask("state"))["banner"]["word"] == "HUMAN" and told["banner"])
    assert banner["text"] == f"{anna.told['driver']} drives, from a page"
    viewers = {peer.hello.actor for peer in run.server.peers.values() if peer.hello.role == "viewer"}
    assert viewers == {"page", f"page/{os.getpid()}"}, "whoever looks ends no takeover"


@pytest.mark.parametrize(
    "wrong",
    [{"motion": {"x": 2}}, {"motion": {"x": 1e999}}, {"motion": ["x"]}, {"gripper": 1.0}, {"press": "go"},
     {"number": -1}, {"number": 1 << 60}, {"actor": "\u202e"}, {"actor": 7}],
    ids=repr,
)  # fmt: skip
def test_an_input_that_is_none_ends_its_connection(run, sits, wrong):
    with pytest.raises(ConnectionClosed):
        sits().turn(**wrong)


def test_of_many_inputs_thirty_a_second_are_passed_on_and_a_closed_tab_lets_go(run, sits, join):
    remote = RemoteDriver()
    join(run, remote=remote)
    anna = sits()
    until(lambda: (anna.turn(TAKE), remote.read())[1][2])
    heard = []
    remote.hear = heard.append
    begin = time.monotonic()
    for _ in range(500):
        anna.turn("", PUSH)
    assert len(heard) <= 30 * (2 + time.monotonic() - begin)
    anna.socket.close()
    until(lambda: heard[-1].press == LEAVE)
