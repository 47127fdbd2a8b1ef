"""The picture that the module draws in a real browser, from snapshots that no cluster had."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import drawing
import pytest
from browser import new_page, why_not
from drawing import Drawing

from hpcgpu.existing_clusters.snapshot import Snapshot
from tests.conftest import wait_until

MARKUP = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def one_page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page for all tests of this module; each draws anew."""
    if reason := why_not():
        pytest.skip(f"no browser test can run here: {reason}")
    with new_page(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def picture(one_page: Any) -> Drawing:
    one_page.goto("about:blank")
    return Drawing(one_page)


def test_it_shows_state_size_clock_bill_and_why_a_job_waits_and_when_it_is_expected(picture: Drawing) -> None:
    picture.draw(drawing.snapshot())
    words = " ".join(picture.whole.inner_text().split())
    for text in ("flights running", "Workers 4", "GPUs 4", "Time left 1 h 47 min", "GPU hours 1.02"):
        assert text in words, words
    row = picture.whole.locator("tr", has_text="flights-3").inner_text()
    assert "waits behind jobs with a higher priority [Priority]" in row and "(the queue's estimate)" in row
    assert "default: 4 jobs (adapts from 0 to 8 jobs), 0.9 of 20 GPU hours used; 240 tasks wait" in words
    assert "3 running 1 waiting 1 ended" in words
    assert "4 GPUs, 1 idle, mean utilisation 57 %" in words and "idle for 4 min" in words


def test_a_job_that_the_queue_does_not_estimate_shows_what_is_usual_or_that_nothing_is_known(picture: Drawing) -> None:
    jobs = [drawing.job(1, "pending", usual_wait=360.0), drawing.job(2, "pending")]
    picture.draw(drawing.snapshot(jobs=jobs))
    assert "usually after 6 min" in picture.whole.locator("tr", has_text="flights-1").inner_text()
    assert "not known" in picture.whole.locator("tr", has_text="flights-2").inner_text()


def test_the_time_of_a_restart_does_not_repeat_the_alerts(picture: Drawing) -> None:
    for seconds in (5, 7):
        picture.draw(drawing.snapshot(warnings=["a job has failed"], restart=[f"the scheduler ended {seconds} s ago"]))
        if seconds == 5:
            alert = picture.whole.get_by_role("alert").filter(has_text="a job has failed")
            assert "s ago" not in alert.inner_text()
            first = alert.locator("p").element_handle()
    assert picture.whole.get_by_text("the scheduler ended 7 s ago").count() == 1
    assert first.evaluate("one => one.isConnected"), "a screen reader would read it again"


def test_what_is_not_known_is_shown_as_such(picture: Drawing) -> None:
    device = dataclasses.replace(drawing.gpu(1, 0), utilization=None, memory_used=None, power=None)
    picture.draw(drawing.snapshot(time_left=None, devices=[device], problem="the queue does not answer"))
    words = " ".join(picture.whole.inner_text().split())
    assert "Time left not known" in words and "the queue does not answer" in words
    assert picture.whole.locator(".hpcgpu-gpu", has_text="flights-1-0").inner_text().count("not known") == 2


def test_text_of_others_is_shown_as_text(picture: Drawing) -> None:
    device = dataclasses.replace(drawing.gpu(1, 0, idle=5.0), worker=MARKUP, node=MARKUP, model=MARKUP, job=MARKUP)
    picture.draw(
        drawing.snapshot(
            name=MARKUP,
            state=MARKUP,
            dashboard="javascript:window.broken=1",
            problem=MARKUP,
            warnings=[MARKUP],
            groups=[drawing.group(name=MARKUP, reason=MARKUP, paused=MARKUP), drawing.group(name="other")],
            jobs=[drawing.job(1, "pending", MARKUP, name=MARKUP, node=MARKUP)],
            devices=[device],
        )
    )
    picture.page.evaluate("html => { window.answer = () => html }", MARKUP)
    picture.whole.get_by_role("button", name=MARKUP).click()
    log = picture.whole.locator("pre")
    picture.page.wait_for_function("() => document.querySelector('.hpcgpu pre').textContent.includes('script')")
    assert log.inner_text() == MARKUP
    assert picture.whole.locator("script, img").count() == 0
    assert picture.page.evaluate("() => window.broken === undefined")
    assert picture.whole.locator("a:visible").count() == 0, "a link of another kind is not shown"
    picture.draw(drawing.snapshot(dashboard="//elsewhere.example/status"))
    assert picture.whole.locator("a:visible").count() == 0, "nor one to another site that looks like a path of this one"


def test_an_empty_log_is_read_again_until_something_is_written(picture: Drawing) -> None:
    picture.draw(drawing.snapshot())
    whole, page = picture.whole, picture.page
    whole.get_by_role("button", name="flights-1", exact=True).click()
    whole.get_by_text("Nothing is written yet.").wait_for()
    page.evaluate("() => { window.answer = () => 'dask cuda worker' }")
    picture.draw(drawing.snapshot())
    whole.locator("pre").get_by_text("dask cuda worker").wait_for()
    asked = picture.asked()
    picture.draw(drawing.snapshot())
    assert picture.asked() == asked, "a log with text is read when the user asks for it"


def test_a_thousand_jobs_are_a_summary_and_a_few_rows_and_all_of_them_on_request(picture: Drawing) -> None:
    picture.draw(drawing.thousand())
    whole = picture.whole
    assert whole.get_by_text("1,000 jobs: 800 running; 200 pending: Priority (200)").is_visible()
    assert whole.locator("tbody tr").count() == 10
    assert picture.page.evaluate("() => document.querySelectorAll('*').length") < 400
    assert "1,600 GPUs, 178 idle" in whole.inner_text()
    whole.get_by_role("button", name="Show all 1,000 jobs").press("Enter")
    assert whole.locator("tbody tr").count() == 1000
    assert whole.bounding_box()["height"] < 1400, "they scroll"
    whole.get_by_role("searchbox", name="Filter jobs").fill("flights-99")
    assert whole.locator("tbody tr").count() == 11
    picture.draw(drawing.thousand())
    assert whole.locator("tbody tr").count() == 11, "a new picture keeps what the user has chosen"
    whole.get_by_role("button", name="Show a few jobs").press("Enter")
    assert whole.locator("tbody tr").count() == 10


def test_the_timeline_counts_what_waited_ran_and_had_ended(picture: Drawing) -> None:
    now = drawing.NOW
    jobs = [
        drawing.job(1, submitted=now - 100, started=now - 60),
        drawing.job(2, "failed", submitted=now - 100, started=now - 60, ended=now - 30),
        drawing.job(3, "cancelled", submitted=now - 80, started=None, ended=now - 20),
        drawing.job(4, "pending", submitted=now - 10),
    ]
    picture.draw(drawing.snapshot(jobs=jobs))
    steps = picture.page.evaluate(
        "given => window.history_of(given.jobs, given.now)",
        {"jobs": drawing.snapshot(jobs=jobs).as_json()["jobs"], "now": now},
    )
    assert [(s["time"] - now, s["waiting"], s["running"], s["ended"]) for s in steps] == [
        (-100, 2, 0, 0),
        (-80, 3, 0, 0),
        (-60, 1, 2, 0),
        (-30, 1, 1, 1),
        (-20, 0, 1, 2),
        (-10, 1, 1, 2),
    ]
    assert "now 1 wait, 1 run, 2 have ended" in picture.whole.get_by_role("img").first.get_attribute("aria-label")


def test_the_controls_work_by_keyboard_and_ask_before_the_cluster_stops(picture: Drawing) -> None:
    picture.draw(drawing.snapshot())
    whole, page = picture.whole, picture.page
    whole.get_by_label("Size of the cluster").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("6")
    picture.draw(drawing.snapshot())
    assert whole.get_by_label("Size of the cluster").input_value() == "6", "a new picture keeps what was typed"
    page.keyboard.press("Tab")
    page.keyboard.type("G")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    whole.get_by_text("Scale: done.").wait_for()
    whole.get_by_role("button", name="Stop").press("Enter")
    question = whole.get_by_role("alertdialog")
    assert "Its 4 jobs end, and the data on its workers is lost" in question.inner_text()
    page.keyboard.press("Escape")
    assert picture.asked() == [["scale", {"gpus": 6, "worker_group": "default"}]]
    whole.get_by_role("button", name="Stop").press("Enter")
    question.get_by_role("button", name="Stop the cluster").press("Enter")
    whole.get_by_text("Stopped.").wait_for()
    assert picture.asked()[1:] == [["stop"]]


def test_an_error_of_a_control_is_shown_until_the_next_request(picture: Drawing) -> None:
    picture.draw(drawing.snapshot())
    whole = picture.whole
    whole.get_by_label("Size of the cluster").fill("")
    whole.get_by_role("button", name="Scale").click()
    error = whole.get_by_role("alert").filter(has_text="write a whole number")
    error.wait_for()
    picture.draw(drawing.snapshot())
    assert error.is_visible()
    picture.page.evaluate("() => { window.answer = () => { throw new Error('the cluster has no such group') } }")
    whole.get_by_role("button", name="Adapt").click()
    whole.get_by_role("alert").filter(has_text="the cluster has no such group").wait_for()
    assert not error.is_visible()


def test_the_time_for_which_a_job_without_work_is_kept_is_a_field(picture: Drawing) -> None:
    counts_down = drawing.job(0, reason="idle; ends in 3 min if it stays idle")
    picture.draw(drawing.snapshot(jobs=[counts_down]))
    whole = picture.whole
    whole.get_by_text("idle; ends in 3 min if it stays idle").first.wait_for()
    whole.get_by_label("Fewest").fill("0")
    whole.get_by_label("Most").fill("2")
    limits = {"minimum_jobs": 0, "maximum_jobs": 2}
    whole.get_by_role("button", name="Adapt").click()
    whole.get_by_text("Adapt: done.").wait_for()
    assert picture.asked() == [["adapt", {**limits, "worker_group": "default"}]]
    whole.get_by_label("Keep a job without work for").fill("10m")
    whole.get_by_role("button", name="Adapt").click()
    wait_until(lambda: len(picture.asked()) == 2, "it is asked for")
    assert picture.asked()[1] == ["adapt", {**limits, "idle_timeout": "10m", "worker_group": "default"}]


def test_one_of_several_groups_is_chosen(picture: Drawing) -> None:
    groups = [drawing.group(), drawing.group(name="big memory", maximum=None, minimum=None, target=1)]
    picture.draw(drawing.snapshot(groups=groups))
    picture.whole.get_by_label("Worker group").select_option("big memory")
    picture.whole.get_by_role("button", name="Scale").click()
    picture.whole.get_by_text("Scale: done.").wait_for()
    assert picture.asked() == [["scale", {"jobs": 4, "worker_group": "big memory"}]]


def test_a_cluster_that_has_ended_shows_its_jobs_and_no_controls(picture: Drawing) -> None:
    picture.draw(drawing.snapshot(state="closed", devices=[], dashboard=""))
    assert picture.whole.get_by_role("button", name="Stop").count() == 0
    assert picture.whole.get_by_role("link").count() == 0
    assert picture.whole.locator("tbody tr").count() == 5


def test_all_controls_have_names_and_the_text_has_contrast_on_light_and_dark(picture: Drawing) -> None:
    picture.draw(drawing.snapshot(warnings=["a warning"]))
    unnamed = """() => [...document.querySelectorAll('.hpcgpu :is(button, input, select, svg, table)')].filter(
        (one) => one.checkVisibility() && !(one.getAttribute('aria-label') || one.textContent.trim())
    ).map((one) => one.outerHTML)"""
    assert picture.page.evaluate(unnamed) == []
    for scheme in ("light", "dark"):
        picture.page.emulate_media(color_scheme=scheme)
        for part in (".hpcgpu-about", ".hpcgpu td", ".hpcgpu-warning", ".hpcgpu th", ".hpcgpu button"):
            assert contrast(picture.page, part) >= 4.5, (scheme, part)
    picture.page.emulate_media(color_scheme="light")


def contrast(page: Any, part: str) -> float:
    """The contrast of a text, as WCAG measures it."""
    colours = page.evaluate(
        """part => {
            let one = [...document.querySelectorAll(part)].find((each) => each.checkVisibility());
            const text = getComputedStyle(one).color;
            while (getComputedStyle(one).backgroundColor === 'rgba(0, 0, 0, 0)') one = one.parentElement;
            const both = [text, getComputedStyle(one).backgroundColor];
            return both.map((colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number));
        }""",
        part,
    )
    light = []
    for colour in colours:
        red, green, blue = (c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
        light.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return float((max(light) + 0.05) / (min(light) + 0.05))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pictures_of_the_page_are_those_of_today(picture: Drawing, theme: str) -> None:
    picture.page.set_viewport_size({"width": 1100, "height": 900})
    picture.page.emulate_media(color_scheme=theme)
    picture.draw(drawing.snapshot(warnings=["job flights-4 (4174) failed on n07: exit code 1"]))
    drawing.kept(picture.whole, f"widget-{theme}.png")


def stretched() -> Snapshot:
    """A cluster with names and reasons as long as they may be, and many groups."""
    name, long = "a-name-that-is-as-long-as-that-of-a-cluster-may-be", "a_reason_of_a_site_without_any_space_in_it_" * 4
    node = "node-of-a-site.with-a-long.domain.example.org"
    jobs = [drawing.job(number, name=f"{name}-{number}", node=node, reason=f"waits: {long}") for number in range(4)]
    groups = [drawing.group(name=f"group-of-a-long-name-{number}" * 3, reason=long) for number in range(12)]
    devices = [dataclasses.replace(drawing.gpu(1, index), worker=f"{name}-1-{index}", node=node) for index in range(2)]
    return drawing.snapshot(name=name, jobs=jobs, groups=groups, warnings=[long], devices=devices)


@pytest.mark.parametrize("width", [1280, 840, 800, 620, 400])
@pytest.mark.parametrize("long", [False, True])
def test_in_a_narrow_output_everything_wraps_and_nothing_is_cut(picture: Drawing, width: int, long: bool) -> None:
    picture.page.set_viewport_size({"width": width, "height": 900})
    picture.draw(stretched() if long else drawing.snapshot())
    cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.className)"
    parts = picture.whole.locator(".hpcgpu-scroll, .hpcgpu-controls, .hpcgpu-gpus, .hpcgpu-gpu, td:last-child")
    assert parts.count() > 3 and parts.evaluate_all(cut) == []
    right = picture.whole.evaluate("(whole) => whole.getBoundingClientRect().right")
    ends = picture.whole.locator("button, input, select, .hpcgpu-note").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().right)"
    )
    assert max(ends) <= right <= width


