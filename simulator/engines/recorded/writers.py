"""Forms of operators that write their results into existing memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulator.engines.recorded.recording import Call

aten = torch.ops.aten
COPIES = {aten.clone.default, aten._to_copy.default}

Writer = Callable[[tuple[Any, ...], dict[str, Any], list[Tensor]], Callable[[], Any]]
"""Binds arguments and results to a function that computes the results from the arguments."""


def writer_of(call: Call) -> Writer | None:
    """A writer that makes a call write its results into existing memory; None if torch has no such form."""
    if call.operator in COPIES:
        return _copying
    if not call.made:
        return lambda args, kwargs, results: functools.partial(call.operator, *args, **kwargs)
    return _writing(call.operator)


def _copying(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> Callable[[], Any]:
    return functools.partial(results[0].copy_, args[0])


@functools.cache
def _writing(operator: torch._ops.OpOverload) -> Writer | None:
    wanted = [(item.name, str(item.type)) for item in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, name)
        outs = [item.name for item in other._schema.arguments if item.is_out]
        parameters = [(item.name, str(item.type)) for item in other._schema.arguments if not item.is_out]
        # What is generated calls the other form, and copies.
        if outs and parameters == wanted and torch.Tag.generated not in other.tags:
            return lambda args, kwargs, results: functools.partial(
                other, *args, **kwargs, **dict(zip(outs, results, strict=True))
            )
    return None
