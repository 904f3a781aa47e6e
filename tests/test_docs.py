"""The README and the documentation: what stands in them runs, and what has to stand in them does.

What is checked of code blocks:

- Python: all blocks of a page are executed, in order, in one namespace. What pages take for granted (`model`,
  `optimizer`, `batches`, ...) is `namespace()` below; what one page needs besides stands in it as `<!-- hidden`.
- Shell: each `outgrow` command goes through the parser of the command line; those of `train`, `plan`, `compare` also
  through the checks of network, policy, device and budget that the command makes before it works. `train` and `plan`
  in the quick start and on the page on a user's own file are run as well, with few steps; the others are not run, as
  many take minutes. Of `python FILE` it is checked that the file is there and has the options
  (test_examples.py runs the examples); of `make` that there is the target; of `pip install` that there is the extra.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import outgrow
from outgrow.cli.datasets import DataError
from outgrow.cli.job import OptionError, make_job
from outgrow.cli.main import run
from outgrow.cli.own import OwnFileError, is_own, make_own_job
from outgrow.errors import OutgrowError

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_FOR_REAL = ("quickstart.md", "own-model.md")
LIBRARIES = {"integrations.md": ("pytorch_lightning", "transformers", "accelerate")}

_BLOCK = re.compile(
    r"^```(?P<kind>\w*)\n(?P<code>.*?)^```$|^<!-- hidden\n(?P<hidden>.*?)^-->$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    kind: str
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    if "<!-- figures:" in text:
        text = load_module(ROOT / "docs" / "figures.py").on_page_markdown(text)
    return [
        Block("python", found["hidden"]) if found["hidden"] else Block(found["kind"] or "sh", found["code"])
        for found in _BLOCK.finditer(text)
    ]


def commands(page: Path) -> Iterator[list[str]]:
    """The shell commands of a page, as words."""
    for block in blocks(page):
        if block.kind == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield words


def load_module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def namespace() -> dict[str, Any]:
    """What the pages take for granted: a small model, its optimizer and loss, data, and a step to trace."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
    batches = [(torch.randn(16, 8), torch.randint(0, 2, (16,))) for _ in range(3)]

    def make_step(batch: int = 256) -> outgrow.TrainingStep:
        made = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        data = torch.randn(batch, 64)

        def step() -> None:
            made(data).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return outgrow.TrainingStep(made, optimizer, step)

    return {
        "__name__": "documentation",
        "outgrow": outgrow,
        "torch": torch,
        "nn": nn,
        "F": F,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "batches": batches,
        "x": batches[0][0],
        "y": batches[0][1],
        "loader": DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,))), 8),
        "make_step": make_step,
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    assert {block.kind for block in blocks(page)} <= {"python", "sh", "text"}
    if "```" in page.read_text():
        assert blocks(page)


