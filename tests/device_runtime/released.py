"""Model releases for tests: signed statements of a key, and the blobs that they name, at a coordinator."""

import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.permission.policy import Policy
from fedcore import checkpoint
from fedcore.plan import BlobRef
from fedcore.signing import ModelRelease, SigningKey
from tests.device_runtime import linear

KEY, OTHER = (SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in (1, 2))
POLICY = Policy(signers=(KEY.signer,))
NAME = "keyboard"
ROWS = np.eye(3, dtype=np.float32)


def parameters_of(number):
    """The parameters of version `number` if nothing else is said: all are the number, so each answer tells it."""
    return np.full(linear.D, number, np.float32)


def released(coordinator, number=1, *, params=None, plan=None, graph=None, key=KEY, **members):
    """Release a version at a coordinator; the signed statement. members: of the release, other than they would be."""
    graph = linear.predict_graph() if graph is None else graph
    plan = linear.predicting(graph) if plan is None else plan
    vector = parameters_of(number) if params is None else params
    blobs = plan.encode(), vector if isinstance(vector, bytes) else checkpoint.encode({"params": vector})
    coordinator.blobs |= {BlobRef.of(blob).sha256: blob for blob in (*blobs, graph)}
    given = {
        "population": "phones",
        "name": NAME,
        "number": number,
        "plan": BlobRef.of(blobs[0]),
        "parameters": BlobRef.of(blobs[1]),
        "counter": number,
        "expires_at": int(time.time()) + 3600,
    }
    coordinator.models[NAME] = key.sign_statement(ModelRelease(**given | members))
    return coordinator.models[NAME]
