"""Figures of a case: put together, kept as JSON, written as Markdown and drawn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import headline
import readme
from slow_network.cases import Case

from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile

KEPT = 2
"""Runs of a case, the newest first: the second shows how well the first can be reproduced."""
BEGIN, END = "<!-- figures: written by run.py -->", "<!-- end of figures -->"
SIDES = (
    "1F1B, stock",
    "1F1B",
    "DualPipeV, stock",
    "DualPipeV",
    "interleaved",
    "ZB-V",
    "ZeRO-2",
    "DDP",
    "linear",
    "wave",
    "auto",
    "tuned",
)

RELAYED = ("1F1B", "DualPipeV", "interleaved", "ZB-V")
OURS = ("linear", "wave", "auto", "tuned")

Found = dict[str, Any]
Promise = tuple[str, float, str, bool]
"""What is promised, what was found, the target, and whether it is kept."""


def summary(case: Case, profile: Profile, state: Found, results: Mapping[str, Found], stage_ms: float) -> Found:
    """One run of a case as plain data. A side that runs another's plan has its figures."""
    sides: dict[str, Found] = {}
    for name, result in results.items():
        reasons = dict.fromkeys(reason for tries in result["failed"].values() for reason in tries)
        sides[name] = {"failed": "; ".join(reasons)} if reasons else {}
        for speed, steps in result["speeds"].items():
            sides[name][speed] = _side(case, steps)
            if name in state["ours"][speed]:
                sides[name][speed] |= _against_plan(state["ours"][speed][name], sides[name][speed], steps)
    for speed, ours in state["ours"].items():
        for name, side in ours.items():
            other = side.get("same_as")
            if other and speed in sides[other]:
                sides.setdefault(name, {})[speed] = {**sides[other][speed], "same_as": other}
    return {
        "model": case.name,
        "title": case.title,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "samples_per_microbatch": case.samples,
        "stage_ms": stage_ms,
        "time_scale": case.time_scale,
        "byte_scale": case.byte_scale,
        "param_bytes": profile.param_bytes,
        "speeds": state["speeds"],
        "sides": sides,
    }


def _side(case: Case, steps: list[Found]) -> Found:
    """``idle``: share of the ranks' time without work, work that is done again not counted."""
    times = [step["step_ms"] for step in steps]
    step_ms, samples = statistics.median(times), case.microbatches * case.samples
    work_ms = case.work_ms * case.microbatches
    return {
        "step_ms": step_ms,
        "lowest_ms": min(times),
        "highest_ms": max(times),
        "steps": len(times),
        "samples_per_second": samples / step_ms * 1e3,
        "mb_per_sample": statistics.median(sum(step["card_bytes"]) for step in steps) / samples / 1e6,
        "idle": 1 - work_ms / (case.ranks * step_ms),
        "work": statistics.median(sum(step["slept_ms"]) for step in steps) / work_ms,
    }


def _against_plan(side: Found, found: Found, steps: list[Found]) -> Found:
    plan, last = Plan.from_json(side["options"]["plan"]), steps[-1]
    assert plan.estimate is not None
    return {
        "plan": side["told"],
        "planned_ms": plan.estimate.step_ms,
        "bound_ms": plan.estimate.lower_bound_ms,
        "measured_over_planned": found["step_ms"] / plan.estimate.step_ms,
        "peak_over_planned": max(last["peak_live_bytes"]) / max(plan.estimate.peak_bytes),
        "p2p_bytes": by_kind(last["p2p_bytes"]),
    }


