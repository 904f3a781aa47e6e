"""The command line: what it trains, what it prints and where, and what it says to a mistake."""

import contextlib
import hashlib
import io
import json
import math
import os
import resource
import subprocess
import sys

import pytest
import torch

from outgrow import networks, trace
from outgrow.cli.job import make_job
from outgrow.cli.main import run
from outgrow.cli.options import Options
from outgrow.tracing.liveness import plain_profile

TINY_RESNET = ("resnet-50", "--batch", "2", "--image-size", "32")
TINY_GPT = ("gpt-2x64", "--batch", "2", "--image-size", "32")

TRAIN_KEYS = {
    "network",
    "batch",
    "accumulation",
    "policy",
    "budget_bytes",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "highest_peak_bytes",
    "rss_peak_bytes",
    "baseline_rss_bytes",
    "device_peak_bytes",
    "step_seconds",
    "losses",
    "parameters_sha256",
    "kept_bytes",
    "offloaded_bytes",
    "recomputed_bytes",
    "stall_seconds",
    "recompute_seconds",
    "plan_seconds",
    "oom_retries",
    "replans",
}
PLAN_KEYS = {
    "plain_peak_bytes",
    "peak_op",
    "predicted_peak_bytes",
    "predicted_peak_op",
    "predicted_step_seconds",
    "plain_step_seconds",
    "average_bytes",
    "plain_average_bytes",
    "feasible",
    "least_budget_bytes",
    "decisions",
}
EMPTY_IN_A_PLAIN_RUN = TRAIN_KEYS - {
    "network",
    "batch",
    "accumulation",
    "policy",
    "rss_peak_bytes",
    "baseline_rss_bytes",
    "step_seconds",
    "losses",
    "parameters_sha256",
}


