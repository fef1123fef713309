"""What a person reads who asked for something that cannot be: one sentence that names it, and an exit status of 1.

Most cases call examples/train.py in this process; in four a learner is started as a person starts it.
"""

import errno
import json
import os
import re
import shutil
import socket
import sqlite3
import sys
from pathlib import Path

import pytest
import safetensors.numpy
from omegaconf import OmegaConf
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import ConfigError, Refused

from robot_infra.cameras import gl
from robot_infra.tasks import fake
from serl_launcher import error_log, launcher
from serl_launcher.config import composed
from serl_launcher.store import weights
from serl_launcher.store.store import Store
from tests.shared.common import CONFIG, PATIENCE, own_ports
from tests.shared.here import TRAIN, serving, start
from tests.shared.programs import Programs
from tests.shared.tools import installs

SOURCES = {"demo": 5000, "online": 20_000, "eval": 20_000}  # of the plan quickstart
pytestmark = pytest.mark.usefixtures("same_loggers")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(*words) -> what train.py ends with in this process, in an empty folder; a learner's ports are free ones."""
    monkeypatch.chdir(tmp_path)

    def train(*words):
        ports = own_ports() if "learner=true" in words else []
        monkeypatch.setattr(sys, "argv", ["train.py", *ports, *words])
        with pytest.raises(SystemExit) as ended:
            TRAIN.main()
        return ended.value.code

    return train


@pytest.fixture
def main(train, tmp_path):
    """main(*words) -> the sentence that train.py says before it ends with status 1; nothing was begun."""

    def main(*words):
        said = train(*words)
        assert said.startswith("error: "), "python prints a text and ends with status 1"
        assert "\n" not in said
        assert not list(tmp_path.rglob("config.yaml")), "nothing was begun"
        return said

    return main


