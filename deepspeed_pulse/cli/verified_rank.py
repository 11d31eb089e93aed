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

    workload = find_workload(task["model"], **task["sizes"])
    found = [layer.name for layer in workload.graph.layers]
    if found != task["layers"]:
        pairs = enumerate(zip(task["layers"], found, strict=False))
        first = next((f", layer {i} is {b!r} instead of {a!r}" for i, (a, b) in pairs if a != b), "")
        raise ConfigError(
            f"{task['model']}: expected the {len(task['layers'])} layers of the profile, found {len(found)} layers"
            f"{first}; give the model that was profiled, with its --granularity"
        )
    return step_times(workload, task["config"], **task["steps"])


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of the process group
