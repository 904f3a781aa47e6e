"""Fills the tables of benchmarks.md from the files in benchmarks/results, each row with the command that made it.

MkDocs calls `on_page_markdown` for each page; it replaces `<!-- figures: NAME -->`. A file that is made anew changes
the page, and nobody has to copy numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_MARK = re.compile(r"<!-- figures: (\w+) -->")

Figures = Mapping[str, Any]
_Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its tables; MkDocs' hook."""
    return _MARK.sub(lambda mark: _TABLES[mark[1]](), markdown)


def curve() -> str:
    """Outgrow at shares of the plain peak."""
    rows = []
    for name, figures in _files("pareto-*.json"):
        for point in figures.get("curve", ()):
            time = point.get("time")
            what = (_setting(figures), f"{point['share']:.0%}", _mib(point["budget_bytes"]))
            if time is None:
                rows.append((*what, "does not fit", "", "", name))
            else:
                times = (f"{time['over_plain']:.2f}", f"{time['over_plain_heap_kept']:.2f}")
                rows.append((*what, _mib(point["peak_bytes"]), *times, name))
    head = ("network", "share", "budget", "measured peak", "time over plain", "over plain, heap kept", "file")
    return _table(head, rows) + "\n\n" + _commands(_files("pareto-*.json"), "curve", _pareto)


def peers() -> str:
    """Outgrow at the measured peaks of what else there is."""
    rows = []
    for name, figures in _files("pareto-*.json"):
        for peer in figures.get("peers", ()):
            ours = (peer.get("ours") or {}).get("time")
            if ours is None or peer.get("ours_over_peer") is None:
                continue
            of_peer = (f"{peer['time']['over_plain']:.2f}", f"{ours['over_plain']:.2f}")
            peak = f"{_mib(peer['peak_bytes'])} ({peer['share']:.0%})"
            rows.append((_setting(figures), peer["name"], peak, *of_peer, f"{peer['ours_over_peer']:.2f}", name))
    head = ("network", "peer", "its peak", "its time over plain", "ours over plain", "ours over its time", "file")
    return _table(head, rows) + "\n\n" + _commands(_files("pareto-*.json"), "peers", _pareto)


def gpu() -> str:
    """Outgrow on a GPU: time beside peers, peaks within budgets, equality, and the network of 10,000 layers."""
    parts = []
    for name, figures in _files("cuda-*.json"):
        tables = [table(figures[section]) for section, table in _GPU_TABLES.items() if section in figures]
        if not tables:
            continue
        where = figures["environment"]
        note = f"{where['gpu']}, PyTorch {where['torch']}, {where['date']}; `{name}`: `{figures['command']}`"
        if "cut_short" in figures:
            note += f" (cut short {figures['cut_short']})"
        parts.append("\n\n".join([*(_table(head, rows) for head, rows in tables), note]))
    return "\n\n".join(parts)


def _gpu_time(measured: Sequence[Figures]) -> _Rows:
    rows = []
    for row in measured:
        peer = f"{row['peer_over_plain']:.2f}" if "peer_over_plain" in row else ""
        ours = f"{row['ours_over_plain']:.3f}" if "ours_over_plain" in row else _failure(row)
        what = (row["network"], str(row["batch"]), row["peer"], _mib(row["budget"]))
        if row.get("ours_is"):
            ours += f" ({row['ours_is']})"
        rows.append((*what, f"{row['share']:.0%}", peer, ours))
    head = ("network", "batch", "peer", "budget", "of the plain peak", "peer over plain", "ours over plain")
    return head, rows


def _gpu_budgets(measured: Sequence[Figures]) -> _Rows:
    rows = []
    for row in measured:
        what = (row["spec"]["network"], str(row["spec"]["batch"]), _mib(row.get("budget", 0)))
        held = row.get("peak_share"), row.get("reserved_share")
        rows.append((*what, *(_failure(row) if share is None else f"{share:.3f}" for share in held)))
    return ("network", "batch", "budget", "peak of it, first step included", "reserved of it"), rows


