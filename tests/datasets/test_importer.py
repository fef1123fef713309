"""Bringing a LeRobot dataset into a store: once, in whole episodes, also when the importer is killed."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from serl_client.episode import Outcome
from serl_client.errors import ConfigError
from serl_client.names import MAX_NAME
from serl_client.spec import Feature, Spec

from serl_launcher.datasets.export import export_run
from serl_launcher.datasets.importer import _Import
from serl_launcher.datasets.reader import Dataset, Episode
from serl_launcher.datasets.units import conversions, degrees_per_percent
from serl_launcher.store.directives import DATASET
from serl_launcher.store.store import Store
from serl_launcher.training.plan import Plan, PlanSource
from tests.shared import oracle
from tests.shared.clients import connected
from tests.shared.common import PATIENCE, STATE, TRAIN, until
from tests.shared.programs import Programs, facts

from .exporting import bring, catalog

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = pytest.mark.slow  # lerobot's writer, in a process of its own


@pytest.fixture
def client(join):
    """client(server, spec) -> a connected TrainerClient."""
    return lambda server, spec: connected(join(server, spec=spec, told=False))


def steps(run_dir):
    return sum(facts(run_dir).episodes.values())


def assert_there_once(run_dir, dataset):
    """Every episode of the dataset is in the store as a whole, once; what else there is, is discarded."""
    kept = [episode for episode in catalog(run_dir) if not episode.discard]
    assert [episode.steps for episode in kept] == dataset.lengths
    assert all(episode.closed and episode.source == "demo" for episode in kept)
    found = oracle.whole(run_dir / "store").steps
    for episode, theirs in zip(kept, dataset, strict=True):
        assert [step.index for step in found[episode.number]] == list(range(episode.steps))
        assert np.array_equal([step.origin for step in found[episode.number]], theirs.column(STATE))


@pytest.mark.parametrize("name", ["low", "video"])
def test_a_dataset_makes_the_store_where_no_actor_will_and_its_directive_is_no_actors(serving, client, made, name):
    server, dataset = serving(), made[name]
    bring(server, dataset.folder)
    assert_there_once(server.run_dir, dataset)
    before = catalog(server.run_dir)
    bring(server, dataset.folder)
    assert catalog(server.run_dir) == before
    assert client(server, dataset.spec()).state.directive["mode"] == "idle"


def test_the_store_goes_on_with_the_directive_before_it(tmp_path, low):
    store = Store.create(tmp_path / "store", low.spec(), {"demo": 1000})
    first = store.direct({"mode": "collect", "into": "demo"})
    other = store.direct({"mode": DATASET, "into": "demo"})
    assert (first, other, store.directives.newest) == (1, 2, 1)
    assert store.direct({"mode": DATASET, "into": "demo"}) == 2
    assert store.direct({"mode": "collect", "into": "demo"}) == 1
    assert store.direct({"mode": "idle"}) == store.directives.newest == 3
    store.close()


def test_it_waits_for_the_first_actor_and_takes_its_spec(serving, client, low):
    spec, server = Spec(low.spec().observation, Feature((2,), low=-3, high=3), fps=10), serving()
    importer = threading.Thread(target=bring, args=(server, low.folder), kwargs={"waits": True})
    importer.start()
    importer.join(0.5)
    assert importer.is_alive()
    assert server.server.store is None
    client(server, spec)
    importer.join(PATIENCE)
    assert not importer.is_alive()
    assert server.server.store.spec == spec
    assert_there_once(server.run_dir, low)


def test_another_robots_dataset_is_refused_and_nothing_is_written(tmp_path, serving, low):
    other = Spec({STATE: Feature((7,))}, Feature((2,), low=-1, high=1), fps=10)
    Store.create(tmp_path / "run/store", other, {"demo": 1000}).close()
    with pytest.raises(ConfigError, match=r"not of this run's robot: its observation.state is \[4\], the run's \[7\]"):
        bring(serving(), low.folder)
    assert not catalog(tmp_path / "run")


@pytest.mark.parametrize(
    ("action", "damaged", "why"),
    [
        (Feature((2,), low=-1, high=1), STATE, "observation.state must be finite"),
        (Feature((2,), low=0, high=1, one_hot=True), None, "action should be one-hot"),
        (Feature((2,), low=-1e-6, high=1e-6), None, "action lies more than"),
    ],
)
def test_a_dataset_of_which_no_store_takes_any_episode_ends_the_import_with_the_first_reason(
    tmp_path, serving, low, monkeypatch, action, damaged, why
):
    Store.create(tmp_path / "run/store", Spec(low.spec().observation, action, fps=10), {"demo": 1000}).close()
    column = Episode.column
    monkeypatch.setattr(Episode, "column", lambda self, name: column(self, name) * (np.nan if name == damaged else 1))
    with pytest.raises(ConfigError, match=f"episode 0 of {low.folder}: {why}.* begin in a new run_dir"):
        bring(serving(), low.folder)
    assert not catalog(tmp_path / "run")


@pytest.mark.parametrize("begun", [False, True])
def test_an_episode_that_cannot_be_imported_is_left_out_by_name_and_the_others_are_there_once(
    serving, low, monkeypatch, caplog, begun
):
    """begun: rows of it came before it failed, and are discarded for good."""
    segments = Episode.segments

    def damaged(self, *arguments):
        bad = self.entry["episode_index"] == 0
        yield from segments(self, *arguments) if begun or not bad else ()
        if bad:
            raise IndexError("no such frame")

    monkeypatch.setattr(Episode, "segments", damaged)
    server = serving()
    for _ in range(2):
        bring(server, low.folder)
        there = catalog(server.run_dir)
        assert [episode.steps for episode in there if not episode.discard] == low.lengths[1:]
        assert [(e.steps, e.judged_by) for e in there if e.discard] == [
            (low.lengths[0], f"importer: episode 0 of {low.folder}: no such frame"[:MAX_NAME])
        ] * begun
    assert f"1 episodes of {low.folder} are left out, such as episode 0 of {low.folder}: no such frame" in caplog.text
    assert f"importer: episode 0 of {low.folder}\nTraceback" in (server.run_dir / "errors.log").read_text()


def test_a_source_that_is_too_small_is_refused_with_the_figures(tmp_path, serving, low):
    with pytest.raises(ConfigError, match=r"capacity is 70 steps.*has 50; its longest episode has 30.*at least 80"):
        bring(serving(70), low.folder)
    assert not (tmp_path / "run/store").exists()


def test_a_long_episode_that_the_store_keeps_in_parts_is_there_once(serving, low):
    server = serving(80)
    for _ in range(2):
        bring(server, low.folder)
        there = catalog(server.run_dir)
        assert sum(episode.steps for episode in there) == sum(low.lengths)
        assert not any(episode.discard for episode in there)
    assert any(episode.id.endswith(".part2") for episode in there)


def test_its_outcomes_come_with_it_and_a_relabelled_episode_is_not_brought_again(serving, client, flagged):
    server = serving()
    bring(server, flagged.folder)
    there = catalog(server.run_dir)
    assert [(episode.success, episode.terminated, episode.final) for episode in there] == [(1, 1, 1), (0, 1, 1)]
    person = client(server, flagged.spec())
    person.push(Outcome(there[0].id, False, discard=True, judged_by="operator"))
    assert person.drain(PATIENCE)
    bring(server, flagged.folder)
    after = catalog(server.run_dir)
    assert [(episode.id, episode.discard) for episode in after] == [(there[0].id, 1), (there[1].id, 0)]


IMPORT = """
import sys
from pathlib import Path
from serl_launcher.datasets.importer import import_datasets
from serl_launcher.training.plan import Plan, PlanSource