def python(*arguments, check=True):
    """Runs a Python of its own, which finds the modules that this one finds."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=check,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.fixture
def outgrow(capsys):
    """Runs the command in this process; gives its exit code, its standard output and its standard error."""

    def command(*arguments):
        code = run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture
def result(outgrow):
    """Runs a command that must succeed with --json, and gives the object on its last line."""

    def command(*arguments):
        code, out, err = outgrow(*arguments, "--json")
        assert code == 0, err
        assert len(out.splitlines()) == 1, out
        return json.loads(out)

    return command


@pytest.fixture
def refused(outgrow):
    """Runs a command that must fail as a mistake in the input, and gives its one line of complaint."""

    def command(*arguments):
        code, out, err = outgrow(*arguments)
        assert code == 2, (out, err)
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert err.startswith("outgrow: ")
        return err

    return command


@pytest.fixture
def tight_budget(result):
    """Between what a plain step of the tiny ResNet takes and the least that any plan can do with."""
    plan = result("plan", *TINY_RESNET)
    assert plan["least_budget_bytes"] < plan["plain_peak_bytes"]
    return (plan["least_budget_bytes"] + plan["plain_peak_bytes"]) // 2


def test_a_plain_run_prints_every_key_and_leaves_those_of_a_budget_empty(result):
    printed = result("train", *TINY_RESNET, "--steps", "3")
    assert set(printed) == TRAIN_KEYS
    assert {key for key, value in printed.items() if value is None} == EMPTY_IN_A_PLAIN_RUN
    assert (printed["network"], printed["batch"], printed["policy"]) == ("resnet-50", 2, "plain")
    assert len(printed["losses"]) == len(printed["step_seconds"]) == 3
    assert all(seconds > 0 for seconds in printed["step_seconds"])
    assert printed["baseline_rss_bytes"] > 0


def test_the_fingerprint_covers_parameters_and_buffers_in_order_of_name(result):
    printed = result("train", *TINY_RESNET, "--steps", "1", "--data", "synthetic", "--lr", "0.1", "--seed", "3")
    network = networks.find("resnet-50")
    generator = torch.Generator().manual_seed(3)
    batch, target = network.sample(2, 32, 1000, generator=generator)
    torch.manual_seed(3)
    model = network.build(32, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = network.loss(model(batch), target)
    loss.backward()
    optimizer.step()
    state = model.state_dict()
    expected = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    assert printed["losses"] == [loss.item()]
    assert printed["parameters_sha256"] == expected.hexdigest()


def test_the_seed_decides_a_run(result):
    command = ("train", *TINY_GPT, "--steps", "2")
    first, again = result(*command), result(*command)
    other = result(*command, "--seed", "1")
    assert first["losses"] == again["losses"]
    assert first["parameters_sha256"] == again["parameters_sha256"] != other["parameters_sha256"]


@pytest.mark.parametrize(
    "options",
    [
        ("--momentum", "0"),
        ("--lr", "0.5"),
        ("--optimizer", "adamw"),
        ("--dtype", "bfloat16"),
        ("--data", "synthetic"),
    ],
)
def test_each_option_changes_the_run(result, options):
    command = ("train", *TINY_GPT, "--steps", "2")
    changed = result(*command, *options)
    assert all(map(math.isfinite, changed["losses"]))
    assert changed["parameters_sha256"] != result(*command)["parameters_sha256"]


def test_a_budget_is_held_and_changes_no_bit(result, tight_budget):
    command = ("train", *TINY_RESNET, "--steps", "4")
    plain = result(*command)
    managed = result(*command, "--budget", str(tight_budget))
    assert set(managed) == TRAIN_KEYS
    assert managed["budget_bytes"] == tight_budget
    assert managed["highest_peak_bytes"] <= tight_budget
    assert managed["losses"] == plain["losses"]
    assert managed["parameters_sha256"] == plain["parameters_sha256"]
    assert managed["policy"] != "plain"
    assert {key for key in TRAIN_KEYS if managed[key] is None} == {"device_peak_bytes"}  # a GPU's


@pytest.fixture
def narrow_unet(monkeypatch):
    """A U-Net in which images weigh more than weights, as they do in the real one at its own input size."""
    monkeypatch.setattr("outgrow.networks.unet._WIDTHS", (8, 16, 32, 64))


@pytest.mark.usefixtures("narrow_unet")
def test_channels_last_is_the_same_in_a_session_and_plain(result):
    command = ("unet", "--batch", "2", "--image-size", "96", "--momentum", "0", "--channels-last")
    budget = int(result("plan", *command)["plain_peak_bytes"] * 0.6)
    plain = result("train", *command, "--steps", "4")
    managed = result("train", *command, "--steps", "4", "--budget", str(budget))
    assert managed["highest_peak_bytes"] <= budget
    assert managed["offloaded_bytes"] + managed["recomputed_bytes"] > 0
    assert managed["losses"] == plain["losses"]
    assert managed["parameters_sha256"] == plain["parameters_sha256"]


@pytest.mark.usefixtures("narrow_unet")
def test_channels_last_lays_out_weights_and_images_on_real_and_fake_tensors():
    job = make_job(Options("unet", batch=2, image_size=96, channels_last=True))
    model, _ = job.build()
    images, _ = next(job.batches())
    for tensor in (images, *(parameter for parameter in model.parameters() if parameter.dim() == 4)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert not images.is_contiguous()
    convolutions = [op for op in job.fake_trace().ops if "convolution" in op.name]
    assert convolutions
    assert all(op.channels_last for op in convolutions)


@pytest.mark.usefixtures("narrow_unet")
def test_a_plan_knows_that_channels_last_needs_less(result):
    command = ("unet", "--batch", "2", "--image-size", "96")
    usual, last = result("plan", *command), result("plan", *command, "--channels-last")
    assert last["least_budget_bytes"] < 0.8 * usual["least_budget_bytes"]
    job = make_job(Options("unet", batch=2, image_size=96, channels_last=True))
    measured = plain_profile(trace(job.make_step, fake=False))
    assert last["plain_peak_bytes"] == pytest.approx(measured.peak_bytes, rel=0.02)


def test_segmentation_trains_on_digits_under_a_budget(result):
    command = ("unet", "--batch", "1", "--image-size", "64", "--momentum", "0")
    plan = result("plan", *command)
    budget = (plan["least_budget_bytes"] + plan["plain_peak_bytes"]) // 2
    printed = result("train", *command, "--steps", "2", "--budget", str(budget))
    assert printed["measured_peak_bytes"] <= budget
    assert all(map(math.isfinite, printed["losses"]))


def test_without_json_a_table_goes_to_standard_output(outgrow):
    code, out, err = outgrow("train", *TINY_GPT, "--steps", "1")
    assert code == 0
    assert "last loss" in out
    assert err == ""  # no terminal: no progress bar


def test_one_step_has_no_resident_peak(result):
    assert result("train", *TINY_GPT, "--steps", "1")["rss_peak_bytes"] is None


def test_a_plan_without_a_budget_is_that_of_the_plain_peak(result):
    plan = result("plan", *TINY_RESNET)
    assert set(plan) >= PLAN_KEYS
    assert plan["feasible"]
    assert plan["predicted_peak_bytes"] <= plan["plain_peak_bytes"] == plan["budget_bytes"]
    assert plan["average_bytes"] <= plan["predicted_peak_bytes"]
    assert plan["plain_average_bytes"] <= plan["plain_peak_bytes"]
    assert "in backward" in plan["peak_op"] or "in forward" in plan["peak_op"] or "in update" in plan["peak_op"]


def test_a_plan_under_a_budget_keeps_to_it(result, tight_budget):
    plan = result("plan", *TINY_RESNET, "--budget", str(tight_budget))
    assert plan["feasible"]
    assert plan["predicted_peak_bytes"] <= tight_budget < plan["plain_peak_bytes"]


def test_a_plan_says_what_is_offloaded(result):
    plan = result("plan", *TINY_RESNET, "--policy", "vdnn-all")
    assert plan["decisions"]["offload"]["bytes"] > 0


def test_a_plan_that_cannot_fit_is_reported_rather_than_refused(result):
    plan = result("plan", *TINY_RESNET, "--budget", "1MB")
    assert plan["feasible"] is False
    assert plan["least_budget_bytes"] > 10**6


def memory_of_a_plan() -> tuple[int, int]:
    """The peak of a step as its plan prints it, and of the resident set of a process that did nothing else."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run(("plan", "vgg-16", "--batch", "64", "--json")) == 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return json.loads(printed.getvalue())["plain_peak_bytes"], used


