"""What the robots that this process simulates have in common."""


class Simulated:
    """Is the base of a Robot that is simulated here: it is home at once, and stands still between two commands."""

    is_home = is_simulated = True

    def stop(self) -> None:
        """Do nothing: time stands still."""

    def recover(self) -> None:
        """Do nothing: it has no faults."""

    def close(self) -> None:
        """Do nothing: it holds nothing."""
