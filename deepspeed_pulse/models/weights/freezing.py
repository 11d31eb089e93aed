"""Which parameters of a model train: chosen by patterns over their names."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from torch import nn

from deepspeed_pulse.errors import ConfigError


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Take the parameters whose names match a pattern out of training; returns their names.

    Patterns are those of :mod:`fnmatch` over the names of ``model.named_parameters()``, all names of a shared weight,
    where ``*`` matches dots too: ``freeze(unet, "down_blocks.*", "*.norm?.*")``. Layers borrow the model's parameters,
    so it may be called before or after ``to_layers``, but before the ``PipelineModule`` is made. A stage with nothing
    to train before it computes and sends no gradient of its input.

    Raises :class:`ConfigError` when a pattern matches nothing, with names close to it. Nothing was frozen then.
    """
    return _set(model, patterns, trainable=False)


def unfreeze(model: nn.Module, *patterns: str) -> list[str]:
    """Let the parameters whose names match a pattern train; returns their names. See :func:`freeze`.

    ``freeze(unet, "*")`` and then ``unfreeze(unet, "*.attn2.*")`` trains the cross attentions only.
    """
    return _set(model, patterns, trainable=True)


def _set(model: nn.Module, patterns: tuple[str, ...], *, trainable: bool) -> list[str]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"expected a model, found {type(model).__name__}; freeze before to_layers(), or with prepare= of "
            "from_pretrained() and from_config()"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not patterns:
        raise ConfigError('expected at least one pattern over parameter names, for example "down_blocks.*"')
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ConfigError(
                f"the pattern {pattern!r} matches none of the {len(parameters)} parameters of the "
                f"{type(model).__name__}; {_advice(pattern, list(parameters))}"
            )
    chosen = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in chosen:
        parameters[name].requires_grad_(trainable)
    return chosen


def _advice(pattern: str, names: list[str]) -> str:
    """What the writer of a pattern may have meant."""
    inside = f"{pattern.rstrip('.')}.*"
    if any(fnmatchcase(name, inside) for name in names):
        return f"for everything in that module write {inside!r}"
    wanted = pattern.strip("*.")
    # People name modules as well as parameters, from the start or, behind a "*", from the end of the name.
    parts = [name.split(".") for name in names]
    known = {".".join(p[:n]): None for p in parts for n in range(1, len(p) + 1)}
    if pattern.startswith("*"):
        known = {".".join(p[-n:]): None for p in parts for n in range(1, len(p) + 1)}
    return f"close to it: {', '.join(difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or names[:3])}"
