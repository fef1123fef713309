"""How large the tables of a process are: those of its own objects, by their path."""

from collections import deque
from collections.abc import Iterator

OURS = ("serl_client.", "serl_launcher.")
DEPTH, LOOKED_INTO = 6, 200  # how far `tables` follows our own objects, and how many of one table


def tables(root: object, name: str) -> dict[str, int]:
    """{path: entries} of every list, dict, set and deque that belongs to one of our objects; tables of objects of one
    kind are added up."""
    found: dict[str, int] = {}
    seen, front = set(), [(name, root)]
    for _ in range(DEPTH):
        front = [(path, part) for path, part in front if id(part) not in seen and not seen.add(id(part))]
        front = [entry for path, part in front for entry in _parts(path, part, found)]
    return found


def _parts(path: str, thing: object, found: dict[str, int]) -> Iterator[tuple[str, object]]:
    """Our own objects that a thing holds; the sizes of its tables go into `found`."""
    slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
    attributes = dict(getattr(thing, "__dict__", {})) | {slot: getattr(thing, slot, None) for slot in slots}
    for attribute, value in attributes.items():
        place = f"{path}.{attribute}"
        if isinstance(value, dict | list | set | deque):
            found[place] = found.get(place, 0) + len(value)
            held = [*value.values()] if isinstance(value, dict) else [*value]
            yield from ((place, item) for item in held[:LOOKED_INTO] if _is_ours(item))
        elif _is_ours(value):
            yield place, value


def _is_ours(thing: object) -> bool:
    """A message is none: its tables are what it says."""
    module = type(thing).__module__
    return module.startswith(OURS) and module != "serl_client.messages"