@pytest.fixture
def child(tmp_path, capfd):
    """child(*words) -> what the trainer of these words says, which refuses to run; here."""

    def child(*words):
        config = composed(CONFIG, ["learner=true", f"run_dir={tmp_path}/run", *words])
        config.ranks = launcher.ranks_of(config)
        OmegaConf.save(config, launcher.writable(tmp_path / "run") / "config.yaml", resolve=True)
        capfd.readouterr()
        assert launcher.child("trainer", str(tmp_path / "run"), "") == launcher.REFUSED
        (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trainer: ")]
        return said

    return child


def make_store(run_dir, spec):
    run_dir.mkdir()
    return Store.create(run_dir / "store", spec, SOURCES)


# -- words


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ("learner=true algo=nothing", [" rejection, ", "no algo is called 'nothing'; did you mean"]),
        ("actor=true task=sim_amr", ["no task is called 'sim_amr'; did you mean 'sim_arm'?"]),
        ("learner=true plan=quickstrat", ["did you mean 'quickstart'?"]),
        ("learner=true sed=1", ["the config has no key 'sed'; did you mean 'seed'?"]),
        ("learner=true +sed=1", ["the config has no key 'sed'; did you mean 'seed'?"]),
        ("learner=true ~seed", ["seed can be changed, but not left out"]),
        ("learner=true plan.phases.practis.until=[operator]", ["has no key 'practis'; did you mean 'practise'?"]),
        ("learner=true algo.learning_rat=1", ["algo has no key 'learning_rat'; did you mean 'learning_rate'?"]),
        ("learner=true +plan.phases.practise.untill=x", ["practise: no key is called 'untill'; did you mean 'until'?"]),
        ("learner=true seed", ["cannot read 'seed': write name=value, as in seed=1"]),
        ("learner=true --multirun", ["cannot read '--multirun': write name=value"]),
        ("learner=true seed=1,2", ["seed=1,2: give one value"]),
        *[(f"learner=true seed={one}", [f"seed={one}: s", "a"]) for one in ("one", -1, 0.5)],
        ("learner=yes", ["learner=yes: should be true or false"]),
        ("learner=true run_dir=", ["run_dir=: should be a text, like runs/sim_arm"]),
        ("learner=true run_dir=${nope}", ["'nope' not found"]),
        ("actor=true task=gym", ["task.env_id has no value: say task.env_id=..."]),
        ("learner=true algo=sac learner=false", ["say which side this is: learner=true or actor=true"]),
        ("learner=true actor=true", ["say which side this is: learner=true or actor=true"]),
        ("learner=true phase=nophase", ["no phase is called 'nophase'; did you mean"]),
        ("learner=true plan.phases.practise.until=[oparator]", ["practise.until[0]: cannot read 'oparator': write"]),
        ("learner=true max_env_steps=many", ["max_env_steps=many: should be a number, like 20000"]),
        ("learner=true max_env_steps=5", ["plan.sources.online.capacity: should be a whole number >= 100, not 5"]),
        ("learner=true task.verdict.success=lots", ["task.verdict.success=lots: should be a number, like 1.0"]),
        ("learner=true host=0.0.0.0", ["0.0.0.0: without keys the learner listens on loopback only", "keys.py make"]),
        ("learner=true page=8088 page_host=0.0.0.0", ["page_host=0.0.0.0: without keys the page is", "keys.py page"]),
        ("learner=true page=6000", ["page=6000: browsers open nothing on this port", "page=8088"]),
        ("learner=true port=99999", ["cannot listen on 127.0.0.1:99999", "choose another port=..."]),
        ("learner=true port=7777 inference_port=7777", ["both 7777: choose another inference_port=..."]),
        ("learner=true run_dir=/proc/nowhere", ["cannot write to /proc/nowhere", "choose another run_dir=..."]),
        ("actor=true task=fake run_dir=/proc/nowhere", ["cannot write to /proc/nowhere", "another run_dir=..."]),
        (
            "learner=true policy=flow algo=rejection policy.history=0",
            ["policy.history=0: say a whole number from 1 to"],
        ),
        ("learner=true +extras.mean=akshun", ["extras.mean=akshun: say action, or the shape and dtype"]),
        ("learner=true +extras.reward=action", ["every row has ['reward'] already"]),
        ("actor=true task=fake envs=0", ["envs=0: say a whole number from 1 to 64"]),
        ("actor=true task=fake envs=2 task.env.clock=real", ["envs=2: only simulated robots can be several"]),
        ("actor=true task=fake chunks=asink", ["chunks: no rule is called 'asink'; did you mean 'async'?"]),
        ("actor=true task=fake inference=lokal", ["no place is called 'lokal'; did you mean 'local'?"]),
        ("actor=true task=fake task.env.clock=wall", ["clock 'wall' is unknown; use one of real, simulated"]),
        ("actor=true task=fake +task.env.speed=2", ["task.env: got an unexpected keyword argument 'speed'"]),
        ("actor=true task=fake task.env._target_=robot_infra.no.such", ["Error locating target 'robot_infra.no.such'"]),
        ("actor=true task=gym task.env_id=Blackjack-v1", ["Blackjack-v1 sees a Tuple space; Box, Discrete,"]),
        ("actor=true task=gym task.env_id=NoSuchTask-v0", ["gymnasium cannot make NoSuchTask-v0", "my_module:NoSuch"]),
        ("actor=true task=gym task.env_id=no_such_package:A-v0", ["No module named 'no_such_package'", "PYTHONPATH"]),
    ],
)
def test_a_wrong_word_is_one_sentence(main, words, sentences):
    said = main(*words.split())
    assert [sentence for sentence in sentences if sentence not in said] == [], said


