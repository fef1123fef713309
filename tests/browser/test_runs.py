"""Whole runs in their real processes, watched and ordered in a browser, as a person does who has only the page."""

import os
import signal

import pytest

from tests.browser.conftest import SIZES
from tests.programs.test_page import LINK
from tests.programs.test_plan_runs import SAC_PI0
from tests.report.test_page import begin
from tests.shared.common import free_port
from tests.shared.here import start
from tests.shared.programs import Programs
from tests.shared.tools import called

pytestmark = pytest.mark.slow
QUICKSTART = [  # each phase lasts until the person presses Next
    "task=fake", "task.env.clock=real", "task.env.fps=20", "utd=1", "critic.hidden=[32,32]", "policy.hidden=[32,32]",
    "batch_size=32", "checkpoint_s=1", "log=false",
    *(f"plan.phases.{phase}.until=[operator]" for phase in ("demonstrate", "baseline", "practise", "evaluate")),
]  # fmt: skip
HIORS = [
    "task=sim_arm_pixels", "task.env.clock=real", "plan=hiors", "algo=rejection_pixels", "policy=flow_pixels",
    "policy.encoder.channels=[8,8,16]", "policy.network.hidden=[64,64]", "policy.head.steps=4", "batch_size=32",
    "algo.augment.shift=1", "log=false", "~plan.phases.baseline", 'plan.phases.clone.until=["updates >= 60"]',
    "plan.phases.demonstrate.until=[operator]", "plan.phases.practise.until=[operator]",
]  # fmt: skip
NOW = "document.querySelector('#plan [data-when=now] strong')?.textContent"
CURVE = "document.querySelector('#curves [data-key=return]')?.innerText"


@pytest.fixture
def programs(tmp_path):
    with Programs(tmp_path) as made:
        yield made


def watched(programs, open_tab, *words):
    """(learner, actor, Tab) of a run with these words."""
    learner, actor = programs.start("learner", *words, f"page={free_port()}"), programs.start("actor", *words)
    port, token = programs.until(lambda: LINK.findall(programs.said()))[0]
    tab = open_tab(f"http://localhost:{port}/#{token}")
    tab.wait = programs.until
    return learner, actor, tab


def goes_on(tab, phase):
    """End the phase that is shown with Next, and wait until the next one is."""
    tab.page.click("#orders [data-word=next]")
    tab.says("next: the learner has taken it", "#said")
    tab.until(f"(phase) => {NOW} === phase", phase)


HEIGHTS = """import("/scene.js").then(({ view, show }) => {
    const figure = view(["seen"]), points = [["block", 50, 12], ["tool", 52, 10], ["goal", 50, 96]];
    show(figure, ["seen", points.map(([name, x, y]) => ({ name, x, y }))]);
    return [...figure.querySelectorAll("text")].map((text) => Number(text.getAttribute("y")));
})"""


def is_over(programs, tab, learner, actor):
    """End the run as a person does, by Stop; the page says that its process has gone, too."""
    for _ in range(2):  # it asks once more
        tab.page.click("#orders [data-word=stop]")
    programs.end_well(learner, actor)
    tab.says("The page's process does not answer", "#sentence")
    tab.page.close()
    tab.errors.clear()  # the browser says that nobody listens there any more


def report_of(run_dir, open_tab):
    """The run's report in a tab, which has asked for nothing else, and of which axe-core says nothing serious."""
    tab = open_tab((run_dir / "report.html").as_uri())
    tab.until("document.readyState === 'complete'")
    assert [url for url in tab.requests if not url.startswith("data:")] == [tab.page.url]
    for width, height in SIZES.values():
        tab.page.set_viewport_size({"width": width, "height": height})
        tab.check()
    return tab


def test_a_quickstart_is_watched_and_led_from_its_page_to_its_report(programs, open_tab):
    learner, actor, tab = watched(programs, open_tab, *QUICKSTART)
    tab.says("HUMAN", "#word")
    for name in ("point", "goal"):  # without cameras, in the plane; they move
        place = f"document.querySelector('.scene .{name}')?.outerHTML"
        before = tab.until(place)
        tab.until(f"(before) => {place} !== before", before)
    assert tab.page.evaluate(HEIGHTS) == [13, 21, 99], "of names: none lies over another"
    assert tab.until(NOW) == "demonstrate"
    tab.until("document.querySelectorAll('#episodes [data-word=success][aria-pressed=true]').length >= 3")
    for phase in ("baseline", "practise"):
        goes_on(tab, phase)
        tab.says("POLICY", "#word")
    before = tab.until(CURVE)
    tab.until(f"(before) => {CURVE} !== before", before)
    tab.page.click("#orders [data-word=pause]")
    tab.says("PAUSED", "#word")
    tab.page.click("#orders [data-word=resume]")
    tab.says("POLICY", "#word")
    goes_on(tab, "evaluate")
    tab.until("document.querySelectorAll('#episodes li').length")
    is_over(programs, tab, learner, actor)
    report_of(programs.run_dir, open_tab).says("after training")


@pytest.mark.nightly
def test_a_page_that_is_open_comes_back_by_itself_after_the_learner_was_killed(programs, open_tab):
    learner, actor, tab = watched(programs, open_tab, *QUICKSTART)
    tab.says("HUMAN", "#word")
    port = [str(word) for word in learner.args if str(word).startswith("page=")]
    os.killpg(learner.pid, signal.SIGKILL)
    programs.until(lambda: set(programs.alive()) == {"actor"})
    tab.says("The page's process does not answer", "#sentence")
    assert called("report", programs.run_dir)[0] == 0
    report_of(programs.run_dir, open_tab).says("stopped")
    again = programs.start("learner", *QUICKSTART, *port)
    tab.says("HUMAN", "#word")
    is_over(programs, tab, again, actor)


@pytest.mark.nightly
def test_cameras_and_takeovers_of_hiors_are_seen_while_they_happen(programs, open_tab):
    learner, actor, tab = watched(programs, open_tab, *HIORS)
    tab.says("HUMAN", "#word")
    assert tab.until("document.querySelectorAll('#actors img[src]').length === 2")
    first = "document.querySelector('#actors img').src"
    for _ in range(3):  # images come
        tab.until(f"(before) => {first} !== before", tab.page.evaluate(first))
    tab.until("document.querySelectorAll('#episodes img[src]').length >= 2")
    tab.page.click("#orders [data-word=next]")
    tab.until(f"{NOW} === 'practise'")
    for word in ("POLICY", "HUMAN"):
        tab.says(word, "#word")
    is_over(programs, tab, learner, actor)
    assert report_of(programs.run_dir, open_tab).page.evaluate("document.images.length") >= 10


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread", "same_loggers")
def test_the_report_of_a_run_of_pi0_opens_without_a_request(tmp_path, open_tab):
    start(tmp_path / "run", SAC_PI0)
    assert called("report", tmp_path / "run")[0] == 0
    report_of(tmp_path / "run", open_tab).says("value")


def test_the_report_of_a_run_that_has_only_begun_opens_without_a_request(tmp_path, open_tab):
    begin(tmp_path / "run")
    assert called("report", tmp_path / "run")[0] == 0
    report_of(tmp_path / "run", open_tab).says("never evaluated")
