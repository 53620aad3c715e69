"""The page with sliders: a real browser recomputes the plan, and its numbers are Python's."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import pytest
from ranks import LIMIT

from fn.__main__ import main
from fn.planner import page, traffic
from fn.planner.methods import methods, rows
from fn.planner.network import Cost, Link, network
from fn.planner.predict import plan

LINE = "plan --params 1.3e9 --world 64 --per-node 8 --intra 900gbit --inter 10gbit --compute 350ms"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ROW = re.compile(r'<tr data-name="([^"]*)" data-topology="([^"]*)" data-step="([\d.e+-]+)" data-bytes="([\d.e+-]+)"')

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs an installed chromium")


class Setting(NamedTuple):
    """Where the sliders are; the names are those in the page's address."""

    params: int
    world: int
    node: int
    intra: float
    intraLatency: float
    inter: float
    interLatency: float
    compute: float
    round: int


OPENED = Setting(1_300_000_000, 64, 8, 9e11, 5e-6, 1e10, 3e-5, 0.35, 100)
FEW = [
    OPENED,
    OPENED._replace(inter=1e8, compute=0.05, round=10),
    OPENED._replace(world=8, intra=7.2e12),  # which does not pay
    OPENED._replace(params=10**6, world=2, node=1, interLatency=1e-2, compute=0.01),
]
MANY = [
    Setting(10**6, 4096, 8, 1e11, 5e-6, 1e8, 3e-5, 0.01, 100),
    Setting(2_000_000, 256, 2, 1e10, 5e-6, 1e9, 3e-5, 0.005, 10),
    Setting(50_000_000, 1024, 4, 1e11, 1e-6, 1e10, 1e-5, 0.02, 1),
    Setting(200_000_000, 8, 8, 2e10, 5e-6, 1e10, 3e-5, 0.05, 30),
    Setting(500_000_000_000, 512, 8, 7e12, 2e-6, 4e11, 1e-5, 5.0, 200),
    Setting(10**12, 16, 4, 9e11, 5e-6, 1e10, 1e-3, 20.0, 500),
]


def opened(path: Path, setting: Setting, profile: Path) -> str:
    """Return the page's document once its script has run."""
    flags = f"--headless --no-sandbox --disable-gpu --virtual-time-budget=3000 --user-data-dir={profile} --dump-dom"
    address = f"{path.as_uri()}#{urlencode(setting._asdict())}"
    return subprocess.run(
        [str(BROWSER), *flags.split(), address], capture_output=True, text=True, timeout=LIMIT, check=True
    ).stdout


def check(path: Path, setting: Setting, profile: Path) -> None:
    document = opened(path, setting, profile)
    found = {(name, topology): (float(step), float(size)) for name, topology, step, size in ROW.findall(document)}
    net = network(*setting[1:3], Cost(setting.intraLatency, setting.intra), Cost(setting.interLatency, setting.inter))
    said = methods(traffic.model(setting.params), net, local_steps=setting.round)
    made = plan(said, net, setting.compute, setting.params, memory=1.6e13)
    assert set(found) == {(p.method.name, p.method.topology) for p in made.predictions}
    for p in made.predictions:
        step, size = found[p.method.name, p.method.topology]
        assert step == pytest.approx(p.step, rel=0.02), (setting, p.method.name, p.method.topology)
        assert size == pytest.approx(p.method.size, rel=0.02), (setting, p.method.name, p.method.topology)
    assert ("Compression pays: " in document.partition("<script>")[0]) == made.pays
    assert 'id="chart" role="img"' in document
    assert document.count('<rect class="exposed"') == len({name for name, _ in found})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a page of a small table, as it takes a while to count everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "PARAMS", (10**6, 10**9))
        patch.setattr(page, "WORLDS", (2, 8, 64))
        patch.setattr(page, "NODES", (1,))
        path = tmp_path_factory.mktemp("small") / "plan.html"
        main([*LINE.split(), "--html", str(path)])
    return path


@needs_browser
@pytest.mark.parametrize("setting", FEW)
def test_the_browser_plans_as_python_does(setting, small, tmp_path):
    check(small, setting, tmp_path)


def test_the_page_needs_nothing_from_elsewhere(small):
    text = small.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|@import|<link|src=", text)
    assert "COEFFICIENTS" not in text
    assert text.count("<script>") == text.count("</script>") == 1


def test_the_template_names_no_method():
    template = files("fn.planner").joinpath("page.html").read_text(encoding="utf-8")
    for name in {row.name.partition(",")[0] for row in rows()}:
        assert name not in template


