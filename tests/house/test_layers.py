"""The walls of the house: who may import whom, what is unsafe, and what needs no torch."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import sitecustomize  # tests/watch

from tests.shared.common import CONFIG, ROOT
from tools.map import CLIENT, FILES, PAGE, SETTINGS, TOOLS, arrows, imports, module, page, parsed, sentence

NETWORKS, POLICIES, ALGORITHMS = MODELS = tuple(
    f"serl_launcher.{name}" for name in ("networks", "policies", "algorithms")
)


def rooms(*names):
    return tuple(f"serl_launcher.{name}" for name in names)


MODELS_NEVER = (*rooms("store", "service", "replay", "datasets", "training", "acting", "launcher"), "wandb")
NO_TORCH = ("torch", *rooms("replay", "datasets", "training", "acting", "optim", "types"), *MODELS)
FORBIDDEN = {  # folder: what it never imports
    "serl_client": ("robot_infra", "serl_launcher", "torch", "examples", "tools", "tests"),
    "robot_infra": ("serl_launcher", "torch", "examples", "tools", "tests"),
    "robot_infra.guard": ("robot_infra.tasks", "robot_infra.sim"),
    "robot_infra.drivers": ("robot_infra.guard", "robot_infra.tasks", "robot_infra.sim"),
    "robot_infra.sim": ("robot_infra.tasks", "robot_infra.guard"),
    "serl_launcher": ("robot_infra", "examples", "tools", "tests"),
    "serl_launcher.types": MODELS,
    NETWORKS: (*MODELS_NEVER, POLICIES, ALGORITHMS),
    POLICIES: (*MODELS_NEVER, ALGORITHMS),
    ALGORITHMS: MODELS_NEVER,
    "serl_launcher.store": (*NO_TORCH, "serl_launcher.service"),
    "serl_launcher.service": NO_TORCH,
    "serl_launcher.replay": (*rooms("service", "optim", "datasets", "training", "acting"), *MODELS),
    "serl_launcher.datasets": ("torch", *rooms("training", "acting", "types"), *MODELS),
    "serl_launcher.training": rooms("datasets", "acting", "report"),
    "serl_launcher.report": ("torch", *rooms("service", "acting", "optim", "types"), *MODELS),
    "serl_launcher.acting": rooms("replay", "datasets"),
    "serl_launcher.page": ("torch", *rooms("datasets", "acting", "optim", "types", "launcher"), *MODELS),
    "serl_launcher.config": (*NO_TORCH, *rooms("store", "service")),
    "serl_launcher.optim": (*rooms("store", "service", "replay", "datasets", "training", "acting"), *MODELS),
    "serl_launcher.service.link": ("serl_launcher.store",),
    "serl_launcher.supervisor": (*NO_TORCH, "serl_launcher.store"),
}
PLAN = rooms("training.plan", "training.plan_reader")  # all that datasets take of it
UNSAFE = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib", "runpy"}
UNPICKLES = "serl_launcher.acting.lerobot_server"  # lerobot's protocol is pickle: it is read by four names alone
CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "numpy.fromfile", "pty.spawn"}
SAFE_YAML = {"SafeLoader", "yaml.SafeLoader", "CSafeLoader", "yaml.CSafeLoader"}
IMPORTS = {
    "import_module", "importlib.import_module", "importlib.util.spec_from_file_location", "pydoc.locate",
    "pkgutil.resolve_name",
}  # fmt: skip
DRIVER = "robot_infra.drivers.owner", "pkgutil.resolve_name(driver)"  # from a yaml, as Hydra's _target_ is
WIRED = (  # what handles messages of others: it looks up no attribute whose name is no constant
    "serl_client", "serl_launcher.store", "serl_launcher.service", "serl_launcher.acting.host",
    "serl_launcher.acting.local", "serl_launcher.acting.server", "serl_launcher.acting.bridge",
    "serl_launcher.acting.openpi", "serl_launcher.page",
)  # fmt: skip
NAMED = {  # but for these, whose names are those of our own fields
    ("serl_client.messages", "getattr(message, name)"), ("serl_client.messages", "getattr(record, name)"),
    ("serl_client.spec", "getattr(self, bound)"), ("serl_client.spec", "getattr(self, name)"),
    ("serl_client.episode", "getattr(self, name)"), ("serl_client.episode", "getattr(segment, name)"),
    ("serl_client.episode", "getattr(s, name)"), ("serl_client.episode", "getattr(first, name)"),
    ("serl_launcher.store.index", "getattr(thing, name)"),
    ("serl_launcher.acting.host", "getattr(self.acting, graph)"),
    ("serl_launcher.acting.host",
     "setattr(self.acting, graph, Graphs(getattr(self.acting, graph), recorder))"),
}  # fmt: skip


EVERYWHERE = sorted(
    path
    for folder in ("packages", "robot_infra", "serl_launcher", "examples", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if ".venv" not in path.parts  # of examples/robomimic
)
FILE_LINES, FUNCTION_LINES, SENTENCE_WORDS = 400, 60, 25


def inside(name, folders):
    return any(name == folder or name.startswith(folder + ".") for folder in folders)


@pytest.mark.slow
def test_a_module_imports_only_from_the_rooms_below_it():
    for path in FILES:
        name, found = module(path), set(imports(path))
        for folder, forbidden in FORBIDDEN.items():
            if inside(name, [folder]):
                bad = {each for each in found if inside(each, forbidden)}
                bad -= {each for each in bad if folder == "serl_launcher.datasets" and inside(each, PLAN)}
                assert not bad, f"{name} imports {bad}"


def unsafe(path, tree=None):
    """What in a module contract.md, section 5, forbids."""
    tree = tree or parsed(path)
    for found in imports(path, tree):
        may = module(path) == UNPICKLES and found == "pickle"
        if (found.split(".")[0] in UNSAFE and not may) or found in CODE | {"torch.load", "yaml.load", "numpy.load"}:
            yield f"imports {found}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (reason := _unsafe_call(module(path), node)):
            yield f"{node.lineno}: {reason}"


def _unsafe_call(name, node):
    called, text = ast.unparse(node.func).replace("np.", "numpy."), ast.unparse(node)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    given = {*keywords.values(), *(ast.unparse(argument) for argument in node.args)}
    last = called.rpartition(".")[2]
    bad = (
        called in CODE or keywords.get("shell", "False") != "False" or keywords.get("allow_pickle", "False") != "False"
    )
    bad |= called == "torch.load" and keywords.get("weights_only") != "True"
    bad |= called.startswith("yaml.") and (
        last in ("unsafe_load", "full_load") or (last == "load" and not SAFE_YAML & given)
    )
    bad |= called.startswith(("subprocess.getoutput", "subprocess.getstatusoutput", "os.spawn", "os.exec"))
    if last in ("getattr", "setattr", "attrgetter", "methodcaller") and name.startswith(WIRED):
        which = node.args[0 if last.endswith(("getter", "caller")) else 1]
        bad |= not isinstance(which, ast.Constant) and (name, text) not in NAMED
    if called in IMPORTS:  # f"mujoco.{backend}": what comes before the dot is ours
        first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
        bad |= (not isinstance(first, ast.Constant) and (name, text) != DRIVER) or name.startswith(WIRED)
    return text if bad else ""


@pytest.mark.slow
def test_nothing_unsafe_is_imported_or_called():
    assert not [(module(path), reason) for path in FILES for reason in unsafe(path)]


def test_pickle_is_read_only_where_it_may_name_what_is_listed_and_nothing_else():
    """It breaks a word of contract.md, section 5, "never: pickle", for a protocol of others that knows nothing else."""
    (path,) = [path for path in FILES if module(path) == UNPICKLES]
    tree = parsed(path)
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {each for each in used if each.startswith("pickle.")} == {"pickle.dumps", "pickle.Unpickler"}
    (reader,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and "Unpickler" in ast.unparse(node)]
    (finds,) = [part for part in reader.body if isinstance(part, ast.FunctionDef) and part.name == "find_class"]
    assert "super" not in ast.unparse(finds)


PLANTED = """
import os, pickle, sqlite3, subprocess, sys, zipfile
from serl_client import messages, wire
elsewhere, here = sys.argv[1:]
PLANTED = {
    "pickle.find_class": lambda: pickle.loads(pickle.dumps(zipfile.ZipFile)),
    "compile": lambda: eval("1 + 1"),
    "exec": lambda: exec(compiled),
    "subprocess.Popen": lambda: subprocess.run(["true"]),
    "os.system": lambda: os.system("true"),
    "open": lambda: open(elsewhere, "w"),
    "os.mkdir": lambda: os.mkdir(elsewhere),
    "os.rename": lambda: os.rename(__file__, elsewhere),
    "sqlite3.connect": lambda: sqlite3.connect(elsewhere),
    "allowed: a file": lambda: open(here, "w").close(),
    "allowed: a module": lambda: __import__("colorsys"),
}
compiled = compile("1 + 1", "", "exec")
class Frames(list):
    def __getitem__(self, i):
        PLANTED[name]()
        return super().__getitem__(i)