def _gpu_equality(measured: Sequence[Figures]) -> _Rows:
    rows = []
    for row in measured:
        said = {True: "equal", False: "DIFFERS", None: _failure(row)}[row.get("equal")]
        spec = row.get("spec", {"network": row.get("network"), "policy": ""})
        rows.append((spec["network"], spec["policy"], f"{row.get('share', 0):.0%}", said))
    return ("network", "policy", "of the plain peak", "20 steps, to the bit"), rows


def _gpu_closeness(measured: Sequence[Figures]) -> _Rows:
    rows = []
    for row in measured:
        apart = [_failure(row) if (far := row.get(key)) is None else f"{far:.1e}" for key in ("apart", "plain_apart")]
        rows.append((row["spec"]["network"], f"{row['share']:.0%}", *apart))
    return ("network", "of the plain peak", "gradients from plain ones", "plain ones from themselves"), rows


def _gpu_overlap(measured: Sequence[Figures]) -> _Rows:
    rows = []
    for row in measured:
        hidden = f"{row['hidden_share']:.2f}" if "hidden_share" in row else _failure(row)
        rows.append((row["policy"], f"{row['share']:.0%}", hidden))
    return ("policy", "of the plain peak", "hidden, of what the simulator hides of the copies' time"), rows


def _gpu_workspaces(measured: Sequence[Figures]) -> _Rows:
    rows = []
    for row in measured:
        ours = f"{row['ours_over_plain']:.3f}" if "ours_over_plain" in row else _failure(row)
        rows.append((row["workspace"] or "left out", f"{row['share']:.0%}", ours))
    return ("workspace", "of the plain peak", "ours over plain"), rows


def _gpu_deep(measured: Figures) -> _Rows:
    rest = measured["rest"]
    times = (f"{rest['summary']['step_seconds']:.1f} s", f"{rest['seconds']:.1f} s")
    row = ("resnet-2504, batch 16", _mib(rest["summary"]["budget_bytes"]), _mib(rest["peak_allocated"]), *times)
    return ("network", "budget", "peak", "the last of four steps", "with planning, on average"), [row]


def _front(ways: Sequence[Figures]) -> list[tuple[float, float]]:
    """Of the ways of a pass those of which none holds less and is faster, the largest first."""
    pairs = sorted((way["workspace_megabytes"], way["milliseconds"]) for way in ways)
    front: list[tuple[float, float]] = []
    for pair in pairs:
        if not front or pair[1] < front[-1][1] * 0.95:  # else it is hardly worth its bytes
            front.append(pair)
    return front[::-1]


_GPU_TABLES: Mapping[str, Callable[[Any], _Rows]] = {
    "time": _gpu_time,
    "budgets": _gpu_budgets,
    "equality": _gpu_equality,
    "closeness": _gpu_closeness,
    "overlap": _gpu_overlap,
    "workspaces": _gpu_workspaces,
    "deep": _gpu_deep,
}


def ways() -> str:
    """What convolutions may hold on a GPU, and what they take for it."""
    name, figures = _files("cuda-*-ways.json")[0]
    rows = []
    for shape in figures["ways"]:
        what = f"{shape['batch']} x {shape['channels_in']} x {shape['size']}^2, {shape['channels_out']} of"
        what = f"{what} {shape['window']}^2 / {shape['stride']}, {shape['order']}"
        for kind, known in shape["passes"].items():
            rows.append((what, kind, " · ".join(f"{size:,.0f}: {time:.2f}" for size, time in _front(known))))
    where = figures["environment"]
    note = f"{where['gpu']}, PyTorch {where['torch']}, cuDNN {where['cudnn']}, {where['date']}; `{name}`"
    return _table(("convolution", "pass", "megabytes of workspace: milliseconds"), rows) + "\n\n" + note


