"""Make the vectors of a device in another language: python -m tools.make_device_vectors

They are answers of this implementation to fixed inputs: messages and plans as JSON, checkpoints, reports, packed
words, parameters, signed statements. It writes tests/vectors/device.json, which only a change of the protocol may
change. Bytes are in hex; integers that a double cannot hold are texts.
"""

import json
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from fedcore import checkpoint, masking
from fedcore.batching import HoldOut, StreamKey, noise, permutation
from fedcore.codecs import CountSketch, LowRank, Rotation, RoundKey, Subsample, encode as encode_values
from fedcore.errors import BrokenSuccession, ReportError
from fedcore.labels import LONGEST_TARGET, MOST_LABELS
from fedcore.plan import BlobRef, ExampleSpec, Field, PredictPlan, TripPlan
from fedcore.questions.question import LONGEST_QUESTION
from fedcore.release import LineageEntry, Release, ReleasedEvaluation, SumBounds, TreeHead
from fedcore.report import LOSS_COUNTS, ReportLayout, Segment
from fedcore.schedule import Loop
from fedcore.signing import SigningKey, SucceedingKey, Succession, Successor
from fedcore.wire.messages import (
    Accepted,
    AndroidKey,
    AppAttest,
    Assignment,
    Enrolled,
    Offer,
    Rejected,
    RetryWindow,
    SecaggParties,
    SharedSecret,
    attestation_challenge,
    encode,
    shared_secret_proof,
)
from fedcore.wire.signatures import PublicKey, device_id
from secagg import parameters
from tests.device_runtime import divisions, linear
from tests.device_runtime.test_onnx_check import REFUSED, running_sum
from tools.vector_inputs import (
    RANGED,
    SEED,
    cohorts,
    digest,
    fixed_points,
    noise_shares,
    packings,
    private,
    ranged,
    refused_layouts,
    values,
)

PATH = Path(__file__).parents[1] / "tests" / "vectors" / "device.json"
BOUNDS = SumBounds(clip_norm=1.5, bits=20, max_examples=100, min_sum=8)
CODECS = (Rotation(2), Rotation(4), Subsample(4))
LAYOUT = ReportLayout(
    (
        Segment("delta", 4, "mean", codecs=CODECS),
        Segment("weight", 1, "sum"),
        Segment("train.metrics", 2, "sum", ("examples", "loss of naïve “models”")),
    ),
    "examples",
)
BOUNDED = ReportLayout((Segment("delta", 4, "mean"), Segment("weight", 1, "sum")), "uniform", bounded=True)


def device_vectors():
    """All vectors, as what JSON holds."""
    return {
        "orders": list(orders()),
        "hold_outs": list(hold_outs()),
        "messages": messages(),
        "labels": labels(),
        "plan": plans(),
        "checkpoints": checkpoints(),
        "reports": list(reports()),
        "codecs": list(coded()),
        "low_rank": factored(),
        "masking": derivations(),
        "refused_layouts": dict(refused_layouts()),
        "packings": list(packings()),
        "parameters": list(cohorts()),
        "least_honest": [
            [least, most, parameters.least_honest(least, most)]
            for least, most in ((8, 8), (8, 64), (20, 64), (20, 65), (20, 100), (20, 200), (300, 500))
        ],
        "statements": statements(),
        "successions": list(successions()),
        "runner": trained(),
        "refused_graphs": {name: graph.SerializeToString().hex() for name, (graph, _) in REFUSED.items()},
        "loop": running_sum().SerializeToString().hex(),
        "attestations": list(attestations()),
    }


def orders():
    """Long streams, and integers beyond 2^53, by digest."""
    for key, size in ((StreamKey(SEED, 2**31 - 1, 2**63 - 1, b""), 1000), (StreamKey(7, 3, 2, bytes(range(32))), 257)):
        yield {
            "seed": str(key.seed), "round": key.round, "slot": str(key.slot), "secret": key.secret.hex(), "size": size,
            "order_sha256": digest(permutation(key, 1, 2, size).astype("<u4").tobytes()),
            "noise_sha256": digest(noise(key, 1, 2, size).astype("<i4").tobytes()),
        }  # fmt: skip


