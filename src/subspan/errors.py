"""Errors a caller could handle. Wrong arguments raise ``ValueError`` or ``TypeError`` instead."""


class SubspanError(Exception):
    """Base of every error below: one clear sentence that says what is wrong and what to do."""


class MissingAsset(SubspanError):
    """A packaged model or data set is not installed."""


class MissingExtra(SubspanError):
    """An optional dependency (for example the ``tune`` extra) is not installed."""


class DataError(SubspanError):
    """A data file or column is missing, empty or malformed."""


class ConfigError(SubspanError):
    """A configuration holds unknown keys or a combination that cannot work."""


class TargetError(SubspanError):
    """Target modules match nothing, or a matched module cannot be adapted."""


class BaseMismatch(SubspanError):
    """An adapter, or statistics, belong to another base model than the one given."""


class NonFinite(SubspanError):
    """A loss, gradient or statistic became NaN or infinite."""


class PrivacyError(SubspanError):
    """A privacy guarantee cannot be given as asked."""


class SafetyError(SubspanError):
    """What keeps a model aligned would be broken: a buffer that trains, that changed, or that would be published."""


class FunctionChanged(SubspanError):
    """A network that was to compute the same as another does not."""


def first_line(error: Exception) -> str:
    """What another library's error says, without the pages some add."""
    return str(error).strip().split("\n")[0]
