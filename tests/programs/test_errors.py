"""What a person reads who asked for something that cannot be: one sentence that names it, and an exit status of 1.

Most cases call examples/train.py in this process; in four a learner is started as a person starts it.
"""

import errno
import os
import shutil
import socket
import sqlite3
import sys

import pytest
import safetensors.numpy
from omegaconf import OmegaConf
from serl_client.errors import ConfigError
from serl_client.outbox import Outbox

from robot_infra.cameras import gl
from robot_infra.robots import fake
from serl_launcher import launcher
from serl_launcher.config import composed
from serl_launcher.store import weights
from serl_launcher.store.store import Store
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.utils.checkpoint import Checkpoints
from tests.shared.common import CONFIG, free_port
from tests.shared.here import TRAIN, serving

SOURCES = {"demo": 5000, "online": 20_000, "eval": 20_000}  # of the plan quickstart


pytestmark = pytest.mark.usefixtures("same_loggers")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(*words) -> what train.py ends with in this process, in an empty folder; a learner's port is a free one."""
    monkeypatch.chdir(tmp_path)

    def train(*words):
        port = [f"port={free_port()}"] * ("learner=true" in words)
        monkeypatch.setattr(sys, "argv", ["train.py", *port, *words])
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
    """child(name, *words, local=...) -> what one process of the learner says, which refuses to run; here."""

    def child(name, *words, local=""):
        config = composed(CONFIG, ["learner=true", f"run_dir={tmp_path}/run", *words])
        config.ranks = launcher.ranks_of(config)
        if name == "server":
            launcher.describe_store(config, plan_of(config))
        OmegaConf.save(config, launcher.writable(tmp_path / "run") / "config.yaml", resolve=True)
        capfd.readouterr()
        assert launcher.child(name, str(tmp_path / "run"), local) == launcher.REFUSED
        (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"{name}: ")]
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
        ("learner=true seed=one", ["seed=one: should be a number, like 0"]),
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
        ("learner=true task.verdict.failure=-inf", ["task.verdict.failure=-inf: a reward is a finite number"]),
        ("learner=true +task.verdict.sucess=1", ["no verdict is called 'sucess'; did you mean 'success'?"]),
        ("actor=true task=fake task.env.verdict_by=me", ["task.env.verdict_by=me is unknown; use judge or operator"]),
        ("learner=true host=0.0.0.0", ["0.0.0.0: without keys the learner listens on loopback only", "keys.py make"]),
        ("learner=true port=99999", ["cannot listen on 127.0.0.1:99999", "choose port=..."]),
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
        ("actor=true task=fake task.env.clock=real deadline_s=1", ["deadline_s=1 is longer than one step", "=auto"]),
        ("actor=true task=fake inference=lokal", ["no place is called 'lokal'; did you mean 'local'?"]),
        ("actor=true task=fake task.env.clock=wall", ["clock 'wall' is unknown; use one of real, simulated"]),
        ("actor=true task=fake +task.env.speed=2", ["task.env: got an unexpected keyword argument 'speed'"]),
        ("actor=true task=fake task.env._target_=robot_infra.no.such", ["Error locating target 'robot_infra.no.such'"]),
        ("actor=true task=gym task.env_id=Blackjack-v1", ["Blackjack-v1 sees a Tuple space; only a Box fits"]),
        ("actor=true task=gym task.env_id=NoSuchTask-v0", ["gymnasium cannot make NoSuchTask-v0"]),
        ("actor=true task=gym task.env_id=no_such_package:A-v0", ["no_such_package:A-v0: No module named 'no_such_pa"]),
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
        ("actor=true task=sim_arm", "mujoco", "mujoco is missing: run `uv sync --inexact --extra sim`"),
        ("actor=true task=sim_arm task.cameras=true", "OpenGL", "libosmesa6): install them, or say task.cameras=f"),
        ("actor=true task=gym task.env_id=A", "gymnasium", "gymnasium is missing: run `uv sync --inexact --extra sim`"),
        ("actor=true task=fake inference=local", "torch", "needs torch: uv sync --inexact --extra learner"),
        ("learner=true", "torch", "the learner needs torch: run `uv sync --inexact --extra learner`"),
        ("learner=true", "matplotlib", "the learner needs matplotlib: run `uv sync --inexact --extra learner`"),
        ("learner=true plan=sft plan.sources.demo.dataset=a.hdf5", "h5py", "a robomimic file needs h5py: run `uv sync"),
        ("learner=true log=wandb-online", "wandb", "--extra wandb`): install it, or say log=false"),
        ("learner=true log=tensorboard", "tensorboard", "tensorboard is not installed (`. examples/install.sh --extra"),
        (
            "learner=true +plan.sources.online.archive=lerobot", "lerobot",
            "archive: lerobot of online needs lerobot: run `uv sync --inexact --extra data` here, or say",
        ),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named_before_there_is_a_run_folder(main, monkeypatch, tmp_path, words, missing, sentence):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "torch":
        monkeypatch.delitem(sys.modules, "serl_launcher.acting.host", raising=False)
    if missing == "OpenGL":
        monkeypatch.setattr(gl, "backend", lambda: "")
    monkeypatch.delenv("WANDB_MODE")
    assert sentence in main(*words.split(), "run_dir=run")
    assert not list(tmp_path.glob("run/*.yaml"))