def hold_outs():
    """Examples with fields of every type, and the places of those that plans with a hold-out run on."""
    several = (
        Field("x", "float32", (2, 3)), Field("y", "int64"), Field("z", "int32", (1,)), Field("pixels", "uint8", (5,)),
    )  # fmt: skip
    columns = {
        "x": values(240).reshape(40, 2, 3), "y": np.arange(40, dtype=np.int64) * -(2**57),
        "z": np.arange(40, dtype=np.int32)[:, None] % 7,
        "pixels": (np.arange(200) % 251).astype(np.uint8).reshape(40, 5),
    }  # fmt: skip
    for fields, collection, hold_out in (
        (several, "default", HoldOut(0.3)),
        (several, "default", HoldOut(0.3, "held-out")),
        (several[::-1], "tâches", HoldOut(0.5)),
        (several[2:3], "default", HoldOut(0.5)),
        (several[:1], "default", HoldOut(2**-60, "held-out")),
    ):
        spec = ExampleSpec(fields, collection, hold_out)
        yield {
            "examples": msgspec.to_builtins(spec), "count": 40,
            "columns": {field.name: columns[field.name].tobytes().hex() for field in fields},
            "kept": np.flatnonzero(spec.kept(columns)).tolist(),
        }  # fmt: skip


def messages():
    """Answers of a coordinator as text, and texts that are none."""
    blob = BlobRef("ab" * 32, 2**40)
    assignment = Assignment(
        assignment="a-1", task="t-1", round=3, attempt=1, slot=2**53 + 1, seed=SEED, plan=blob, checkpoint=blob,
        report_within_s=600.0, secagg=b"\0\1", minimum=8, over_selected=True, lost_after_s=5.25,
        purpose="𝟛" * 200,
    )  # fmt: skip
    window = RetryWindow(5.0, 30.0)
    parties = SecaggParties(Succession(bytes(32)), bytes(range(32)), "https://authority.example")
    good = {
        "assignment": [assignment, Rejected("not-selected", window)],
        "checkIn": [
            Accepted("s-1", (Offer(task="t-1", collection="default", min_examples=20, charging=True),), window),
            Rejected("unsupported-format", window, "a token", ("executorch",)),
        ],
        "enrolled": [Enrolled("9f86d081884c7d659a2feaa0c55ad015"), Enrolled("d", parties)],
    }
    text = encode(assignment).decode()
    swaps = [
        ('"version":1', '"version":2'), ('"a-1"', "1"), ("600.0", "1e999"), ("600.0", "604801"), ("5.25", "0"),
        ('"round":3', '"round":2147483648'), (str(SEED), str(2**63)), (str(SEED), "-1"), (str(SEED), "1.5"),
        ("AAE=", "AAE"), ("AAE=", "AAF="), ("ab" * 32, "AB" * 32),
        ("𝟛" * 200, "𝟛" * 201),
    ]  # fmt: skip
    bad = [text.replace(*swap) for swap in swaps] + [text[:-1], "null", "[]", ""]
    whole_only = [('"round":3', '"round":3.0'), ('"attempt":1', '"attempt":1e0'), ('"minimum":8', '"minimum":0.8e1')]
    halves = [('"a-1"', r'"\ud800"'), ("𝟛" * 200, r"\udc00\ud83d"), ("{", r'{"of a later version":"\uDFFF",')]
    bad += [text.replace(*swap, 1) for swap in whole_only + halves]
    members = json.loads(text)
    alike = [
        json.dumps(dict(reversed(members.items())), indent=1),
        json.dumps(members | {"of a later version": [{"no": "matter"}]}),
        text.replace("a-1", r"\u0061\u002d1"),
    ]
    return {
        "good": {kind: [encode(message).decode() for message in ones] for kind, ones in good.items()},
        "alike_assignments": alike,
        "bad_assignments": bad,
        "targeted_assignment": encode(replace(assignment, target="𝟛" * LONGEST_TARGET)).decode(),
        "bad_targets": [json.dumps(members | {"target": wrong}) for wrong in ("", "𝟛" * 1001, None, 7)],
        "seed": str(SEED),
        "slot": str(2**53 + 1),
    }


