"""The most memory a stretch of a run holds."""

from pathlib import Path

import torch


class PeakMemory:
    """High-water mark since ``reset``: of the accelerator's allocator, or of the whole process on Linux."""

    def reset(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif (marks := Path("/proc/self/clear_refs")).exists():
            marks.write_text("5", encoding="ascii")

    def mebibytes(self) -> float | None:
        """None where the system does not say."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 2**20
        status = Path("/proc/self/status")
        if not status.exists():
            return None
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
