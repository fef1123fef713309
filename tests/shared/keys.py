"""Keys for tests, made by the tool that operators use."""

from tools import keys as tool

PEOPLE = {"left": "actor", "right": "actor", "boss": "operator", "eye": "viewer"}  # name -> role


def do(what, folder, name=None, role=None):
    """Run a command of tools/keys.py; what it says."""
    with tool.locked(folder, what in ("make", "page")):
        return tool.act(what, folder, name, role)


def make(folder):
    """A folder with a key for everybody in PEOPLE."""
    for name, role in PEOPLE.items():
        do("make", folder, name, role)
    return folder
