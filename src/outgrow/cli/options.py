"""The options of the commands, without torch so that `--help` is instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

OptimizerName = Literal["sgd", "adamw"]
DtypeName = Literal["float32", "bfloat16"]
WorkspaceName = Literal["memory", "speed", "dynamic"]
DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Options:
    """What was typed. None stands for "not given" where the default depends on the network or optimizer."""

    network: str
    data: str | None = None
    batch: int = 16
    image_size: int | None = None
    budget: str | None = None
    policy: str | None = None
    optimizer: OptimizerName = "sgd"
    momentum: float | None = None
    learning_rate: float | None = None
    dtype: DtypeName = "float32"
    channels_last: bool = False
    spill_dir: Path | None = None
    allow_tmpfs: bool = False
    seed: int = 0
    accumulate: int = 1
    workspace: WorkspaceName | None = None
    device: DeviceName = "cpu"


# Parameters of commands whose name is not that of the field.
_FIELDS = {"lr": "learning_rate", "family": "network"}


def options_of(given: Mapping[str, Any]) -> Options:
    """The options among a command's parameters, by name; those that the command has not keep their defaults."""
    found = {_FIELDS.get(name, name): value for name, value in given.items()}
    return Options(**{field.name: found[field.name] for field in fields(Options) if field.name in found})


def _positive(value: float | None) -> float | None:
    # `not >`: a NaN fails every comparison.
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a number above 0.")
    return value


def _fraction(value: float | None) -> float | None:
    if value is not None and not 0 <= value < 1:
        raise typer.BadParameter(f"{value} is not at least 0 and less than 1.")
    return value


