"""Where a run says what it does."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Display(Protocol):
    """Where a run says what it does (the command line draws it; a library caller may pass nothing)."""

    def say(self, text: str) -> None: ...

    def progress(self, step: int, total: int, figures: dict[str, float]) -> None: ...

    def evaluated(self, done: int, total: int) -> None: ...


class Silent:
    """A display that shows nothing."""

    def say(self, text: str) -> None:
        pass

    def progress(self, step: int, total: int, figures: dict[str, float]) -> None:
        pass

    def evaluated(self, done: int, total: int) -> None:
        pass