@pytest.mark.filterwarnings("ignore")  # other libraries' advice
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in LIBRARIES.get(page.name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    names = namespace()
    for block in blocks(page):
        if block.kind == "python":
            exec(compile(block.code, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_outgrow_commands_pass_the_checks_of_the_command_line(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside_the_page(page, tmp_path, monkeypatch)
    taken: list[tuple[Any, ...]] = []
    for name in ("train", "plan", "compare", "networks", "doctor", "limits", "paper", "tune", "report"):
        monkeypatch.setattr(f"outgrow.cli.{name}.{name}", lambda *given, name=name: taken.append((name, *given)))
    for program, *arguments in commands(page):
        if program != "outgrow" or "--version" in arguments:
            continue
        assert run(arguments) == 0, arguments
        name, *given = taken.pop()
        assert name == arguments[0]
        if name in ("train", "plan", "compare"):
            memory = None
            if name != "train" and (device := given[-3 if name == "compare" else 1]) is not None:
                memory = outgrow.find_hardware(device).memory_bytes
            options = given[0]
            if is_own(options.network):
                typed = next(item for item in given if isinstance(item, frozenset))
                make_own_job(options, typed, memory)
            else:
                make_job(options, memory)
    assert not taken


@pytest.mark.parametrize("page", RUN_FOR_REAL)
def test_outgrow_commands_of_a_new_users_path_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "docs" / page
    beside_the_page(path, tmp_path, monkeypatch)
    ours = [arguments for program, *arguments in commands(path) if program == "outgrow"]
    ours = [arguments for arguments in ours if arguments[0] in ("train", "plan")]
    assert len(ours) >= 2
    for arguments in ours:
        smaller = ["--steps", "3"] if ".py:" in arguments[1] else ["--steps", "1", "--batch", "2"]
        assert run([*arguments, *smaller]) == 0, arguments


def beside_the_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the examples, and with the page's own files: blocks that begin with a file's name."""
    monkeypatch.chdir(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        first = block.code.split("\n", 1)[0]
        if found := re.fullmatch(r"# (\w+\.py)", first):
            (folder / found[1]).write_text(block.code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_commands_name_what_there_is(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    for program, *arguments in commands(page):
        match program:
            case "outgrow":
                pass
            case "make":
                assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in arguments), arguments
            case "pip":
                assert arguments[0] == "install"
                named = re.fullmatch(r"(?:\.|outgrow)(?:\[(\w+)\])?", arguments[1])
                assert named, arguments
                assert named[1] is None or named[1] in extras, arguments
            case "python":
                text = (ROOT / arguments[0]).read_text()
                options = [word for word in arguments[1:] if word.startswith("--")]
                assert all(f'"{option}"' in text for option in options), arguments
            case _:
                pytest.fail(f"{page.name}: nobody checks {program} {arguments}")


def test_every_error_has_a_section() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    own = {
        item for item in vars(outgrow.errors).values() if isinstance(item, type) and issubclass(item, OutgrowError)
    }
    assert len(own) > 10
    for error in {*own, OptionError, DataError, OwnFileError}:
        section = re.search(rf"^##+ {error.__name__}\n\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, f"{error.__name__} has no section"
        assert len(section[1].split()) > 5


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {f"outgrow.{name}" for name in outgrow.__all__} <= set(listed)


@pytest.mark.parametrize("name", outgrow.__all__)
def test_every_public_name_is_typed_and_documented(name: str) -> None:
    item = getattr(outgrow, name)
    assert inspect.getdoc(item)
    if not inspect.isclass(item):
        assert_typed(item)
        return
    for key, member in vars(item).items():
        if key.startswith("_"):
            continue
        if isinstance(member, property) and member.fget is not None:
            assert member.__doc__, key
            assert_typed(member.fget)
        elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            assert inspect.getdoc(member), key
            assert_typed(inspect.unwrap(getattr(member, "__func__", member)))
    if "__init__" in vars(item) and inspect.isfunction(item.__init__) and item.__init__.__module__ != "typing":
        assert_typed(item.__init__)


def assert_typed(function: Any) -> None:
    signature = inspect.signature(function)
    untyped = [key for key, item in signature.parameters.items() if item.annotation is item.empty and key not in SELF]
    assert not untyped, untyped
    assert signature.return_annotation is not signature.empty, function


SELF = ("self", "cls", "_cls")


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_callbacks_are_typed_and_documented(library: str) -> None:
    pytest.importorskip({"lightning": "pytorch_lightning"}.get(library, library))
    module = importlib.import_module(f"outgrow.integrations.{library}")
    for key, member in vars(module.OutgrowCallback).items():
        if inspect.isfunction(member) and (not key.startswith("_") or key == "__init__"):
            assert inspect.getdoc(member), key
            assert_typed(member)


def test_importing_outgrow_imports_no_library_that_it_can_do_without() -> None:
    code = (
        "import sys, outgrow, outgrow.integrations, outgrow.cli.train; outgrow.Session;"
        "print(sorted({'lightning', 'pytorch_lightning', 'transformers', 'accelerate'} & sys.modules.keys()))"
    )
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout == "[]\n"


def test_every_policy_is_on_the_page_of_policies() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    assert all(f"| `{name}` |" in text for name in outgrow.policies())


def test_the_policy_that_is_added_takes_less_than_40_lines() -> None:
    first = next(block for block in blocks(ROOT / "docs" / "add-a-policy.md") if block.kind == "python")
    assert len(first.code.splitlines()) < 40
    assert "def plan(self, problem: Problem) -> Plan:" in first.code


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert all((ROOT / link).exists() for link in links)


def test_the_site_builds_without_warnings_and_needs_no_network_to_be_read(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert {page.stem for page in PAGES if page.name != "README.md"} <= pages
    for path in tmp_path.rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\bsrc=[\"']?(https?:[^\"' >]+)", text)
        loaded += re.findall(
            r"<link[^>]*rel=[\"']?(?:stylesheet|preconnect|icon)[^>]*href=[\"']?(https?:[^\"' >]+)", text
        )
        assert not loaded, path.name
        named = path.name if path.parent == tmp_path else ""
        navigation = re.findall(r"href=[\"']?([\w-]+)\.html", text) if named == "index.html" else []
        assert not navigation or pages - {"index", "404"} <= set(navigation)
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?https?:", path.read_text()), path.name


def test_figures_of_the_benchmarks_are_those_of_their_files() -> None:
    figures = load_module(ROOT / "docs" / "figures.py")
    page = figures.on_page_markdown((ROOT / "docs" / "benchmarks.md").read_text())
    assert "<!-- figures" not in page
    for path in (ROOT / "benchmarks" / "results").glob("pareto-*.json"):
        assert f"# {path.name}\npython benchmarks/pareto.py" in page


def test_types_of_the_options_are_those_of_a_session() -> None:
    from outgrow.integrations.keeper import SessionOptions

    wanted = typing.get_type_hints(SessionOptions)
    given = inspect.signature(outgrow.Session).parameters
    hints = typing.get_type_hints(outgrow.Session.__init__)
    assert wanted.keys() <= given.keys()
    assert {name: hints[name] for name in wanted} == wanted
