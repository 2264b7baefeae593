"""Models in files, from which a simulation starts."""

from __future__ import annotations

from pathlib import Path

from fedcore.errors import SchemaError, why
from fedcore.params import Float32, ParamSchema
from simulator.errors import EngineError


def read_model(path: Path, schema: ParamSchema) -> Float32:
    """The parameters (D,) in a safetensors file of a model's tensors. Raises EngineError when it does not hold them."""
    import safetensors.numpy  # the engine loads without it

    try:
        return schema.flatten(safetensors.numpy.load(path.read_bytes()))
    except OSError as error:
        raise EngineError(f"cannot read the model in {path}: {why(error)}") from error
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # KeyError: a type that NumPy lacks
        raise EngineError(f"{path} holds no model as runs and `muster task checkpoint` write it: {error}") from error
    except SchemaError as error:
        raise EngineError(f"{path} holds another model than the one that is named: {error}") from error
