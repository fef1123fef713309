"""tools/doctor.py: each failure that needs no hardware is provoked, and each says what to do."""

import fcntl
import json
import re
import socket
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import zmq
from omegaconf import OmegaConf
from serl_client import Feature, Outcome, Spec, messages
from serl_client.client import TrainerClient
from serl_client.errors import ConfigError
from serl_client.outbox import Outbox

from robot_infra.guard.robot import GuardedRobot
from serl_launcher.config import composed
from serl_launcher.store.store import Store
from tests.shared.clients import connected
from tests.shared.common import free_port, own_ports
from tests.shared.robots import TimedCamera, build, point
from tests.shared.servers import ServerThread
from tests.shared.tools import called, installs, typed
from tools.checks import machine, network, robot
from tools.checks.common import CONFIG, Run
from tools.checks.sides import examined, looked
from tools.keys import locked, make, revoke


def planned(side, run_dir, *words, **options):
    """The run that these words make of the fake robot."""
    base = composed(CONFIG, [f"{side}=true", "task=fake"])
    return Run(side, OmegaConf.merge(base, OmegaConf.from_dotlist([f"run_dir={run_dir}", *words])), **options)


def found(check, run):
    """(the worst state, all that was said) by a check; every failure comes with advice."""
    findings = list(check(run))
    assert all(finding.advice for finding in findings if finding.state != "ok")
    worst = max((finding.state for finding in findings), key=["ok", "WARN", "FAIL"].index)
    return worst, "\n".join(f"{finding.text}: {finding.advice}" for finding in findings)


def assert_says(check, run, state, *texts):
    """A check comes to this state, and all of these are in what it says."""
    result, said = found(check, run)
    assert (result, [text for text in texts if text not in said]) == (state, []), said


def doctor(*words, start=called):
    """(exit status, {check: the worst state}, all that was said) of the program."""
    status, text = start("doctor", *words, "task=fake", "--json", "--seconds", "0.2")
    said = json.loads(text)
    assert said["failed"] == sum(check["state"] == "FAIL" for check in said["checks"])
    return status, states((check["check"], check["state"]) for check in said["checks"]), text


def states(found):
    worst = {}
    for name, state in found:
        worst[name] = max(state, worst.get(name, "ok"), key=["ok", "WARN", "FAIL"].index)
    return worst


def all_of(side, *words):
    """({check: the worst state}, all that was said) of all checks of a side."""
    findings = list(examined(side, ["task=fake", *words], move=False, seconds=0.2))
    return states((name, finding.state) for name, finding in findings), "\n".join(f.text for _, f in findings)


@pytest.fixture
def learner(tmp_path):
    """The port of a server with nobody connected."""
    with closing(ServerThread(tmp_path / "served")) as server:
        yield server.port


@pytest.mark.slow
def test_both_sides_of_a_run_that_can_start_are_told_so(learner, tmp_path, monkeypatch):
    durable = machine.durable
    monkeypatch.setattr(machine, "durable", lambda folder: durable(folder) and (1e-3, 1e-2, 1e8))  # of an idle disk
    found, said = all_of("learner", f"run_dir={tmp_path}/run", *own_ports())
    assert found.pop("processors") in ("ok", "WARN")
    assert set(found.values()) == {"ok"}, said
    code, found, said = doctor("actor", f"run_dir={tmp_path}/run", f"port={learner}", start=typed)
    assert code == 0, said
    assert {found[name] for name in ("robot", "control", "reachable", "protocol", "same_robot", "clocks")} == {"ok"}
    assert "the run is new: it will be of this robot" in said


def test_words_that_make_no_run_are_one_failure_in_words(tmp_path):
    code, found, said = doctor("actor", "tsak=fake", f"run_dir={tmp_path}")
    assert (code, found) == (1, {"words": "FAIL"})
    assert "did you mean 'task'?" in said