def test_a_broken_yaml_is_named(tmp_path):
    shutil.copytree(CONFIG, tmp_path / "config")
    (tmp_path / "config" / "task" / "mine.yaml").write_text("name: [mine")
    with pytest.raises(ConfigError, match=r"expected ',' or '\]'.*mine\.yaml.*line 1") as error:
        composed(tmp_path / "config", ["task=mine"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("plan.phases.practise.until=[updates >= 300]", "plan.phases.practise.until=['updates >= 300']"),
        ("plan.phases.practise.until=[success[20] >= 0.9, operator]", "until=['success[20] >= 0.9', operator]"),
        ("plan.phases.practise.start_when=env_steps >= 3", "plan.phases.practise.start_when='env_steps >= 3'"),
    ],
)
def test_a_word_that_lacks_quotes_is_shown_with_them_and_works_so(word, advice):
    with pytest.raises(ConfigError, match="cannot read") as refused:
        composed(CONFIG, ["learner=true", "task=fake", word])
    shown = str(refused.value).partition(", so ")[2]
    assert (shown[0], shown[-1]) == ('"', '"')
    assert advice in shown
    composed(CONFIG, ["learner=true", "task=fake", shown.strip('"')])


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--help", [r"algo: ", "rlpd"]),
        ("--cfg job algo=sac seed=3", ["\nseed: 3\n", "\nalgo:\n", "\n  backup_entropy: true\n"]),
    ],
)
def test_help_and_the_config_are_shown(monkeypatch, capsys, words, lines):
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    TRAIN.main()
    said = capsys.readouterr().out
    assert [line for line in lines if line not in said] == []


