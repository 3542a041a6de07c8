"""An error that the user of the command can correct."""


class Mistake(Exception):
    """Something the user can correct, in words of one line."""
