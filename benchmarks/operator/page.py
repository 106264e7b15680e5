"""What the operator's own page says beside the table, the plot and where the time goes; and the table beside peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Measurement

PLOT = Path("build/operator.png")
CPU = ": CPU of "


def text(rows: Sequence[Measurement]) -> str:
    """The part of the page under the table."""
    spent = _cpu(rows)
    lines = [
        "",
        "![Each figure against the bare client, and the processor time of an object](operator.png)",
        "",
        "A **bare client** is a process that sends the same requests and does nothing else: it makes the same objects, "
        "64 at a time, or watches pods and nodes and POSTs a replacement for each one that goes. It is what the API "
        "server allows on this machine at that moment. Compare ratios: absolute times change with what else runs on "
        "the machine.",
        "",
        "A pod that is lost, or fails, by itself costs three writes: the pod, a status, and an event. The status waits "
        "up to 2 s for the replacement to run, so that it tells of both; if that takes longer, it is told with the "
        "next telemetry, unless the phase changes. Pods that failed are kept for their logs, the last ten of a job: "
        "beyond these each costs a fourth write, the DELETE of the oldest. So does a pod that its node ended as it "
        "shut down, which would else be shown as failed: where such pods are left, as on GKE, the Node object stays, "
        "so that Kubernetes collects none of them. Losses that follow each other share statuses and events.",
    ]
    if total := sum(spent.values()):
        ours = spent.get("the operator", 0.0)
        words = ", ".join(
            f"{name} {ms:.2g} ms" for name, ms in sorted(spent.items(), key=lambda each: -each[1])
        )
        lines += [
            "",
            "## Where the time goes",
            "",
            f"Making one object takes {total:.2g} ms of processor time in all: {words}. The operator's own part is "
            f"{ours / total:.0%}, and one process of it could make {1000 / ours:.0f} objects a second. The rest is the "
            "API server's and etcd's: a POST, the watches that are told of it, and what scheduler and controllers "
            "write about it.",
        ]
    return "\n".join(lines) + "\n"


def beside(rows: Sequence[Measurement], versions: str, when: str) -> str:
    """The table of the page beside peers: a column for each system, whose name is the first word of its rows."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        system, _, what = row.name.partition(": ")
        cells.setdefault(what, {})[system] = f"{float(f'{row.value:.3g}'):g} {row.unit}".strip()
    systems = list(dict.fromkeys(row.name.partition(":")[0] for row in rows))
    lines = [f"Against {versions}; measured at {when}.", ""]
    lines += [f"| what | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for what, values in cells.items():
        lines.append(f"| {what} | {' | '.join(values.get(system, '–') for system in systems)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Measurement]) -> None:
    """Ratios to the bare client, and the processor time of an object, by process."""
    from matplotlib.figure import Figure  # slow to import; a Figure has no global state

    ratios = [row for row in rows if row.unit == "x" and "bare client" in row.against]
    figure = Figure(figsize=(11, 0.5 * len(ratios) + 2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    names = [row.name.removesuffix(", ratio") for row in ratios]
    left.barh(names, [row.value for row in ratios], color="#4c78a8")
    left.axvline(1.0, color="#333333", linestyle="--")
    left.set_xlabel("the operator / a bare client")
    left.invert_yaxis()
    below = 0.0
    for name, ms in _cpu(rows).items():
        right.bar(["one object"], [ms], bottom=below, label=name)
        below += ms
    right.set_ylabel("processor time, ms")
    right.legend(fontsize="small")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def _cpu(rows: Sequence[Measurement]) -> dict[str, float]:
    """Milliseconds of processor time for one object, by process."""
    named = {row.name.partition(CPU)[2]: row.value for row in rows if CPU in row.name and row.unit == "ms"}
    return {name.removesuffix(" for each object"): ms for name, ms in named.items()}
