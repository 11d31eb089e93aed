"""A host with fewer devices than ranks: the rank without one is told so, and processes of the CPU need none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed_pulse.engine.starting import start
from deepspeed_pulse.errors import ConfigError


@pytest.mark.parametrize(("kind", "place", "told"), [("cuda", 0, False), ("cuda", 1, True), ("cpu", 3, False)])
def test_a_rank_without_a_device_is_told(kind: str, place: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(device_name=lambda: kind, device_count=lambda: 1)
    monkeypatch.setattr(start, "get_accelerator", lambda: accelerator)
    monkeypatch.setenv("LOCAL_RANK", str(place))
    if not told:
        start.check_device()
        return
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK is 1: expected one of the 1 devices \(cuda\).*DS_ACCELERATOR=cpu"
    ):
        start.check_device()
