"""The page of a report in a real browser: it sorts, fits a phone, follows dark mode, loads nothing."""

import json
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from report_cases import fake

from zoo.compare import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {', '.join(BROWSERS)}")

# Runs first in the page: keeps what goes wrong.
WATCH = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
console.error = (...words) => wrong.push(words.join(" "));
</script>"""

# Runs last in it: uses the page, and tells the frame around it what came of that.
USE = """<script>
const table = document.querySelector(".sortable table");
const heads = [...table.tHead.rows[0].cells];
const at = (name) => heads.findIndex((head) => head.textContent === name);
const column = (name) => [...table.tBodies[0].rows].map((row) => row.dataset.failed !== undefined ? "failed"
  : row.cells[at(name)].dataset.value);
const press = (name) => heads[at(name)].querySelector("button").click();
const sorted = {};
for (const [name, times] of [["tokens/s", 1], ["tokens/s", 1], ["recipe", 1], ["compile cold s", 1]]) {
  press(name);
  const order = heads[at(name)].getAttribute("aria-sort");
  sorted[`${name} ${order}`] = column(name);
}
const one = document.querySelectorAll("[aria-sort]").length;
const shown = (part) => part.getClientRects().length > 0;
const seen = (...selectors) => selectors.map((one) => [...document.querySelectorAll(one)].filter(shown).length);
const before = seen("g.s0", "tr.s0", "g.eager", "tr.row-train");
for (const name of ["show-s0", "show-eager", "row-train"]) document.getElementById(name).click();
const after = seen(".chart .s0", "tr.s0", "g.eager", "tr.row-train", ".key g.s0");
const wide = [...document.querySelectorAll("body *")].filter((part) => !part.closest(".scroll")
  && part.getBoundingClientRect().right > innerWidth + 1).map((part) => part.tagName + "." + part.className);
const told = {
  sorted, one, before, after, wide, wrong, width: innerWidth, scroll: document.documentElement.scrollWidth,
  paper: getComputedStyle(document.body).backgroundColor, saved: document.getElementById("download").href,
  sticky: getComputedStyle(table.tBodies[0].rows[0].cells[0]).position,
  loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
};
parent.postMessage(JSON.stringify(told), "*");
</script>"""

# A window is never as narrow as a phone: a frame in it is.
FRAME = """<body style="margin:0"><iframe style="width:390px;height:844px;border:0" srcdoc="{page}"></iframe><pre></pre>
<script>
addEventListener("message", (event) => {{ document.querySelector("pre").textContent = event.data; }});
</script>"""


def browse(results: dict[str, Any], folder: Path, *options: str) -> dict[str, Any]:
    page = report.page(results).replace("<head>", f"<head>{WATCH}").replace("</body>", f"{USE}</body>")
    path = folder / "frame.html"
    path.write_text(FRAME.format(page=escape(page, quote=True)), encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
               "--virtual-time-budget=2000", *options, "--dump-dom", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(unescape(done.stdout.partition("<pre>")[2].partition("</pre>")[0]))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = fake(modes=("train", "decode"), lengths=(2048, 16384))
    results["rows"][0]["recipe"] = "</script><img src=x onerror=alert(1)>" + "long" * 40
    return browse(results, tmp_path_factory.mktemp("browser"))


def test_nothing_goes_wrong_and_nothing_is_loaded(told: dict[str, Any]) -> None:
    assert told["wrong"] == []
    assert told["loaded"] == []
    assert told["saved"].startswith("blob:")


def test_the_table_sorts_by_number_and_by_word_with_failures_last(told: dict[str, Any]) -> None:
    assert list(told["sorted"]) == [
        "tokens/s descending", "tokens/s ascending", "recipe ascending", "compile cold s descending",
    ]  # fmt: skip
    assert told["one"] == 1
    for name, column in told["sorted"].items():
        failed = column.index("failed")
        assert set(column[failed:]) == {"failed"}
        values = [value for value in column[:failed] if value]
        assert values == column[: len(values)]  # those without a value follow
        keys = [value.lower() if "recipe" in name else float(value) for value in values if not value.startswith("<")]
        assert len(set(keys)) > 3
        assert [*map(str, keys)] == [*map(str, sorted(keys, reverse="descending" in name))]


def test_ticks_hide_lines_and_rows(told: dict[str, Any]) -> None:
    assert min(told["before"]) > 0
    assert told["after"] == [0, 0, 0, 0, 1]


def test_a_phone_scrolls_the_tables_alone(told: dict[str, Any]) -> None:
    assert told["width"] == 390
    assert told["scroll"] <= 390
    assert told["wide"] == []
    assert told["sticky"] == "sticky"


def test_dark_mode(told: dict[str, Any], tmp_path: Path) -> None:
    small = fake(modes=("train",), lengths=(2048,), recipes=("deltanet-340m",))
    small["rows"].append(small["rows"][0] | {"recipe": "other", "length": 4096})
    dark = browse(small, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert (told["paper"], dark["paper"]) == ("rgb(255, 255, 255)", "rgb(18, 22, 27)")
