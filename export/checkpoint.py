"""A checkpoint from which a model starts: a safetensors file, with patterns of names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor, nn

from export.errors import InvalidModel, reason


def matching(what: str, patterns: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The names that a pattern matches, in their order. Raises InvalidModel for a pattern that matches none.

    what: the names are of, for the message.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidModel(f"no {what} is called {pattern!r}; there are {', '.join(names) or 'none'}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


SHOWN = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A safetensors file with the values of a module's tensors, under their names in its state_dict.

    sha256: the digest of the file, in hex. Trained parameters may be absent, such as those of a new head, and then keep
    their values; all other tensors of the module must be in the file.
    """

    path: Path | str
    sha256: str

    def load_into(self, module: nn.Module) -> None:
        """Set the module's tensors. Raises InvalidModel when file or digest are wrong, or the tensors do not fit."""
        tensors, wanted = self._read(), module.state_dict()
        self._refuse("has tensors that the model lacks", [name for name in tensors if name not in wanted])
        for name, value in tensors.items():
            if (
                value.shape != wanted[name].shape
                or not value.dtype.is_floating_point == wanted[name].is_floating_point()
            ):
                raise InvalidModel(
                    f"checkpoint {self.path} has {name} as {_kind(value)}, the model as {_kind(wanted[name])}"
                )
        trained = {name for name, value in module.named_parameters() if value.requires_grad}
        # A tensor that the module has under two names needs to be in the file once.
        loaded_pointers = {wanted[name].data_ptr() for name in tensors}
        lacking = [name for name in wanted if name not in trained and wanted[name].data_ptr() not in loaded_pointers]
        self._refuse("lacks tensors that are not trained", lacking)
        for name, value in tensors.items():
            wanted[name].copy_(value)

    def _read(self) -> Mapping[str, Tensor]:
        import safetensors.torch  # the engine loads without it

        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise InvalidModel(f"checkpoint {self.path} cannot be read: {reason(error)}") from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.sha256:
            raise InvalidModel(
                f"checkpoint {self.path} has the SHA-256 {digest}, expected is {self.sha256}: it is another file, or "
                "was changed"
            )
        try:
            tensors: Mapping[str, Tensor] = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise InvalidModel(f"checkpoint {self.path} is not a safetensors file: {reason(error)}") from error
        return tensors

    def _refuse(self, what: str, names: list[str]) -> None:
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise InvalidModel(f"checkpoint {self.path} {what}: {', '.join(names[:SHOWN])}{more}")


def _kind(value: Tensor) -> str:
    return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
