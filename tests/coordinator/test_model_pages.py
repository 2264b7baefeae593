"""Released models: their counts and pages."""

import re
from datetime import UTC, datetime

import msgspec
import pytest
from selenium.webdriver.common.by import By
from sqlalchemy import update

from coordinator.api.authentication import issue
from coordinator.dashboard.models import model_form, model_page, models_page
from coordinator.dashboard.views import task_page
from coordinator.driver.driver import Driver
from coordinator.rules.entities import Role
from coordinator.rules.kinds import figures_of, means_of
from coordinator.rules.roll_outs import ModelCount
from coordinator.settings import Settings
from coordinator.store.records.rows import DAY_S, ModelTally, Stated
from coordinator.store.tables import MODEL_COUNTS, ROUNDS, TASKS
from fedcore.errors import WireError
from fedcore.signing import ModelOrigin
from fedcore.wire.messages import CheckIn, decode, encode
from tests.coordinator.browser import AXE, assert_sound, broken_words, look_as, shows, violations
from tests.coordinator.bundles import START
from tests.coordinator.conftest import committed
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.pages import csrf, log_in, play
from tests.coordinator.released import predicting_bundle, version
from tests.coordinator.test_dashboard_pages import log_in as enter, press
from tests.servers import serving

KEYBOARD = ("phones", "keyboard")
HERE = "/populations/phones/models/keyboard"
FIGURES = {
    "evaluate.devices": 200.0,
    "evaluate.examples": 4120.0,
    **{f"evaluate.accuracy{end}": value for end, value in (("", 0.912), (".low", 0.902), (".high", 0.922))},
    **{f"evaluate.accuracy.devices{end}": value for end, value in (("", 0.9), (".low", 0.885), (".high", 0.915))},
    **{f"evaluate.accuracy.p{percent}": percent / 100 for percent in (10, 25, 50, 75, 90)},
}
WORSE = {name: value - 0.1 if "accuracy" in name else value for name, value in FIGURES.items()}


@pytest.fixture
def task(register, tmp_path):
    """A task whose plan has a predict graph."""
    return register(predicting_bundle(tmp_path / "predicting"), goal=1, rounds=9)