for name in PLANTED:
    try:
        wire.unpack(Frames(messages.encode(messages.Bye())))
    except RuntimeError:
        print(name)
"""


def test_the_watch_stops_and_records_what_a_message_must_not_set_off_and_nothing_else(taken_violations, tmp_path):
    (tmp_path / "program.py").write_text(PLANTED)
    elsewhere = Path.home() / f".retake-elsewhere-{os.getpid()}"  # a clone may lie in the folder of temporary files
    command = [sys.executable, tmp_path / "program.py", elsewhere, tmp_path / "here"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (elsewhere.exists(), (tmp_path / "here").exists()) == (False, True)
    stopped = done.stdout.split()
    assert (len(stopped), done.returncode) == (9, 0), done.stderr
    assert [line.partition("(")[0] for line in taken_violations()] == stopped


@pytest.mark.parametrize(("file", "name"), sorted(sitecustomize.WATCHED), ids=str)
def test_what_is_watched_is_there(file, name):
    path = CLIENT.parent / file if file.startswith("serl_client") else ROOT / file
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(parsed(path)))


@pytest.mark.slow
def test_no_imports_go_in_a_circle():
    paths = {module(path): path for path in EVERYWHERE}
    graph = {}
    for name, path in paths.items():  # what is no module is a name that the package itself defines
        found = {found if found in paths else found.rpartition(".")[0] for found in imports(path)}
        graph[name] = found & paths.keys() - {name}
    assert len(graph["serl_client.runner"]) > 5
    assert {"tests.faults.actor", "tests.faults.truth"} <= graph["tests.faults.insider"]  # relative ones
    TopologicalSorter(graph).prepare()  # its CycleError names the circle


def test_the_map_says_of_each_file_what_it_does_and_no_rooms_import_in_a_circle():
    assert PAGE.read_text() == page(), "run tools/map.py"
    said = {path: sentence(path) for path in (*FILES, *TOOLS) if path.name != "__init__.py"}
    wrong = [path for path, text in said.items() if not text.endswith((".", "?")) or len(text.split()) > SENTENCE_WORDS]
    assert not wrong, "begin its docstring with a short sentence"
    assert {path.name for path in CONFIG.iterdir()} == SETTINGS.keys()
    TopologicalSorter(arrows()).prepare()


@pytest.mark.slow
def test_no_file_and_no_function_is_too_long():
    long = {str(path.relative_to(ROOT)) for path in EVERYWHERE if len(path.read_text().splitlines()) > FILE_LINES}
    for path in EVERYWHERE:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION_LINES:
                long.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert not long, f"cut {sorted(long)}: a file has at most {FILE_LINES} lines, a function {FUNCTION_LINES}"
