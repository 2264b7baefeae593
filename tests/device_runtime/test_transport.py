import contextlib
import email.utils
import threading
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings, strategies as st

from device_runtime import Device
from device_runtime.errors import BadAnswer, ConfigError, Refused, Unreachable
from device_runtime.protocol import transport as module
from device_runtime.protocol.connection import PIECE, Connections, address_of
from device_runtime.protocol.transport import Transport
from device_runtime.state.folder import PartialDownload
from fedcore import checkpoint
from fedcore.plan import BlobRef
from fedcore.wire.messages import Abort, CheckIn, RetryWindow, StatedCapabilities
from fedcore.wire.signatures import PublicKey, Signature, Signer
from tests.device_runtime.coordinator import ACCEPTED, answer, cut, hang_up, refusal, status

HELLO = CheckIn(
    capabilities=StatedCapabilities(runtime="test", version="1", engine="none", formats=("onnx",)), examples={}
)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


class Known:
    """A device that is enrolled already."""

    forgotten = 0

    def signer(self, transport):
        return Signer("d-0", KEY)

    def forget(self):
        self.forgotten += 1


def created_of(request):
    """The time by which a request was signed."""
    _, headers = request
    return Signature.parse(headers["Signature-Input"], headers["Signature"]).created


class Pauses(list):
    """A clock that notes how long one would have slept."""

    def __call__(self, seconds):
        self.append(seconds)


@pytest.fixture
def pauses():
    return Pauses()


def to(url, pauses):
    address = address_of(url)
    return Transport(address, Connections(address), sleep=pauses)


@pytest.fixture
def partial(tmp_path):
    return PartialDownload(tmp_path / "partial")


@pytest.fixture
def transport(coordinator, pauses):
    coordinator.keys["d-0"] = PublicKey.of(KEY).text
    with to(coordinator.url, pauses) as made:
        made.identity = Known()
        yield made


def upload(transport, body):
    return transport.report("a-1", body, BlobRef.of(body).sha256)


def test_a_busy_coordinator_is_asked_again_later_and_later(coordinator, transport, pauses):
    coordinator.faults["check-in"] = [status(503), status(429)]
    assert transport.check_in("phones", HELLO) == ACCEPTED
    assert coordinator.calls == ["check-in"] * 3
    assert 0.75 <= sum(pauses) <= 1.5


def test_retry_after_is_honoured(coordinator, transport, pauses):
    coordinator.faults["check-in"] = [status(503, Retry_After="7")]
    transport.check_in("phones", HELLO)
    assert sum(pauses) == 7.0


def test_a_retry_after_of_minutes_ends_the_session_instead(coordinator, transport, pauses):
    coordinator.faults["check-in"] = [status(503, Retry_After="600")]
    with pytest.raises(Refused) as caught:
        transport.check_in("phones", HELLO)
    assert not caught.value.permanent
    assert (pauses, coordinator.calls) == ([], ["check-in"])


@pytest.mark.parametrize("fault", [cut, hang_up])
def test_a_broken_connection_is_tried_again(coordinator, transport, fault):
    coordinator.faults["check-in"] = [fault]
    assert transport.check_in("phones", HELLO) == ACCEPTED


def test_a_request_that_arrived_twice_is_signed_anew(coordinator, transport, pauses):
    coordinator.faults["check-in"] = [refusal("replayed-signature")] * 2
    assert transport.check_in("phones", HELLO) == ACCEPTED
    nonces = [Signature.parse(one["Signature-Input"], one["Signature"]).nonce for _, one in coordinator.headers]
    assert (len(set(nonces)), 0.75 <= sum(pauses) <= 1.5) == (3, True)


def test_a_coordinator_that_calls_every_request_a_replay_ends_the_session(coordinator, transport):
    coordinator.faults["check-in"] = [refusal("replayed-signature")] * 9
    with pytest.raises(Refused) as caught:
        transport.check_in("phones", HELLO)
    assert (caught.value.slug, caught.value.permanent) == ("replayed-signature", False)
    assert coordinator.calls == ["check-in"] * 4


def test_three_retries_are_all_there_are_in_an_assignment(coordinator, transport, partial, tmp_path):
    given = transport.await_assignment("s-1", 5, ("t-1",))
    coordinator.faults["blob"] = [cut, cut]
    transport.blob(given.plan, partial)
    coordinator.faults["blob"] = [cut, cut]
    with pytest.raises(Unreachable, match="blobs"):
        transport.blob(given.checkpoint, PartialDownload(tmp_path / "other"))
    assert coordinator.calls.count("blob") == 5


def test_an_assignment_starts_with_fresh_retries(coordinator, transport, partial):
    coordinator.faults["check-in"] = [hang_up] * 3
    transport.check_in("phones", HELLO)
    given = transport.await_assignment("s-1", 5, ("t-1",))
    coordinator.faults["blob"] = [hang_up] * 3
    transport.blob(given.plan, partial)


