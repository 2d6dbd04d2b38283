"""Losses that live elsewhere: another process, or an HTTP endpoint. Numbers go out and losses come back as JSON.

A row is one sample's outputs and its target. Requests hold at most ``rows`` rows, also of several perturbations:
``{"outputs": [[...], ...], "targets": [...]}`` is answered by ``{"losses": [...]}``, one number a row. With
``per="batch"`` a request is one whole batch, and its answer holds one number. ``null`` stands for NaN.
"""

import http.client
import json
import math
import os
import signal
import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.errors import SubspanError


class BlackBox(ABC):
    """What both share: rows into requests, answers into losses. Use it as the loss of ``OutputSpaceLoss``."""

    vectorized = True

    def __init__(self, name: str, timeout: float, rows: int, per: Literal["row", "batch"]) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        if per not in ("row", "batch"):
            raise ValueError(f"per must be 'row' or 'batch', got {per!r}")
        self.name, self.timeout, self.rows, self.per = name, timeout, rows, per

    def __call__(self, output: Float[Tensor, "n B *event"], target: Tensor | None = None) -> Float[Tensor, "n *B"]:
        """Losses (n x B), or (n) with ``per="batch"``, as float64."""
        n, size = output.shape[:2]
        targets: list[Any] | None = None if target is None else target.tolist()
        if self.per == "batch":
            found = [self._losses(batch, targets, 1) for batch in output.tolist()]
            return torch.tensor(found, dtype=torch.float64).view(n)
        rows = output.flatten(0, 1).tolist()
        labels = None if targets is None else targets * n
        found = []
        for at in range(0, len(rows), self.rows):
            part = rows[at : at + self.rows]
            found += self._losses(part, None if labels is None else labels[at : at + self.rows], len(part))
        return torch.tensor(found, dtype=torch.float64).view(n, size)

    def _losses(self, outputs: list[Any], targets: list[Any] | None, count: int) -> list[float]:
        request = {"outputs": outputs} | ({} if targets is None else {"targets": targets})
        text = self._exchange(json.dumps(request))
        try:
            losses = json.loads(text)["losses"]
            values = [math.nan if x is None else float(x) for x in losses]
        except (ValueError, TypeError, KeyError):
            raise SubspanError(f'{self.name} answered {text[:80]!r} instead of {{"losses": [...]}}') from None
        if len(values) != count:
            raise SubspanError(f"{self.name} answered {len(values)} losses for {count} asked")
        return values

    @abstractmethod
    def _exchange(self, request: str) -> str:
        """One request, one answer; ``SubspanError`` when it fails or is late."""


class SubprocessLoss(BlackBox):
    """A program that reads one JSON request a line on its standard input and answers on its standard output.

    It is started at the first request and kept; after a time-out or an exit the next request starts another. Close it
    with ``close()`` or as a context manager.

    Args:
        command: the program and its arguments.
        timeout: seconds an answer may take; then the program is killed.
        rows: most rows of a request.
        per: "row", a loss for each sample, or "batch", one for all of them (with ``credit="batch"``).

    Raises:
        SubspanError: the program cannot be started, exits, is late, or answers something else.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout: float = 60.0,
        rows: int = 4096,
        per: Literal["row", "batch"] = "row",
    ) -> None:
        super().__init__(f"the program {command[0]!r}", timeout, rows, per)
        self.command = list(command)
        self._process: subprocess.Popen[str] | None = None
        # Writing may block as well as reading: both happen aside, where a deadline can leave them behind.
        self._aside = ThreadPoolExecutor(1)

    def _exchange(self, request: str) -> str:
        process = self._running()
        answer = self._aside.submit(_ask, process, request)
        try:
            line = answer.result(self.timeout)
        except Late:
            self._stop()
            raise SubspanError(f"{self.name} did not answer within {self.timeout:g} seconds") from None
        except (OSError, ValueError):
            line = ""
        if not line:
            self._stop()
            raise SubspanError(f"{self.name} ended with exit status {process.returncode} instead of an answer")
        return line

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    bufsize=1,
                    start_new_session=True,  # a group of its own, which can be killed with all that it started
                )
            except OSError as error:
                raise SubspanError(f"{self.name} does not start: {error.strerror or error}") from None
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(0.2)  # one that is ending by itself has an exit status to tell
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """End the program by closing its input, or by force."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._stop()

    def __enter__(self) -> "SubprocessLoss":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._aside.shutdown(wait=False)


def _ask(process: "subprocess.Popen[str]", request: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request + "\n")
    process.stdin.flush()
    return process.stdout.readline()


class HttpLoss(BlackBox):
    """An endpoint that answers POST requests of JSON with JSON.

    Args:
        url: http:// or https://.
        timeout: seconds for each request.
        rows: most rows of a request.
        per: "row", a loss for each sample, or "batch", one for all of them (with ``credit="batch"``).
        headers: more headers, for example a key.

    Raises:
        SubspanError: the endpoint cannot be reached, is late, refuses, or answers something else.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        rows: int = 4096,
        per: Literal["row", "batch"] = "row",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {url!r}")
        super().__init__(url, timeout, rows, per)
        self.headers = {"Content-Type": "application/json", **(headers or {})}

    def _exchange(self, request: str) -> str:
        asked = urllib.request.Request(self.name, request.encode(), self.headers)
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout) as answer:
                return answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise SubspanError(f"{self.name} refused with status {error.code} ({error.reason})") from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise SubspanError(f"{self.name} did not answer within {self.timeout:g} seconds") from None
            raise SubspanError(f"{self.name} cannot be reached: {reason}") from None
