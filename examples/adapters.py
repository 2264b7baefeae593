"""Adapters of low rank on a frozen network, and the bytes that they save.

    python examples/adapters.py

The network is the EMNIST CNN. Its weights are frozen; devices train adapters of rank 4 in the dense layer, and the last
layer. Weights of your own come from a file: `replace(adapted(), checkpoint=Checkpoint("weights.safetensors", digest))`.
`muster export --model adapters:adapted`, in this folder, exports the model.
"""

from __future__ import annotations

from dataclasses import replace

from export.model import Model, ModelSpec
from export.models import load
from export.weights import lora

RANK = 4
DENSE, HEAD = "7", "10"  # the paths of the network's two dense layers


def adapted() -> ModelSpec:
    """The EMNIST CNN, of which adapters and the last layer are trained."""
    base = load("emnist_cnn")
    return replace(
        base, name="emnist_cnn_lora", make=lambda: lora(base.make(), RANK, layers=(DENSE,), train=(f"{HEAD}.*",))
    )


def bytes_of(spec: ModelSpec) -> tuple[int, int]:
    """Bytes of the vector that a device gets and sends in every round of FedAvg, and of what it fetches once."""
    model = Model(spec)
    return 4 * model.schema.size, 4 * sum(vector.size for vector in model.frozen_vectors.values())


def main() -> None:
    """Print the bytes of the whole network and of the adapters."""
    print(f"{'bytes':16} {'each way a round':>18} {'once':>12}")
    for spec in (load("emnist_cnn"), adapted()):
        each_round, once = bytes_of(spec)
        print(f"{spec.name:16} {each_round:18,} {once:12,}")


if __name__ == "__main__":
    main()
