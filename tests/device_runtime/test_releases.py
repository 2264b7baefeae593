"""What a device demands of a secure round's plan and checkpoint, and the attack by a plan that this ends."""

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, structs
from onnx import TensorProto

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.conditions import Clock
from device_runtime.errors import PlanRefused
from device_runtime.examples import open_examples
from device_runtime.permission.policy import Policy, Releases, check_model
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.folder import BlobCache
from device_runtime.trainer import InProcess, Limits
from device_runtime.work import Worker
from fedcore import checkpoint
from fedcore.batching import StreamKey, noise
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan
from fedcore.release import LineageEntry, LogProof, Release, ReleasedEvaluation, SumBounds, TreeHead
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop
from fedcore.signing import SigningKey
from fedcore.wire.messages import Assignment
from secagg.keys import Tree
from tests.device_runtime.linear import FLOAT, graph

RELEASE, LINEAGE, OTHER = (
    SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in (1, 2, 3)
)
PLAN, FIRST, SECOND, THIRD = (BlobRef(str(number) * 64, 100) for number in range(4))
BOUNDS = SumBounds(clip_norm=1.0, bits=20, max_examples=100, min_sum=8)
NOW = 1_000_000.0

SLOTS, FEATURES, SEED, ROUND = 8, 3, 11, 1
D = SLOTS * FEATURES


def stealing_graphs():
    """Graphs that put a device's example at the place of its slot, which they know by the noise of that slot."""
    table = [int(noise(StreamKey(SEED, ROUND, slot), 0, 0, 1)[0]) for slot in range(SLOTS)]
    params, carry = ("broadcast.params", FLOAT, [D]), ("carry.params", FLOAT, [D])
    batch = [("example.x", FLOAT, ["B", FEATURES]), ("mask", FLOAT, ["B"]), ("noise", TensorProto.INT32, ["B"])]
    place = [
        ("Equal", ["noise", "table"], "here"),
        ("Cast", ["here"], "slots", {"to": FLOAT}),
        ("Reshape", ["slots", "column"], "slot_column"),
        ("MatMul", ["slot_column", "example.x"], "placed"),
        ("Reshape", ["placed", "flat"], "stolen"),
        ("Add", ["carry.params", "stolen"], "next.params"),
        ("Identity", ["mask"], "metrics"),
    ]
    known = [
        ("table", TensorProto.INT32, table),
        ("column", TensorProto.INT64, [SLOTS, 1]),
        ("flat", TensorProto.INT64, [D]),
    ]
    return {
        "train.begin": graph(
            [("Identity", ["broadcast.params"], "next.params")], [params], [("next.params", FLOAT, [D])]
        ),
        "train.step": graph(
            place, [carry, params, *batch], [("next.params", FLOAT, [D]), ("metrics", FLOAT, [1])], known
        ),
        "report": graph(
            [("Identity", ["train.carry.params"], "delta")],
            [params, ("train.carry.params", FLOAT, [D])],
            [("delta", FLOAT, [D])],
        ),
    }


def stealing_plan(graphs):
    segments = (Segment("delta", D, "mean"), Segment("weight", 1, "sum"), Segment("train.metrics", 1, "sum", ("n",)))
    return Plan(
        name="thief",
        schema=ParamSchema((TensorSpec("w", (D,)),)),
        broadcast=(VectorSpec("params", D),),
        examples=ExampleSpec((Field("x", "float32", (FEATURES,)),)),
        passes=(PassPlan("train", Loop(batch_size=1), (VectorSpec("params", D),), ("n",), noise=True),),
        report=ReportLayout(segments, "uniform"),
        graphs={"onnx": {name: BlobRef.of(blob) for name, blob in graphs.items()}},
    )


ZEROS = {"params": np.zeros(D, np.float32)}
OWN = np.arange(1, SLOTS * FEATURES + 1, dtype=np.float32).reshape(SLOTS, FEATURES)
"""One example of every device."""


