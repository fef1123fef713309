"""A plan with every kind of phase, edits of it, and states that stand in it."""

import json
from copy import deepcopy

import yaml

from serl_launcher.training.plan import Plan
from serl_launcher.training.plan_reader import load_plan
from serl_launcher.training.plan_state import PhaseCounts, PlanState, Progress, SourceCounts

METHODS = {"update", "update_critic"}
PLAN = yaml.safe_load("""
sources:
  demo: {capacity: 500}
  online: {capacity: 2000}
  success: {of: [online, demo], keep: [successful], min_length: 3, split: train}
phases:
  demonstrate:
    actors: {mode: teleop, into: demo}
    until: [demo.episodes >= 20, operator]
    on_end: [fit_normalizer: demo]
  clone:
    actors: {mode: idle}
    updates: [update]
    data: {demo: 1.0}
    until: [updates >= 4]
    on_end: [checkpoint, publish]
  practise:
    actors: {mode: collect, into: online}
    updates: [update_critic, update]
    data: {success: 3, demo: 1}
    start_when: online.steps >= 10
    pace: {updates_per_step: 2, tolerance: 8}
    publish: {every_updates: 3}
    until: ["unassisted_success[4] >= 0.75 and success[5] >= 0.6", env_steps >= 1000, wall_s >= 3600]
    on_end: [checkpoint]
  evaluate: {actors: {mode: evaluate}, until: [episodes >= 50]}
""")


def edited(path: str, value: object) -> dict:
    """PLAN with the value at a dotted path replaced or, for None, removed."""
    plan = deepcopy(PLAN)
    *parents, key = path.split(".")
    node = plan
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[key]
    else:
        node[key] = value
    return plan


def load(mapping: dict = PLAN, has_operator: bool = True) -> Plan:
    return load_plan(mapping, methods=METHODS, has_operator=has_operator)


def practise(
    steps: int = 0, episodes: int = 0, recent: tuple = (), online: int = 0, wall_s: float = 0.0, phase: str = "practise"
) -> Progress:
    counts = PhaseCounts(env_steps=steps, episodes=episodes, recent=recent)
    return Progress({phase: counts}, {"online": SourceCounts(online, episodes)}, wall_s)


def at(phase: str, progress: Progress | None = None, mapping: dict = PLAN) -> PlanState:
    """A state that stands at the beginning of `phase`."""
    state = PlanState(load(mapping))
    state.command("goto", phase)
    state.advance(progress or Progress())
    return state


ROUNDS = {"phases": ["practise", "evaluate"], "times": 3, "until": "success[2] >= 1"}


def won(*phases: str, steps: int = 0, successes: int = 50, online: int = 1000) -> Progress:
    """Steps of practice in these phases, and 50 episodes in those that evaluate, the last of which succeed."""
    recent = ((False, False),) * (50 - successes) + ((True, False),) * successes
    counts = {name: PhaseCounts(env_steps=steps) for name in phases if "evaluate" not in name}
    counts |= {name: PhaseCounts(episodes=50, recent=recent) for name in phases if name not in counts}
    return Progress(counts, {"online": SourceCounts(online, 9)})


def resumed(state, mapping=PLAN, progress=None):
    """Another life with this plan that goes on from the state's checkpoint."""
    made = PlanState(load(mapping))
    made.load_state_dict(json.loads(json.dumps(state.state_dict())), progress=progress)
    return made


def train(state, progress):
    """The updates that are due before the state waits for something."""
    names = []
    while (name := state.next_update(progress)) is not None:
        state.did_update(name)
        names.append(name)
    return names
