"""Pooling before ReLU: for `pool(relu(x))`, ReLU is computed after the pooling by maximum, on fewer values.

The same holds for the gradient. The bits are equal: ReLU keeps the order of positive values, and if a window has none,
result and gradient are zero either way.
"""

from __future__ import annotations

import torch

from simulator.engines.recorded.recording import POOLED_BACKWARD, Call, Recording

aten = torch.ops.aten
POOLED = aten.max_pool2d_with_indices.default
CHAIN = [aten.clamp_min.default, POOLED, POOLED_BACKWARD, aten.threshold_backward.default]


def pool_first(recording: Recording) -> None:
    """Move pooling by maximum before a ReLU that nothing else reads."""
    for pool in [call for call in recording.calls if call.operator is POOLED]:
        chain = [call for call in recording.calls if pool.args[0].buffer in call.touched]
        if [call.operator for call in chain] == CHAIN and _may_turn(recording, *chain):
            _turn(recording, *chain)


def _may_turn(recording: Recording, relu: Call, pool: Call, pool_backward: Call, relu_backward: Call) -> bool:
    """Whether ReLU and pooling, and their gradients, may be swapped."""
    rectified, passed = pool.args[0], relu_backward.args[0]
    chained = (
        relu.results == [rectified]
        and pool_backward.results == [passed]
        and rectified == pool_backward.args[1] == relu_backward.args[1]
        and pool.results[1] == pool_backward.args[-1]
        and not relu.args[1]
        and not relu_backward.args[2]
    )
    readers = [call for call in recording.calls if passed.buffer in call.read]
    gone = {rectified.buffer, passed.buffer} & {place.buffer for place in recording.outputs.values()}
    written = (relu.touched | pool.touched | pool_backward.touched) & recording.written
    return chained and readers == [relu_backward] and not gone and not written


def _turn(recording: Recording, relu: Call, pool: Call, pool_backward: Call, relu_backward: Call) -> None:
    pooled, indices = (place for place in pool.results if place)
    maxima, passed, gradient = recording.like(pooled), recording.like(pooled), pool_backward.args[0]
    inner = Call(pool.operator, (relu.args[0], *pool.args[1:]), pool.kwargs, [maxima, indices], one_result=False)
    outer = Call(relu.operator, (maxima, 0), {}, [pooled])
    outer_backward = Call(relu_backward.operator, (gradient, pooled, 0), {}, [passed])
    inner_backward = Call(
        pool_backward.operator,
        (passed, relu.args[0], *pool_backward.args[2:]),
        pool_backward.kwargs,
        relu_backward.results,
    )
    turned = {
        id(relu): [],
        id(pool): [inner, outer],
        id(pool_backward): [outer_backward, inner_backward],
        id(relu_backward): [],
    }
    recording.calls = [replacement for call in recording.calls for replacement in turned.get(id(call), [call])]
