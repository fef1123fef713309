"""Which ports a page may have: a browser refuses some, whoever listens there."""

from serl_client.errors import ConfigError

BAD = frozenset((  # above 1023: "bad port" of the Fetch standard, section 2.9
    1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, *range(6665, 6670), 6679, 6697, 10080,
))  # fmt: skip


def check_port(port: int) -> None:
    """Raise ConfigError for a port that no browser opens."""
    if port in BAD:
        raise ConfigError(f"page={port}: browsers open nothing on this port. Choose another, such as page=8088")