folder, run_dir, local = sys.argv[1:]
plan = Plan({"demo": PlanSource(20_000, dataset=folder)}, {}, {})
import_datasets(plan, Path(run_dir), local=local, waits=False)
"""


def test_after_kill_9_of_the_importer_nothing_is_doubled(serving, made):
    dataset, half, server = made["long"], False, serving(20_000)
    command = [sys.executable, "-c", IMPORT, dataset.folder, server.run_dir, server.local]
    for share in (0.2, 0.5, 0.8):
        process = subprocess.Popen(command)
        until(lambda: process.poll() is not None or steps(server.run_dir) >= share * 97 * 60)  # noqa: B023
        process.kill()
        process.wait()
        half |= any(not episode.closed for episode in catalog(server.run_dir))
    assert subprocess.run(command).returncode == 0
    assert half, "no kill has hit an episode"
    there = catalog(server.run_dir)
    assert [e.steps for e in there if not e.discard] == dataset.lengths
    assert len({e.id.partition("~")[0] for e in there}) == len(dataset.lengths)
    assert all(e.closed and not e.final for e in there)
    assert subprocess.run(command).returncode == 0
    assert catalog(server.run_dir) == there


def test_each_try_at_an_episode_has_a_name_of_its_own():
    of = SimpleNamespace(_begin="dataset-demo-pick", _conversion=SimpleNamespace(mark=""))
    found = [*islice(_Import._names(of, 3), 4)]
    assert found == ["dataset-demo-pick-000003" + mark for mark in ("", "~2", "~3", "~4")]


def test_a_killed_importer_is_started_again_and_the_policy_is_trained(tmp_path, made):
    """The learner's program on a dataset alone: one phase of imitation, which no actor takes part in."""
    run_dir = tmp_path / "run"
    with Programs(tmp_path) as programs:
        learner = programs.start(
            "learner", "task=fake", "algo=sft", "plan=sft", "phase=clone", "policy=flow",
            "policy.network.hidden=[32,32]",
            f"plan.sources.demo.dataset={made['long'].folder}", "plan.sources.demo.capacity=7000", "batch_size=16",
            'plan.phases.clone.until=["updates >= 20"]',
        )  # fmt: skip
        programs.until(lambda: steps(run_dir) > 500)
        programs.kill("importer")
        assert programs.status(learner, 300) == 0, programs.said()
    assert "importer ended with status -9: starting it again" in programs.said()
    assert "20 updates" in programs.said()
    assert "Traceback" not in programs.said()
    assert_there_once(run_dir, made["long"])
    assert list((run_dir / "checkpoints").glob("[0-9]*/manifest.json"))


