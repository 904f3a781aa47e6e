"""The README and the documentation: what stands in them runs, and what has to stand in them does.

What is checked of code blocks:

- Python: all blocks of a page are executed, in order, in one namespace. What pages take for granted (`model`,
  `optimizer`, `batches`, ...) is `namespace()` below; what one page needs besides stands in it as `<!-- hidden`.
- Shell: every command is run, in the order of its page, in a folder with the page's own files; one that stands on
  several pages, once. Commands that take long run smaller: SMALLER has what stands on the page and what is run in its
  place, with the same options and a smaller network, image, batch, budget or number of steps. RUN_ELSEWHERE has those
  that are not run here, each with the reason. `make docs-run` runs all of them as they are written.
- Each `outgrow` command as it is written also goes through the parser of the command line; those of `train`, `plan`,
  `compare` through the checks of network, policy, device and budget that the command makes before it works.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import outgrow
from outgrow.cli.datasets import DataError
from outgrow.cli.job import OptionError, is_own, make_job
from outgrow.cli.main import run
from outgrow.cli.own import OwnFileError, make_own_job
from outgrow.errors import OutgrowError
from pages import PAGES, ROOT, blocks, commands, load_module, write_files

pytestmark = pytest.mark.usefixtures("one_thread")

LIBRARIES = {"integrations.md": ("pytorch_lightning", "transformers", "accelerate")}

# What stands on a page, and what is run in its place.
SMALLER = {
    "outgrow train resnet-50 --data digits --batch 16 --steps 20 --budget 700MiB": (
        "outgrow train resnet-18 --data digits --batch 4 --image-size 32 --steps 2 --budget 250MiB"
    ),
    "outgrow train gpt-4x256 --data text --image-size 256 --batch 8 --budget 200MiB --optimizer adamw": (
        "outgrow train gpt-2x64 --data text --image-size 32 --batch 2 --steps 2 --budget 15MiB --optimizer adamw"
    ),
    "outgrow plan resnet-2504 --batch 16 --budget 12GiB": "outgrow plan resnet-50 --batch 2 --budget 1GiB",
    "outgrow networks resnet-50 vgg-16 gpt --batch 16": "outgrow networks resnet-18 gpt-2x64 --batch 2",
    "outgrow train examples/own_model.py:make_step --batch 1024 --steps 20 --budget 19MiB": (
        "outgrow train examples/own_model.py:make_step --batch 1024 --steps 2 --budget 19MiB"
    ),
    "outgrow compare resnet-50 --batch 16": "outgrow compare resnet-18 --batch 2 --image-size 32 --budgets 80",
    "outgrow report resnet-50 --batch 16 --budget 700MiB --output resnet-50.html": (
        "outgrow report resnet-18 --batch 2 --image-size 32 --budget 150MiB --output resnet-50.html"
    ),
    "outgrow train gpt-4x256 --data text --image-size 256 --batch 8 --budget 200MiB --report run.html --verbose": (
        "outgrow train gpt-2x64 --data text --image-size 32 --batch 2 --steps 2 --budget 10MiB"
        " --report run.html --verbose"
    ),
    "outgrow plan unet --batch 4 --budget 2GiB --plot unet.png --perfetto unet.json.gz": (
        "outgrow plan unet --batch 4 --image-size 64 --budget 600MiB --plot unet.png --perfetto unet.json.gz"
    ),
    "outgrow compare resnet-50 --batch 16 --report points.html": (
        "outgrow compare resnet-18 --batch 2 --image-size 32 --budgets 100 --report points.html"
    ),
    "outgrow compare resnet-152 --batch 64 --hardware a100-40gb --budgets 80,60,40": (
        "outgrow compare resnet-18 --batch 64 --image-size 32 --hardware a100-40gb --budgets 80"
    ),
    "outgrow limits resnet-152 --what batch --hardware k40c": (
        "outgrow limits gpt-2x64 --what batch --image-size 64 --policy keep --hardware k40c --budget 20MiB"
    ),
    "outgrow limits gpt --what depth --batch 8 --hardware v100 --budget 1GiB": (
        "outgrow limits gpt --what depth --batch 2 --image-size 64 --policy keep --hardware v100 --budget 100MiB"
    ),
    "outgrow train resnet-2504 --data synthetic --batch 16 --image-size 224 --momentum 0 --steps 2 --budget 12GiB": (
        "outgrow train resnet-18 --data synthetic --batch 2 --image-size 32 --momentum 0 --steps 2 --budget 100MiB"
    ),
    "outgrow train resnet-2504 --data synthetic --batch 16 --image-size 224 --momentum 0 --steps 2 --budget 12GiB"
    " --json": (
        "outgrow train resnet-18 --data synthetic --batch 2 --image-size 32 --momentum 0 --steps 2 --budget 100MiB"
        " --json"
    ),
    "outgrow plan resnet-50 --batch 16": "outgrow plan resnet-18 --batch 2",
    "outgrow plan gpt-4x256 --batch 8 --image-size 256 --budget 200MiB": (
        "outgrow plan gpt-2x64 --batch 2 --image-size 32 --budget 10MiB"
    ),
    "outgrow compare resnet-50 --batch 16 --budgets 100,80,60,40": (
        "outgrow compare resnet-18 --batch 2 --image-size 32 --budgets 60"
    ),
    "outgrow train my_model.py:make_step --batch 1024 --steps 20 --budget 12MiB": (
        "outgrow train my_model.py:make_step --batch 1024 --steps 3 --budget 12MiB"
    ),
    "outgrow train my_model.py:make_step --batch 1024 --steps 20": (
        "outgrow train my_model.py:make_step --batch 1024 --steps 3"
    ),
    "outgrow compare resnet-50 --batch 16 --budgets 100,60,40 --policies auto,vdnn-dyn,superneurons,lru": (
        "outgrow compare resnet-18 --batch 2 --image-size 32 --budgets 80 --policies auto,vdnn-dyn,superneurons,lru"
    ),
    "outgrow train resnet-18 --data synthetic --batch 32 --image-size 128 --steps 5 --budget 250MiB": (
        "outgrow train resnet-18 --data synthetic --batch 4 --image-size 32 --steps 2 --budget 250MiB"
    ),
    "outgrow tune resnet-50 --image-size 64 --budget 1GiB --lr 0.05": (
        "outgrow tune gpt-2x64 --image-size 32 --budget 6MB --lr 0.05 --batch 2 --max-batch 2 --trials 1"
    ),
    "outgrow tune resnet-50 --image-size 64 --budget 1GiB --lr 0.05"
    " --plot tune.png --report tune.html --save-plan tune.json": (
        "outgrow tune gpt-2x64 --image-size 32 --budget 6MB --lr 0.05 --batch 2 --max-batch 2 --trials 1"
        " --plot tune.png --report tune.html --save-plan tune.json"
    ),
    "outgrow train resnet-50 --image-size 64 --budget 1GiB --batch 48 --lr 0.07 --plan tune.json": (
        "outgrow train gpt-2x64 --image-size 32 --budget 6MB --batch 2 --lr 0.07 --plan tune.json --steps 2"
    ),
    "outgrow plan vgg-16 --batch 256 --budget 12GiB --hardware titan-x --workspace dynamic": (
        "outgrow plan resnet-18 --batch 32 --image-size 64 --budget 400MiB --hardware titan-x --workspace dynamic"
    ),
    "outgrow compare vgg-16 --batch 64 --hardware k40c --policies auto,vdnn-dyn --workspace dynamic": (
        "outgrow compare resnet-18 --batch 16 --image-size 32 --budgets 80 --hardware k40c --policies auto,vdnn-dyn"
        " --workspace dynamic"
    ),
    "outgrow limits resnet-152 --hardware k40c --workspace speed": (
        "outgrow limits resnet-18 --image-size 64 --policy keep --hardware k40c --budget 300MiB --workspace speed"
    ),
    "outgrow networks resnet-50 vgg-16 gpt-12x256 --batch 16": "outgrow networks resnet-18 gpt-2x128 --batch 2",
}

# The beginning of what is not run here, and why.
RUN_ELSEWHERE = {
    "pip install": "needs a package registry: the extras are looked up",
    "make": "sets up an environment of its own: the targets are looked up; the suite builds the site",
    "outgrow tune resnet-50 --image-size 64 --budget 1GiB --report tune.html": "tuning.md has it with more options",
    "outgrow doctor": "measures for half a minute: test_hardware.py runs it",
    "outgrow paper": "works out for minutes what test_hardware.py tests figure by figure",
    "outgrow train resnet-50 --batch 32 --budget 1GiB --nproc 2": "test_distributed.py runs two processes, smaller",
    "outgrow train vgg-16 --device cuda --budget 12GiB --workspace dynamic": "needs a GPU: test_cuda.py has one",
    "outgrow compare gpt-12x384": "measures in a process for each point: test_compare.py does, smaller",
    "python examples/": "test_examples.py runs them smaller: the options are looked up",
    "python benchmarks/": "measures for hours: the options are looked up",
}


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


def first_of_each() -> dict[str, list[str]]:
    """The commands that are run, by page, each where it stands first."""
    seen: set[str] = set()
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in map(" ".join, commands(page)):
            if command not in seen and not command.startswith(tuple(RUN_ELSEWHERE)):
                seen.add(command)
                found.setdefault(page.name, []).append(command)
    return found


@pytest.mark.filterwarnings("ignore")  # other libraries' advice
@pytest.mark.parametrize("name", first_of_each())
def test_shell_commands_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside_the_page(next(page for page in PAGES if page.name == name), tmp_path, monkeypatch)
    for command in first_of_each()[name]:
        program, *arguments = SMALLER.get(command, command).split()
        assert program == "outgrow", command
        assert run(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
        for option in ("--report", "--plot", "--perfetto", "--output", "--save-plan"):
            if option in arguments:
                assert Path(arguments[arguments.index(option) + 1]).stat().st_size > 0, command


def test_smaller_commands_are_of_commands_on_pages_and_leave_no_option_out() -> None:
    written = {" ".join(words) for page in PAGES for words in commands(page)}
    for command, smaller in SMALLER.items():
        assert command in written, f"no page has it any more: {command}"
        options = {word for word in command.split() if word.startswith("--")}
        assert command.split()[:2] == smaller.split()[:2]
        assert options <= set(smaller.split()), command
    for start in RUN_ELSEWHERE:
        assert any(command.startswith(start) for command in written), start


def beside_the_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the examples, and with the page's own files."""
    monkeypatch.chdir(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    write_files(page, folder)


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
                named = re.fullmatch(r"(?:\.|outgrow)(?:\[([\w,]+)\])?", arguments[1])
                assert named, arguments
                assert named[1] is None or set(named[1].split(",")) <= extras.keys(), arguments
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