def test_a_plan_allocates_none_of_the_memory_that_it_plans(run_child):
    planned, used = run_child(memory_of_a_plan)
    assert planned > 4 * used


def test_networks_are_listed_with_their_parameters(result):
    (row,) = result("networks", "ResNet50", "--batch", "1")
    assert (row["name"], row["parameters"], row["batch"]) == ("resnet-50", 25_557_032, 1)
    assert row["plain_peak_bytes"] > 3 * 4 * row["parameters"]  # with gradients and momentum


def test_networks_print_as_a_table(outgrow):
    code, out, _ = outgrow("networks", "gpt-2x64", "alexnet", "--batch", "1")
    assert code == 0
    assert "61,100,840" in out
    assert "gpt-2x64" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "NETWORK"),
        (("train", "resnet-51"), "resnet-51"),
        (("plan", "no-such-net"), "unknown network"),
        (("networks", "no-such-net"), "unknown network"),
        (("train", "resnet-50", "--batch", "0"), "--batch"),
        (("train", "resnet-50", "--steps", "0"), "--steps"),
        (("train", "resnet-50", "--steps", "many"), "--steps"),
        (("train", "resnet-50", "--lr", "0"), "--lr"),
        (("train", "resnet-50", "--lr", "nan"), "--lr"),
        (("train", "resnet-50", "--momentum", "1"), "--momentum"),
        (("train", "resnet-50", "--momentum", "-0.1"), "--momentum"),
        (("train", "resnet-50", "--seed", "-1"), "--seed"),
        (("train", "resnet-50", "--optimizer", "adagrad"), "--optimizer"),
        (("train", "resnet-50", "--dtype", "float16"), "--dtype"),
        (("train", "resnet-50", "--optimizer", "adamw", "--momentum", "0.5"), "--momentum"),
        (("train", "vgg-16", "--image-size", "31"), "at least 32"),
        (("train", "resnet-50", "--batch", "1", "--image-size", "32"), "batch of 1"),
        (("train", *TINY_RESNET, "--budget", "8 gigs"), "gigs"),
        (("train", *TINY_RESNET, "--budget", "0"), "more than 0"),
        (("train", *TINY_RESNET, "--budget", "1MB"), "least budget"),
        (("train", *TINY_RESNET, "--budget", "1GiB", "--policy", "magic"), "vdnn-dyn"),
        (("plan", *TINY_RESNET, "--policy", "magic"), "vdnn-dyn"),
        (("train", *TINY_RESNET, "--policy", "lru"), "needs a --budget"),
        (("train", *TINY_RESNET, "--spill-dir", "/tmp"), "needs a --budget"),
        (("train", *TINY_RESNET, "--budget", "1GiB", "--spill-dir", "/no/such/folder"), "/no/such/folder"),
        (("train", *TINY_RESNET, "--data", "/no/such/folder"), "no such folder"),
        (("train", *TINY_RESNET, "--data", "text"), "takes images"),
        (("train", *TINY_GPT, "--data", "digits"), "takes text"),
        (("train", *TINY_GPT, "--channels-last"), "--channels-last"),
        (("plan", *TINY_GPT, "--channels-last"), "takes text"),
        (("compare", *TINY_GPT, "--channels-last"), "takes text"),
        (("trane",), "trane"),
        (("train", "resnet-50", "--bogus"), "--bogus"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(refused, arguments, message):
    assert message in refused(*arguments)


def test_too_small_a_budget_names_the_least_one_and_what_takes_it(refused):
    complaint = refused("train", *TINY_RESNET, "--budget", "1MB")
    assert "bytes)" in complaint
    assert "parameter" in complaint


def test_the_interrupt_key_ends_with_130(outgrow, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("outgrow.cli.plan.make_job", interrupt)
    code, out, err = outgrow("plan", "resnet-50")
    assert (code, out) == (130, "")
    assert "interrupted" in err


def test_the_package_runs_as_a_module() -> None:
    assert python("-m", "outgrow", "--version").stdout == python("-m", "outgrow.cli.main", "--version").stdout


def test_who_names_no_command_gets_help_and_nothing_else() -> None:
    done = python("-m", "outgrow", check=False)
    assert done.returncode == 2
    assert "Usage: outgrow" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["train", "plan", "compare", "tune"])
def test_help_names_extras_as_pip_wants_them(command: str) -> None:
    text = python("-m", "outgrow", command, "--help").stdout
    assert text.count("outgrow[plot]") == 1
    assert ("outgrow[cudnn]" in text) is (command == "train")


def test_a_full_disk_under_the_output_is_an_error_in_a_line() -> None:
    command = [sys.executable, "-m", "outgrow", "networks", "alexnet"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_examples_and_does_not_load_torch():
    script = (
        "import sys; from outgrow.cli.main import run; code = run(['--help']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = python("-c", script)
    assert done.stdout.count("  outgrow ") >= 3


def test_the_version_is_printed(outgrow):
    code, out, _ = outgrow("--version")
    assert code == 0
    assert out.startswith("outgrow ")


def test_with_json_only_the_result_is_on_standard_output():
    done = python("-m", "outgrow.cli.main", "train", *TINY_GPT, "--steps", "1", "--json")
    assert set(json.loads(done.stdout)) == TRAIN_KEYS
    assert "last loss" in done.stderr
