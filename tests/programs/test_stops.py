"""A person stops a run again and again, as for lunch, or the machine is slow: no update is lost, updates and steps keep
their ratio, and nobody is told anything wrong.
The moments of the stops are drawn anew for each seed; which seed it was stands in the name of the test.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from tests.shared import oracle
from tests.shared.common import ROOT
from tests.shared.lerobot_policies import ACT_WORD

WARM_UP, TOLERANCE, UTD = 60, 64, 1
COMMON = [
    "task=fake", f"utd={UTD}", "log=false", 'plan.phases.practise.until=["env_steps >= 100000", operator]',
    'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip
HIORS = [
    "plan=hiors", 'plan.phases.demonstrate.until=["demo.episodes >= 3"]', 'plan.phases.clone.until=["updates >= 20"]',
    "~plan.phases.baseline", f'plan.phases.practise.start_when="online.steps >= {WARM_UP}"',
]  # fmt: skip
RUNS = {  # name: (how often it is stopped, its words)
    "quickstart": (20, [
        "critic.hidden=[32,32]", "policy.hidden=[32,32]", "batch_size=16", "baseline_episodes=2",
        'plan.phases.demonstrate.until=["demo.episodes >= 3"]',
        f'plan.phases.practise.start_when="online.steps >= {WARM_UP}"',
    ]),
    "hiors": (20, [*HIORS, "policy=flow", "policy.network.hidden=[32,32]", "batch_size=16"]),
    "an ACT of lerobot on two ranks": (5, [
        *HIORS, "algo=rejection_lerobot", ACT_WORD, "policy.rename={observation.state: observation.environment_state}",
        "batch_size=8", "ranks=2",
    ]),
    "pi0 on two ranks": (5, [*HIORS, "policy=pi0_tiny", "batch_size=8", "ranks=2", "sharding=zero2"]),
}  # fmt: skip
FALSE = ("too slow", "handshake", "Traceback", "phase None", "errors.log", "crash", "updates dropped", "giving up")
PERIOD_S = 0.08  # in which a slowed program runs once
LONGEST = 200  # steps of an episode of the task, and more


def stop(programs, process, way):
    """Stop a program as a person, a service or a cluster does; a launcher is stopped by tools/plan.py, too."""
    if way:
        process.send_signal(way)
    else:
        subprocess.run([sys.executable, ROOT / "tools/plan.py", "stop", programs.run_dir], check=True)
    programs.until(lambda: process.poll() is not None)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", [1])
def test_a_run_that_is_stopped_often_loses_no_update_keeps_its_ratio_and_says_nothing_false(programs, name, seed):
    stops, words = RUNS[name]
    words, drawn = [*COMMON, *words], random.Random(seed)
    learner, actor = (programs.start(side, *words) for side in ("learner", "actor"))
    for _ in range(stops):
        at = programs.facts().practised + drawn.randint(1, 150)
        programs.until(lambda at=at: programs.facts().practised >= at)
        stop(programs, learner, drawn.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, None]))
        programs.until(lambda: set(programs.alive()) <= {"actor"})
        if drawn.random() < 0.3:
            stop(programs, actor, drawn.choice([signal.SIGINT, signal.SIGTERM]))
            actor = programs.start("actor", *words)
        learner = programs.start("learner", *words)
    at = programs.facts().practised
    programs.until(lambda: programs.facts().practised > at)  # the last one is there
    programs.order("next")
    assert [programs.status(process) for process in (learner, actor)] == [0, 0]
    said = programs.said()
    told = re.findall(r"(stopped|resumed in phase \w+) after (\d+)", said)  # a start is stopped before it tells, too
    kept = [number for word, number in told if word == "stopped"]
    assert len(kept) >= stops // 2
    for number, (word, updates) in enumerate(told):
        assert word == "stopped" or updates == [each for told_, each in told[:number] if told_ == "stopped"][-1]
    assert not {word for word in FALSE if word in said}
    assert_kept(programs, 20 * ("clone" in said))


def assert_kept(programs, cloned):
    """The updates of practice are those that its steps were due, and none is told twice."""
    summary = json.loads((programs.run_dir / "summary.json").read_text())
    practised, trained = programs.facts().practised, summary["updates"] - cloned
    due = UTD * (practised - WARM_UP)
    assert due - LONGEST - TOLERANCE - 2 <= trained <= due + TOLERANCE, practised
    assert summary["updates_dropped"] == 0
    lines = map(json.loads, (programs.run_dir / "metrics.jsonl").read_text().splitlines())
    numbers = [line["updates"] for line in lines if line["kind"] == "update"]
    assert numbers == sorted(set(numbers))
    oracle.whole(programs.run_dir / "store")


@contextmanager
def slowed(programs, times):
    """The run's programs get a part of the time alone: they stand for the rest of each PERIOD_S."""
    over = threading.Event()

    def strike():
        while not over.wait(PERIOD_S / times):
            stopped = programs.alive().values()
            for number, wait in ((signal.SIGSTOP, PERIOD_S * (1 - 1 / times)), (signal.SIGCONT, 0.0)):
                for process in stopped:
                    with suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(wait)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
@pytest.mark.parametrize("times", [4, 16])
def test_a_slow_machine_keeps_the_ratio_of_two_actors_from_the_first_step_on(programs, times):
    words = [*COMMON, *RUNS["quickstart"][1], 'plan.phases.practise.until=["env_steps >= 600"]']
    learner = programs.start("learner", *words)
    actors = [programs.start("actor", *words, f"name={name}") for name in ("one", "two")]
    programs.until(lambda: programs.facts().practised > 0)
    with slowed(programs, times):
        programs.until(lambda: "evaluate" in programs.facts().phases)
    assert [programs.status(process) for process in (learner, *actors)] == [0] * 3
    assert not {word for word in FALSE if word in programs.said()}
    assert_kept(programs, 0)
