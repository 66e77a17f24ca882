"""The errors that the command line turns into one line each."""


class BenchError(Exception):
    """Bad input; the message is what the user reads."""


class Unavailable(Exception):
    """A peer that can't take part: its package is missing, or it does not support the model."""