@pytest.fixture
def released(store, task, desk):
    """Three versions, of which the third is worse; devices have the first, and 20 % of them the second."""
    desk.report(*desk.assign("a"), delta=[1, 0, 0, 0])
    desk.turn()
    for number, figures in enumerate((FIGURES, FIGURES, WORSE), 1):
        made = version(store, number, START + number, origin=ModelOrigin(task, 1), evaluation=figures)
        store.release_model(made)
    store.promote_model(*KEYBOARD, 1, 1.0)
    store.promote_model(*KEYBOARD, 2, 0.2, "accuracy >= previous")
    with store.database.writing() as records:
        today = int(records.at // DAY_S)
        for ago, number, refused, count in ((1, 1, False, 60), (0, 1, False, 57), (0, 2, False, 13), (0, 2, True, 2)):
            records.models.add_counts({Stated(*KEYBOARD, number, today - ago, refused): count})
    return task


def send(client, verb, **fields):
    """Send a form of the model's page, as a browser does."""
    return client.post(f"{HERE}/{verb}", data={"csrf": csrf(client.get(f"{HERE}/{verb}")), **fields})


@pytest.mark.every_engine
def test_page_of_a_model_shows_what_the_rows_say(store, released):
    with store.database.reading() as records:
        (listed,) = models_page(records)["models"]
        page, form = model_page(records, *KEYBOARD)["page"], model_form(records, *KEYBOARD)
    assert (listed.versions, listed.current, listed.share, listed.state) == (3, 2, 0.2, "for a share")
    assert [(part.version.number, part.share) for part in page.versions] == [(3, 0), (2, 0.2), (1, 0.8)]
    assert page.unserved == pytest.approx(0)
    assert {(part.origin.task.id, part.origin.round, part.origin.attempt) for part in page.versions} == {
        (released, 1, 1)
    }
    assert page.versions[0].figures.rows[0].over_examples.words == "0.802 to 0.822"
    assert [(one.number, one.share) for one in page.history] == [(2, 0.2), (1, 1.0)]
    assert page.history[0].gate.endswith("of the previous one 0.912")
    assert (form["numbers"], form["back"], form["obstacle"]) == ([3, 2, 1], 1, "")


def test_figures_are_a_table_with_their_intervals(store, register, desk):
    found = figures_of("evaluate", FIGURES)
    assert (found.devices, found.examples, [row.metric for row in found.rows]) == (200, 4120, ["accuracy"])
    assert found.rows[0].percentiles == (0.1, 0.25, 0.5, 0.75, 0.9)
    assert (
        found.sentence
        == "on 200 devices with 4,120 examples, with intervals of 95 %; a tenth of the devices is below p10, and so on"
    )
    assert means_of("evaluate", FIGURES) == {"evaluate.accuracy": 0.912}
    compared = {"compare.devices": 1.0, "compare.loss": -0.5, "compare.loss.improved": 0.75, "compare.examples": 9.0}
    (row,) = figures_of("compare", compared).rows
    assert (row.over_examples, row.over_examples.words) == ((-0.5, None, None), "")
    assert (row.over_devices, row.improved) == (None, 0.75)
    assert "evaluated model minus the other" in figures_of("compare", compared).sentence
    assert (
        "after training on the device minus before"
        in figures_of(
            "personalisation", {name.replace("compare", "personalisation"): value for name, value in compared.items()}
        ).sentence
    )
    training = {"train.loss": 0.5}
    assert (figures_of("fed_avg", training), means_of("fed_avg", training)) == (None, training)
    task = register(goal=1, rounds=3)
    desk.report(*desk.assign("a"), loss=0.5)
    desk.turn()
    with store.database.reading() as records:
        page = task_page(records, task)
    assert (page.figures, [one.name for one in page.charts]) == (None, ["train.loss"])


def test_operator_promotes_rolls_back_and_withdraws_by_forms(store, released, locked):
    log_in(locked, issue(store.database, "erin", Role.OPERATOR)[1])
    for given, words in (
        ({"version": "3", "share": "half"}, "&#39;half&#39; is no share: give 20% or 0.2"),
        ({"version": "3", "share": "0"}, "it is above 0 and at most 1"),
        ({"version": "3", "share": "5%", "gate": "good"}, "&#39;good&#39; is no gate"),
        ({"version": "3", "share": "5%", "gate": "accuracy >= previous"}, "the gate refuses the version"),
        ({"version": "1", "share": "5%"}, "version 1 is earlier than version 2"),
        ({"version": "3", "share": "5%", "where": "a >"}, "column 4: here must be a value, and the expression ends"),
        ({"share": "5%"}, "choose the version"),
    ):
        refused = send(locked, "promote", **given)
        assert (refused.status_code, refused.text.count('role="alert"')) == (422, 1)
        assert words in refused.text
        assert len(re.findall('aria-invalid="true" aria-describedby="wrong-[a-z]+"', refused.text)) == 1
    assert len(store.model_history(*KEYBOARD)) == 2
    for wrong, status in (({"version": "9", "share": "5%"}, 404), ({"version": "x", "share": "5%"}, 404)):
        assert send(locked, "promote", **wrong).status_code == status
    assert send(locked, "promote", version="2", share="100%").headers["location"] == HERE
    assert send(locked, "promote", version="3", share="0.05", where="region=eu").status_code == 303
    page = locked.get(HERE).text
    assert "The share of version 3 is of the devices whose region is eu; other devices have version 2." in page
    assert send(locked, "roll-back", version="").status_code == 303
    assert send(locked, "roll-back", version="1").status_code == 303
    assert "no version: withdraw version 1" in locked.get(f"{HERE}/roll-back").text
    assert "no version was before version 1" in send(locked, "roll-back", version="").text
    assert send(locked, "roll-back", version="withdraw").status_code == 303
    assert "version 1 was withdrawn, and no device is given any" in send(locked, "roll-back", version="").text
    done = [(one.number, one.share, one.kind) for one in store.model_history(*KEYBOARD)[2:]]
    back = "roll-back"
    assert done == [(2, 1.0, "promote"), (3, 0.05, "promote"), (2, 1.0, back), (1, 1.0, back), (1, 0.0, back)]
    assert all("erin" in one.actor for one in store.model_history(*KEYBOARD)[2:])
    assert locked.get(f"{HERE}/delete").status_code == 404


def test_viewers_strangers_and_forged_forms_change_no_model(store, released, locked):
    for path in ("/models", HERE, f"{HERE}/promote"):
        assert locked.get(path).status_code == 401
        assert "keyboard" not in locked.get(path).text
    assert locked.post(f"{HERE}/promote", data={"version": "3", "share": "1"}).status_code == 401
    log_in(locked, issue(store.database, "vera", Role.VIEWER)[1])
    assert "Promote" not in locked.get(HERE).text
    assert send(locked, "promote", version="3", share="1").status_code == 403
    log_in(locked, issue(store.database, "erin", Role.OPERATOR)[1])
    assert locked.post(f"{HERE}/promote", data={"version": "3", "share": "1", "csrf": "0" * 64}).status_code == 403
    for path in ("/populations/phones/models/camera", "/populations/phones/models/camera/promote"):
        assert locked.get(path).status_code == 404
    assert len(store.model_history(*KEYBOARD)) == 2


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
@pytest.mark.usefixtures("released")
def test_operator_promotes_a_model_in_a_browser(store, locked, browser, width, scheme):
    look_as(browser, width, scheme)
    origin = str(locked.base_url).rstrip("/")
    enter(browser, origin, issue(store.database, "erin", Role.OPERATOR)[1])
    browser.find_element(By.LINK_TEXT, "Models").click()
    shows(browser, "keyboard", "for a share", "20 %")
    sound(browser, origin, width)
    browser.find_element(By.LINK_TEXT, "keyboard").click()
    shows(browser, "version 1 80 %", "version 2 20 %", "0.912 0.902 to 0.922", "of the previous one 0.912")
    shows(browser, "version 1 57", "version 2 13 refused 2", "days before the last")
    sound(browser, origin, width)
    browser.find_element(By.PARTIAL_LINK_TEXT, "Promote").click()
    shows(browser, "Share of the devices")
    sound(browser, origin, width)
    browser.find_element(By.NAME, "share").send_keys("200%")
    press(browser, "Promote")
    shows(browser, "at most 1, which is all")
    browser.find_element(By.NAME, "share").clear()
    browser.find_element(By.NAME, "share").send_keys("5%")
    press(browser, "Promote")
    shows(browser, "version 3 5 %", "version 1 95 %")
    browser.find_element(By.PARTIAL_LINK_TEXT, "Roll back").click()
    shows(browser, "version 1, which all devices had before")
    sound(browser, origin, width)
    press(browser, "Roll back")
    shows(browser, "for all", "version 1 100 %")


def sound(browser, origin, width):
    assert broken_words(browser) == []
    refused = [one for one in browser.get_log("browser") if "422" not in one["message"]]
    assert refused == []
    assert_sound(browser, origin, width)
    assert not AXE.is_file() or violations(browser) == {}


def test_page_of_a_comparison_shows_differences_with_intervals(store, register, served, browser):
    found = {"compare.devices": 200.0, "compare.examples": 4120.0, "compare.loss.improved": 0.61}
    for name in ("compare.loss", "compare.loss.devices"):
        found |= {name: -0.0312, f"{name}.low": -0.0455, f"{name}.high": -0.0169}
    task = register(goal=1, rounds=3)
    play(served, (0.5,), devices=1)
    committed(store, task, 1)
    with store.database.writing() as records:
        made = records._connection.execute
        made(update(TASKS).values(algorithm="compare"))
        made(update(ROUNDS).where(ROUNDS.c.state == "committed").values(metrics=found))
    look_as(browser, 390)
    browser.get(f"{served.admin}/tasks/{task}")
    shows(browser, "evaluated model minus the other, on 200 devices", "-0.0312 -0.0455 to -0.0169", "61 % of devices")
    assert browser.find_elements(By.CSS_SELECTOR, "svg.chart") == []
    sound(browser, served.admin, 390)


NOON, DAY = 1_764_158_400.0, 86_400
HELLO = CheckIn(capabilities=CAPABILITIES, examples={"default": 10})


def saying(**stated):
    return msgspec.structs.replace(HELLO, **stated)


@pytest.fixture
def released_version(store, register, tmp_path):
    """Two versions of a model."""
    register(predicting_bundle(tmp_path / "predicting"), goal=1, rounds=9)
    for number in (1, 2):
        store.release_model(version(store, number, START + number))


@pytest.mark.every_engine
@pytest.mark.usefixtures("released_version")
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


@pytest.mark.usefixtures("released_version")
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