def test_a_plan_that_the_launcher_refuses_is_refused_and_nothing_said_of_what_follows(tmp_path):
    found, said = all_of("learner", f"run_dir={tmp_path}", "node_rank=1")
    assert found["plan"] == "FAIL"
    assert "the 1 nodes are 0 to 0" in said
    assert "memory" not in found


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    run = planned("learner", tmp_path)
    assert found(machine.packages, run)[0] in ("ok", "WARN")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert_says(machine.packages, run, "FAIL", "not installed: safetensors: run ")
    assert installs(found(machine.packages, run)[1], tmp_path) == ["--extra", "learner"]
    assert found(machine.packages, planned("actor", tmp_path))[0] in ("ok", "WARN")  # which needs none


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (["actor=true"], set()),
        (["actor=true", "task=sim_arm"], {"sim"}),
        (["actor=true", "inference=local", "policy=pi0", "algo=rejection"], {"learner", "vla"}),
        (["learner=true", "record=all", "log=wandb"], {"learner", "data", "wandb"}),
        (["learner=true", "log=tensorboard"], {"learner", "tensorboard"}),
        (["learner=true", "+plan.sources.online.archive=lerobot"], {"learner", "data"}),
    ],
)
def test_which_extras_a_run_needs(words, extras):
    config = composed(CONFIG, ["task=fake", *words])
    assert {name for name, needs in machine.EXTRAS.items() if needs(config)} == extras


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (finding,) = looked(network.ports, planned("learner", tmp_path, *own_ports(), f"inference_port={taken}"))
    assert (finding.state, f"127.0.0.1:{taken} (Address already in use)" in finding.text) == ("FAIL", True)


def test_nobody_and_somebody_else_at_the_learners_port(tmp_path):
    def assert_fails(port, *texts, ip="127.0.0.1"):
        assert_says(network.reachable, planned("actor", tmp_path, f"ip={ip}", f"port={port}"), "FAIL", *texts)

    assert_fails(free_port(), "nobody listens", "ssh -L")
    assert_fails(5588, "is no known name", ip="no-such-host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer(words):
            peer, _ = other.accept()
            with peer:
                peer.sendall(words)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(100):
                    pass

        for words, expected in ((b"SSH-2.0-OpenSSH\n", "no learner, it says b'SSH-2.0"), (b"", "says nothing")):
            thread = threading.Thread(target=answer, args=(words,))
            thread.start()
            assert_fails(port, expected)
            thread.join()


def test_a_learner_of_another_protocol_is_told_with_both_numbers(learner, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "m", SimpleNamespace(**vars(messages) | {"PROTOCOL": (90, 91)}))
    ours = "{}-{}".format(*messages.PROTOCOL)
    assert_says(network.protocol, planned("actor", tmp_path, f"port={learner}"), "FAIL", "90-91", ours, "on both")
    assert installs(found(network.protocol, planned("actor", tmp_path, f"port={learner}"))[1], tmp_path) == []


def test_another_robot_and_another_run_are_refused(learner, tmp_path):
    run = planned("actor", tmp_path, f"port={learner}", "name=actor")
    here = Spec({"observation.state": Feature((7,))}, Feature((2,), low=-1, high=1), fps=10.0)
    with TrainerClient(
        f"tcp://127.0.0.1:{learner}", actor="actor", spec=here, outbox=tmp_path / "actors/actor/outbox"
    ) as client:
        connected(client)
        assert found(network.protocol, run)[0] == "ok"
        with real_env() as run.env:
            run.spec = run.env.spec
        assert_says(network.same_robot, run, "FAIL", "observation.state.shape: [7], [6]")
        assert_says(network.name, run, "FAIL", "an actor named actor is connected: stop it")
        assert "actor" not in found(network.clocks, run)[1], "that is no matter of clocks"
        run.config.name = "right"
        assert found(network.name, run) == ("ok", "right; connected are actor: ")
        run.config.name = "actor"
        assert_says(network.outbox, run, "FAIL")  # that process has it
    with closing(Outbox(tmp_path / "actors/actor/outbox", 1 << 20)) as box:
        box.bind("q" * 32)
        assert box.append("e" * 32, 0, messages.encode_record(0, Outcome("e0", True)))
    assert_says(network.outbox, run, "FAIL", f"1 records of run {'q' * 12} wait")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [None, {}])
