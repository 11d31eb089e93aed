"""Settings of DeepSpeed that depend on the device."""

from __future__ import annotations

import pytest
import torch

from deepspeed_pulse.engine.starting import supported
from deepspeed_pulse.errors import ConfigError


def test_a_logger_that_waits_for_every_message_is_refused_where_waiting_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supported, "runs_at_once", lambda device: device.type == "cpu")
    supported.check_logger(torch.device("cpu"), 4)
    supported.check_logger(torch.device("cuda"), 1)
    with pytest.raises(ConfigError, match=r"comms_logger\.enabled: expected false, found true"):
        supported.check_logger(torch.device("cuda"), 4)
