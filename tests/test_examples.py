"""Each example trains what it trains plainly, to the bit, within 60% of the plain peak."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from outgrow.cli.main import run

EXAMPLES = Path(__file__).parents[1] / "examples"
SHARE = 0.6

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "resnet_digits": ("--steps", "4", "--batch", "32", "--workers", "0"),
    "gpt_stdlib": ("--steps", "4", "--batch", "8", "--length", "64", "--layers", "3", "--width", "64"),
    "unet_digits": ("--steps", "4", "--width", "4"),
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "own_model"}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains_the_same_under_a_budget(name: str) -> None:
    if "digits" in name:
        pytest.importorskip("sklearn")
    main = load(name).main
    settings: Sequence[str] = SMALL[name]
    plain, nothing = main(settings)
    _, free = main((*settings, "--budget", "1TiB"))
    budget = int(SHARE * free.measured_peak_bytes)
    losses, summary = main((*settings, "--budget", str(budget)))
    assert nothing is None
    assert losses == plain
    assert len(set(losses)) == 4
    assert summary.measured_peak_bytes <= budget


def test_the_model_of_ones_own_trains_as_its_first_lines_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    said = re.findall(r"^outgrow (.*)$", (EXAMPLES / "own_model.py").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in said] == ["plan", "train"]
    printed = []
    for line in said:
        assert run([*line.replace("--steps 20", "--steps 3").split(), "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    plan, trained = printed
    assert trained["highest_peak_bytes"] <= trained["budget_bytes"] <= SHARE * plan["plain_peak_bytes"]