#: A page of a notebook that was saved: a picture of the cluster, and the place of the live view. No server is needed.
SAVED = """<body><div id="place"></div><p id="picture">an old picture</p><script type="module">
import { showStored } from "./static/stored.js";
const [place, picture] = ["place", "picture"].map((name) => document.getElementById(name));
window.end = showStored(place, picture, BEFORE, "/");
</script></body>"""


@pytest.mark.parametrize("later", [False, True])
def test_an_old_picture_becomes_the_live_view_of_its_cluster_and_not_of_a_later_one_of_its_name(
    one_page: Any, later: bool
) -> None:
    before = drawing.snapshot()
    jobs = [dataclasses.replace(job, id=f"9{job.id}") for job in before.jobs] if later else before.jobs
    newest = dataclasses.replace(before, jobs=jobs).as_json()
    saved = {"name": before.name, "directory": before.directory, "jobs": [job.id for job in before.jobs]}

    def answer(route: Any) -> None:
        name = route.request.url.rpartition("/")[2]
        if "/api/" in route.request.url:
            route.fulfill(json=newest)
        elif "/static/" in route.request.url:
            route.fulfill(path=drawing.STATIC / name)
        else:
            route.fulfill(content_type="text/html", body=SAVED.replace("BEFORE", json.dumps(saved)))

    one_page.route("http://notebook.test/**", answer)
    try:
        with one_page.expect_response("**/api/clusters/flights"):
            one_page.goto("http://notebook.test/")
        with one_page.expect_response("**/api/clusters/flights"):
            pass  # it asks again, so the first answer has been shown
        assert one_page.get_by_role("button", name="Stop").count() == (0 if later else 1)
        assert one_page.get_by_text("an old picture").is_visible() is later
    finally:
        one_page.unroute("http://notebook.test/**")
        one_page.goto("about:blank")
