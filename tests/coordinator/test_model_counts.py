"""Counts of check-ins by the versions of models that devices state, and nothing of a single device."""

from datetime import UTC, datetime

import msgspec
import pytest

from coordinator.dashboard.models import model_page
from coordinator.driver.driver import Driver
from coordinator.rules.roll_outs import ModelCount
from coordinator.settings import Settings
from coordinator.store.tables import MODEL_COUNTS
from coordinator.tally import ModelTally, Stated
from fedcore.errors import WireError
from fedcore.wire.messages import CheckIn, decode, encode
from tests.coordinator.bundles import START
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.released import predicting_bundle, version
from tests.servers import serving

KEYBOARD = ("phones", "keyboard")
NOON, DAY = 1_764_158_400.0, 86_400
HELLO = CheckIn(capabilities=CAPABILITIES, examples={"default": 10})


def saying(**stated):
    return msgspec.structs.replace(HELLO, **stated)


@pytest.fixture
def released(store, register, tmp_path):
    """Two versions of a model."""
    register(predicting_bundle(tmp_path / "predicting"), goal=1, rounds=9)
    for number in (1, 2):
        store.release_model(version(store, number, START + number))


@pytest.mark.every_engine
@pytest.mark.usefixtures("released")
def test_check_ins_are_counted_by_version_and_day(store, desk):
    driver: Driver = desk.driver
    now = desk_time(store)
    for days, stated, times in (
        (1, {"models": {"keyboard": 1}}, 3),
        (0, {"models": {"keyboard": 1}, "refused": {"keyboard": 2}}, 2),
        (0, {"models": {"keyboard": 2}}, 5),
        (0, {"models": {"keyboard": 3, "camera": 1}}, 4),  # which nobody released
        (0, {}, 7),
    ):
        for _ in range(times):
            driver.stated("phones", saying(**stated), now - days * DAY)
    assert store.model_counts(*KEYBOARD) == []
    desk.pass_time(60)
    yesterday, today = day_of(now - DAY), day_of(now)
    counted = [ModelCount(yesterday, 1, 3, 0), ModelCount(today, 1, 2, 0), ModelCount(today, 2, 5, 2)]
    assert store.model_counts(*KEYBOARD) == counted
    driver.stated("phones", saying(models={"keyboard": 2}), now)
    driver.stated("phones", saying(models={"keyboard": 2}), now - 40 * DAY)  # longer ago than is shown
    desk.pass_time(60)
    assert store.model_counts(*KEYBOARD) == [*counted[:2], ModelCount(today, 2, 6, 2)]
    with store.database.reading() as records:
        assert [(one.number, one.check_ins) for one in page_of(records).counts] == [(1, 2), (2, 6)]
        assert [line.name for line in page_of(records).over_time.lines] == ["version 1", "version 2"]


def desk_time(store):
    with store.database.reading() as records:
        return records.at


def day_of(at):
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def page_of(records):
    return model_page(records, *KEYBOARD)["page"].in_use


def tallied(message, at=NOON):
    tally = ModelTally()
    tally.count("phones", message, at)
    return tally.take()


def test_a_check_in_states_versions_of_sixteen_models_at_most():
    sixteen = {f"model-{number}": 1 for number in range(16)}
    assert tallied(decode(encode(saying(models=sixteen)), CheckIn)).keys() == {
        Stated("phones", name, 1, NOON // DAY, refused=False) for name in sixteen
    }
    assert encode(HELLO).find(b"models") == -1
    for wrong in ({"Key Board": 1}, {"keyboard": 0}, {"keyboard": 2**31}, sixteen | {"one-more": 1}):
        for member in ("models", "refused"):
            with pytest.raises(WireError):
                decode(encode(saying(**{member: wrong})), CheckIn)


def test_counts_of_versions_are_bounded_whatever_devices_state():
    tally = ModelTally()
    for number in range(1, 11_000):
        tally.count("phones", saying(models={"keyboard": number}), NOON)
    tally.count("phones", saying(models={"keyboard": 1}), NOON)
    counts = tally.take()
    assert (len(counts), counts[Stated("phones", "keyboard", 1, NOON // DAY, refused=False)]) == (10_000, 2)


@pytest.mark.usefixtures("released")
def test_check_ins_over_http_are_counted_and_not_lost_by_a_stop(store, database, tmp_path):
    message = saying(models={"keyboard": 2}, refused={"keyboard": 1})
    settings = Settings(database=database, blobs=tmp_path / "blobs", port=0, admin_port=0)
    with serving(settings) as url, speaking_to(url) as client:
        for name, population, status in (("a", "phones", 200), ("b", "phones", 200), ("a", "nowhere", 404)):
            answer = client.post(
                f"/v1/populations/{population}/checkins", content=encode(message), auth=client.devices[name]
            )
            assert answer.status_code == status
    counts = [(one.number, one.check_ins, one.refused) for one in store.model_counts(*KEYBOARD)]
    assert counts == [(1, 0, 2), (2, 2, 0)]


def test_table_of_model_counts_has_no_column_for_a_device():
    assert set(MODEL_COUNTS.c.keys()) == {"population", "name", "number", "day", "refused", "count"}
