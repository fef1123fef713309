"""What a person reads who asked for something that cannot be: one sentence that names it, and an exit status of 1.

Every case runs the real examples/train.py, as the scripts do; those that begin nothing share this process.
"""

import errno
import importlib.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from serl_client.errors import ConfigError
from serl_client.outbox import Outbox

from robot_infra.robots import fake
from serl_launcher import launcher
from serl_launcher.config import composed
from serl_launcher.store import weights
from serl_launcher.store.store import Store
from tests.shared.common import free_port

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "train.py")]
SOURCES = {"demo": 5000, "online": 20_000, "eval": 20_000}  # of the plan quickstart
PROCESSES = ("server: ", "trainer: ", "inference: ")


def run(*words, missing=(), cwd):
    """(exit status, lines) of train.py with these words; modules that are `missing` cannot be imported."""
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    (cwd / "sitecustomize.py").write_text(f"import sys\nfor name in {list(missing)}:\n    sys.modules[name] = None\n")
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=60, cwd=cwd, env=environment, check=False
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said.splitlines()


@pytest.fixture
def refusal(tmp_path):
    """refusal(*words) -> the one line that train.py says before it ends with status 1."""

    def refusal(*words, **options):
        code, lines = run(*words, cwd=tmp_path, **options)
        lines = [line for line in lines if not line.startswith("[")]  # the log, and what a console shows
        assert code == 1, lines
        assert len(lines) == 1, lines
        assert lines[0].startswith(("error: ", *PROCESSES))
        return lines[0]

    return refusal


