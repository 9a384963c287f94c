"""What ends a command with one line instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The user can mend it: the message names the option or argument, and the remedy.

    Args:
        code: the exit code; 2 for a command line that is wrong, 1 for a problem that was found while running.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
