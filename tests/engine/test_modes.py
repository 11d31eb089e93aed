"""Training mode and evaluation mode, which upstream sets in every step."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_pulse.engine.module import set_mode


class Frozen(torch.nn.BatchNorm1d):
    """Stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def test_a_mode_is_set_as_torch_sets_it() -> None:
    def made() -> torch.nn.Module:
        inner = torch.nn.Sequential(torch.nn.Dropout(), Frozen(2), torch.nn.Sequential(torch.nn.Dropout()))
        inner.train = lambda mode=True: inner  # type: ignore[assignment, method-assign]  # as some programs have it
        return torch.nn.Sequential(torch.nn.Dropout(), inner, Frozen(2), torch.nn.Sequential(torch.nn.Dropout()))

    for mode in (False, True, False):
        expected, found = made(), made()
        for one in (expected, found):
            next(m for m in one.modules() if isinstance(m, torch.nn.Dropout)).eval()
        expected.train(mode)
        set_mode(found, mode)
        assert [m.training for m in found.modules()] == [m.training for m in expected.modules()]
