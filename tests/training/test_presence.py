"""The learner says who has left and who is back, once each, and what a phase lacks that nobody who is here does."""

import logging

import pytest
from serl_client.errors import ConfigError

from serl_launcher.training.presence import HOPE_S, SAY_S, Presence

from .life import phase, plan_of

WHY = "it has no operator"


def here(*names, because="", paced=True):
    """Actors as the server tells of them."""
    return [[name, because, paced] for name in names]


def test_who_has_left_is_said_with_the_time_since_then_and_so_is_the_return(clock, caplog):
    caplog.set_level(logging.INFO)
    actors = Presence()
    assert str(actors) == "none yet: start one with run_actor.sh"
    actors.update(here("left", "right"))
    assert str(actors) == "left, right"
    actors.update(here("right"))
    clock.advance(12)
    actors.update(here("right"))
    assert str(actors) == "right; left left 12 s ago"
    actors.update([])
    assert str(actors) == "left left 12 s ago; right left 0 s ago; start one with run_actor.sh"
    actors.update(here("left", because=WHY))
    assert (str(actors), actors.here) == ("left (idles); right left 0 s ago", ["left"])
    said = [record.getMessage() for record in caplog.records]
    assert said == ["actor left has left", "actor right has left", "actor left is back"]


def test_of_many_that_have_left_the_latest_are_named():
    actors = Presence()
    for number in range(100):
        actors.update(here(f"a{number}"))
    assert len(str(actors)) < 300
    assert "a98 left" in str(actors)


def demonstrate(until="operator"):
    return plan_of(demonstrate=phase(updates=(), mode="teleop", into="demo", until=until)).phases["demonstrate"]


@pytest.mark.parametrize(
    ("actors", "until", "is_refused"),
    [
        (here("left", "right", because=WHY), "demo.episodes >= 20", True),
        (here("left", because=WHY) + here("arm", because=WHY, paced=False), "operator", False),  # somebody is there
        (here("left", because=WHY), ["demo.episodes >= 20", "wall_s >= 600"], False),
        (here("left", because=WHY) + here("right"), "operator", None),
        ([], "operator", None),  # the console says how to start one
    ],
)
def test_a_phase_that_nobody_here_can_do_says_so_once_and_ends_the_run_where_nobody_can_help(
    clock, caplog, actors, until, is_refused
):
    seen, wanted = Presence(), demonstrate(until)
    seen.update(actors)
    for at in (0.0, SAY_S - 1):
        clock.advance(at)
        seen.look(wanted, 0)
        assert not seen.lack
    clock.advance(1)
    seen.look(wanted, 0)
    assert seen.lack.startswith("an actor that can do it (left: it has no operator") == (is_refused is not None)
    clock.advance(HOPE_S - SAY_S - 1)
    seen.look(wanted, 0)
    clock.advance(1)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"phase demonstrate cannot go on without an .*task\.env\.operator=keyboard"
        ):
            seen.look(wanted, 0)
    else:
        seen.look(wanted, 0)
    assert len(caplog.records) == (is_refused is not None)


def test_while_steps_come_or_others_join_a_phase_lacks_nothing(clock, caplog):
    seen = Presence()
    for second in range(100):
        seen.update(here(*(f"late {number}" for number in range(second // 3 % 2 + 1)), because=WHY))
        seen.look(demonstrate(), second // 50 * second)
        assert not seen.lack
        clock.advance(1)
    assert not caplog.records


def test_a_phase_in_which_nobody_acts_goes_on_without_an_actor_that_can(clock):
    seen, wanted = Presence(), plan_of(clone=phase(mode="idle", into=None, until="operator")).phases["clone"]
    seen.update(here("judge", because="it only evaluates"))
    for _ in range(2):
        seen.look(wanted, 0)
        clock.advance(HOPE_S)
    assert not seen.lack


def test_an_evaluation_names_who_began_it_and_left_until_they_are_back(clock, caplog):
    seen, wanted = Presence(), plan_of(look=phase(updates=(), mode="evaluate", into="eval", until="episodes >= 3"))
    wanted = wanted.phases["look"]
    late = here("late", because="it came after this evaluation had begun, which is for arm, left")
    seen.update(here("before"))
    seen.update([])
    seen.begin_phase()
    seen.update(here("arm", "left") + late)
    seen.update(here("arm"))
    for second in range(2 * int(HOPE_S)):
        seen.look(wanted, 0)
        assert bool(seen.lack) == (second >= SAY_S)
        clock.advance(1)
    assert seen.lack.startswith("the actors without left, to whom this evaluation was dealt")
    assert [record.getMessage() for record in caplog.records] == [f"phase look waits for {seen.lack}"]
    seen.update(here("arm", "left"))
    seen.look(wanted, 0)
    assert not seen.lack
