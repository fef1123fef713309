"""Everything that config/ offers, each word that a page names and each script of an experiment goes the way of a run:
composed, checked, built, every update of the algorithm, actions, published weights, an evaluation, a resumed trainer.

The choices are found by glob, so that a new yaml is tried too. What goes with one (`policy=flow`) the first line of its
yaml says. A server, an actor and a trainer run in this process as their programs run them.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from serl_client import ConfigError

from robot_infra.cameras import gl
from serl_launcher.config import _check as check_word
from serl_launcher.config import _read as read_word
from serl_launcher.config import composed, groups
from serl_launcher.training.plan_reader import plan_of
from tests.shared.common import CONFIG, ROOT
from tests.shared.here import start
from tests.shared.lerobot_policies import ACT_WORD
from tests.shared.policy_servers import still
from tools import readme

from .test_refusals import WHOLE

pytestmark = pytest.mark.usefixtures("one_thread", "same_loggers")

OFFERED = groups(CONFIG)
STEPS = 8  # of an episode of a gymnasium task, or in real time
SMALL = ["batch_size=8", "max_env_steps=500", "log=false", "seed=3", "checkpoint_s=600"]
SIZES = {  # of networks, where they have such a setting
    "policy.hidden": "[16,16]", "policy.encoder.channels": "[8,8]", "policy.encoder.latent": "4",
    "algo.encoder.latent": "4", "algo.model.latent": "16", "algo.model.hidden": "[16,16]",
    "algo.model.encoder_hidden": "[16]", "algo.mppi.samples": "16", "algo.mppi.prior_samples": "4",
    "algo.mppi.elites": "4", "algo.mppi.iterations": "2",
    "algo.widths": "[4,4,4]", "algo.picture": "32", "algo.codes": "3", "algo.population": "4", "algo.rollouts": "1",
    "algo.episode_steps": "60",
    "algo.deter": "16", "algo.units": "8", "algo.length": "4", "algo.imagined": "2",
}  # fmt: skip
PARTS = {"head.steps": "2", "network.hidden": "[16,16]", "critic.hidden": "[16,16]", "critic.num_critics": "2"}
PI0 = ("vision", "gemma", "horizon", "width", "state_size", "prompt_tokens", "precision")
CHOICE = re.compile(r"\b(?:algo|policy|head|network|critic|plan|task)=\w+")


# -- what there is to try


@cache
def made(*words: str) -> DictConfig:
    """The config of these words, composed once; nobody changes it."""
    return composed(CONFIG, words)


def words_of(group: str, name: str) -> list[str]:
    """The words with which a person chooses this yaml, and what its head says goes with it: of each group the first."""
    words, lines = [f"{group}={name}"], (CONFIG / group / f"{name}.yaml").read_text().splitlines()
    for word in CHOICE.findall("\n".join(takewhile(lambda line: line.startswith("#"), lines))):
        if word.partition("=")[0] not in {known.partition("=")[0] for known in words}:
            words.append(word)
    return words + {"task=gym": ["task.env_id=Pendulum-v1"], "task=atari": ["algo.cameras=[all]"]}.get(words[0], [])


def run_of(group: str, name: str) -> frozenset[tuple[str, str]]:
    """What a run with this yaml chooses of each group; `placed` sees to the task."""
    said = dict(word.split("=") for word in words_of(group, name))
    base = chosen(CONFIG / "base.yaml") | {"task": "fake"}
    plan = said.get("plan", base["plan"])
    choice = {**base, **chosen(CONFIG / f"plan/{plan}.yaml"), **said}
    return frozenset({**choice, **chosen(CONFIG / f"algo/{choice['algo']}.yaml"), **said}.items())


def chosen(path: Path) -> dict[str, str]:
    """What the defaults of a yaml, and of the one that it continues, choose of other groups."""
    text = path.read_text()
    before = [chosen(path.with_stem(name)) for name in re.findall(r"^defaults: \[(\w+)[,\]]", text, re.MULTILINE)]
    own = re.findall(r"(?:^  - |override /)(\w+)(?:@\S+)?: (\w+)", text, re.MULTILINE)
    return {**(before[0] if before else {}), **dict(own)}


NO_RUN = ("sharding", "head", "network", "source")  # test_algorithms, test_sharding, and the plans that hold sources
JUDGES = ("reward_classifier", "judge")  # tests/programs/test_rewards.py: they need a dataset
OWN = [  # what a person does, or a server of lerobot's own: their own tests
    *(("task", name) for name in ("lerobot", "so101", "so101_tool", "pick_cube", "dobot")), ("policy", "lerobot_server")
]  # fmt: skip
CHOICES = [
    (group, name) for group, names in sorted(OFFERED.items()) for name in names
    if group not in NO_RUN and (group, name) not in OWN and name not in ("dobot_xtrainer", *JUDGES)
]  # fmt: skip
RUNS = {run_of(*choice): choice for choice in reversed(CHOICES)}  # yamls with the same choices share one run
for run in sorted(RUNS, key=RUNS.__getitem__):  # and one all of whose yamls are in others is not made
    if run & {*CHOICES} <= set().union(*RUNS.keys() - {run}):
        del RUNS[run]


def small(words: list[str]) -> list[str]:
    """The words, and those that make networks and episodes small, and end each phase of the plan early."""
    said, config = [*SMALL, *words], made(*words)
    if "gemma" in config.policy:
        tiny = made("policy=pi0_tiny").policy
        said += [f"policy.{name}={_word(tiny[name])}" for name in PI0]
    said += [f"{k}={v}" for k, v in SIZES.items() if _reads(config, k) and OmegaConf.select(config, k) is not None]
    for part, value in PARTS.items():  # those of a group, or the policy's own
        name = part if _reads(config, part) else f"policy.{part}"
        said += [f"{name}={value}"] if OmegaConf.select(config, name) is not None else []
    if "options" in config.task.env:
        said.append(f"+task.env.options.max_episode_steps={STEPS}")
    if config.task.env.get("clock") == "real" and "max_steps" in config.task.env:
        said.append(f"task.env.max_steps={STEPS}")
    if "type" in config.policy:
        said.append(ACT_WORD)
    if "url" in config.policy:
        said.append(f"policy.url={still(2)}")  # numbers of the fake arm's action
    if "image_size" in config.task:
        said.append("task.image_size=16")
    return [*said, *_short(config)]


def _reads(config: DictConfig, part: str) -> bool:
    """Whether the run of this config reads the group of `part`."""
    return any(word.startswith(part.partition(".")[0]) for word in config.remembered)


def _word(value: object) -> str:
    """A value of a config as a word of the command line writes it."""
    plain = json.dumps(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)
    return plain.replace('"', "").replace(": ", ":").replace(", ", ",")


def _short(config: DictConfig) -> Iterator[str]:
    """Each phase of the plan ends after two episodes, or two rounds of its updates, if not when it has seen all."""
    for name, phase in config.plan.phases.items():
        if list(phase.until) == ["seen"]:
            continue
        mode, into = phase.actors.mode, phase.actors.get("into")
        rounds = 2 * len(phase.get("updates", []))
        until = f"updates >= {rounds}" if rounds else "episodes >= 2" if mode == "evaluate" else f"{into}.episodes >= 2"
        yield f'plan.phases.{name}.until=["{until}"]'
        if "start_when" in phase:
            yield f'plan.phases.{name}.start_when="{into}.episodes >= 1"'


# -- the way of a run


def goes_its_way(run_dir: Path, words: list[str]) -> None:
    """A run of these words from its demonstrations to its evaluation, and another start that goes on from there."""
    is_missing = demo_is_missing(made(*words).plan)
    words = small(words)
    if is_missing:
        others = [word for word in words if not word.startswith("plan")]
        start(run_dir, small([*others, "plan=collect"]))
    config = start(run_dir, words)
    plan, updates = plan_of(config), done(run_dir)["updates"]
    learning = [phase for phase in plan.phases.values() if phase.updates]
    assert updates >= sum(2 * len(phase.updates) for phase in learning)
    assert list((run_dir / "weights").glob("*.safetensors"))
    more = [f"phase={learning[-1].name}"] if learning else []
    start(run_dir, [*words, *more], acts=False)
    assert done(run_dir)["updates"] >= updates + 2 * len(learning[-1].updates if learning else ())


def demo_is_missing(plan: DictConfig) -> bool:
    """Whether the plan trains on demonstrations that another plan has to collect before."""
    used = {name for phase in plan.phases.values() for name in phase.get("data", {})}
    filled = {phase.actors.get("into") for phase in plan.phases.values()}
    return "demo" in used - filled


def done(run_dir: Path) -> dict:
    """What the newest checkpoint says of itself."""
    return json.loads(max((run_dir / "checkpoints").glob("[0-9]*/manifest.json")).read_text())


def needs(words: list[str]) -> None:
    """Skip what this machine cannot do."""
    said = " ".join(words)
    lacks = any(importlib.util.find_spec(name) is None for name in ("transformers", "peft"))
    if lacks and "pi0" in said.replace("sac_pi0", ""):
        pytest.skip("needs the extra `vla`")
    suites = {"carracing": "Box2D", "minigrid": "minigrid", "atari": "ale_py"}
    if own := next(
        (name for name in suites if f"task={name}" in said and not importlib.util.find_spec(suites[name])), ""
    ):
        pytest.skip(f"needs the extra `{own}`")
    if own := re.search(r"task=(robomimic|dmc|metaworld|so101_sim)", said):
        pytest.skip(f"examples/{own[1]} has a Python environment of its own")
    if re.search(r"pixels|cameras=true", said) and not gl.backend():
        pytest.skip("needs OpenGL: apt-get install libegl1 libosmesa6")


def placed(words: list[str]) -> list[str]:
    """The words, on a task that is cheap and has what they need."""
    if any(word.startswith("task=") for word in words):
        return words
    return [*words, *(["task=sim_arm", "task.cameras=true"] if sees(words) else ["task=fake"])]


def sees(words: list[str]) -> bool:
    """Whether these words need cameras."""
    config = made(*words)
    wants = "algo.augment", "algo.cameras", "policy.encoder.cameras", "policy.type"  # lerobot's, which is an ACT
    return any(OmegaConf.select(config, name) for name in wants)


def _marked(group: str, name: str):
    """What one algorithm or policy alone brings, test_algorithms tries without a run."""
    own = group in ("algo", "critic", "policy") and name not in ("rejection", "dreamer")
    return pytest.param(group, name, marks=pytest.mark.nightly if own else pytest.mark.slow, id=f"{group}-{name}")


@pytest.mark.parametrize(("group", "name"), [_marked(group, name) for group, name in sorted(RUNS.values())])
def test_every_yaml_makes_a_run(group, name, tmp_path):
    words = placed(words_of(group, name))
    needs(words)
    goes_its_way(tmp_path / "run", words)


# -- words of the pages


def named() -> list[str]:
    """The words `name=value` of README, docs and refusals that choose or set something of the config, each once."""
    known = set(OFFERED) | set(made().keys())
    found = [*WHOLE]
    for page in readme.pages(ROOT):
        code = re.findall(r"```(?:bash|text)?\n(.*?)```|```\w+\n.*?```|`([^`\n]+)`", page.read_text(), re.DOTALL)
        for word in shlex.split("\n".join(a or b for a, b in code).replace("'\"", "'"), comments=True):
            name, _, value = word.partition("=")
            if re.fullmatch(r"[+~]?[a-z_]+(\.\w+)*", name) and name.lstrip("+~").partition(".")[0] in known and value:
                found.append(word if "[" in word else word.rstrip("],"))
    return sorted({word for word in found if "..." not in word and not word.startswith(("task=my_", "algo=my_"))})


def homes(key: str) -> Iterator[list[str]]:
    """Choices under which a word may have its place: none, then what comes with each yaml.

    Those of its own group, and of each group those that name it, come first.
    """
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    yield []
    yield ["plan=hiors", "task=fake"]
    if first in NO_RUN:
        yield from (["algo=rejection", "policy=chunk", f"{first}={name}"] for name in OFFERED[first])
    for group in sorted(("plan", "policy", "critic", "task", "algo"), key=lambda group: group != first):
        names = sorted(OFFERED[group], key=lambda name: f"{last}:" not in (CONFIG / group / f"{name}.yaml").read_text())
        yield from (words_of(group, name) for name in names)


def _placed(word: str):
    """A word about a yaml that is no default takes longer: its place is looked for under one choice after another."""
    key = read_word(word).key_or_group
    is_near = key in OFFERED or OmegaConf.select(made(), key, default=Ellipsis) is not Ellipsis
    return pytest.param(word, marks=[] if is_near else pytest.mark.slow)


@pytest.mark.parametrize("word", [_placed(word) for word in named()])
def test_every_word_that_a_page_or_a_refusal_names_is_taken(word):
    """It chooses what there is, or has a place and a value of the right kind under one of the choices."""
    override, complaints = read_word(word), []
    for home in homes(word.lstrip("+~").partition("=")[0]):
        try:
            if override.key_or_group in OFFERED:
                assert override.value() in OFFERED[override.key_or_group]
            else:
                check_word(override, made(*home))
            return
        except ConfigError as error:
            complaints.append(str(error))
    pytest.fail(complaints[0])


# -- scripts of experiments


EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("experiments/*/run_*.sh"))


@pytest.fixture(scope="module")
def script_words(tmp_path_factory):
    """script_words(script) -> those with which it starts examples/train.py."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(EXAMPLES, root / "examples", ignore=shutil.ignore_patterns(".venv"))
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)

    def script_words(script):
        answer = subprocess.run(["bash", script], cwd=root / "examples", capture_output=True, text=True, check=True)
        program, *words = answer.stdout.splitlines()
        assert program == "examples/train.py"
        return words

    return script_words


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripts_words_make_a_run(script, script_words):
    side, *words = script_words(script)
    assert side == ("learner=true" if "run_learner" in script else "actor=true")
    assert plan_of(composed(CONFIG, words)).phases
