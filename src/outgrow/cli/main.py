"""The command `outgrow`. Commands import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from outgrow.cli import options as opt
from outgrow.errors import OutgrowError

_EXAMPLES = """
Examples:

  outgrow plan resnet-50 --batch 32 --budget 1GiB

  outgrow train resnet-50 --batch 16 --budget 1GiB --steps 20

  outgrow train gpt-12x256 --batch 8 --image-size 256 --budget 400MB --json

  outgrow compare resnet-50 --batch 16 --budgets 100,60,40 --policies auto,vdnn-dyn --plot resnet-50.png

  outgrow plan vgg-16 --batch 256 --budget 12GiB --hardware k40c

  outgrow report resnet-50 --batch 16 --budget 700MiB --output resnet-50.html

  outgrow limits resnet-152 --what batch --hardware k40c

  outgrow tune resnet-50 --image-size 64 --budget 1GiB --lr 0.05

  outgrow train my_model.py:make_step --batch 32 --budget 8GiB
"""

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Train PyTorch networks that need more memory than there is: inside a budget, with the same result "
    "to the bit.",
    epilog=_EXAMPLES,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("outgrow")
        except metadata.PackageNotFoundError:
            version = "from a source tree that is not installed"
        print(f"outgrow {version}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """What all commands share."""


@app.command()
def train(
    context: typer.Context,
    network: opt.StepArgument,
    data: opt.Data = None,
    batch: opt.Batch = 16,
    nproc: opt.Nproc = 1,
    image_size: opt.ImageSize = None,
    steps: opt.Steps = 20,
    budget: opt.Budget = None,
    policy: opt.Policy = None,
    optimizer: opt.Optimizer = "sgd",
    momentum: opt.Momentum = None,
    lr: opt.LearningRate = None,
    dtype: opt.Dtype = "float32",
    channels_last: opt.ChannelsLast = False,
    accumulate: opt.Accumulate = 1,
    device: opt.Device = "cpu",
    workspace: opt.TrainWorkspace = None,
    followed: opt.FollowedPlan = None,
    spill_dir: opt.SpillDir = None,
    allow_tmpfs: opt.AllowTmpfs = False,
    seed: opt.Seed = 0,
    report: opt.Report = None,
    plot: opt.Picture = None,
    perfetto: opt.Perfetto = None,
    verbose: opt.Verbose = False,
    as_json: opt.Json = False,
) -> None:
    """Train a network under a budget, and say what it took.

    Without --budget plain PyTorch trains it: the same seed gives the same losses and parameters.

    A model of your own is a FILE.py:FUNCTION whose function takes the batch size, or nothing, and returns an
    outgrow.TrainingStep: model, optimizer and a function that runs one step. What the file says itself (--data,
    --image-size, --optimizer, --lr, ...) is no option then.
    """
    given = opt.options_of(locals())
    _use_huge_pages()
    from outgrow.cli.outputs import Outputs
    from outgrow.cli.train import train as run_train

    run_train(given, steps, as_json, Outputs(report, plot, perfetto), verbose, nproc, _typed(context), followed)


@app.command()
def plan(
    context: typer.Context,
    network: opt.StepArgument,
    data: opt.Data = None,
    batch: opt.Batch = 16,
    image_size: opt.ImageSize = None,
    steps: opt.Steps = 20,
    budget: opt.PlanBudget = None,
    policy: opt.Policy = None,
    hardware: opt.Hardware = None,
    device: opt.Device = "cpu",
    workspace: opt.Workspace = None,
    optimizer: opt.Optimizer = "sgd",
    momentum: opt.Momentum = None,
    lr: opt.LearningRate = None,
    dtype: opt.Dtype = "float32",
    channels_last: opt.ChannelsLast = False,
    spill_dir: opt.SpillDir = None,
    allow_tmpfs: opt.AllowTmpfs = False,
    seed: opt.Seed = 0,
    report: opt.Report = None,
    plot: opt.Picture = None,
    perfetto: opt.Perfetto = None,
    as_json: opt.Json = False,
) -> None:
    """Say what a training step would take, without allocating its memory.

    It takes the options of 'outgrow train' but --nproc, so that one word turns a command into its plan; those that
    change no memory (--data, --steps, --lr, --seed, ...) have no effect. With --hardware it plans for a
    device that need not be here.
    """
    given = opt.options_of(locals())
    del steps
    from outgrow.cli.outputs import Outputs
    from outgrow.cli.plan import plan as run_plan

    run_plan(given, hardware, as_json, Outputs(report, plot, perfetto), _typed(context))


@app.command()
def report(
    network: opt.ReportArgument,
    output: opt.Output = Path("report.html"),
    batch: opt.Batch = 16,
    image_size: opt.ImageSize = None,
    budget: opt.PlanBudget = None,
    policy: opt.Policy = None,
    hardware: opt.Hardware = None,
    optimizer: opt.Optimizer = "sgd",
    momentum: opt.Momentum = None,
    dtype: opt.Dtype = "float32",
    channels_last: opt.ChannelsLast = False,
) -> None:
    """Write a page that shows a plan: memory, lanes, what holds the peak.

    Nothing is trained: the step is traced without allocating its memory, as
    by 'outgrow plan'. A plan that was saved (Plan.save) is shown as it is, and
    needs no other option than --output.
    """
    given = opt.options_of(locals())
    from outgrow.cli.report import report as run_report

    run_report(given, hardware, output)


@app.command()
def compare(
    network: opt.NetworkArgument,
    data: opt.Data = None,
    batch: opt.Batch = 16,
    image_size: opt.ImageSize = None,
    budgets: opt.Budgets = "100,80,60,50,40,33,25",
    policies: opt.Policies = None,
    measure: opt.Measure = False,
    steps: opt.MeasuredSteps = 5,
    plot: opt.Plot = None,
    report: opt.Report = None,
    hardware: opt.Hardware = None,
    workspace: opt.Workspace = None,
    optimizer: opt.Optimizer = "sgd",
    momentum: opt.Momentum = None,
    lr: opt.LearningRate = None,
    dtype: opt.Dtype = "float32",
    channels_last: opt.ChannelsLast = False,
    spill_dir: opt.SpillDir = None,
    allow_tmpfs: opt.AllowTmpfs = False,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Compare policies and budgets: what does each share of the memory cost in time?

    Every policy is planned for every budget, from one trace on a model of
    this machine, or of --hardware; no memory of the step is allocated. A pair that cannot work
    is shown as such, with the least budget that would do.

    With --measure each pair also trains for real, in a process of its own
    that takes turns with plain PyTorch; budgets are then shares of the plain
    peak as it was measured. Only then do --data, --steps, --seed, --lr and
    --spill-dir matter. Plain PyTorch runs as it comes: a budget that does not
    bind may be faster, since Outgrow keeps freed memory on the heap.
    """
    given = opt.options_of(locals())
    _use_huge_pages()
    from outgrow.cli.compare import compare as run_compare

    run_compare(given, budgets, policies, steps if measure else None, plot, hardware, as_json, report)


