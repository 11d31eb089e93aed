"""The plan beside a checkpoint, and whether a checkpoint fits this job's plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from deepspeed_pulse.errors import PlanError
from deepspeed_pulse.ir.plan import Plan

PLAN_FILE = "pulse_plan.json"


def write_plan(save_dir: str, tag: str, plan: Plan) -> None:
    """Put the plan into a checkpoint's folder: written beside, then renamed."""
    path = Path(save_dir) / tag / PLAN_FILE
    beside = path.with_suffix(".tmp")
    beside.write_text(plan.to_json(), encoding="utf-8")
    os.replace(beside, path)


def check_plan(load_dir: str, tag: Any, plan: Plan) -> None:
    """Optimizer state is kept per rank, so it only fits the cuts and the placement it was written under.

    A folder that does not exist is left to upstream's own message.

    Raises:
        PlanError: the checkpoint was written under another plan, or without one.
    """
    latest = Path(load_dir) / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    path = Path(load_dir) / str(tag) / PLAN_FILE
    if tag is None or not path.parent.is_dir():
        return
    if not path.is_file():
        raise PlanError(
            f"{path.parent}: written without a plan, so its optimizer state belongs to other ranks; load weights only "
            "(load_optimizer_states=False) or resume with pulse off"
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    mine = plan.to_dict()
    for name in ("pipeline_ranks", "data_parallel", "placement", "boundaries"):
        if saved.get(name) != mine[name]:
            raise PlanError(
                f"{path}: {name}: the checkpoint was written with {saved.get(name)}, this job runs {mine[name]}; "
                'resuming under another plan is not supported yet: set "plan" in the "pulse" block to that file, or '
                "load weights only (load_optimizer_states=False)"
            )
