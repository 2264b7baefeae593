"""Kernels that a program may use. An operator that is not here is refused by name."""

from __future__ import annotations

from typing import Any

from export.executorch.simplify import aten

# Which of ExecuTorch's kernels may run, by what was traced. Each was compared with torch over several steps
# (tests/export/test_executorch.py). Not here, because wrong or absent: max_pool2d_with_indices_backward, the gradient
# of average pooling, convolution_backward; and what is only slow: convolution, addmm.
KERNELS: dict[Any, str] = {
    aten._to_copy.default: "aten._to_copy.default",
    aten.abs.default: "aten.abs.default",
    aten.add.Tensor: "aten.add.Tensor",
    aten.amax.default: "aten.amax.default",
    aten.amin.default: "aten.amin.default",
    aten.argmax.default: "aten.argmax.default",
    aten.argmin.default: "aten.argmin.default",
    aten.as_strided_copy.default: "aten.as_strided_copy.default",
    aten.bitwise_and.Tensor: "aten.bitwise_and.Tensor",
    aten.bitwise_not.default: "aten.bitwise_not.default",
    aten.bitwise_or.Tensor: "aten.bitwise_or.Tensor",
    aten.cat.default: "aten.cat.default",
    aten.clamp.default: "aten.clamp.default",
    aten.constant_pad_nd.default: "aten.constant_pad_nd.default",
    aten.div.Tensor: "aten.div.Tensor",
    aten.embedding.default: "aten.embedding.default",
    aten.eq.Scalar: "aten.eq.Scalar",
    aten.eq.Tensor: "aten.eq.Tensor",
    aten.erf.default: "aten.erf.default",
    aten.expand.default: "aten.expand_copy.default",
    aten.expm1.default: "aten.expm1.default",
    aten.flip.default: "aten.flip.default",
    aten.full.default: "aten.full.default",
    aten.gather.default: "aten.gather.default",
    aten.ge.Scalar: "aten.ge.Scalar",
    aten.ge.Tensor: "aten.ge.Tensor",
    aten.gt.Scalar: "aten.gt.Scalar",
    aten.gt.Tensor: "aten.gt.Tensor",
    aten.index_put.default: "aten.index_put.default",
    aten.le.Scalar: "aten.le.Scalar",
    aten.le.Tensor: "aten.le.Tensor",
    aten.log1p.default: "aten.log1p.default",
    aten.logical_and.default: "aten.logical_and.default",
    aten.logical_not.default: "aten.logical_not.default",
    aten.logical_or.default: "aten.logical_or.default",
    aten.lt.Scalar: "aten.lt.Scalar",
    aten.lt.Tensor: "aten.lt.Tensor",
    aten.mul.Tensor: "aten.mul.Tensor",
    aten.ne.Scalar: "aten.ne.Scalar",
    aten.ne.Tensor: "aten.ne.Tensor",
    aten.permute.default: "aten.permute_copy.default",
    aten.pow.Tensor_Scalar: "aten.pow.Tensor_Scalar",
    aten.repeat.default: "aten.repeat.default",
    aten.scatter.src: "aten.scatter.src",
    aten.scatter.value: "aten.scatter.value",
    aten.scatter_add.default: "aten.scatter_add.default",
    aten.sign.default: "aten.sign.default",
    aten.slice.Tensor: "aten.slice_copy.Tensor",
    aten.sub.Tensor: "aten.sub.Tensor",
    aten.sum.dim_IntList: "aten.sum.dim_IntList",
    aten.view.default: "aten.view_copy.default",
    aten.where.self: "aten.where.self",
}