def labels():
    """Labels that a device may have, and others."""
    full = {f"n{number}": "v" for number in range(MOST_LABELS)}
    return {
        "good": [{}, {"app_version": "3.2.1", "region": " eu"}, {"n" + "_" * 31: "ü" * 32}, full],
        "bad": [
            *({name: "v"} for name in ("", "Region", "1st", "_a", "über", "a-b", "region\n", "n" * 33)),
            *({"region": value} for value in ("", "ü" * 33, "e\tu", "eu\n", "\x7f", "\x85", "\0")),
            full | {"one_more": "v"},
        ],
    }


def plans():
    """A plan of two trips, and its layout's hash."""
    first = linear.plan({name: name.encode() for name in linear.graphs()})
    swapped = {name: value for name, value in first.graphs["onnx"].items() if not name.startswith("sweep")}
    second = TripPlan(
        broadcast=first.broadcast, passes=first.passes[:1], graphs={"onnx": swapped},
        report=ReportLayout((Segment("delta", 3, "mean"), Segment("weight", 1, "sum")), "uniform"),
    )  # fmt: skip
    whole = replace(first, second=second)
    predict = PredictPlan(("x",), (Field("output", "float32", (2,)),), 1, {"onnx": BlobRef.of(b"predict")})
    predicting = msgspec.to_builtins(replace(whole, predict=predict))
    asking = replace(first, question="𝟛" * LONGEST_QUESTION)
    swaps = [
        {"inputs": ["z"]}, {"inputs": []}, {"outputs": []}, {"batch_size": 0}, {"graphs": {}},
        {"outputs": 2 * predicting["predict"]["outputs"]},
    ]  # fmt: skip
    return {
        "text": whole.encode().decode(),
        "predicting": json.dumps(predicting),
        "bad": [json.dumps(predicting | {"predict": predicting["predict"] | swap}) for swap in swaps],
        "asking": asking.encode().decode(),
        "bad_questions": [json.dumps(predicting | {"question": wrong}) for wrong in ("", "𝟛" * 4001, None, 7)],
        "divisions": {
            kind: {name: graph.SerializeToString().hex() for name, graph in graphs.items()}
            for kind, graphs in {"allowed": divisions.ALLOWED, "refused": divisions.REFUSED}.items()
        },
        "parameters": first.schema.size,
        "layout_hash": {
            str(number): masking.layout_hash(whole.of_round(number).report, SEED).hex() for number in range(1, 5)
        },
        "steps": [
            [loop, examples, Loop(**loop).step_count(examples)]
            for loop in ({"batch_size": 4, "epochs": 2}, {"batch_size": 4, "epochs": 3, "steps": 5, "shuffle": False})
            for examples in (1, 4, 5, 13)
        ],
    }


def checkpoints():
    """Vectors as safetensors bytes."""
    several = {"params": values(5), "momentum": values(3, 9), "step": np.array([2.0], np.float32)}
    return [
        {
            "vectors": {name: vector.tolist() for name, vector in vectors.items()},
            "bytes": checkpoint.encode(vectors).hex(),
        }
        for vectors in ({"report": values(7)}, {"naïve": values(1)}, {"values": values(0)}, several)
    ]


def reports():
    """Parts of a report, unweighted values and the report as it leaves in the clear; null where there must be none."""
    for layout, weight, delta in (
        (LAYOUT, 3.0, values(4)),
        (replace(LAYOUT, weighting="uniform"), 1.0, values(4)),
        (LAYOUT, 3.0, np.array([1, 2, np.inf, 3], np.float32)),
        (LAYOUT, 100.0, np.array([1, 2, 3e38, 3], np.float32)),
        (LAYOUT, 16_777_217.0, values(4)),
        (RANGED, 1.0, values(4)),
        (RANGED, 1.0, np.array([3, -1e38, 0.5, 2.7], np.float32)),
        (RANGED, 1.0, np.array([0, np.inf, 0, 0], np.float32)),
        (BOUNDED, 1.0, values(4)),
        (BOUNDED, 1.0, np.array([1, 2, np.nan, 3], np.float32)),
    ):
        try:
            with np.errstate(over="ignore"):
                sums = {"train.metrics": values(2, 50), "plain.metrics": values(3, 60)}
                report = layout.concatenate({"delta": delta, **sums}, weight, clip=1.5)
        except ReportError:
            report = None
        yield {
            "layout": msgspec.to_builtins(layout), "weight": weight, "clip": 1.5, "delta": delta.tobytes().hex(),
            "metrics": values(2, 50).tobytes().hex(), "more_metrics": values(3, 60).tobytes().hex(),
            "values": None if report is None else report.tobytes().hex(),
            "weighed": None if report is None else layout.weigh(report, weight).tobytes().hex(),
        }  # fmt: skip