def trained(folder, slot, graphs, secagg):
    """The values that a device in this slot would send, masked or not."""
    plan = stealing_plan(graphs)
    blobs = {BlobRef.of(data): data for data in (plan.encode(), checkpoint.encode(ZEROS), *graphs.values())}
    np.savez(folder / "x.npz", x=OWN[slot : slot + 1])
    cache = BlobCache(folder / "blobs", lambda ref, part: part.append(blobs[ref]))
    worker = Worker(InProcess(OnnxRuntime()), open_examples(folder / "x.npz"), cache, lambda: True)
    refs = {"plan": BlobRef.of(plan.encode()), "checkpoint": BlobRef.of(checkpoint.encode(ZEROS))}
    given = assignment(slot=slot, seed=SEED, round=ROUND, secagg=secagg, **refs)
    return worker.train(given, plan, Limits(1_000_000_000, 60.0)).values[:D]


def test_a_plan_that_knows_the_noise_opens_every_example_in_the_sum(tmp_path):
    graphs = stealing_graphs()
    total = sum(trained(tmp_path, slot, graphs, secagg=None) for slot in range(SLOTS))
    np.testing.assert_array_equal(total.reshape(SLOTS, FEATURES), OWN)


@pytest.mark.security("The noise of a secure round is keyed by a secret of the device")
def test_in_a_secure_round_nobody_knows_the_noise_of_a_slot(tmp_path):
    graphs = stealing_graphs()
    for slot in range(SLOTS):
        assert not trained(tmp_path, slot, graphs, secagg=b"invitation").any()


@pytest.mark.security("It takes part in secure rounds only under a release that a key … signed")
@pytest.mark.security("A policy that names no signers accepts unsigned plans, and no secure round")
def test_the_unsigned_plan_of_the_attack_is_refused_before_it_is_fetched(coordinator, config):
    graphs = stealing_graphs()
    coordinator.offer(stealing_plan(graphs), graphs, ZEROS)
    coordinator.invite = lambda plan, checkpoint: b"invitation"
    for policy in (None, Policy(require_secure_aggregation=True), Policy(signers=(RELEASE.signer,))):
        outcome = run_session(replace(config, policy=policy))
        assert (outcome.outcome, outcome.reason, outcome.steps) == ("aborted", "plan-refused", 0)
        assert outcome.detail.startswith("against signers of this device's policy: ")
    assert "blob" not in coordinator.calls
    assert coordinator.said == coordinator.reports == []


def assignment(**fields):
    given = {"assignment": "a", "task": "t", "round": 1, "attempt": 1, "slot": 0, "seed": 0, "report_within_s": 60.0}
    return Assignment(**{**given, "plan": PLAN, "checkpoint": FIRST, "secagg": b"invitation", **fields})


def release(signer=RELEASE, **changes):
    fields = {
        "population": "phones", "plan": PLAN.sha256, "checkpoint": FIRST.sha256, "bounds": BOUNDS,
        "lineage": LINEAGE.signer, "counter": 1, "expires_at": int(NOW) + 1,
    }  # fmt: skip
    return signer.sign_statement(Release(**{**fields, **changes}))


def entry(signed, number=1, parent=FIRST, child=SECOND, signer=LINEAGE):
    made = LineageEntry(release=signed.digest, round=number, parent=parent.sha256, checkpoint=child.sha256)
    return signer.sign_statement(made)


def after(signed, number=1, parent=FIRST, child=SECOND, **more):
    """The assignment of the round after `number`, which led from one checkpoint to the other."""
    lineage = entry(signed, number, parent, child, **more)
    return assignment(release=signed, round=number + 1, checkpoint=child, lineage=lineage)


@pytest.fixture
def releases(tmp_path):
    clock = Clock(wall=lambda: NOW)
    with open_database(tmp_path, clock) as database:
        yield Releases(Policy(signers=(RELEASE.signer, OTHER.signer)), database, clock, "phones")


def against(rule, words):
    return pytest.raises(PlanRefused, match=f"against {rule} of this device's policy: .*{words}")


ALTERED = structs.replace(release(), text=release().text.replace('"counter":1', '"counter":9'))