# -- what is not there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "missing", "sentence"),
    [
        ("actor=true task=sim_arm", "mujoco", "mujoco is missing: run `. examples/install.sh --extra sim`"),
        ("actor=true task=sim_arm task.cameras=true", "OpenGL", "libosmesa6): install them, or say task.cameras=f"),
        ("actor=true task=gym task.env_id=A", "gymnasium", "gymnasium is missing: run `. examples/install.sh"),
        ("actor=true task=fake inference=local", "torch", "needs torch: run `. examples/install.sh --extra learner"),
        ("learner=true", "torch", "the learner needs torch: run `. examples/install.sh --extra learner`"),
        ("learner=true plan=sft plan.sources.demo.dataset=a.hdf5", "h5py", "a robomimic file needs h5py: run"),
        ("learner=true log=wandb-online", "wandb", "--extra wandb`): install it, or say log=false"),
        ("learner=true log=tensorboard", "tensorboard", "tensorboard is not installed (`. examples/install.sh --extra"),
        ("learner=true +plan.sources.online.archive=lerobot", "lerobot", "needs lerobot: run `. examples/install.sh"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named_before_there_is_a_run_folder(main, monkeypatch, tmp_path, words, missing, sentence):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "torch":
        monkeypatch.delitem(sys.modules, "serl_launcher.acting.host", raising=False)
    if missing == "OpenGL":
        monkeypatch.setattr(gl, "backend", lambda: "")
    monkeypatch.delenv("WANDB_MODE")
    assert sentence in (said := main(*words.split(), "run_dir=run"))
    assert missing == "OpenGL" or installs(said, tmp_path)[0] == "--extra"
    assert not list(tmp_path.glob("run/*.yaml"))


LACKS = ("wandb", "lerobot", "av", "torchcodec", "rerun", "OpenGL")
PRACTISE = [
    "task=sim_arm", "task.cameras=auto", "utd=1", "critic.hidden=[32,32]", "policy.hidden=[32,32]", "record=eval",
    "export.sources=all", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline",
    "plan.phases.practise.start_when='online.steps >= 20'",
    'plan.phases.practise.until=["env_steps >= 60 and updates >= 1"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


@pytest.mark.slow
def test_a_run_without_wandb_lerobot_rerun_av_gl_and_ffmpeg_ends_well_and_names_each_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({LACKS})\n")
    mine = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "MUJOCO_GL")}
    mine |= {"PYTHONPATH": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    with Programs(tmp_path, mine) as programs:
        programs.complete(PRACTISE, PRACTISE)
    said = programs.said().splitlines()
    for what, how in {
        "wandb is not installed": "--extra wandb",
        "no datasets are written, because lerobot, av, torchcodec is not installed": "--extra data",
        "rerun is not installed": "--extra data",
        "can draw no camera images": "apt-get install libegl1 libosmesa6",
    }.items():
        (sentence,) = [line for line in said if what in line]
        assert how in sentence
    assert sum("install" in line for line in said) == 4
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["eval"]["episodes"], summary["env_steps"] >= 60, summary["updates"] > 0) == (2, True, True)


@pytest.mark.parametrize("name", ["port", "inference_port", "live"])
def test_a_port_in_use_is_named(main, name):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = main("learner=true", f"{name}={port}")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in said
    assert f"choose another {name}=..." in said


@pytest.mark.slow
def test_what_only_the_trainer_can_check_it_says_before_any_actor_comes(child, programs):
    updates = "plan.phases.practise.updates=[updat]"
    assert "updates[0]: no update of the algorithm is called 'updat'; did you" in child(updates)
    assert programs.status(programs.start("learner", "device=cudda")) == 1
    (said,) = [line for line in programs.said().splitlines() if not line.startswith("[")]
    assert said.startswith("trainer: device=cudda cannot be used: say device=auto, cpu or cuda:0")


# -- run folders


@pytest.mark.slow
def test_a_run_refuses_a_second_learner_and_an_actor_of_another_task_and_goes_on(train, programs, spec):
    make_store(programs.run_dir, spec).close()
    learner, lock = programs.start("learner", "task=fake"), programs.run_dir / "lock"
    programs.until(lambda: lock.exists() and lock.read_text())
    said = train("learner=true", "run_dir=run")
    assert f"is in use by the learner with process {learner.pid}: stop it, or choose run_dir=..." in said
    said = train("actor=true", "task=fake", "run_dir=run", f"port={programs.ports[0]}")
    assert "this run is of another robot or task" in said
    assert "observation.observation.state.shape: [8], [6]" in said
    assert learner.poll() is None
    assert not {word for word in ("Traceback", "errors.log") if word in programs.said()}


@pytest.mark.slow
def test_sources_that_do_not_fit_the_disk_are_told_to_learner_and_actor_alike(train, programs):
    learner = programs.start("learner", "task=fake", "max_env_steps=1000000000000")
    said = train("actor=true", "task=fake", "run_dir=run", f"port={programs.ports[0]}").removeprefix("error: ")
    assert programs.status(learner) == 1
    assert said.startswith("the replay buffer does not fit: ")
    assert "online 1,000,000,000,000 steps = " in said
    assert "Lower plan.sources.<name>.capacity or choose a run_dir on a larger disk" in said
    assert f"server: {said}" in programs.said().splitlines()
    assert programs.said().count("does not fit") == 1
    assert not {word for word in ("Traceback", "errors.log") if word in programs.said()}


@pytest.mark.slow
def test_weights_of_another_algorithm_without_a_checkpoint_are_no_obstacle(programs):
    """A run that was killed before its first checkpoint begins anew, with whatever algorithm it is given."""
    with fake.make(max_steps=50, noise=0.2, clock="simulated") as env:
        store = make_store(programs.run_dir, env.spec)
    store.publish_weights(*weights.write(programs.run_dir / "weights", safetensors.numpy.save({})), 0)
    store.close()
    words = ["task=fake", "plan=evaluate", 'plan.phases.evaluate.until=["episodes >= 1"]']
    sides = [programs.start(side, *words) for side in ("learner", "actor")]
    assert [programs.status(side) for side in sides] == [0, 0], programs.said()


# -- processes that fail


def test_a_disk_that_is_full_is_one_sentence_of_the_process_that_met_it(child, tmp_path, monkeypatch):
    def save(*_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 459712 vs 459600")  # noqa: B904 - as torch.save does

    monkeypatch.setattr("serl_launcher.training.trainer.main", save)
    sentence = f"No space left on device: make room for {tmp_path}/run, then give the same command again"
    assert sentence in child()


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("a bug"), launcher.REFUSED), (sqlite3.OperationalError("disk I/O error"), 1)]
)
def test_a_server_that_fails_before_it_has_begun_is_started_again_only_if_it_was_the_disk(
    tmp_path, monkeypatch, capsys, error, status
):
    def serve(*_):
        raise error

    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("serl_launcher.service.server.main", serve)
    assert launcher.child("server", str(tmp_path), f"ipc://{tmp_path}/server") == status
    assert f"server: it failed: {type(error).__name__}: {error}" in capsys.readouterr().err