NetworkArgument = Annotated[
    str,
    typer.Argument(
        metavar="NETWORK",
        help="Name of the network, for example resnet-50, vgg-16, unet or gpt-12x256 (12 layers, width 256). "
        "'outgrow networks' lists them.",
        show_default=False,
    ),
]
ReportArgument = Annotated[
    str,
    typer.Argument(
        metavar="NETWORK|PLAN",
        help="Name of the network, or a file that Plan.save wrote; its name must end in .json.",
        show_default=False,
    ),
]
StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="NETWORK|FILE.py:FUNCTION",
        help="Name of the network, for example resnet-50, vgg-16, unet or gpt-12x256 (12 layers, width 256); "
        "'outgrow networks' lists them. Or a function of yours that makes a training step, for example "
        "my_model.py:make_step.",
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FOLDER",
        help="What to train on: digits (scikit-learn's), synthetic (random noise), text (the source of "
        "Python's standard library as bytes, for gpt networks), or a folder with one subfolder of images "
        "for each class, for example --data ./flowers.",
        show_default="digits; text for gpt networks",
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Samples in each step, for example 32.")]
Nproc = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Train in so many processes of this machine that exchange gradients after each step (data parallel). "
        "--batch and --budget are those of each process; each takes samples of its own.",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Height = width of the input in pixels, for gpt networks its length in tokens; for example 160.",
        show_default="the network's own",
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Training steps, for example 100.")]
Budget = Annotated[
    str | None,
    typer.Option(
        help="The most memory that parameters, gradients, optimizer state, activations and workspaces may "
        "take together at any moment of a step: bytes, a size such as 800MB or 1.5GiB, or a share of this "
        "machine's memory such as 40%. Not given: plain PyTorch.",
        show_default=False,
    ),
]
PlanBudget = Annotated[
    str | None,
    typer.Option(
        help="The most memory that the step may take at any moment: bytes, a size such as 800MB or 1.5GiB, "
        "or a share of the device's memory such as 40%.",
        show_default="the plain step's peak",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="How to decide what is kept and what is moved, for example vdnn-dyn; the README has a table.",
        show_default="auto, the best of all",
    ),
]
Budgets = Annotated[
    str,
    typer.Option(
        metavar="PERCENT,...",
        help="The budgets, as percentages of the peak of a plain step, with commas between them; 100 and more "
        "do not bind.",
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="The policies, with commas between them, for example auto,lru,vdnn-dyn; the README has a table.",
        show_default="all",
    ),
]
Measure = Annotated[
    bool,
    typer.Option("--measure", help="Train each pair for real as well, turn by turn with plain PyTorch."),
]
MeasuredSteps = Annotated[
    int, typer.Option(min=1, help="With --measure: steps that count of each pair, after its warm-up.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw time against peak into this file, a line for each policy: full where measured, dashed where "
        'predicted. .png, .svg or .pdf, for example time.png. Needs matplotlib: pip install "outgrow\\[plot]".',
        show_default="no plot",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw live bytes and the three lanes over the step into this file: .png, .svg or .pdf. Needs "
        'matplotlib: pip install "outgrow\\[plot]".',
        show_default="no picture",
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        min=1, help="Batches whose gradients add up before each step of the optimizer; --batch is that of each."
    ),
]
FollowedPlan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Follow this plan from the first step, one that 'outgrow tune --save-plan' or Plan.save wrote. A step "
        "that is not the plan's is recorded and planned for as ever.",
        show_default="no plan: the first steps are recorded",
    ),
]
SavedPlan = Annotated[
    Path | None,
    typer.Option(
        "--save-plan",
        metavar="FILE",
        help="Write the plan of the answer into this file, for 'outgrow train --plan' and 'outgrow report'; its name "
        "should end in .json.",
        show_default="not saved",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a report into this file, for example run.html: one page for any browser, without a network.",
        show_default="no report",
    ),
]
Perfetto = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the lanes as a Chrome trace into this file, for example step.json.gz, for ui.perfetto.dev or "
        "speedscope.app.",
        show_default="no trace",
    ),
]
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Where the report goes; what is there is replaced."),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Say on standard error when a step is recorded, planned or planned again, when memory runs out (a page "
        "fault), and when a step departs from its plan.",
    ),
]
Optimizer = Annotated[OptimizerName, typer.Option(help="The optimizer.")]
Momentum = Annotated[
    float | None,
    typer.Option(
        callback=_fraction,
        help="Momentum of sgd, from 0 (no momentum buffers) to less than 1.",
        show_default="0.9",
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr",
        callback=_positive,
        help="Learning rate, above 0, for example 0.05.",
        show_default="0.001 for sgd, 0.0003 for adamw",
    ),
]
Dtype = Annotated[
    DtypeName,
    typer.Option(help="Precision of forward and loss. bfloat16 means autocast: the parameters stay float32."),
]
ChannelsLast = Annotated[
    bool,
    typer.Option(
        "--channels-last",
        help="Keep model and images in torch.channels_last order, the channels of a pixel side by side: the CPU's "
        "convolutions then hold no rearranged copies of images. Takes less memory where images are large, and is "
        "often faster; losses differ in their last bits from those without it. Not for gpt networks.",
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Plan for another device, for example k40c, titan-x, v100, 'a100 80gb' or h200; "
        "'outgrow doctor' lists them.",
        show_default="this machine",
    ),
]
Workspace = Annotated[
    WorkspaceName | None,
    typer.Option(
        help="What convolutions may hold for their work on a GPU of --hardware: memory (nothing, at the slowest "
        "algorithm), speed (what the fastest wants), or dynamic (at each one the fastest that fits the bytes that "
        "are free right then).",
        show_default="the fastest, as if it held nothing",
    ),
]
TrainWorkspace = Annotated[
    WorkspaceName | None,
    typer.Option(
        help="With --device cuda: what convolutions may hold for their work. memory: the least; speed: the fastest "
        "algorithm comes first; dynamic: what is free. All three may differ from plain PyTorch in the last bits. "
        "They choose at each convolution with the extra outgrow\\[cudnn], by PyTorch's own search without.",
        show_default="what PyTorch takes by itself",
    ),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        help="Where to train; the budget is of that device's memory. A GPU is never taken unasked, as 'outgrow plan' "
        "without --hardware is for this machine's CPU.",
    ),
]
LimitsBudget = Annotated[
    str | None,
    typer.Option(
        help="The most memory that the step may take: bytes, a size such as 8GiB, or a share of the device's.",
        show_default="all of the device's",
    ),
]
What = Annotated[
    Literal["depth", "batch"],
    typer.Option(
        help="What grows, found to 1%: the depth of a family (resnet, vgg, gpt), or the batch of one network, where "
        "--batch does not matter."
    ),
]
FamilyArgument = Annotated[
    str,
    typer.Argument(
        metavar="FAMILY",
        help="With --what depth: resnet, vgg or gpt. With --what batch: a network, for example resnet-152.",
        show_default=False,
    ),
]
PaperArgument = Annotated[
    str,
    typer.Argument(metavar="PAPER", help="vdnn, superneurons, layrub or accudnn.", show_default=False),
]
TunedBudget = Annotated[
    str,
    typer.Option(
        help="The most memory that a step may take at any moment: bytes, a size such as 800MB or 1.5GiB, or a share "
        "of this machine's memory such as 40%.",
        show_default=False,
    ),
]
BaseBatch = Annotated[
    int,
    typer.Option("--batch", min=1, help="The batch that --lr was chosen for; the rate for another follows from it."),
]
Objective = Annotated[
    Literal["goodput", "throughput"],
    typer.Option(
        help="throughput: most samples per second. goodput: throughput times what a sample is still worth in a step "
        "of that many, by the noise of gradients."
    ),
]
NoiseScale = Annotated[
    float | None,
    typer.Option(
        callback=_positive,
        help="The gradient noise scale in samples, if it is known, for example 500.",
        show_default="measured",
    ),
]
MaxBatch = Annotated[
    int | None, typer.Option(min=1, help="Look at no larger batch, for example 256.", show_default="what fits")
]
Trials = Annotated[
    int,
    typer.Option(
        min=1,
        help="Most real runs beyond the base batch and the ends of the curve: of what is best, and of what may be.",
    ),
]
TuningPlot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw samples per second against batch into this file: .png, .svg or .pdf. Needs matplotlib: "
        'pip install "outgrow\\[plot]".',
        show_default="no plot",
    ),
]
SpillDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder on a disk for what does not fit, for example /var/tmp. Nothing is left in it.",
        show_default="the system's folder for temporary files",
    ),
]
AllowTmpfs = Annotated[
    bool,
    typer.Option("--allow-tmpfs", help="Accept a spill folder on tmpfs, although tmpfs is memory itself."),
]
Seed = Annotated[
    int,
    typer.Option(metavar="N", min=0, max=2**63 - 1, help="Seed of the weights and of the order of the data."),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result as one JSON object, the last line of standard output; all else goes to "
        "standard error. Sizes are in bytes, times in seconds.",
    ),
]