def test_a_dataset_that_is_not_there_ends_the_program_with_a_sentence(tmp_path):
    words = ["learner=true", "task=fake", "plan=sft", f"run_dir={tmp_path / 'run'}"]
    words += [f"plan.sources.demo.dataset={tmp_path / 'nowhere'}"]
    done = subprocess.run([sys.executable, TRAIN, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nowhere holds no LeRobot dataset" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quiet")
def test_what_a_run_exported_is_the_same_in_another_run(tmp_path, serving, spec, make_segment):
    """Spec, steps, rewards, ends and outcomes; but the final observation of an episode that was truncated is not."""
    store = Store.create(tmp_path / "first/store", spec, {"online": 1000})
    store.lives.hello("arm", "outbox", "session", [])
    store.direct({"mode": "collect", "phase": "practise", "into": "online"})
    records = [
        make_segment("a", key=1, steps=8, ends="terminated"), Outcome("a", True),
        make_segment("b", key=2, steps=5, ends="truncated"), Outcome("b", False),
        make_segment("c", key=3, steps=7, ends="terminated"),
    ]  # fmt: skip
    for seq, record in enumerate(records):
        store.stage("session", seq, record)
    store.commit()
    store.close()
    shard = Dataset(*export_run(tmp_path / "first", 10, ["online"]))
    assert shard.spec() == spec
    server = serving()
    bring(server, shard.folder)
    assert_there_once(server.run_dir, shard)
    there = catalog(server.run_dir)
    found = [(e.steps, e.success, e.terminated, e.truncated, e.final, e.reward, e.task) for e in there]
    assert found == [(8, 1, 1, 0, 1, 28, "reach"), (5, 0, 0, 1, 0, 10, "reach"), (7, None, 1, 0, 1, 21, "reach")]


JOINTS = ("shoulder_pan.pos", "elbow_flex.pos", "wrist_roll.pos", "gripper.pos")
ENDS = {"shoulder_pan": (823, 3311), "elbow_flex": (871, 3090), "wrist_roll": (0, 4095), "gripper": (2034, 3500)}
MOVED = {"wrist_roll": {"range_max": 4000}}


def of_run(tmp_path, low, units):
    """A run of this dataset's robot, whose numbers have these units."""
    theirs = low.spec()
    state = replace(theirs.observation[STATE], units=units[0], names=JOINTS)
    action = replace(theirs.action, low=-200, high=200, units=units[1], names=JOINTS[:2])
    spec = replace(theirs, observation={STATE: state}, action=action)
    Store.create(tmp_path / "run/store", spec, {"demo": 1000}).close()
    return spec


def calibrated(tmp_path, **motors):
    """lerobot's file of an arm, {motor: what it is like}."""
    entries = {
        name: {
            "id": i,
            "drive_mode": 0,
            "homing_offset": 7,
            "range_min": low,
            "range_max": high,
            **motors.get(name, {}),
        }
        for i, (name, (low, high)) in enumerate(ENDS.items(), 1)
    }
    (tmp_path / "arm.json").write_text(json.dumps(entries))
    return str(tmp_path / "arm.json")


@pytest.mark.parametrize(
    ("units", "said", "complaint"),
    [
        ((("deg", "deg", "deg", "percent"), "deg"), None, "does not say what its observation.state is measured in, and "
         "the run's is in degrees: find out, then write plan.sources.demo.units=degrees"),
        (((), "percent"), None, "its action is measured in, and the run's is in percent"),
        (((), "percent"), "degrees", r"the action of .* is in degrees, the run's in \['percent', 'per.*, and only"),
        (("rad", "rad"), "degrees", r"the observation.state of .* is in degrees, the run's in \['rad', "),
        ((("deg", "rad", "", ""), ()), "degrees", r"is in degrees, the run's in \['deg', 'rad', '', ''\]"),
        (("deg", "deg"), "percent", r"say plan.sources.demo.calibration=FILE, lerobot's .* Without that file, begin"),
    ],
)  # fmt: skip
def test_a_dataset_that_says_no_unit_is_asked_where_the_run_has_one(tmp_path, serving, low, units, said, complaint):
    of_run(tmp_path, low, units)
    with pytest.raises(ConfigError, match=complaint):
        bring(serving(), low.folder, units=said)
    assert not catalog(tmp_path / "run")


@pytest.mark.parametrize(
    ("units", "said"),
    [((("deg", "deg", "deg", "percent"), "deg"), "degrees"), (("m", ""), None), (((), "percent"), "percent")],
)
def test_a_dataset_of_the_same_unit_is_taken_and_of_metres_nobody_is_asked(tmp_path, serving, low, units, said):
    of_run(tmp_path, low, units)
    server = serving()
    bring(server, low.folder, units=said)
    assert_there_once(server.run_dir, low)


def test_percent_become_degrees_as_lerobot_measures_both(tmp_path):
    """Of the same readings of servos: bit by bit, but for rounding."""
    motors = pytest.importorskip("lerobot.motors", reason="lerobot's buses are not installed")
    feetech = pytest.importorskip("lerobot.motors.feetech", reason="lerobot's buses are not installed")
    file = calibrated(tmp_path)
    known = {name: motors.MotorCalibration(**entry) for name, entry in json.loads(Path(file).read_text()).items()}
    measured = {}
    for mode in (motors.MotorNormMode.RANGE_M100_100, motors.MotorNormMode.DEGREES):
        on = {name: motors.Motor(entry.id, "sts3215", mode) for name, entry in known.items()}
        bus = feetech.FeetechMotorsBus("nowhere", on, known)
        seen = [bus._normalize({known[name].id: raw for name, raw in row.items()}) for row in readings()]
        measured[mode] = np.array([[*row.values()] for row in seen])
    percent, degrees = measured.values()
    factors = np.array([degrees_per_percent(file)[f"{name}.pos"] for name in ENDS])
    np.testing.assert_allclose(percent * factors, degrees, rtol=1e-12, atol=1e-10)
    assert np.abs(degrees - percent).max() > 50


def readings():
    """Raw positions, also the ends, {motor: steps} each."""
    random = np.random.default_rng(0)
    shares = [*random.random(50), 0.0, 0.5, 1.0]
    return [{name: round(low + share * (high - low)) for name, (low, high) in ENDS.items()} for share in shares]


def test_a_dataset_in_percent_comes_in_degrees_and_by_one_calibration_alone(tmp_path, serving, low):
    of_run(tmp_path, low, (("deg", "deg", "deg", "percent"), "deg"))
    server, file = serving(), calibrated(tmp_path)
    for _ in range(2):
        bring(server, low.folder, units="percent", calibration=file)
        assert [episode.steps for episode in catalog(server.run_dir)] == low.lengths
    factors = np.array([degrees_per_percent(file)[name] for name in JOINTS]) ** [1, 1, 1, 0]
    found = oracle.whole(server.run_dir / "store").steps
    for episode, theirs in zip(catalog(server.run_dir), low, strict=True):
        state = np.float32(theirs.column(STATE) * factors)
        assert np.array_equal([step.origin for step in found[episode.number]], state)
    for words in ({"units": "degrees"}, {"units": "percent", "calibration": calibrated(tmp_path, **MOVED)}):
        with pytest.raises(ConfigError, match=r"imported with another unit, calibration, .* say the same again, or"):
            bring(server, low.folder, **words)
    assert [episode.steps for episode in catalog(server.run_dir)] == low.lengths


@pytest.mark.parametrize(
    ("motors", "units", "complaint"),
    [
        ({"elbow_flex": {"drive_mode": 1}}, "percent", "elbow_flex is turned around, or does not count 4096 steps"),
        ({"elbow_flex": {"range_max": 9000}}, "percent", "elbow_flex is turned around, or does not count 4096 steps"),
        ({"elbow_flex": {"range_min": None}}, "percent", r"arm.json cannot be read \(TypeError\)"),
        ({}, "degrees", "nothing of .* is in percent where the run is in degrees, .*: leave it out"),
    ],
)
def test_a_calibration_that_tells_no_degrees_is_refused(tmp_path, serving, low, motors, units, complaint):
    of_run(tmp_path, low, ("deg", "deg"))
    with pytest.raises(ConfigError, match=complaint):
        bring(serving(), low.folder, units=units, calibration=calibrated(tmp_path, **motors))
    assert not catalog(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "fits"),
    [((None, None), True), (("degrees",) * 2, True), (("degrees", "percent"), False), ((None, "degrees"), False)],
)
def test_a_run_of_datasets_alone_takes_those_of_one_unit(low, words, fits):
    """Of a run that says no unit, as no actor has come: two datasets, of which the plan says these units."""
    plan = Plan({name: PlanSource(100, units=word) for name, word in zip("ab", words, strict=True)}, {}, {})
    datasets = dict.fromkeys("ab", low)
    if fits:
        assert not any(found.factors for found in conversions(plan, datasets, low.spec()).values())
        return
    with pytest.raises(ConfigError, match=r"not measured in the same unit \(a (degrees|unsaid), b (percent|degrees)\)"):
        conversions(plan, datasets, low.spec())