@pytest.mark.security("It takes part in secure rounds only under a release that a key … signed")
@pytest.mark.security("signs the population, the plan, the first checkpoint, and how sums are made")
@pytest.mark.security("A release holds until it expires (90 days if not set)")
@pytest.mark.security("A question is a plan, so all of this document holds for it")
@pytest.mark.parametrize(
    ("signed", "rule", "words"),
    [
        (None, "signers", "no signed release"),
        (release(LINEAGE), "signers", "does not name"),
        (ALTERED, "signers", "altered"),
        (structs.replace(release(), signer=OTHER.signer), "signers", "altered"),
        (
            RELEASE.sign_statement(LineageEntry(release="0" * 64, round=1, parent="0" * 64, checkpoint="0" * 64)),
            "signers",
            "",
        ),
        (release(population="tablets"), "release", "tablets"),
        (release(plan="f" * 64), "release", "for plan ffff"),
        (release(expires_at=int(NOW)), "release", "expired"),
        (release(checkpoint="f" * 64), "lineage", "not the release's"),
    ],
)
def test_a_round_without_its_release_is_refused(releases, signed, rule, words):
    releases.check(assignment(release=release()))
    with against(rule, words):
        releases.check(assignment(release=signed))


@pytest.mark.security("A release holds until it expires (90 days if not set)")
def test_a_release_with_a_lower_counter_than_one_seen_is_refused(releases):
    releases.check(assignment(release=release(counter=5)))
    releases.check(assignment(release=release(counter=5)))
    with against("release", "counter is 4; this device has seen 5"):
        releases.check(assignment(release=release(counter=4)))
    releases.check(assignment(release=release(OTHER, counter=1)))


def test_checkpoints_that_descend_from_the_release_are_accepted(releases):
    signed = release()
    for given in (assignment(release=signed), after(signed), after(signed), after(signed, 2, SECOND, THIRD)):
        releases.check(given)


@pytest.mark.security("In secure rounds it can sign a false checkpoint, and leaves evidence")
@pytest.mark.security("each statement is signed, names release, round, parent and checkpoint")
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"signer": OTHER}, "not by the release's key"),
        ({"signed": release(counter=2)}, "another release"),
        ({"number": 3}, "the checkpoint of round 3 comes in round 2"),
        ({"child": THIRD}, "another checkpoint"),
    ],
)
def test_a_checkpoint_without_its_own_entry_is_refused(releases, lie, words):
    given = after(release())
    with against("lineage", words):
        releases.check(structs.replace(given, lineage=entry(**{"signed": release(), **lie})))


@pytest.mark.security("Devices refuse the checkpoint of an older round … and one that does not descend")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (assignment(release=release(), round=7), "no signed entry comes with the checkpoint of round 7"),
        (after(release(), 0), "the checkpoint of round 0 comes in round 1"),
        (after(release(), 1, THIRD, SECOND), "round 1 does not descend from the release's"),
    ],
)
def test_a_lineage_begins_in_round_one_at_the_releases_checkpoint(releases, given, words):
    with against("lineage", words):
        releases.check(given)


@pytest.mark.security("In secure rounds it can sign a false checkpoint, and leaves evidence")
@pytest.mark.security("Devices refuse the checkpoint of an older round … and one that does not descend")
def test_a_checkpoint_that_goes_back_or_forks_is_refused(releases):
    signed = release()
    releases.check(after(signed, 2, SECOND, THIRD))
    for given, words in (
        (assignment(release=signed), "the first checkpoint comes again after that of round 2"),
        (after(signed, 1, FIRST, SECOND), "round 1 comes after that of round 2"),
        (after(signed, 2, SECOND, SECOND), "two checkpoints of round 2 are signed"),
        (after(signed, 3, SECOND, FIRST), "does not descend"),
    ):
        with against("lineage", words):
            releases.check(given)
    releases.check(after(signed, 4, FIRST, SECOND))


