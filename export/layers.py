"""The active layer of a model, forward and backward, so that a message about an operator can name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.fx import Node as TracedNode, traceback
from torch.utils._pytree import tree_leaves

KEY = "layer"
# A value that no layer has as its path.
LOSS = "/"


def layer_of(node: TracedNode) -> str:
    """The origin of a traced operator, for a message: " (in layer 'x')", or empty if it is in the loss."""
    return _words(node.meta.get("custom", {}).get(KEY, LOSS))


class Layers:
    """Marks traced operators with the path of the layer that computed them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._paths: list[str] = [LOSS]
        self._marked: set[Node] = set()

    @property
    def here(self) -> str:
        """The active layer, in the words of `layer_of`."""
        return _words(self._paths[-1])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Hook into every layer while a trace is made."""
        with traceback.preserve_node_meta(), ExitStack() as hooks:
            for path, layer in self.module.named_modules():
                hooks.callback(layer.register_forward_pre_hook(self._enter(path)).remove)
                hooks.callback(layer.register_forward_hook(self._leave(path)).remove)
            yield
            self._paths = [LOSS]

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any) -> None:
            self._mark(inputs, self._paths[-1])
            self._paths.append(path)
            self._note()

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, outputs: Any) -> None:
            self._mark(outputs, path)
            self._paths.pop()
            self._note()

        return hook

    def _mark(self, values: Any, path: str) -> None:
        """Mark the backward operators of `values` that are not marked yet with the layer, too."""
        pending = [value.grad_fn for value in tree_leaves(values) if isinstance(value, Tensor)]
        while pending:
            node = pending.pop()
            if node is not None and node not in self._marked:
                self._marked.add(node)
                node.register_prehook(lambda gradients: self._backward(path))
                pending += [following for following, _ in node.next_functions]

    def _backward(self, path: str) -> None:
        self._paths[-1] = path
        self._note()

    def _note(self) -> None:
        traceback.get_current_meta()["custom"] = {KEY: self._paths[-1]}


def _words(path: str) -> str:
    if path == LOSS:
        return ""
    return f" (in layer {path!r})" if path else " (in the model's own forward)"
