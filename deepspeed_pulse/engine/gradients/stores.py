"""Where the gradients lie that are summed over data-parallel replicas: with the parameters, or in an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed_pulse.errors import ConfigError


class OwnGradients:
    """Gradients where autograd leaves them."""

    def __init__(self, names: dict[torch.nn.Parameter, str]) -> None:
        self._names = names
        self._versions: dict[int, tuple[torch.nn.Parameter, int]] = {}
        """By the parameter's id."""
        self.may_change = True
        """The tensor itself may be summed: nothing else writes to it."""

    def begin(self) -> None:
        self._versions.clear()

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The gradient; zeros where this replica's batch did not use the parameter, as others may have."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout is not torch.strided:
            raise ConfigError(
                f"parameter {self._names[parameter]} has a sparse gradient, but no module of this rank says so: "
                "expected a dense one; set sparse = True on the module that makes it, as torch.nn.Embedding does"
            )
        return parameter.grad

    def collect(self, parameter: torch.nn.Parameter) -> None:
        """A backward that is not over yet has given its gradient."""

    def becomes(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> bool:
        """Whether a part of a bucket is the gradient from now on, so that nothing has to be copied back."""
        gradient = self.of(parameter)
        if part.dtype != gradient.dtype or part.stride() != gradient.stride():
            return False
        parameter.grad = part
        return True

    def beside_bytes(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        """What backwards made of these that is live beside :meth:`of` until they are remembered."""
        return 0

    def remember(self, parameter: torch.nn.Parameter) -> None:
        """From now on no backward may add to it."""
        assert parameter.grad is not None
        self._versions[id(parameter)] = parameter, parameter.grad._version

    def wrote(self, parameter: torch.nn.Parameter) -> None:
        """Its sum was put there."""
        if id(parameter) in self._versions:
            self._versions[id(parameter)] = parameter, self._versions[id(parameter)][1] + 1

    def changed(self) -> list[torch.nn.Parameter]:
        """Those of which one got a gradient after it was remembered: parts of a bucket cannot be told apart."""
        return [p for p, v in self._versions.values() if p.grad is None or p.grad._version != v]


class MasterGradients:
    """What DeepSpeed's bf16 optimizer accumulates gradients in; the parameters' own are cleared before each backward.

    After each backward it adds to all it has a new gradient for, so what is on the wire has to be a copy.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = {
            parameter: (group, at)
            for group, held in enumerate(optimizer.bf16_groups)
            for at, parameter in enumerate(held)
        }
        self._buffers: dict[torch.nn.Parameter, torch.Tensor] = {
            parameter: buffer
            for group, buffers in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            for parameter, buffer in zip(group, buffers, strict=True)
        }
        self._ended: list[torch.nn.Parameter] = []
        self.may_change = False

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._buffers

    def begin(self) -> None:
        self._ended.clear()

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._buffers[parameter]

    @torch.no_grad()
    def collect(self, parameter: torch.nn.Parameter) -> None:
        optimizer = self._optimizer
        optimizer._update_hp_grad(parameter, *self._places[parameter], clear_lp_grads=False)

    def becomes(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> bool:
        return False

    def beside_bytes(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(p.grad.nbytes for p in parameters if p.grad is not None)

    def remember(self, parameter: torch.nn.Parameter) -> None:
        parameter.grad = None  # it is in the buffer already
        self._ended.append(parameter)

    def wrote(self, parameter: torch.nn.Parameter) -> None:
        pass

    def changed(self) -> list[torch.nn.Parameter]:
        return [p for p in self._ended if p.grad is not None]
