"""Says what a name may be that a client gives, and cleans its texts before a log or a terminal shows them."""

MAX_NAME = 200  # characters of a name of an actor, an episode, a task, a phase, a feature, a command


def is_name(name: object) -> bool:
    """Return whether this is a text of at most MAX_NAME characters that a terminal only shows. It may be empty."""
    return isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable()


def check_names(what: str, *names: object, error: type[Exception] = ValueError) -> None:
    """Raise `error` unless each of these is a name. what: the thing that has them, such as `an outcome`."""
    if wrong := [name for name in names if not is_name(name)]:
        raise error(f"the names of {what} have at most {MAX_NAME} characters, all of them printable: {wrong[0]!r:.300}")


def cleaned(text: str, keep: str = "") -> str:
    """Return the text without control characters, but for those in `keep`: an escape sequence could write anything."""
    if text.isprintable():
        return text
    shown = (letter if letter.isprintable() or letter in keep else " " if letter.isspace() else "?" for letter in text)
    return "".join(shown)
