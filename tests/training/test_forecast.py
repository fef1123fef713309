"""What a plan takes at most, and how long its phase still takes at the rates of now."""

import pytest
from serl_client import clock

from serl_launcher.training.forecast import Forecast, planned, rate_of
from serl_launcher.training.metrics import MetricsLog

from .plans import at, edited, load, practise


def test_a_plan_says_whose_minutes_each_phase_takes(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert rate_of(tmp_path) is None
    for updates, rate in enumerate((1.0, 0.5, 99.0), 1):
        log.write("update", {"updates": updates, "rate": rate})
    longer = load(edited("phases.practise.until", ["success[5] >= 1", "env_steps >= 1200 and episodes >= 3"]))
    assert planned(longer, 10.0, 60, rate_of(tmp_path)) == {
        "demonstrate": "robot 2 min, person 2 min", "clone": "training 4 s", "evaluate": "robot 5 min",
        "practise": "robot 2 min, training 40 min; training takes longest",
        "": "robot 9 min, person 2 min, training 40 min; training takes longest",
    }  # fmt: skip
    assert planned(longer, 10.0, 60, None)["practise"] == "robot 2 min, training 2,400 updates"
    endless = planned(load(edited("phases.practise.until", ["operator"])), 10.0, 60, None)
    assert endless["practise"] == endless[""].partition(",")[0] == "robot until a person ends it"


@pytest.mark.parametrize(("waits", "setter"), [("env steps: pace", "the robots set"), ("nothing", "training sets")])
def test_a_phase_under_way_says_how_long_it_still_takes_and_what_sets_the_pace(monkeypatch, waits, setter):
    now, state, forecast = [100.0], at("practise"), Forecast()
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    said = []
    for now[0], steps in ((100.0, 0), (105.0, 20), (200.0, 500)):
        said.append(forecast.look(state, practise(steps, online=steps), waits))
    assert said == ["not known yet"] * 2 + [f"about 2 min at most, {setter} the pace"]  # 500 steps at 5 a second
