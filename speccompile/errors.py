"""Errors that a user can act on.

Every message names the file or flag, the field or tensor, and the remedy.  The command line turns
them into one line on standard error and exit code 2; anything else is a bug and keeps its traceback.
"""


class SpeccompileError(Exception):
    """Base class of every error caused by input, environment or configuration."""


class CheckpointError(SpeccompileError):
    """A model or head file is missing, damaged, unsupported or inconsistent."""


class PairError(CheckpointError):
    """A head does not belong to the target it was given with."""


class ConfigError(SpeccompileError):
    """A flag, YAML key or request field has a wrong name or value."""


class EngineError(SpeccompileError):
    """An engine directory cannot be loaded on this machine or by this version."""


class BuildError(SpeccompileError):
    """Compilation or packaging failed."""


class RequestError(SpeccompileError):
    """A generation request is refused; the message names the field."""