def test_the_end_of_a_process_is_in_the_file_of_errors_however_many_single_items_have_filled_it(tmp_path, monkeypatch):
    def train(*_):
        raise ValueError("a bug")

    (tmp_path / "config.yaml").touch()
    (tmp_path / error_log.ERRORS).touch()
    os.truncate(tmp_path / error_log.ERRORS, full := error_log.MOST)
    error_log.write_traceback(tmp_path, "export: episode e1", ValueError("one of many"), is_item=True)
    assert (tmp_path / error_log.ERRORS).stat().st_size == full
    monkeypatch.setattr("serl_launcher.training.trainer.main", train)
    launcher.child("trainer", str(tmp_path), "")
    with open(tmp_path / error_log.ERRORS, "rb") as file:
        file.seek(full)
        assert re.fullmatch(rb"\S+ \S+ trainer\nTraceback.*ValueError: a bug\n\n", file.read(), re.DOTALL)


def test_actors_hear_nothing_of_an_export_that_refuses_to_start(tmp_path, monkeypatch):
    def refuse(*_):
        raise ConfigError("these datasets are of another run")

    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("serl_launcher.datasets.export.main", refuse)
    monkeypatch.setattr(launcher, "report_end", lambda *_: pytest.fail("the run is not over"))
    assert launcher.child("export", str(tmp_path), f"ipc://{tmp_path}/server") == launcher.REFUSED


@pytest.mark.usefixtures("one_thread")
def test_a_start_that_fails_is_one_sentence_on_both_sides_and_its_traceback_is_in_a_file(tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("no such storage\nin two lines")

    monkeypatch.setattr("serl_launcher.training.trainer.check_memory", fail)
    why = r"trainer: it failed: RuntimeError: no such storage \(where: .*errors\.log\)"
    with pytest.raises(Refused, match=f"^the learner has ended: {why}$"):
        start(tmp_path / "run", ["task=fake"])
    said = capfd.readouterr().err
    assert len(re.findall(f"^{why}$", said, re.MULTILINE)) == 1, "the server says so, too, to who comes later"
    assert "Traceback" not in said
    assert "in two lines" in (tmp_path / "run" / launcher.ERRORS).read_text()


@pytest.mark.parametrize("begun", [False, True])
def test_actors_end_with_a_run_that_never_began_and_wait_for_one_that_did(tmp_path, spec, begun):
    config = composed(CONFIG, ["learner=true", "task=fake", f"run_dir={tmp_path}"])
    hello = m.Hello(m.PROTOCOL, "actor", "arm", "e" * 32, "o" * 32, "", spec.to_dict(), [], True)
    with serving(config) as (local, port), Connection(f"tcp://127.0.0.1:{port}", hello) as actor:
        actor.hello(PATIENCE)
        with Connection(local, m.Hello(m.PROTOCOL, "learner", "trainer")) as trainer:
            if begun:
                trainer.call(m.Direct({"mode": "idle", "phase": "clone", "into": None}, None), PATIENCE)
            trainer.call(m.Over("trainer: no memory"), PATIENCE)
        heard = []
        while not any(isinstance(message, m.Failed) for message in heard):
            actor.wait(PATIENCE)
            heard.append(actor.receive())
        assert heard[-1] == m.Failed("Ended", "the learner has ended: trainer: no memory", final=not begun)
        with Connection(f"tcp://127.0.0.1:{port}", hello) as late:
            if begun:
                late.hello(PATIENCE)
            else:
                with pytest.raises(Refused, match="the learner has ended: trainer: no memory"):
                    late.hello(PATIENCE)
