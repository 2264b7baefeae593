"""A plan bundle: what `muster export` writes and a coordinator registers, `manifest.json` and `blobs/<sha256>`.

Spec: docs/spec/plan.md §6.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from fedcore.errors import DigestMismatch, PlanError, facts_of
from fedcore.plan import BlobRef, Plan, PlanSignature, decode_versioned
from fedcore.validation import decoded, decoder

if TYPE_CHECKING:
    from fedcore.signing import SigningKey

MANIFEST_VERSION = 1


class AlgorithmRef(msgspec.Struct, frozen=True):
    """The algorithm that the coordinator applies, with every setting spelled out."""

    name: str
    settings: dict[str, bool | float | int | str]


class Parity(msgspec.Struct, frozen=True):
    """The distance between a graph on the real runtime and torch: relative l2 after `steps` steps, the last one masked.

    For the graph `predict`, which has no steps, `steps` are batches, and `l2` is of the worst of them.
    `float64` is the distance between torch's own float32 and float64 on the same steps: the model's own rounding error.
    `single` is set for a model whose rounding error is too large for steps in a row. Then every step started where
    torch's step did. `l2` and `float64` are the worst of these steps; `single` is the median over steps of one example.
    """

    graph: str
    steps: int
    l2: float
    float64: float
    single: float | None = None


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The cost for a device. Export measures it in a separate process, which loads the runtime and no torch.

    step_cpu_ms: the most expensive pass's step, the least of several measurements. peak_rss_mb: of the process after
    all passes and the report. graph_bytes: all graphs of the format, and the frozen vectors.
    """

    step_cpu_ms: float
    peak_rss_mb: float
    graph_bytes: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of export about the graphs of one format on its runtime.

    version: of the format, such as the ONNX opset. tolerance: the upper limit of every `l2`.
    """

    runtime: str
    version: str
    tolerance: float
    parity: tuple[Parity, ...]
    footprint: Footprint

    @property
    def worst(self) -> float:
        """The largest relative l2."""
        return max(parity.l2 for parity in self.parity)


class Quantisation(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of frozen weights in few bits: the loss before training, with them and with exact ones.

    bits: the fewest of a weight.
    """

    bits: int
    loss: float
    exact_loss: float


class Certificate(msgspec.Struct, frozen=True):
    """Proof, made at export, that the graphs of every format compute what the reference, torch, computes.

    quantisation: set where weights are in few bits. The reference computes with the same weights.
    """

    reference: str
    formats: dict[str, Evidence]
    quantisation: Quantisation | UnsetType = UNSET

    @property
    def worst(self) -> float:
        """The largest relative l2 over all formats."""
        return max(evidence.worst for evidence in self.formats.values())


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The server's half of a bundle; the device's half is the plan. compress: the compression of reports, in words.

    no_predict: why the plan has no predict graph; empty where it has one, or none was tried. class_names: of the
    classes of the label, by number, where they were texts.
    """

    version: int = MANIFEST_VERSION
    name: str
    model: str
    algorithm: AlgorithmRef
    compress: str = ""
    no_predict: str = ""
    class_names: tuple[str, ...] | UnsetType = UNSET
    plan: BlobRef
    state: BlobRef
    certificate: BlobRef
    signature: PlanSignature | None = None


_CERTIFICATE = decoder(Certificate)
_MANIFEST = decoder(Manifest)


def decode_certificate(data: bytes) -> Certificate:
    """A parity certificate from JSON. Raises PlanError."""
    return decoded(data, _CERTIFICATE, "certificate", PlanError)


class Bundle:
    """A bundle on disk. Each read checks the blob against its digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "manifest.json"
        if not path.is_file():
            lacking = "it has no manifest.json" if folder.exists() else "there is no such folder"
            raise PlanError(f"{folder} is not a plan bundle: {lacking}")
        self.manifest = decode_versioned(path.read_bytes(), _MANIFEST, MANIFEST_VERSION, "manifest")

    def __repr__(self) -> str:
        return f"Bundle({self.manifest.model}, {self.manifest.algorithm.name}, in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        said = self.manifest
        made = {"model": said.model, "algorithm": said.algorithm.name, "settings": said.algorithm.settings}
        proof = {"worst distance from torch": self.certificate.worst, "folder": str(self.folder)}
        return facts_of("Bundle", {**made, **self.plan.facts, "reports": said.compress, **proof})

    @property
    def plan(self) -> Plan:
        """The plan that devices receive."""
        return Plan.decode(self.read(self.manifest.plan))

    @property
    def certificate(self) -> Certificate:
        """The parity certificate."""
        return decode_certificate(self.read(self.manifest.certificate))

    @property
    def signer(self) -> str | None:
        """The signer of the plan; None when it is not signed. Raises BadSignature, or InvalidKey."""
        signature = self.manifest.signature
        if signature is None:
            return None
        from fedcore.signing import verify  # most bundles have no signature

        verify(self.manifest.plan, signature)
        return signature.signer

    def sign(self, key: SigningKey) -> Bundle:
        """Sign the plan of the bundle on disk, replacing any earlier signature. Raises PlanError."""
        plan = BlobRef.of(self.read(self.manifest.plan))
        _write_manifest(self.folder, msgspec.structs.replace(self.manifest, signature=key.sign(plan)))
        return Bundle(self.folder)

    def read(self, ref: BlobRef) -> bytes:
        """A blob's bytes. Raises PlanError when it is missing, DigestMismatch when it was altered."""
        path = self.folder / "blobs" / ref.sha256
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PlanError(f"bundle {self.folder} lacks blob {ref.sha256[:12]}…: {error}") from error
        return ref.check(data)

    def blobs(self) -> Iterable[tuple[BlobRef, bytes]]:
        """Every blob that the manifest and the plan name, checked."""
        refs = [self.manifest.plan, self.manifest.state, self.manifest.certificate]
        refs += sorted(self.plan.blob_refs, key=lambda ref: ref.sha256)
        for ref in dict.fromkeys(refs):
            yield ref, self.read(ref)

    @classmethod
    def write(cls, folder: Path, manifest: Manifest, blobs: Iterable[bytes]) -> Bundle:
        """Write a bundle, replacing an existing one. The manifest comes last, so a folder with a manifest is complete.

        Raises DigestMismatch when a blob that the manifest names was not given.
        """
        replaced = set((folder / "blobs").glob("*")) if (folder / "manifest.json").exists() else set()
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        blobs_by_ref = {BlobRef.of(blob): blob for blob in blobs}
        for ref in (manifest.plan, manifest.state, manifest.certificate):
            if ref not in blobs_by_ref:
                raise DigestMismatch(f"the manifest names blob {ref.sha256[:12]}…, which was not given")
        for ref, blob in blobs_by_ref.items():
            (folder / "blobs" / ref.sha256).write_bytes(blob)
        _write_manifest(folder, manifest)
        for path in replaced - {folder / "blobs" / ref.sha256 for ref in blobs_by_ref}:
            path.unlink()
        return cls(folder)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    partial = folder / "manifest.json.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    os.replace(partial, folder / "manifest.json")
