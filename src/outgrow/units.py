"""Bytes as people write and read them: parsing budgets, printing sizes and times."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MOST_BYTES = 2**63
_BUDGET = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, total_bytes: int | None = None) -> int:
    """Turn a budget into bytes.

    Args:
        text: an int of bytes, or a string such as "8GiB", "800MB", "123456" or "60%".
        total_bytes: what a percentage is a share of (the device's memory), in bytes.

    Raises:
        InvalidBudget: for anything else.
    """
    from outgrow.errors import InvalidBudget  # errors print sizes with this module

    if isinstance(text, bool) or not isinstance(text, int | str):
        raise InvalidBudget(f'a budget is an int of bytes or a string such as "8GiB", not {text!r}')
    if isinstance(text, int):
        amount = text
    else:
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise InvalidBudget(f'cannot read the budget {text!r}: write it as "8GiB", "800MB" or "60%"')
        number, unit = float(match[1]), match[2].lower()
        if number > _MOST_BYTES:
            raise InvalidBudget(f"a budget of {text[:40]!r} is more bytes than any machine has")
        if unit == "%":
            if total_bytes is None:
                raise InvalidBudget(f"{text!r} is a share, and there is nothing here that it is a share of")
            if number > 100:
                raise InvalidBudget(f"{text!r} is more than all of the device's memory")
            amount = int(total_bytes * number / 100)
        elif unit == "":
            amount = int(number)
        elif unit in _UNITS:
            amount = int(number * _UNITS[unit])
        else:
            known = ", ".join(("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "%"))
            raise InvalidBudget(f"unknown unit {match[2]!r} in the budget {text!r}: use one of {known}")
    if amount <= 0:
        raise InvalidBudget(f"a budget must be more than 0 bytes, not {text!r}")
    return amount


def format_bytes(size: float) -> str:
    """A size in bytes for people: "1.25 GiB", "37.0 MiB", "512 B"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{2 if abs(size) < 10 else 1}f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """A time in seconds for people: "4.53 s", "12.0 ms", "85 us"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
