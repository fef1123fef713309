"""The report: its numbers are the summary's, nothing in it is markup but ours, and it asks for nothing."""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from omegaconf import OmegaConf
from serl_client import Feature

from serl_launcher import launcher
from serl_launcher.config import composed, saved
from serl_launcher.report import begun, charts, page
from serl_launcher.report.elements import VOID
from serl_launcher.store.store import Store
from serl_launcher.training.facts import facts_of
from serl_launcher.training.tallies import Point
from tests.shared.common import CONFIG, STATE
from tests.shared.data import blank_segment
from tests.shared.here import start
from tests.shared.tools import called
from tests.training.life import found

pytestmark = pytest.mark.slow
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>&\"'\x00\x1b[2J"
CAMERA = "observation.images.front"
WORDS = [
    "task=fake", "plan=from_scratch", "algo=sac", "max_env_steps=150", "random_steps=50", "eval_episodes=2",
    "critic.hidden=[16,16]", "policy.hidden=[16,16]", "batch_size=16", "log=false",
]  # fmt: skip


class Strict(HTMLParser):
    """Collects elements, texts and attributes; fails where an element is not closed, or closed in a wrong order."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append(tag)
        self.attributes += attrs
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def checked(html):
    """The parsed page, which is well formed, asks for nothing, runs nothing, and may not."""
    parsed = Strict(html)
    assert not {"script", "iframe", "object", "base", "form"} & set(parsed.tags)
    for name, value in parsed.attributes:
        assert not name.startswith("on")
        assert name != "style"
        assert name not in ("src", "href") or value.startswith("data:")
    policy = next(value for _, value in parsed.attributes if "default-src" in (value or ""))
    style = re.search("<style>(.*)</style>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'" in policy
    assert not re.search(r"url\(|@import|https?:", style)
    assert ("charset", "utf-8") in parsed.attributes
    return parsed


def begin(run_dir, *words):
    """A run's folder as a learner's start leaves it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = composed(CONFIG, ["learner=true", f"run_dir={run_dir}", "task=fake", *words])
    begun.save(config, run_dir / "config.yaml", ["learner=true", "task=fake", *words])
    return run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that really came to its end."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    start(run_dir, WORDS)
    return run_dir


def test_the_numbers_of_facts_and_report_are_those_of_the_summary(finished):
    facts, summary = facts_of(finished), json.loads((finished / "summary.json").read_text())
    for name in ("env_steps", "episodes", "assisted", "updates", "wall_s", "person"):
        assert getattr(facts, name) == summary[name], name
    told = [(each.success.rate, each.episodes, each.return_mean) for each in facts.evaluations]
    results = [result for result in (summary["before"], summary["eval"]) if result]
    assert told == [(result["success"], result["episodes"], result["return_mean"]) for result in results]
    assert [(phase.state, phase.mode) for phase in facts.phases][-1] == ("done", "evaluate")
    assert facts.state == "ended"
    assert facts.curves.success
    assert facts.curves.machines.keys() >= {"age", "free"}
    assert facts.curves.losses["critic_loss"]
    assert facts.control.fps == 10
    again = summary["eval"] | {"success": 0.5}
    for name, result in (("evaluated again", again), ("after training", summary["eval"])):
        (finished / "evaluation.json").write_text(json.dumps(summary | {"eval": result}))
        assert facts_of(finished).evaluations[-1].name == name
    (finished / "evaluation.json").unlink()
    text = checked(page.write(finished).read_text()).text
    shown = [f"{summary['env_steps']:,}", f"{summary['updates']:,}", str(facts.evaluations[-1].success),
             summary["weights_sha256"], facts.run, "Start by start, after training"]  # fmt: skip
    assert not [each for each in shown if each not in text]


def test_a_run_without_its_summary_counts_the_same_from_its_store(finished, tmp_path):
    """As one that was killed, in its last evaluation."""
    killed = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("summary.json", "server"))
    before, now = facts_of(finished), facts_of(killed)
    assert (now.env_steps, now.episodes, now.updates) == (before.env_steps, before.episodes, before.updates)
    assert now.evaluations[-1].success == before.evaluations[-1].success
    assert "not known" in checked(page.write(killed).read_text()).text, "the store does not tell its starts"


def test_a_phase_that_sends_the_actors_home_is_not_the_end_of_the_run(spec, tmp_path):
    run_dir = begin(tmp_path / "run")
    store = Store.create(run_dir / "store", spec, {"online": 200})
    for phase, state, place in (("practise", "stopped", "now"), ("", "ended", "done")):
        store.direct({"phase": phase, "mode": "stop"})
        store.commit()
        facts = facts_of(run_dir)
        assert facts.state == state
        assert {each.name: each.state for each in facts.phases}["practise"] == place
    store.close()