def test_a_problem_keeps_its_slug_detail_and_window_and_is_not_repeated(coordinator, transport):
    coordinator.faults["report"] = [refusal("no-longer-needed", "the goal is met", RetryWindow(3, 4))]
    with pytest.raises(Refused, match="the goal is met") as caught:
        upload(transport, b"body")
    refused = caught.value
    assert (refused.status, refused.slug, refused.retry) == (410, "no-longer-needed", RetryWindow(3, 4))
    assert coordinator.calls == ["report"]


@pytest.mark.parametrize(
    ("fault", "permanent"),
    [
        (refusal("malformed-message"), True),
        (refusal("unknown-population"), True),
        (refusal("too-large"), True),
        (status(401), True),
        (status(501), True),
        (refusal("unknown-session"), False),
        (refusal("internal"), False),
        (status(302, Location="/login"), False),
        (status(502), False),
    ],
)
def test_what_time_does_not_mend_is_permanent(coordinator, transport, fault, permanent):
    coordinator.faults["check-in"] = [fault]
    with pytest.raises(Refused) as caught:
        transport.check_in("phones", HELLO)
    assert caught.value.permanent is permanent
    assert coordinator.calls == ["check-in"]


@pytest.mark.parametrize("body", [b"{", b'{"type": "\xff"}', b'{"more": ' + b"[" * 100_000])
def test_an_unreadable_problem_is_named_by_its_status(coordinator, transport, body):
    coordinator.faults["check-in"] = [lambda handler: handler.respond(409, "application/problem+json", body)]
    with pytest.raises(Refused, match="status 409") as caught:
        transport.check_in("phones", HELLO)
    assert caught.value.slug == "http-409"


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"outcome":"maybe"}', b'{"outcome":"accepted"}'])
def test_garbage_json_is_permanent(coordinator, transport, body):
    coordinator.faults["check-in"] = [answer(body)]
    with pytest.raises(BadAnswer) as caught:
        transport.check_in("phones", HELLO)
    assert caught.value.permanent


def test_a_page_in_place_of_json_is_a_portal_and_passes(coordinator, transport):
    coordinator.faults["check-in"] = [answer(b"<html>", "text/html")]
    with pytest.raises(BadAnswer, match="other than JSON") as caught:
        transport.check_in("phones", HELLO)
    assert not caught.value.permanent


def test_an_endless_answer_is_cut_off(coordinator, transport):
    coordinator.faults["check-in"] = [answer(b" " * (2 << 20))]
    with pytest.raises(BadAnswer, match="longer than"):
        transport.check_in("phones", HELLO)


def test_bytes_of_another_digest_are_refused(coordinator, transport, partial):
    coordinator.faults["blob"] = [answer(b"evil", "application/octet-stream")]
    with pytest.raises(BadAnswer, match="arrived as"):
        transport.blob(BlobRef.of(b"good"), partial)


@pytest.mark.security("Everything that is fetched is checked against its size and SHA-256")
def test_other_bytes_than_a_blobs_are_refused_and_cost_little_more(coordinator, transport, tmp_path):
    """Shorter, longer or changed: no more is taken than the blob has, and a piece."""
    good = bytes(range(256)) * 64
    ref = BlobRef.of(good)

    @settings(max_examples=40, deadline=None)
    @given(start=st.integers(0, len(good)), other=st.one_of(st.just(bytes(40 * PIECE)), st.binary(max_size=9)))
    def answered(start, other):
        false = good[:start] + other
        coordinator.faults["blob"] = [answer(false, "application/octet-stream")] * 9
        before = transport.bytes_moved
        if false == good:
            return
        with pytest.raises((BadAnswer, Unreachable)):
            transport.blob(ref, PartialDownload(tmp_path / "partial"))
        assert transport.bytes_moved - before < 4 * (ref.size + 2 * PIECE)

    answered()
    coordinator.blobs[ref.sha256] = good
    coordinator.faults.clear()
    (tmp_path / "partial").unlink(missing_ok=True)
    transport.blob(ref, PartialDownload(tmp_path / "partial"))
    assert (tmp_path / "partial").read_bytes() == good


def test_body_bytes_are_counted_both_ways_with_failed_attempts(coordinator, transport, partial):
    coordinator.faults["report"] = [status(503)]
    body = checkpoint.encode({"report": np.ones(11, np.float32)})
    upload(transport, body)
    assert transport.bytes_up == 2 * len(body)
    receipt_bytes = transport.bytes_down - len(b"no")
    assert receipt_bytes > 64
    before = transport.bytes_down
    transport.blob(coordinator.plan, partial)
    assert transport.bytes_down - before == coordinator.plan.size


