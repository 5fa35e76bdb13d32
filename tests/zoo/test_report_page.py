"""The page of a comparison's report: well formed, loading nothing, and true."""

import json
import re
from html.parser import HTMLParser

import pytest
from report_cases import EDGES, PEERS, RECIPES, fake, good, only

from zoo.compare import report
from zoo.compare.report.palette import styles


class Reader(HTMLParser):
    """Whether every element is closed in its turn; the tags, the ids, the addresses, and what the scripts hold."""

    VOID = ("meta", "link", "input", "line", "polyline", "path", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "action", "data", "srcset")]
        assert not [key for key, _ in attrs if key.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)


@pytest.mark.parametrize("name", [*EDGES, "full"])
def test_the_page_is_well_formed_and_loads_nothing(name: str) -> None:
    results = EDGES.get(name) or fake()
    text = report.page(results)
    read = Reader(text)
    assert not read.open
    assert len(set(read.ids)) == len(read.ids)
    assert read.tags.count("script") == 2
    assert not [address for address in read.addresses if re.match(r"\s*(\w+:)?//|(?!data:,$)\w+:", address)]
    assert "@import" not in text
    assert "url(" not in text
    kept = json.loads(read.scripts[0])
    finite = json.loads(json.dumps(results).replace("NaN", "null"))
    assert kept == finite
    said = "".join(read.words)
    for row in results["rows"]:
        assert row["recipe"] in said
        assert row.get("error", "") in said


def test_the_page_shows_where_the_time_goes() -> None:
    text = report.page(fake(modes=("train",)))
    assert text.count('<div class="layers">') == len(RECIPES) + len(PEERS)
    assert "mixer 37%, mlp 31%" in text
    assert 'href="traces/a%20model.json.gz"' in text
    profile = {"kinds_ms": {"mixer": 1.0}, "layers_ms": [], "total_ms": 1.0, "trace": "javascript:alert(1)"}
    assert "javascript:" not in report.page(only([good() | {"profile": profile}])).partition("application/json")[0]


def test_profiles_say_whose_time_it_is_and_which_row() -> None:
    profile = {"kinds_ms": {"mixer": 6.0, "other": 4.0}, "layers_ms": [], "total_ms": 10.0, "unattributed_ms": 3.0}
    row = good(compile="model") | {"profile": profile, "step_ms": 1234.0}
    results = only([row, row | {"batch_size": 4}, row | {"dtype": "float32"}])
    text = report.page(results)
    assert "10 ms in kernels; the measured step took 1,234 ms; 30% unattributed" in text
    assert "mean of a few steps" in text
    for place in ("batch 16, bfloat16", "batch 4, bfloat16", "batch 16, float32"):
        assert f"<h3>deltanet-340m, train, length 2,048, {place}, compiled</h3>" in text
    on_cpu = ({"cuda": None}, {"device": "a processor", "cpu": "a processor"})
    for change in on_cpu:
        text = report.page(only([row], machine=results["machine"] | change)).partition("</main>")[0]
        assert "Time of the thread that steps" in text
        assert "10 ms of that thread" in text
        assert "in kernels" not in text
        assert "<h3>deltanet-340m, train, length 2,048, compiled</h3>" in text


def test_a_slow_product_is_not_zero() -> None:
    results = fake()
    assert "<dd>743 TFLOP/s</dd>" in report.page(results)
    results["machine"]["matmul_tflops"] = 0.04567
    assert "<dd>0.0457 TFLOP/s</dd>" in report.page(results)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out_in_light_and_dark() -> None:
    style = report.page(fake())
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    for part, side in ((light, "light"), (dark, "dark")):
        colour = dict(re.findall(r"--(\S+): (#\w{6})", part))
        for text in ("ink", "soft", "link", "bad"):
            assert min(contrast(colour[text], colour[back]) for back in ("paper", "card")) >= 4.5, (side, text)
        assert contrast(colour["alarm"], colour["alarm-card"]) >= 4.5
        for look in styles(fake()).values():
            assert contrast(getattr(look, side), colour["paper"]) >= 2.3, look
