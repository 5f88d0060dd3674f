"""The report of a run in a real browser: charts are drawn on a light and a dark page, and nothing else is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.deploy.report.report_page import write_report
from asyncrl.deploy.report.run_record import read_run
from tests.browser.chromium import PROGRAM, browser_tab
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step
from tests.unit.deploy.report.test_worker_trace import TracedFleet, train

pytestmark = pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed: apt-get install chromium")

CHARTS = "document.querySelectorAll('.bk-Figure').length"
DRAWN = "[...document.querySelectorAll('.bk-Figure')].every(each => each.getBoundingClientRect().width > 250)"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    lines = [
        step(
            n,
            float(n),
            **{"time/training/busy": 0.5, "staleness/mean": 1.0, "staleness/max": 2.0, "mask/stale_fraction": 0.0},
        )
        for n in range(1, 30)
    ]
    samples = [replace(SAMPLE, step=n, text=f"<b>bold {n}</b>") for n in range(1, 30)]
    path = recorded_run(tmp_path / "run", lines, samples)
    fleet = TracedFleet(path / "logs")
    for number in range(5):
        train(fleet, number)
    fleet.close()
    write_report([read_run(path)], tmp_path / "report.html")
    return tmp_path / "report.html"


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (420, "dark")])
async def test_charts_are_drawn_and_nothing_is_loaded(report: Path, tmp_path: Path, width: int, scheme: str) -> None:
    async with browser_tab(tmp_path / "profile") as tab:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await tab.open(report.as_uri())
        await tab.until(f"{CHARTS} >= 6 && {DRAWN}")
        assert await tab.value(f"{CHARTS}") == 8  # Reward on three axes, staleness, masks, ages, states, timeline.
        assert "<b>bold 29</b>" in await tab.text()
        assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth")
        background = await tab.value("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        assert tab.complaints == []
        assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
