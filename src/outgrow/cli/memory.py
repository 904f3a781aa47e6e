"""The resident set of this process, read from Linux's /proc: what `rss_peak_bytes` is measured with."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER_MARK = "5"  # proc(5), since Linux 4.0


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return _status_bytes("VmRSS")


def settle() -> None:
    """Give back what earlier work freed, so that it does not count as memory that was there before."""
    gc.collect()
    # A C library may lack it: then the baseline is a little high.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class PeakMeter:
    """The highest resident set from `start()` on.

    The kernel's own high-water mark where it can be reset; else the highest of the samples, of which
    `sample()` takes one, so that short peaks between them go unseen.
    """

    def __init__(self) -> None:
        self._started = False
        self._exact = False
        self._highest = 0

    def start(self) -> None:
        """Forget all that was before."""
        self._started = True
        self._highest = resident_bytes()
        try:
            _CLEAR_REFS.write_text(_RESET_HIGH_WATER_MARK)
        except OSError:
            self._exact = False
        else:
            self._exact = True

    def sample(self) -> None:
        """Look at the resident set now; needed where the mark cannot be reset."""
        if self._started:
            self._highest = max(self._highest, resident_bytes())

    @property
    def peak_bytes(self) -> int | None:
        """The highest resident set in bytes, None if `start()` was never called."""
        if not self._started:
            return None
        return max(self._highest, _status_bytes("VmHWM")) if self._exact else self._highest


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # written as "1234 kB", and meant in KiB
    raise OSError(f"{_STATUS} has no {field}")
