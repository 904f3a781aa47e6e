"""Files that appear whole or not at all, and a check beforehand that they can. All writers of reports use it."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from outgrow.errors import ReportError


def check_writable(path: str | Path) -> None:
    """Fail before any work is done for a file that could not be written in the end; leaves nothing behind.

    Raises:
        ReportError: there is no such folder, it cannot be written to, or the path is a folder.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        return  # a device or a pipe takes what it is given
    beside, descriptor = _open_beside(path, target)
    os.close(descriptor)
    beside.unlink()


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file by way of another one beside it, so that nobody ever reads half of it.

    Raises:
        ReportError: it cannot be written; what was there before still is.
    """
    target = _target(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
    except OSError as error:
        raise _cannot(path, error) from error
    beside, descriptor = _open_beside(path, target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise _cannot(path, error) from error
        raise


def _target(path: str | Path) -> Path:
    """Where a path leads: a link stays a link."""
    try:
        target = Path(path).expanduser().resolve()
        is_folder = target.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no such user, a name with a zero byte
        raise ReportError(f"{path} cannot be written: {error}") from error
    if is_folder:
        raise ReportError(f"{path} cannot be written: it is a folder; name a file in it")
    return target


def _open_beside(path: str | Path, target: Path) -> tuple[Path, int]:
    """A new file in the same folder, with the rights that any new file of this user gets."""
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}")
    try:
        return beside, os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise _cannot(path, error) from error


def _cannot(path: str | Path, error: OSError) -> ReportError:
    folder = Path(path).expanduser().parent
    is_missing = isinstance(error, FileNotFoundError) and not folder.exists()
    reason = f"there is no folder {folder}" if is_missing else error.strerror or str(error)
    return ReportError(f"{path} cannot be written: {reason}")