def test_bytes_of_a_conversation_beside_count_too(coordinator, transport):
    beside = transport.beside(transport.identity)
    beside.abort("a-1", Abort("plan-refused"))
    assert transport.bytes_up == beside.bytes_up > 0


def test_waiting_for_an_assignment_says_for_how_long(coordinator, transport):
    assert transport.await_assignment("s-1", 12.4, ("t-1",)) == coordinator.assignment()
    assert dict(coordinator.headers)["assignment"]["prefer"] == "wait=12"


def test_an_abort_arrives_with_its_reason(coordinator, transport):
    transport.abort("a-1", Abort("plan-refused"))
    assert coordinator.aborts == [Abort("plan-refused")]


def test_nobody_listening_is_unreachable_after_three_more_attempts(pauses):
    with to("http://127.0.0.1:9", pauses) as transport:
        with pytest.raises(Unreachable, match="checkins"):
            transport.check_in("phones", HELLO)
        assert (0.25 + 0.5 + 1 <= sum(pauses) <= 3.5, transport.bytes_up) == (True, 0)


@pytest.mark.parametrize("url", ["nonsense", "ftp://example.org", "http://[::1"])
def test_what_is_no_url_is_a_fault_of_the_configuration(url):
    with pytest.raises(ConfigError):
        Transport.to(url)


def test_a_device_that_stops_does_not_wait_to_ask_again(coordinator, config):
    stop = threading.Event()

    def busy(handler):
        stop.set()
        status(503, Retry_After="60")(handler)

    coordinator.faults["check-in"] = [busy] * 4
    device = Device(config.coordinator, "phones", config.examples, config.state)
    running = threading.Thread(target=device.run_forever, args=(stop,), daemon=True)
    running.start()
    running.join(30)
    assert not running.is_alive()
    assert coordinator.calls == ["check-in"]