def test_cameras_are_shown_as_small_images_and_a_state_as_lines(spec, tmp_path):
    seen = dataclasses.replace(spec, observation={STATE: Feature((8,)), CAMERA: Feature((96, 160, 3), "uint8")})
    blind, sees = found(begin(tmp_path / "blind"), spec), begin(tmp_path / "sees")
    store = Store.create(sees / "store", seen, {"online": 200})
    store.direct({"into": "online", "phase": "practise", "mode": "collect"})
    store.lives.hello("arm", "outbox", "A", [])
    for number in range(3):
        store.stage("A", number, blank_segment(seen, f"e{number}", steps=8, ends="terminated"))
    store.commit()
    store.close()
    parsed = checked(page.write(sees).read_text())
    assert parsed.tags.count("img") == 10, "five of the first and of the last episode; none has failed"
    parsed = checked(page.write(blind).read_text())
    assert ("img" in parsed.tags, "polyline" in parsed.tags) == (False, True)
    assert "The failed episode" in parsed.text


def test_no_value_from_outside_is_markup(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("server"))
    config, summary = saved(run_dir), json.loads((run_dir / "summary.json").read_text())
    config.task.name, config.remembered = HOSTILE, [HOSTILE]
    OmegaConf.save(config, run_dir / "config.yaml")
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(f"{begun.COMMAND}train.py {HOSTILE!r}\n{begun.VERSIONS}{HOSTILE!r}\n{text}")
    summary["eval"]["trials"], summary["changes"] = [[HOSTILE, True, 1.0]], [{"updates": 1, "what": HOSTILE}]
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "errors.log").write_text(f"2026-01-01 00:00:00 {HOSTILE[:60]}\nTraceback\nValueError: {HOSTILE}\n")
    with open(run_dir / "metrics.jsonl", "a") as file:
        record = {"kind": "update", "time": 1.0, "updates": 200, HOSTILE: 1.0, "nan": None, "rate": 1}
        file.write(json.dumps(record) + "\n" + "torn {\n[]\n")
    parsed = checked(page.write(run_dir).read_text())
    assert parsed.text.count("<script>alert(1)</script>") > 5, "it is shown as text"
    assert not {"\x00", "\x1b"} & set(parsed.text)


@pytest.mark.parametrize("kept", [["config.yaml"], ["config.yaml", "metrics.jsonl"], ["config.yaml", "store"]])
def test_a_run_of_which_only_a_part_is_there_has_a_report(finished, tmp_path, kept):
    for name in kept:
        copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
        copy(finished / name, tmp_path / name)
    if "metrics.jsonl" in kept:
        (tmp_path / "store").mkdir()
        (tmp_path / "store/index.sqlite").write_bytes(b"no database")
    text = checked(page.write(tmp_path).read_text()).text
    assert ("never evaluated" in text) == ("store" not in kept)
    assert ("the store cannot be read" in text) == ("metrics.jsonl" in kept)


def test_two_runs_are_compared_by_the_tool_start_by_start(finished, tmp_path):
    other = shutil.copytree(finished, tmp_path / "other", ignore=shutil.ignore_patterns("server"))
    status, said = called("report", finished, other, "--out", tmp_path / "both.html")
    assert (status, said.strip()) == (0, str(tmp_path / "both.html"))
    text = checked((tmp_path / "both.html").read_text()).text
    assert "On the 2 starts that both were evaluated on" in text
    (other / "summary.json").unlink()
    assert "No paired comparison" in checked(page.page(facts_of(finished), [facts_of(other)])).text
    status, said = called("report", tmp_path)
    assert (status, "holds no run (it has no config.yaml): name the folder of a run" in said) == (1, True)


def test_of_two_runs_of_which_one_has_no_curve_the_other_is_drawn_and_named():
    lines = [charts.Line([], "empty"), charts.Line([Point(0, 1, 1, 1), Point(8, 2, 2, 2)], "full", "other")]
    drawn = str(charts.chart("Return", "Why.", lines, x="steps"))
    assert ("full" in drawn, "empty" in drawn) == (True, False)
    assert charts.chart("Return", "Why.", lines[:1], x="steps") is None


def test_what_differs_from_the_default_and_the_commands_of_all_starts_are_told(tmp_path):
    run_dir = begin(tmp_path / "run", "algo=sac", "seed=7", "algo.discount=0.5")
    begin(run_dir, "plan=evaluate", "seed=7")
    begin(run_dir, "plan=evaluate", "seed=7")
    first, second = begun.commands(run_dir / "config.yaml")
    assert (first.split()[-1], second.split()[-2:]) == ("algo.discount=0.5", ["plan=evaluate", "seed=7"])
    assert "Python 3" in begun.versions(run_dir / "config.yaml")
    assert saved(run_dir).seed == 7
    found = begun.differing(saved(begin(tmp_path / "b", "algo=sac", "algo.discount=0.5")), CONFIG, ["task=fake"])
    assert found == [("algo.discount", "0.5", "0.99")]


def test_a_report_that_cannot_be_written_is_no_reason_for_a_run_to_fail(tmp_path, caplog):
    begin(tmp_path)
    (tmp_path / "report.html").mkdir()
    launcher.report(tmp_path)
    assert "no report (IsADirectoryError" in caplog.text