def test_an_inference_port_that_refuses_or_says_nothing_is_never_ok_and_that_of_a_tunnel_counts(tmp_path, spec):
    run, closed = planned("actor", tmp_path), free_port()
    run.welcome = messages.Welcome("", 0, 1, [], spec, f"tcp://*:{closed}", {})
    assert_says(
        network.inference, run, "WARN", f"nobody listens at 127.0.0.1:{closed}", "compare inference_port= there"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run.config.inference_port = silent.getsockname()[1]
        assert_says(network.inference, run, "FAIL", "takes connections and says nothing")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as tunnel:
        run.config.inference_port = tunnel.bind_to_random_port("tcp://127.0.0.1")
        assert found(network.inference, run)[0] == "ok"


@pytest.mark.slow
def test_keys_that_are_missing_open_to_others_of_another_name_or_revoked(tmp_path):
    folder = tmp_path / "keys"
    with locked(folder, is_new=True):
        make(folder, "eve", "viewer")
        assert found(network.keys, planned("learner", tmp_path, f"keys={folder}"))[0] == "FAIL"
        make(folder, "left", "actor")
    assert found(network.keys, planned("learner", tmp_path, f"keys={folder}", "host=0.0.0.0"))[0] == "ok"
    with pytest.raises(ConfigError, match="without keys the learner listens on loopback only"):
        found(network.keys, planned("learner", tmp_path, "host=0.0.0.0"))

    def tells(key, name, failing="", text=""):
        """Whether this is the first check that fails with this key, and says so."""
        words = [f"key={folder / key}"] if key else []
        run = planned("actor", tmp_path, f"port={server.port}", f"name={name}", *words)
        for check in (network.key, network.reachable, network.protocol):
            for finding in looked(check, run):
                if finding.state == "FAIL":
                    return check.__name__ == failing and text in f"{finding.text} {finding.advice}"
        return not failing

    with closing(ServerThread(tmp_path / "served", keys=folder)) as server:
        assert tells("left.key", "left")
        assert tells("left.key", "left/2")
        assert tells("left.key", "auto"), "an actor that is given no name goes by that of its key"
        assert tells("", "left", "reachable", "lets in only who has a key")
        assert tells("left.key", "right", "key", "say name=left")
        assert tells("eve.key", "eve", "key", "tools/keys.py make eve --role actor")
        (folder / "left.key").chmod(0o644)
        assert tells("left.key", "left", "key", "chmod 600")
        (folder / "left.key").chmod(0o600)
        revoke(folder, "left")
        assert tells("left.key", "left", "protocol", "does not let the key left in")
    with closing(ServerThread(tmp_path / "open")) as server:
        assert tells("left.key", "left", "reachable", "leave key= out")


def test_a_gpu_whose_kernels_cannot_be_compiled_is_told_and_nobody_else(tmp_path, monkeypatch):
    for card, device, lacks in [("", "cpu", "gcc"), ("GPU 0", "cpu", ""), ("GPU 0", "cpu", "gcc"), ("", "cuda", "gcc")]:
        monkeypatch.setattr(machine, "_nvidia", lambda card=card: card)
        monkeypatch.setattr(machine.compiler, "lacking", lambda lacks=lacks: lacks)
        run = planned("actor", tmp_path, "inference=local", f"device={device}")
        said = [finding.text for finding in looked(machine.gpu, run)]
        is_told = bool(lacks and (card or device == "cuda"))
        assert ("kernels for the GPU cannot be compiled: gcc is missing" in said) is is_told


def test_a_full_disk_and_a_plan_that_is_too_large(tmp_path):
    run = planned("learner", tmp_path, "plan.sources.online.capacity=1000000000000")
    assert found(robot.described_robot, run)[0] == "ok"
    assert_says(machine.disk, run, "FAIL", "the replay buffer does not fit")
    run = planned("actor", tmp_path, "outbox_gb=0.000001")
    with real_env() as run.env:
        run.spec = run.env.spec
        assert_says(machine.disk, run, "FAIL", "a larger outbox_gb")
        run.config.outbox_gb = 1
        assert_says(machine.disk, run, "ok", " days without a learner")
    assert_says(machine.disk, planned("actor", tmp_path, "outbox_gb=1000000"), "WARN")


def test_a_store_that_is_there_tells_its_robot_and_keeps_its_capacities(tmp_path):
    with real_env() as env:
        store = Store.create(tmp_path / "store", env.spec, {"online": 100, "demo": 50})
    with closing(store):
        run = planned("learner", tmp_path, "plan.sources.online.capacity=100", "plan.sources.demo.capacity=60")
        assert found(robot.described_robot, run)[0] == "ok"
        assert run.spec.fps == env.spec.fps
        assert_says(machine.disk, run, "ok", "is there, with all its room")


def test_a_folder_that_a_learner_has_is_left_alone(tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        found, said = all_of("learner", f"run_dir={tmp_path}", "node_rank=1")  # the plan's failure spares time
    assert found["folder"] == "FAIL"
    assert "in use by the learner with process 4711" in said
    assert not {"described_robot", "disk"} & set(found)


def test_a_disk_without_room_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64_000))
    (finding,) = machine.disk(planned("actor", tmp_path))
    assert (finding.state, "make room there" in finding.advice) == ("FAIL", True)