def deep() -> str:
    """The network of 10,000 layers."""
    _, figures = _files("cpu-resnet-2504.json")[0]
    result = figures["result"]
    first, second = result["step_seconds"][:2]
    rows = [
        ("budget", _mib(result["budget_bytes"])),
        ("highest live bytes of all steps", _mib(result["highest_peak_bytes"])),
        ("growth of the resident set", _mib(result["rss_peak_bytes"])),
        ("the first step, recorded", f"{first:.0f} s"),
        ("the second", f"{second:.0f} s"),
        ("planning", f"{result['plan_seconds']:.0f} s"),
    ]
    return _table(("what", "figure"), rows) + f"\n\n```sh\n{figures['command']}\n```"


def equality() -> str:
    """How many pairs of network and policy were equal."""
    name, figures = _files("equality.json")[0]
    tried = [row for row in figures["rows"] if row["equal"] is not None]
    said = (
        f"{sum(row['equal'] for row in tried)} of {len(tried)} pairs equal"
        f" ({len({row['network'] for row in tried})} networks, {len({row['policy'] for row in tried})} policies;"
        f" {figures['environment']['date']}),"
        f" {sum(bool(row['within_budget']) for row in tried)} within their budgets."
    )
    return f"{said}\n\n```sh\npython benchmarks/equality.py --output benchmarks/results/{name}\n```"


def predictions() -> str:
    """The summary of predicted against measured."""
    name, figures = _files("cpu-predictions.json")[0]
    summary = figures["summary"]
    rows = [
        ("pairs of network and budget", str(summary["rows"])),
        ("peaks within 2%", str(summary["peaks_within_2_percent"])),
        ("worst peak, measured over predicted", f"{summary['worst_peak_ratio']:.3f}"),
        ("step times within 10%", str(summary["times_within_10_percent"])),
        ("worst step time, measured over predicted", f"{summary['worst_time_ratio']:.2f}"),
    ]
    note = figures["environment"].get("note")
    command = f"```sh\npython benchmarks/predictions.py --output benchmarks/results/{name}\n```"
    return "\n\n".join([_table(("what", "figure"), rows), *([note] if note else []), command])


def planning() -> str:
    """`auto` over the lower bound, machine by machine and network by network."""
    name, figures = _files("planning.json")[0]
    rows = []
    feasible = [row for row in figures["rows"] if row["auto_feasible"]]
    for machine, network in dict.fromkeys((row["machine"], row["network"]) for row in feasible):
        ours = [row for row in feasible if (row["machine"], row["network"]) == (machine, network)]
        worst = max(ours, key=lambda row: row["auto_step_seconds"] / row["least_step_seconds"])
        ratio = worst["auto_step_seconds"] / worst["least_step_seconds"]
        longest = max(row["plan_seconds"] for row in ours)
        rows.append((machine, network, str(len(ours)), f"{ratio:.3f}", f"{worst['share']:.0%}", f"{longest:.1f} s"))
    head = ("machine", "network", "budgets", "worst time over the bound", "at", "longest planning")
    command = f"```sh\npython benchmarks/planning.py --output benchmarks/results/{name}\n```"
    return f"{_table(head, rows)}\n\n{command}"


def floors() -> str:
    """The least budget of each network beside what a step cannot do without."""
    _, figures = _files("planning.json")[0]
    rows = []
    for floor in figures["floors"]:
        least, needed = floor["least_budget_bytes"], floor["state_bytes"] + floor["largest_working_set_bytes"]
        rows.append((floor["network"], _mib(least), _mib(needed), f"{least / needed:.2f}"))
    return _table(("network", "least budget", "training state and the largest working set of one op", "ratio"), rows)