@pytest.mark.slow
@needs_browser
def test_the_whole_page_plans_as_python_does(tmp_path, capsys):
    path = tmp_path / "plan.html"
    main([*LINE.split(), "--html", str(path)])
    assert path.stat().st_size < 300_000
    for setting in FEW + MANY:
        check(path, setting, tmp_path / "profile")


GRID = [10**6, 10**7, 10**8, 10**9, 10**10]


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (lambda n: 4 * n, [0]),
        (lambda n: 100 * n**0.5, [0, 1, 4]),  # a power, and the place that is always there
        (lambda n: n + 2e8, [0, 1, 2, 3, 4]),
        (lambda n: n * (1 + (n > 10**8)), [0, 1, 2, 3, 4]),
    ],
)
def test_bytes_are_known_where_a_power_does_not_say_them(size, places):
    def counts(i):
        return {("data", "all_gather"): ((1, 0), round(size(GRID[i])))}

    ((key, there, curve),) = page.knots(counts, GRID, 4, 1)
    assert key == ("data", "all_gather")
    assert there == pytest.approx(size(GRID[1]) / GRID[1], rel=1e-4)
    assert [place for place, *_ in curve] == places


def test_a_collective_that_only_some_models_have_is_exact_where_it_begins():
    def counts(i):
        return {("data", "all_gather"): ((1, 0), 4 * GRID[i])} if i > 2 else {}

    ((_, _, curve),) = page.knots(counts, GRID, 4, 0)
    assert {place: part for place, part, *_ in curve} == {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0}


DOCUMENT = """
const written = [], nothing = () => new Proxy(function () {}, {
  get: (target, name) => name === Symbol.toPrimitive ? () => "" : name === "clientWidth" ? 640 : nothing(),
  set: (target, name, value) => { if (name === "innerHTML") written.push(value); return true; },
  apply: nothing,
});
const document = { getElementById: nothing, createElement: nothing, querySelectorAll: () => [] };
const location = { hash: "" }, history = { replaceState() {} }, window = { addEventListener() {} };
"""
"""A document in which everything is there and nothing happens, but that what is written is kept."""

MEASURED = Link(Cost(2e-5, 5e9), {"all_reduce": Cost(1e-5, 4e9), "all_gather": Cost(4e-5, 7e9)})
WITHOUT_LATENCY = Link(Cost(0.0, 1e9), {"all_reduce": Cost(2e-4, 8e8), "all_gather": Cost(1e-4, 2e9)})


@pytest.mark.skipif(shutil.which("node") is None, reason="needs an installed node")
@pytest.mark.parametrize(
    "net", [network(8, 8, MEASURED), network(8, 2, MEASURED, WITHOUT_LATENCY), network(8, 4, Cost(1e-5, 1e9), MEASURED)]
)
@pytest.mark.parametrize("local_steps", [1, 30])
def test_the_script_plans_as_python_does_on_links_that_were_measured(net, local_steps, monkeypatch):
    """Each collective has a cost of its own then, and coding its seconds; where nothing is slid, it is the plan."""
    monkeypatch.setattr(page, "PARAMS", (10**6, 10**9))
    monkeypatch.setattr(page, "WORLDS", (2, 8))
    monkeypatch.setattr(page, "NODES", (1, 2))

    def coding(net):
        return {"onebit_adam": 0.01 * net.world, "onebit_adam (two-level)": 0.3, "adamw, int8 gradients": 0.02}

    said = {"compute": 0.5, "params": 10**7, "memory": 1e11}
    model = {"tensors": 150, "width": 4, "bucket": traffic.BUCKET}
    table = rows(local_steps=max(2, local_steps))
    html = page.write(table, net, local_steps=local_steps, coding=coding, **said, **model)
    script = html.partition("<script>")[2].partition("</script>")[0]
    told = subprocess.run(
        ["node", "-e", f"{DOCUMENT}{script}\nconsole.log(written.join('\\n'))"],
        capture_output=True, text=True, timeout=LIMIT, check=True,
    ).stdout  # fmt: skip
    found = {(name, topology): (float(step), float(size)) for name, topology, step, size in ROW.findall(told)}
    compared = methods(traffic.model(10**7), net, local_steps=local_steps)
    made = plan(compared, net, 0.5, 10**7, memory=1e11, coding=coding(net))
    assert set(found) == {(p.method.name, p.method.topology) for p in made.predictions}
    for p in made.predictions:
        numbers = found[p.method.name, p.method.topology]
        assert numbers == pytest.approx((p.step, p.method.size), rel=0.02), p.method.label
