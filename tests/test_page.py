"""A page opens offline in a real browser, fetches nothing, and executes nothing from data."""

import html.parser
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from freescale import page
from freescale.cli.main import main
from freescale.data import synthetic

BROWSER = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
QUIET = ["--disable-component-update", "--disable-sync", "--no-first-run"]


def in_browser(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which("chromium"):
        pytest.skip("needs chromium")
    with tempfile.TemporaryDirectory() as profile:
        # In an empty network namespace, so that the page must open offline.
        command = ["unshare", "--net", *BROWSER, *QUIET, f"--user-data-dir={profile}", *options, path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


class Links(html.parser.HTMLParser):
    """Collects the resources that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.resources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.resources += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "object"):
            self.resources.append(tag)


def test_the_stats_page_opens_and_fetches_nothing(tmp_path: Path) -> None:
    synthetic.write_log(tmp_path / "data", "heavy", users=3000)
    assert (
        main(
            [
                "data",
                "stats",
                str(tmp_path / "data"),
                "--ranks",
                "8",
                "64",
                "--page",
                str(tmp_path / "deep" / "stats.html"),
            ]
        )
        == 0
    )
    text = (tmp_path / "deep" / "stats.html").read_text()
    links = Links()
    links.feed(text)
    assert links.resources == []
    shown = in_browser(tmp_path / "deep" / "stats.html", "--dump-dom").stdout
    for heading in ("Bubbles of random batches", "Balanced batches", "Lengths", "Popularity"):
        assert f"<h2>{heading}</h2>" in shown
    assert shown.count("<svg") == 3
    shot = tmp_path / "shot.png"
    in_browser(tmp_path / "deep" / "stats.html", f"--screenshot={shot}", "--window-size=1000,1800")
    assert shot.stat().st_size > 20_000


def test_text_from_data_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</title><script>document.title='owned'</script>"
    series = [page.Series(evil, [1.0, 2.0], [3.0, 4.0]), page.Series("b", [1.0], [2.0])]
    chart = page.line_chart(series, page.Axis(evil), page.Axis(evil))
    text = page.document(evil, evil, page.section(evil, evil, page.table([evil], [[evil]]), chart))
    assert "<script" not in text
    (tmp_path / "x.html").write_text(text)
    assert "<title>owned" not in in_browser(tmp_path / "x.html", "--dump-dom").stdout


def test_larger_values_are_drawn_higher_and_read_in_the_unit_of_the_axis() -> None:
    series = [page.Series("share", [1.0, 2.0], [0.25, 0.5])]
    drawn = page.line_chart(series, page.Axis("step"), page.Axis("of all", percent=True))
    low, high = (float(height) for height in re.findall(r'cy="([\d.]+)"', drawn))
    assert high < low, "from the top"
    assert "share: 1, 25%" in drawn
    assert ">50%</text>" in drawn


def test_a_heat_map_is_darkest_where_the_value_is_largest() -> None:
    drawn = page.heat_map(["0", "1"], ["9"], [[80.0], [20.0]], rows="rank", axis="step", unit="%")
    cells = re.findall(r'fill="#(\w{6})".*?<title>rank (\d), 9: ([\d.]+) %', drawn)
    assert [(rank, value) for _, rank, value in cells] == [("0", "80.00"), ("1", "20.00")]
    brightness = [sum(bytes.fromhex(colour)) for colour, _, _ in cells]
    assert brightness[0] < brightness[1]


@pytest.mark.parametrize("values", [[0.0], [5.0], [0.0, 0.0], [1e-9, 1e12], [3.0, 3.0, 3.0]])
@pytest.mark.parametrize("log", [False, True])
def test_charts_accept_any_values(values: list[float], log: bool) -> None:
    positions = [float(i + 1) for i in range(len(values))]
    drawn = page.line_chart([page.Series("s", positions, values)], page.Axis("x", log=log), page.Axis("y", log=log))
    numbers = [float(n) for n in re.findall(r'c[xy]="(-?[\d.]+)"', drawn)]
    assert len(numbers) == 2 * len(values)
    assert all(0 <= number <= 640 for number in numbers)
    page.histogram([1.0, 2.0, 3.0], [0.0, 5.0], page.Axis("x", log=log), page.Axis("y"))