MODEL, EDGES = np.arange(3, dtype=np.float32), np.array([0, 1], np.float32)
DIGEST = checkpoint.digest(MODEL)
MEASURING, MEASURED = BlobRef("a" * 64, 100), BlobRef("b" * 64, 100)
EVALUATION = ReleasedEvaluation(plan=MEASURING.sha256, bounds=BOUNDS, constants={"edges": checkpoint.digest(EDGES)})


def evaluating(signed, number=1, parent=FIRST, child=SECOND, *, signer=LINEAGE, params=DIGEST, **more):
    """The assignment that evaluates the model of a round."""
    made = LineageEntry(
        release=signed.digest, round=number, parent=parent.sha256, checkpoint=child.sha256, params=params
    )
    given = {"release": signed, "plan": MEASURING, "checkpoint": MEASURED, "lineage": signer.sign_statement(made)}
    return assignment(**given | more)


def test_models_of_a_releases_lineage_are_evaluated_in_any_order(releases):
    signed = release(evaluation=EVALUATION)
    for number, parent, child in ((3, THIRD, FIRST), (1, FIRST, SECOND), (3, THIRD, FIRST), (2, SECOND, THIRD)):
        releases.check(evaluating(signed, number, parent, child))
    with against("lineage", "round 1 comes after that of round 3"):
        releases.check(after(signed))


@pytest.mark.parametrize(
    ("given", "rule", "words"),
    [
        (evaluating(release()), "release", "for plan 0000"),
        (evaluating(release(evaluation=EVALUATION), plan=THIRD), "release", "for plan 0000"),
        (evaluating(release(evaluation=EVALUATION, expires_at=int(NOW))), "release", "expired"),
        (evaluating(release(LINEAGE, evaluation=EVALUATION)), "signers", "does not name"),
        (evaluating(release(evaluation=EVALUATION), lineage=None), "lineage", "no signed entry comes with the model"),
        (evaluating(release(evaluation=EVALUATION), params=UNSET), "lineage", "round 1 names no model to evaluate"),
        (evaluating(release(evaluation=EVALUATION), 0), "lineage", "round 0 names no model to evaluate"),
        (evaluating(release(evaluation=EVALUATION), round=2), "lineage", "has one round, and this is round 2"),
        (evaluating(release(evaluation=EVALUATION), signer=OTHER), "lineage", "not by the release's key"),
        (evaluating(release(evaluation=EVALUATION), 1, THIRD), "lineage", "does not descend from the release's"),
        (evaluating(release(evaluation=EVALUATION), 5, THIRD, FIRST), "lineage", "two checkpoints of round 5"),
        (evaluating(release(evaluation=EVALUATION), 5, params="f" * 64), "lineage", "two checkpoints of round 5"),
        (evaluating(release(evaluation=EVALUATION), 4, FIRST, THIRD), "lineage", "does not descend from that of 4"),
        (evaluating(release(evaluation=EVALUATION), 6, THIRD), "lineage", "round 6 does not descend from that of 5"),
    ],
)  # fmt: skip
def test_an_evaluation_that_no_release_and_lineage_name_is_refused(releases, given, rule, words):
    releases.check(evaluating(release(evaluation=EVALUATION), 5))
    with against(rule, words):
        releases.check(given)


def test_the_entry_of_another_release_proves_no_model(releases):
    signed, other = release(evaluation=EVALUATION), release(evaluation=EVALUATION, counter=2)
    with against("lineage", "for another release"):
        releases.check(structs.replace(evaluating(signed), lineage=evaluating(other).lineage))


def test_an_evaluation_is_held_to_the_noise_of_its_own_bounds(tmp_path):
    clock, noisy = Clock(wall=lambda: NOW), structs.replace(BOUNDS, noise_multiplier=0.5, honest=8)
    with open_database(tmp_path, clock) as database:
        strict = Releases(Policy(signers=(RELEASE.signer,), min_noise_multiplier=0.5), database, clock, "phones")
        strict.check(evaluating(release(evaluation=structs.replace(EVALUATION, bounds=noisy))))
        with against("min_noise_multiplier", "noise of 0, the least allowed is 0.5"):
            strict.check(evaluating(release(bounds=noisy, evaluation=EVALUATION)))


