"""Runs the example in a class's docstring, as a reader would paste it."""

import inspect
import textwrap


def run_example(made, given, **replaced):
    """Run the example with these names `given`, and return all names that there are at its end.

    replaced: {name: (what the example says, what stands there in this test)}.
    """
    parts = inspect.getdoc(made).split("\n\n")
    example = textwrap.dedent("\n\n".join(part for part in parts if part.startswith("    ")))
    for written, here in replaced.values():
        assert written in example
        example = example.replace(written, here)
    names = dict(given)
    exec(example, names)
    return names
