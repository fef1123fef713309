"""The walls of the house: who may import whom, what is unsafe, and what needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "packages/serl_client/src/serl_client"
FILES = sorted([*CLIENT.rglob("*.py"), *(ROOT / "robot_infra").rglob("*.py"), *(ROOT / "serl_launcher").rglob("*.py")])
ORDER = {"types": 0, "networks": 1, "policies": 2, "algorithms": 3}
FORBIDDEN = {  # folder: what it never imports
    "serl_client": ("robot_infra", "serl_launcher", "torch", "examples", "tools", "tests"),
    "robot_infra": ("serl_launcher", "torch", "examples", "tools", "tests"),
    "serl_launcher": ("robot_infra", "examples", "tools", "tests"),
    "serl_launcher.algorithms": ("serl_launcher.service", "serl_launcher.data", "wandb"),
    "serl_launcher.data": ("serl_launcher.service", "serl_launcher.algorithms", "serl_launcher.policies"),
}
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def module(path):
    base = CLIENT.parent if path.is_relative_to(CLIENT) else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts)


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_module_imports_only_from_the_rooms_below_it(path):
    name, found = module(path), set(imports(ast.parse(path.read_text())))
    for folder, forbidden in FORBIDDEN.items():
        if name == folder or name.startswith(folder + "."):
            bad = {i for i in found for f in forbidden if i == f or i.startswith(f + ".")}
            assert not bad, f"{name} imports {bad}"
    parts = name.split(".")
    if parts[0] == "serl_launcher" and parts[1:2] and parts[1] in ORDER:
        above = {
            i for i in found if i.startswith("serl_launcher.") and ORDER.get(i.split(".")[1], -1) > ORDER[parts[1]]
        }
        assert not above, f"{name} imports {above} from above"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_nothing_unsafe_is_imported_or_called(path):
    tree = ast.parse(path.read_text())
    assert not UNSAFE & {name.split(".")[0] for name in imports(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert called not in ("eval", "exec", "__import__"), f"{module(path)} calls {called}"
        if called in ("torch.load", "load") and "torch" in called:
            assert keywords.get("weights_only") == "True"
        if called.startswith("np.") or called.startswith("numpy."):
            assert keywords.get("allow_pickle", "False") == "False"


@pytest.mark.parametrize(
    "name", ["serl_client", "serl_client.runner", "robot_infra.env", "robot_infra.robots.fake",
             "serl_launcher.service.launcher", "serl_launcher.service.server", "serl_launcher.service.plan",
             "serl_launcher.data.store"],
)  # fmt: skip
def test_what_runs_on_a_robot_pc_or_serves_data_needs_no_torch(name):
    code = f"import sys, {name}; sys.exit(sorted({{'torch', 'mujoco', 'gymnasium', 'cv2'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_broad_except_swallows_in_silence():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                assert not (broad and silent), f"{module(path)}:{node.lineno}"
