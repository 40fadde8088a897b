"""The MLflow UI, in a real browser, shows a sweep: its trials under their parent, and block size against the results.

The screenshots are kept in outputs/test-screenshots.
"""

import json
import re
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest
from conftest import serve
from mlflow import MlflowClient

SCREENSHOTS = Path(__file__).resolve().parents[1] / "outputs" / "test-screenshots"

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()

PATIENCE = 120_000
"""Milliseconds for the UI to show something: a first visit on a busy machine is slow."""

PARAM, MEASURES = "draft.block_size", ("acceptance_length", "speedup")

SHOWS = """([x, y]) => {
    const plot = document.querySelector('[role=tabpanel][data-state=active] .js-plotly-plot')
    const same = (shown, wanted) => shown.length == wanted.length && shown.every((v, i) => Number(v) == wanted[i])
    return plot?.data?.[0] && same(plot.data[0].x, x) && same(plot.data[0].y, y)
}"""
"""Whether the open tab's plot has exactly these points."""


def show_sweep(tracking_uri: str, experiment_id: str, parent_run_id: str, out: Path) -> list[Path]:
    """Look at a sweep in the MLflow UI as a user would, and check what is there against the store.

    Args:
        tracking_uri: of the store; a server is started for it unless it is one.
        experiment_id: the sweep's experiment.
        parent_run_id: the sweep's run.
        out: folder for the screenshots.

    Returns:
        The screenshots: the run list, and the compare page for each of MEASURES.
    """
    from playwright.sync_api import sync_playwright

    client = MlflowClient(tracking_uri)
    children = client.search_runs([experiment_id], f"tags.`mlflow.parentRunId` = '{parent_run_id}'")
    trials = sorted(
        (run for run in children if set(MEASURES) <= set(run.data.metrics)), key=lambda run: int(run.data.params[PARAM])
    )
    assert trials, f"no trial of {parent_run_id} has {MEASURES}"
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as log, ExitStack() as stack:
        url = tracking_uri if tracking_uri.startswith("http") else stack.enter_context(serve(tracking_uri, Path(log)))
        browser = playwright.chromium.launch(executable_path=_browser(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1720, "height": 900})
        page.set_default_timeout(PATIENCE)
        try:
            shots = [_show_run_list(page, url, experiment_id, parent_run_id, children, out / "runs.png")]
            shots += _show_comparison(page, url, experiment_id, trials, out)
        except Exception:
            page.screenshot(path=out / "failure.png")
            raise
    return shots


def _show_run_list(page, url, experiment_id, parent_run_id, children, shot):
    page.goto(f"{url}/#/experiments/{experiment_id}/runs?workflowType=machine_learning")

    def row(run_id):  # its part with the name; the grid has another with the columns that scroll
        return page.locator(f"[role=row][row-id='{run_id}']", has=page.get_by_role("link"))

    row(parent_run_id).first.wait_for()
    close_assistant = page.get_by_role("button", name="Close", exact=True)
    if close_assistant.is_visible():
        close_assistant.click()
    for run in children:
        assert row(run.info.run_id).count() == 0, "a trial stands beside its parent"
    row(parent_run_id).locator("button").first.click()
    for run in children:
        row(run.info.run_id).first.wait_for()
    page.get_by_test_id("column-selection-dropdown").first.click()
    for column in (PARAM, *MEASURES):
        page.get_by_placeholder("Search columns").fill(column)
        exactly = re.compile(f"^{re.escape(column)}$")
        page.locator("[class*=tree-title]").filter(has_text=exactly).click()
    page.keyboard.press("Escape")
    page.wait_for_timeout(1000)  # the grid moves its rows into place
    page.screenshot(path=shot)
    return shot


def _show_comparison(page, url, experiment_id, trials, out):
    runs = quote(json.dumps([run.info.run_id for run in trials]))
    experiments = quote(json.dumps([experiment_id]))
    page.goto(f"{url}/#/compare-runs?runs={runs}&experiments={experiments}&workflowType=machine_learning")
    page.get_by_role("tab", name="Scatter Plot").click()
    for measure in MEASURES:
        for axis, name in (("x", PARAM), ("y", measure)):
            page.locator(f"#{axis}-axis-selector").click()
            page.get_by_role("option", name=name, exact=True).click()
        expected = [[int(run.data.params[PARAM]) for run in trials], [run.data.metrics[measure] for run in trials]]
        page.wait_for_function(SHOWS, arg=expected)
        page.wait_for_timeout(500)  # plotly draws after it has the data
        shot = out / f"compare_{measure}.png"
        page.screenshot(path=shot)
        yield shot


def _browser():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def browser():
    """Skips, visibly, where there is none."""
    if _browser() is None:
        pytest.skip("no chromium here; apt-get install chromium")
    pytest.importorskip("playwright.sync_api", reason="playwright isn't installed; pip install -e '.[test]'")


def test_the_ui_shows_a_sweep_with_its_trials_and_compares_them(browser, swept):
    client = MlflowClient(swept.tracking_uri)
    experiment = client.get_experiment_by_name("draftlab")
    name = f"sweep_block_size {swept.folder.name}"
    (parent,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")

    shots = show_sweep(swept.tracking_uri, parent.info.experiment_id, parent.info.run_id, SCREENSHOTS)

    assert [shot.name for shot in shots] == ["runs.png", "compare_acceptance_length.png", "compare_speedup.png"]
    assert all(shot.stat().st_size > 20_000 for shot in shots)
