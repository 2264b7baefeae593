"""`muster ask heavy-hitters`: from a field to a table of its most frequent values, over several rounds."""

import json

import numpy as np
import pytest

from fedcore.signing import SigningKey
from simulator.fleet.fork_servers import HERE, fork_servers
from simulator.population import Population
from tests.muster.asked import answering
from tests.muster.test_cli import in_process
from tests.sampled import sampled

FIELD = ("--field", "word:uint8:3:123")
SMALL = ("candidates=16", "step_bits=6")


@pytest.fixture(scope="module")
def servers():
    with fork_servers({HERE: ["onnxruntime"]}) as opened:
        yield opened


@pytest.fixture
def users():
    """20 users: 10 with "the", 6 with "of", 4 with words of their own."""
    words = [b"the"] * 10 + [b"of\0"] * 6 + [b"abc", b"abd", b"xyz", b"\0\0\0"]
    shards = [{"word": np.frombuffer(word, np.uint8)[None]} for word in words]
    return Population.of([f"user-{user}" for user in range(20)], shards, 123)


@pytest.mark.parametrize("secure", sampled([False, True], [True]), ids=["plain", "masked"])
def test_devices_take_part_in_every_round(secure, users, tmp_path, coordinators, servers):
    """Every run has masked sums; plain ones are asked for with noise below."""
    key = SigningKey.new(tmp_path / "release.pem")
    masked = ("--secagg", "--release-key", tmp_path / "release.pem") if secure else ()
    with coordinators.local(tmp_path, secure=secure) as local:
        words = ("heavy-hitters", "word", *SMALL, "--population", "phones", "--goal", 20, "--minimum-devices", 5)
        with answering(local, users, servers, tmp_path / "devices", key.signer if secure else None):
            done = in_process("ask", *words, *FIELD, "--db", local.database, "--blobs", local.blobs, *masked, "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        settings = local.store.task(found["task"]).settings
    assert (settings.rounds, settings.min_separation_rounds, settings.secagg is not None) == (3, 1, secure)
    assert found["columns"] == ["value", "devices", "share"]
    assert found["rows"] == [["the", 10, 0.5], ["of", 6, 0.3]]
    assert (found["devices"], found["hidden_groups"], found["errors"]) == (20, 0, None)


@pytest.mark.parametrize("secure", sampled([False, True], [True]), ids=["plain", "masked"])
def test_noise_moves_counts_as_far_as_the_answer_says(secure, users, tmp_path, coordinators, servers):
    key = SigningKey.new(tmp_path / "release.pem")
    masked = ("--secagg", "--release-key", tmp_path / "release.pem") if secure else ()
    with coordinators.local(tmp_path, secure=secure) as local:
        words = ("heavy-hitters", "word", *SMALL, "--population", "phones", "--goal", 20, "--minimum-devices", 5)
        words = (
            *words,
            "--epsilon",
            60,
            "--users",
            20,
            *masked,
            *FIELD,
            "--db",
            local.database,
            "--blobs",
            local.blobs,
        )
        with answering(local, users, servers, tmp_path / "devices", key.signer if secure else None):
            done = in_process("ask", *words, "--json")
        assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row[0] for row in found["rows"]] == ["the", "of"]
    for (_, devices, _), (none, error, share), exact in zip(found["rows"], found["errors"], (10, 6), strict=True):
        assert abs(devices - exact) <= 2 * error + 0.5
        assert 0 < error < 4
        assert (none, share) == (None, pytest.approx(error / 20))


@pytest.mark.parametrize("epsilon", [None, 2.0])
def test_explain_says_rounds_and_what_a_device_sends(epsilon, tmp_path):
    private = () if epsilon is None else ("--epsilon", epsilon, "--users", 20_000)
    store = ("--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", tmp_path / "blobs")
    words = ("heavy-hitters", "word", "MAX", 4, "ROWS", "PER", "DEVICE", "--population", "phones", *FIELD, *private)
    done = in_process("ask", *words, *store, "--explain", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["rounds"], facts["numbers_sent"], facts["rows_of_a_device"]) == (3, 8256, 4)
    assert facts["owners_read"].startswith("Which values of word do most devices have? In each of 3 rounds")
    (votes,) = facts["blocks"]
    assert (votes["low"], votes["high"], votes["norm"]) == (0, 1, 2 if private else None)
    assert facts["sensitivity"] == (2 if private else None)
    assert (facts["not_hidden"] is None) == bool(private)
    if private:
        assert facts["noise_of_a_number"] == pytest.approx(facts["noise_multiplier"] * 2)
        assert votes["error"] == pytest.approx(2.1 * facts["noise_of_a_number"])


def test_other_rounds_than_those_of_the_tree_are_refused(tmp_path, users, coordinators):
    with coordinators.local(tmp_path) as local:
        words = ("heavy-hitters", "word", *SMALL, "--population", "phones", "--rounds", 2, *FIELD)
        done = in_process("ask", *words, "--db", local.database, "--blobs", local.blobs)
    assert "heavy hitters of word take 3 rounds, not 2" in str(done.exception)


def test_an_answer_without_rows_says_why(typed):
    code, out, err = typed("ask", "heavy-hitters", "y", "--dataset", "digits")
    assert (code, out.splitlines()) == (0, ["value  devices  share", "-----  -------  -----"])
    assert "75 devices answered; no value or group has enough of them to be shown (--minimum-devices)" in err
