"""The errors that a user of specdraft can cause. No torch here: the command line raises them before it imports torch."""

from __future__ import annotations


class SpecDraftError(ValueError):
    """Base of every error that is the user's to mend.

    The message has one line of the form ``<config key>: <what is wrong>, got <value>; <what to do>``.
    The command line prints it without a traceback and exits with 2.
    """


class ConfigError(SpecDraftError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class DataError(SpecDraftError):
    """A data file, row, chat template or prepared data set cannot be used."""


class CheckpointError(SpecDraftError):
    """A head or training checkpoint is missing, torn, or belongs to another target or run."""


class ExportError(SpecDraftError):
    """A head cannot be written in, or read from, the format asked for."""


class UnsupportedTargetError(SpecDraftError):
    """The target has a property that specdraft cannot decode or train with correctly."""


class DecodeError(SpecDraftError):
    """A generation cannot go on: target or head gave numbers that are none."""