def coded():
    """The digests of values as they travel, of segments with codecs."""
    key = RoundKey(SEED, 2**31 - 1)
    chains = (
        (37, (Rotation(8), Rotation(32))), (3000, (Rotation.of(3000), Subsample(701))), (1, (Subsample(1),)),
        (1000, (CountSketch(3, 111),)), (70_001, (CountSketch(1, 70_001),)),
    )  # fmt: skip
    for size, chain in chains:
        travelling = encode_values(chain, values(size), key, 2)
        yield {
            "codecs": msgspec.to_builtins(chain), "size": size, "seed": str(SEED), "round": key.round, "segment": 2,
            "values": values(size).tobytes().hex(), "coded_sha256": digest(travelling.tobytes()),
        }  # fmt: skip


def factored():
    """Low-rank factors, which are equal up to rounding: the values that travel, and not their digest."""
    codec, key = LowRank(3, ((7, 50), (60, 8), (2, 40), (11, 1))), RoundKey(SEED, 5)
    matrices = values(sum(rows * columns for rows, columns in codec.matrices))
    return {
        "codecs": msgspec.to_builtins((codec,)), "seed": str(SEED), "round": key.round, "segment": 1,
        "values": matrices.tobytes().hex(), "coded": encode_values((codec,), matrices, key, 1).tobytes().hex(),
    }  # fmt: skip


def derivations():
    """Hashes and fixed-point numbers of a secure round."""
    noisy = replace(BOUNDS, noise_multiplier=0.5, honest=5)
    large = Segment("delta", 5000, "mean", codecs=(Rotation(4096), Subsample(1250)))
    rotated = replace(LAYOUT, segments=(large, *LAYOUT.segments[1:]))
    plan, other = BlobRef.of(b"plan"), BlobRef.of(b"checkpoint")
    return {
        "layout": msgspec.to_builtins(LAYOUT), "bounds": msgspec.to_builtins(BOUNDS),
        "fixed_points": fixed_points(LAYOUT, BOUNDS),
        "noisy": msgspec.to_builtins(noisy), "noisy_fixed_points": fixed_points(LAYOUT, noisy),
        "noisy_values": masking.summed_values(LAYOUT, noisy, values(LAYOUT.size - 1)).tobytes().hex(),
        "rotated": msgspec.to_builtins(rotated), "rotated_fixed_points": fixed_points(rotated, BOUNDS),
        "rotated_noisy_fixed_points": fixed_points(rotated, noisy),
        "ranged": ranged(BOUNDS, noisy, SEED),
        "noise_shares": noise_shares(),
        "greatest_weight": masking.greatest_weight(LAYOUT, BOUNDS),
        "layout_hash": masking.layout_hash(LAYOUT, SEED).hex(),
        "task_hash": masking.task_hash("tâche-1").hex(),
        "plan": plan.sha256, "checkpoint": other.sha256, "model_hash": masking.model_hash(plan, other).hex(),
        "session_number": str(masking.session_number(2**31 - 1, 5)),
        "last_session_number": str(masking.last_session_number(7)),
        "device_key": PublicKey.of(private(1)).text, "device": device_id(PublicKey.of(private(1)).text),
    }  # fmt: skip