@app.command()
def tune(
    context: typer.Context,
    network: opt.StepArgument,
    budget: opt.TunedBudget,
    data: opt.Data = None,
    batch: opt.BaseBatch = 32,
    image_size: opt.ImageSize = None,
    objective: opt.Objective = "goodput",
    noise_scale: opt.NoiseScale = None,
    max_batch: opt.MaxBatch = None,
    trials: opt.Trials = 12,
    plot: opt.TuningPlot = None,
    report: opt.Report = None,
    save_plan: opt.SavedPlan = None,
    policy: opt.Policy = None,
    optimizer: opt.Optimizer = "sgd",
    momentum: opt.Momentum = None,
    lr: opt.LearningRate = None,
    dtype: opt.Dtype = "float32",
    channels_last: opt.ChannelsLast = False,
    spill_dir: opt.SpillDir = None,
    allow_tmpfs: opt.AllowTmpfs = False,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Find the batch that is worth it under a budget, and its learning rate.

    The base batch and the ends of the curve train for some steps, which sets
    estimates right and shows how noisy gradients are. Every batch that fits is
    planned from those, and the best few are run. The answer was, inside the budget.

    A model of your own is a FILE.py:FUNCTION whose function takes the batch size; where it takes 'accumulation' as
    well, several passes before the optimizer's step are weighed, too.
    """
    given = opt.options_of(locals())
    _use_huge_pages()
    from outgrow.cli.tune import Results, Search
    from outgrow.cli.tune import tune as run_tune

    search = Search(objective, noise_scale, max_batch, trials)
    run_tune(given, search, Results(plot, report, save_plan), as_json, _typed(context))


@app.command()
def networks(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Only these, for example resnet-152 vgg-16.", show_default=False),
    ] = None,
    batch: opt.Batch = 16,
    as_json: opt.Json = False,
) -> None:
    """List the networks, with their parameters and the peak memory of a plain step."""
    from outgrow.cli.networks import networks as run_networks

    run_networks(names or (), batch, as_json)


@app.command()
def doctor(
    spill_dir: opt.SpillDir = None,
    allow_tmpfs: opt.AllowTmpfs = False,
    as_json: opt.Json = False,
) -> None:
    """Measure this machine, check the set-up, list devices to plan for.

    What is measured here (products, memory, disk, whole steps) is kept in the
    cache folder, and plans on this machine reckon with it. Some ten seconds.
    """
    _use_huge_pages()
    from outgrow.cli.doctor import doctor as run_doctor

    run_doctor(spill_dir, allow_tmpfs, as_json)


@app.command()
def limits(
    family: opt.FamilyArgument,
    what: opt.What = "batch",
    hardware: opt.Hardware = None,
    workspace: opt.Workspace = None,
    budget: opt.LimitsBudget = None,
    policy: opt.Policy = None,
    batch: opt.Batch = 16,
    image_size: opt.ImageSize = None,
    optimizer: opt.Optimizer = "sgd",
    momentum: opt.Momentum = None,
    dtype: opt.Dtype = "float32",
    as_json: opt.Json = False,
) -> None:
    """Find the deepest network or the largest batch that fits a device.

    Fake traces and plans alone: nothing is trained, and with --hardware the
    device need not be here. Depths of thousands of layers take minutes.
    """
    given = opt.options_of(locals())
    from outgrow.cli.limits import limits as run_limits

    run_limits(family, what, given, hardware, as_json)


@app.command()
def paper(name: opt.PaperArgument, workspace: opt.Workspace = None, as_json: opt.Json = False) -> None:
    """Work out the figures of a paper anew, on the paper's GPU.

    One row a figure: the paper's number, plain PyTorch, the paper's policy
    and auto, all simulated from fake traces. superneurons takes half an hour.
    With --workspace convolutions hold workspaces in all of them; figures that are about workspaces have their own.

    Where there is a CUDA device, another column has what auto measures there, within the paper's budget.
    """
    from outgrow.cli.paper import paper as run_paper

    run_paper(name, as_json, workspace)


@app.command(hidden=True)
def demo() -> None:
    """Train a ResNet-50 on real images under half of its memory (`make demo`)."""
    _use_huge_pages()
    from outgrow.cli.demo import demo as run_demo

    run_demo()


def _typed(context: typer.Context) -> frozenset[str]:
    """The names of the options that were typed, whatever their values."""
    return frozenset(
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    )


def _use_huge_pages() -> None:
    """Let torch ask for huge pages for tensors from 2 MiB up; it reads this at its first large allocation.

    Page faults cost much of a step whose memory comes and goes, and page-aligned tensors can be written to
    disk from where they are. Plain runs get it as well, so that a comparison is fair.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for any error of Outgrow or in the input, 130 for Ctrl-C.

    Args:
        arguments: without the program's name; None takes them from `sys.argv`.
    """
    try:
        code = app(None if arguments is None else list(arguments), prog_name="outgrow", standalone_mode=False)
    except OutgrowError as error:
        return _complain(str(error))
    except typer.TyperException as error:
        return _complain(error.format_message())
    except OSError as error:  # the disk is full, or a file of the user's cannot be read
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _EXIT_INTERRUPTED
    if code == _EXIT_INTERRUPTED:  # typer may have turned Ctrl-C into it
        print("outgrow: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    if message:  # else it was help that nobody asked for by name
        print(f"outgrow: {' '.join(message.split())}", file=sys.stderr)
    return _EXIT_USAGE


if __name__ == "__main__":
    sys.exit(run())
