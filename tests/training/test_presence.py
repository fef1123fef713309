"""The learner says who has left and who is back, once each."""

import logging

from serl_launcher.training.presence import Presence


def test_who_has_left_is_said_with_the_time_since_then_and_so_is_the_return(clock, caplog):
    caplog.set_level(logging.INFO)
    actors = Presence()
    assert str(actors) == "none yet: start one with run_actor.sh"
    actors.update(["left", "right"])
    assert str(actors) == "left, right"
    actors.update(["right"])
    clock.advance(12)
    actors.update(["right"])
    assert str(actors) == "right; left left 12 s ago"
    actors.update([])
    assert str(actors) == "left left 12 s ago; right left 0 s ago; start one with run_actor.sh"
    actors.update(["left"])
    assert (str(actors), actors.here) == ("left; right left 0 s ago", ["left"])
    said = [record.getMessage() for record in caplog.records]
    assert said == ["actor left has left", "actor right has left", "actor left is back"]


def test_of_many_that_have_left_the_latest_are_named():
    actors = Presence()
    for number in range(100):
        actors.update([f"a{number}"])
    assert len(str(actors)) < 300
    assert "a98 left" in str(actors)