def statements():
    """Statements as their signer signed them."""
    key, plan = SigningKey(private(3)), BlobRef.of(b"plan")
    release = Release(
        population="phones", plan=plan.sha256, checkpoint="cd" * 32, bounds=BOUNDS, lineage=key.signer, counter=1,
        expires_at=2**33,
    )  # fmt: skip
    evaluation = ReleasedEvaluation(plan="12" * 32, bounds=BOUNDS, constants={"edges": checkpoint.digest(values(3))})
    entry = LineageEntry(release="ab" * 32, round=1, parent="cd" * 32, checkpoint="ef" * 32)
    signed = {
        "release": key.sign_statement(release),
        "keyed_release": key.sign_statement(replace(release, seed=SEED)),
        "targeted_release": key.sign_statement(replace(release, bounds=replace(BOUNDS, target="region = eu"))),
        "evaluating_release": key.sign_statement(replace(release, evaluation=evaluation)),
        "entry": key.sign_statement(entry),
        "evaluated_entry": key.sign_statement(replace(entry, params=checkpoint.digest(values(5)))),
        "head": key.sign_statement(TreeHead(size=3, root="ab" * 32)),
    }
    return {
        "plan": msgspec.to_builtins(plan),
        "plan_signature": msgspec.to_builtins(key.sign(plan)),
        **{name: {**msgspec.to_builtins(statement), "digest": statement.digest} for name, statement in signed.items()},
    }


def successions():
    """Successions, pinned keys, and the key to which each leads; null where none does."""
    keys = [private(seed).public_key().public_bytes_raw() for seed in (1, 2, 3)]

    def step(old, new):
        message = b"muster.succession.v1\0server\0" + keys[old] + keys[new]
        return Successor(keys[new], private(old + 1).sign(message))

    good = SucceedingKey("server", private(3), Succession(keys[0], (step(0, 1), step(1, 2)))).succession
    forged = Succession(keys[0], (Successor(keys[1], bytes(64)), step(1, 2)))
    for shown in (good, forged):
        for pinned in (*keys, bytes(32)):
            try:
                leads_to = shown.follow("server", pinned).hex()
            except BrokenSuccession:
                leads_to = None
            text = msgspec.json.encode(shown).decode()
            yield {"shown": text, "pinned": pinned.hex(), "leads_to": leads_to}


def trained():
    """The unweighted report of the linear plan, once with graphs of many steps: its graphs, inputs and values."""
    graphs, data, many = linear.graphs(), linear.examples(13), linear.many_steps()
    settings = {"codecs": (Rotation(2),), "more": (LOSS_COUNTS,)}
    plan = linear.plan(**settings)
    executables = {name: OnnxRuntime().load(graph, name) for name, graph in graphs.items()}
    result = execute(plan, executables, {"params": linear.PARAMS}, data, linear.KEY)
    return {
        "plan": plan.encode().decode(),
        "graphs": {name: graph.hex() for name, graph in graphs.items()},
        "many_plan": linear.plan(many, **settings).encode().decode(),
        "many_graphs": {name: graph.hex() for name, graph in many.items()},
        "params": linear.PARAMS.tobytes().hex(),
        **{name: column.tobytes().hex() for name, column in data.items()},
        "seed": str(linear.KEY.seed), "round": linear.KEY.round, "slot": str(linear.KEY.slot),
        "values": result.values.tobytes().hex(), "weight": result.weight, "steps": result.steps,
        "examples": result.examples,
    }  # fmt: skip


def attestations():
    """Evidence for keys and times: proofs of a secret, and the challenges of platforms with what they attest."""
    for created, kind, said in (
        (1_763_740_800, AndroidKey, tuple(bytes([place]) * 5 for place in range(1, 4))),
        (2**31, AppAttest, bytes(range(200, 256))),
    ):
        key, secret = PublicKey.of(private(created % 7)).text, bytes(range(16 + created % 90))
        yield {
            "key": key, "created": created, "secret": secret.hex(),
            "proof": json.loads(encode(SharedSecret(shared_secret_proof(secret, key, created)))),
            "challenge": attestation_challenge(key, created).hex(),
            "said": [one.hex() for one in said] if kind is AndroidKey else said.hex(),
            "evidence": json.loads(encode(kind(said))),
        }  # fmt: skip


def text():
    """The file."""
    return json.dumps(device_vectors(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"wrote {PATH}")
