"""Errors that a user can cause."""


class UserError(ValueError):
    """A wrong argument, file or field, with a message that says what to do; the command line exits 2 on it."""
