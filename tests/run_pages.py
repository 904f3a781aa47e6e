"""Runs the shell commands of README and docs as they are written, as a new user would: `make docs-run`.

In an empty folder: a home without a cache, a copy of the source, and an environment of Python's own in which the
pages' `pip install .` puts Outgrow. Libraries that this Python has are found there, so that none is fetched twice.
Takes an hour or more, some 13 GiB of memory and a package registry; `--only`, `--but` and `--longest` take less.

Left out by default: see LEFT_OUT. A command that stands on several pages runs once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from pages import PAGES, ROOT, commands, write_files

# The beginning of a command, and why it is not run.
LEFT_OUT = {
    "make test": "the test suite",
    "outgrow train vgg-16 --device cuda": "needs a GPU",
    "python benchmarks/": "hours of measuring: --help is asked for instead",
}


@dataclass(frozen=True)
class Ran:
    """What became of a command; `code` is None where its time ran out."""

    command: str
    code: int | None
    seconds: float


def main() -> int:
    """Run them; the exit code is 1 if one failed."""
    given = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="outgrow-pages-"))
    print(f"in {folder}", flush=True)
    source = folder / "source"
    _copy_source(source)
    environment = _new_user(folder)
    done: dict[str, Ran] = {}
    for page in PAGES:
        write_files(page, source)
        for words in commands(page):
            command = shlex.join(words)
            reason = next((why for start, why in LEFT_OUT.items() if command.startswith(start)), None)
            if reason is not None and words[0] == "python":
                command = shlex.join([*words[:2], "--help"])
            elif reason is not None:
                print(f"left out: {command}: {reason}", flush=True)
                continue
            if command in done or not _is_wanted(command, given):
                continue
            log = folder / f"{len(done):02}.log"
            done[command] = _run(command, source, environment, given.longest, log)
            print(f"{_said(done[command])}  {page.name}: {command}", flush=True)
            if done[command].code != 0:
                print(*log.read_text().splitlines()[-15:], sep="\n", flush=True)
    failed = [ran for ran in done.values() if ran.code != 0]
    print(f"{len(done)} ran, {len(failed)} failed", flush=True)
    if not failed and not given.keep:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="only commands with this in them")
    parser.add_argument("--but", action="append", default=[], help="no commands with this in them")
    parser.add_argument("--longest", type=float, help="end a command after so many seconds")
    parser.add_argument("--keep", action="store_true", help="keep the folder; it stays anyway if a command failed")
    return parser.parse_args()


def _is_wanted(command: str, given: argparse.Namespace) -> bool:
    return all(word in command for word in given.only) and not any(word in command for word in given.but)


def _copy_source(target: Path) -> None:
    """What git knows of, as it is in the folder now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _new_user(folder: Path) -> dict[str, str]:
    """An environment with a home and a Python of its own, which knows the libraries of this one."""
    venv.create(folder / "venv", with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "venv" / "lib" / version / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "home").mkdir()
    unknown = {"XDG_CACHE_HOME", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    kept = {name: value for name, value in os.environ.items() if name not in unknown}
    return kept | {"HOME": str(folder / "home"), "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}"}


def _run(command: str, folder: Path, environment: dict[str, str], longest: float | None, log: Path) -> Ran:
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(longest)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            process.wait()
            code = None
    return Ran(command, code, time.perf_counter() - began)


def _said(ran: Ran) -> str:
    verdict = {0: "ok", None: "TIME"}.get(ran.code, f"EXIT {ran.code}")
    return f"{verdict:8} {ran.seconds:6.1f} s"


if __name__ == "__main__":
    sys.exit(main())