def test_only_the_model_of_the_entry_and_released_constants_are_measured():
    given = evaluating(release(evaluation=EVALUATION))
    check_model(given, {"params": MODEL, "edges": EDGES})
    for received, words in (
        ({"params": MODEL + 1, "edges": EDGES}, "'params' of the checkpoint is not the model of round 1"),
        ({"params": MODEL, "edges": EDGES + 1}, "'edges' of the checkpoint is not the released one"),
        ({"params": MODEL, "edges": EDGES, "more": EDGES}, "'more' of the checkpoint is not the released one"),
    ):
        with against("lineage", words):
            check_model(given, received)


def test_who_trains_refuses_an_entry_that_names_another_model_to_evaluate():
    signed = release(evaluation=EVALUATION)
    check_model(after(signed), {"params": MODEL + 1, "c": EDGES})  # the entry names the whole checkpoint alone
    lineage = evaluating(signed).lineage
    given = structs.replace(after(signed), lineage=lineage)
    check_model(given, {"params": MODEL, "c": EDGES})
    with against("lineage", "'params' of the checkpoint is not the model of round 1"):
        check_model(given, {"params": MODEL + 1, "c": EDGES})


def proof(log, signed, key=LINEAGE):
    """The proof that a release is in a log, the log's head signed with `key`."""
    tree, position = Tree([one.leaf for one in log]), log.index(signed)
    head = key.sign_statement(TreeHead(size=len(log), root=tree.root.hex()))
    return LogProof(head=head, position=position, path=tree.path(position))


OWN_RELEASE, STRANGERS = release(), [release(population=f"p{number}") for number in range(4)]
LOG = [*STRANGERS[:2], OWN_RELEASE]


@pytest.fixture
def demanding(releases):
    """Releases of a device that demands their log."""
    return replace(releases, policy=Policy(signers=(RELEASE.signer,), require_release_log=True))


@pytest.mark.security("A device checks that its own release is there and that heads do not shrink")
def test_a_release_in_a_growing_log_is_accepted(demanding):
    for log in ([OWN_RELEASE], LOG, LOG, [*LOG, *STRANGERS]):
        demanding.check(assignment(release=OWN_RELEASE, log=proof(log, OWN_RELEASE)))


def test_a_report_that_is_kept_outlives_a_growing_log(demanding):
    """Another population's session may have seen a later head before the report is sent."""
    before, since = (assignment(release=OWN_RELEASE, log=proof(log, OWN_RELEASE)) for log in (LOG, [*LOG, *STRANGERS]))
    demanding.check(before)
    demanding.check(since)
    demanding.check(before, again=True)
    with against("require_release_log", "the head of 3 contradicts one of 7"):
        demanding.check(before)


@pytest.mark.security("A device checks that its own release is there and that heads do not shrink")
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (None, "no head"),
        (proof(LOG, OWN_RELEASE, key=OTHER), "no head"),
        (structs.replace(proof(LOG, OWN_RELEASE), head=release(LINEAGE)), "altered"),
        (proof(LOG, STRANGERS[0]), "does not lead"),
        (structs.replace(proof(LOG, OWN_RELEASE), position=1), "does not lead"),
        (structs.replace(proof(LOG, OWN_RELEASE), position=6), "does not lead"),
        (structs.replace(proof(LOG, OWN_RELEASE), path=b""), "does not lead"),
        (proof(LOG[1:], OWN_RELEASE), "the head of 2 contradicts one of 3"),
        (proof([*STRANGERS[2:], OWN_RELEASE], OWN_RELEASE), "the head of 3 contradicts one of 3"),
    ],
)
def test_a_release_that_is_not_proven_to_be_logged_is_refused(demanding, lie, words):
    demanding.check(assignment(release=OWN_RELEASE, log=proof(LOG, OWN_RELEASE)))
    with against("require_release_log", words):
        demanding.check(assignment(release=OWN_RELEASE, log=lie))
