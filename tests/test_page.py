"""The page: verdict first, everything escaped, small, and honest about what it leaves out."""

from __future__ import annotations

import itertools
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fakes import Work
from page_runs import make_run

from intune_callbacks.record import history
from intune_callbacks.record.card import end_card
from intune_callbacks.record.report import Report
from intune_callbacks.show.page.html import comparison_html, page_html
from intune_callbacks.show.page.runs import Run, read

graph_objects = pytest.importorskip("plotly.graph_objects")
pytest.importorskip("jinja2")

MEGABYTES = 1_000_000


class Reader(HTMLParser):
    """What a browser would make of the page: its text, its elements, and the data of its script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))


def page_of(folder: Path, **how: Any) -> tuple[Reader, dict[str, Any]]:
    report = make_run(folder, **how)
    return Reader(page_html(read(folder))), report


def plots_of(page: Reader, key: str = "course") -> dict[str, list[dict[str, Any]]]:
    """What is drawn in each plot, by its title, as plotly gets it: times in the place of their names."""
    figure = page.data[key]
    drawn: dict[str, list[dict[str, Any]]] = {}
    for number, title in enumerate(figure["layout"]["annotations"]):
        (name,) = re.findall(r"<b>(.*?)</b>", title["text"])
        of = [trace for trace in figure["data"] if trace["yaxis"] == f"y{number + 1 if number else ''}"]
        drawn[name] = [trace | {"x": figure["times"].get(str(trace["x"]), trace["x"])} for trace in of]
    return drawn


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(("mode", "model_s"), [("tune", 0.02), ("tune", 0.5), ("advise", 0.02), ("observe", 0.02)])
def test_the_verdict_comes_first_in_the_words_of_the_end_card(tmp_path: Path, mode: str, model_s: float) -> None:
    page, report = page_of(tmp_path, mode=mode, model_s=model_s)
    card = [line[8:].strip() for line in end_card(Report.from_json(report)).splitlines()]
    first, facts = re.split(r"\s{2,}", card[0], maxsplit=1)
    text = page.text.split("Before and after")[0]
    for line in (first, facts, *(told for told in card[1:] if told in (report["why"], report["next"]))):
        assert words(line) in text
    assert text.index(first) < text.index(" why ") < text.index(" next ")
    if model_s == 0.5:
        assert "the input pipeline is not the bottleneck; nothing was changed" in text


def test_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    page, report = page_of(tmp_path)
    before, after = report["before"], report["after"]
    factor = after["throughput_samples_per_s"] / before["throughput_samples_per_s"]
    assert f"throughput, samples/s {before['throughput_samples_per_s']:.0f} " in page.text
    assert f"× {factor:.2f}" in page.text
    decode = {stage["name"]: stage for stage in report["stages"]}
    first, now = (f"{decode['decode'][w]} (window {decode['decode.window'][w]})" for w in ("first", "current"))
    assert f"decode, workers {first} {now}" in page.text
    for name in ("data wait", "memory in use", "model time of a step", "CPUs for the input", "prefetch, depth"):
        assert name in page.text


def test_the_figures_are_what_plotly_understands(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path)
    drawn, figure = plots_of(page), page.data["course"]
    assert list(drawn) == [
        *("Throughput, samples/s", "Data wait", "Workers, stacked", "Windows and depths, items"),
        *("Busy, share of the workers' time", "Queue fill, share of the window", "Memory, GB", "CPUs for the input"),
    ]
    for title, traces in drawn.items():
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in traces), title
    # It refuses what it does not know.
    graph_objects.Figure({"data": [*itertools.chain(*drawn.values()), figure["hover"]], "layout": figure["layout"]})
    assert len({len(figure["hover"][key]) for key in ("x", "text", "customdata")}) == 1
    axes = [axis for name, axis in figure["layout"].items() if name.startswith("xaxis")]
    assert len(axes) == len(drawn) and [axis.get("matches") for axis in axes] == [None, *["x"] * (len(axes) - 1)]
    assert ("div", "course") in [(tag, given.get("id")) for tag, given in page.tags]


def test_what_is_drawn_is_what_was_decided(tmp_path: Path) -> None:
    page, report = page_of(tmp_path, decisions=80, restless=True)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    drawn, told = plots_of(page), page.data["course"]["hover"]
    assert drawn["Throughput, samples/s"][0]["y"] == [
        pytest.approx(line["observation"]["samples_per_s"], rel=1e-3) for line in lines
    ]
    stacked = {trace["name"]: trace["y"] for trace in drawn["Workers, stacked"]}
    assert stacked["decode"] == [line["after"]["decode"] for line in lines]
    assert told["customdata"] == [line["step"] for line in lines]
    for text, line in zip(told["text"], lines, strict=True):
        said = unescape(text.replace("\n", " "))
        assert line["reason"] in said
        assert ("refused: " + "; ".join(line["vetoes"]) in said) == bool(line["vetoes"])
        assert ("▲ changed" in said or "▽ taken back" in said) == line["applied"]
    marks = {trace["name"]: len(trace["x"]) for trace in drawn["Data wait"] if trace["mode"] == "markers"}
    assert marks["changed"] + marks["taken back"] == report["changes"]
    assert marks["refused"] == sum(bool(line["vetoes"]) for line in lines) > 0
    assert marks["taken back"] > 0


def test_advice_is_marked_as_advice(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, mode="advise")
    labels = {trace["name"] for trace in plots_of(page)["Throughput, samples/s"]}
    assert "advised" in labels and "changed" not in labels
    assert "mode advise (from argument)" in page.text


def test_the_bottleneck_is_marked_among_the_boxes(tmp_path: Path) -> None:
    fed, _ = page_of(tmp_path / "fed", decisions=15, decide_every_batches=10)
    starved, report = page_of(tmp_path / "starved", decisions=52, decide_every_batches=10, model_s=0.001)
    assert "bottleneck at first decode" in fed.text and "bottleneck model" in fed.text
    assert report["after"]["stage"] is not None, "the machine changed a moment ago: take another number of decisions"
    assert f"bottleneck {report['after']['stage']}" in starved.text and "bottleneck model" not in starved.text


HOSTILE = "</script><script>window.broken = 1</script><b>&\u2028@t --c0"


def test_names_and_reasons_are_never_markup(tmp_path: Path) -> None:
    stages = {HOSTILE: Work(0.1), "b": Work(0.05)}
    plain, _ = page_of(tmp_path / "plain", stages={"a": Work(0.1), "b": Work(0.05)})
    page, report = page_of(tmp_path / "hostile", stages=stages)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    # plotly reads markup, too: in its texts nothing of that is left.
    figure = page.data["course"]
    assert unescape(plots_of(page)["Workers, stacked"][0]["name"]) == HOSTILE
    texts = [*figure["hover"]["text"], *(trace["name"] for trace in figure["data"])]
    assert any("&lt;/script&gt;" in text for text in texts)
    assert not [text for text in texts if "<" in text]
    assert words(HOSTILE) in page.text
    path = tmp_path / "hostile" / "report.json"
    path.write_text(json.dumps(report | {"frozen": HOSTILE, "why": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    again = Reader(page_html(read(path.parent)))
    assert len(again.scripts) == len(plain.scripts) == 3
    assert again.text.count(words(HOSTILE)) >= 5
    assert words(HOSTILE) in again.text.split("Before and after")[0].split(" frozen ")[-1]


def test_a_run_of_ten_thousand_changes_and_refusals_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "WRITTEN", 20_000)  # else only each second refusal is in the file after a while
    report = make_run(tmp_path, 10_000, restless=True)
    assert report["changes"] > 5000
    text = page_html(read(tmp_path))
    assert len(text.encode()) < 6 * MEGABYTES
    page = Reader(text)
    told = page.data["course"]["hover"]["text"]
    changes = [text for text in told if "▲ changed" in text or "▽ taken back" in text]
    assert len(changes) == report["changes"]  # each can be hovered over
    assert "marks are drawn" in page.text and "characters are cut here" in page.text
    assert f"{len(told)} of 10000 decisions are drawn" in page.text
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    peak = max(json.loads(line)["observation"]["samples_per_s"] for line in lines)
    assert max(plots_of(page)["Throughput, samples/s"][0]["y"]) == pytest.approx(peak, rel=1e-3)


def as_ranks(folder: Path) -> list[Run]:
    """Two ranks: the second waits for its data."""
    reports = [make_run(folder / f"rank{rank}", 20, model_s=model_s) for rank, model_s in enumerate((0.5, 0.02))]
    told = {"wait_s": [0.001, 0.03], "model_s": [0.5, 0.02], "straggler": 1, "line": "rank 1 keeps the others waiting"}
    (folder / "rank0" / "report.json").write_text(json.dumps(reports[0] | {"ranks": told}))
    return read(folder)


def test_ranks_stand_side_by_side_and_the_straggler_is_named(tmp_path: Path) -> None:
    page = Reader(page_html(as_ranks(tmp_path)))
    assert "rank 1 straggler" in page.text and "rank 0 straggler" not in page.text
    assert page.text.count("rank 1 keeps the others waiting") == 2
    assert "Over time, rank 0" in page.text
    for traces in plots_of(page, "together").values():
        assert [trace["name"] for trace in traces] == ["rank 0", "rank 1"]


def test_settings_with_their_sources_and_a_warm_start_are_told(tmp_path: Path) -> None:
    report = make_run(tmp_path, 10)
    given = {"max_workers": {"value": 6, "source": "recipe"}, "cpus": {"value": None, "source": "default"}}
    warm = {"used": False, "from": "runs/night", "why": "12 CPUs then, 16 now"}
    (tmp_path / "report.json").write_text(json.dumps(report | {"settings": given, "warm_start": warm}))
    page = Reader(page_html(read(tmp_path)))
    assert "max_workers 6 (from recipe)" in page.text and "cpus None (from default)" in page.text
    assert "warm not started from runs/night: 12 CPUs then, 16 now" in page.text


def test_the_whole_run_is_in_the_head_and_starts_of_epochs_on_the_axis(tmp_path: Path) -> None:
    report = make_run(tmp_path, 10)
    whole = {"wall_s": 60.0, "throughput_samples_per_s": 12.5, "wait_frac": 0.5, "seam_s": 40.0, "first_batch_s": 3.0}
    hint = {"what": "shuffle holds <all> samples", "line": ".shuffle(2048)", "kind": "shuffle", "stage": ""}
    (tmp_path / "report.json").write_text(json.dumps(report | {"whole": whole, "hints": [hint, "odd"]}))
    history = tmp_path / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert {line["observation"]["seam_s"] for line in lines} == {0.0}
    plain = Reader(page_html(read(tmp_path)))
    assert "start of an epoch" not in plain.text
    for line in lines[3::4]:
        line["observation"]["seam_s"] = 0.7
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Reader(page_html(read(tmp_path)))
    head = page.text.split("Before and after")[0]
    assert "12.5 samples/s in " in head and "first batch after 3 s" in head
    assert "12.5 with the start of each epoch" in head
    assert "shuffle holds <all> samples" in page.text and ".shuffle(2048)" in page.text
    (starts,) = [t for t in plots_of(page)["Throughput, samples/s"] if t["name"] == "start of an epoch"]
    times = page.data["course"]["times"]["t"]
    assert starts["x"] == [pytest.approx(times[i], rel=1e-3) for i in range(3, len(lines), 4)]
    assert "start of an epoch" in page.text


def test_times_count_from_the_begin_of_the_run(tmp_path: Path) -> None:
    report = make_run(tmp_path, 40, warmup_batches=50)

    def first_s() -> float:
        return float(Reader(page_html(read(tmp_path))).data["course"]["times"]["t"][0])

    first = read(tmp_path)[0].lines[0]
    begun_s, warm_s = report["wall_s"] - read(tmp_path)[0].lines[-1]["at_s"], 1.0
    since_s = first_s()
    assert since_s > first["observation"]["elapsed_s"] + warm_s  # as what the card says: settled after
    assert since_s == pytest.approx(first["at_s"] + begun_s, abs=0.5)
    (tmp_path / "report.json").unlink()  # while it runs that is not known
    assert first_s() == pytest.approx(first["observation"]["elapsed_s"], rel=0.01)


def test_a_run_that_became_slower_is_red(tmp_path: Path) -> None:
    report = make_run(tmp_path, 10)
    (tmp_path / "report.json").write_text(json.dumps(report | {"verdict": "slower than before"}))
    page = Reader(page_html(read(tmp_path)))
    assert ("h1", {"class": "bad"}) in page.tags
    assert "SLOWER THAN BEFORE" in page.text and "-> COMPUTE-BOUND" not in page.text.split("Before and after")[0]


def test_two_runs_are_drawn_in_the_same_plots(tmp_path: Path) -> None:
    make_run(tmp_path / "off", 20, mode="observe")
    make_run(tmp_path / "on", 30)
    page = Reader(comparison_html(read(tmp_path / "off")[0], read(tmp_path / "on")[0]))
    drawn = plots_of(page, "together")
    assert list(drawn) == ["Throughput, samples/s", "Data wait"]
    for traces in drawn.values():
        graph_objects.Figure({"data": traces, "layout": page.data["together"]["layout"]})
        assert len(traces) == 2
    assert "mode observe tune differs" in page.text


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, decisions=10)
    linked = [given for _, given in page.tags if any(given.get(name) for name in ("src", "href", "action", "data"))]
    assert linked == [{"rel": "icon", "href": "data:,"}]
    assert page.scripts[1].count(".register([])") == 1  # of plotly.js only what draws lines is evaluated
    policy = next(given["content"] for tag, given in page.tags if given.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
