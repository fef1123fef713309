"""Puts a run's facts together as one HTML file, and compares them with those of other runs.

The page asks for nothing: its Content-Security-Policy allows its own style and images within it, and no script.
"""

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from omegaconf import OmegaConf
from serl_client.errors import ConfigError

from serl_launcher.report import begun
from serl_launcher.report.charts import Line, chart
from serl_launcher.report.comparison import compared, trials
from serl_launcher.report.elements import Markup, duration, element, number, percent, size, table
from serl_launcher.report.pictures import episodes_shown
from serl_launcher.store.files import replaced
from serl_launcher.training.facts import Facts, facts_of
from serl_launcher.training.machine import MACHINES
from serl_launcher.training.report import Evaluated
from serl_launcher.training.tallies import RECENT, Point, Share

CONFIG = Path(__file__).resolve().parent.parent.parent / "config"  # a wheel has none
LOSSES = 12  # that are drawn
SHOWN_STARTS = 100


def write(run_dir: Path, others: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Write the report of a run, compared with other runs, and return its path (report.html in the run's folder).

    Raises ConfigError for a folder that holds no run, and if its config.yaml cannot be read.
    """
    for folder in (run_dir, *others):
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder} holds no run (it has no config.yaml): name the folder of a run")
    out = out or run_dir / "report.html"
    made = page(facts_of(run_dir), [facts_of(other) for other in others])
    with replaced(out) as aside:
        aside.write_text(made, encoding="utf-8")
    return out


def page(facts: Facts, others: Sequence[Facts] = ()) -> str:
    """Return the HTML of a run's report."""
    style = files("serl_launcher.report").joinpath("report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = f"{facts.run_dir.resolve().name}: {facts.task or 'a run'}"
    head = element(
        "head", element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"), element("title", title), element("style", Markup(style)),
    )  # fmt: skip
    told = time.strftime("%Y-%m-%d %H:%M %Z")
    footer = element(
        "footer", f"Retake wrote this report on {told}. Intervals are of 95 %. Hover a name to explain it."
    )
    body = element("body", _header(facts, title), element("main", *_sections(facts, others)), footer)
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _sections(facts: Facts, others: Sequence[Facts]) -> Iterator[Markup]:
    if facts.warnings:
        yield _section("Warnings", element("ul", *(element("li", each) for each in facts.warnings)), kind="warnings")
    for other in others:
        yield _section(f"Compared with {other.run_dir}", *_compared(facts, other))
    yield _section("Practice", _cards(_curves(facts), "No episode of practice has ended."))
    yield _section("Evaluations", _evaluations(facts.evaluations), *_starts(facts.evaluations))
    yield _section("Plan", _phases(facts))
    yield _section("Episodes", _cards(episodes_shown(facts), "The store holds no finished episode."))
    yield _section("Training", _cards(_losses(facts), "No update was made."))
    yield _section("Machines", _cards(_machines(facts), "Its learner noted nothing of them."))
    yield _section("Data and disk", element("div", _sources(facts), _disk(facts), class_="beside"))
    yield _section("What this run is", *_identity(facts))


def _section(title: str, *children: Markup | None, kind: str | None = None) -> Markup:
    return element("section", element("h2", title), *children, class_=kind)


def _cards(cards: Sequence[Markup | None], otherwise: str) -> Markup:
    found = [card for card in cards if card is not None]
    return element("div", *found, class_="cards") if found else element("p", otherwise, class_="none")


# -- what comes first
def _header(facts: Facts, title: str) -> Markup:
    last = facts.evaluations[-1] if facts.evaluations else None
    share = last.success if last else facts.recent.alone
    what = f"of the latest evaluation ({last.name})" if last else f"of the last {RECENT} episodes, without help"
    low, high = share.interval
    within = f"{share}, {low:.0%} to {high:.0%}" if share.episodes else "nobody judged"
    mean = last.return_mean if last else facts.recent.return_mean
    minutes = sum(value for name, value in facts.person.items() if name.endswith("_min"))
    rate, control = facts.updates_per_s, facts.control
    tiles = [
        _tile("Success", percent(share.rate), within, f"Share of successes {what}, with its 95 % interval (Wilson)."),
        _tile("Return", number(mean), "mean", f"Mean sum of rewards {what}."),
        _tile("Practice", number(facts.env_steps), "steps", "Control cycles that a policy may learn from."),
        _tile("Episodes", number(facts.episodes), f"{facts.assisted:,} assisted",
              "Finished episodes without evaluations; assisted: a person drove a part."),
        _tile("Updates", number(facts.updates), f"{number(rate)} per s" if rate else "gradient steps",
              "Updates of the algorithm, and how many it made each second at last."),
        _tile("Time", duration(facts.wall_s), "of the learner", "Time that the learner worked, over all its starts."),
        _tile("Person", duration(60 * minutes), "of attention",
              "Demonstrations, takeovers, resets by hand, and waiting for the person."),
        _tile("Control", number(control.rate if control else None), f"Hz of {number(control.fps)}" if control else "Hz",
              "How often the newest episode's robot got a command."
              + (f" {control.late:.0%} of these came early or late by half a period." if control else "")),
    ]  # fmt: skip
    states = {"new": "no actor has come yet", "running": "running now", "ended": "its plan has ended",
              "stopped": "stopped before the end of its plan; the same command goes on"}  # fmt: skip
    state = element("p", element("b", facts.state, class_=f"state {facts.state}"), " ", states[facts.state])
    return element("header", element("h1", title), state, element("div", *tiles, class_="tiles"))


def _tile(name: str, value: str, unit: str, why: str) -> Markup:
    return element(
        "div", element("span", name), element("strong", value), element("small", unit), title=why, class_="tile"
    )


# -- curves
def _curves(facts: Facts) -> list[Markup | None]:
    curves, steps = facts.curves, "steps"
    return [
        chart("Unassisted success", f"Share of successes without help, of the last {RECENT} episodes.",
              [Line(curves.success, "success")], x=steps, share=True),
        chart("Success with help", f"Share of successes of the last {RECENT} episodes in which a person took over.",
              [Line(curves.assisted, "success")], x=steps, share=True),
        chart("Return", f"Mean sum of rewards of the last {RECENT} episodes.",
              [Line(curves.returns, "return")], x=steps),
        chart("Interventions", f"Share of steps that a person drove, of the last {RECENT} episodes.",
              [Line(curves.interventions, "person")], x=steps, share=True),
    ]  # fmt: skip


def _losses(facts: Facts) -> list[Markup | None]:
    names = sorted(facts.curves.losses, key=lambda name: (name != "rate", "loss" not in name, name))
    titles = {"rate": ("Speed", "Updates per second.", "per s")}
    found = []
    for name in names[:LOSSES]:
        title, why, unit = titles.get(name, (name.replace("_", " "), f"The metric {name} of the algorithm.", ""))
        points = [Point(x, value, value, value) for x, value in facts.curves.losses[name]]
        found.append(chart(title, why, [Line(points, name)], x="updates", unit=unit))
    return found


def _machines(facts: Facts) -> list[Markup | None]:
    return [
        chart(title.capitalize(), why, [Line([Point(x, y, y, y) for x, y in facts.curves.machines[name]], name)],
              x="minutes", unit=unit)
        for name, (title, unit, why) in MACHINES.items() if name in facts.curves.machines
    ]  # fmt: skip


# -- evaluations and the plan
def _evaluations(evaluations: Sequence[Evaluated]) -> Markup:
    if not evaluations:
        return element("p", "This run was never evaluated: plan=evaluate does it.", class_="none")
    columns = ["policy", "success|Without a person's help; a takeover counts as a failure.", "95 % interval|By Wilson.",
               "mean return|Mean sum of rewards.", "distinct starts|Different first observations."]  # fmt: skip
    return table(columns, (
        [each.name, str(each.success), _interval(each.success), number(each.return_mean),
         f"{each.distinct_starts} of {each.episodes}" if each.distinct_starts else "not known"] for each in evaluations
    ))  # fmt: skip


def _interval(share: Share) -> str:
    return "{:.0%} to {:.0%}".format(*share.interval) if share.episodes else "-"


def _starts(evaluations: Sequence[Evaluated]) -> Iterator[Markup]:
    """Each start of each evaluation as a square."""
    for each in (each for each in evaluations if each.trials):
        squares = []
        for start, success, total in each.trials[:SHOWN_STARTS]:
            kind, sign = {True: ("won", "\N{CHECK MARK}"), False: ("lost", "\N{MULTIPLICATION X}")}.get(
                success, ("", "?")
            )
            squares.append(element("li", sign, class_=kind or None, title=f"start {start}: return {number(total)}"))
        yield element(
            "h3", f"Start by start, {each.name}", title="Each square is one start, in the order of the trials."
        )
        yield element("ol", *squares, class_="starts")


def _phases(facts: Facts) -> Markup:
    columns = ["phase", "state", "actors|What the robots do in it.", "steps", "episodes",
               f"success|Unassisted, of its last {RECENT} episodes.", "assisted",
               "ends when|Any of these ends it."]  # fmt: skip
    return table(columns, (
        [each.name, each.state, each.mode, f"{each.env_steps:,}", f"{each.episodes:,}", str(each.recent.alone),
         str(each.recent.assisted), " or ".join(each.until)] for each in facts.phases
    ))  # fmt: skip


# -- data, disk and identity
def _sources(facts: Facts) -> Markup:
    columns = ["source", "holds", "of", "left the store|Older steps make room for new ones."]
    return table(columns, (
        [name, f"{source.head - source.tail:,} steps", f"{source.capacity:,}", f"{source.tail:,}"]
        for name, source in facts.sources.items()
    ))  # fmt: skip


def _disk(facts: Facts) -> Markup:
    rows = [(name, size(count)) for name, count in sorted(facts.disk.items(), key=lambda each: -each[1])]
    return table(["part of the folder", "on disk"], [*rows, ("free on this disk", size(facts.free_bytes))])


def _identity(facts: Facts) -> Iterator[Markup]:
    path = facts.run_dir / "config.yaml"
    commands = begun.commands(path)
    if commands:
        said = "These commands repeat it, with another run_dir (with this one they go on), and an actor beside:"
        yield element("p", said)
        yield element("pre", "\n".join(f".venv/bin/python {each}" for each in commands))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rows = [
        ("folder", str(facts.run_dir.resolve())), ("begun with", " ".join(facts.words) or "-"),
        ("seed", str(facts.config.get("seed", "-"))), ("store", facts.run or "-"),
        ("weights", f"version {facts.weights.get('version', 0)}, sha256 {facts.weights.get('sha256', '-')}"),
        ("config.yaml", f"sha256 {digest}"), ("versions", begun.versions(path) or "not noted by its start"),
        ("versions here", begun.installed()),
        *((f"changed after {number(each.get('updates'))} updates", each.get("what", "")) for each in facts.changes),
    ]  # fmt: skip
    yield table(["what", "value"], rows)
    words = commands[-1].split()[1:] if commands else [f"task={facts.task}"]
    try:
        found = begun.differing(facts.config, CONFIG, words) if CONFIG.is_dir() else []
    except ConfigError as error:
        yield element("p", f"What differs from the default cannot be told: {error}", class_="none")
    else:
        yield element("h3", "Settings that differ from the default")
        yield table(["setting", "here", "default"], found) if found else element("p", "None.", class_="none")
    yaml = OmegaConf.to_yaml(facts.config)
    yield element("details", element("summary", "All settings"), element("pre", yaml))


# -- another run
def _compared(one: Facts, two: Facts) -> Iterator[Markup]:
    rows = [
        ("success at last", *(_last(each) for each in (one, two))),
        *((name, *(f"{getattr(each, field):,}" for each in (one, two)))
          for name, field in (("steps", "env_steps"), ("episodes", "episodes"), ("updates", "updates"))),
        ("time", duration(one.wall_s), duration(two.wall_s)),
    ]  # fmt: skip
    yield table(["", "this run", "the other"], rows)
    try:
        found = compared(*((each.run_dir, trials(each.run_dir)) for each in (one, two)))
    except ConfigError as error:
        yield element("p", f"No paired comparison: {error}.", class_="none")
    else:
        yield element("p", _paired(found))
    pairs = [(one.curves.success, two.curves.success, "Unassisted success", True),
             (one.curves.returns, two.curves.returns, "Return", False)]  # fmt: skip
    charts = [
        chart(title, f"Of the last {RECENT} episodes of each run.",
              [Line(mine, "this run"), Line(theirs, "the other", "other")], x="steps", share=share)
        for mine, theirs, title, share in pairs
    ]  # fmt: skip
    yield _cards(charts, "Neither has a curve.")


def _last(facts: Facts) -> str:
    last = facts.evaluations[-1].success if facts.evaluations else facts.recent.alone
    return f"{last} ({_interval(last)})" if last.episodes else "-"


def _paired(found: dict) -> str:
    mean, low, high = found["return_difference"]
    said = f"On the {found['shared']} starts that both were evaluated on: "
    if "p" in found:
        less, more = found["interval"]
        said += (
            f"{found['lost']} succeeded here alone, {found['gained']} in the other alone "
            f"(McNemar: p = {found['p']:.3f}). "
            f"The other succeeds {found['difference']:+.0%} ({less:+.0%} to {more:+.0%}) more often. "
        )
    return said + f"Its return differs by {number(mean)} ({number(low)} to {number(high)})."