def tuning() -> str:
    """The tuner's answers beside all batches that fit, and what it had predicted of them."""
    name, figures = _files("cpu-tuning.json")[0]
    rows = []
    for result in figures["results"]:
        judged = result.get("named", result["sizes"])  # in many turns, where that was done
        told = (f"{size['batch']}{'' if size['foretold'] else '*'}: {size['ratio']:.2f}" for size in judged)
        rows.append(
            (
                f"{result['network']}, size {result['image_size']}, {_mib(result['budget_bytes'])}",
                f"{result['plain_batch']} and {result['largest_batch']}",
                _choice(result),
                ", ".join(told),
                f"{result['choice_peak_bytes'] / result['budget_bytes']:.3f}",
            )
        )
    head = (
        "network, budget",
        "largest batch, plain and ours",
        "its choice: throughput, of the best one's",
        "predicted over measured throughput, by batch",
        "peak of 20 steps of its choice, over the budget",
    )
    note = figures["environment"].get("note")
    command = f"```sh\npython benchmarks/tuning.py --output benchmarks/results/{name}\n```"
    return "\n\n".join([_table(head, rows), *([note] if note else []), command])


def _choice(result: Figures) -> str:
    """Sizes that came close raced once more in some runs: that final counts there, and the first race is told too."""
    first = f"{result['best_share']:.3f} of {result['best_batch']}'s"
    final = result.get("final")
    if final is None:
        return f"{result['chosen_batch']}: {first}"
    return (
        f"{result['chosen_batch']}: {final['best_share']:.3f} of {final['best_batch']}'s ({first} before the final)"
    )


_TABLES: Mapping[str, Callable[[], str]] = {
    "curve": curve,
    "peers": peers,
    "gpu": gpu,
    "ways": ways,
    "deep": deep,
    "equality": equality,
    "predictions": predictions,
    "planning": planning,
    "floors": floors,
    "tuning": tuning,
}


def _failure(row: Figures) -> str:
    """How a session failed, in two words: where it said what it needs at least, the budget was too small."""
    return "does not fit" if row.get("least_bytes") else "failed"


def _files(pattern: str) -> list[tuple[str, Figures]]:
    return [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob(pattern))]


def _setting(figures: Figures) -> str:
    momentum, date = figures.get("momentum"), figures["environment"]["date"]
    parts = [
        f"{figures['network']}, batch {figures['batch']}, size {figures['image_size']}",
        "channels last" if figures["channels_last"] else "",
        "" if momentum is None else f"momentum {momentum}",
        date,
    ]
    return ", ".join(part for part in parts if part)


def _pareto(figures: Figures, only: str) -> str:
    """The command that makes such a file."""
    shares = [f"{point['share']:.2f}".rstrip("0").rstrip(".") for point in figures.get("curve", ())]
    compiled = [peer["name"].split()[-1] for peer in figures.get("peers", ()) if peer["name"].startswith("compile")]
    if only == "peers" and len(compiled) == len(figures["peers"]):
        only = "compiled"
    momentum = figures.get("momentum")
    parts = [
        f"python benchmarks/pareto.py --only {only} --network {figures['network']} --batch {figures['batch']}",
        f"--image-size {figures['image_size']} --rounds {figures['rounds']} --steps {figures['steps_a_turn']}",
        f"--processes {figures['processes']}" if figures.get("processes", 1) > 1 else "",
        "--channels-last" if figures["channels_last"] else "",
        "" if momentum is None else f"--momentum {momentum}",
        f"--shares {' '.join(shares)}" if only == "curve" else f"--compile-ratios {' '.join(compiled)}".strip(),
        "" if figures["heap_of_peers"] == "default" else f"--heap {figures['heap_of_peers']}",
    ]
    return " ".join(part for part in parts if part)


def _commands(files: Iterable[tuple[str, Figures]], only: str, command: Callable[[Figures, str], str]) -> str:
    lines = [f"# {name}\n{command(figures, only)}" for name, figures in files if figures.get(only)]
    return "```sh\n" + "\n".join(lines) + "\n```"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