@pytest.fixture
def main(tmp_path, monkeypatch):
    """main(*words) -> what train.py says before it ends with status 1, in this process."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "examples" / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    monkeypatch.chdir(tmp_path)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as ended:
            train.main()
        assert ended.value.code.startswith("error: "), "python prints a text and ends with status 1"
        assert not list(tmp_path.rglob("config.yaml")), "nothing was begun"
        return ended.value.code

    return main


@pytest.fixture
def ports():
    """The words that give a learner, and its actor, ports of their own."""
    return [f"port={free_port()}", f"inference_port={free_port()}"]


@contextmanager
def started(*words, cwd):
    """A process of train.py whose output is in `log`; it is ended on the way out."""
    with open(cwd / f"{words[0]}.log", "w+") as log:
        process = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log, cwd=cwd)
        try:
            yield process, Path(log.name)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until(condition, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def make_store(run_dir, spec, sources=SOURCES):
    run_dir.mkdir()
    return Store.create(run_dir / "store", spec, sources)


def fake_spec():
    with fake.make(max_steps=50, noise=0.2, clock="simulated") as env:
        return env.spec


# -- words


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ("learner=true algo=nothing", ["there are rejection, ", "no algo is called 'nothing'; did you mean"]),
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
        (
            "learner=true host=0.0.0.0",
            ["host=0.0.0.0: without keys the learner listens on loopback only", "tools/keys.py make"],
        ),
        ("learner=true port=99999", ["cannot listen on 127.0.0.1:99999", "choose port=..."]),
        ("learner=true port=7777 inference_port=7777", ["both 7777: choose another inference_port=..."]),
        ("learner=true run_dir=/proc/nowhere", ["cannot write to /proc/nowhere", "choose another run_dir=..."]),
        ("actor=true task=fake run_dir=/proc/nowhere", ["cannot write to /proc/nowhere", "another run_dir=..."]),
        ("actor=true task=fake inference=lokal", ["no place is called 'lokal'; did you mean 'local'?"]),
        ("actor=true task=fake task.env.clock=wall", ["clock 'wall' is unknown; use one of real, simulated"]),
        ("actor=true task=fake +task.env.speed=2", ["task.env: got an unexpected keyword argument 'speed'"]),
        (
            "actor=true task=fake task.env._target_=robot_infra.no.such",
            ["task.env: Error locating target 'robot_infra.no.such'"],
        ),
    ],
)
def test_a_wrong_word_is_one_sentence(main, words, sentences):
    said = main(*words.split())
    assert "\n" not in said
    assert [sentence for sentence in sentences if sentence not in said] == [], said


def test_the_words_that_the_comments_of_the_yamls_name_are_taken():
    config = composed(ROOT / "config", ["wandb=false", "task=sim_arm", "task.cameras=auto"])
    assert (config.wandb, config.task.env.cameras) == (False, "auto")


def test_a_broken_yaml_is_named(tmp_path):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    (tmp_path / "config" / "task" / "mine.yaml").write_text("name: [mine")
    with pytest.raises(ConfigError, match=r"expected ',' or '\]'.*mine\.yaml.*line 1") as error:
        composed(tmp_path / "config", ["task=mine"])
    assert "\n" not in str(error.value)


def test_help_and_the_config_are_shown(tmp_path):
    code, lines = run("--help", cwd=tmp_path)
    assert code == 0
    assert any(line.startswith("algo: ") and "rlpd" in line for line in lines)
    code, lines = run("--cfg", "job", "algo=sac", "seed=3", cwd=tmp_path)
    assert code == 0
    assert {"seed: 3", "algo:", "  backup_entropy: true"} <= set(lines)


# -- what is not there


@pytest.mark.parametrize(
    ("words", "missing", "sentence"),
    [
        ("actor=true task=sim_arm", "mujoco", "mujoco is missing: run `uv sync --inexact --extra sim`"),
        ("actor=true task=gym task.env_id=A", "gymnasium", "gymnasium is missing: run `uv sync --inexact --extra sim`"),
        ("learner=true", "torch", "the learner needs torch: run `uv sync --inexact --extra learner`"),
        ("learner=true", "matplotlib", "the learner needs matplotlib: run `uv sync --inexact --extra learner`"),
        ("actor=true task=fake inference=local", "torch", "needs torch: uv sync --inexact --extra learner"),
    ],
)
def test_a_missing_extra_is_named(refusal, words, missing, sentence):
    assert sentence in refusal(*words.split(), missing=[missing])


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("CartPole-v1", "CartPole-v1 has a Discrete space; only a Box fits"),
        ("NoSuchTask-v0", "gymnasium cannot make NoSuchTask-v0"),
        ("no_such_package:Task-v0", "gymnasium cannot make no_such_package:Task-v0: No module named 'no_such_package'"),
    ],
)
def test_a_gymnasium_task_that_does_not_fit_is_refused(refusal, env_id, sentence):
    assert sentence in refusal("actor=true", "task=gym", f"task.env_id={env_id}")


@pytest.mark.parametrize("name", ["port", "inference_port", "live"])
def test_a_port_in_use_is_named(refusal, ports, name):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refusal("learner=true", *(word for word in ports if not word.startswith(f"{name}=")), f"{name}={port}")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in said
    assert f"Stop it, or choose {name}=..." in said


def test_an_outbox_in_use_is_named(refusal, tmp_path):
    outbox = Outbox(tmp_path / "run" / "actors" / "left" / "outbox", 1 << 20)
    said = refusal("actor=true", "task=fake", "name=left", "run_dir=run")
    outbox.close()
    assert f"in use by process {os.getpid()}: stop it, or give this actor" in said


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("device=cudda", "trainer: device=cudda cannot be used: say device=auto, cpu or cuda:0"),
        ("plan.phases.practise.updates=[updat]", "updates[0]: no update of the algorithm is called 'updat'; did you"),
    ],
)
def test_what_only_the_trainer_can_check_it_says_before_any_actor_comes(refusal, ports, word, sentence):
    assert sentence in refusal("learner=true", *ports, word)


# -- run folders


def test_a_run_folder_in_use_names_the_process_that_holds_it(refusal, ports, tmp_path):
    lock = tmp_path / "run" / "lock"
    with started("learner=true", "run_dir=run", *ports, cwd=tmp_path) as (process, _):
        wait_until(lambda: lock.exists() and lock.read_text())
        said = refusal("learner=true", "run_dir=run")
        assert f"is in use by the learner with process {process.pid}: stop it, or choose run_dir=..." in said


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
        composed(ROOT / "config", ["learner=true", "task=fake", word])
    shown = str(refused.value).partition(", so ")[2]
    assert (shown[0], shown[-1]) == ('"', '"')
    assert advice in shown
    composed(ROOT / "config", ["learner=true", "task=fake", shown.strip('"')])


def test_sources_that_do_not_fit_the_disk_are_told_to_learner_and_actor_alike(refusal, ports, tmp_path):
    words = ["task=fake", "run_dir=run", *ports]
    with started("learner=true", *words, "max_env_steps=1000000000000", cwd=tmp_path) as (learner, log):
        said = refusal("actor=true", *words).removeprefix("error: ")
        assert learner.wait(20) == 1
    assert said.startswith("the replay buffer does not fit: ")
    assert "online 1,000,000,000,000 steps = " in said
    assert "Lower plan.sources.<name>.capacity or choose a run_dir on a larger disk" in said
    assert f"server: {said}" in log.read_text().splitlines()
    assert log.read_text().count("does not fit") == 1
    assert not {word for word in ("Traceback", "errors.log") if word in log.read_text()}


def test_an_actor_of_another_task_is_refused_and_the_run_goes_on(refusal, ports, spec, tmp_path):
    make_store(tmp_path / "run", spec).close()
    words = ["task=fake", "run_dir=run", *ports]
    with started("learner=true", *words, cwd=tmp_path) as (learner, log):
        said = refusal("actor=true", *words)
        assert learner.poll() is None
    assert "this run is of another robot or task" in said
    assert "observation.observation.state.shape: [8], [6]" in said
    assert not {word for word in ("Traceback", "errors.log") if word in log.read_text()}


def test_a_capacity_is_for_the_life_of_a_run(refusal, ports, spec, tmp_path):
    make_store(tmp_path / "run", spec).close()
    said = refusal("learner=true", "run_dir=run", "max_env_steps=500", *ports)
    assert "'online': 20000" in said
    assert "'online': 500" in said
    assert "take the old one, or another run_dir" in said


def test_a_checkpoint_of_another_algorithm_is_refused_by_what_differs(refusal, ports, spec, tmp_path):
    from serl_launcher.utils.checkpoint import Checkpoints

    make_store(tmp_path / "run", spec).close()
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", spec=spec, config={"algo": {"members": 7}})
    checkpoints.save(0, {})
    said = refusal("learner=true", "run_dir=run", *ports)
    assert said.startswith("trainer: ")
    assert "000001 was made with another algorithm" in said
    assert "algo.num_critics: 2, 7" in said
    assert "begin anew with another run_dir" in said


def test_weights_of_another_algorithm_without_a_checkpoint_are_no_obstacle(ports, tmp_path):
    """A run that was killed before its first checkpoint begins anew, with whatever algorithm it is given."""
    import safetensors.numpy

    spec = fake_spec()
    store = make_store(tmp_path / "run", spec)
    store.publish_weights(*weights.write(tmp_path / "run" / "weights", safetensors.numpy.save({})), 0)
    store.close()
    words = ["task=fake", "run_dir=run", *ports]
    short = ["plan=evaluate", 'plan.phases.evaluate.until=["episodes >= 1"]']
    with started("learner=true", *words, *short, cwd=tmp_path) as (learner, log):
        assert run("actor=true", *words, cwd=tmp_path)[0] == 0
        assert learner.wait(30) == 0, log.read_text()


def test_a_disk_that_is_full_is_one_sentence_of_the_process_that_met_it(tmp_path, monkeypatch, capsys):
    def save(*_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 459712 vs 459600")  # noqa: B904 - as torch.save does

    (tmp_path / "config.yaml").touch()
    monkeypatch.setitem(launcher.CHILDREN, "trainer", save)
    assert launcher.child("trainer", str(tmp_path), "") != 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"No space left on device: make room for {tmp_path}, then give the same command again" in said


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("a bug"), launcher.REFUSED), (sqlite3.OperationalError("disk I/O error"), 1)]
)
def test_a_server_that_fails_before_it_has_begun_is_started_again_only_if_it_was_the_disk(
    tmp_path, monkeypatch, capsys, error, status
):
    def serve(*_):
        raise error

    (tmp_path / "config.yaml").touch()
    monkeypatch.setitem(launcher.CHILDREN, "server", serve)
    assert launcher.child("server", str(tmp_path), f"ipc://{tmp_path}/server") == status
    assert f"server: it failed: {type(error).__name__}: {error}" in capsys.readouterr().err


def test_the_sockets_of_a_killed_learner_are_cleared_away_and_those_of_a_living_one_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / f"retake-{name}" for name in ("dead", "living", "restarting")]
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as living:
        for folder, listener in zip(folders[:2], (dead, living), strict=True):
            folder.mkdir()
            listener.bind(str(folder / "server"))
        living.listen()
        dead.close()
        shutil.copytree(folders[0], folders[2], copy_function=os.link)  # its server was killed, and comes again
        with launcher._lock(folders[2]):
            launcher._forget_dead_sockets()
    assert [folder.exists() for folder in folders] == [False, True, True]
