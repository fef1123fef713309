"""What a start, a resume, a handshake or the doctor refuses says what to do about it: by words and commands that there
are, or by hand. The texts are read from the syntax trees, so a new one is looked at, too."""

import re
import tomllib

from tests.shared.common import CONFIG, ROOT
from tools.errors import PAGE, page, refusals

NO_WORD = {  # file, or text: why it has no word
    "serl_client/spec.py": "a robot's class says what cannot be: its author mends the class",
    "serl_client/words.py": "it names the word that was meant",
    "service/intake.py": "a record that no actor of ours sends", "store/directives.py": "as above",
    "store/episodes.py": "as above", "store/sessions.py": "as above", "store/store.py": "as above",
    "service/peers.py": "a Hello that no client of ours says", "an actor's Hello names its session": "as above",
    "service/server.py": "a request that no client of ours makes",
    "datasets/reader.py": "a dataset that others made is damaged: open_datasets says what to do",
    "datasets/robomimic.py": "as above", "datasets/shards.py": "as above", "datasets/tables.py": "as above",
    "optim/distributed.py": "it repeats what rank 0 says", "training/presence.py": "what is lacking says it",
    "teleop/raw.py": "who opens the device says it", "guard/link.py": "the guard says it",
    "checks/probe.py": "a fault of a driver that somebody writes", "checks/readings.py": "as above",
    "checks/conformance.py": "as above", "checks/arm.py": "as above",
}  # fmt: skip
BY_HAND = re.compile(  # a verb that begins a clause, or that nothing needs to be done
    r"nothing to do|\bshould\b|(?:^|[:;,.(] |\bor |\band |\bthen |\}\.? ?)(?:[Ii]f [^,]+, )?(?:"
    r"apt-get|ask|begin|bring|choose|close|collect|compare|connect|delete|give|have|install|leave|let|look|lower|make|"
    r"mend|move|name|put|remove|repeat|restore|run|say|set|start|stop|take|train|turn|use|wait|write)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"(?<![\w.}/<-])([a-z_]+(?:\.(?:\w+|\{\}))*)=((?:\[[^]]*\]|[^\s,;:)`'\"\[])*)")
COMMAND = re.compile(r"(tools/\w+\.py|examples/[\w/]+\.(?:py|sh)|docs/[\w/-]+\.md)((?: (?:--)?[a-z]+\b)*)")


REFUSALS = sorted({*refusals()})


def test_the_page_of_errors_has_each_refusal():
    assert PAGE.read_text() == page(), "run tools/errors.py"


def test_each_refusal_says_what_to_do():
    """Or it is one of a kind that has no word."""
    silent = [
        f"{place} {text}" for place, text in REFUSALS
        if not (WORD.search(text) or COMMAND.search(text) or "`" in text or BY_HAND.search(text))
        and not any(kind in f"{place} {text}" for kind in NO_WORD)
    ]  # fmt: skip
    assert silent == []


WORDS = {(place, name, value) for place, text in REFUSALS for name, value in WORD.findall(text)}
OURS = {(name, value) for place, name, value in WORDS if "spec.py" not in place}
WHOLE = sorted({  # words that a person may say as they stand: test_offered.py says them
    f"{name}={value}" for name, value in OURS if value and not re.search(r"[{}A-Z]|\.\.\.", f"{name}={value}")
} - {"name=value"})  # fmt: skip


def test_each_setting_that_a_refusal_names_is_there():
    """A short name, as in `algo=iql: ... beta=-1`, is the last part of one."""
    settings = re.findall(r"^\| `([^`]+)`", (ROOT / "docs/reference/settings.md").read_text(), re.MULTILINE)
    settings += [path.name for path in CONFIG.iterdir() if path.is_dir()]
    missing = []
    for name, value in sorted(OURS):
        before = r"(.+\.)?" if "." not in name and "{" in value else ""
        known = re.compile(before + re.escape(name).replace(r"\{\}", r"[<\w>]+") + r"(\..+)?")
        if f"{name}={value}" not in WHOLE and not any(map(known.fullmatch, settings)):
            missing.append(f"{name}={value}")
    assert missing == []


def test_each_command_and_page_that_a_refusal_names_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for place, text in REFUSALS:
        for file, words in COMMAND.findall(text):
            source, said = (ROOT / file).read_text(), words.split()
            parts = said[:1] if "add_subparsers" in source and not words.startswith(" on the learner") else []
            parts += [word for word in said if word.startswith("--") and file.startswith("tools")]
            assert [word for word in parts if f'"{word}"' not in source] == [], f"{place} {text}"
        assert set(re.findall(r"--extra (\w+)", text)) <= extras.keys(), f"{place} {text}"