@pytest.mark.parametrize("name", ["port", "inference_port", "live"])
def test_a_port_in_use_is_named(main, name):
    ports = {"port": free_port(), "inference_port": free_port()}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = main("learner=true", *(f"{key}={value}" for key, value in {**ports, name: port}.items()))
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in said
    assert f"Stop it, or choose {name}=..." in said


def test_an_outbox_in_use_is_named(main, tmp_path):
    outbox = Outbox(tmp_path / "run" / "actors" / "left" / "outbox", 1 << 20)
    said = main("actor=true", "task=fake", "name=left", "run_dir=run")
    outbox.close()
    assert f"in use by process {os.getpid()}: stop it, or give this actor" in said


@pytest.mark.slow
def test_what_only_the_trainer_can_check_it_says_before_any_actor_comes(child, programs):
    updates = "plan.phases.practise.updates=[updat]"
    assert "updates[0]: no update of the algorithm is called 'updat'; did you" in child("trainer", updates)
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


def test_a_capacity_is_for_the_life_of_a_run(child, spec, tmp_path):
    make_store(tmp_path / "run", spec).close()
    said = child("server", "max_env_steps=500", f"port={free_port()}", local=f"ipc://{tmp_path}/server")
    assert "'online': 20000" in said
    assert "'online': 500" in said
    assert "take the old one, or another run_dir" in said


def test_a_checkpoint_of_another_algorithm_is_refused_by_what_differs(child, spec, tmp_path):
    make_store(tmp_path / "run", spec).close()
    other = {"algo": {"critic": {"num_critics": 7}}}
    Checkpoints(tmp_path / "run" / "checkpoints", spec=spec, config=other).stage(1, {})()
    with serving(composed(CONFIG, ["learner=true", f"run_dir={tmp_path}/run"])) as (local, _):
        said = child("trainer", local=local)
    assert "000001 was made with another algorithm" in said
    assert "algo.critic.num_critics: 2, 7" in said
    assert "begin anew with another run_dir" in said


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
    assert sentence in child("trainer")


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("a bug"), launcher.REFUSED), (sqlite3.OperationalError("disk I/O error"), 1)]
)
def test_a_server_that_fails_before_it_has_begun_is_started_again_only_if_it_was_the_disk(
    tmp_path, monkeypatch, capsys, error, status
):
    def serve(*_):
        raise error

    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("serl_launcher.store.server.main", serve)
    assert launcher.child("server", str(tmp_path), f"ipc://{tmp_path}/server") == status
    assert f"server: it failed: {type(error).__name__}: {error}" in capsys.readouterr().err