def by_kind(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Bytes of hidden states, values and their gradients over all ranks."""
    kinds: dict[str, int] = {}
    for channel, count in (entry for rank in ranks for entry in rank.items()):
        kind = channel.partition(":")[0]
        kinds[kind] = kinds.get(kind, 0) + count
    return kinds


# -- promises ------------------------------------------------------------------------------------


def promises(found: Found) -> Iterator[Promise]:
    """What is promised of the sides that were run, what was found, the target, and whether it is kept."""
    slow, free = "ratio 2.5", "unlimited"
    pipelines = [name for name in ("1F1B", "DualPipeV") if name in found["sides"]]
    if found["model"] in ("uvit", "hunyuan") and "1F1B" in pipelines:
        yield _least(f"{slow}: wave over 1F1B", gain(found, slow, "1F1B"), 2.9)
    if len(pipelines) == 2:
        best = min(gain(found, slow, name) for name in pipelines)
        yield _least(f"{slow}: wave over the best DeepSpeed pipeline", best, 2.5)
    if found["ranks"] == 4 and "linear" in found["sides"]:
        yield _least(f"{slow}: wave over linear with direct sends", gain(found, slow, "linear"), 1.10)
    if "1F1B" in pipelines:
        yield _least(f"{free}: wave over 1F1B", gain(found, free, "1F1B"), 1.1)
    for speed in found["speeds"]:
        for name in ("wave", "auto"):
            yield from _over_the_fastest(found, speed, name, RELAYED, 1.0)
        yield from _over_the_fastest(found, speed, "tuned", [name for name in SIDES if name != "tuned"], 0.99)
        yield from _as_planned(found, speed)


def of_all(cases: Iterable[Found]) -> Iterator[Promise]:
    """What is promised of all cases together, those of earlier runs, too."""
    measured = [found for found in cases if all(_has(found, name, "unlimited") for name in ("ZB-V", "wave"))]
    gains = [gain(found, "unlimited", "ZB-V") for found in measured]
    if gains:
        yield _least(f"unlimited: wave over ZB-V, mean of {len(gains)} cases", statistics.mean(gains), 1.05)


def _over_the_fastest(found: Found, speed: str, name: str, others: Sequence[str], least: float) -> Iterator[Promise]:
    measured = [other for other in others if _has(found, other, speed)]
    if measured and _has(found, name, speed):
        fastest = min(measured, key=lambda other: found["sides"][other][speed]["step_ms"])
        yield _least(f"{speed}: {name} over the fastest, {fastest}", gain(found, speed, fastest, name), least)


def _as_planned(found: Found, speed: str) -> Iterator[Promise]:
    for name in OURS:
        if _has(found, name, speed):
            ratio = found["sides"][name][speed]["measured_over_planned"]
            yield f"{speed}: {name}, measured over planned", ratio, "<= 1.05", ratio <= 1.05


def misses(found: Found) -> list[str]:
    """Of a run: sides that failed, also in one of several rounds, and promises that are not kept; a line each."""
    failed = [f"{name} failed: {side['failed']}" for name, side in found["sides"].items() if "failed" in side]
    return failed + missed(promises(found))


def missed(promised: Iterable[Promise]) -> list[str]:
    """Those that are not kept, a line each."""
    return [f"{text}: {value:.3f}, target {target}" for text, value, target, kept in promised if not kept]


def _least(text: str, value: float, least: float) -> Promise:
    return text, value, f">= {least:g}", value >= least


def _has(found: Found, name: str, speed: str) -> bool:
    return speed in found["sides"].get(name, {})


def gain(found: Found, speed: str, over: str, of: str = "wave") -> float:
    """How many times as fast one side is as another; 0 where one was not measured."""
    if not _has(found, over, speed) or not _has(found, of, speed):
        return 0.0
    ratio: float = found["sides"][over][speed]["step_ms"] / found["sides"][of][speed]["step_ms"]
    return ratio


# -- Markdown ------------------------------------------------------------------------------------


def table(found: Found) -> str:
    """All sides of a case, and ours against their plans."""
    return "\n".join([*_head(found), *_all_sides(found), "", *_plans(found), "", _promises(promises(found))])


def _head(found: Found) -> Iterator[str]:
    yield f"### {found['title']}, {found['ranks']} ranks, {found['microbatches']} microbatches\n"
    reached = found["speeds"]
    for name, speed in reached.items():
        if "mbit" in speed:
            real = speed["mbit"] / 8e3 * found["time_scale"] / found["byte_scale"]
            yield (
                f"- {name}: links of {speed['mbit']:.1f} Mbit/s, calibrated at {speed['ratio']:.2f}; before scaling "
                f"that is {real:.3g} GB/s for a device of 312 TFLOP/s"
            )
    yield ""


def _all_sides(found: Found) -> Iterator[str]:
    speeds = list(found["speeds"])
    yield (
        "| side | " + " | ".join(f"{s}: samples/s | step, ms | wave over it | idle" for s in speeds) + " | MB/sample |"
    )
    yield "|---" * (4 * len(speeds) + 2) + "|"
    for name in sorted(found["sides"], key=SIDES.index):
        side = found["sides"][name]
        if "failed" in side and not any(s in side for s in speeds):
            yield f"| {name} | failed: {side['failed']} |" + " |" * (4 * len(speeds))
            continue
        cells = [_cells(found, name, speed) for speed in speeds]
        repeated = max((side[s]["work"] for s in speeds if s in side), default=1.0)
        note = f" (work x {repeated:.1f})" if repeated > 1.01 else ""
        note += f" (failed in part: {side['failed']})" if "failed" in side else ""
        mb = max((side[s]["mb_per_sample"] for s in speeds if s in side), default=0.0)
        yield f"| {name}{note} | " + " | ".join(cells) + f" | {mb:.2f} |"


def _cells(found: Found, name: str, speed: str) -> str:
    if not _has(found, name, speed):
        return "- | - | - | -"
    side = found["sides"][name][speed]
    spread = f"{side['step_ms']:.0f} ({side['lowest_ms']:.0f} to {side['highest_ms']:.0f})"
    over = gain(found, speed, name)
    return f"{side['samples_per_second']:.1f} | {spread} | {over:.2f} | {side['idle']:.0%}"


def _plans(found: Found) -> Iterator[str]:
    kinds = "KiB per microbatch, by kind"
    yield f"| ours | speed | plan | planned, ms | measured / planned | bound, ms | peak / planned | {kinds} |"
    yield "|---" * 8 + "|"
    for name in OURS:
        for speed in found["speeds"]:
            if not _has(found, name, speed):
                continue
            side = found["sides"][name][speed]
            kinds = ", ".join(
                f"{kind} {count / found['microbatches'] / 1024:.0f}"
                for kind, count in sorted(side["p2p_bytes"].items())
            )
            told = f"the plan of {side['same_as']}" if "same_as" in side else side["plan"]
            yield (
                f"| {name} | {speed} | {told} | {side['planned_ms']:.0f} | {side['measured_over_planned']:.3f} "
                f"| {side['bound_ms']:.0f} | {side['peak_over_planned']:.3f} | {kinds} |"
            )


def _promises(promised: Iterable[Promise]) -> str:
    lines = ["| promise | found | target | |", "|---|---|---|---|"]
    lines += [
        f"| {text} | {value:.3f} | {target} | {'kept' if kept else 'MISSED'} |"
        for text, value, target, kept in promised
    ]
    return "\n".join(lines)


# -- files ---------------------------------------------------------------------------------------


def key(found: Found) -> str:
    return f"{found['model']}-{found['ranks']}"


def keep(found: Found, path: Path) -> None:
    """Merge a run into the figures, once; those of other cases stay."""
    figures = load(path)
    runs = figures.get(key(found), [])
    if json.loads(json.dumps(found)) not in runs:
        figures[key(found)] = [found, *runs][:KEPT]
        write_whole(path, json.dumps(figures, indent=1, sort_keys=True) + "\n")


def load(path: Path) -> dict[str, list[Found]]:
    figures: dict[str, list[Found]] = json.loads(path.read_text()) if path.exists() else {}
    return figures


def write(path: Path) -> None:
    """The picture of a file of figures, and README.md where there is one beside it; for our own also the project's."""
    figures, folder = load(path), path.parent
    newest = [figures[case][0] for case in sorted(figures)]
    parts = [_reproduced(figures), _promises(of_all(newest)), *map(table, newest)] if newest else []
    traffic = folder / "traffic.json"
    if traffic.exists():
        parts.insert(0, traffic_table(json.loads(traffic.read_text())))
    if newest:
        draw(newest, path.with_suffix(".png"))
    if (folder / "README.md").exists():
        readme.write(folder / "README.md", "\n\n".join(parts), BEGIN, END)
    if path.resolve() == headline.HERE / "slow_network" / "figures.json":
        headline.write()


def traffic_table(found: list[Found]) -> str:
    """MiB per sample, forward and backward, at published sizes."""
    lines = ["| MiB per sample | ranks | relayed | direct | wave | less than relayed | than direct | wave's payload |"]
    lines.append("|---" * 8 + "|")
    for case in found:
        relayed, direct, wave = (case["sides"][name]["wire_mib"] for name in ("relayed", "direct", "wave"))
        payload = ", ".join(f"{kind} {mib:.2f}" for kind, mib in case["sides"]["wave"]["payload_mib"].items())
        lines.append(
            f"| {case['title']} | {case['ranks']} | {relayed:.2f} | {direct:.2f} | {wave:.2f} "
            f"| {1 - wave / relayed:.1%} | {1 - wave / direct:.1%} | {payload} |"
        )
    return "\n".join(lines)


def _reproduced(figures: Mapping[str, list[Found]]) -> str:
    lines = ["| case | wave over 1F1B, ratio 2.5 | 1.5 | unlimited | wave over DualPipeV, ratio 2.5 | over linear |"]
    lines.append("|---" * 6 + "|")
    for case in sorted(figures):
        for number, found in enumerate(figures[case]):
            which = " (run before)" if number else ""
            gains = [gain(found, speed, "1F1B") for speed in ("ratio 2.5", "ratio 1.5", "unlimited")]
            gains += [gain(found, "ratio 2.5", name) for name in ("DualPipeV", "linear")]
            lines.append(f"| {case}{which} | " + " | ".join(f"{value:.2f}" for value in gains) + " |")
    return "\n".join(lines)


def draw(cases: list[Found], path: Path) -> None:
    """Samples/s of every side over those of 1F1B on unlimited links, a panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2
    rows = -(-len(cases) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(13, 3.4 * rows), squeeze=False, layout="constrained")
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, found in zip(panels.flat, cases, strict=False):
        _panel(panel, found)
    panels.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(panel: Any, found: Found) -> None:
    names = [name for name in SIDES if any(_has(found, name, speed) for speed in found["speeds"])]
    unit = found["sides"].get("1F1B", {}).get("unlimited", {}).get("samples_per_second", 1.0)
    shades = ("#c6d5e8", "#6f9bc8", "#1f4e79")
    for number, (speed, shade) in enumerate(zip(found["speeds"], shades, strict=True)):
        heights = [
            found["sides"][name][speed]["samples_per_second"] / unit if _has(found, name, speed) else 0.0
            for name in names
        ]
        places = [index + (number - 1) * 0.27 for index in range(len(names))]
        panel.bar(places, heights, width=0.27, color=shade, label=speed)
    panel.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    panel.set_ylabel("samples/s, 1F1B on unlimited links = 1", fontsize=8)
    panel.set_title(f"{found['title']}, {found['ranks']} ranks", fontsize=9)
    panel.grid(axis="y", alpha=0.3)
