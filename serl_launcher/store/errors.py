"""Says why the store does not take a record, or a group of them."""


class Gap(Exception):
    """A record came whose predecessor is missing; `expected` is the seq to begin again from."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected)
        self.expected = expected


class Full(Exception):
    """A source has no room before the export has brought its oldest episodes into shards; the text says so."""


class GroupFailed(Exception):
    """A group could not be written, and not because of the disk: one of its records has set off a bug."""
