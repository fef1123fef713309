"""What a run's store says of the run, counted by somebody who knows the files and none of the code, and compared with
its summary.json."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.shared import oracle

from . import checker

INTERVENED = 4  # a flag of a step
LEARNING = ("teleop", "collect")  # modes
EVALUATED = {"before": 0, "eval": -1}  # summary's key -> which of the phases that evaluate


def layout(store: Path) -> np.dtype:
    """What a step looks like in this store."""
    with oracle.opened(store) as index:
        return oracle.kind(oracle.spec_of(index))


def expected(store: Path) -> dict[str, int]:
    """{session: records} that the store has."""
    with oracle.opened(store) as index:
        return dict(index.execute("SELECT session, expected FROM sessions").fetchall())


def published(source: Path, kind: np.dtype) -> np.ndarray:
    """The steps of a source that readers see now, the oldest first."""
    tail, head = np.fromfile(source / "published", "<u8").tolist()
    steps = np.memmap(source / "steps", kind, "r")
    return steps[np.arange(tail, head) % len(steps)]


class Counted:
    """A run that is over. `violations` gets a sentence for all that is wrong with it."""

    def __init__(self, run_dir: Path, violations: list[str]) -> None:
        self.run_dir, self.violations = run_dir, violations
        self.summary = json.loads((run_dir / "summary.json").read_text())
        report = checker.Report()
        with oracle.opened(run_dir / "store") as index:
            self._found = oracle.Found(run_dir / "store", index, report.violations)
            self._weights = dict(index.execute("SELECT version, sha256 FROM weights").fetchall())
            bodies = index.execute("SELECT body FROM directives ORDER BY number").fetchall()
            newest = [self._weights[max(self._weights)]] if self._weights else []
            checker.check_weights(run_dir / "weights", newest, report)
        self._modes = {body["phase"]: body["mode"] for body in map(json.loads, (row[0] for row in bodies))}
        self._episodes = [dict(row) for row in sorted(self._found.episodes.values(), key=lambda row: row["number"])]
        violations += report.violations
        self._check_episodes()

    def check(self, durable: Mapping[str, Mapping[int, int]], spooled: Mapping[str, int]) -> None:
        """Compare with the summary, with {source: {number: checksum}} of steps that were durable at some time, and with
        {session: records} that lay in an outbox then."""
        for source, steps in durable.items():
            now = published(self.run_dir / "store" / source, oracle.kind(self._found.spec))
            there = dict(zip(now["number"].tolist(), now["checksum"].tolist(), strict=True))
            tail = self._found.sources[source]["tail"]
            lost = [number for number, sum_ in steps.items() if number >= tail and there.get(number) != sum_]
            self._expect(f"steps of {source} that were durable and are not there", len(lost), 0)
        for session, end in spooled.items():
            there = self._found.sessions[session]["expected"] if session in self._found.sessions else 0
            self._expect(f"records of session {session[:8]} that lay on the actor's disk", there, max(end, there))
        self._check_summary()

    def _expect(self, what: str, said: Any, counted: Any) -> None:
        if said != counted:
            self.violations.append(f"{what}: {said}, and an independent reader counts {counted}")

    def _check_episodes(self) -> None:
        """Each episode has the steps, the reward and the takeovers that its rows add up to."""
        for episode in self._episodes:
            steps = self._found.steps.get(episode["number"], [])
            if self._found.is_live(episode):
                self._expect(f"steps of {episode['id']}", [s.index for s in steps], list(range(episode["steps"])))
                self._expect(f"takeovers in {episode['id']}", episode["intervened"], sum(
                    bool(step.record["flags"] & INTERVENED) for step in steps))  # fmt: skip
                reward = sum(float(step.record["reward"]) for step in steps)
                if abs(reward - episode["reward"]) > 1e-3:
                    self._expect(f"reward of {episode['id']}", episode["reward"], reward)

    def _done(self, *phases: str) -> list[dict[str, Any]]:
        return [one for one in self._episodes if one["phase"] in phases and one["closed"] and one["final"]]

    def _phases(self, *modes: str) -> list[str]:
        return [phase for phase, mode in self._modes.items() if mode in modes]

    def _check_summary(self) -> None:
        summary = self.summary
        learned = [one for one in self._episodes if one["source"] != "eval"]
        self._expect("env_steps", summary["env_steps"], sum(one["steps"] for one in learned))
        self._expect("episodes", summary["episodes"], len(self._done(*self._phases(*LEARNING))))
        collected = self._done(*self._phases("collect"))
        self._expect("assisted", summary["assisted"], sum(one["intervened"] > 0 for one in collected))
        evaluated = self._phases("evaluate")
        for key, which in EVALUATED.items():
            if summary[key]:
                self._check_evaluation(key, summary[key], self._done(evaluated[which]))

    def _check_evaluation(self, key: str, said: Mapping[str, Any], done: list[dict[str, Any]]) -> None:
        """The trials of which the summary speaks are episodes of the phase, each of them once, and its other numbers
        are theirs. The phase may hold more: what came when enough had, or what a kill has interrupted."""
        sha256, count = said.get("weights_sha256"), said["episodes"]
        live = [one for one in done if self._found.is_live(one) and sha256 in (None, self._weights.get(one["weights"]))]
        is_judged = any(won is not None for _, won, _ in said["trials"])  # nobody has judged one: each is None
        trials = Counter((start, won if is_judged else False, returned) for start, won, returned in said["trials"])
        there = Counter(map(self._trial, live))
        self._expect(f"{key}: trials that are no episodes", dict(trials - there), {})
        if len(live) < len(done):
            return  # some have left the store, and with them the starts of their trials
        starts, wins, returns = zip(*said["trials"], strict=True)
        counted = [len(starts), len(set(starts)), sum(map(bool, wins)), round(sum(returns) / count, 6)]
        wanted = [count, said["distinct_starts"], round((said["success"] or 0) * count), round(said["return_mean"], 6)]
        self._expect(f"{key}: episodes, starts, successes, mean return", wanted, counted)
        path = self.run_dir / f"weights/{sha256}.safetensors"
        if sha256 and (not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256):
            self.violations.append(f"the evaluated weights {sha256[:8]} are not those of the published file")

    def _trial(self, episode: Mapping[str, Any]) -> tuple[str, bool, float]:
        """(hash of its first observation, whether it succeeded without help, its return)."""
        steps, store = self._found.steps[episode["number"]], self.run_dir / "store"
        slots = oracle.slots(self._found.sources[episode["source"]]["capacity"])
        columns = oracle.rows(store / episode["source"] / "rows", self._found.spec, slots)
        first = [columns[name][int(steps[0].record["row"]) % slots] for name in self._found.spec["observation"]]
        won = episode["success"] == 1 and not episode["discard"] and not episode["intervened"]
        start = xxhash.xxh3_64_hexdigest(b"".join(array.tobytes() for array in first))
        return start, won, episode["reward"]
