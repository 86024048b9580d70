"""The errors that a user can cause, and the exit codes that every command shares. Not here: broken invariants
(assert)."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a megappo command returns to the shell."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    DOES_NOT_FIT = 3
    STOPPED_AFTER_SAVING = 75


class UserError(Exception):
    """A mistake that the user can repair; shown as one message without a traceback, exit code 2."""


class ConfigError(UserError):
    """A configuration that can't be: the message holds the YAML path, the value, why not, and a value that can be."""


class DataError(UserError):
    """Input files that can't be used: the message holds the file, the line where there is one, and the way out."""


class RewardError(UserError):
    """A reward function that can't be imported or called as written in the configuration."""


class WeightSwitchError(Exception):
    """The generation engine does not compute what the trainer computes with the weights that it was given: nothing that
    it samples can be learned from."""