class Slow(GuardedRobot):
    """`seconds` pass in each observation."""

    seconds = 0.0

    def observe(self):
        time.sleep(self.seconds)
        return super().observe()


def real_env(**cameras):
    """The robot on the real clock with these cameras."""
    return build(point(Slow, 20), fps=20, max_steps=9, clock="real", cameras=cameras)


@pytest.mark.parametrize(
    ("camera", "state", "words"),
    [
        (TimedCamera(), "ok", "4x6x3"),
        (TimedCamera(rate=3.0), "FAIL", "rows come at 20 Hz"),
        (TimedCamera(rate=17.0), "WARN", "some show one twice"),
        (TimedCamera(waits=0.05), "WARN", "it should not wait for the next image"),
        (TimedCamera(age=5.0), "FAIL", "it stands still"),
        (TimedCamera(shape=(8, 6, 3)), "FAIL", "declared are uint8 [4, 6, 3]"),
        (TimedCamera(pixels=(0,)), "WARN", "lens is covered"),
    ],
)
def test_a_camera_is_judged_by_rate_age_size_and_image(tmp_path, camera, state, words):
    with real_env(high=camera) as env:
        assert_says(robot.cameras, planned("actor", tmp_path, env=env, seconds=0.4), state, words)


def test_a_loop_that_is_too_slow_fails_and_names_the_slow_part(tmp_path):
    with real_env(high=TimedCamera()) as env:
        env.robot.seconds = 0.08
        state, said = found(robot.control, planned("actor", tmp_path, env=env, seconds=0.4))
    assert state == "FAIL"
    assert float(re.search(r"robot ([\d.]+)", said)[1]) >= 80, "of at least so many ms: a busy machine adds to them"
    assert env.robot.steps == 0


def test_a_real_robot_is_commanded_only_when_it_may_move(tmp_path):
    with real_env() as env:
        for move in (False, True):
            said = found(robot.control, planned("actor", tmp_path, env=env, move=move, seconds=0.2))[1]
            assert (env.robot.steps > 0) == move, said


def test_a_robot_that_does_not_open_is_a_failure_and_the_rest_goes_on(learner, tmp_path):
    found, said = all_of("actor", f"run_dir={tmp_path}", f"port={learner}", "+task.env.faults.burn=1")
    assert (found["robot"], found["reachable"]) == ("FAIL", "ok")
    assert not {"cameras", "control"} & set(found)
    assert "fault 'burn' is unknown" in said
