"""The page: verdict first, everything escaped, small, and honest about what it leaves out."""

from __future__ import annotations

import json
import re
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
from intune_callbacks.show.page.plot import Plot
from intune_callbacks.show.page.runs import Run, read

graph_objects = pytest.importorskip("plotly.graph_objects")

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


def test_no_axis_says_800m(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {}
    plot = Plot(columns, 100.0)
    for values, form in (([0.0, 0.8], ",~r"), ([900.0, 8042.0], ",~r"), ([5e3, 12e3], "~s")):
        line = plot.line("y", "y", "--c0", values, range(2))
        (figure,) = plot.figure("f", "f", [line])
        assert figure.spec["layout"]["yaxis"]["tickformat"] == form
    many = [plot.line(f"y{at}", "y", "--c0", [4e3], range(1), area="stacked") for at in range(3)]
    assert plot.figure("f", "f", many)[0].spec["layout"]["yaxis"]["tickformat"] == "~s"


def figure_values(data: dict[str, Any]) -> dict[str, Any]:
    """The figures as plotly gets them: columns and colours in the place of their names."""

    def resolved(value: Any, key: str = "") -> Any:
        if key == "meta":
            return value
        if isinstance(value, str):
            if value.startswith("@"):
                return data["columns"][value[1:]]
            return "#123456" if value.startswith("--") else value
        if isinstance(value, list):
            return [resolved(one) for one in value]
        return {name: resolved(one, name) for name, one in value.items()} if isinstance(value, dict) else value

    return {key: resolved(figure) for key, figure in data["figures"].items()}


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
    figures = figure_values(page.data)
    assert list(figures) == ["throughput", "wait", "workers", "windows", "busy", "fill", "memory", "cpus"]
    for key, figure in figures.items():
        graph_objects.Figure(figure)  # refuses what it does not know
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in figure["data"]), key
        assert ("div", key) in [(tag, given.get("id")) for tag, given in page.tags]


def test_what_is_drawn_is_what_was_decided(tmp_path: Path) -> None:
    page, report = page_of(tmp_path, decisions=80, restless=True)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    figures, decisions = figure_values(page.data), page.data["decisions"]
    assert figures["throughput"]["data"][0]["y"] == [
        pytest.approx(line["observation"]["samples_per_s"], rel=1e-3) for line in lines
    ]
    stacked = {trace["meta"]["label"]: trace["y"] for trace in figures["workers"]["data"]}
    assert stacked["decode"] == [line["after"]["decode"] for line in lines]
    assert decisions["step"] == [line["step"] for line in lines]
    assert [decisions["texts"][at] for at in decisions["reason"]] == [line["reason"] for line in lines]
    assert [decisions["texts"][at] for at in decisions["refused"]] == ["; ".join(line["vetoes"]) for line in lines]
    marks = {trace["meta"]["label"]: len(trace["x"]) for trace in figures["wait"]["data"] if trace["mode"] == "markers"}
    assert marks["changed"] + marks["taken back"] == report["changes"]
    assert marks["refused"] == sum(bool(line["vetoes"]) for line in lines) > 0
    assert marks["taken back"] > 0


def test_advice_is_marked_as_advice(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, mode="advise")
    labels = {trace["meta"]["label"] for trace in page.data["figures"]["throughput"]["data"]}
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
    assert page.data["figures"]["workers"]["data"][0]["meta"]["label"] == HOSTILE
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
    decisions = page.data["decisions"]
    changes = [kinds for kinds in decisions["kinds"] if kinds & 0b11]
    assert len(changes) == report["changes"]  # each can be hovered over
    assert "marks are drawn" in page.text and "characters are cut here" in page.text
    assert f"{len(decisions['step'])} of 10000 decisions are drawn" in page.text
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    peak = max(json.loads(line)["observation"]["samples_per_s"] for line in lines)
    assert max(figure_values(page.data)["throughput"]["data"][0]["y"]) == pytest.approx(peak, rel=1e-3)


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
    for key in ("together-throughput", "together-wait"):
        assert [trace["meta"]["label"] for trace in page.data["figures"][key]["data"]] == ["rank 0", "rank 1"]


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
    figures = figure_values(page.data)
    (starts,) = [t for t in figures["throughput"]["data"] if t["meta"]["label"] == "start of an epoch"]
    times = page.data["columns"]["t"]
    assert starts["x"] == [pytest.approx(times[i], rel=1e-3) for i in range(3, len(lines), 4)]
    graph_objects.Figure(figures["throughput"])
    assert "start of an epoch" in page.text


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
    assert list(page.data["figures"]) == ["together-throughput", "together-wait"]
    for figure in figure_values(page.data).values():
        graph_objects.Figure(figure)
        assert len(figure["data"]) == 2
    assert "mode observe tune differs" in page.text


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, decisions=10)
    linked = [given for _, given in page.tags if any(given.get(name) for name in ("src", "href", "action", "data"))]
    assert linked == [{"rel": "icon", "href": "data:,"}]
    assert page.scripts[1].count(".register([])") == 1  # of plotly.js only what draws lines is evaluated
    policy = next(given["content"] for tag, given in page.tags if given.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
