"""tools/chaos.py: a few rounds of it, and its checker, which has to see each kind of damage."""

import json
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from serl_client.episode import Outcome
from serl_client.spec import Spec

from serl_launcher.store import layout, weights
from serl_launcher.store.store import Store
from tests.faults import checker, counted
from tests.faults.proxy import Proxy
from tests.faults.rot import Rot
from tests.faults.whole import Whole

CHAOS = Path(__file__).parents[2] / "tools/chaos.py"


def chaos(*words):
    done = subprocess.run([sys.executable, CHAOS, *words], capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


def test_rounds_of_faults_lose_double_and_reorder_nothing():
    done, said = chaos("--rounds", "4", "--seed", "2698")
    assert said["violations"] == [], done.stdout
    assert done.returncode == 0
    assert (said["rounds"], said["seed"]) == (4, 2698)
    assert said["lost"] == said["duplicated"] == said["reordered"] == 0
    assert 0 < said["acked"] <= said["produced"]


@pytest.mark.parametrize("nemesis", ["insider", "missing-index", "bit-rot"])
def test_a_round_with_keys_of(nemesis):
    done, said = chaos("--round", "0", "--seed", "5", "--only", nemesis)
    assert said["violations"] == [], done.stdout
    assert f"keys; {nemesis}" in done.stdout


def test_a_nemesis_that_there_is_not_is_refused_by_a_sentence_that_names_those_that_there_are():
    done = subprocess.run([sys.executable, CHAOS, "--only", "flood"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no nemesis begins with flood; there are bit-rot, cut, " in done.stderr


def test_the_checker_knows_nothing_of_the_product():
    code = "import sys, tests.faults.checker; sys.exit([m for m in sys.modules if m.startswith('serl_')] or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHAOS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_killed_trainer_has_left_of_its_weights_goes_with_the_next_version(tmp_path):
    (tmp_path / "abc.123.part").write_bytes(b"half")
    sha256, _ = weights.write(tmp_path, b"whole")
    assert [file.name for file in tmp_path.iterdir()] == [f"{sha256}.safetensors"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What one round left: its folder."""
    keep = tmp_path_factory.mktemp("keep")
    done, said = chaos("--round", "1", "--seed", "1", "--only", "kill-actor", "--keep", str(keep))
    assert said["violations"] == [], done.stdout
    return keep / "1-1"


class Kept:
    """A copy of what a round left, to damage and to check."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "disk/run/store"
        self.index = sqlite3.connect(self.store / "index.sqlite", isolation_level=None)
        ((spec,),) = self.index.execute("SELECT value FROM meta WHERE key = 'spec'")
        ((capacity, self.tail, self.head),) = self.index.execute("SELECT capacity, tail, head FROM sources")
        self.layout = layout.Layout(Spec.from_dict(json.loads(spec)), capacity)
        self.steps = np.memmap(self.store / "main/steps", self.layout.step, "r+")
        self.rows = {
            name: np.memmap(self.store / "main/rows", feature.dtype, "r+", self.layout.blocks[name],
                            (self.layout.rows, *feature.shape))
            for name, feature in self.layout.spec.observation.items()
        }  # fmt: skip

    def check(self, archived=()):
        self.index.close()
        outboxes = [path for path in (self.folder / "disk").glob("a*") if not path.name.endswith("-weights")]
        return checker.check(self.store, sorted((self.folder / "truth").iterdir()), outboxes, archived)

    def pair(self):
        """Slots of two consecutive live steps, neither the last one, of one episode."""
        live = [number % self.layout.capacity for number in range(self.tail, self.head)]
        return next(
            (one, two) for one, two in pairwise(live)
            if self.steps[one]["episode"] == self.steps[two]["episode"] and self.steps[one]["first"] >= self.tail
            and self.steps[two]["final_row"] < 0
        )  # fmt: skip

    def stranger(self, slot):
        """A live step of another episode, without a final row."""
        live = [number % self.layout.capacity for number in range(self.tail, self.head)]
        return next(
            other for other in reversed(live)
            if self.steps[other]["episode"] != self.steps[slot]["episode"] and self.steps[other]["final_row"] < 0
        )  # fmt: skip

    def encode_record(self, slot):
        """Make the checksum of a step right again."""
        record = self.steps[slot]
        seen = [row for row in (int(record["row"]), int(record["final_row"])) if row >= 0]
        columns = (self.rows[name][row % self.layout.rows] for row in seen for name in sorted(self.rows))
        self.steps[slot]["checksum"] = layout.checksum(record, columns)


@pytest.fixture
def kept(played, tmp_path):
    return Kept(Path(shutil.copytree(played, tmp_path / "round")))


def lose_a_step(kept):
    kept.steps[kept.pair()[0]] = np.zeros((), kept.layout.step)


def lose_the_last_record(kept):
    kept.index.execute("UPDATE sessions SET expected = expected - 1")


def lose_an_episode(kept):
    kept.index.execute("DELETE FROM episodes WHERE number = (SELECT max(number) FROM episodes)")


def lose_an_outcome(kept):
    kept.index.execute("DELETE FROM outcomes WHERE rowid = 1")


def store_a_step_twice(kept):
    one, two = kept.pair()
    kept.steps[two]["index"], kept.steps[two]["row"] = kept.steps[one]["index"], kept.steps[one]["row"]
    kept.encode_record(two)


def swap_two_steps(kept):
    one, two = kept.pair()
    kept.steps[[one, two]] = kept.steps[[two, one]]
    kept.steps["number"][[one, two]] = kept.steps["number"][[two, one]]
    kept.encode_record(one), kept.encode_record(two)


def swap_two_episodes(kept):
    (one, a), (two, b) = kept.index.execute(
        "SELECT number, first FROM episodes WHERE session = (SELECT session FROM episodes GROUP BY session "
        "ORDER BY count(*) DESC LIMIT 1) ORDER BY number LIMIT 2"
    ).fetchall()  # fmt: skip
    kept.index.execute("UPDATE episodes SET first = ? WHERE number = ?", (b, one))
    kept.index.execute("UPDATE episodes SET first = ? WHERE number = ?", (a, two))


def put_a_row_into_another_episode(kept):
    one, _ = kept.pair()
    kept.steps[one]["row"] = kept.steps[kept.stranger(one)]["row"]
    kept.encode_record(one)


def flip_a_bit_of_an_image(kept):
    one, _ = kept.pair()
    kept.rows["observation.images.eye"][kept.steps[one]["row"] % kept.layout.rows, 3, 4, 1] ^= 16


def flip_a_bit_and_seal_it(kept):
    one, _ = kept.pair()
    kept.steps[one]["action"][1] = np.nextafter(kept.steps[one]["action"][1], np.float32(2))
    kept.encode_record(one)


def terminate_a_truncated_episode(kept):
    kept.index.execute("UPDATE episodes SET terminated = 1 - terminated WHERE number = 1")


def evict_nearly_all(kept):
    (tail,) = kept.index.execute("SELECT max(first) FROM episodes").fetchone()
    kept.index.execute("UPDATE sources SET tail = ?, row_tail = (SELECT max(first_row) FROM episodes)", (tail,))
    np.memmap(kept.store / "main/published", "<u8", "r+")[0] = tail


def evict_half_of_an_episode(kept):
    kept.index.execute("UPDATE sources SET tail = tail + 1")
    np.memmap(kept.store / "main/published", "<u8", "r+")[0] += 1


def publish_too_much(kept):
    np.memmap(kept.store / "main/published", "<u8", "r+")[1] += 1


def forget_a_directive(kept):
    kept.index.execute("UPDATE directives SET body = '{}'")


def lose_the_newest_weights(kept):
    kept.index.execute("INSERT INTO weights (sha256, size, update_, at, checksum) VALUES ('abc', 5, 1, 0.0, 0)")


def leave_a_file_in_an_outbox(kept):
    (kept.folder / "disk/a0/00000009-aa-0.records").touch()


@pytest.mark.parametrize(
    ("damage", "count", "sentence"),
    [
        (lose_a_step, "lost", "is damaged, or not there"),
        (lose_the_last_record, "lost", "records were acknowledged"),
        (lose_an_episode, "lost", "is not in the index"),
        (lose_an_outcome, "lost", "is there 0 times"),
        (store_a_step_twice, "lost duplicated", "1 are there twice"),
        (swap_two_steps, "reordered", "its steps lie in the order"),
        (swap_two_episodes, "reordered", "and the one before it at"),
        (put_a_row_into_another_episode, "", "its row comes from"),
        (flip_a_bit_of_an_image, "lost", "is damaged, or not there"),
        (flip_a_bit_and_seal_it, "", "is not what was sent"),
        (terminate_a_truncated_episode, "", "its actor sent"),
        (evict_nearly_all, "", "were kept"),
        (evict_half_of_an_episode, "", "lies within an episode"),
        (publish_too_much, "", "is published"),
        (forget_a_directive, "", "is not what was answered to"),
        (lose_the_newest_weights, "", "the weights abc are damaged, or not there"),
        (leave_a_file_in_an_outbox, "", "still holds"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_checker_sees(kept, damage, count, sentence):
    damage(kept)
    report = kept.check()
    assert any(sentence in violation for violation in report.violations), report.violations
    for name in ("lost", "duplicated", "reordered"):
        assert (getattr(report, name) > 0) == (name in count), (name, report)


def test_the_checker_finds_nothing_in_what_is_whole(kept):
    report = kept.check()
    assert report.violations == []
    assert report.acked <= report.produced


def test_the_checker_sees_an_episode_that_left_before_it_was_archived(kept):
    assert kept.tail > 0  # the round has evicted some
    report = kept.check(archived=["main"])
    assert report.lost > 0
    assert any("left the store before it was archived" in violation for violation in report.violations)


def test_bits_that_turn_over_are_found_by_verify_and_no_others_are_named(kept):
    rot = Rot(kept.store.parent, "main", random.Random(1))
    assert len(rot.numbers) == 3
    assert rot.unseen() == []
    rot.numbers.pop()
    assert "verify says" in rot.unseen()[0]
    rot.mend()
    assert kept.check().violations == []


# -- a whole run, as an independent reader counts it
@pytest.mark.slow
def test_a_quickstart_whose_processes_are_killed_goes_on_to_its_end_and_is_counted(tmp_path):
    words = ["max_env_steps=300", "baseline_episodes=2", "eval_episodes=2"]
    run = Whole(tmp_path, 1, (0.5, 1.0), words)
    assert run.play(300).summary["eval"]["episodes"] == 2
    assert run.took_s
    assert [text for text in run.violations if "median" not in text] == []  # which is for idle machines


def test_a_kill_that_costs_more_than_two_starts_is_a_violation(tmp_path):
    run = Whole(tmp_path, 1, (5, 15), [])
    run.start_s, run.took_s = 10.0, [5.0, 20.0, 90.0]
    run._check_times()
    assert run.violations == []
    run.took_s += [20.1, 30.0]
    run._check_times()
    assert run.violations == ["the median kill cost 20.1 s, an undisturbed start 10.0 s"]


PHASES = ("demonstrate", "teleop", "demo", 2), ("baseline", "evaluate", "eval", 2), ("practise", "collect", "online", 3)


class Run:
    """A run that is over: its store, its weights and its summary."""

    def __init__(self, folder, spec, make_segment):
        self.folder, self._make, self._seq, self._seed = folder, make_segment, 0, 0
        self.store = Store.create(folder / "store", spec, {"demo": 200, "online": 200, "eval": 200})
        self.store.hello("arm", "outbox", "A", [])
        for phase, mode, into, count in (*PHASES, ("evaluate", "evaluate", "eval", 3)):
            self.weights, size = weights.write(folder / "weights", phase.encode())
            self.version = self.store.publish_weights(self.weights, size, 0)
            directive = self.store.direct({"phase": phase, "mode": mode, "into": into})
            for _ in range(count):
                self.episode(directive, phase)
        self.store.commit()
        self.summary = {
            "env_steps": 35, "episodes": 5, "assisted": 0,
            "before": {"episodes": 2, "distinct_starts": 2, "success": 1.0, "return_mean": 21.0},
            "eval": {"episodes": 3, "distinct_starts": 3, "success": 1.0, "return_mean": 21.0,
                     "weights_sha256": self.weights},
        }  # fmt: skip

    def episode(self, directive, phase):
        """Seven steps, a success."""
        self._seed += 1
        name = f"{phase}-{self._seed}"
        stamp = dict(directive=directive, phase=phase, weights=self.version)
        for record in (
            self._make(name, self._seed, 0, 4, **stamp), self._make(name, self._seed, 4, 3, ends="terminated", **stamp),
            Outcome(name, True),
        ):  # fmt: skip
            self.store.stage("A", self._seq, record)
            self._seq += 1

    def durable(self, source):
        found = counted.published(self.folder / "store" / source, counted.layout(self.folder / "store"))
        return {source: dict(zip(found["number"].tolist(), found["checksum"].tolist(), strict=True))}

    def violations(self, durable=None, spooled=None):
        (self.folder / "summary.json").write_text(json.dumps(self.summary))
        violations = []
        counted.Counted(self.folder, violations).check(durable or {}, spooled or {})
        return violations


@pytest.fixture
def run(tmp_path, spec, make_segment):
    made = Run(tmp_path, spec, make_segment)
    yield made
    made.store.close()


def test_what_an_independent_reader_counts_is_what_the_summary_of_a_whole_run_says(run):
    assert run.violations(run.durable("online"), {"A": 30}) == []


def a_lie(part, **values):
    def tell(run):
        (run.summary[part] if part else run.summary).update(values)

    return tell


def a_step_is_lost(run):
    np.memmap(run.folder / "store/online/steps", counted.layout(run.folder / "store"), "r+")[3] = 0


def another_policy_acted(run):
    run.summary["eval"]["weights_sha256"], _ = weights.write(run.folder / "weights", b"another")


def the_published_file_is_damaged(run):
    (run.folder / f"weights/{run.weights}.safetensors").write_bytes(b"else")


def an_episode_is_worth_more_than_its_rows(run):
    change(run, "UPDATE episodes SET reward = 22 WHERE number = 1")


def a_takeover_is_kept_quiet(run):
    change(run, "UPDATE episodes SET intervened = 1 WHERE number = 6")


def change(run, words):
    with sqlite3.connect(run.folder / "store/index.sqlite") as index:
        index.execute(words)
    index.close()


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (a_lie("", env_steps=36), "env_steps: 36, and an independent reader counts 35"),
        (a_lie("", episodes=4), "episodes: 4"),
        (a_lie("", assisted=1), "assisted: 1"),
        (a_lie("eval", success=2 / 3), "eval: successes of 3"),
        (a_lie("eval", episodes=4), "eval: successes of 4"),
        (a_lie("eval", distinct_starts=2), "eval: successes of 3, starts"),
        (a_lie("before", return_mean=20.0), "before: successes of 2"),
        (another_policy_acted, "eval: successes of 3"),
        (the_published_file_is_damaged, "are damaged, or not there"),
        (a_step_is_lost, "is damaged, or not there"),
        (an_episode_is_worth_more_than_its_rows, "reward of demonstrate-1"),
        (a_takeover_is_kept_quiet, "takeovers in practise-6"),
    ],
    ids=lambda value: value.__name__ if callable(value) and value.__name__ != "tell" else None,
)
def test_the_independent_reader_sees(run, plant, sentence):
    plant(run)
    assert any(sentence in violation for violation in run.violations()), run.violations()


def test_the_independent_reader_sees_that_something_durable_went_and_that_an_outbox_was_forgotten(run):
    durable = run.durable("online")
    durable["online"][5] ^= 1
    assert "steps of online that were durable and are not there: 1" in run.violations(durable)[0]
    assert "records of session A that lay on the actor's disk: 30" in run.violations(spooled={"A": 31})[0]


@pytest.fixture
def echo():
    """The port of a server that says everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(end):
        with end, suppress(OSError):
            while data := end.recv(65536):
                end.sendall(data)

    def accept():
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(end,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def heard(end, seconds=0.2):
    end.settimeout(seconds)
    try:
        return end.recv(100)
    except TimeoutError:
        return None


def test_the_proxy_holds_up_either_direction_and_goes_on_where_it_was(echo):
    with Proxy("127.0.0.1", echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as end:
        for mode, options in (("half_open", {}), ("one_way", {"direction": "up"}), ("one_way", {"direction": "down"})):
            end.sendall(b"before")
            assert heard(end, 5.0) == b"before"
            proxy.set(mode, **options)
            end.sendall(b"while")
            assert heard(end) is None
            proxy.set("pass")
            assert heard(end, 5.0) == b"while"


def test_the_proxy_cuts_living_and_new_connections(echo):
    with Proxy("127.0.0.1", echo) as proxy:
        for mode in ("cut", "reset"):
            proxy.set("pass")
            with socket.create_connection(("127.0.0.1", proxy.port)) as living:
                living.sendall(b"alive")
                assert heard(living, 5.0) == b"alive"
                proxy.set(mode)
                with socket.create_connection(("127.0.0.1", proxy.port)) as new:
                    for end in (living, new):
                        with pytest.raises(ConnectionResetError) if mode == "reset" else nullcontext():
                            assert heard(end, 5.0) == b""


def test_the_proxy_is_slow_and_loses_nothing(echo):
    sent = bytes(range(256)) * 40
    with Proxy("127.0.0.1", echo) as proxy:
        for mode, options in (("delay", {"seconds": 0.05}), ("trickle", {"rate": 100_000})):
            proxy.set(mode, **options)
            with socket.create_connection(("127.0.0.1", proxy.port)) as end:
                end.sendall(sent)
                end.settimeout(10.0)
                came = b""
                while len(came) < len(sent):
                    came += end.recv(65536)
                assert came == sent


def test_the_proxy_refuses_a_mode_that_there_is_not(echo):
    with Proxy("127.0.0.1", echo) as proxy, pytest.raises(ValueError, match="the modes and their options are"):
        proxy.set("one_way")
