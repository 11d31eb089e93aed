"""One rank of a choice that ``ds_pulse tune --verify`` runs: ``python -m deepspeed_pulse.cli.verified_rank FOLDER``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import ConfigError, PulseError


def main() -> int:
    """Run the folder's task; the first rank writes the result. What went wrong is the last line of stderr."""
    folder = Path(sys.argv[1])
    try:
        times = _times(json.loads((folder / "task.json").read_text(encoding="utf-8")))
    except PulseError as problem:
        print(" ".join(str(problem).split()), file=sys.stderr, flush=True)
        return 1
    except Exception:  # an accelerator's, DeepSpeed's or the model's own
        traceback.print_exc()
        return 1
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(times), encoding="utf-8")
    return 0


def _times(task: dict[str, Any]) -> list[float]:
    from deepspeed_pulse.engine.verifying import step_times
    from deepspeed_pulse.models.catalogue.sources import find_workload

    workload = find_workload(
        task["model"],
        microbatch_size=task["microbatch_size"],
        dtype=task["dtype"],
        granularity=task["granularity"],
    )
    found = [layer.name for layer in workload.graph.layers]
    if found != task["layers"]:
        raise ConfigError(
            f"{task['model']}: expected the {len(task['layers'])} layers of the profile, found {len(found)} layers"
            f"{_first_difference(task['layers'], found)}; give the model that was profiled, with its --granularity"
        )
    return step_times(workload, task["config"], pipeline_ranks=task["pipeline_ranks"], steps=task["steps"])


def _first_difference(expected: list[str], found: list[str]) -> str:
    pairs = ((i, a, b) for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    first = next(pairs, None)
    return "" if first is None else f", layer {first[0]} is {first[2]!r} instead of {first[1]!r}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of the process group