def drip(handler):
    """An answer of which a byte comes now and then."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.flush()
    with contextlib.suppress(OSError):
        for _ in range(100):
            time.sleep(0.1)
            handler.wfile.write(b" ")
            handler.wfile.flush()
    handler.close_connection = True


def test_an_answer_that_drips_is_given_up(coordinator, transport, monkeypatch):
    monkeypatch.setattr(module, "LEAVING_S", 0.5)
    coordinator.faults["check-in"] = [drip]
    transport.stopping = lambda: True
    with pytest.raises(Unreachable, match="took too long"):
        transport.check_in("phones", HELLO)
    assert coordinator.calls == ["check-in"]


LARGE = checkpoint.encode({"report": np.arange(11, dtype=np.float32)})


@pytest.fixture
def in_parts(monkeypatch):
    """Reports of any size are uploaded so that a cut connection loses nothing."""
    monkeypatch.setattr(module, "LARGEST_WHOLE", 10)


def test_a_large_report_goes_on_where_the_connection_was_cut(coordinator, transport, in_parts):
    coordinator.cuts = [30, 20]
    receipt = upload(transport, LARGE)
    assert receipt.sha256 == BlobRef.of(LARGE).sha256
    assert bytes(coordinator.parts) == LARGE
    assert coordinator.calls == ["offset", "cut", "offset", "cut", "offset", "report"]
    assert transport.bytes_up >= len(LARGE)


def test_a_later_session_sends_only_the_rest(coordinator, transport, in_parts):
    coordinator.parts += LARGE[:50]
    upload(transport, LARGE)
    assert coordinator.calls == ["offset", "report"]
    assert transport.bytes_up == len(LARGE) - 50


def test_a_wrong_clock_does_not_lose_a_report_that_is_half_there(coordinator, transport, in_parts):
    transport.wall = lambda: time.time() - 10_000
    upload(transport, LARGE)
    assert (coordinator.calls, len(coordinator.stale)) == (["offset", "report"], 1)


def test_an_offset_that_is_none_is_refused(coordinator, transport, in_parts):
    coordinator.parts += LARGE + b"more"
    with pytest.raises(BadAnswer, match="how much"):
        upload(transport, LARGE)


@pytest.mark.parametrize("offset", ["9" * 5000, "-1", "", "x"])
def test_an_offset_that_is_no_number_of_bytes_is_refused(coordinator, transport, in_parts, offset):
    coordinator.faults["offset"] = [status(204, Upload_Offset=offset)]
    with pytest.raises(BadAnswer, match="how much"):
        upload(transport, LARGE)


def test_lost_receipt_is_asked_for_again_with_only_the_digest(coordinator, transport, in_parts):
    coordinator.unheard = 1
    receipt = upload(transport, LARGE)
    assert receipt.sha256 == BlobRef.of(LARGE).sha256
    assert coordinator.calls == ["offset", "report"] * 2
    assert (len(coordinator.reports), transport.bytes_up) == (1, len(LARGE))


def test_a_part_that_does_not_follow_is_sent_once_more_from_where_it_does(coordinator, transport, in_parts):
    def bytes_arrive_late(handler):
        coordinator.parts += LARGE[len(coordinator.parts) :][:20]
        refusal("mismatching-offset")(handler)

    coordinator.faults["report"] = [bytes_arrive_late]
    upload(transport, LARGE)
    assert coordinator.calls == ["offset", "report"] * 2
    assert bytes(coordinator.parts) == LARGE
    coordinator.parts, coordinator.counted = bytearray(), None
    coordinator.faults["report"] = [bytes_arrive_late] * 2
    with pytest.raises(Refused) as caught:
        transport.report("a-2", LARGE, BlobRef.of(LARGE).sha256)
    assert (caught.value.slug, caught.value.final) == ("mismatching-offset", True)


def test_head_of_a_gone_assignment_is_no_fault_of_the_device(coordinator, transport, in_parts):
    coordinator.faults["offset"] = [refusal("unknown-assignment")]
    with pytest.raises(Refused) as caught:
        upload(transport, LARGE)
    refused = caught.value
    assert (refused.slug, refused.permanent, refused.final) == ("unknown-assignment", False, True)


def test_device_unknown_when_it_asks_for_the_offset_enrols_again(coordinator, transport, in_parts):
    coordinator.faults["offset"] = [refusal("unknown-device")]
    upload(transport, LARGE)
    assert transport.identity.forgotten == 1


def test_a_report_of_up_to_eight_mebibytes_goes_in_one_request(coordinator, transport):
    upload(transport, LARGE)
    assert coordinator.calls == ["report"]
    assert module.LARGEST_WHOLE == 8 << 20


@pytest.mark.parametrize("wrong_s", [-10_000, 3_600, 1e8])
def test_device_with_a_wrong_clock_signs_by_the_coordinators(coordinator, transport, pauses, wrong_s):
    transport.wall = lambda: time.time() + wrong_s
    assert transport.check_in("phones", HELLO) == ACCEPTED
    asked = len(coordinator.stale)
    upload(transport, LARGE)
    assert (asked, len(coordinator.stale), pauses) == (1, 1, [])


def test_coordinator_that_just_began_is_waited_for_by_a_good_clock(coordinator, transport, pauses):
    began = int(time.time()) + 0.25
    transport.wall = lambda: began + sum(pauses)
    late = email.utils.formatdate(began - 2, usegmt=True)
    coordinator.faults["check-in"] = [refusal("stale-signature", Retry_After="2", Date=late)]
    transport.check_in("phones", HELLO)
    assert sum(pauses) == 2.0
    assert created_of(coordinator.headers[-1]) == int(began) + 2


def test_wrong_clock_is_set_first_and_a_late_one_is_waited_for(coordinator, transport, pauses):
    transport.wall = lambda: time.time() - 10_000 + sum(pauses)
    coordinator.faults["check-in"] = [refusal("stale-signature", Retry_After="1")] * 2
    assert transport.check_in("phones", HELLO) == ACCEPTED
    assert (len(coordinator.stale), coordinator.calls) == (1, ["check-in"] * 3)
    assert 2 <= sum(pauses) < 5


def test_a_time_that_does_not_help_is_not_asked_for_again(coordinator, transport):
    coordinator.faults["check-in"] = [refusal("stale-signature")] * 2
    with pytest.raises(Refused) as caught:
        transport.check_in("phones", HELLO)
    assert (caught.value.permanent, caught.value.final) == (False, False)
    assert coordinator.calls == ["check-in"] * 2


def test_a_time_to_wait_that_is_no_time_ends_the_call(coordinator, transport, pauses):
    coordinator.faults["check-in"] = [refusal("stale-signature", Retry_After="999999")]
    with pytest.raises(Refused):
        transport.check_in("phones", HELLO)
    assert pauses == []


def test_a_body_that_was_corrupted_on_its_way_is_sent_once_more(coordinator, transport):
    coordinator.faults["report"] = [refusal("digest-mismatch")]
    upload(transport, LARGE)
    coordinator.faults["report"] = [refusal("digest-mismatch")] * 2
    with pytest.raises(Refused) as caught:
        transport.report("a-2", LARGE, BlobRef.of(LARGE).sha256)
    assert caught.value.final
    assert coordinator.calls == ["report"] * 4


def test_a_coordinator_that_does_not_know_the_device_is_told_who_it_is(coordinator, transport):
    coordinator.faults["check-in"] = [refusal("unknown-device")]
    assert transport.check_in("phones", HELLO) == ACCEPTED
    assert transport.identity.forgotten == 1
